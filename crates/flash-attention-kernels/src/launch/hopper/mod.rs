//! Launch of the kernels for Hopper.

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

/// Alignment of rows in bytes that TMA and 16-byte vectors require.
pub(in crate::launch) const VECTOR_BYTES: usize = 16;

/// Bytes of the vectors in which outputs are written.
pub(in crate::launch) const OUT_BYTES: usize = 8;

impl Call<'_> {
    /// The blueprint of a kernel. The bias is tiled if TMA can read it and its tiles fit shared memory.
    fn hopper_blueprint(&self, role: Role, tile: HopperTile, split_keys: bool) -> Blueprint {
        let plain = self.plain_blueprint(role, tile, split_keys);
        let tiled = Blueprint { bias: Some(Rows::Tiled), ..plain };
        if self.takes_tiles(tiled.shared_memory()) { tiled } else { plain }
    }

    /// The blueprint of a kernel that reads the bias directly from global memory.
    pub(in crate::launch) fn plain_blueprint(&self, role: Role, tile: HopperTile, split_keys: bool) -> Blueprint {
        Blueprint {
            mask: rows_of(self.inputs.mask.as_ref().map(|mask| &mask.tensor)),
            bias: rows_of(self.inputs.bias.as_ref()),
            ..tiling::hopper::blueprint(self.problem, role, tile, split_keys)
        }
    }

    /// An error if a kernel of this role cannot run with these tiles.
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

    /// Whether TMA can read the bias in tiles, and `bytes` of shared memory are available.
    fn takes_tiles(&self, bytes: usize) -> bool {
        let readable = self.inputs.bias.as_ref().is_some_and(|bias| is_tiled(bias, self.problem));
        readable && bytes <= self.device.shared_memory
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

    /// Checks that every tensor that TMA cannot read can be copied.
    pub(in crate::launch) fn check_copies(&self, views: &[&TensorView]) -> Result<(), AttentionError> {
        for view in views.iter().filter(|view| !is_aligned(view, self.problem.dtype.size())) {
            rows_grid(self.device, "copy", view.shape)?;
        }
        Ok(())
    }

    /// A tensor that TMA can read: the tensor itself, or a packed copy.
    pub(in crate::launch) fn readable(&self, view: &TensorView) -> Result<TensorView, AttentionError> {
        if is_aligned(view, self.problem.dtype.size()) {
            return Ok(view.clone());
        }
        let packed = self.packed(view.shape);
        self.copy(view, &packed, packed.strides[2])?;
        Ok(packed)
    }

    /// The tensor that a kernel writes an output of queries, or of `keys`, to: the output itself, or a packed tensor that
    /// [`written`](Self::written) copies from.
    pub(in crate::launch) fn writable(&self, view: &TensorView, keys: bool) -> TensorView {
        if is_aligned(view, self.problem.dtype.size()) {
            return view.clone();
        }
        let packed = self.packed(view.shape);
        // Rows that belong to no sequence are copied with the others, and no kernel writes them.
        self.fill(&packed, None, keys);
        packed
    }

    /// Copies an output from the packed tensor to the requested tensor, if they differ.
    pub(in crate::launch) fn written(&self, computed: &TensorView, asked: &TensorView) -> Result<(), AttentionError> {
        if is_aligned(asked, self.problem.dtype.size()) { Ok(()) } else { self.copy(computed, asked, asked.shape[3]) }
    }

    /// The factors of the scores, and the optional operands.
    pub(in crate::launch) fn factors(&self, blueprint: &Blueprint, route: &Route) -> FactorsLaunch {
        let scale = self.problem.softmax_scale();
        let softcap = self.problem.options.softcap.unwrap_or(1.0);
        let exponent = if blueprint.scores_are_scaled() { LOG2_E } else { LOG2_E * scale };
        let stage = if blueprint.role == Role::Forward { Stage::Forward } else { Stage::Backward };
        let extras = self.extras(stage, route);
        FactorsLaunch::new(scale, softcap, 2.0 * LOG2_E * scale / softcap, exponent, extras)
    }

    /// Number of queries by which the first block starts before query 0: [`Band::ahead()`]. It is 0 with dropout, whose draws
    /// belong to blocks of 16; with several sequences, which end at different positions; and with a block mask, whose blocks are
    /// fixed.
    pub(in crate::launch) fn ahead(&self, band: &Band, tile_q: usize, tile_k: usize) -> u32 {
        let p = self.problem;
        if self.seed.is_some() || p.is_varlen() || p.block_mask.is_some() {
            0
        } else {
            band.ahead(tile_q as u32, tile_k as u32)
        }
    }

    /// Dimensions along which the bias repeats.
    fn spread(&self) -> SpreadLaunch {
        let repeats = |dim: usize| self.inputs.bias.as_ref().is_some_and(|bias| bias.shape[dim] == 1);
        SpreadLaunch::new(u32::from(!repeats(0)), u32::from(!repeats(1)))
    }

    /// Everything that scores depend on besides products, with this band.
    pub(in crate::launch) fn score_args<E: Float, M: Numeric, NB: Size, NM: Size>(
        &self,
        blueprint: &Blueprint,
        band: &Band,
        route: &Route,
    ) -> ScoresLaunch<E, M, NB, NM> {
        let (mask, bias) = (self.mask().into(), self.bias().into());
        ScoresLaunch::new(self.factors(blueprint, route), mask, bias, band.into_launch())
    }

    /// Number of elements of the bias and of the mask that are read at a time: two if the layout allows it and tiles start at even
    /// columns.
    pub(in crate::launch) fn pair_widths(&self, transposed: bool) -> (usize, usize) {
        let alone = transposed || self.problem.is_varlen();
        let width =
            |view: &TensorView, size| if !alone && view.shape[3] > 1 && view.vectorizes(2, size) { 2 } else { 1 };
        let bias = self.inputs.bias.as_ref().map_or(1, |bias| width(bias, self.problem.dtype.size()));
        (bias, self.inputs.mask.as_ref().map_or(1, |mask| width(&mask.tensor, mask.storage.size())))
    }

    /// Copies a tensor, and sets the columns after its last one, up to `padded`, to 0.
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

    /// The tensor map of `[B, H, S, D]` with boxes of 64 columns by `rows` rows.
    fn map(&self, view: &TensorView, rows: usize) -> TensorMapArg<Tiled> {
        let mut view = view.clone();
        // The stride of a dimension of size 1 is irrelevant, but TMA validates it.
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

/// The launch argument of a tensor in vectors of `vector` elements, up to the end of its last row. [`stride()`] gives its strides.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(in crate::launch) unsafe fn rows_arg<const RANK: usize>(view: &TensorView<RANK>, vector: usize) -> BufferArg {
    // SAFETY: the caller guarantees it.
    unsafe { BufferArg::from_raw_parts(view.handle.clone(), (view.span() as usize).div_ceil(vector)) }
}

/// The launch argument of an input that is read in 16-byte vectors.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(in crate::launch) unsafe fn rows_in<E: Float, N: Size>(view: &TensorView, size: usize) -> RowsInLaunch<E, N> {
    let vector = VECTOR_BYTES / size;
    // SAFETY: the caller guarantees it.
    RowsInLaunch::new(unsafe { rows_arg(view, vector) }, stride(view, vector))
}

