//! Ring attention: queries stay, keys and values travel around the ranks, and so do their gradients.

use super::checks::{Method, check, divides};
use super::collectives::{alive, received};
use super::merge::Part;
use super::node::{SavedForBackward, recorded};
use super::partial::{SavedCall, backward, forward};
use super::{Collectives, RingStep, Rows, SequenceParallelError, ring_plan};
use crate::checks::{agree, unwrapped};
use crate::options::FlashAttentionOptions;
use burn::tensor::{DType, Tensor};
use std::sync::{Arc, Weak};

/// Attention of one sequence over several devices that pass keys and values around a ring (Ring Attention, arXiv:2310.01889). Memory is
/// linear in a rank's share. Results of parts of the keys are merged in f32 by their log-sum-exp.
///
/// # Shapes
///
/// A rank's share, the same on every rank:
///
/// - `q`: `[batch, num_heads_q, seq_q / world_size, head_dim]`
/// - `k`: `[batch, num_heads_kv, seq_k / world_size, head_dim]`
/// - `v`: `[batch, num_heads_kv, seq_k / world_size, head_dim_v]`
/// - returns `[batch, num_heads_q, seq_q / world_size, head_dim_v]`
///
/// If `causal`, shares are [`Sharding::Zigzag`](super::Sharding::Zigzag), and queries and keys are of the same sequence, of an even number of rows
/// on each rank. [`ring_plan`] tells what each rank computes. Otherwise the order of the rows does not matter.
///
/// `softmax_scale`, `causal`, `softcap`, `precision` and `backward_order` have their usual meaning. Other options are refused. Differentiable: see
/// [Gradients](super#gradients). The backward saves `q`, `k`, `v`, the output and `lse` of the rank, and nothing of a step.
///
/// # Panics
///
/// With the message of the error that [`try_ring_attention`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::FlashAttentionOptions;
/// use burn_flash_attention::sequence_parallel::{local_group, ring_attention};
/// use std::time::Duration;
///
/// std::thread::scope(|scope| {
///     for rank in local_group(3, Duration::from_secs(60)) {
///         scope.spawn(move || {
///             let q = Tensor::<4>::ones([1, 4, 16, 32], &Device::flex());
///             let kv = Tensor::<4>::ones([1, 1, 16, 32], &Device::flex());
///             let options = FlashAttentionOptions::new().with_causal(true);
///             let out = ring_attention(q, kv.clone(), kv, &options, &rank);
///             assert_eq!(out.dims(), [1, 4, 16, 32]);
///         });
///     }
/// });
/// # }
/// ```
#[track_caller]
pub fn ring_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
    collectives: &Arc<dyn Collectives>,
) -> Tensor<4> {
    unwrapped(try_ring_attention(q, k, v, options, collectives))
}

/// [`ring_attention`] with a typed error instead of a panic.
///
/// # Errors
///
/// A [`SequenceParallelError`] that names the argument at fault and its value. Nothing has been sent then, except when it is a
/// [`CollectiveError`](super::CollectiveError).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::FlashAttentionOptions;
/// use burn_flash_attention::sequence_parallel::{local_group, try_ring_attention};
/// use std::time::Duration;
///
/// let x = || Tensor::<4>::zeros([1, 2, 7, 16], &Device::flex());
/// let ranks = local_group(2, Duration::from_secs(60));
/// let options = FlashAttentionOptions::new().with_causal(true);
/// let error = try_ring_attention(x(), x(), x(), &options, &ranks[0]).unwrap_err();
/// assert_eq!(error.to_string(), "seq of q is 7; it must be a multiple of 2, the chunks of a rank (zigzag)");
/// # }
/// ```
pub fn try_ring_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
    collectives: &Arc<dyn Collectives>,
) -> Result<Tensor<4>, SequenceParallelError> {
    check(Method::Ring, [&q, &k, &v], [q.dims(), k.dims(), v.dims()], options)?;
    if options.causal {
        let seq = q.dims()[2];
        agree("k", &k.dims(), (2, "seq"), ("q, with which it is causal,", seq))?;
        divides(("seq of q", seq), (2, "the chunks of a rank (zigzag)"))?;
    }
    let qkv = [q, k, v];
    let [q, k, v] = qkv.clone().map(Tensor::inner);
    let merged = merged([q.clone(), k.clone(), v.clone()], options, &**collectives)?;
    let out = merged.out.cast(q.dtype());
    let saved = Ring {
        call: SavedCall { q, k, v, out: out.clone(), lse: merged.lse },
        options: options.clone(),
        collectives: Arc::downgrade(collectives),
    };
    recorded(qkv, out, saved)
}

