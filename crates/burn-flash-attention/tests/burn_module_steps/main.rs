//! Modules that decode in steps of new positions: the outputs are those of the whole sequence, for every option that has a meaning with a
//! cache, and an error leaves the cache as it was.

mod caches;
#[path = "../common/mod.rs"]
mod common;
mod options;
mod refusals;
mod transformers;

use burn::tensor::{Bool, Device, Tensor};
use burn_flash_attention::{FlashMultiHeadAttention, FlashMultiHeadAttentionConfig};

const D_MODEL: usize = 24;
const D_FF: usize = 40;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const LAYERS: usize = 2;
const BATCH: usize = 2;
const SEQ: usize = 12;
const MEMORY: usize = 7;

/// New positions of each step: a prompt, single positions, several.
const STEPS: [usize; 5] = [5, 1, 1, 4, 1];

/// Where each step begins, and its number of positions.
fn steps() -> impl Iterator<Item = (usize, usize)> {
    STEPS.into_iter().scan(0, |start, new| {
        *start += new;
        Some((*start - new, new))
    })
}

/// Causal attention with grouped heads.
fn attention(device: &Device) -> FlashMultiHeadAttention {
    FlashMultiHeadAttentionConfig::new(D_MODEL, HEADS).with_n_kv_heads(Some(KV_HEADS)).with_causal(true).init(device)
}

/// The positions of a step.
fn part(x: &Tensor<3>, (start, new): (usize, usize)) -> Tensor<3> {
    x.clone().narrow(1, start, new)
}

/// A mask `[BATCH, queries, keys]` that hides every third pair.
fn thirds(queries: usize, keys: usize, device: &Device) -> Tensor<3, Bool> {
    let flags: Vec<bool> = (0..BATCH * queries * keys).map(|n| (n / keys + n % keys) % 3 == 2).collect();
    Tensor::<1, Bool>::from_data(flags.as_slice(), device).reshape([BATCH, queries, keys])
}

/// Padding `[BATCH, keys]` of the second sequence: its second key.
fn padding(keys: usize, device: &Device) -> Tensor<2, Bool> {
    let flags: Vec<bool> = (0..BATCH * keys).map(|n| n == keys + 1).collect();
    Tensor::<1, Bool>::from_data(flags.as_slice(), device).reshape([BATCH, keys])
}
