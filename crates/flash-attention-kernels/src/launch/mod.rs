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
use crate::fragment::grid::GridLaunch;
use crate::mods::TENSORS;
use crate::problem::{AttentionProblem, MASK_TENSORS, SCORE_TENSORS};
use crate::tensor::TensorView;
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

    /// The largest span of any input.
    fn span(&self) -> u64 {
        let Inputs {
            q,
            k,
            v,
            mask,
            bias,
            alibi_slopes,
            sinks,
            dropout_seed,
            seq_lens_q,
            seq_lens_k,
            cu_seqlens_q,
            cu_seqlens_k,
            score_tensors: [score_a, score_b],
            mask_tensors: [mask_a, mask_b],
            block_mask,
            block_lists: _,
        } = self;
        let mask = mask.as_ref().map(|mask| &mask.tensor);
        let optional = [mask, bias.as_ref(), score_a.as_ref(), score_b.as_ref(), mask_a.as_ref(), mask_b.as_ref()];
        let of_four = [q, k, v].into_iter().chain(optional.into_iter().flatten()).chain(block_mask);
        let vectors = [sinks, dropout_seed, seq_lens_q, seq_lens_k, cu_seqlens_q, cu_seqlens_k];
        let of_one = vectors.into_iter().flatten().map(|view| view.span());
        let of_two = alibi_slopes.iter().map(|view| view.span());
        of_four.map(|view| view.span()).chain(of_one).chain(of_two).max().unwrap_or(0)
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
        input(device, "q", &inputs.q, problem.q_shape(), size)?;
        input(device, "k", &inputs.k, problem.k_shape(), size)?;
        input(device, "v", &inputs.v, problem.v_shape(), size)?;
        check_masks(device, problem, inputs)?;
        if let Some(bias) = &inputs.bias {
            input(device, "bias", bias, problem.bias.unwrap_or(bias.shape), size)?;
        }
        if let Some(slopes) = &inputs.alibi_slopes {
            input(device, "alibi_slopes", slopes, problem.alibi_slopes.unwrap_or(slopes.shape), 4)?;
        }
        if let Some(sinks) = &inputs.sinks {
            input(device, "sinks", sinks, [problem.num_heads_q], 4)?;
        }
        if let Some(seed) = &inputs.dropout_seed {
            input(device, "dropout_seed", seed, [2], 4)?;
        }
        for (argument, lens) in [("seq_lens_q", &inputs.seq_lens_q), ("seq_lens_k", &inputs.seq_lens_k)] {
            if let Some(lens) = lens {
                input(device, argument, lens, [problem.batch], 4)?;
            }
        }
        for (argument, cu) in [("cu_seqlens_q", &inputs.cu_seqlens_q), ("cu_seqlens_k", &inputs.cu_seqlens_k)] {
            if let Some(cu) = cu {
                input(device, argument, cu, [problem.cu_seqlens.map_or(cu.shape[0], |sequences| sequences + 1)], 4)?;
            }
        }
        check_tensors(device, SCORE_TENSORS, &inputs.score_tensors, problem.score_tensors)?;
        if let Some(states) = &inputs.block_mask {
            let blocks = problem.block_mask.map_or(states.shape, |mask| mask.blocks);
            input(device, "block_mask", states, blocks, 4)?;
        }
        let (drops, number) = (problem.options.dropout > 0.0, problem.options.dropout_seed);
        for (argument, given, is_stated) in [
            ("block_mask", inputs.block_mask.is_some(), problem.block_mask.is_some()),
            ("bias", inputs.bias.is_some(), problem.bias.is_some()),
            ("alibi_slopes", inputs.alibi_slopes.is_some(), problem.alibi_slopes.is_some()),
            ("sinks", inputs.sinks.is_some(), problem.sinks),
            ("dropout_seed", inputs.dropout_seed.is_some(), drops && number.is_none()),
            ("seq_lens_q", inputs.seq_lens_q.is_some(), problem.seq_lens_q),
            ("seq_lens_k", inputs.seq_lens_k.is_some(), problem.seq_lens_k),
            ("cu_seqlens_q", inputs.cu_seqlens_q.is_some(), problem.cu_seqlens.is_some()),
            ("cu_seqlens_k", inputs.cu_seqlens_k.is_some(), problem.cu_seqlens.is_some()),
        ] {
            stated(argument, given, is_stated)?;
        }
        let sequences = sequences::Sequences::of(device, problem)?;
        let words = number.filter(|_| drops).map(seed);
        let bytes = words.map(|words| words.map(u32::to_le_bytes).concat());
        let seed = bytes.map(|bytes| TensorView::contiguous(client.create_from_slice(&bytes), [2]));
        Ok(Call { client, device, problem, inputs, seed: seed.or_else(|| inputs.dropout_seed.clone()), sequences })
    }

    /// The address type that reaches every element of the inputs and of tensors with these spans.
    fn addresses(&self, spans: impl IntoIterator<Item = u64>) -> AddressType {
        let farthest = spans.into_iter().fold(self.inputs.span(), u64::max);
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
        let (x, y, z) = tiling::cube_count(self.device, kernel, cubes)?;
        let grid = GridLaunch::new(blocks as u32, heads as u32, batches as u32, self.problem.group_size() as u32);
        Ok((grid, CubeCount::Static(x, y, z)))
    }
}