/// Attention of the rank's queries over the keys of all ranks.
fn merged(
    [q, k, v]: [Tensor<4>; 3],
    options: &FlashAttentionOptions,
    collectives: &dyn Collectives,
) -> Result<Part, SequenceParallelError> {
    let plan = ring_plan(collectives.rank(), collectives.world_size(), options.causal);
    let mut kv = [k, v];
    let mut merged: Option<Part> = None;
    for (t, step) in plan.iter().enumerate() {
        let [k, v] = kv.clone();
        if t + 1 < plan.len() {
            // Sent before the step is launched, so that the device can do both at once.
            kv = shifted(kv, collectives)?;
        }
        let rows = step.q.range(q.dims()[2]);
        let qkv = [of_rows(&q, step.q), of_rows(&k, step.k), of_rows(&v, step.k)];
        let part = Part::new(forward(qkv, &of_step(options, step))?);
        merged = Some(match merged {
            None => part,
            Some(merged) => merged.merge_rows(rows, part),
        });
    }
    match merged {
        Some(merged) => Ok(merged),
        None => unreachable!("a rank has at least the step of its own keys"),
    }
}

/// What the backward reads: the rank's share.
#[derive(Debug)]
struct Ring {
    call: SavedCall,
    options: FlashAttentionOptions,
    /// Weak: a rank that drops its collectives has left the group, whatever its graph still holds.
    collectives: Weak<dyn Collectives>,
}

impl SavedForBackward for Ring {
    /// Every step gives the shares of its pairs, because `out` and `lse` are those of all keys. `dq` stays; `dk` and `dv` travel with their keys and
    /// values, and one step further, home. Sums are f32.
    fn gradients(&self, dout: Tensor<4>) -> Result<[Tensor<4>; 3], SequenceParallelError> {
        let collectives = &*alive(&self.collectives)?;
        let SavedCall { q, k, v, out, lse } = &self.call;
        let plan = ring_plan(collectives.rank(), collectives.world_size(), self.options.causal);
        let mut dq = zeros_like(q);
        let mut kv = [k.clone(), v.clone()];
        let mut dkv = kv.each_ref().map(zeros_like);
        for (t, step) in plan.iter().enumerate() {
            let [k, v] = kv.clone();
            if t + 1 < plan.len() {
                kv = shifted(kv, collectives)?;
            }
            let rows = step.q.range(q.dims()[2]);
            let call = SavedCall {
                q: of_rows(q, step.q),
                k: of_rows(&k, step.k),
                v: of_rows(&v, step.k),
                out: of_rows(out, step.q),
                lse: lse.clone().slice_dim(2, rows),
            };
            let [of_q, of_k, of_v] = backward(call, of_rows(&dout, step.q), &of_step(&self.options, step));
            dq = added(dq, step.q, of_q);
            let [dk, dv] = dkv;
            dkv = shifted([added(dk, step.k, of_k), added(dv, step.k, of_v)], collectives)?;
        }
        let [dk, dv] = dkv;
        Ok([dq.cast(q.dtype()), dk.cast(k.dtype()), dv.cast(v.dtype())])
    }
}

/// The options of a step.
fn of_step(options: &FlashAttentionOptions, step: &RingStep) -> FlashAttentionOptions {
    FlashAttentionOptions { causal: step.causal, ..options.clone() }
}

/// Some rows of a share.
fn of_rows(share: &Tensor<4>, rows: Rows) -> Tensor<4> {
    match rows {
        Rows::All => share.clone(),
        rows => share.clone().slice_dim(2, rows.range(share.dims()[2])),
    }
}

/// Adds a gradient of some rows to the sum of all rows, in f32.
fn added(sum: Tensor<4>, rows: Rows, gradient: Tensor<4>) -> Tensor<4> {
    let [batch, heads, seq, dim] = sum.dims();
    let of_rows = of_rows(&sum, rows) + gradient.cast(DType::F32);
    match rows {
        Rows::All => of_rows,
        rows => sum.slice_assign([0..batch, 0..heads, rows.range(seq), 0..dim], of_rows),
    }
}

/// Zeros for a sum in f32.
fn zeros_like(tensor: &Tensor<4>) -> Tensor<4> {
    Tensor::zeros(tensor.dims(), (&tensor.device(), DType::F32))
}

/// The pair of tensors of the previous rank, in exchange for these.
fn shifted(pair: [Tensor<4>; 2], collectives: &dyn Collectives) -> Result<[Tensor<4>; 2], SequenceParallelError> {
    Ok(received(collectives.ring_shift(pair.to_vec())?)?)
}
