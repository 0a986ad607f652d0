//! Validates a call, chooses kernels, prepares the launches and launches. No mathematics.

mod arguments;
mod backward;
mod blocks;
mod cache;
#[cfg(feature = "cuda")]
mod counters;
mod direct;
mod dropout;
mod e4m3;
mod few_rows;
mod forward;
#[cfg(feature = "cuda")]
mod hopper;
mod key_splits;
#[cfg(feature = "cuda")]
mod mma;
mod rotary;
mod route;
mod sequences;
#[cfg(feature = "cuda")]
mod tensor_core;

pub use backward::{Gradients, Saved, Scratch, backward, backward_with};
pub use blocks::block_states;
pub use cache::{CacheAppend, append_to_cache, copy_cache_pages};
pub use dropout::dropout_kept;
pub use forward::{forward, forward_with};
pub use rotary::{Rotary, apply_rotary, check_rotary};
pub use route::BlockLists;

use crate::dropout::seed;
use crate::e4m3::KvStorage;
use crate::error::{AttentionError, Result};
use crate::fragment::GridLaunch;
use crate::mods::TENSORS;
use crate::problem::{AttentionProblem, MASK_TENSORS, SCORE_TENSORS, agree};
use crate::tensor::{AnyView, TensorView, widened};
use crate::tiling::{self, Case, Device};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType, UIntKind};
use cubecl::prelude::*;
#[cfg(feature = "cuda")]
use cubecl::server::Handle;
#[cfg(feature = "cuda")]
use std::cell::OnceCell;

/// How a boolean mask is stored. True (nonzero) hides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskStorage {
    /// One byte per element.
    U8,
    /// Four bytes per element, for devices without 8-bit storage.
    U32,
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
    /// The [page](mod@crate::pages) of each block of positions of a sequence, `[batch, max_pages]`, 32 bits each. `k` and `v` are then
    /// pools of pages, `[num_pages, num_heads_kv, page_size, head_dim]`. A page that does not exist counts as the last one.
    pub page_table: Option<TensorView<2>>,
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
            page_table: None,
            block_lists: BlockLists::default(),
        }
    }

    /// All tensors, and what the problem states about them.
    fn arguments(&self, p: &AttentionProblem) -> impl Iterator<Item = Argument<'_>> {
        let size = p.dtype.size();
        let lens = |there: bool| there.then_some([p.batch]);
        let pages = p.pages.map(|pages| [p.batch, pages.max_pages]);
        let seed = p.options.dropout > 0.0 && p.options.dropout_seed.is_none();
        let [score_a, score_b] = &self.score_tensors;
        let required = [
            Argument::new("q", &self.q, Some(p.q_shape()), size),
            Argument::new("k", &self.k, Some(p.k_shape()), p.kv_size()),
            Argument::new("v", &self.v, Some(p.v_shape()), p.kv_size()),
        ];
        let optional = [
            Argument::new("bias", &self.bias, p.bias, size),
            Argument::new("alibi_slopes", &self.alibi_slopes, p.alibi_slopes, 4),
            Argument::new("sinks", &self.sinks, p.sinks.then_some([p.num_heads_q]), 4),
            Argument::new("dropout_seed", &self.dropout_seed, seed.then_some([2]), 4),
            Argument::new("seq_lens_q", &self.seq_lens_q, lens(p.seq_lens_q), 4),
            Argument::new("seq_lens_k", &self.seq_lens_k, lens(p.seq_lens_k), 4),
            Argument::new(SCORE_TENSORS[0], score_a, p.score_tensors[0], 4),
            Argument::new(SCORE_TENSORS[1], score_b, p.score_tensors[1], 4),
            Argument::new("block_mask", &self.block_mask, p.block_mask.map(|mask| mask.blocks), 4),
            Argument::new("page_table", &self.page_table, pages, 4),
        ];
        required.into_iter().chain(self.masks(p)).chain(self.ends(p)).chain(optional)
    }

    /// Those that hide pairs, except the block mask.
    fn masks(&self, p: &AttentionProblem) -> [Argument<'_>; 3] {
        let [mask_a, mask_b] = &self.mask_tensors;
        let size = self.mask_type().size();
        [
            Argument::new("mask", self.mask.as_ref().map(|mask| &mask.tensor), p.mask, size),
            Argument::new(MASK_TENSORS[0], mask_a, p.mask_tensors[0], 4),
            Argument::new(MASK_TENSORS[1], mask_b, p.mask_tensors[1], 4),
        ]
    }

    /// Those that tell where packed sequences end.
    fn ends(&self, p: &AttentionProblem) -> [Argument<'_>; 2] {
        let stated = p.cu_seqlens.map(|sequences| [sequences + 1]);
        [
            Argument::new("cu_seqlens_q", &self.cu_seqlens_q, stated, 4),
            Argument::new("cu_seqlens_k", &self.cu_seqlens_k, stated, 4),
        ]
    }

    /// Element type of the mask.
    fn mask_type(&self) -> ElemType {
        ElemType::UInt(match self.mask.as_ref().map(|mask| mask.storage) {
            Some(MaskStorage::U8) => UIntKind::U8,
            Some(MaskStorage::U32) | None => UIntKind::U32,
        })
    }
}

/// A tensor of a call.
struct Argument<'a> {
    name: &'static str,
    view: Option<&'a dyn AnyView>,
    /// The shape that the problem states, if it states the tensor.
    stated: Option<[usize; 4]>,
    /// Bytes of an element.
    size: usize,
}

