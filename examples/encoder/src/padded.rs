//! Before: burn-nn's encoder on a padded batch. All texts are as long as the longest.

use crate::data::{Batch, CLS, VOCAB};
use crate::train::{Classifier, Sizes};
use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

/// A text classifier.
#[derive(Module, Debug)]
pub struct Padded {
    tokens: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Classifier for Padded {
    fn new(sizes: &Sizes, device: &Device) -> Self {
        let Sizes { d_model, n_heads, n_layers, max_len, classes } = *sizes;
        let encoder = TransformerEncoderConfig::new(d_model, 4 * d_model, n_heads, n_layers);
        Padded {
            tokens: EmbeddingConfig::new(VOCAB, d_model).init(device),
            positions: EmbeddingConfig::new(max_len, d_model).init(device),
            encoder: encoder.with_norm_first(true).with_dropout(0.0).init(device),
            head: LinearConfig::new(d_model, classes).init(device),
        }
    }

    fn logits(&self, batch: &Batch, device: &Device) -> Tensor<2> {
        let (texts, longest) = (batch.texts.len(), batch.longest());
        let shape = [texts, longest];
        let padded = |text: &Vec<u16>| (0..longest).map(|at| i32::from(*text.get(at).unwrap_or(&CLS))).collect();
        let tokens: Vec<i32> = batch.texts.iter().flat_map::<Vec<_>, _>(padded).collect();
        let hidden: Vec<bool> = batch.texts.iter().flat_map(|text| (0..longest).map(|at| at >= text.len())).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, shape), device);
        let hidden = Tensor::<2, Bool>::from_data(TensorData::new(hidden, shape), device);
        let positions = Tensor::<1, Int>::arange(0..longest as i64, device).unsqueeze();

        let x = self.tokens.forward(tokens) + self.positions.forward(positions);
        let x = self.encoder.forward(TransformerEncoderInput::new(x).mask_pad(hidden));
        let [_, _, d_model] = x.dims();
        self.head.forward(x.narrow(1, 0, 1).reshape([texts, d_model]))
    }
}
