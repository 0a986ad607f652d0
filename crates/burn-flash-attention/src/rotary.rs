//! Rotary position embedding as an operation of a backend, with its gradient: a rotation by the opposite angles.

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{
    base::Checkpointer, retro_forward::RetroForward, state::BackwardStates, strategy::CheckpointStrategy,
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, DispatchDevice, backend_extension};
use burn::tensor::Tensor;
use flash_attention_kernels::{AttentionError, Dtype, RotaryLayout};

#[cfg(feature = "cube")]
use {
    crate::cube::{launched, view},
    crate::problem::dtype,
    burn_cubecl::{CubeBackend, kernel::untile, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor},
    flash_attention_kernels::{Rotary, apply_rotary, check_rotary},
};

/// How rows are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Columns that are rotated as a pair.
    pub layout: RotaryLayout,
    /// Whether by the opposite angles.
    pub inverse: bool,
}

/// Rotation of rows as one operation of a backend.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "fusion"),
    Autodiff
)]
pub trait RotaryOps: Backend {
    /// Rotates the first columns of `x`, `[batch, heads, seq, head_dim]`, by the angles of cosines and sines,
    /// `[batch | 1, 1, seq, rotary_dim / 2]` in f32, which have no gradient.
    #[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
    #[fusion(meta = |x, _cos, _sin, _rotation| x.clone())]
    fn apply_rotary(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        rotation: Rotation,
    ) -> FloatTensor<Self>;
}

/// Rotates rows that have been checked.
pub fn apply(x: Tensor<4>, cos: Tensor<4>, sin: Tensor<4>, layout: RotaryLayout) -> Tensor<4> {
    let rotation = Rotation { layout, inverse: false };
    Tensor::from_dispatch(Dispatch::apply_rotary(x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch(), rotation))
}

/// Checks that the device can rotate rows of this shape: what fails on a worker thread reaches nobody.
#[allow(unused_variables)]
pub fn check(device: &DispatchDevice, dtype: Dtype, shape: [usize; 4]) -> Result<(), AttentionError> {
    match device {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => check_rotary(&device.client(), dtype, shape),
        other => crate::checks::check_device(other),
    }
}

#[cfg(feature = "cube")]
impl RotaryOps for CubeBackend {
    fn apply_rotary(x: CubeTensor, cos: CubeTensor, sin: CubeTensor, rotation: Rotation) -> CubeTensor {
        let Rotation { layout, inverse } = rotation;
        let [x, cos, sin] = [x, cos, sin].map(untile);
        let shape = x.meta.shape().clone();
        let out = empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape, x.dtype);
        let call = Rotary { x: view(&x), cos: view(&cos), sin: view(&sin), out: view(&out), layout, inverse };
        launched(dtype("x", x.dtype).and_then(|dtype| apply_rotary(&x.client, dtype, &call)));
        out
    }
}

impl<B: RotaryOps, C: CheckpointStrategy> RotaryOps for Autodiff<B, C> {
    fn apply_rotary(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        rotation: Rotation,
    ) -> FloatTensor<Self> {
        let angles = Angles::<B> { cos: cos.into_primitive(), sin: sin.into_primitive(), rotation };
        let again = Again { x: x.node().id(), angles: angles.clone() };
        let prepared = Turn.prepare::<C>([x.node()]).memory_bound().retro_forward(again).parents([&x]).stateful();
        let out = angles.clone().apply(x.into_primitive());
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(angles, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// Angles by which rows were rotated.
#[derive(Clone, Debug)]
struct Angles<B: Backend> {
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    rotation: Rotation,
}

impl<B: RotaryOps> Angles<B> {
    fn apply(self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::apply_rotary(x, self.cos, self.sin, self.rotation)
    }
}

/// The rotation in Burn's graph.
#[derive(Debug)]
struct Turn;

impl<B: RotaryOps> Backward<B, 1> for Turn {
    type State = Angles<B>;

    fn backward(self, ops: Ops<Angles<B>, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        // A rotation's transpose is its inverse. A factor that cosines and sines have is in both.
        let rotation = Rotation { inverse: !ops.state.rotation.inverse, ..ops.state.rotation };
        let angles = Angles { rotation, ..ops.state };
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| angles.apply(gradient));
    }
}

/// Rotates once more in the backward, where gradient checkpointing did not keep the result.
#[derive(Debug)]
struct Again<B: Backend> {
    x: NodeId,
    angles: Angles<B>,
}

impl<B: RotaryOps> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let x = states.get_state::<FloatTensor<B>>(&self.x);
        states.save(out, self.angles.clone().apply(x));
    }
}
