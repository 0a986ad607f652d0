//! Attention of a rank over some rows, without autodiff: what the methods are composed of.

use super::SequenceParallelError;
use crate::api::try_flash_attention_with_lse;
use crate::backend::{FlashAttentionOps, Saved, Wanted};
use crate::options::FlashAttentionOptions;
use crate::tensors::{Extras, OptionalFloat, Tensors};
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::Tensor;
use flash_attention_kernels::BlockLists;

/// What the backward of a call reads, without autodiff.
#[derive(Clone, Debug)]
pub struct SavedCall {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    pub out: Tensor<4>,
    pub lse: Tensor<3>,
}

/// Output and log-sum-exp. `options` has no tensors.
pub fn forward(
    [q, k, v]: [Tensor<4>; 3],
    options: &FlashAttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), SequenceParallelError> {
    Ok(try_flash_attention_with_lse(q, k, v, options)?)
}

/// Gradients of `q`, `k` and `v`. If `out` and `lse` are those of attention over more keys than `k`, the gradients are the shares of these keys
/// (FlashAttention-2, arXiv:2307.08691, algorithm 2: probabilities are `exp(score − lse)`). `options` has no tensors.
pub fn backward(call: SavedCall, dout: Tensor<4>, options: &FlashAttentionOptions) -> [Tensor<4>; 3] {
    let SavedCall { q, k, v, out, lse } = call;
    let saved = Saved::<Dispatch> {
        out: out.into_dispatch(),
        lse: lse.into_dispatch(),
        dout: dout.into_dispatch(),
        dlse: OptionalFloat::None,
    };
    let extras = Extras::new(Tensors::<DispatchTensor>::default(), [0; 2], BlockLists::default());
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    let found = Dispatch::flash_attention_backward(q, k, v, extras, saved, Wanted::QKV, options.numbers());
    [found.dq, found.dk, found.dv].map(|gradient| match gradient.into_option() {
        Some(gradient) => Tensor::from_dispatch(gradient),
        None => unreachable!("all three are wanted"),
    })
}
