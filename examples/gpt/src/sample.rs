//! Lets a model write.

use crate::config::Config;
use crate::data::{Stream, VOCABULARY, rng};
use crate::model::Gpt;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand_distr::Distribution;
use rand_distr::weighted::WeightedIndex;

/// Below 1, likely bytes become likelier.
const TEMPERATURE: f64 = 0.8;

/// `config.sample_bytes` bytes, each drawn from what the model expects after those before it.
pub fn sample(model: &Gpt, config: &Config, device: &Device) -> String {
    let mut rng = rng(config.seed, Stream::Sample, 0);
    let mut text = vec![b'\n'];
    while text.len() <= config.sample_bytes {
        let window = &text[text.len().saturating_sub(config.context)..];
        // A window of one length keeps to kernels that are compiled already. What pads it lies after the last byte, where
        // causal attention does not look.
        let mut tokens: Vec<i32> = window.iter().map(|byte| i32::from(*byte)).collect();
        tokens.resize(config.context, 0);
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [1, config.context]), device);
        let logits = model.forward(tokens).narrow(1, window.len() - 1, 1).reshape([VOCABULARY]);
        let probabilities = softmax::<1>(logits / TEMPERATURE, 0).into_data();
        let next =
            WeightedIndex::new(probabilities.iter::<f32>()).map_or(b' ' as usize, |index| index.sample(&mut rng));
        text.push(next as u8);
    }
    String::from_utf8_lossy(&text[1..]).into_owned()
}
