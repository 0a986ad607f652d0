//! What the launches of tensor-core families share, Hopper's and those of `mma.sync`: tensors in vectors of 16 bytes, scores, work
//! tiles, and the order of the backward.

use super::backward::{Backward, Results};
use super::route::Route;
use super::{Call, Inputs, Launch};
use crate::error::{AttentionError, Result};
use crate::fragment::{Role, ScoresLaunch};
use crate::hopper::{self, TURN_ROWS, TURN_WORDS};
use crate::mask::Band;
use crate::tensor::{AnyView, TensorView};
use crate::tensor_core::{
    Blueprint, DeltaBlueprint, GradientOutputsLaunch, HopperTile, Rows, RowsInLaunch, RowsOutLaunch, SourceSideLaunch,
    SourceSidesLaunch, StrideLaunch, SumsOutLaunch, TileScheduler, VECTOR_BYTES, Zeros, delta,
};
use crate::tiling::{self, ListShape, cube_count, stats_multiple, stats_rows};
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;

/// Bytes of the vectors in which outputs are written.
pub(super) const OUT_BYTES: usize = 8;

/// `q`, `k`, `v` and `dout` of a backward, as its kernels read them.
pub(super) type Sources = [TensorView; 4];

/// A launch of a gradient kernel that cannot fail any more.
pub(super) type GradientLaunch<'a> = Box<dyn FnOnce(&Sources) + 'a>;

/// A tensor that kernels access in vectors of 16 bytes and by TMA: directly, or through a packed copy.
pub(super) struct Aligned<'a> {
    view: &'a TensorView,
    /// The grid of the copy, if the tensor itself is not aligned.
    copy: Option<(CubeCount, CubeDim)>,
}

impl Aligned<'_> {
    /// A tensor that can be read: the tensor itself, or a packed copy.
    pub(super) fn read(&self, call: &Call) -> TensorView {
        let Some(grid) = &self.copy else { return self.view.clone() };
        let packed = call.packed(self.view.shape);
        call.copy(grid, self.view, &packed, packed.strides[2]);
        packed
    }

    /// A tensor that a kernel can write in place of an output of queries, or of `keys`. [`finish`](Self::finish) follows.
    pub(super) fn write(&self, call: &Call, keys: bool) -> TensorView {
        if self.copy.is_none() {
            return self.view.clone();
        }
        let packed = call.packed(self.view.shape);
        // Rows that belong to no sequence are copied with the others, and no kernel writes them.
        call.fill(&packed, None, keys);
        packed
    }

    /// Copies what has been written to the output, if that is another tensor.
    pub(super) fn finish(&self, call: &Call, written: &TensorView) {
        if let Some(grid) = &self.copy {
            call.copy(grid, written, self.view, self.view.shape[3]);
        }
    }
}

/// The outputs of a gradient kernel.
pub(super) struct Outputs<'a> {
    /// Gradient of K, or of Q if rows are queries. Where one kernel computes all three, it adds that of Q to `dq_accum`.
    dqk: Option<Aligned<'a>>,
    dv: Option<Aligned<'a>>,
    /// Sums that are folded afterwards.
    sums: Option<TensorView>,
    /// Whether rows are keys.
    keys: bool,
}

/// The tensors that a gradient kernel writes.
pub(super) struct Written {
    /// Gradients of Q or K, and of V. The tensor of one that is not requested is any valid one.
    pub gradients: [TensorView; 2],
    /// The sums, or any valid tensor.
    pub sums: TensorView,
}

impl Outputs<'_> {
    /// The tensors that the kernel writes.
    pub(super) fn write(&self, call: &Call) -> Written {
        let [dqk, dv] = [&self.dqk, &self.dv].map(|out| out.as_ref().map(|out| out.write(call, self.keys)));
        if let Some(sums) = &self.sums {
            // Rows that belong to no sequence are added up with the others.
            call.fill_with(sums, None, None, self.keys, ElemType::Float(FloatKind::F32));
        }
        let any = dqk.as_ref().or(dv.as_ref()).or(self.sums.as_ref()).expect("a launch has a result").clone();
        let sums = self.sums.clone().unwrap_or_else(|| any.clone());
        Written { gradients: [dqk.unwrap_or_else(|| any.clone()), dv.unwrap_or(any)], sums }
    }

    /// The launch argument of the tensors, whose gradients have elements of `size` bytes.
    ///
    /// # Safety
    ///
    /// As `launch_unchecked`: the views have been checked against their buffers.
    pub(super) unsafe fn arg(written: &Written, size: usize, call: &Call) -> GradientOutputsLaunch {
        let Written { gradients: [dqk, dv], sums } = written;
        // SAFETY: the caller guarantees it.
        unsafe {
            GradientOutputsLaunch::new(rows_out(dqk, size), rows_out(dv, size), sums_out(sums, call.problem.batch))
        }
    }

    /// Copies what has been written to the outputs, where they are other tensors.
    pub(super) fn finish(&self, call: &Call, written: &Written) {
        for (out, written) in [&self.dqk, &self.dv].into_iter().zip(&written.gradients) {
            if let Some(out) = out {
                out.finish(call, written);
            }
        }
    }
}

