//! Gradients of attention, recomputed from `lse`: nothing of size `seq_q × seq_k` is kept.
//!
//! A node of Burn's graph has one output, attention has two, and both feed one backward kernel
//! (`ds = p∘(dout·vᵀ − delta + dlse)`). So a call records three nodes:
//!
//! ```text
//! q, k, v, … ── core ──┬── out      hands dout to core
//!                      └── lse      hands dlse to core
//! ```
//!
//! `out` and `lse` lay their gradients into a [`Mailbox`] that they share with `core`. Burn runs nodes from the loss
//! towards the leaves, so `core` runs once, after whichever of the two the loss depends on, and empties the mailbox.
//! It launches the kernels of the inputs that are tracked and no others.
//!
//! Where nobody asked for `lse`, there is one node: `core`, whose output is `out`.

use crate::backend::{
    AttentionGradients, AttentionOutput, CacheLengths, CacheTensors, CachedAttentionOutput, FlashAttentionOps, Lse,
    Saved, Wanted,
};
use crate::tensors::{Extras, OptionalFloat, TRACKED};
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, TensorMetadata};
use flash_attention_kernels::{AttentionOptions, AttentionProblem};
use std::sync::{Arc, Mutex, PoisonError};

impl<B: FlashAttentionOps, C: CheckpointStrategy> FlashAttentionOps for Autodiff<B, C> {
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        extras: Extras<Self>,
        options: AttentionOptions,
        lse: Lse,
    ) -> AttentionOutput<Self> {
        // Burn wants to know at compile time how many inputs a node has.
        let record = match extras.tracked().iter().flatten().count() {
            0 => record::<B, C, 3>,
            1 => record::<B, C, 4>,
            2 => record::<B, C, 5>,
            3 => record::<B, C, 6>,
            4 => record::<B, C, 7>,
            _ => record::<B, C, 8>,
        };
        record([q, k, v], extras, options, lse)
    }

    fn flash_attention_backward(
        _q: FloatTensor<Self>,
        _k: FloatTensor<Self>,
        _v: FloatTensor<Self>,
        _extras: Extras<Self>,
        _saved: Saved<Self>,
        _wanted: Wanted,
        _options: AttentionOptions,
    ) -> AttentionGradients<Self> {
        unreachable!("the backward runs on the inner backend, not on Autodiff")
    }

    fn flash_attention_with_kvcache(
        _q: FloatTensor<Self>,
        _k: FloatTensor<Self>,
        _v: FloatTensor<Self>,
        _cache: CacheTensors<Self>,
        _extras: Extras<Self>,
        _options: AttentionOptions,
        _lengths: CacheLengths,
    ) -> CachedAttentionOutput<Self> {
        unreachable!("a cache is on the inner backend, not on Autodiff")
    }

    fn flash_attention_block_states(
        empty: IntTensor<Self>,
        extras: Extras<Self>,
        problem: AttentionProblem,
    ) -> IntTensor<Self> {
        // Visibility is a step function: there is nothing to record.
        B::flash_attention_block_states(empty, extras.map_floats(|tensor| tensor.into_primitive()), problem)
    }
}

/// Runs the forward and records it if any of the `N` inputs (q, k, v and those that there are of the optional ones) is tracked.
fn record<B: FlashAttentionOps, C: CheckpointStrategy, const N: usize>(
    [q, k, v]: [FloatTensor<Autodiff<B, C>>; 3],
    extras: Extras<Autodiff<B, C>>,
    options: AttentionOptions,
    lse: Lse,
) -> AttentionOutput<Autodiff<B, C>> {
    let optional = extras.tracked();
    let guards = [&q, &k, &v].into_iter().chain(optional.iter().flatten()).map(|tensor| tensor.node());
    let Ok(guards) = <[NodeGuard; N]>::try_from(guards.collect::<Vec<_>>()) else {
        unreachable!("there are N tracked tensors")
    };
    match Core.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::UnTracked(_) => {
            let extras = extras.map_floats(|tensor| tensor.into_primitive());
            let output =
                B::flash_attention(q.into_primitive(), k.into_primitive(), v.into_primitive(), extras, options, lse);
            AttentionOutput {
                out: <Autodiff<B, C> as AutodiffBackend>::from_inner(output.out),
                lse: <Autodiff<B, C> as AutodiffBackend>::from_inner(output.lse),
            }
        }
        OpsKind::Tracked(mut prep) => {
            let ids = [prep.checkpoint(&q), prep.checkpoint(&k), prep.checkpoint(&v)];
            let optional_ids = optional.each_ref().map(|tensor| tensor.as_ref().map(|tensor| prep.checkpoint(tensor)));
            let extras = extras.map_floats(|tensor| tensor.into_primitive());
            let untracked = extras.clone().with_tracked([const { None }; TRACKED]);
            let output =
                B::flash_attention(q.into_primitive(), k.into_primitive(), v.into_primitive(), extras, options, lse);
            let mailbox = (lse == Lse::Tracked).then(Mailbox::<B>::default);
            let state = CoreState {
                ids,
                optional_ids,
                untracked,
                out: output.out.clone(),
                lse: output.lse.clone(),
                mailbox: mailbox.clone(),
                options,
            };
            let Some(mailbox) = mailbox else {
                let lse = <Autodiff<B, C> as AutodiffBackend>::from_inner(output.lse);
                return AttentionOutput { out: prep.finish(state, output.out), lse };
            };
            let core = prep.finish(state, output.lse.clone());
            AttentionOutput {
                out: branch::<B, C>(core.node(), Letter::Dout, mailbox.clone(), output.out),
                lse: branch::<B, C>(core.node(), Letter::Dlse, mailbox, output.lse),
            }
        }
    }
}

