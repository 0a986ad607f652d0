use crate::Finding;
use burn::tensor::{Device, Distribution, Tensor, module, ops::AttentionModuleOptions};

pub fn look(device: &Device) -> Finding {
    let device = &device.clone().autodiff();
    let random = || Tensor::<4>::random([16, 12, 1024, 64], Distribution::Normal(0.0, 1.0), device);
    for call in 1..=3 {
        let (q, options) = (random().require_grad(), AttentionModuleOptions { is_causal: true, ..Default::default() });
        let out = module::attention(q.clone(), random(), random(), None, None, options);
        let gradient = q.grad(&out.sum().backward()).expect("q has a gradient");
        if let Err(error) = gradient.try_into_data() {
            return Finding::Shows(format!("call {call}: {error}"));
        }
    }
    Finding::DoesNotShow("three calls, forward and backward, came to an end".to_string())
}