/// Resident rows and streamed tiles of a gradient kernel, as [`Role`] defines them.
pub(super) fn sides([q, k, v, dout]: &Sources, keys: bool) -> [[&TensorView; 2]; 2] {
    if keys { [[k, v], [q, dout]] } else { [[q, dout], [k, v]] }
}

/// Work tiles of a kernel.
pub(super) struct Work {
    /// Blocks of rows and tiles of columns.
    pub list: ListShape,
    /// The band of the kernel's rows.
    pub band: Band,
    /// The numbering of the tiles.
    pub scheduler: TileScheduler,
}

impl<'a> Backward<'a> {
    /// Prepares the outputs of a gradient kernel.
    pub(super) fn outputs(&self, results: &Results<'a>) -> Result<Outputs<'a>> {
        let aligned = |view: Option<&'a TensorView>| view.map(|view| self.call.aligned(view)).transpose();
        let keys = results.role().is_transposed();
        let (dqk, dv) = (aligned(results.dk.or(results.dq))?, aligned(results.dv)?);
        Ok(Outputs { dqk, dv, sums: self.sums(results.sums, keys), keys })
    }

    /// Prepares copies of the inputs and delta, which these kernels follow. With `fused`, one of them adds to `dq_accum`, whose turns, or
    /// else itself, start at 0.
    pub(super) fn tensor_core(self, kernels: Vec<GradientLaunch<'a>>, fused: bool) -> Result<Launch<'a>> {
        let Backward { call, saved, scratch, .. } = self;
        let [q, k, v] = call.aligned_inputs()?;
        let (o, dout) = (call.aligned(&saved.o)?, call.aligned(&saved.dout)?);
        let rows = stats_rows(call.problem);
        let count = cube_count(call.device, "delta", rows as u64 / delta::ROWS as u64)?;
        Ok(Box::new(move || {
            let sources = [q, k, v, dout].map(|source| source.read(call));
            let (o, dout, dlse) = (o.read(call), &sources[3], saved.dlse.as_ref());
            let in_order = Role::All.adds_in_order(call.problem);
            let (zeroed, zeros) = match (&scratch.dq_accum, &scratch.dq_turns) {
                (_, Some(turns)) if fused && in_order => (turns, Zeros { words: TURN_WORDS, rows: TURN_ROWS }),
                (Some(sums), _) if fused => (sums, Zeros { words: sums.shape[1], rows: 1 }),
                _ => (&scratch.stats, Zeros { words: 0, rows: 1 }),
            };
            // SAFETY: views have been checked against their buffers.
            unsafe {
                delta::delta::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(delta::UNITS),
                    call.addresses(&[&o, dout, zeroed, &saved.lse, &scratch.stats, dlse.unwrap_or(&saved.lse)]),
                    VECTOR_BYTES / call.problem.dtype.size(),
                    o.arg(),
                    dout.arg(),
                    saved.lse.arg(),
                    dlse.map(|dlse| dlse.arg()).into(),
                    rows_arg(&scratch.stats, 1),
                    rows_arg(zeroed, 4),
                    DeltaBlueprint {
                        head_dim_v: call.problem.head_dim_v,
                        stats_multiple: stats_multiple(call.problem),
                        varlen: call.problem.is_varlen(),
                        zeros,
                    },
                    call.dtype(),
                );
            }
            kernels.into_iter().for_each(|kernel| kernel(&sources));
        }))
    }
}

impl Call<'_> {
    /// Prepares access to a tensor in vectors of 16 bytes.
    pub(super) fn aligned<'a>(&self, view: &'a TensorView) -> Result<Aligned<'a>> {
        self.aligned_of(view, self.problem.dtype.size())
    }

    /// [`aligned`](Self::aligned) for elements of `size` bytes. Only those of the problem's type are copied.
    fn aligned_of<'a>(&self, view: &'a TensorView, size: usize) -> Result<Aligned<'a>> {
        if is_aligned(view, size) {
            return Ok(Aligned { view, copy: None });
        }
        // One thread block for each row.
        let rows = view.shape[..3].iter().map(|n| *n as u64).product();
        let count = cube_count(self.device, "copy", rows)?;
        let units = view.shape[3].next_multiple_of(32).min(self.device.units);
        Ok(Aligned { view, copy: Some((count, CubeDim::new_1d(units as u32))) })
    }

    /// [`aligned`](Self::aligned) for `q`, `k` and `v`.
    pub(super) fn aligned_inputs(&self) -> Result<[Aligned<'_>; 3]> {
        let Inputs { q, k, v, .. } = self.inputs;
        let size = self.problem.kv_size();
        Ok([self.aligned(q)?, self.aligned_of(k, size)?, self.aligned_of(v, size)?])
    }

    /// Work tiles of a kernel of this role, in head groups of `head_group` heads and `num_splits` splits of the keys or of a
    /// group's query heads. `spare` is how far thread blocks count past the last tile.
    pub(super) fn work(
        &self,
        role: Role,
        list: ListShape,
        head_group: usize,
        num_splits: usize,
        spare: u64,
    ) -> Result<Work> {
        let p = self.problem;
        let ListShape { keys, rows, columns } = list;
        let band = if keys { p.band().transposed() } else { p.band() };
        let (_, heads) = p.side(keys);
        // The first block starts before query 0 (`Band::ahead`), except with dropout, whose draws belong to blocks of 16; with several
        // sequences, which end at different positions; and with a block mask, whose blocks are fixed.
        let fixed = keys || self.seed.is_some() || p.is_varlen() || p.block_mask.is_some();
        let ahead = if fixed { 0 } else { band.ahead(rows as u32, columns as u32) };
        let (blocks, batches) = tiling::blocks(p, (band.seq_q + ahead) as usize, rows);
        // Chunks of blocks may have up to as many work tiles more.
        let chunks = if role == Role::All { 2 } else { 1 };
        check_count(role, blocks as u64 * (batches * heads * num_splits) as u64 * chunks, spare)?;
        let (batch, heads, group) = (p.batch as u32, heads as u32, p.group_size() as u32);
        let mut scheduler =
            TileScheduler::new(blocks as u32, ahead, batch, heads, group, head_group as u32, num_splits as u32);
        if role.adds_in_order(p) {
            // As many blocks as run at a time are in the chunks of a head group.
            let of_head = self.device.multiprocessors as u32 / (scheduler.head_group.divisor * num_splits as u32);
            scheduler = scheduler.in_chunks(of_head);
        }
        Ok(Work { list, band, scheduler })
    }

    /// Work tiles of a forward whose query heads are packed: blocks of as many queries as fit a tile with all heads of their group.
    pub(super) fn packed_work(&self, list: ListShape, head_group: usize, num_splits: usize) -> Result<Work> {
        let (p, band) = (self.problem, self.problem.band());
        let list = ListShape { rows: list.rows / p.group_size(), ..list };
        let (blocks, batches) = tiling::blocks(p, p.seq_q, list.rows);
        check_count(Role::Forward, blocks as u64 * (batches * p.num_heads_kv * num_splits) as u64, 0)?;
        let [batch, heads, group] = [p.batch, p.num_heads_kv, p.group_size()].map(|n| n as u32);
        let scheduler = TileScheduler::new(blocks as u32, 0, batch, heads, group, head_group as u32, num_splits as u32);
        Ok(Work { list, band, scheduler })
    }

    /// The blueprint of a kernel that reads the bias directly from global memory.
    pub(super) fn plain_blueprint(&self, role: Role, tile: HopperTile, is_split: bool) -> Blueprint {
        Blueprint {
            mask: rows_of(self.inputs.mask.as_ref().map(|mask| &mask.tensor)),
            bias: rows_of(self.inputs.bias.as_ref()),
            ..tiling::hopper::blueprint(self.problem, role, tile, is_split)
        }
    }

    /// Allocates a tensor `[B, H, S, D]` whose rows start at multiples of 16 bytes.
    fn packed(&self, shape: [usize; 4]) -> TensorView {
        let size = self.problem.dtype.size();
        let [batch, heads, rows, columns] = shape;
        let row = columns.next_multiple_of(VECTOR_BYTES / size);
        TensorView {
            handle: self.client.empty(size * batch * heads * rows * row),
            shape,
            strides: [heads * rows * row, rows * row, row, 1],
        }
    }

    /// Everything that scores depend on besides products, with this band.
    pub(super) fn score_args<E: Float, M: Numeric, NB: Size, NM: Size>(
        &self,
        blueprint: &Blueprint,
        band: &Band,
        route: &Route,
    ) -> ScoresLaunch<E, M, NB, NM> {
        self.scores(blueprint.role, route, band, blueprint.scores_are_scaled())
    }

    /// Number of elements of the bias and of the mask that are read at a time: two if the layout allows it and tiles start at even
    /// columns.
    pub(super) fn pair_widths(&self, transposed: bool) -> (usize, usize) {
        let alone = transposed || self.problem.is_varlen();
        let width =
            |view: &TensorView, size| if !alone && view.shape[3] > 1 && view.vectorizes(2, size) { 2 } else { 1 };
        let bias = self.inputs.bias.as_ref().map_or(1, |bias| width(bias, self.problem.dtype.size()));
        (bias, self.inputs.mask.as_ref().map_or(1, |mask| width(&mask.tensor, self.inputs.mask_type().size())))
    }

    /// Copies a tensor, and sets the columns after its last one, up to `padded`, to 0.
    fn copy(&self, (count, dim): &(CubeCount, CubeDim), from: &TensorView, to: &TensorView, padded: usize) {
        let addresses = AddressType::from_len(from.span().max(to.span()) as usize);
        let [batch, heads, rows, columns] = from.shape.map(|n| n as u32);
        // SAFETY: views have been checked against their buffers.
        unsafe {
            hopper::copy::copy::launch_unchecked(
                self.client,
                count.clone(),
                *dim,
                addresses,
                from.arg(),
                to.arg(),
                batch,
                heads,
                rows,
                columns,
                padded as u32,
                self.dtype(),
            );
        }
    }
}

