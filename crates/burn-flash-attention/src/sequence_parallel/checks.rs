//! Checks of a rank's arguments, before anything runs or is sent.

use super::SequenceParallelError;
use crate::api::{check_on_device, posed};
use crate::checks::unsupported_value;
use crate::options::FlashAttentionOptions;
use crate::problem::{dtype, problem};
use crate::tensors::Tensors;
use burn::tensor::Tensor;
use flash_attention_kernels::AttentionError;

/// A way to divide attention among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Ulysses,
    Ring,
}

/// Checks the options, the rank's tensors, and a problem of these shapes of `q`, `k` and `v`, which the rank's device computes.
pub fn check(
    method: Method,
    [q, k, v]: [&Tensor<4>; 3],
    shapes: [[usize; 4]; 3],
    options: &FlashAttentionOptions,
) -> Result<(), SequenceParallelError> {
    honoured(method, options)?;
    let (device, _) = posed(q, k, v, options)?;
    let shapes = shapes.each_ref().map(|shape| shape.as_slice());
    let computed = problem(shapes, &Tensors::default(), [0; 2], dtype("q", q.dtype())?, options.numbers())?;
    Ok(check_on_device(device.as_dispatch(), &computed)?)
}

/// An argument whose value makes no sense.
pub fn refused(argument: &'static str, value: usize, why: &'static str) -> SequenceParallelError {
    unsupported_value(argument, value, why).into()
}

/// Checks that a size is a multiple of another one.
pub fn divides(
    (argument, value): (&'static str, usize),
    (divisor, reason): (usize, &'static str),
) -> Result<(), SequenceParallelError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(SequenceParallelError::Indivisible { argument, value, divisor, reason })
}

/// Refuses the options that the method cannot honour.
fn honoured(method: Method, options: &FlashAttentionOptions) -> Result<(), AttentionError> {
    // All fields by name, so that a new option is decided upon here.
    let FlashAttentionOptions {
        softmax_scale: _,
        causal: _,
        alignment: _,
        continued: _,
        window_left,
        window_right,
        softcap: _,
        dropout,
        dropout_seed: _,
        backward_order: _,
        precision: _,
        mask,
        bias,
        alibi_slopes,
        seq_lens_q,
        seq_lens_k,
        cu_seqlens_q,
        cu_seqlens_k,
        sinks,
        temperature,
        score_mod,
        score_tensors,
        mask_mod,
        mask_tensors,
        block_mask,
    } = options;
    for (option, window) in [("window_left", window_left), ("window_right", window_right)] {
        if let (Method::Ring, Some(window)) = (method, window) {
            return Err(unsupported_value(option, window, "a ring has no windows; use ulysses_attention"));
        }
    }
    if *dropout != 0.0 {
        return Err(unsupported_value(
            "dropout",
            dropout,
            "ranks would drop the same pairs of different heads or keys",
        ));
    }
    let given = [
        ("mask", mask.is_some()),
        ("bias", bias.is_some()),
        ("alibi_slopes", alibi_slopes.is_some()),
        ("seq_lens_q", seq_lens_q.is_some()),
        ("seq_lens_k", seq_lens_k.is_some()),
        ("cu_seqlens_q", cu_seqlens_q.is_some()),
        ("cu_seqlens_k", cu_seqlens_k.is_some()),
        ("sinks", sinks.is_some()),
        ("temperature", temperature.is_some()),
        ("score_mod", score_mod.is_some()),
        ("score_tensors", !score_tensors.is_empty()),
        ("mask_mod", mask_mod.is_some()),
        ("mask_tensors", !mask_tensors.is_empty()),
        ("block_mask", block_mask.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((option, _)) => {
            Err(unsupported_value(option, "set", "a rank has only a share of the sequence, or of the heads"))
        }
        None => Ok(()),
    }
}
