//! After: flash attention on a packed batch. Texts lie one after the other in one row, and `cu_seqlens` says where each begins.

use crate::data::{Batch, VOCAB};
use crate::train::{Classifier, Sizes};
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_attention::{
    FlashAttentionOptions, FlashTransformerEncoder, FlashTransformerEncoderConfig, FlashTransformerEncoderInput,
};

/// The row ends at a multiple of so many tokens: kernels are compiled and tuned for fewer sizes. The rest belongs to no text.
const MULTIPLE: usize = 256;

/// A text classifier. Its fields are those of [`Padded`](crate::padded::Padded), whose file it loads.
#[derive(Module, Debug)]
pub struct Packed {
    tokens: Embedding,
    positions: Embedding,
    encoder: FlashTransformerEncoder,
    head: Linear,
}

impl Classifier for Packed {
    fn new(sizes: &Sizes, device: &Device) -> Self {
        let Sizes { d_model, n_heads, n_layers, max_len, classes } = *sizes;
        let encoder = FlashTransformerEncoderConfig::new(d_model, 4 * d_model, n_heads, n_layers);
        Packed {
            tokens: EmbeddingConfig::new(VOCAB, d_model).init(device),
            positions: EmbeddingConfig::new(max_len, d_model).init(device),
            encoder: encoder.with_norm_first(true).with_dropout(0.0).init(device),
            head: LinearConfig::new(d_model, classes).init(device),
        }
    }

    fn logits(&self, batch: &Batch, device: &Device) -> Tensor<2> {
        let row = batch.tokens().next_multiple_of(MULTIPLE);
        let mut tokens: Vec<i32> = batch.texts.iter().flatten().map(|token| i32::from(*token)).collect();
        let mut positions: Vec<i32> = batch.texts.iter().flat_map(|text| 0..text.len() as i32).collect();
        let mut begins = vec![0];
        begins.extend(batch.texts.iter().scan(0, |end, text| {
            *end += text.len() as i32;
            Some(*end)
        }));
        tokens.resize(row, 0);
        positions.resize(row, 0);
        let integers = |values| Tensor::<2, Int>::from_data(TensorData::new(values, [1, row]), device);
        let begins = Tensor::<1, Int>::from_data(begins.as_slice(), device);

        let x = self.tokens.forward(integers(tokens)) + self.positions.forward(integers(positions));
        let options = FlashAttentionOptions::new().with_cu_seqlens_q(begins.clone()).with_cu_seqlens_k(begins.clone());
        let x = self.encoder.forward(FlashTransformerEncoderInput::new(x).options(options));
        let [_, _, d_model] = x.dims();
        let texts = batch.texts.len();
        self.head.forward(x.select(1, begins.narrow(0, 0, texts)).reshape([texts, d_model]))
    }
}
