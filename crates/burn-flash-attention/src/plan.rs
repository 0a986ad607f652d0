//! Plans of attention calls.

use flash_attention_kernels::Plan;
use serde::Serialize;
use std::fmt::{Display, Formatter, Result};

/// The kernel that [`flash_attention`](crate::flash_attention) runs for a call, as returned by [`plan`](crate::plan()).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AttentionPlan, FlashAttentionOptions, plan};
///
/// let q = Tensor::<4>::zeros([1, 8, 1024, 64], &Device::flex());
/// assert!(matches!(plan(&q, &q, &q, &FlashAttentionOptions::new()), Ok(AttentionPlan::Host(_))));
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "plans are few and short-lived")]
pub enum AttentionPlan {
    /// A CubeCL kernel.
    Kernel(Plan),
    /// Loops on the host, for tensors on Flex.
    Host(HostPlan),
}

/// Plan of the loops on the host.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AttentionPlan, FlashAttentionOptions, plan};
///
/// // Scratch memory is linear in the sequence.
/// let scratch = |seq| {
///     let q = Tensor::<4>::zeros([1, 1, seq, 64], &Device::flex());
///     match plan(&q, &q, &q, &FlashAttentionOptions::new()) {
///         Ok(AttentionPlan::Host(host)) => host.scratch_bytes,
///         other => panic!("{other:?}"),
///     }
/// };
/// assert!(scratch(8192) <= 2 * scratch(4096));
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HostPlan {
    /// Queries in a tile.
    pub tile_q: usize,
    /// Keys in a tile.
    pub tile_k: usize,
    /// Threads that process tiles in parallel.
    pub threads: usize,
    /// Upper bound on the memory that the backward, the larger of the two passes, needs in addition to inputs and outputs.
    pub scratch_bytes: usize,
}

impl Display for AttentionPlan {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            AttentionPlan::Kernel(plan) => write!(f, "{plan}"),
            AttentionPlan::Host(plan) => write!(f, "{plan}"),
        }
    }
}

impl Display for HostPlan {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let HostPlan { tile_q, tile_k, threads, scratch_bytes } = self;
        write!(
            f,
            "host loops over tiles of {tile_q} queries by {tile_k} keys on {threads} threads, {scratch_bytes} bytes of scratch; \
             the tensors are on Flex, so no kernel can run"
        )
    }
}
