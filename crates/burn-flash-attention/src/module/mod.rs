//! burn-nn's attention and transformer modules with FlashAttention, to which a trained model migrates by changing types, and loads its file;
//! and the self-attention of models since Llama.
//!
//! ```text
//! self_attention   causal, with its own head_dim, rotary embedding and norms of queries and keys (rotary)
//! flash_decoder    decoder-only transformers of layers with it
//! latent_attention multi-head latent attention (MLA)
//!
//! multi_head   self- and cross-attention over one width        encoder   layers of self-attention and feed-forward
//! cross        cross-attention over two widths                 decoder   the same with cross-attention between them
//! cache        keys and values so far, for decoding        steps     what options mean for new positions alone
//! settings     options that a module sets for every call
//! ```

mod cache;
mod cross;
mod decoder;
mod encoder;
mod flash_decoder;
mod latent_attention;
mod multi_head;
mod rotary;
mod self_attention;
mod settings;
mod steps;

pub use cache::FlashMhaCache;
pub use cross::{FlashCrossAttention, FlashCrossAttentionCache, FlashCrossAttentionConfig};
pub use decoder::{
    FlashTransformerDecoder, FlashTransformerDecoderAutoregressiveCache, FlashTransformerDecoderConfig,
    FlashTransformerDecoderInput, FlashTransformerDecoderLayer,
};
pub use encoder::{
    FlashTransformerEncoder, FlashTransformerEncoderAutoregressiveCache, FlashTransformerEncoderConfig,
    FlashTransformerEncoderInput, FlashTransformerEncoderLayer,
};
pub use flash_decoder::{
    FlashDecoder, FlashDecoderCache, FlashDecoderConfig, FlashDecoderLayer, FlashDecoderLayerConfig, Mlp,
    MlpActivation, MlpConfig,
};
pub use latent_attention::{FlashLatentAttention, FlashLatentAttentionConfig};
pub use multi_head::{FlashMhaInput, FlashMhaOutput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig};
pub use rotary::{RotaryAngles, RotaryEmbedding, RotaryEmbeddingConfig, RotaryScaling};
pub use self_attention::{FlashSelfAttention, FlashSelfAttentionConfig, FlashSelfAttentionInput};

use crate::checks::unwrapped;
use crate::options::FlashAttentionOptions;
use burn::nn::{Dropout, LayerNorm, Linear};
use burn::tensor::{Bool, DType, Tensor};
use flash_attention_kernels::AttentionError;
use flash_attention_kernels::problem::check_broadcast;

/// Applies a layer to `[batch, seq, d_in]` and splits the result into heads: `[batch, heads, seq, d]`.
fn heads(x: Tensor<3>, linear: &Linear, n_heads: usize) -> Tensor<4> {
    let x = linear.forward(x);
    let [batch, seq, width] = x.dims();
    x.reshape([batch, seq, n_heads, width / n_heads]).swap_dims(1, 2)
}

/// Joins `[batch, heads, seq, d]` to `[batch, seq, heads · d]` and applies a layer.
fn joined(x: Tensor<4>, linear: &Linear) -> Tensor<3> {
    let [batch, heads, seq, d] = x.dims();
    linear.forward(x.swap_dims(1, 2).reshape([batch, seq, heads * d]))
}

/// Options of a call with this query. `quiet` adds a logit of 0 without a value to the softmax, as a sink. Dropout applies on devices that
/// record gradients, unless the module is frozen.
fn effective(
    mut options: FlashAttentionOptions,
    q: &Tensor<4>,
    quiet: bool,
    dropout: &Dropout,
) -> FlashAttentionOptions {
    if quiet {
        // `check_options` has refused other sinks.
        options.sinks = Some(Tensor::zeros([q.dims()[1]], (&q.device(), DType::F32)));
    }
    if dropout.training.is_enabled() && q.device().is_autodiff() {
        options.dropout = dropout.prob as f32;
    }
    options
}

/// Combines the options' mask with burn-nn's masks `[batch, seq_k]` and `[batch, seq_q, seq_k]` into one over heads, queries and keys: a
/// pair is hidden if any of them hides it.
fn combined(
    mut options: FlashAttentionOptions,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
) -> FlashAttentionOptions {
    let mask_pad = mask_pad.map(|mask| {
        let [batch, seq_k] = mask.dims();
        mask.reshape([batch, 1, 1, seq_k])
    });
    let mask_attn = mask_attn.map(|mask| mask.unsqueeze_dim(1));
    options.mask = [options.mask.take(), mask_attn, mask_pad].into_iter().flatten().reduce(Tensor::bool_or);
    options
}

/// Checks that the options do not contradict the module's dropout and quiet softmax, and that their mask broadcasts to the scores.
fn check_options(
    options: &FlashAttentionOptions,
    scores: [usize; 4],
    quiet: bool,
    dropout: &Dropout,
) -> Result<(), AttentionError> {
    let refused = |option, value, why| Err(AttentionError::Unsupported { option, value, why });
    if options.dropout != 0.0 {
        let why = "the module has its own dropout rate, for training only; leave it out of the options";
        return refused("dropout", format!("{} beside the module's {}", options.dropout, dropout.prob), why);
    }
    if let Some(sinks) = options.sinks.as_ref().filter(|_| quiet) {
        return refused(
            "sinks",
            format!("{:?}", sinks.dims()),
            "the module's quiet softmax is already a sink of each head; use one of them",
        );
    }
    options.mask.as_ref().map_or(Ok(()), |mask| check_broadcast("mask", mask.dims(), scores, 4))
}

/// Number of key/value heads, if so many are asked for: by default that of query heads, which it must divide.
fn heads_kv(num_heads_q: usize, asked: Option<usize>) -> Result<usize, AttentionError> {
    let num_heads_kv = asked.unwrap_or(num_heads_q);
    if num_heads_kv == 0 || !num_heads_q.is_multiple_of(num_heads_kv) {
        return Err(AttentionError::HeadsNotGrouped { num_heads_q, num_heads_kv });
    }
    Ok(num_heads_kv)
}

/// Checks sizes of a configuration.
fn check_not_0<const N: usize>(sizes: [(&'static str, usize); N]) -> Result<(), AttentionError> {
    match sizes.into_iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((option, _)) => {
            Err(AttentionError::Unsupported { option, value: "0".into(), why: "it must be at least 1" })
        }
    }
}

/// Checks a number of a configuration, which must also be finite.
fn check_number(
    option: &'static str,
    value: f64,
    valid: bool,
    requirement: &'static str,
) -> Result<(), AttentionError> {
    if valid && value.is_finite() { Ok(()) } else { Err(AttentionError::Option { option, value, requirement }) }
}

/// Checks a dropout rate.
fn check_rate(option: &'static str, rate: f64) -> Result<(), AttentionError> {
    if (0.0..1.0).contains(&rate) {
        return Ok(());
    }
    Err(AttentionError::Unsupported { option, value: rate.to_string(), why: "a rate must be at least 0 and below 1" })
}

/// Input of a sublayer, and the residual that its output is added to. The norm belongs to this sublayer if `norm_first`, else to the
/// sublayer before it.
fn parted(x: Tensor<3>, norm: &LayerNorm, norm_first: bool) -> (Tensor<3>, Tensor<3>) {
    let normed = norm.forward(x.clone());
    let residual = if norm_first { x } else { normed.clone() };
    (normed, residual)
}
