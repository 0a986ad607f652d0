use crate::Finding;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Distribution, Tensor, module, ops::AttentionModuleOptions};

pub fn look(device: &Device) -> Finding {
    let device = &device.clone().autodiff();
    device.seed(1);
    let random = || Tensor::<4>::random([1, 2, 256, 64], Distribution::Normal(0.0, 1.0), device).detach();
    let (inputs, weights) = ([random(), random(), random()], random());
    let gradients = |attention: fn([Tensor<4>; 3]) -> Tensor<4>| {
        let inputs = inputs.clone().map(|input| input.require_grad());
        let gradients = (attention(inputs.clone()) * weights.clone()).sum().backward();
        inputs.map(|input| input.grad(&gradients).expect("inputs have gradients"))
    };
    let burn = gradients(|[q, k, v]| {
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        module::attention(q, k, v, None, None, options)
    });
    let composed = gradients(|[q, k, v]| {
        let hidden = Tensor::<2, Bool>::tril_mask([256, 256], 0, &q.device()).unsqueeze::<4>();
        softmax((q.matmul(k.transpose()) / 8.0).mask_fill(hidden, f32::NEG_INFINITY), 3).matmul(v)
    });
    let norm = |x: Tensor<4>| x.square().sum().sqrt().into_scalar::<f32>();
    let [dq, dk, dv] = [0, 1, 2].map(|i| norm(burn[i].clone() - composed[i].clone()) / norm(composed[i].clone()));
    let wrong = [dq, dk, dv].into_iter().any(|error| error.is_nan() || error > 0.02);
    Finding::new(wrong, format!("relative to composed operations dq is off by {dq:.1e}, dk {dk:.1e}, dv {dv:.1e}"))
}
