//! An operation over `q`, `k` and `v` as one node of autodiff, whose forward and backward are written with tensors.

#![cfg_attr(not(any(feature = "cube", feature = "flex")), allow(dead_code, unused_imports, unused_variables))]

use super::SequenceParallelError;
use crate::checks::{unsupported, unwrapped};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Backend, DispatchDevice, DispatchKindConversion, DispatchTensor};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};
use std::fmt::Debug;
use std::sync::Arc;

/// What the backward computes from what the forward has saved.
pub trait SavedForBackward: Debug + Send + Sync + 'static {
    /// The gradients of `q`, `k` and `v`, without autodiff.
    fn gradients(&self, dout: Tensor<4>) -> Result<[Tensor<4>; 3], SequenceParallelError>;
}

/// `out`, which has been computed without autodiff from `qkv`, as an output whose gradients are those of `saved`. Without autodiff if none of
/// the inputs has it.
pub fn recorded(
    qkv: [Tensor<4>; 3],
    out: Tensor<4>,
    saved: impl SavedForBackward,
) -> Result<Tensor<4>, SequenceParallelError> {
    let Some(strategy) = qkv.iter().find_map(Tensor::gradient_checkpointing_strategy) else { return Ok(out) };
    let qkv = qkv.map(|tensor| match tensor.is_autodiff() {
        true => tensor,
        false => tensor.autodiff().with_gradient_checkpointing_strategy(strategy),
    });
    match out.device().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => Ok(recorded_on::<burn::backend::Cube>(strategy, qkv, out, Arc::new(saved))),
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => Ok(recorded_on::<burn::backend::Flex>(strategy, qkv, out, Arc::new(saved))),
        #[allow(unreachable_patterns)]
        other => Err(unsupported(other).into()),
    }
}

/// [`recorded`] on a backend.
fn recorded_on<B: Backend>(
    strategy: GradientCheckpointingStrategy,
    qkv: [Tensor<4>; 3],
    out: Tensor<4>,
    saved: Arc<dyn SavedForBackward>,
) -> Tensor<4>
where
    DispatchTensor: DispatchKindConversion<B>
        + DispatchKindConversion<Autodiff<B, NoCheckpointing>>
        + DispatchKindConversion<Autodiff<B, BalancedCheckpointing>>,
{
    match strategy {
        GradientCheckpointingStrategy::Disabled => record::<B, NoCheckpointing>(qkv, out, saved),
        GradientCheckpointingStrategy::Balanced => record::<B, BalancedCheckpointing>(qkv, out, saved),
    }
}

/// [`recorded`] on a backend with a checkpointing strategy.
fn record<B: Backend, C: CheckpointStrategy>(
    qkv: [Tensor<4>; 3],
    out: Tensor<4>,
    saved: Arc<dyn SavedForBackward>,
) -> Tensor<4>
where
    DispatchTensor: DispatchKindConversion<B> + DispatchKindConversion<Autodiff<B, C>>,
{
    let guards = qkv.map(|tensor| match tensor.try_into_primitive::<Autodiff<B, C>>() {
        Ok(tensor) => tensor.node(),
        Err(error) => unreachable!("checked to have autodiff on this device: {error:?}"),
    });
    let Ok(out) = out.try_into_primitive::<B>() else { unreachable!("computed without autodiff on this device") };
    let out = match Node.prepare::<C>(guards).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(saved, out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    };
    Tensor::from_primitive::<Autodiff<B, C>>(out)
}

/// The node.
#[derive(Debug)]
struct Node;

impl<B: Backend> Backward<B, 3> for Node
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Arc<dyn SavedForBackward>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let dout = Tensor::from_primitive::<B>(grads.consume::<B>(&ops.node));
        // All of them, whatever is tracked: other ranks wait for the gradients of their keys and values.
        let gradients = unwrapped(ops.state.gradients(dout));
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Ok(gradient)) = (parent, gradient.try_into_primitive::<B>()) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}
