use crate::Finding;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

pub fn look(device: &Device) -> Finding {
    if !device.supports_dtype(FloatDType::BF16) {
        return Finding::NotApplicable("the device has no bf16".to_string());
    }
    // From -2 to 2, all of which bf16 has.
    let values: Vec<f32> = (0..4096).map(|i| (i % 257) as f32 / 64.0 - 2.0).collect();
    let data = TensorData::new(values.clone(), [4096]).convert_dtype(DType::BF16);
    let x = Tensor::<1>::from_data(data, (device, DType::BF16));
    let products = (x.clone() * x).into_data();
    let largest = |largest: f32, value: f32| if value <= largest { largest } else { value };
    let error = products.iter::<f32>().zip(&values).map(|(y, x)| (y - x * x).abs()).fold(0.0, largest);
    let rounding = 4.0 / 128.0;
    Finding::new(error.is_nan() || error > rounding, format!("x · x is off by {error:e}; rounding is up to {rounding:e}"))
}
