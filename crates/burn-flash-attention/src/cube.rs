//! Attention on the tensors of Burn's CubeCL backend: views of them, outputs for them, and the kernels in between.

use crate::backend::{AttentionGradients, AttentionOutput, FlashAttentionOps, OptionalBool, OptionalFloat, Wanted};
use crate::problem::{dtype, problem};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{BoolStore, DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::untile;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
#[cfg(feature = "autotune")]
use flash_attention_kernels::tuning::{backward_tuned as backward, forward_tuned as forward};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, Gradients, Inputs, MaskStorage, MaskView, Saved, TensorView,
};
#[cfg(not(feature = "autotune"))]
use flash_attention_kernels::{backward, forward};

impl FlashAttentionOps for CubeBackend {
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: OptionalBool<Self>,
        bias: OptionalFloat<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        launched(try_forward(q, k, v, mask, bias, options))
    }

    fn flash_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: OptionalBool<Self>,
        bias: OptionalFloat<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        dlse: OptionalFloat<Self>,
        wanted: Wanted,
        options: AttentionOptions,
    ) -> AttentionGradients<Self> {
        launched(try_backward(q, k, v, mask, bias, out, lse, dout, dlse, wanted, options))
    }
}

/// The forward, or why it cannot be done.
pub fn try_forward(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    mask: OptionalBool<CubeBackend>,
    bias: OptionalFloat<CubeBackend>,
    options: AttentionOptions,
) -> Result<AttentionOutput<CubeBackend>, AttentionError> {
    let call = Call::new(q, k, v, mask, bias, options)?;
    let out = call.empty(call.problem.o_shape(), call.q.dtype);
    let lse = call.empty(call.problem.lse_shape(), DType::F32);
    forward(&call.q.client, &call.problem, &call.inputs, &view(&out), &view(&lse))?;
    Ok(AttentionOutput { out, lse })
}

/// The backward, or why it cannot be done.
#[allow(clippy::too_many_arguments)]
pub fn try_backward(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    mask: OptionalBool<CubeBackend>,
    bias: OptionalFloat<CubeBackend>,
    out: CubeTensor,
    lse: CubeTensor,
    dout: CubeTensor,
    dlse: OptionalFloat<CubeBackend>,
    wanted: Wanted,
    options: AttentionOptions,
) -> Result<AttentionGradients<CubeBackend>, AttentionError> {
    let call = Call::new(q, k, v, mask, bias, options)?;
    let problem = &call.problem;
    let dq = wanted.dq.then(|| call.empty(problem.q_shape(), call.q.dtype));
    let dk = wanted.dk.then(|| call.empty(problem.k_shape(), call.q.dtype));
    let dv = wanted.dv.then(|| call.empty(problem.v_shape(), call.q.dtype));
    let dbias = problem.bias.filter(|_| wanted.dbias).map(|shape| call.empty(shape, call.q.dtype));
    // Gradients come as other operations left them: tiled, strided, or expanded with a stride of 0.
    let saved = Saved {
        o: view(&untile(out)),
        lse: view(&untile(lse)),
        dout: view(&untile(dout)),
        dlse: dlse.into_option().map(|dlse| view(&untile(dlse))),
    };
    let gradients = Gradients {
        dq: dq.as_ref().map(view),
        dk: dk.as_ref().map(view),
        dv: dv.as_ref().map(view),
        dbias: dbias.as_ref().map(view),
    };
    backward(&call.q.client, problem, &call.inputs, &saved, &gradients)?;
    Ok(AttentionGradients { dq: dq.into(), dk: dk.into(), dv: dv.into(), dbias: dbias.into() })
}

/// The arguments of a call, as the kernels take them.
struct Call {
    q: CubeTensor,
    problem: AttentionProblem,
    inputs: Inputs,
}

impl Call {
    fn new(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        mask: OptionalBool<CubeBackend>,
        bias: OptionalFloat<CubeBackend>,
        options: AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let (q, k, v) = (untile(q), untile(k), untile(v));
        let mask = mask.into_option().map(untile);
        let bias = bias.into_option().map(untile);

        let problem = problem(
            [q.meta.shape(), k.meta.shape(), v.meta.shape()],
            mask.as_ref().map(|mask| &mask.meta.shape()[..]),
            bias.as_ref().map(|bias| &bias.meta.shape()[..]),
            dtype("q", q.dtype)?,
            options,
        )?;
        let inputs = Inputs {
            q: view(&q),
            k: view(&k),
            v: view(&v),
            mask: mask.map(|mask| MaskView { tensor: view(&mask), storage: storage(mask.dtype) }),
            bias: bias.as_ref().map(view),
        };
        Ok(Call { q, problem, inputs })
    }

    /// An output, without the padded rows that some devices give to plain allocations.
    fn empty<const RANK: usize>(&self, shape: [usize; RANK], dtype: DType) -> CubeTensor {
        empty_device_contiguous_dtype(self.q.client.clone(), self.q.device.clone(), Shape::new(shape), dtype)
    }
}

fn view<const RANK: usize>(tensor: &CubeTensor) -> TensorView<RANK> {
    TensorView {
        handle: tensor.handle.clone(),
        shape: tensor.meta.shape().dims(),
        strides: std::array::from_fn(|dim| tensor.meta.strides()[dim]),
    }
}

fn storage(dtype: DType) -> MaskStorage {
    match dtype {
        DType::Bool(BoolStore::U32) => MaskStorage::U32,
        _ => MaskStorage::U8,
    }
}

/// `api` has checked all that can be wrong; what only a launch can find out has nobody left to return to, since Burn's
/// fusion may run it long after the call.
fn launched<T>(result: Result<T, AttentionError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
