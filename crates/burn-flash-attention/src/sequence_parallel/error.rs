//! What can go wrong between ranks.

use flash_attention_kernels::AttentionError;
use std::time::Duration;
use thiserror::Error;

/// Why a rank's exchange with the others failed.
///
/// ```
/// use burn_flash_attention::sequence_parallel::CollectiveError;
///
/// assert_eq!(CollectiveError::Left { rank: 3 }.to_string(), "rank 3 has left the group");
/// ```
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A rank dropped its collectives: it returned, failed or panicked.
    #[error("rank {rank} has left the group")]
    Left {
        /// The rank that left.
        rank: usize,
    },
    /// Some ranks did not call in time.
    #[error("ranks {missing:?} did not join {operation} of rank {rank} within {timeout:?}")]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// What it called.
        operation: String,
        /// The ranks that it waited for.
        missing: Vec<usize>,
        /// How long it waited.
        timeout: Duration,
    },
    /// Two ranks called different operations, or with tensors of different shapes or element types.
    #[error("rank {rank} calls {found}, but rank 0 calls {expected}")]
    Mismatch {
        /// The rank that differs from rank 0.
        rank: usize,
        /// What it calls.
        found: String,
        /// What rank 0 calls.
        expected: String,
    },
    /// A failure of another implementation of [`Collectives`](super::Collectives).
    #[error("{0}")]
    Other(String),
}

/// Why attention over several devices failed.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::FlashAttentionOptions;
/// use burn_flash_attention::sequence_parallel::{local_group, try_ring_attention};
/// use std::time::Duration;
///
/// let x = || Tensor::<4>::zeros([1, 2, 8, 16], &Device::flex());
/// let ranks = local_group(2, Duration::from_secs(60));
/// let options = FlashAttentionOptions::new().with_window_left(3);
/// let error = try_ring_attention(x(), x(), x(), &options, &ranks[0]).unwrap_err();
/// assert!(error.to_string().starts_with("window_left = 3 is not supported: a ring has no windows"));
/// # }
/// ```
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SequenceParallelError {
    /// An argument that attention refuses, here or on one device.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// The ranks could not exchange tensors.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A size that cannot be divided evenly.
    #[error("{argument} is {value}; it must be a multiple of {divisor}, {reason}")]
    Indivisible {
        /// The argument at fault.
        argument: &'static str,
        /// Its value.
        value: usize,
        /// What it must be a multiple of.
        divisor: usize,
        /// What the divisor is.
        reason: &'static str,
    },
}
