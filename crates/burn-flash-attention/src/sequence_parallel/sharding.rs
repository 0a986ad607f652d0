//! Which rows of a sequence a rank holds.

use super::SequenceParallelError;
use super::checks::{divides, refused};
use crate::checks::agree;
use burn::tensor::kind::Basic;
use burn::tensor::{Device, Int, Tensor};
use std::ops::Range;

/// How a sequence is divided among ranks.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_flash_attention::sequence_parallel::Sharding;
///
/// let tokens = Tensor::<1, Int>::arange(0..8, &Device::flex());
/// let shares = Sharding::Zigzag.shard(tokens, 0, 2)?;
/// assert_eq!(shares[0].clone().try_into_vec_as::<i32>().unwrap(), [0, 1, 6, 7]);
/// assert_eq!(shares[1].clone().try_into_vec_as::<i32>().unwrap(), [2, 3, 4, 5]);
/// # }
/// # Ok::<(), burn_flash_attention::sequence_parallel::SequenceParallelError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// Rank `r` holds chunk `r` of `world_size`. For [`ulysses_attention`](super::ulysses_attention).
    Contiguous,
    /// Rank `r` holds the chunks `r` and `2 · world_size − 1 − r` of `2 · world_size`, so that causal attention costs the same on every rank (context
    /// parallelism of Llama 3, arXiv:2407.21783, section 3.3.2). For [`ring_attention`](super::ring_attention).
    Zigzag,
}

impl Sharding {
    /// The shares of all ranks of a whole sequence, which lies along `dim`. They stay on the tensor's device.
    ///
    /// # Errors
    ///
    /// [`SequenceParallelError`] if the chunks do not divide the sequence, or if there is no such dimension.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::sequence_parallel::Sharding;
    ///
    /// // [batch, heads, seq, head_dim]
    /// let q = Tensor::<4>::zeros([1, 4, 1024, 64], &Device::flex());
    /// let shares = Sharding::Contiguous.shard(q, 2, 4)?;
    /// assert_eq!(shares[3].dims(), [1, 4, 256, 64]);
    /// # }
    /// # Ok::<(), burn_flash_attention::sequence_parallel::SequenceParallelError>(())
    /// ```
    pub fn shard<const D: usize, K: Basic>(
        self,
        sequence: Tensor<D, K>,
        dim: usize,
        world_size: usize,
    ) -> Result<Vec<Tensor<D, K>>, SequenceParallelError> {
        dimension::<D>(dim)?;
        if world_size == 0 {
            return Err(refused("world_size", world_size, "there must be at least one rank"));
        }
        let seq = sequence.dims()[dim];
        (0..world_size)
            .map(|rank| {
                let rows = self.rows(seq, rank, world_size)?.into_iter();
                Ok(Tensor::cat(rows.map(|rows| sequence.clone().slice_dim(dim, rows)).collect(), dim))
            })
            .collect()
    }

    /// The whole sequence of all ranks' shares, in the order of ranks, on the first share's device. The inverse of [`shard`](Sharding::shard).
    ///
    /// # Errors
    ///
    /// [`SequenceParallelError`] if the shares differ in shape, cannot be divided into chunks, or if there is none or no such dimension.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::sequence_parallel::Sharding;
    ///
    /// let share = |rows: [i32; 4]| Tensor::<1, Int>::from_data(rows, &Device::flex());
    /// let sequence = Sharding::Zigzag.unshard(vec![share([0, 1, 6, 7]), share([2, 3, 4, 5])], 0)?;
    /// assert_eq!(sequence.try_into_vec_as::<i32>().unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
    /// # }
    /// # Ok::<(), burn_flash_attention::sequence_parallel::SequenceParallelError>(())
    /// ```
    pub fn unshard<const D: usize, K: Basic>(
        self,
        shares: Vec<Tensor<D, K>>,
        dim: usize,
    ) -> Result<Tensor<D, K>, SequenceParallelError> {
        dimension::<D>(dim)?;
        let world_size = shares.len();
        let Some(first) = shares.first() else { return Err(refused("shares", 0, "at least one is needed")) };
        let (dims, device) = (first.dims(), first.device());
        let mut chunks = Vec::new();
        for (rank, share) in shares.into_iter().enumerate() {
            for (axis, size) in dims.into_iter().enumerate() {
                agree("shares", &share.dims(), (axis, "size"), ("the first share", size))?;
            }
            let share = share.to_device(&device);
            let mut from = 0;
            for rows in self.rows(dims[dim] * world_size, rank, world_size)? {
                chunks.push((rows.start, share.clone().slice_dim(dim, from..from + rows.len())));
                from += rows.len();
            }
        }
        // Stable: of chunks without rows it does not matter which comes first.
        chunks.sort_by_key(|(start, _)| *start);
        Ok(Tensor::cat(chunks.into_iter().map(|(_, chunk)| chunk).collect(), dim))
    }

    /// The positions `[seq / world_size]` of a rank's rows in a sequence of `seq` rows, as rotary embedding needs them.
    ///
    /// # Errors
    ///
    /// [`SequenceParallelError`] if the chunks do not divide the sequence, or if there is no such rank.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::RotaryEmbeddingConfig;
    /// use burn_flash_attention::sequence_parallel::Sharding;
    ///
    /// let device = Device::flex();
    /// let positions = Sharding::Zigzag.positions(1024, 0, 4, &device)?;
    /// let rotary = RotaryEmbeddingConfig::new(1024).init(64, &device);
    /// let angles = rotary.angles_at(positions.unsqueeze::<2>());
    /// let q = rotary.apply(Tensor::<4>::zeros([1, 8, 256, 64], &device), &angles);
    /// # assert_eq!(q.dims(), [1, 8, 256, 64]);
    /// # }
    /// # Ok::<(), burn_flash_attention::sequence_parallel::SequenceParallelError>(())
    /// ```
    pub fn positions(
        self,
        seq: usize,
        rank: usize,
        world_size: usize,
        device: &Device,
    ) -> Result<Tensor<1, Int>, SequenceParallelError> {
        let rows = self.rows(seq, rank, world_size)?.into_iter();
        let chunks = rows.map(|rows| Tensor::arange(rows.start as i64..rows.end as i64, device));
        Ok(Tensor::cat(chunks.collect(), 0))
    }

    /// The ranges of the rows of a rank.
    fn rows(self, seq: usize, rank: usize, world_size: usize) -> Result<Vec<Range<usize>>, SequenceParallelError> {
        if rank >= world_size {
            return Err(refused("rank", rank, "it must be below world_size"));
        }
        let (count, chunks, reason) = match self {
            Sharding::Contiguous => (world_size, vec![rank], "the number of ranks"),
            Sharding::Zigzag => {
                (2 * world_size, vec![rank, 2 * world_size - 1 - rank], "two chunks for each rank (zigzag)")
            }
        };
        divides(("seq", seq), (count, reason))?;
        let len = seq / count;
        Ok(chunks.into_iter().map(|chunk| chunk * len..(chunk + 1) * len).collect())
    }
}

/// Checks that a tensor of rank `D` has a dimension.
fn dimension<const D: usize>(dim: usize) -> Result<(), SequenceParallelError> {
    if dim < D { Ok(()) } else { Err(refused("dim", dim, "the tensor has no such dimension")) }
}
