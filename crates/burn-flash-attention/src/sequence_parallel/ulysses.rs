//! DeepSpeed-Ulysses: an all-to-all turns shares of the sequence into shares of the heads, and back.

use super::checks::{Method, check, divides};
use super::collectives::{alive, received};
use super::node::{SavedForBackward, recorded};
use super::partial::{SavedCall, backward, forward};
use super::{CollectiveError, Collectives, SequenceParallelError};
use crate::checks::unwrapped;
use crate::options::FlashAttentionOptions;
use burn::tensor::Tensor;
use std::sync::{Arc, Weak};

/// Attention of one sequence over several devices by exchanging heads (DeepSpeed-Ulysses, arXiv:2309.14509, section 3): each rank computes all
/// positions of `1 / world_size` of the heads.
///
/// # Shapes
///
/// A rank's share, [`Sharding::Contiguous`](super::Sharding::Contiguous), the same on every rank:
///
/// - `q`: `[batch, num_heads_q, seq_q / world_size, head_dim]`
/// - `k`: `[batch, num_heads_kv, seq_k / world_size, head_dim]`
/// - `v`: `[batch, num_heads_kv, seq_k / world_size, head_dim_v]`
/// - returns `[batch, num_heads_q, seq_q / world_size, head_dim_v]`
///
/// `world_size` divides `num_heads_q` and `num_heads_kv`.
///
/// `softmax_scale`, `causal`, `alignment`, windows, `softcap`, `precision` and `backward_order` have their usual meaning for the whole sequence. Other
/// options are refused. Differentiable: see [Gradients](super#gradients).
///
/// # Panics
///
/// With the message of the error that [`try_ulysses_attention`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::FlashAttentionOptions;
/// use burn_flash_attention::sequence_parallel::{local_group, ulysses_attention};
/// use std::time::Duration;
///
/// std::thread::scope(|scope| {
///     for rank in local_group(2, Duration::from_secs(60)) {
///         scope.spawn(move || {
///             let q = Tensor::<4>::ones([1, 8, 16, 32], &Device::flex());
///             let kv = Tensor::<4>::ones([1, 2, 16, 32], &Device::flex());
///             let out = ulysses_attention(q, kv.clone(), kv, &FlashAttentionOptions::new(), &rank);
///             assert_eq!(out.dims(), [1, 8, 16, 32]);
///         });
///     }
/// });
/// # }
/// ```
#[track_caller]
pub fn ulysses_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
    collectives: &Arc<dyn Collectives>,
) -> Tensor<4> {
    unwrapped(try_ulysses_attention(q, k, v, options, collectives))
}

/// [`ulysses_attention`] with a typed error instead of a panic.
///
/// # Errors
///
/// A [`SequenceParallelError`] that names the argument at fault and its value. Nothing has been sent then, except when it is a
/// [`CollectiveError`].
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::FlashAttentionOptions;
/// use burn_flash_attention::sequence_parallel::{local_group, try_ulysses_attention};
/// use std::time::Duration;
///
/// let x = |heads| Tensor::<4>::zeros([1, heads, 16, 32], &Device::flex());
/// let ranks = local_group(4, Duration::from_secs(60));
/// let error = try_ulysses_attention(x(8), x(2), x(2), &FlashAttentionOptions::new(), &ranks[0]).unwrap_err();
/// assert_eq!(error.to_string(), "num_heads_kv is 2; it must be a multiple of 4, the number of ranks");
/// # }
/// ```
pub fn try_ulysses_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
    collectives: &Arc<dyn Collectives>,
) -> Result<Tensor<4>, SequenceParallelError> {
    let ranks = collectives.world_size();
    for (argument, tensor) in [("num_heads_q", &q), ("num_heads_kv", &k)] {
        divides((argument, tensor.dims()[1]), (ranks, "the number of ranks"))?;
    }
    let computed = [&q, &k, &v].map(|tensor| {
        let [batch, heads, seq, dim] = tensor.dims();
        [batch, heads / ranks, seq * ranks, dim]
    });
    check(Method::Ulysses, [&q, &k, &v], computed, options)?;

    let qkv = [q, k, v];
    let [q, k, v] = to_heads(qkv.clone().map(Tensor::inner), &**collectives)?;
    let (out, lse) = forward([q.clone(), k.clone(), v.clone()], options)?;
    let [share] = to_sequence([out.clone()], &**collectives)?;
    let saved = Ulysses {
        call: SavedCall { q, k, v, out, lse },
        options: options.clone(),
        collectives: Arc::downgrade(collectives),
    };
    recorded(qkv, share, saved)
}

/// What the backward reads: shares of the heads.
#[derive(Debug)]
struct Ulysses {
    call: SavedCall,
    options: FlashAttentionOptions,
    /// Weak: a rank that drops its collectives has left the group, whatever its graph still holds.
    collectives: Weak<dyn Collectives>,
}

impl SavedForBackward for Ulysses {
    fn gradients(&self, dout: Tensor<4>) -> Result<[Tensor<4>; 3], SequenceParallelError> {
        let collectives = alive(&self.collectives)?;
        let [dout] = to_heads([dout], &*collectives)?;
        let gradients = backward(self.call.clone(), dout, &self.options);
        Ok(to_sequence(gradients, &*collectives)?)
    }
}

/// From `[batch, heads, seq / ranks, dim]` to `[batch, heads / ranks, seq, dim]`.
fn to_heads<const N: usize>(
    shares: [Tensor<4>; N],
    collectives: &dyn Collectives,
) -> Result<[Tensor<4>; N], CollectiveError> {
    let ranks = collectives.world_size();
    let blocks = received(collectives.all_to_all(shares.to_vec(), 1)?)?;
    Ok(blocks.map(|blocks: Tensor<4>| {
        // Block r of the heads has come from rank r: the same heads of its positions.
        let [batch, heads, seq, dim] = blocks.dims();
        let by_rank = blocks.reshape([batch, ranks, heads / ranks, seq, dim]).swap_dims(1, 2);
        by_rank.reshape([batch, heads / ranks, ranks * seq, dim])
    }))
}

/// The inverse of [`to_heads`].
fn to_sequence<const N: usize>(
    shares: [Tensor<4>; N],
    collectives: &dyn Collectives,
) -> Result<[Tensor<4>; N], CollectiveError> {
    let ranks = collectives.world_size();
    let blocks = shares.map(|share| {
        let [batch, heads, seq, dim] = share.dims();
        let by_rank = share.reshape([batch, heads, ranks, seq / ranks, dim]).swap_dims(1, 2);
        by_rank.reshape([batch, ranks * heads, seq / ranks, dim])
    });
    received(collectives.all_to_all(blocks.to_vec(), 1)?)
}
