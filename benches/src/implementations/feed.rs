//! Passes the gradient of an output to autodiff as the next layer of a model would, without computing anything.
//!
//! An explicit loss such as `Σ dout∘o` costs a product, a sum and their backwards, each a pass over memory, and they would be part of the
//! measured time.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{Shape, Tensor};
use burn_cubecl::CubeBackend;

/// A number whose gradient with respect to `o` is `dout`.
pub(super) fn loss(o: Tensor<4>, dout: Tensor<4>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::feed(o.into_dispatch(), dout.into_dispatch()))
}

/// An operation whose backward returns a given tensor.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait Feed: Backend {
    /// Returns a single zero.
    #[fusion(default)]
    fn feed(o: FloatTensor<Self>, _dout: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_zeros(Shape::new([1]), &o.device(), o.dtype().into())
    }
}

impl Feed for CubeBackend {}

impl<B: Feed, C: CheckpointStrategy> Feed for Autodiff<B, C> {
    fn feed(o: FloatTensor<Self>, dout: FloatTensor<Self>) -> FloatTensor<Self> {
        let (node, dout) = (o.node(), dout.into_primitive());
        let loss = B::feed(o.into_primitive(), dout.clone());
        match Fed.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(dout, loss),
            OpsKind::UnTracked(prep) => prep.finish(loss),
        }
    }
}

#[derive(Debug)]
struct Fed;

impl<B: Backend> Backward<B, 1> for Fed {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let _one = grads.consume::<B>(&ops.node);
        if let ([Some(o)], dout) = (ops.parents, ops.state) {
            grads.register::<B>(o.id, dout);
        }
    }
}