/// A node under `core` whose gradient goes into the mailbox.
fn branch<B: Backend, C: CheckpointStrategy>(
    core: NodeGuard,
    letter: Letter,
    mailbox: Mailbox<B>,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    match Branch.prepare::<C>([core]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((letter, mailbox), output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}

/// Gradients on their way from `out` and `lse` to `core`.
#[derive(Debug)]
struct Mailbox<B: Backend>(Arc<Mutex<Letters<B>>>);

#[derive(Debug)]
struct Letters<B: Backend> {
    dout: Option<FloatTensor<B>>,
    dlse: Option<FloatTensor<B>>,
}

#[derive(Clone, Copy, Debug)]
enum Letter {
    Dout,
    Dlse,
}

impl<B: Backend> Default for Mailbox<B> {
    fn default() -> Self {
        Mailbox(Arc::new(Mutex::new(Letters { dout: None, dlse: None })))
    }
}

impl<B: Backend> Clone for Mailbox<B> {
    fn clone(&self) -> Self {
        Mailbox(self.0.clone())
    }
}

impl<B: Backend> Mailbox<B> {
    /// Adds a gradient and tells whether it is the first.
    fn put(&self, letter: Letter, gradient: FloatTensor<B>) -> bool {
        let mut letters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = letters.dout.is_none() && letters.dlse.is_none();
        match letter {
            Letter::Dout => letters.dout = Some(gradient),
            Letter::Dlse => letters.dlse = Some(gradient),
        }
        first
    }

    /// Empties the mailbox.
    fn take(&self) -> Letters<B> {
        let mut letters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Letters { dout: letters.dout.take(), dlse: letters.dlse.take() }
    }
}

#[derive(Debug)]
struct Branch;

impl<B: Backend> Backward<B, 1> for Branch {
    type State = (Letter, Mailbox<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let ([Some(core)], (letter, mailbox)) = (ops.parents, ops.state) else { return };
        // Burn takes a node for reached once a gradient is registered for it. Which tensor that is does not matter:
        // `core` reads the mailbox. It is registered once, or Burn would add two of different shapes.
        if mailbox.put(letter, gradient.clone()) {
            grads.register::<B>(core.id, gradient);
        }
    }
}

#[derive(Debug)]
struct Core;

#[derive(Clone, Debug)]
struct CoreState<B: Backend> {
    /// Where the checkpointer finds q, k and v.
    ids: [NodeId; 3],
    /// And those that there are of the optional ones.
    optional_ids: [Option<NodeId>; TRACKED],
    /// The extras without these.
    untracked: Extras<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    /// Where the gradients of `out` and `lse` are, if both have nodes of their own.
    mailbox: Option<Mailbox<B>>,
    options: AttentionOptions,
}

impl<B: FlashAttentionOps, const N: usize> Backward<B, N> for Core {
    type State = CoreState<B>;

    fn backward(self, ops: Ops<CoreState<B>, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let state = ops.state;
        let [q, k, v] = state.ids.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let optional =
            state.optional_ids.map(|id| id.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id)));
        let Letters { dout, dlse } =
            state.mailbox.map_or(Letters { dout: Some(gradient), dlse: None }, |mailbox| mailbox.take());
        // Where the loss depends on lse alone.
        let dout =
            dout.unwrap_or_else(|| B::float_zeros(state.out.shape(), &state.out.device(), state.out.dtype().into()));

        // The parents are q, k, v and those that there are of the others, which is tracked being `Some`.
        let parent = |n: usize| ops.parents.get(n).and_then(Option::as_ref).map(|node| node.id);
        let mut place = 2;
        let of_optional = optional.each_ref().map(|tensor| {
            tensor.as_ref().and_then(|_| {
                place += 1;
                parent(place)
            })
        });
        let [of_bias, of_slopes, of_sinks, of_a, of_b] = of_optional;
        let gradients = B::flash_attention_backward(
            q,
            k,
            v,
            state.untracked.with_tracked(optional),
            Saved { out: state.out, lse: state.lse, dout, dlse: OptionalFloat::from_option(dlse) },
            Wanted {
                dq: parent(0).is_some(),
                dk: parent(1).is_some(),
                dv: parent(2).is_some(),
                dbias: of_bias.is_some(),
                dalibi_slopes: of_slopes.is_some(),
                dsinks: of_sinks.is_some(),
                dscore_tensors: [of_a.is_some(), of_b.is_some()],
            },
            state.options,
        );
        let AttentionGradients { dq, dk, dv, dbias, dalibi_slopes, dsinks, dscore_a, dscore_b } = gradients;
        let parents = [parent(0), parent(1), parent(2)].into_iter().chain(of_optional);
        for (parent, gradient) in parents.zip([dq, dk, dv, dbias, dalibi_slopes, dsinks, dscore_a, dscore_b]) {
            if let (Some(id), Some(gradient)) = (parent, gradient.into_option()) {
                grads.register::<B>(id, gradient);
            }
        }
    }
}
