use crate::Finding;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

pub fn look(device: &Device) -> Finding {
    if !device.supports_dtype(FloatDType::BF16) {
        return Finding::NotApplicable("the device has no bf16".to_string());
    }
    let values: Vec<f32> = (0..4096).map(|i| 1.0 + i as f32 / 4096.0).collect();
    let nearest = TensorData::new(values.clone(), [4096]).convert_dtype(DType::BF16);
    let x = Tensor::<1>::from_data(TensorData::new(values, [4096]), (device, DType::F32));
    let found = x.cast(FloatDType::BF16).into_data();
    let others = found.iter::<f32>().zip(nearest.iter::<f32>()).filter(|(found, nearest)| found != nearest).count();
    Finding::new(others > 0, format!("{others} of 4096 conversions do not give the nearest bf16"))
}
