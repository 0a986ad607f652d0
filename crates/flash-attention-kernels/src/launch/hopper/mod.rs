//! Launches the kernels for Hopper.

mod backward;
mod counters;
mod dbias;
mod forward;

use super::route::Route;
use super::{Call, rows_grid};
use crate::error::AttentionError;
use crate::fragment::role::Role;
use crate::hopper;
use crate::hopper::producer::SpreadLaunch;
use crate::mask::Band;
use crate::problem::AttentionProblem;
use crate::tensor::TensorView;
use crate::tensor_core::operands::{RowsInLaunch, RowsOutLaunch, SourceSideLaunch, SourceSidesLaunch, StrideLaunch};
use crate::tensor_core::scores::{FactorsLaunch, ScoresLaunch};
use crate::tensor_core::{Blueprint, HopperTile, PANEL, Rows};
use crate::tiling::{self, Kernel, Stage, varies_by_pair};
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

/// Bytes that rows must start at multiples of: what TMA and vectors of as many bytes ask for.
pub(in crate::launch) const VECTOR_BYTES: usize = 16;

/// Bytes of the vectors that results are written in.
pub(in crate::launch) const OUT_BYTES: usize = 8;

impl Call<'_> {
    /// What a kernel is specialised for.
    fn hopper_blueprint(&self, role: Role, tile: HopperTile, split_keys: bool) -> Blueprint {
        let plain = self.plain_blueprint(role, tile, split_keys);
        let tiled = Blueprint { bias: Some(Rows::Tiled), ..plain };
        if self.takes_tiles(tiled.shared_memory()) { tiled } else { plain }
    }

    /// The same, with the bias read as it lies.
    pub(in crate::launch) fn plain_blueprint(&self, role: Role, tile: HopperTile, split_keys: bool) -> Blueprint {
        Blueprint {
            mask: rows_of(self.inputs.mask.as_ref().map(|mask| &mask.tensor)),
            bias: rows_of(self.inputs.bias.as_ref()),
            ..tiling::hopper::blueprint(self.problem, role, tile, split_keys)
        }
    }

    /// Why a kernel of this role cannot run with these tiles.
    fn check_hopper(
        &self,
        role: Role,
        tile: HopperTile,
        head_group: usize,
        num_splits: usize,
    ) -> Result<(), AttentionError> {
        tiling::hopper::check(self.device, self.problem, role, tile, head_group, num_splits)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Hopper.name(), why })
    }

    /// Whether the bias comes to shared memory in tiles, with so many bytes in all.
    fn takes_tiles(&self, bytes: usize) -> bool {
        let readable = self.inputs.bias.as_ref().is_some_and(|bias| is_tiled(bias, self.problem));
        readable && bytes <= self.device.shared_memory
    }

    /// Memory for `[B, H, S, D]` whose rows start at multiples of 16 bytes.
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

    /// Checks that what TMA cannot read of these can be copied.
    pub(in crate::launch) fn check_copies(&self, views: &[&TensorView]) -> Result<(), AttentionError> {
        for view in views.iter().filter(|view| !is_aligned(view, self.problem.dtype.size())) {
            rows_grid(self.device, "copy", view.shape)?;
        }
        Ok(())
    }

    /// What TMA reads: the tensor itself, or a copy.
    pub(in crate::launch) fn readable(&self, view: &TensorView) -> Result<TensorView, AttentionError> {
        if is_aligned(view, self.problem.dtype.size()) {
            return Ok(view.clone());
        }
        let packed = self.packed(view.shape);
        self.copy(view, &packed, packed.strides[2])?;
        Ok(packed)
    }

    /// What a result of queries, or of `keys`, is written to: the tensor itself, or memory for [`written`](Self::written) to copy from.
    pub(in crate::launch) fn writable(&self, view: &TensorView, keys: bool) -> TensorView {
        if is_aligned(view, self.problem.dtype.size()) {
            return view.clone();
        }
        let packed = self.packed(view.shape);
        // Rows that belong to no sequence are copied with the others, and no kernel writes them.
        self.fill(&packed, None, keys);
        packed
    }

    /// Brings a result from where it was written to where it was asked for.
    pub(in crate::launch) fn written(&self, computed: &TensorView, asked: &TensorView) -> Result<(), AttentionError> {
        if is_aligned(asked, self.problem.dtype.size()) { Ok(()) } else { self.copy(computed, asked, asked.shape[3]) }
    }

    /// The factors of the scores, with what the kernel walks over.
    pub(in crate::launch) fn factors(&self, blueprint: &Blueprint, route: &Route) -> FactorsLaunch {
        let scale = self.problem.softmax_scale();
        let softcap = self.problem.options.softcap.unwrap_or(1.0);
        let exponent = if blueprint.scores_are_scaled() { LOG2_E } else { LOG2_E * scale };
        let stage = if blueprint.role == Role::Forward { Stage::Forward } else { Stage::Backward };
        let extras = self.extras(stage, route);
        FactorsLaunch::new(scale, softcap, 2.0 * LOG2_E * scale / softcap, exponent, extras)
    }

    /// How many queries before the first one blocks start: [`Band::ahead()`]. Draws of dropout are told apart by blocks of 16; sequences
    /// have ends of their own, and block masks blocks.
    pub(in crate::launch) fn ahead(&self, band: &Band, tile_q: usize, tile_k: usize) -> u32 {
        let p = self.problem;
        if self.seed.is_some() || p.is_varlen() || p.block_mask.is_some() {
            0
        } else {
            band.ahead(tile_q as u32, tile_k as u32)
        }
    }

    /// Which dimensions of a bias repeat.
    fn spread(&self) -> SpreadLaunch {
        let repeats = |dim: usize| self.inputs.bias.as_ref().is_some_and(|bias| bias.shape[dim] == 1);
        SpreadLaunch::new(u32::from(!repeats(0)), u32::from(!repeats(1)))
    }

    /// What scores are made of, with this band.
    pub(in crate::launch) fn score_args<E: Float, M: Numeric, NB: Size, NM: Size>(
        &self,
        blueprint: &Blueprint,
        band: &Band,
        route: &Route,
    ) -> ScoresLaunch<E, M, NB, NM> {
        let (mask, bias) = (self.mask().into(), self.bias().into());
        ScoresLaunch::new(self.factors(blueprint, route), mask, bias, band.into_launch())
    }

    /// How many elements of a bias and of a mask are read at a time: two where the layout allows it, and tiles start at even ones.
    pub(in crate::launch) fn pair_widths(&self, transposed: bool) -> (usize, usize) {
        let alone = transposed || self.problem.is_varlen();
        let width =
            |view: &TensorView, size| if !alone && view.shape[3] > 1 && view.vectorizes(2, size) { 2 } else { 1 };
        let bias = self.inputs.bias.as_ref().map_or(1, |bias| width(bias, self.problem.dtype.size()));
        (bias, self.inputs.mask.as_ref().map_or(1, |mask| width(&mask.tensor, mask.storage.size())))
    }

    /// Copies a tensor, and makes columns after its last up to `padded` 0.
    fn copy(&self, from: &TensorView, to: &TensorView, padded: usize) -> Result<(), AttentionError> {
        let (count, dim) = rows_grid(self.device, "copy", from.shape)?;
        let addresses = AddressType::from_len(from.span().max(to.span()) as usize);
        let [batch, heads, rows, columns] = from.shape.map(|n| n as u32);
        // SAFETY: views have been checked against their buffers.
        unsafe {
            hopper::copy::copy::launch_unchecked(
                self.client,
                count,
                dim,
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
        Ok(())
    }

    /// The tensor map of `[B, H, S, D]` with boxes of 64 columns of `rows` rows.
    fn map(&self, view: &TensorView, rows: usize) -> TensorMapArg<Tiled> {
        let mut view = view.clone();
        // The stride of a single element says nothing, but TMA checks it.
        for dim in 0..3 {
            if view.shape[dim] == 1 {
                view.strides[dim] = view.shape[3].next_multiple_of(PANEL);
            }
        }
        TensorMapArg::new(TiledArgs { tile_size: [1, 1, rows, PANEL].into() }, view.arg(), self.dtype())
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256)
    }
}

