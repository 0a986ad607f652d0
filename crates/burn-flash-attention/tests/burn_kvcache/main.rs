//! Attention with a key/value cache: decoding step by step gives what attention over the whole sequence gives, with every option, and a
//! cache does with its memory what it says.

#[path = "../common/mod.rs"]
mod common;
mod decoding;
mod e4m3;
mod held;
mod memory;
mod paged;
mod refusals;
mod sequence;
mod walks;

use burn::tensor::{Device, Tensor};
use burn_flash_attention::{KvCache, KvCacheConfig};
use common::*;
use flash_attention_kernels::{AttentionProblem, Dtype};

/// An empty cache for a problem.
fn cache_of(problem: &AttentionProblem, capacity: usize, device: &Device) -> KvCache {
    let config = KvCacheConfig::new(problem.batch, problem.num_heads_kv, problem.head_dim, capacity)
        .with_head_dim_v(Some(problem.head_dim_v))
        .with_dtype(Some(burn_dtype(problem.dtype).into()));
    config.init(device)
}

/// Lengths of a cache's sequences.
fn lens_of(cache: &KvCache) -> Vec<usize> {
    cache.seq_lens().into_data().iter::<i32>().map(|len| len as usize).collect()
}

/// Element types that a device computes in.
fn dtypes(target: &Target) -> Vec<Dtype> {
    let supported = |dtype: &Dtype| {
        let (device, element) = (&target.device, burn_dtype(*dtype));
        let q = Tensor::<4>::zeros([1, 1, 1, 1], (device, element));
        let cache = KvCacheConfig::new(1, 1, 1, 1).with_dtype(Some(element.into())).init(device);
        device.supports_dtype(element) && cache.plan(&q, &q, &q, &Default::default()).is_ok()
    };
    [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().filter(supported).collect()
}
