//! Causal self-attention.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Tensor};

#[derive(Module, Debug)]
pub struct SelfAttention {
    pub qkv: Linear,
    pub output: Linear,
    #[module(skip)]
    heads: usize,
}

impl SelfAttention {
    pub fn new(width: usize, heads: usize, device: &Device) -> Self {
        Self {
            qkv: LinearConfig::new(width, 3 * width).init(device),
            output: LinearConfig::new(width, width).init(device),
            heads,
        }
    }

    /// `x [batch, sequence, width]` → the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, sequence, width] = x.dims();
        let qkv = self.qkv.forward(x).reshape([batch, sequence, 3 * self.heads, width / self.heads]).swap_dims(1, 2);
        let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(1, part * self.heads, self.heads));

        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let y = attention(q, k, v, None, None, options);

        self.output.forward(y.swap_dims(1, 2).reshape([batch, sequence, width]))
    }
}
