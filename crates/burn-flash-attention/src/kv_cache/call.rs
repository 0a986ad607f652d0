//! Attention of new positions over a cache, which they are appended to.

use super::AttentionCache;
use super::operands::Taken;
use crate::api::{check_on_device, extras, on_device};
use crate::backend::FlashAttentionOps;
use crate::checks::unwrapped;
use crate::options::FlashAttentionOptions;
use crate::plan::AttentionPlan;
use crate::tensors::OptionalInt;
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};
use flash_attention_kernels::{Alignment, AttentionError};

/// Attention of new positions over all positions so far: appends `k` and `v` to the cache, in place, and computes
/// [`flash_attention`](crate::flash_attention) of `q` over the cache (flash-attn's `flash_attn_with_kvcache`).
///
/// # Shapes
///
/// - `q`: `[batch, num_heads_q, new, head_dim]`
/// - `k`: `[batch, num_heads_kv, new, head_dim]`
/// - `v`: `[batch, num_heads_kv, new, head_dim_v]`
/// - returns `[batch, num_heads_q, new, head_dim_v]`
///
/// `new` is 1 when a token is generated, a few when tokens are proposed and checked, and the length of a prompt at first. All have the
/// element type of the cache.
///
/// # Options
///
/// Causality and windows are aligned with the end of each sequence: set [`causal`](FlashAttentionOptions::causal) where several positions
/// are new and the first must not see the last. [`seq_lens_q`](FlashAttentionOptions::seq_lens_q) is the number of new positions of each
/// sequence, where prompts of different lengths share a batch: the rest of `q`, `k` and `v` is padding, is not appended, and has output 0.
/// A batch in pages has these numbers itself.
///
/// The keys of mask, bias and tensors of functions are the positions of the cache: [`max_len`](crate::KvCache::max_len) after the call, or as
/// many as the longest sequence of a batch in pages has then. Dropout, the lengths of keys, packed sequences, block masks and top-left
/// alignment are refused.
///
/// # Panics
///
/// With the message of the error that [`try_flash_attention_with_kvcache`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, KvCacheConfig, flash_attention_with_kvcache};
///
/// let device = Device::flex();
/// let mut cache = KvCacheConfig::new(2, 2, 16, 64).init(&device);
/// let random = |heads, new| Tensor::<4>::random([2, heads, new, 16], Distribution::Default, &device);
/// // Two prompts, of 9 and of 4 tokens, in tensors of 9 positions.
/// let lens = Tensor::<1, Int>::from_data([9, 4], &device);
/// let options = FlashAttentionOptions::new().with_causal(true);
/// let prompt = options.clone().with_seq_lens_q(lens);
/// flash_attention_with_kvcache(random(4, 9), random(2, 9), random(2, 9), &mut cache, &prompt);
/// // One token more of each.
/// let out = flash_attention_with_kvcache(random(4, 1), random(2, 1), random(2, 1), &mut cache, &options);
/// assert_eq!(out.dims(), [2, 4, 1, 16]);
/// assert_eq!(cache.seq_lens().into_data().iter::<i32>().collect::<Vec<_>>(), [10, 5]);
/// # }
/// ```
#[track_caller]
pub fn flash_attention_with_kvcache(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    cache: &mut impl AttentionCache,
    options: &FlashAttentionOptions,
) -> Tensor<4> {
    unwrapped(try_flash_attention_with_kvcache(q, k, v, cache, options))
}

/// [`flash_attention_with_kvcache`] with a typed error instead of a panic. Nothing has run when an error is returned, and the cache is as
/// before.
///
/// # Errors
///
/// Each [`AttentionError`] names the argument at fault and its value: [`CacheFull`](AttentionError::CacheFull) if there is no room for the
/// new positions, [`OutOfPages`](AttentionError::OutOfPages) if too few pages are free, [`Tracked`](AttentionError::Tracked) if autodiff tracks
/// an argument, since this attention has no gradient.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AttentionError, FlashAttentionOptions, KvCacheConfig, try_flash_attention_with_kvcache};
///
/// let device = Device::flex();
/// let mut cache = KvCacheConfig::new(1, 2, 16, 8).init(&device);
/// let zeros = |new| Tensor::<4>::zeros([1, 2, new, 16], &device);
/// let options = FlashAttentionOptions::new().with_causal(true);
/// let error = try_flash_attention_with_kvcache(zeros(9), zeros(9), zeros(9), &mut cache, &options).unwrap_err();
/// assert_eq!(error, AttentionError::CacheFull { capacity: 8, len: 0, new: 9 });
/// # }
/// ```
pub fn try_flash_attention_with_kvcache(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    cache: &mut impl AttentionCache,
    options: &FlashAttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    try_flash_attention_with_kvcache_and_lse(q, k, v, cache, options).map(|(out, _)| out)
}

