//! Steps of decoding: which options have a meaning for new positions alone, and the part of a prefix that is new.

use crate::options::FlashAttentionOptions;
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use flash_attention_kernels::problem::check_broadcast;
use flash_attention_kernels::{Alignment, AttentionError};

/// Checks that options have a meaning for new positions with a cache. Over a memory, options that count positions are refused: each new
/// query would be aligned with the memory's last key, and functions would receive its position among the new ones.
pub(super) fn check_decodes(options: &FlashAttentionOptions, of_memory: bool) -> Result<(), AttentionError> {
    let first = "with a cache, queries are the last positions of a sequence, not the first ones; leave it out";
    let lengths = "the cache has the lengths of its sequences; those of new positions are seq_lens_q";
    let blocks = "its blocks of queries begin at the first new position; use a mask or a mask function";
    let memory = "it counts positions of queries, but over a memory each call begins at position 0 and ends with the same last key; leave it out";
    refuse(&[
        ("alignment", options.alignment != Alignment::BottomRight, first),
        ("seq_lens_k", options.seq_lens_k.is_some(), lengths),
        ("cu_seqlens_q", options.cu_seqlens_q.is_some(), lengths),
        ("cu_seqlens_k", options.cu_seqlens_k.is_some(), lengths),
        ("block_mask", options.block_mask.is_some(), blocks),
        ("causal", of_memory && options.causal, memory),
        ("window_left", of_memory && options.window_left.is_some(), memory),
        ("window_right", of_memory && options.window_right.is_some(), memory),
        ("alibi_slopes", of_memory && options.alibi_slopes.is_some(), memory),
        ("score_mod", of_memory && options.score_mod.is_some(), memory),
        ("mask_mod", of_memory && options.mask_mod.is_some(), memory),
    ])
}

/// Checks the options of a whole prefix, whose scores have this shape: bias and tensors of functions broadcast to the scores, so that rows
/// can be taken from them, and all sequences have the length of the prefix. The module's own check is that of the mask.
pub(super) fn check_prefix(options: &FlashAttentionOptions, scores: [usize; 4]) -> Result<(), AttentionError> {
    let why = "all sequences of a prefix have its length; take steps where they have not";
    refuse(&[("seq_lens_q", options.seq_lens_q.is_some(), why)])?;
    for (argument, tensors) in [
        ("bias", options.bias.as_slice()),
        ("score_tensors", options.score_tensors.as_slice()),
        ("mask_tensors", options.mask_tensors.as_slice()),
    ] {
        tensors.iter().try_for_each(|tensor| check_broadcast(argument, tensor.dims(), scores, 4))?;
    }
    Ok(())
}

/// Checks that a cache has as many layers as the module.
pub(super) fn check_layers(layers: usize, cached: usize) -> Result<(), AttentionError> {
    if layers == cached {
        return Ok(());
    }
    Err(AttentionError::Unsupported {
        option: "cache",
        value: format!("{cached} layers"),
        why: "it is that of another module; new_autoregressive_cache() creates one",
    })
}

fn refuse(options: &[(&'static str, bool, &'static str)]) -> Result<(), AttentionError> {
    match options.iter().find(|(_, set, _)| *set) {
        None => Ok(()),
        Some(&(option, _, why)) => Err(AttentionError::Unsupported { option, value: "set".to_string(), why }),
    }
}

/// Options for the positions of a prefix after the first `decoded`: their rows of each tensor that has a row for each query.
pub(super) fn newest_options(options: FlashAttentionOptions, decoded: usize) -> FlashAttentionOptions {
    let all = |tensors: Vec<Tensor<4>>| tensors.into_iter().map(|tensor| newest_rows(tensor, decoded)).collect();
    FlashAttentionOptions {
        mask: options.mask.map(|mask| newest_rows(mask, decoded)),
        bias: options.bias.map(|bias| newest_rows(bias, decoded)),
        score_tensors: all(options.score_tensors),
        mask_tensors: all(options.mask_tensors),
        ..options
    }
}

/// Rows of queries after the first `decoded`. One row is that of all queries.
fn newest_rows<K: Basic>(tensor: Tensor<4, K>, decoded: usize) -> Tensor<4, K> {
    let rows = tensor.dims()[2];
    if rows == 1 || decoded == 0 { tensor } else { tensor.narrow(2, decoded, rows - decoded) }
}

/// Positions of `[batch, seq, …]` after the first `decoded`: of an input, or of the rows of burn-nn's mask.
pub(super) fn newest<K: Basic>(tensor: Tensor<3, K>, decoded: usize) -> Tensor<3, K> {
    let seq = tensor.dims()[1];
    if decoded == 0 { tensor } else { tensor.narrow(1, decoded, seq - decoded) }
}
