//! What can be wrong with a call, each kind naming the argument and its value.

use thiserror::Error;

/// A result whose error is an [`AttentionError`].
pub(crate) type Result<T, E = AttentionError> = std::result::Result<T, E>;

/// Why an attention call was refused. Raised before anything is launched.
///
/// ```
/// use flash_attention_kernels::{AttentionError, AttentionProblem, AttentionOptions, Dtype};
///
/// let error = AttentionProblem::new(&[1, 6, 8, 64], &[1, 4, 8, 64], &[1, 4, 8, 64], Dtype::F32, AttentionOptions::default())
///     .unwrap_err();
/// assert_eq!(error, AttentionError::HeadsNotGrouped { num_heads_q: 6, num_heads_kv: 4 });
/// assert!(error.to_string().contains("num_heads_q is 6"));
/// ```
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum AttentionError {
    /// A tensor has another number of dimensions than the operation takes.
    #[error("{argument} has rank {rank} (shape {shape:?}), but attention takes rank {expected}")]
    Rank {
        /// The argument at fault.
        argument: &'static str,
        /// Its rank.
        rank: usize,
        /// Its shape.
        shape: Vec<usize>,
        /// The rank that attention takes.
        expected: usize,
    },
    /// A dimension that must agree with another argument's does not.
    #[error("{argument} has {dimension} {value} (shape {shape:?}), but {expected_by} has {expected}")]
    Dimension {
        /// The argument at fault.
        argument: &'static str,
        /// The dimension at fault.
        dimension: &'static str,
        /// Its size.
        value: usize,
        /// The argument's shape.
        shape: Vec<usize>,
        /// The argument that sets the size.
        expected_by: &'static str,
        /// The size that it sets.
        expected: usize,
    },
    /// Query heads cannot be shared out evenly among key/value heads.
    #[error("num_heads_q is {num_heads_q}, which is not a multiple of num_heads_kv, {num_heads_kv}")]
    HeadsNotGrouped {
        /// Heads of `q`.
        num_heads_q: usize,
        /// Heads of `k` and `v`.
        num_heads_kv: usize,
    },
    /// A head dimension outside the range that the kernels take.
    #[error("{argument} is {value}; it must be between {min} and {max}")]
    HeadDim {
        /// `head_dim` or `head_dim_v`.
        argument: &'static str,
        /// Its value.
        value: usize,
        /// The smallest supported.
        min: usize,
        /// The largest supported.
        max: usize,
    },
    /// A sequence too long for positions of 31 bits.
    #[error("{argument} is {value}; sequences of at most {max} are supported")]
    SequenceTooLong {
        /// `seq_q` or `seq_k`.
        argument: &'static str,
        /// Its value.
        value: usize,
        /// The largest supported.
        max: usize,
    },
    /// A tensor of more elements than are counted, whatever memory there is.
    #[error("{argument} has shape {shape:?}; tensors of at most {max} elements are supported")]
    Elements {
        /// The argument at fault.
        argument: &'static str,
        /// Its shape.
        shape: [usize; 4],
        /// The most supported.
        max: u64,
    },
    /// A number among the options is NaN, infinite or not positive where that makes no sense.
    #[error("{option} is {value}; it must be {requirement}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        requirement: &'static str,
    },
    /// Two arguments of different element types.
    #[error("{argument} is {dtype}, but q is {expected}")]
    MixedDtypes {
        /// The argument at fault.
        argument: &'static str,
        /// Its element type.
        dtype: String,
        /// The element type of `q`.
        expected: String,
    },
    /// New positions that a key/value cache has no room for.
    #[error("the cache has room for {capacity} positions and holds up to {len}, so that {new} new ones do not fit")]
    CacheFull {
        /// Positions that the cache has room for.
        capacity: usize,
        /// Length of its longest sequence.
        len: usize,
        /// New positions.
        new: usize,
    },
    /// New positions that need more pages than are free.
    #[error("{needed} pages are needed, but {free} of {num_pages} are free; free sequences, or append less")]
    OutOfPages {
        /// Pages of the cache.
        num_pages: usize,
        /// Free pages, with those that windows leave behind in this call.
        free: usize,
        /// Pages that the new positions need, with those for copies of shared ones.
        needed: usize,
    },
    /// A sequence that a paged cache does not have, or no longer.
    #[error("sequence {sequence} is not in the cache; it was freed, or belongs to another cache")]
    NoSequence {
        /// The name of the sequence.
        sequence: u64,
    },
    /// An argument that autodiff tracks, in a call that has no gradient.
    #[error(
        "{argument} is tracked by autodiff, but attention with a key/value cache has no gradient; call it on a model without autodiff (Module::valid) or on a detached tensor"
    )]
    Tracked {
        /// The argument at fault.
        argument: &'static str,
    },
    /// An element type that attention is not defined for.
    #[error("{argument} is {dtype}; supported are f32, f16 and bf16")]
    Dtype {
        /// The argument at fault.
        argument: &'static str,
        /// Its element type.
        dtype: String,
    },
    /// An element type that this device lacks.
    #[error("this device ({device}) does not compute in {dtype}, the type of q")]
    DtypeUnsupported {
        /// The element type.
        dtype: &'static str,
        /// The runtime's name.
        device: String,
    },
    /// A mask or bias that does not broadcast to the scores.
    #[error(
        "{argument} has shape {shape:?}, which does not broadcast to [batch, num_heads_q, seq_q, seq_k] = {expected:?}: dimension {dimension} is {value}"
    )]
    Broadcast {
        /// `mask` or `bias`.
        argument: &'static str,
        /// Its shape.
        shape: [usize; 4],
        /// The shape of the scores.
        expected: [usize; 4],
        /// The first dimension that fits neither 1 nor the scores'.
        dimension: usize,
        /// Its size.
        value: usize,
    },
    /// A block mask that has not as many blocks as the scores. Packed sequences may have fewer blocks, but not none.
    #[error(
        "block_mask has shape {shape:?}; expected are [batch or sequences | 1, num_heads_q | 1, blocks of queries, blocks of keys] = {expected:?}: dimension {dimension} is {value}"
    )]
    Blocks {
        /// Its shape.
        shape: [usize; 4],
        /// How many there are.
        expected: [usize; 4],
        /// The first dimension that does not fit.
        dimension: usize,
        /// Its size.
        value: usize,
    },
    /// An argument lives on another device than `q`.
    #[error("{argument} is on {device}, but q is on {expected}")]
    Device {
        /// The argument at fault.
        argument: &'static str,
        /// Its device.
        device: String,
        /// The device of `q`.
        expected: String,
    },
    /// A tensor's buffer is smaller than its shape and strides reach.
    #[error(
        "{argument} with shape {shape:?} and strides {strides:?} reaches element {reach}, but its buffer holds {len}"
    )]
    Buffer {
        /// The argument at fault.
        argument: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<usize>,
        /// The last element reached.
        reach: u64,
        /// Elements in the buffer.
        len: u64,
    },
    /// A tensor that the kernels write is not laid out for that.
    #[error("{argument} with shape {shape:?} has strides {strides:?}; outputs must not overlap themselves")]
    OutputOverlaps {
        /// The argument at fault.
        argument: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<usize>,
    },
    /// A pool of pages that is not laid out as its storage is.
    #[error("{argument} with shape {shape:?} has strides {strides:?}; pages in e4m3 have strides {expected:?}")]
    Strides {
        /// The argument at fault.
        argument: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in bytes.
        strides: Vec<usize>,
        /// The strides of [`TensorView::e4m3_pages`](crate::TensorView::e4m3_pages).
        expected: Vec<usize>,
    },
    /// Offsets past 2^32 elements on a device that addresses with 32 bits.
    #[error("{argument} reaches element {reach}, past the 2^32 that this device ({device}) can address")]
    AddressSpace {
        /// The argument at fault.
        argument: &'static str,
        /// The last element reached.
        reach: u64,
        /// The runtime's name.
        device: String,
    },
    /// A tensor larger than the device allocates at once, however much memory is free.
    #[error(
        "{tensor} takes {bytes} bytes, more than this device ({device}) allocates at once{}",
        .max.map_or_else(String::new, |max| format!(": at most {max}"))
    )]
    Allocation {
        /// What would be allocated.
        tensor: &'static str,
        /// Its size.
        bytes: u64,
        /// The largest allocation, where the device states it.
        max: Option<u64>,
        /// The runtime's name.
        device: String,
    },
    /// The work needs more thread blocks than the device starts in one launch.
    #[error("{kernel} needs {cubes} thread blocks, but this device starts at most {max} in one launch")]
    Grid {
        /// The kernel.
        kernel: &'static str,
        /// Thread blocks needed.
        cubes: u64,
        /// Thread blocks the device can start.
        max: u64,
    },
    /// Tiles too large for the device's shared memory or thread blocks: the smallest there are, or those asked for.
    #[error(
        "tiles of {tile_q}×{tile_k} at head_dim {head_dim} need {needed} bytes of shared memory and {units} threads per thread block, but this device has {available} bytes and {max_units} threads"
    )]
    NoTileFits {
        /// The larger head dimension.
        head_dim: usize,
        /// Queries of a tile.
        tile_q: usize,
        /// Keys of a tile.
        tile_k: usize,
        /// Bytes needed.
        needed: usize,
        /// Threads needed.
        units: usize,
        /// Bytes of shared memory that there are.
        available: usize,
        /// Threads a thread block may have.
        max_units: usize,
    },
    /// A kernel needs more storage buffers than the device binds at once.
    #[error("{kernel} binds {needed} buffers ({}), but this device binds {available} at once", .extras.join(", "))]
    Bindings {
        /// The kernel.
        kernel: &'static str,
        /// Buffers needed.
        needed: usize,
        /// Those among them that could be left out.
        extras: Vec<&'static str>,
        /// Buffers available.
        available: usize,
    },
    /// A kernel was asked for by name that cannot run this problem here.
    #[error("kernel {kernel} was requested, but {why}")]
    KernelUnavailable {
        /// The kernel asked for.
        kernel: &'static str,
        /// Why it cannot run.
        why: String,
    },
    /// Something that this crate does not do, asked for by an option of another interface.
    #[error("{option} = {value} is not supported: {why}")]
    Unsupported {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// Why, and what to do instead.
        why: &'static str,
    },
}