/// [`flash_attention_with_kvcache`] that also returns the log-sum-exp of each row of scores, `[batch, num_heads_q, new]`, as
/// [`flash_attention_with_lse`](crate::flash_attention_with_lse) does.
///
/// # Panics
///
/// With the message of the error that [`try_flash_attention_with_kvcache_and_lse`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, KvCacheConfig, flash_attention_with_kvcache_and_lse};
///
/// let device = Device::flex();
/// let mut cache = KvCacheConfig::new(1, 1, 16, 8).init(&device);
/// let zeros = || Tensor::<4>::zeros([1, 1, 1, 16], &device);
/// let options = FlashAttentionOptions::new();
/// flash_attention_with_kvcache_and_lse(zeros(), zeros(), zeros(), &mut cache, &options);
/// let (_, lse) = flash_attention_with_kvcache_and_lse(zeros(), zeros(), zeros(), &mut cache, &options);
/// // Two keys with scores of 0.
/// assert_eq!(lse.into_scalar::<f32>(), 2f32.ln());
/// # }
/// ```
#[track_caller]
pub fn flash_attention_with_kvcache_and_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    cache: &mut impl AttentionCache,
    options: &FlashAttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    unwrapped(try_flash_attention_with_kvcache_and_lse(q, k, v, cache, options))
}

/// [`flash_attention_with_kvcache_and_lse`] with a typed error instead of a panic. Nothing has run when an error is returned, and the cache
/// is as before.
///
/// # Errors
///
/// The errors of [`try_flash_attention_with_kvcache`].
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, KvCacheConfig, try_flash_attention_with_kvcache_and_lse};
///
/// let device = Device::flex().autodiff();
/// let mut cache = KvCacheConfig::new(1, 1, 16, 8).init(&device);
/// let zeros = || Tensor::<4>::zeros([1, 1, 1, 16], &device);
/// let options = FlashAttentionOptions::new();
/// let error = try_flash_attention_with_kvcache_and_lse(zeros().require_grad(), zeros(), zeros(), &mut cache, &options).unwrap_err();
/// assert!(error.to_string().starts_with("q is tracked by autodiff"));
/// # }
/// ```
pub fn try_flash_attention_with_kvcache_and_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    cache: &mut impl AttentionCache,
    options: &FlashAttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    check_untracked(&q, &k, &v, options)?;
    check_options(options)?;
    let autodiff = q.is_autodiff();
    let [q, k, v] = [q, k, v].map(Tensor::inner);
    let options = FlashAttentionOptions { continued: true, ..options.clone().inner() };
    let new = q.dims()[2];
    let (device, problem) = cache.posed(&q, &k, &v, &options)?;
    check_on_device(device.as_dispatch(), &problem)?;
    if new == 0 {
        let device = q.device();
        let out = Tensor::zeros(problem.o_shape(), (&device, q.dtype()));
        return Ok((out, Tensor::zeros(problem.lse_shape(), (&device, DType::F32))));
    }
    let options = options.with_temperature_as_function(&q)?;
    let Taken { tensors, lengths, new_lens } = cache.take(new)?;
    let mut extras = extras(&options, None);
    if let Some(lens) = new_lens {
        extras.seq_lens_q = OptionalInt::Some(lens.into_dispatch());
    }
    let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
    let output = Dispatch::flash_attention_with_kvcache(q, k, v, tensors, extras, options.numbers(), lengths);
    cache.put(output.cache, new);
    let (out, lse) = (Tensor::from_dispatch(output.attention.out), Tensor::from_dispatch(output.attention.lse));
    Ok(if autodiff { (out.autodiff(), lse.autodiff()) } else { (out, lse) })
}