/// Checks that a launch can count this many work tiles, `spare` of them past the last one.
fn check_count(role: Role, cubes: u64, spare: u64) -> Result<()> {
    let max = i32::MAX as u64 - spare;
    if cubes > max {
        return Err(AttentionError::Grid { kernel: role.kernel(), cubes, max });
    }
    Ok(())
}

/// The launch argument of a tensor in vectors of `vector` elements, up to the end of its last row. [`stride()`] gives its strides.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(super) unsafe fn rows_arg<const RANK: usize>(view: &TensorView<RANK>, vector: usize) -> BufferArg {
    // SAFETY: the caller guarantees it.
    unsafe { BufferArg::from_raw_parts(view.handle.clone(), (view.span() as usize).div_ceil(vector)) }
}

/// The launch argument of an input that is read in 16-byte vectors.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(super) unsafe fn rows_in<E: Float, N: Size>(view: &TensorView, size: usize) -> RowsInLaunch<E, N> {
    let vector = VECTOR_BYTES / size;
    // SAFETY: the caller guarantees it.
    RowsInLaunch::new(unsafe { rows_arg(view, vector) }, stride(view, vector))
}

/// The launch argument of an output that is written in 8-byte vectors.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(super) unsafe fn rows_out(view: &TensorView, size: usize) -> RowsOutLaunch {
    let vector = OUT_BYTES / size;
    // SAFETY: the caller guarantees it.
    RowsOutLaunch::new(unsafe { rows_arg(view, vector) }, stride(view, vector))
}

