//! Attention on the tensors of Burn's CubeCL backend: views of them, outputs for them, and the kernels in between.

use crate::backend::{AttentionGradients, AttentionOutput, Extras, FlashAttentionOps, Masks, OptionalFloat, Wanted};
use crate::problem::{Shapes, dtype, problem};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{BoolStore, DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::untile;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use flash_attention_kernels::mods::TENSORS;
#[cfg(feature = "autotune")]
use flash_attention_kernels::tuning::{backward_tuned as backward, forward_tuned as forward};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, Gradients, Inputs, MaskStorage, MaskView, Saved, TensorView,
    block_states,
};
#[cfg(not(feature = "autotune"))]
use flash_attention_kernels::{backward, forward};

impl FlashAttentionOps for CubeBackend {
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        extras: Extras<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        launched(try_forward(q, k, v, extras, options))
    }

    fn flash_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        extras: Extras<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        dlse: OptionalFloat<Self>,
        wanted: Wanted,
        options: AttentionOptions,
    ) -> AttentionGradients<Self> {
        launched(try_backward(q, k, v, extras, out, lse, dout, dlse, wanted, options))
    }

    fn flash_attention_block_states(
        empty: IntTensor<Self>,
        masks: Masks<Self>,
        problem: AttentionProblem,
    ) -> IntTensor<Self> {
        launched(try_block_states(empty, masks, &problem))
    }
}

/// The states of blocks, or why they cannot be found out.
fn try_block_states(
    empty: CubeTensor,
    masks: Masks<CubeBackend>,
    problem: &AttentionProblem,
) -> Result<CubeTensor, AttentionError> {
    let mask = masks.mask.into_option().map(untile);
    let tensors = [masks.mask_a, masks.mask_b].map(|tensor| tensor.into_option().map(untile));
    let (client, shape) = (empty.client, empty.meta.shape().clone());
    let states = empty_device_contiguous_dtype(client.clone(), empty.device, shape, empty.dtype);
    // Of queries, keys and values nothing is read.
    let of_states = || view(&states);
    let inputs = Inputs {
        mask: mask.map(|mask| MaskView { tensor: view(&mask), storage: storage(mask.dtype) }),
        mask_tensors: tensors.each_ref().map(|tensor| tensor.as_ref().map(view)),
        ..Inputs::new(of_states(), of_states(), of_states())
    };
    block_states(&client, problem, &inputs, &of_states())?;
    Ok(states)
}

/// The forward, or why it cannot be done.
pub fn try_forward(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    extras: Extras<CubeBackend>,
    options: AttentionOptions,
) -> Result<AttentionOutput<CubeBackend>, AttentionError> {
    let call = Call::new(q, k, v, extras, options)?;
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
    extras: Extras<CubeBackend>,
    out: CubeTensor,
    lse: CubeTensor,
    dout: CubeTensor,
    dlse: OptionalFloat<CubeBackend>,
    wanted: Wanted,
    options: AttentionOptions,
) -> Result<AttentionGradients<CubeBackend>, AttentionError> {
    let call = Call::new(q, k, v, extras, options)?;
    let problem = &call.problem;
    let dq = wanted.dq.then(|| call.empty(problem.q_shape(), call.q.dtype));
    let dk = wanted.dk.then(|| call.empty(problem.k_shape(), call.q.dtype));
    let dv = wanted.dv.then(|| call.empty(problem.v_shape(), call.q.dtype));
    let dbias = problem.bias.filter(|_| wanted.dbias).map(|shape| call.empty(shape, call.q.dtype));
    let dalibi_slopes = problem.alibi_slopes.filter(|_| wanted.dalibi_slopes);
    let dalibi_slopes = dalibi_slopes.map(|shape| call.empty(shape, DType::F32));
    let dsinks = (problem.sinks && wanted.dsinks).then(|| call.empty([problem.num_heads_q], DType::F32));
    let dscore_tensors: [_; TENSORS] = std::array::from_fn(|nth| {
        let shape = problem.score_tensors[nth].filter(|_| wanted.dscore_tensors[nth]);
        shape.map(|shape| call.empty(shape, DType::F32))
    });
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
        dalibi_slopes: dalibi_slopes.as_ref().map(view),
        dsinks: dsinks.as_ref().map(view),
        dscore_tensors: dscore_tensors.each_ref().map(|tensor| tensor.as_ref().map(view)),
    };
    backward(&call.q.client, problem, &call.inputs, &saved, &gradients)?;
    let [dscore_a, dscore_b] = dscore_tensors;
    Ok(AttentionGradients {
        dq: dq.into(),
        dk: dk.into(),
        dv: dv.into(),
        dbias: dbias.into(),
        dalibi_slopes: dalibi_slopes.into(),
        dsinks: dsinks.into(),
        dscore_a: dscore_a.into(),
        dscore_b: dscore_b.into(),
    })
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
        extras: Extras<CubeBackend>,
        options: AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let (q, k, v) = (untile(q), untile(k), untile(v));
        let mask = extras.mask.into_option().map(untile);
        let [bias, slopes, sinks] =
            [extras.bias, extras.alibi_slopes, extras.sinks].map(|tensor| tensor.into_option().map(untile));
        let [seed, lens_q, lens_k, cu_q, cu_k, states] = [
            extras.dropout_seed,
            extras.seq_lens_q,
            extras.seq_lens_k,
            extras.cu_seqlens_q,
            extras.cu_seqlens_k,
            extras.block_mask,
        ]
        .map(|tensor| tensor.into_option().map(untile));
        let [score_tensors, mask_tensors] = [[extras.score_a, extras.score_b], [extras.mask_a, extras.mask_b]]
            .map(|tensors| tensors.map(|tensor| tensor.into_option().map(untile)));

        let shape = |tensor: &Option<CubeTensor>| tensor.as_ref().map(|tensor| tensor.meta.shape().to_vec());
        let shapes_of = |tensors: &[Option<CubeTensor>]| tensors.iter().filter_map(shape).collect();
        let shapes = Shapes {
            mask: shape(&mask),
            bias: shape(&bias),
            alibi_slopes: shape(&slopes),
            sinks: shape(&sinks),
            seq_lens_q: shape(&lens_q),
            seq_lens_k: shape(&lens_k),
            cu_seqlens_q: shape(&cu_q),
            cu_seqlens_k: shape(&cu_k),
            score_tensors: shapes_of(&score_tensors),
            mask_tensors: shapes_of(&mask_tensors),
            block_mask: shape(&states).map(|states| (states, extras.block_sizes)),
        };
        let problem = problem([q.meta.shape(), k.meta.shape(), v.meta.shape()], shapes, dtype("q", q.dtype)?, options)?;
        let inputs = Inputs {
            mask: mask.map(|mask| MaskView { tensor: view(&mask), storage: storage(mask.dtype) }),
            bias: bias.as_ref().map(view),
            alibi_slopes: slopes.as_ref().map(view),
            sinks: sinks.as_ref().map(view),
            dropout_seed: seed.as_ref().map(view),
            seq_lens_q: lens_q.as_ref().map(view),
            seq_lens_k: lens_k.as_ref().map(view),
            cu_seqlens_q: cu_q.as_ref().map(view),
            cu_seqlens_k: cu_k.as_ref().map(view),
            score_tensors: score_tensors.each_ref().map(|tensor| tensor.as_ref().map(view)),
            mask_tensors: mask_tensors.each_ref().map(|tensor| tensor.as_ref().map(view)),
            block_mask: states.as_ref().map(view),
            block_lists: extras.block_lists,
            ..Inputs::new(view(&q), view(&k), view(&v))
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
