//! What attention needs of the communication between ranks.

use super::CollectiveError;
use burn::tensor::Tensor;
use std::fmt::Debug;
use std::sync::{Arc, Weak};

/// One rank's side of the communication in a group. [`local_group`](super::local_group) is the implementation for ranks that are threads of
/// one process.
///
/// Every rank of the group makes the same calls in the same order, with tensors of the same shapes and element types, which have no
/// autodiff. A call waits for those of the other ranks. If a rank drops out, calls of the others must fail with an error instead of waiting
/// forever.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::sequence_parallel::local_group;
/// use std::time::Duration;
///
/// // A group of one: what it sends comes back.
/// let rank = local_group(1, Duration::from_secs(1)).remove(0);
/// assert_eq!((rank.rank(), rank.world_size()), (0, 1));
/// let back = rank.ring_shift(vec![Tensor::<4>::ones([1, 1, 2, 1], &Device::flex())])?;
/// assert_eq!(back[0].clone().sum().into_scalar::<f32>(), 2.0);
/// # }
/// # Ok::<(), burn_flash_attention::sequence_parallel::CollectiveError>(())
/// ```
pub trait Collectives: Debug + Send + Sync {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks of the group.
    fn world_size(&self) -> usize;

    /// Splits each tensor along `dim` into a block for each rank, sends block `r` to rank `r`, and concatenates the blocks received along `dim`
    /// in the order of ranks. `world_size` divides that dimension.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], if the group cannot complete the call.
    fn all_to_all(&self, tensors: Vec<Tensor<4>>, dim: usize) -> Result<Vec<Tensor<4>>, CollectiveError>;

    /// Sends the tensors to the next rank, `(rank + 1) % world_size`, and returns those of the previous one, on this rank's device.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], if the group cannot complete the call.
    fn ring_shift(&self, tensors: Vec<Tensor<4>>) -> Result<Vec<Tensor<4>>, CollectiveError>;
}

/// The collectives of a backward, unless the rank has dropped them.
pub(super) fn alive(collectives: &Weak<dyn Collectives>) -> Result<Arc<dyn Collectives>, CollectiveError> {
    let dropped = || CollectiveError::Other("the rank's collectives were dropped before its backward".to_string());
    collectives.upgrade().ok_or_else(dropped)
}

/// As many tensors as were sent.
pub(super) fn received<const N: usize>(tensors: Vec<Tensor<4>>) -> Result<[Tensor<4>; N], CollectiveError> {
    let found = tensors.len();
    tensors.try_into().map_err(|_| CollectiveError::Other(format!("{found} tensors came for {N} that were sent")))
}