/// The launch argument of a tensor as vectors of so many elements, up to the end of its last row; its strides are
/// [`Strides`](hopper::forward::Strides).
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(in crate::launch) unsafe fn rows_arg<const RANK: usize>(view: &TensorView<RANK>, vector: usize) -> BufferArg {
    // SAFETY: the caller's.
    unsafe { BufferArg::from_raw_parts(view.handle.clone(), (view.span() as usize).div_ceil(vector)) }
}

/// The argument of a tensor that is read in vectors of 16 bytes.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(in crate::launch) unsafe fn rows_in<E: Float, N: Size>(view: &TensorView, size: usize) -> RowsInLaunch<E, N> {
    let vector = VECTOR_BYTES / size;
    // SAFETY: the caller's.
    RowsInLaunch::new(unsafe { rows_arg(view, vector) }, stride(view, vector))
}

/// The argument of a tensor that is written in vectors of 8 bytes.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(in crate::launch) unsafe fn rows_out(view: &TensorView, size: usize) -> RowsOutLaunch {
    let vector = OUT_BYTES / size;
    // SAFETY: the caller's.
    RowsOutLaunch::new(unsafe { rows_arg(view, vector) }, stride(view, vector))
}

/// The arguments of the rows and the columns of a backward, Q or K and dO or V each.
///
/// # Safety
///
/// As `launch_unchecked`: the views have been checked against their buffers.
pub(in crate::launch) unsafe fn source_sides<E: Float, N: Size>(
    [rows, cols]: [[&TensorView; 2]; 2],
    size: usize,
) -> SourceSidesLaunch<E, N> {
    // SAFETY: the caller's.
    let side = |[qk, dov]: [&TensorView; 2]| unsafe { SourceSideLaunch::new(rows_in(qk, size), rows_in(dov, size)) };
    SourceSidesLaunch::new(side(rows), side(cols))
}