impl<'a> Argument<'a> {
    fn new<const RANK: usize>(
        name: &'static str,
        view: impl Into<Option<&'a TensorView<RANK>>>,
        stated: Option<[usize; RANK]>,
        size: usize,
    ) -> Self {
        let view = view.into().map(|view| view as &dyn AnyView);
        Argument { name, view, stated: stated.map(widened), size }
    }

    /// Checks an input: that the tensor is given if and only if the problem states it, with the stated shape.
    fn check(&self, device: &Device) -> Result<()> {
        match (self.view, self.stated) {
            (None, None) => Ok(()),
            (Some(view), Some(shape)) => self.check_view(device, view, shape),
            (view, _) => Err(AttentionError::Unsupported {
                option: self.name,
                value: if view.is_some() { "a tensor" } else { "no tensor" }.into(),
                why: "the problem states the opposite; build it with the with_… function of the tensor, or for dropout_seed with a \
                      dropout above 0 and no dropout_seed",
            }),
        }
    }

    /// Checks an output, if it is given: also that no two indices reach the same element.
    fn check_output(&self, device: &Device) -> Result<()> {
        let Some(view) = self.view else { return Ok(()) };
        self.check_view(device, view, self.stated.unwrap_or([0; 4]))?;
        if view.overlaps_itself() {
            let (shape, strides) = view.layout();
            let (argument, shape, strides) = (self.name, shape.to_vec(), strides.to_vec());
            return Err(AttentionError::OutputOverlaps { argument, shape, strides });
        }
        Ok(())
    }

    /// Checks a tensor's shape, that the device can address every element, and that the buffer holds every element.
    fn check_view(&self, device: &Device, view: &dyn AnyView, expected: [usize; 4]) -> Result<()> {
        const NAMES: [&str; 4] = ["dimension 0", "dimension 1", "dimension 2", "dimension 3"];
        let (argument, (shape, strides)) = (self.name, view.layout());
        for dim in 0..shape.len() {
            agree(argument, shape, dim, NAMES[dim], "the problem", expected[dim])?;
        }
        let (reach, len) = (view.span(), view.bytes() / self.size as u64);
        if reach > u32::MAX as u64 && !device.wide_addresses {
            return Err(AttentionError::AddressSpace { argument, reach, device: device.name.clone() });
        }
        if reach > len {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            return Err(AttentionError::Buffer { argument, shape, strides, reach, len });
        }
        Ok(())
    }
}

/// The address type that reaches every element of these tensors.
fn addresses<'a>(views: impl IntoIterator<Item = &'a dyn AnyView>) -> AddressType {
    AddressType::from_len(views.into_iter().map(AnyView::span).fold(0, u64::max) as usize)
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
    /// A buffer of this client, from which its stream is known, once a launch has asked for it.
    #[cfg(feature = "cuda")]
    buffer: OnceCell<Handle>,
}

impl<'a> Call<'a> {
    fn new(client: &'a Client, device: &'a Device, problem: &'a AttentionProblem, inputs: &'a Inputs) -> Result<Self> {
        problem.validate()?;
        tiling::check_dtype(device, problem.dtype)?;
        inputs.arguments(problem).try_for_each(|argument| argument.check(device))?;
        if problem.kv_storage() == KvStorage::E4m3 {
            e4m3::check_pool("k", &inputs.k).and(e4m3::check_pool("v", &inputs.v))?;
        }
        tiling::check_sequences(Case { device, problem })?;
        let words = problem.options.dropout_seed.filter(|_| problem.options.dropout > 0.0).map(seed);
        let bytes = words.map(|words| words.map(u32::to_le_bytes).concat());
        let seed = bytes.map(|bytes| TensorView::contiguous(client.create_from_slice(&bytes), [2]));
        Ok(Call {
            client,
            device,
            problem,
            inputs,
            seed: seed.or_else(|| inputs.dropout_seed.clone()),
            #[cfg(feature = "cuda")]
            buffer: OnceCell::new(),
        })
    }

    /// The problem on the device.
    fn case(&self) -> Case<'a> {
        Case { device: self.device, problem: self.problem }
    }

    /// The address type that reaches every element of the inputs and of these tensors.
    fn addresses(&self, views: &[&dyn AnyView]) -> AddressType {
        let inputs = self.inputs.arguments(self.problem).filter_map(|argument| argument.view);
        addresses(inputs.chain(views.iter().copied()))
    }

    /// A grid with one thread block for each block of `rows` queries, or keys if `keys`.
    fn rows_grid(&self, kernel: &'static str, rows: usize, keys: bool) -> Result<(GridLaunch, CubeCount)> {
        let (length, heads) = self.problem.side(keys);
        let (blocks, batches) = tiling::blocks(self.problem, length, rows);
        self.grid(kernel, [blocks, heads, batches])
    }

    fn grid(&self, kernel: &'static str, sizes: [usize; 3]) -> Result<(GridLaunch, CubeCount)> {
        let count = tiling::cube_count(self.device, kernel, sizes.iter().map(|n| *n as u64).product())?;
        let [blocks, heads, batches] = sizes.map(|n| n as u32);
        Ok((GridLaunch::new(blocks, heads, batches, self.problem.group_size() as u32), count))
    }
}

/// A grid with one thread for each element, in thread blocks of 256 threads, or as many as the device allows.
fn elementwise(device: &Device, kernel: &'static str, len: usize) -> Result<(CubeCount, CubeDim)> {
    let units = device.units.min(256);
    let count = tiling::cube_count(device, kernel, len.div_ceil(units) as u64)?;
    Ok((count, CubeDim::new_1d(units as u32)))
}