/// The error for kernels that only the feature `cuda` compiles.
#[cfg(not(feature = "cuda"))]
fn not_compiled(kernel: tiling::Kernel) -> AttentionError {
    let why = "it was not compiled: that takes the feature cuda".into();
    AttentionError::KernelUnavailable { kernel: kernel.name(), why }
}

/// Checks mask and mask tensors: they are given if and only if the problem states them, with the stated shapes.
fn check_masks(device: &Device, problem: &AttentionProblem, inputs: &Inputs) -> Result<(), AttentionError> {
    if let Some(mask) = &inputs.mask {
        input(device, "mask", &mask.tensor, problem.mask.unwrap_or(mask.tensor.shape), mask.storage.size())?;
    }
    stated("mask", inputs.mask.is_some(), problem.mask.is_some())?;
    check_tensors(device, MASK_TENSORS, &inputs.mask_tensors, problem.mask_tensors)
}

/// Checks the tensors of a function in the same way.
fn check_tensors(
    device: &Device,
    arguments: [&'static str; TENSORS],
    views: &[Option<TensorView>; TENSORS],
    shapes: [Option<[usize; 4]>; TENSORS],
) -> Result<(), AttentionError> {
    for ((argument, view), shape) in arguments.into_iter().zip(views).zip(shapes) {
        if let Some(view) = view {
            input(device, argument, view, shape.unwrap_or(view.shape), 4)?;
        }
        stated(argument, view.is_some(), shape.is_some())?;
    }
    Ok(())
}

/// Checks that a tensor is given if and only if the problem states it.
fn stated(argument: &'static str, given: bool, stated: bool) -> Result<(), AttentionError> {
    if given == stated {
        return Ok(());
    }
    Err(AttentionError::Unsupported {
        option: argument,
        value: if given { "a tensor" } else { "no tensor" }.into(),
        why: "the problem states otherwise: build it with with_mask and its like for what is given, and with a dropout above 0 and no \
              number for a seed",
    })
}

/// A grid with one thread for each element, in thread blocks of 256 threads, or as many as the device allows.
fn elementwise(device: &Device, kernel: &'static str, len: usize) -> Result<(CubeCount, CubeDim), AttentionError> {
    let units = device.units.min(256);
    let (x, y, z) = tiling::cube_count(device, kernel, len.div_ceil(units) as u64)?;
    Ok((CubeCount::Static(x, y, z), CubeDim::new_1d(units as u32)))
}

/// Checks a tensor's shape, that the device can address every element, and that the buffer holds every element.
fn input<const RANK: usize>(
    device: &Device,
    argument: &'static str,
    view: &TensorView<RANK>,
    expected: [usize; RANK],
    elem_size: usize,
) -> Result<(), AttentionError> {
    const NAMES: [&str; 4] = ["dimension 0", "dimension 1", "dimension 2", "dimension 3"];
    for dim in 0..RANK {
        if view.shape[dim] != expected[dim] {
            return Err(AttentionError::Dimension {
                argument,
                dimension: NAMES[dim],
                value: view.shape[dim],
                shape: view.shape.to_vec(),
                expected_by: "the problem",
                expected: expected[dim],
            });
        }
    }
    let (reach, len) = (view.span(), view.handle.size_in_used() / elem_size as u64);
    if reach > u32::MAX as u64 && !device.wide_addresses {
        return Err(AttentionError::AddressSpace { argument, reach, device: device.name.clone() });
    }
    if reach > len {
        return Err(AttentionError::Buffer {
            argument,
            shape: view.shape.to_vec(),
            strides: view.strides.to_vec(),
            reach,
            len,
        });
    }
    Ok(())
}

/// [`input`], and additionally checks that no two indices reach the same element.
fn output<const RANK: usize>(
    device: &Device,
    argument: &'static str,
    view: &TensorView<RANK>,
    expected: [usize; RANK],
    elem_size: usize,
) -> Result<(), AttentionError> {
    input(device, argument, view, expected, elem_size)?;
    if view.overlaps_itself() {
        return Err(AttentionError::OutputOverlaps {
            argument,
            shape: view.shape.to_vec(),
            strides: view.strides.to_vec(),
        });
    }
    Ok(())
}