/// The strides of rows, in vectors of so many elements.
pub(in crate::launch) fn stride<const RANK: usize>(view: &TensorView<RANK>, vector: usize) -> StrideLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| view.strides[dim] / vector);
    StrideLaunch::new(batch, head, row)
}

/// Whether rows start at multiples of 16 bytes and no dimension repeats: what TMA reads, and vectors of 16 bytes.
fn is_aligned(view: &TensorView, size: usize) -> bool {
    let dense = view.strides[3] == 1 || view.shape[3] == 1;
    dense && starts_aligned(view, size) && (view.shape[3] * size).is_multiple_of(VECTOR_BYTES)
}

/// Whether TMA reads tiles of the problem's bias. Its tiles' columns would start anywhere where sequences are packed, which TMA takes for an
/// illegal instruction unless it is at a multiple of 16 bytes.
fn is_tiled(view: &TensorView, problem: &AttentionProblem) -> bool {
    problem.cu_seqlens.is_none()
        && varies_by_pair(problem)
        && view.strides[3] == 1
        && starts_aligned(view, problem.dtype.size())
}

/// Whether rows start at multiples of 16 bytes and no dimension of more than one repeats.
fn starts_aligned(view: &TensorView, size: usize) -> bool {
    let strided = |dim: usize| {
        view.shape[dim] == 1 || view.strides[dim] > 0 && (view.strides[dim] * size).is_multiple_of(VECTOR_BYTES)
    };
    view.handle.offset_start.unwrap_or(0).is_multiple_of(VECTOR_BYTES as u64) && (0..3).all(strided)
}

/// Whether a mask or bias differs from row to row.
fn rows_of(view: Option<&TensorView>) -> Option<Rows> {
    view.map(|view| if view.shape[2] == 1 { Rows::Same } else { Rows::Each })
}