/// The launch argument of an output that is written in 8-byte vectors.
///
/// # Safety
///
/// As `launch_unchecked`: the view has been checked against its buffer.
pub(in crate::launch) unsafe fn rows_out(view: &TensorView, size: usize) -> RowsOutLaunch {
    let vector = OUT_BYTES / size;
    // SAFETY: the caller guarantees it.
    RowsOutLaunch::new(unsafe { rows_arg(view, vector) }, stride(view, vector))
}

/// The launch arguments of rows and columns of a backward: Q or K, and dO or V, of each.
///
/// # Safety
///
/// As `launch_unchecked`: the views have been checked against their buffers.
pub(in crate::launch) unsafe fn source_sides<E: Float, N: Size>(
    [rows, cols]: [[&TensorView; 2]; 2],
    size: usize,
) -> SourceSidesLaunch<E, N> {
    // SAFETY: the caller guarantees it.
    let side = |[qk, dov]: [&TensorView; 2]| unsafe { SourceSideLaunch::new(rows_in(qk, size), rows_in(dov, size)) };
    SourceSidesLaunch::new(side(rows), side(cols))
}

/// Strides of rows, in vectors of `vector` elements.
pub(in crate::launch) fn stride<const RANK: usize>(view: &TensorView<RANK>, vector: usize) -> StrideLaunch {
    let [batch, head, row] = [0, 1, 2].map(|dim| view.strides[dim] / vector);
    StrideLaunch::new(batch, head, row)
}

/// Whether rows start at multiples of 16 bytes and no dimension repeats, so that TMA and 16-byte vectors can read the tensor.
fn is_aligned(view: &TensorView, size: usize) -> bool {
    let dense = view.strides[3] == 1 || view.shape[3] == 1;
    dense && starts_aligned(view, size) && (view.shape[3] * size).is_multiple_of(VECTOR_BYTES)
}

/// Whether TMA can read tiles of the problem's bias. With packed sequences it cannot: columns of tiles would start anywhere, and
/// TMA raises an illegal-instruction error for a start that is not at a multiple of 16 bytes.
fn is_tiled(view: &TensorView, problem: &AttentionProblem) -> bool {
    problem.cu_seqlens.is_none()
        && varies_by_pair(problem)
        && view.strides[3] == 1
        && starts_aligned(view, problem.dtype.size())
}

/// Whether rows start at multiples of 16 bytes and no dimension larger than one repeats.
fn starts_aligned(view: &TensorView, size: usize) -> bool {
    let strided = |dim: usize| {
        view.shape[dim] == 1 || view.strides[dim] > 0 && (view.strides[dim] * size).is_multiple_of(VECTOR_BYTES)
    };
    view.handle.offset_start.unwrap_or(0).is_multiple_of(VECTOR_BYTES as u64) && (0..3).all(strided)
}

/// How the rows of a mask or bias differ.
fn rows_of(view: Option<&TensorView>) -> Option<Rows> {
    view.map(|view| if view.shape[2] == 1 { Rows::Same } else { Rows::Each })
}
