//! Launches what belongs to block masks: states, and lists of tiles that are visited.

use super::sequences::Blocks;
use super::{Call, Inputs, mods, output};
#[cfg(feature = "cuda")]
use crate::blocks::order;
use crate::blocks::{CLASSIFIERS, HEADER, UNITS, classify, list};
use crate::error::AttentionError;
use crate::problem::{AttentionProblem, BlockMask};
use crate::tensor::TensorView;
use crate::tiling::{self, Device};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;

/// Over what a kernel walks: blocks of rows, and tiles of columns.
#[derive(Default)]
pub(super) struct Route {
    /// Of several sequences, the blocks that there are.
    pub schedule: Option<TensorView<1>>,
    /// With a block mask, the tiles that each block visits.
    pub lists: Option<TensorView>,
}

impl Call<'_> {
    /// That of a kernel with blocks of so many rows and tiles of so many columns.
    pub(super) fn route(&self, of: Blocks, rows: usize, columns: usize) -> Route {
        Route { schedule: self.schedule(of, rows), lists: self.lists(of, rows, columns) }
    }

    /// The same for a kernel that takes blocks in the order of [`order()`], as those for Hopper do: several sequences have one of their own.
    #[cfg(feature = "cuda")]
    pub(super) fn route_in_order(&self, of: Blocks, rows: usize, columns: usize) -> Route {
        let route = self.route(of, rows, columns);
        if let (Some(lists), None) = (&route.lists, &route.schedule) {
            let [batch, heads, blocks, _] = lists.shape;
            // SAFETY: the lists have a place for the number of each of their blocks.
            unsafe {
                order::launch_unchecked(
                    self.client,
                    cubes(batch * heads * blocks.div_ceil(UNITS)),
                    CubeDim::new_1d(UNITS as u32),
                    self.addresses([lists.span()]),
                    lists.arg(),
                );
            }
        }
        route
    }

    /// The lists of tiles that blocks visit, if there is a block mask.
    pub(super) fn lists(&self, of: Blocks, rows: usize, columns: usize) -> Option<TensorView> {
        let p = self.problem;
        let (states, mask) = (self.inputs.block_mask.as_ref()?, p.block_mask?);
        let shape = list_shape(p, mask, of, rows, columns);
        let lists = TensorView::contiguous(self.client.empty(4 * shape.iter().product::<usize>()), shape);
        // SAFETY: the states have been checked against their buffer, and the lists have room for every tile.
        unsafe {
            list::launch_unchecked(
                self.client,
                cubes(shape[..3].iter().product()),
                CubeDim::new_1d(UNITS as u32),
                self.addresses([states.span(), lists.span()]),
                states.broadcast_arg(),
                lists.arg(),
                self.bounds(p.batch),
                p.band().into_launch(),
                mask.block_q as u32,
                mask.block_k as u32,
                rows as u32,
                columns as u32,
                of != Blocks::Queries,
                p.is_ragged(),
            );
        }
        Some(lists)
    }
}

/// So many cubes. More than a device starts along one dimension: those of another; the kernel looks whether there is something for a cube.
fn cubes(number: usize) -> CubeCount {
    let across = number.clamp(1, u16::MAX as usize);
    CubeCount::Static(across as u32, number.div_ceil(across).max(1) as u32, 1)
}

/// The shape of the lists of a kernel: `[batch | 1, num_heads_q | 1, blocks, HEADER + tiles]`.
fn list_shape(p: &AttentionProblem, mask: BlockMask, of: Blocks, rows: usize, columns: usize) -> [usize; 4] {
    let (along, across) = if of == Blocks::Queries { (p.seq_q, p.seq_k) } else { (p.seq_k, p.seq_q) };
    // Sequences of a batch end where its lengths say.
    let batch = if p.is_ragged() { p.batch } else { mask.blocks[0] };
    [batch, mask.blocks[1], along.div_ceil(rows), HEADER + across.div_ceil(columns).max(1)]
}

/// Writes the states of the blocks that the problem's block mask has: what its mask, and its options' function, let be seen, `states [batch |
/// 1, num_heads_q | 1, seq_q / block_q, seq_k / block_k]`, u32: [`EMPTY`](crate::blocks::EMPTY), [`PARTIAL`](crate::blocks::PARTIAL) or
/// [`FULL`](crate::blocks::FULL). Causality, windows and lengths do not count: kernels look at them in any case.
///
/// Of `inputs` mask and `mask_tensors` are read. Errors name the argument at fault; nothing has been launched then.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionProblem, Inputs, TensorView, block_states};
///
/// # fn f(
/// #     client: &cubecl::client::Client, problem: AttentionProblem, inputs: &mut Inputs,
/// # ) -> Result<AttentionProblem, flash_attention_kernels::AttentionError> {
/// let shape = [1, 1, problem.seq_q.div_ceil(128), problem.seq_k.div_ceil(128)];
/// let problem = problem.with_block_mask(&shape, 128, 128)?;
/// let states = TensorView::contiguous(client.empty(4 * shape.iter().product::<usize>()), shape);
/// block_states(client, &problem, inputs, &states)?;
/// inputs.block_mask = Some(states);
/// # Ok(problem)
/// # }
/// ```
pub fn block_states(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    states: &TensorView,
) -> Result<(), AttentionError> {
    problem.validate()?;
    let device = Device::of(client);
    let Some(BlockMask { blocks, block_q, block_k }) = problem.block_mask else {
        return Err(AttentionError::Unsupported {
            option: "block_mask",
            value: "none".into(),
            why: "the problem has no blocks to tell the states of: build it with with_block_mask",
        });
    };
    output(&device, "states", states, blocks, 4)?;
    let read = [
        ("mask", problem.mask),
        ("mask_tensors[0]", problem.mask_tensors[0]),
        ("mask_tensors[1]", problem.mask_tensors[1]),
    ];
    for (argument, shape) in read.into_iter().filter_map(|(argument, shape)| Some((argument, shape?))) {
        for dimension in 0..2 {
            let value = shape[dimension];
            if value != 1 && value != blocks[dimension] {
                return Err(AttentionError::Broadcast { argument, shape, expected: blocks, dimension, value });
            }
        }
    }
    super::check_masks(&device, problem, inputs)?;
    if states.is_empty() {
        return Ok(());
    }
    let (x, y, z) = tiling::cube_count(&device, "block_states", states.len() as u64)?;
    let mask = inputs.mask.as_ref();
    let spans = [Some(states), mask.map(|mask| &mask.tensor)].into_iter().flatten().map(|view| view.span());
    // SAFETY: views have been checked against their buffers.
    unsafe {
        classify::launch_unchecked(
            client,
            CubeCount::Static(x, y, z),
            CubeDim::new_1d(CLASSIFIERS as u32),
            AddressType::from_len(spans.max().unwrap_or(0) as usize),
            mask.map(|mask| mask.tensor.broadcast_arg()).into(),
            states.arg(),
            mods(problem, inputs),
            problem.band().into_launch(),
            block_q as u32,
            block_k as u32,
            super::mask_type(inputs),
        );
    }
    Ok(())
}
