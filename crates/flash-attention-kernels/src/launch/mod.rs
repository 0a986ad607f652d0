//! Validates a call, chooses kernels, prepares the launches and launches. No mathematics.

mod arguments;
mod backward;
mod blocks;
mod direct;
mod dropout;
mod forward;
#[cfg(feature = "cuda")]
mod hopper;
#[cfg(feature = "cuda")]
mod mma;
mod route;
mod sequences;
#[cfg(feature = "cuda")]
mod tensor_core;

pub use backward::{Gradients, Saved, Scratch, backward, backward_with};
pub use blocks::block_states;
pub use dropout::dropout_kept;
pub use forward::{forward, forward_with};
pub use route::BlockLists;

use crate::dropout::seed;
use crate::error::AttentionError;
use crate::fragment::GridLaunch;
use crate::mods::TENSORS;
use crate::problem::{AttentionProblem, MASK_TENSORS, SCORE_TENSORS, agree};
use crate::tensor::{AnyView, TensorView};
use crate::tiling::{self, Device};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;

/// How a boolean mask is stored. True (nonzero) hides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskStorage {
    /// One byte per element.
    U8,
    /// Four bytes per element, for devices without 8-bit storage.
    U32,
}

impl MaskStorage {
    /// Bytes of an element.
    fn size(self) -> usize {
        match self {
            MaskStorage::U8 => 1,
            MaskStorage::U32 => 4,
        }
    }
}

/// A boolean mask: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, true hides.
#[derive(Clone, Debug)]
pub struct MaskView {
    /// The mask with its own shape and strides; it is never expanded.
    pub tensor: TensorView,
    /// Its element type.
    pub storage: MaskStorage,
}

/// Tensors that an attention call reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[batch, num_heads_q, seq_q, head_dim]`.
    pub q: TensorView,
    /// `[batch, num_heads_kv, seq_k, head_dim]`.
    pub k: TensorView,
    /// `[batch, num_heads_kv, seq_k, head_dim_v]`.
    pub v: TensorView,
    /// Boolean mask that hides pairs.
    pub mask: Option<MaskView>,
    /// Bias added to the scores: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, of the dtype of `q`.
    pub bias: Option<TensorView>,
    /// ALiBi slopes, `[batch | 1, num_heads_q]`, f32.
    pub alibi_slopes: Option<TensorView<2>>,
    /// Sinks, `[num_heads_q]`, f32: one more logit in each row of a head.
    pub sinks: Option<TensorView<1>>,
    /// Seed of [dropout](mod@crate::dropout), `[2]`, 32 bits each, if the options hold no seed.
    pub dropout_seed: Option<TensorView<1>>,
    /// Number of valid queries of each batch, the first ones: `[batch]`, 32 bits each. A number above `seq_q` counts as
    /// `seq_q`.
    pub seq_lens_q: Option<TensorView<1>>,
    /// Number of valid keys of each batch, in the same format.
    pub seq_lens_k: Option<TensorView<1>>,
    /// Packed sequences: the first query of each sequence, counted through all batches, and the end of the last sequence,
    /// `[sequences + 1]`, 32 bits each, non-decreasing. A sequence ends at the latest with the batch that it begins in. Outputs
    /// of queries and keys that belong to no sequence are 0.
    pub cu_seqlens_q: Option<TensorView<1>>,
    /// Packed sequences: the first key of each sequence, in the same format. A sequence's queries see its own keys only.
    pub cu_seqlens_k: Option<TensorView<1>>,
    /// Tensors that `score_mod` reads, `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]` each, f32.
    pub score_tensors: [Option<TensorView>; TENSORS],
    /// Tensors that `mask_mod` reads, in the same format.
    pub mask_tensors: [Option<TensorView>; TENSORS],
    /// Block mask: the state of each block, 32 bits each: [`blocks`](mod@crate::blocks).
    pub block_mask: Option<TensorView>,
    /// Cache of the lists made from the block mask, which several calls can share.
    pub block_lists: BlockLists,
}

impl Inputs {
    /// Inputs without any optional tensor.
    ///
    /// ```no_run
    /// use flash_attention_kernels::{Inputs, TensorView};
    ///
    /// # fn f(client: cubecl::client::Client) {
    /// let zeros = || TensorView::contiguous(client.empty(4 * 64 * 32), [1, 1, 64, 32]);
    /// assert!(Inputs::new(zeros(), zeros(), zeros()).sinks.is_none());
    /// # }
    /// ```
    pub fn new(q: TensorView, k: TensorView, v: TensorView) -> Self {
        Inputs {
            q,
            k,
            v,
            mask: None,
            bias: None,
            alibi_slopes: None,
            sinks: None,
            dropout_seed: None,
            seq_lens_q: None,
            seq_lens_k: None,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            score_tensors: [None, None],
            mask_tensors: [None, None],
            block_mask: None,
            block_lists: BlockLists::default(),
        }
    }

