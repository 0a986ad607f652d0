//! Launches the kernels for Hopper.

use super::{Call, rows_grid};
use crate::error::AttentionError;
use crate::hopper::forward::{StrideLaunch, StridesLaunch};
use crate::hopper::ring::SpreadLaunch;
use crate::hopper::schedule::Walk;
use crate::hopper::scores::FactorsLaunch;
use crate::hopper::{self, PANEL, Rows, WARPGROUP_ROWS};
use crate::problem::AttentionProblem;
use crate::tensor::TensorView;
use crate::tiling::{HopperForward, cube_count, varies_by_pair};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_core::device::ServiceId;
use std::f32::consts::LOG2_E;
use std::sync::{Mutex, PoisonError};

/// Bytes that rows must start at multiples of: what TMA and vectors of 16 bytes ask for.
const ALIGNMENT: usize = 16;

/// Bytes of the vectors that results are written in.
const OUT_BYTES: usize = 8;

impl Call<'_> {
    /// Computes `o` and `lse`.
    pub(super) fn forward_hopper(
        &self,
        o: &TensorView,
        lse: &TensorView<3>,
        tiles: HopperForward,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        let mut blueprint = hopper::Blueprint {
            tile: tiles.tile,
            dtype: p.dtype,
            head_dim: p.head_dim,
            head_dim_v: p.head_dim_v,
            capped: p.options.softcap.is_some(),
            mask: rows_of(self.inputs.mask.as_ref().map(|mask| &mask.tensor)),
            bias: rows_of(self.inputs.bias.as_ref()),
            partial: tiles.parts > 1,
        };
        if let Some(bias) = &self.inputs.bias {
            let tiled = hopper::Blueprint { bias: Some(Rows::Tiled), ..blueprint };
            if is_tiled(bias, p) && tiled.shared_memory() <= self.device.shared_memory {
                blueprint = tiled;
            }
        }
        let ahead = p.band().ahead(tiles.tile.tile_q() as u32, tiles.tile.tile_k as u32);
        let blocks = (p.seq_q + ahead as usize).div_ceil(tiles.tile.tile_q());
        let heads = p.batch * p.num_heads_q;
        let items = blocks as u64 * heads as u64 * tiles.parts as u64;
        let max = i32::MAX as u64 - self.device.multiprocessors as u64 * tiles.tile.teams as u64;
        if items > max {
            return Err(AttentionError::Grid { kernel: "forward", cubes: items, max });
        }
        let copies = [&self.inputs.q, &self.inputs.k, &self.inputs.v].map(|view| !is_aligned(view, p.dtype.size()));
        let copies_o = tiles.parts == 1 && !is_aligned(o, p.dtype.size());
        for (copied, view) in
            copies.into_iter().chain([copies_o]).zip([&self.inputs.q, &self.inputs.k, &self.inputs.v, o])
        {
            if copied {
                rows_grid(self.device, "copy", view.shape)?;
            }
        }

        if tiles.parts > 1 {
            self.merge_grid()?;
        }

        // Nothing can fail from here on.
        let read = |view: &TensorView, copied: bool| if copied { self.packed_copy(view) } else { Ok(view.clone()) };
        let q = read(&self.inputs.q, copies[0])?;
        let k = read(&self.inputs.k, copies[1])?;
        let v = read(&self.inputs.v, copies[2])?;
        let (out, out_lse, out_size) = if tiles.parts > 1 {
            let shape = [tiles.parts * p.batch, p.num_heads_q, p.seq_q, blueprint.columns()];
            let [batches, heads, rows, _] = shape;
            let parts = self.client.empty(size_of::<f32>() * shape.iter().product::<usize>());
            let part_lse = self.client.empty(size_of::<f32>() * batches * heads * rows);
            let part_lse = TensorView::contiguous(part_lse, [batches, heads, rows]);
            (TensorView::contiguous(parts, shape), part_lse, size_of::<f32>())
        } else if copies_o {
            (self.packed(p.o_shape()), lse.clone(), p.dtype.size())
        } else {
            (o.clone(), lse.clone(), p.dtype.size())
        };

        let scale = p.softmax_scale();
        let softcap = p.options.softcap.unwrap_or(1.0);
        let factors = FactorsLaunch::new(
            scale,
            softcap,
            2.0 * LOG2_E * scale / softcap,
            if blueprint.cooked() { LOG2_E } else { LOG2_E * scale },
        );
        let walk = Walk::new(
            blocks as u32,
            ahead,
            p.batch as u32,
            p.num_heads_q as u32,
            p.group_size() as u32,
            tiles.section as u32,
            tiles.parts as u32,
        );
        let cubes = (self.device.multiprocessors as u64).clamp(1, items.div_ceil(tiles.tile.teams as u64));
        let counter = counter(self.client);
        let vector = ALIGNMENT / p.dtype.size();
        let stride = |[batch, head, row]: [usize; 3]| StrideLaunch::new(batch, head, row);
        let [q_stride, k_stride, v_stride, o_stride] =
            [(&q, vector), (&k, vector), (&v, vector), (&out, OUT_BYTES / out_size)]
                .map(|(view, vector)| stride([0, 1, 2].map(|dim| view.strides[dim] / vector)));
        let strides = StridesLaunch::new(q_stride, k_stride, v_stride, o_stride, stride(out_lse.strides));
        let bias_map = match &self.inputs.bias {
            Some(bias) if blueprint.tiled_bias() => self.map(bias, WARPGROUP_ROWS),
            _ => self.map(&k, tiles.tile.tile_k),
        };
        let repeats = |dim: usize| self.inputs.bias.as_ref().is_some_and(|bias| bias.shape[dim] == 1);
        let spread = SpreadLaunch::new(u32::from(!repeats(0)), u32::from(!repeats(1)));
        let (mask, mask_width) = pairs(self.inputs.mask.as_ref().map(|mask| (&mask.tensor, mask.storage.size())));
        let (bias, bias_width) = pairs(self.inputs.bias.as_ref().map(|bias| (bias, p.dtype.size())));
        let addresses = self.addresses([out.span(), out_lse.span()]);
        // SAFETY: views have been checked against their buffers; the kernel clamps or drops what lies past the ends.
        unsafe {
            hopper::forward::forward::launch_unchecked(
                self.client,
                CubeCount::Static(cubes as u32, 1, 1),
                CubeDim::new_1d(tiles.tile.units() as u32),
                addresses,
                bias_width,
                mask_width,
                self.map(&q, WARPGROUP_ROWS),
                self.map(&k, tiles.tile.tile_k),
                self.map(&v, tiles.tile.tile_k),
                bias_map,
                mask.into(),
                bias.into(),
                rows_arg(&out, OUT_BYTES / out_size),
                rows_arg(&out_lse, 1),
                BufferArg::from_raw_parts(counter, 1),
                rows_arg(&q, vector),
                rows_arg(&k, vector),
                rows_arg(&v, vector),
                strides,
                factors,
                p.band().into_launch(),
                walk.into_launch(),
                spread,
                blueprint,
                [self.dtype(), self.mask_type()],
            );
        }
        if tiles.parts > 1 {
            self.merge(&out, &out_lse, o, lse, tiles.parts)?;
        } else if copies_o {
            self.copy(&out, o)?;
        }
        Ok(())
    }

    fn merge_grid(&self) -> Result<(CubeCount, CubeDim), AttentionError> {
        let rows = hopper::merge::ROWS;
        let cubes = (self.problem.rows() as u64).div_ceil(rows as u64);
        let (x, y, z) = cube_count(self.device, "merge", cubes)?;
        Ok((CubeCount::Static(x, y, z), CubeDim::new_1d(32 * rows)))
    }

    /// Puts parts of the keys together.
    fn merge(
        &self,
        parts: &TensorView,
        part_lse: &TensorView<3>,
        o: &TensorView,
        lse: &TensorView<3>,
        count: usize,
    ) -> Result<(), AttentionError> {
        let (grid, dim) = self.merge_grid()?;
        let addresses = self.addresses([parts.span(), part_lse.span(), o.span(), lse.span()]);
        let [batches, heads, rows, columns] = o.shape.map(|n| n as u32);
        // SAFETY: views have been checked against their buffers, those of the parts are as long as they say.
        unsafe {
            hopper::merge::merge::launch_unchecked(
                self.client,
                grid,
                dim,
                addresses,
                parts.arg(),
                part_lse.arg(),
                o.arg(),
                lse.arg(),
                batches,
                heads,
                rows,
                columns,
                count as u32,
                self.dtype(),
            );
        }
        Ok(())
    }

    /// Memory for `[B, H, S, D]` whose rows start at multiples of 16 bytes.
    fn packed(&self, shape: [usize; 4]) -> TensorView {
        let size = self.problem.dtype.size();
        let [batch, heads, rows, columns] = shape;
        let row = columns.next_multiple_of(ALIGNMENT / size);
        TensorView {
            handle: self.client.empty(size * batch * heads * rows * row),
            shape,
            strides: [heads * rows * row, rows * row, row, 1],
        }
    }

    fn packed_copy(&self, view: &TensorView) -> Result<TensorView, AttentionError> {
        let packed = self.packed(view.shape);
        self.copy(view, &packed)?;
        Ok(packed)
    }

    fn copy(&self, from: &TensorView, to: &TensorView) -> Result<(), AttentionError> {
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
unsafe fn rows_arg<const RANK: usize>(view: &TensorView<RANK>, vector: usize) -> BufferArg {
    // SAFETY: the caller's.
    unsafe { BufferArg::from_raw_parts(view.handle.clone(), (view.span() as usize).div_ceil(vector)) }
}

/// Whether rows start at multiples of 16 bytes and no dimension repeats: what TMA reads, and vectors of 16 bytes.
fn is_aligned(view: &TensorView, size: usize) -> bool {
    let dense = view.strides[3] == 1 || view.shape[3] == 1;
    dense && starts_aligned(view, size) && (view.shape[3] * size).is_multiple_of(ALIGNMENT)
}

/// Whether TMA reads tiles of the problem's bias.
fn is_tiled(view: &TensorView, problem: &AttentionProblem) -> bool {
    varies_by_pair(problem) && view.strides[3] == 1 && starts_aligned(view, problem.dtype.size())
}

/// Whether rows start at multiples of 16 bytes and no dimension of more than one repeats.
fn starts_aligned(view: &TensorView, size: usize) -> bool {
    let strided = |dim: usize| {
        view.shape[dim] == 1 || view.strides[dim] > 0 && (view.strides[dim] * size).is_multiple_of(ALIGNMENT)
    };
    view.handle.offset_start.unwrap_or(0).is_multiple_of(ALIGNMENT as u64) && (0..3).all(strided)
}

/// Whether a mask or bias differs from row to row.
fn rows_of(view: Option<&TensorView>) -> Option<Rows> {
    view.map(|view| if view.shape[2] == 1 { Rows::Same } else { Rows::Each })
}

/// The argument of a mask or bias, and how many elements it is read at a time: two where its layout allows it.
fn pairs(view: Option<(&TensorView, usize)>) -> (Option<TensorArg>, usize) {
    let Some((view, size)) = view else { return (None, 1) };
    (Some(view.broadcast_arg()), if view.shape[3] > 1 && view.vectorizes(2, size) { 2 } else { 1 })
}

/// The counter that cubes take work from, 0 between launches: the kernel leaves it so. One for each stream, as launches on
/// one stream come one after the other.
fn counter(client: &Client) -> Handle {
    static COUNTERS: Mutex<Vec<(ServiceId, Handle)>> = Mutex::new(Vec::new());
    // A handle knows the stream that its client works on.
    let (service, stream) = (client.service_id(), client.empty(4).stream);
    let mut counters = COUNTERS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = counters.iter().find(|(of, handle)| *of == service && handle.stream == stream);
    if let Some((_, handle)) = found {
        return handle.clone();
    }
    let handle = client.create_from_slice(&[0; 4]);
    counters.push((service, handle.clone()));
    handle
}