/// The launch argument of sums of so many batches each.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(super) unsafe fn sums_out(view: &TensorView, batches: usize) -> SumsOutLaunch {
    // SAFETY: the caller guarantees it.
    SumsOutLaunch::new(unsafe { rows_arg(view, 1) }, stride(view, 1), batches * view.strides[0])
}

/// The launch arguments of rows and columns of a backward: Q or K, and dO or V, of each.
///
/// # Safety
///
/// As `launch_unchecked`: the views have been checked against their buffers.
pub(super) unsafe fn source_sides<E: Float, N: Size>(
    [rows, cols]: [[&TensorView; 2]; 2],
    size: usize,
) -> SourceSidesLaunch<E, N> {
    // SAFETY: the caller guarantees it.
    let side = |[qk, dov]: [&TensorView; 2]| unsafe { SourceSideLaunch::new(rows_in(qk, size), rows_in(dov, size)) };
    SourceSidesLaunch::new(side(rows), side(cols))
}

/// Strides of rows, in vectors of `vector` elements.
pub(super) fn stride<const RANK: usize>(view: &TensorView<RANK>, vector: usize) -> StrideLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| view.strides[dim] / vector);
    StrideLaunch::new(batch, head, row)
}

/// Whether rows start at multiples of 16 bytes and no dimension repeats, so that TMA and 16-byte vectors can read the tensor.
fn is_aligned(view: &TensorView, size: usize) -> bool {
    let dense = view.strides[3] == 1 || view.shape[3] == 1;
    dense && starts_aligned(view, size) && (view.shape[3] * size).is_multiple_of(VECTOR_BYTES)
}

/// Whether rows start at multiples of 16 bytes and no dimension larger than one repeats.
pub(super) fn starts_aligned(view: &TensorView, size: usize) -> bool {
    let strided = |dim: usize| {
        view.shape[dim] == 1 || view.strides[dim] > 0 && (view.strides[dim] * size).is_multiple_of(VECTOR_BYTES)
    };
    view.handle.offset_start.unwrap_or(0).is_multiple_of(VECTOR_BYTES as u64) && (0..3).all(strided)
}

/// How the rows of a mask or bias differ.
fn rows_of(view: Option<&TensorView>) -> Option<Rows> {
    view.map(|view| if view.shape[2] == 1 { Rows::Same } else { Rows::Each })
}