    /// The optional tensors, and what the problem states about them.
    fn optional(&self, p: &AttentionProblem) -> impl Iterator<Item = Optional<'_>> {
        let lens = |there: bool| there.then_some([p.batch]);
        let cu_seqlens = p.cu_seqlens.map(|sequences| [sequences + 1]);
        let seed = p.options.dropout > 0.0 && p.options.dropout_seed.is_none();
        let [score_a, score_b] = &self.score_tensors;
        let others = [
            Optional::new("bias", &self.bias, p.bias, p.dtype.size()),
            Optional::new("alibi_slopes", &self.alibi_slopes, p.alibi_slopes, 4),
            Optional::new("sinks", &self.sinks, p.sinks.then_some([p.num_heads_q]), 4),
            Optional::new("dropout_seed", &self.dropout_seed, seed.then_some([2]), 4),
            Optional::new("seq_lens_q", &self.seq_lens_q, lens(p.seq_lens_q), 4),
            Optional::new("seq_lens_k", &self.seq_lens_k, lens(p.seq_lens_k), 4),
            Optional::new("cu_seqlens_q", &self.cu_seqlens_q, cu_seqlens, 4),
            Optional::new("cu_seqlens_k", &self.cu_seqlens_k, cu_seqlens, 4),
            Optional::new(SCORE_TENSORS[0], score_a, p.score_tensors[0], 4),
            Optional::new(SCORE_TENSORS[1], score_b, p.score_tensors[1], 4),
            Optional::new("block_mask", &self.block_mask, p.block_mask.map(|mask| mask.blocks), 4),
        ];
        self.masks(p).into_iter().chain(others)
    }

    /// Those that hide pairs, except the block mask.
    fn masks(&self, p: &AttentionProblem) -> [Optional<'_>; 3] {
        let [mask_a, mask_b] = &self.mask_tensors;
        let size = self.mask.as_ref().map_or(0, |mask| mask.storage.size());
        let view = self.mask.as_ref().map(|mask| &mask.tensor as &dyn AnyView);
        [
            Optional { view, ..Optional::new("mask", &None, p.mask, size) },
            Optional::new(MASK_TENSORS[0], mask_a, p.mask_tensors[0], 4),
            Optional::new(MASK_TENSORS[1], mask_b, p.mask_tensors[1], 4),
        ]
    }
}

/// An optional tensor of the inputs.
struct Optional<'a> {
    argument: &'static str,
    view: Option<&'a dyn AnyView>,
    /// The shape and rank that the problem states, if it states the tensor.
    stated: Option<([usize; 4], usize)>,
    /// Bytes of an element.
    size: usize,
}

impl<'a> Optional<'a> {
    fn new<const RANK: usize>(
        argument: &'static str,
        view: &'a Option<TensorView<RANK>>,
        stated: Option<[usize; RANK]>,
        size: usize,
    ) -> Self {
        let widened = |shape: [usize; RANK]| std::array::from_fn(|dim| shape.get(dim).copied().unwrap_or(1));
        let view = view.as_ref().map(|view| view as &dyn AnyView);
        Optional { argument, view, stated: stated.map(|shape| (widened(shape), RANK)), size }
    }

    /// Checks that the tensor is given if and only if the problem states it, with the stated shape.
    fn check(&self, device: &Device) -> Result<(), AttentionError> {
        match (self.view, &self.stated) {
            (None, None) => Ok(()),
            (Some(view), Some((shape, rank))) => input(device, self.argument, view, &shape[..*rank], self.size),
            (view, _) => Err(AttentionError::Unsupported {
                option: self.argument,
                value: if view.is_some() { "a tensor" } else { "no tensor" }.into(),
                why: "the problem states otherwise: build it with with_mask and its like for what is given, and with a dropout above 0 \
                      and no number for a seed",
            }),
        }
    }
}

/// A launch that cannot fail any more.
type Launch<'a> = Box<dyn FnOnce() + 'a>;

/// A validated call on a device.
struct Call<'a> {
    client: &'a Client,
    device: &'a Device,
    problem: &'a AttentionProblem,
    inputs: &'a Inputs,
    /// Seed of dropout, if there is dropout.
    seed: Option<TensorView<1>>,
    /// Sequences, if the problem distinguishes them.
    sequences: Option<sequences::Sequences>,
}

