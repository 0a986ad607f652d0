//! Caches for decoding: keys and values of a layer, and the output so far.

use crate::checks::agree;
use burn::tensor::Tensor;
use flash_attention_kernels::AttentionError;

/// Keys and values `[batch, heads, seq, d]` of the positions so far.
#[derive(Clone, Debug, Default)]
pub(super) struct KeysValues(Option<(Tensor<4>, Tensor<4>)>);

impl KeysValues {
    /// Appends keys and values of new positions, and returns all.
    pub fn grown(&mut self, key: Tensor<4>, value: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let all = match self.0.take() {
            Some((keys, values)) => (Tensor::cat(vec![keys, key], 2), Tensor::cat(vec![values, value], 2)),
            None => (key, value),
        };
        self.0.insert(all).clone()
    }

    /// Keys and values of a constant memory, computed at the first call.
    pub fn fixed(&mut self, compute: impl FnOnce() -> (Tensor<4>, Tensor<4>)) -> (Tensor<4>, Tensor<4>) {
        self.0.get_or_insert_with(compute).clone()
    }

    /// Number of positions.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |(keys, _)| keys.dims()[2])
    }
}

/// Output `[batch, seq, d_model]` of the positions so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Outputs(Option<Tensor<3>>);

impl Outputs {
    /// Number of positions.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |outputs| outputs.dims()[1])
    }

    /// The new part of a prefix: the whole prefix at the first call, its last position afterwards.
    ///
    /// # Errors
    ///
    /// If the prefix is not one position longer than the cached one.
    pub fn news(&self, argument: &'static str, prefix: Tensor<3>) -> Result<Tensor<3>, AttentionError> {
        match self.len() {
            0 => Ok(prefix),
            len => {
                agree(argument, &prefix.dims(), (1, "seq_q"), ("the cache", len + 1))?;
                Ok(prefix.narrow(1, len, 1))
            }
        }
    }

    /// Appends the output of the new positions, and returns the output of the whole prefix.
    pub fn grown(&mut self, new: Tensor<3>) -> Tensor<3> {
        let all = match self.0.take() {
            Some(outputs) => Tensor::cat(vec![outputs, new], 1),
            None => new,
        };
        self.0.insert(all).clone()
    }
}

/// Cache of a [`FlashMultiHeadAttention`](crate::FlashMultiHeadAttention) for decoding; burn-nn's is `MhaCache`.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig};
///
/// let device = Device::flex();
/// let attention = FlashMultiHeadAttentionConfig::new(8, 2).with_causal(true).init(&device);
/// let x = Tensor::<3>::random([1, 5, 8], Distribution::Default, &device);
/// let mut cache = FlashMhaCache::autoregressive();
/// // Three positions at first, then one at a time; each call is given the whole prefix.
/// for len in 3..=5 {
///     let output = attention.forward_cache(FlashMhaInput::self_attn(x.clone().narrow(1, 0, len)), &mut cache);
///     assert_eq!(output.context.dims(), [1, len, 8]);
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlashMhaCache {
    pub(super) memory: KeysValues,
    pub(super) outputs: Outputs,
    pub(super) fixed: bool,
}

impl FlashMhaCache {
    /// A cache for self-attention: keys and values grow with the queries.
    ///
    /// ```
    /// let cache = burn_flash_attention::FlashMhaCache::autoregressive();
    /// ```
    pub fn autoregressive() -> Self {
        FlashMhaCache { memory: KeysValues::default(), outputs: Outputs::default(), fixed: false }
    }

    /// A cache for cross-attention: keys and values of the first call are kept.
    ///
    /// ```
    /// let cache = burn_flash_attention::FlashMhaCache::autoregressive_cross_attention();
    /// ```
    pub fn autoregressive_cross_attention() -> Self {
        FlashMhaCache { fixed: true, ..Self::autoregressive() }
    }
}