impl FlashAttentionOptions {
    /// The options without autodiff.
    fn inner(self) -> Self {
        let all = |tensors: Vec<Tensor<4>>| tensors.into_iter().map(Tensor::inner).collect();
        FlashAttentionOptions {
            mask: self.mask.map(Tensor::inner),
            bias: self.bias.map(Tensor::inner),
            alibi_slopes: self.alibi_slopes.map(|slopes| slopes.into_tensor().inner().into()),
            seq_lens_q: self.seq_lens_q.map(Tensor::inner),
            seq_lens_k: self.seq_lens_k.map(Tensor::inner),
            cu_seqlens_q: self.cu_seqlens_q.map(Tensor::inner),
            cu_seqlens_k: self.cu_seqlens_k.map(Tensor::inner),
            sinks: self.sinks.map(Tensor::inner),
            temperature: self.temperature.map(Tensor::inner),
            score_tensors: all(self.score_tensors),
            mask_tensors: all(self.mask_tensors),
            ..self
        }
    }
}

/// What [`flash_attention_with_kvcache`] would run for these arguments.
pub(super) fn plan(
    cache: &impl AttentionCache,
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    options: &FlashAttentionOptions,
) -> Result<AttentionPlan, AttentionError> {
    check_untracked(q, k, v, options)?;
    check_options(options)?;
    let (device, problem) = cache.posed(q, k, v, options)?;
    on_device(device.as_dispatch(), &problem)
}

/// Refuses what has no meaning with a cache.
fn check_options(options: &FlashAttentionOptions) -> Result<(), AttentionError> {
    let refused = |option, value: String, why| Err(AttentionError::Unsupported { option, value, why });
    if options.dropout != 0.0 {
        let why = "dropout is for training, and attention with a key/value cache has no gradient";
        return refused("dropout", options.dropout.to_string(), why);
    }
    for (option, tensor) in [
        ("seq_lens_k", options.seq_lens_k.as_ref()),
        ("cu_seqlens_q", options.cu_seqlens_q.as_ref()),
        ("cu_seqlens_k", options.cu_seqlens_k.as_ref()),
    ] {
        if let Some(tensor) = tensor {
            let value = format!("a tensor of shape {:?}", tensor.dims());
            return refused(
                option,
                value,
                "the cache knows the lengths of its sequences; those of new positions are seq_lens_q",
            );
        }
    }
    if let Some(mask) = &options.block_mask {
        let value = format!("a tensor of shape {:?}", mask.states.dims());
        return refused(
            "block_mask",
            value,
            "its blocks of queries begin at the first new position; use a mask or a mask function",
        );
    }
    let aligned = options.causal || options.window_left.is_some() || options.window_right.is_some();
    if options.alignment == Alignment::TopLeft && aligned {
        return refused(
            "alignment",
            "TopLeft".into(),
            "new positions are the last ones of a sequence, not the first ones",
        );
    }
    Ok(())
}

/// Checks that autodiff tracks none of the arguments.
fn check_untracked(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    options: &FlashAttentionOptions,
) -> Result<(), AttentionError> {
    let FlashAttentionOptions { bias, alibi_slopes, sinks, temperature, score_tensors, mask_tensors, .. } = options;
    let tracked = |tensors: &[Tensor<4>]| tensors.iter().any(Tensor::is_tracked);
    for (argument, is_tracked) in [
        ("q", q.is_tracked()),
        ("k", k.is_tracked()),
        ("v", v.is_tracked()),
        ("bias", bias.as_ref().is_some_and(Tensor::is_tracked)),
        ("alibi_slopes", alibi_slopes.clone().is_some_and(|slopes| slopes.into_tensor().is_tracked())),
        ("sinks", sinks.as_ref().is_some_and(Tensor::is_tracked)),
        ("temperature", temperature.as_ref().is_some_and(Tensor::is_tracked)),
        ("score_tensors", tracked(score_tensors)),
        ("mask_tensors", tracked(mask_tensors)),
    ] {
        if is_tracked {
            return Err(AttentionError::Tracked { argument });
        }
    }
    Ok(())
}