impl<'a> Call<'a> {
    fn new(
        client: &'a Client,
        device: &'a Device,
        problem: &'a AttentionProblem,
        inputs: &'a Inputs,
    ) -> Result<Self, AttentionError> {
        problem.validate()?;
        tiling::check_dtype(device, problem.dtype)?;
        let size = problem.dtype.size();
        input(device, "q", &inputs.q, &problem.q_shape(), size)?;
        input(device, "k", &inputs.k, &problem.k_shape(), size)?;
        input(device, "v", &inputs.v, &problem.v_shape(), size)?;
        inputs.optional(problem).try_for_each(|tensor| tensor.check(device))?;
        let sequences = sequences::Sequences::of(device, problem)?;
        let words = problem.options.dropout_seed.filter(|_| problem.options.dropout > 0.0).map(seed);
        let bytes = words.map(|words| words.map(u32::to_le_bytes).concat());
        let seed = bytes.map(|bytes| TensorView::contiguous(client.create_from_slice(&bytes), [2]));
        Ok(Call { client, device, problem, inputs, seed: seed.or_else(|| inputs.dropout_seed.clone()), sequences })
    }

    /// The address type that reaches every element of the inputs and of tensors with these spans.
    fn addresses(&self, spans: impl IntoIterator<Item = u64>) -> AddressType {
        let Inputs { q, k, v, .. } = self.inputs;
        let optional = self.inputs.optional(self.problem).filter_map(|tensor| tensor.view);
        let inputs = [q, k, v].map(|view| view as &dyn AnyView).into_iter().chain(optional).map(|view| view.span());
        let farthest = spans.into_iter().chain(inputs).fold(0, u64::max);
        AddressType::from_len(farthest as usize)
    }

    /// A grid with one thread block for each block of `tile` queries.
    fn query_grid(&self, kernel: &'static str, tile: usize) -> Result<(GridLaunch, CubeCount), AttentionError> {
        let (blocks, batches) = self.blocks(self.problem.seq_q, tile);
        self.grid(kernel, blocks, self.problem.num_heads_q, batches)
    }

    /// A grid with one thread block for each block of `tile` keys.
    fn key_grid(&self, kernel: &'static str, tile: usize) -> Result<(GridLaunch, CubeCount), AttentionError> {
        let (blocks, batches) = self.blocks(self.problem.seq_k, tile);
        self.grid(kernel, blocks, self.problem.num_heads_kv, batches)
    }

    fn grid(
        &self,
        kernel: &'static str,
        blocks: usize,
        heads: usize,
        batches: usize,
    ) -> Result<(GridLaunch, CubeCount), AttentionError> {
        let cubes = blocks as u64 * heads as u64 * batches as u64;
        let count = tiling::cube_count(self.device, kernel, cubes)?;
        let grid = GridLaunch::new(blocks as u32, heads as u32, batches as u32, self.problem.group_size() as u32);
        Ok((grid, count))
    }
}

/// The error for kernels that only the feature `cuda` compiles.
#[cfg(not(feature = "cuda"))]
fn not_compiled(kernel: tiling::Kernel) -> AttentionError {
    let why = "it was not compiled: that takes the feature cuda".into();
    AttentionError::KernelUnavailable { kernel: kernel.name(), why }
}

/// A grid with one thread for each element, in thread blocks of 256 threads, or as many as the device allows.
fn elementwise(device: &Device, kernel: &'static str, len: usize) -> Result<(CubeCount, CubeDim), AttentionError> {
    let units = device.units.min(256);
    let count = tiling::cube_count(device, kernel, len.div_ceil(units) as u64)?;
    Ok((count, CubeDim::new_1d(units as u32)))
}

/// Checks a tensor's shape, that the device can address every element, and that the buffer holds every element.
fn input(
    device: &Device,
    argument: &'static str,
    view: &dyn AnyView,
    expected: &[usize],
    elem_size: usize,
) -> Result<(), AttentionError> {
    const NAMES: [&str; 4] = ["dimension 0", "dimension 1", "dimension 2", "dimension 3"];
    let (shape, strides) = view.layout();
    for dim in 0..shape.len() {
        agree(argument, shape, dim, NAMES[dim], "the problem", expected[dim])?;
    }
    let (reach, len) = (view.span(), view.bytes() / elem_size as u64);
    if reach > u32::MAX as u64 && !device.wide_addresses {
        return Err(AttentionError::AddressSpace { argument, reach, device: device.name.clone() });
    }
    if reach > len {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        return Err(AttentionError::Buffer { argument, shape, strides, reach, len });
    }
    Ok(())
}

/// [`input`], and additionally checks that no two indices reach the same element.
fn output(
    device: &Device,
    argument: &'static str,
    view: &dyn AnyView,
    expected: &[usize],
    elem_size: usize,
) -> Result<(), AttentionError> {
    input(device, argument, view, expected, elem_size)?;
    if view.overlaps_itself() {
        let (shape, strides) = view.layout();
        return Err(AttentionError::OutputOverlaps { argument, shape: shape.to_vec(), strides: strides.to_vec() });
    }
    Ok(())
}
