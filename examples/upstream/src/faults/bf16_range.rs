use crate::Finding;
use burn::tensor::{DType, Device, FloatDType, Tensor, module, ops::AttentionModuleOptions};

pub fn look(device: &Device) -> Finding {
    if !device.supports_dtype(FloatDType::BF16) {
        return Finding::NotApplicable("the device has no bf16".to_string());
    }
    // The mean of values that are all 2^17, which bf16 has and f16 has not.
    let all = |value: f32| Tensor::<4>::full([1, 2, 128, 64], value, (device, DType::BF16));
    let out = module::attention(all(0.0), all(0.0), all(131072.0), None, None, AttentionModuleOptions::default());
    let others = out.into_data().iter::<f32>().filter(|value| *value != 131072.0).collect::<Vec<_>>();
    let example = others.first().map_or(String::new(), |value| format!(", such as {value:e}"));
    Finding::new(!others.is_empty(), format!("{} of 16384 outputs are not 131072{example}", others.len()))
}
