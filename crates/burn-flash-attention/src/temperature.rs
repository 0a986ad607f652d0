//! The temperature of each head: an option that a predefined score function computes.

use crate::checks::{agree, same_device};
use crate::options::FlashAttentionOptions;
use crate::problem::dtype;
use burn::tensor::Tensor;
use flash_attention_kernels::AttentionError;
use flash_attention_kernels::mods::{ScoreFn, Temperature};
use std::borrow::Cow;

impl FlashAttentionOptions {
    /// The options with the temperature as a score function and its tensor, which keeps its dtype. Launches nothing.
    pub(crate) fn with_temperature_as_function(&self, q: &Tensor<4>) -> Result<Cow<'_, Self>, AttentionError> {
        let Some(temperature) = &self.temperature else { return Ok(Cow::Borrowed(self)) };
        let (heads, shape) = (q.dims()[1], temperature.dims());
        agree("temperature", &shape, (0, "num_heads_q"), ("q", heads))?;
        dtype("temperature", temperature.dtype())?;
        same_device("temperature", &temperature.device(), &q.device())?;
        if self.score_mod.is_some() || !self.score_tensors.is_empty() {
            return Err(AttentionError::Unsupported {
                option: "temperature",
                value: format!("a tensor of shape {shape:?} beside score_mod {:?}", self.score_mod),
                why: "the temperature is a score function itself: combine the functions as mods::Then<mods::Temperature, _>",
            });
        }
        let tensor = temperature.clone().reshape([1, heads, 1, 1]);
        let function = ScoreFn::of::<Temperature>();
        Ok(Cow::Owned(Self { temperature: None, ..self.clone() }.with_score_mod(function, [tensor])))
    }
}
