//! Launches the backward: delta, then a kernel for each gradient asked for.

use super::route::Route;
use super::sequences::Blocks;
use super::{Call, Inputs, elementwise, input, output};
use crate::error::AttentionError;
use crate::hopper::{BiasTile, dq_accum_columns};
use crate::matrix::Role;
use crate::mods::TENSORS;
use crate::portable::GridLaunch;
use crate::portable::dbias::Sums;
use crate::portable::tile::{TileShape, WIDTH};
use crate::portable::{self, dbias, delta, dsinks, nothing};
use crate::problem::{AttentionProblem, BackwardOrder, MAX_SEQ};
use crate::score::Factor;
use crate::tensor::TensorView;
use crate::tiling::{self, BackwardTiles, BiasGradient, Device, Gradient, HopperGradient, MmaGradient, Stage};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;

/// What the backward reads beside the inputs.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The forward's output, `[batch, num_heads_q, seq_q, head_dim_v]`.
    pub o: TensorView,
    /// The forward's log-sum-exp, `[batch, num_heads_q, seq_q]`, f32.
    pub lse: TensorView<3>,
    /// Gradient of `o`.
    pub dout: TensorView,
    /// Gradient of `lse`, f32, if it has one.
    pub dlse: Option<TensorView<3>>,
}

/// Where the backward writes; what is `None` is not computed and costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    /// Shape and dtype of `q`.
    pub dq: Option<TensorView>,
    /// Shape and dtype of `k`.
    pub dk: Option<TensorView>,
    /// Shape and dtype of `v`.
    pub dv: Option<TensorView>,
    /// Shape and dtype of the bias.
    pub dbias: Option<TensorView>,
    /// Shape of the slopes, f32.
    pub dalibi_slopes: Option<TensorView<2>>,
    /// Shape of the sinks, f32.
    pub dsinks: Option<TensorView<1>>,
    /// Shapes of the tensors that the function of scores reads, f32.
    pub dscore_tensors: [Option<TensorView>; TENSORS],
}

/// Computes the gradients asked for, launching only what they need.
///
/// They have the shape and dtype of what they are the gradient of. Every sum is taken in a fixed
/// order, unless the options ask for [`BackwardOrder::Fast`](crate::BackwardOrder::Fast): the same call gives the same bits.
/// (FlashAttention-2, arXiv:2307.08691, algorithm 2, with one kernel for `dq` and one for `dk` and `dv` in place of atomic
/// additions.)
///
/// Errors name the argument at fault; nothing has been launched then.
pub fn backward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    saved: &Saved,
    gradients: &Gradients,
) -> Result<(), AttentionError> {
    let device = Device::of(client);
    let call = Call::new(client, &device, problem, inputs)?;
    let tiles = tiling::choose_backward(&device, problem, None, &mut Vec::new())?;
    // Scratch is allocated for a problem that was found valid.
    call.backward(saved, gradients, &Scratch::empty(client, problem), tiles)
}

/// [`backward`] with scratch of the caller's and, if given, tiles of its choice.
pub fn backward_with(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    saved: &Saved,
    gradients: &Gradients,
    scratch: &Scratch,
    tiles: Option<BackwardTiles>,
) -> Result<(), AttentionError> {
    let device = Device::of(client);
    let call = Call::new(client, &device, problem, inputs)?;
    let tiles = match tiles {
        Some(tiles) => tiles,
        None => tiling::choose_backward(&device, problem, None, &mut Vec::new())?,
    };
    call.backward(saved, gradients, scratch, tiles)
}

/// Memory that the backward needs beside inputs, outputs and gradients; contents do not matter.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// `lse` and delta of each row, `[2, n]`, f32: `n` is `batch · num_heads_q · seq_q` with `seq_q` rounded up to a multiple of
    /// 128, or of 384 above head_dim 192.
    pub stats: TensorView<2>,
    /// Sums that the gradients of a broadcast bias and of slopes are folded from, `[batch, num_heads_q, seq_q or seq_k]`, f32.
    pub bias_sums: Option<TensorView<3>>,
    /// `dq` in f32, where blocks of keys add to it: `[n, head_dim rounded up to a multiple of 64]`, with the `n` of `stats`.
    pub dq_accum: Option<TensorView<2>>,
}

impl Scratch {
    /// Allocates what the problem needs on this device.
    pub fn empty(client: &Client, problem: &AttentionProblem) -> Self {
        let rows = tiling::stats_rows(problem);
        let len = tiling::bias_sums_len(problem);
        let heads = problem.batch * problem.num_heads_q;
        let bias_sums = (len > 0).then(|| {
            let shape = [problem.batch, problem.num_heads_q, len / heads];
            TensorView::contiguous(client.empty(4 * len), shape)
        });
        // Reading what the device can do takes time, too.
        let fast = problem.options.backward_order == BackwardOrder::Fast;
        let dq_accum = (fast && tiling::adds_dq(&Device::of(client), problem)).then(|| {
            let columns = dq_accum_columns(problem.head_dim);
            TensorView::contiguous(client.empty(4 * (rows * columns).max(1)), [rows, columns])
        });
        Scratch { stats: TensorView::contiguous(client.empty(8 * rows.max(1)), [2, rows]), bias_sums, dq_accum }
    }
}

/// What they are called in messages.
const DSCORE_TENSORS: [&str; TENSORS] = ["dscore_tensors[0]", "dscore_tensors[1]"];

/// Gradients that one launch for Hopper, or of `mma.sync`, computes: `dq`, one or both of the others, or, for Hopper, all.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "there is no such launch then"))]
pub(super) struct HopperResults<'a> {
    pub dq: Option<&'a TensorView>,
    pub dk: Option<&'a TensorView>,
    pub dv: Option<&'a TensorView>,
}

/// A launch for Hopper.
pub(super) type Wanted<'a> = (HopperResults<'a>, HopperGradient);

/// A launch of `mma.sync`.
pub(super) type WantedMma<'a> = (HopperResults<'a>, MmaGradient);

/// That of the bias's gradient.
pub(super) type WantedBias<'a> = (&'a TensorView, BiasTile);

/// How the bias's gradient is launched.
struct DbiasGrids {
    sums: Sums,
    /// Heads and batches that are told apart in what a thread block writes.
    heads: usize,
    batches: usize,
    grid: (GridLaunch, CubeCount),
    /// Threads that share an element of the fold, and its thread blocks.
    fold: Option<(usize, CubeCount)>,
}

impl Call<'_> {
    fn backward(
        &self,
        saved: &Saved,
        gradients: &Gradients,
        scratch: &Scratch,
        tiles: BackwardTiles,
    ) -> Result<(), AttentionError> {
        // -- validate
        let p = self.problem;
        let size = p.dtype.size();
        input(self.device, "o", &saved.o, p.o_shape(), size)?;
        input(self.device, "lse", &saved.lse, p.lse_shape(), 4)?;
        input(self.device, "dout", &saved.dout, p.o_shape(), size)?;
        if let Some(dlse) = &saved.dlse {
            input(self.device, "dlse", dlse, p.lse_shape(), 4)?;
        }
        let wanted = [
            ("dq", &gradients.dq, p.q_shape()),
            ("dk", &gradients.dk, p.k_shape()),
            ("dv", &gradients.dv, p.v_shape()),
            ("dbias", &gradients.dbias, p.bias.unwrap_or([0; 4])),
        ];
        for (argument, view, shape) in wanted {
            if let Some(view) = view {
                output(self.device, argument, view, shape, size)?;
            }
        }
        output(self.device, "stats", &scratch.stats, [2, tiling::stats_rows(p)], 4)?;
        if let Some(view) = &gradients.dalibi_slopes {
            output(self.device, "dalibi_slopes", view, p.alibi_slopes.unwrap_or([0; 2]), 4)?;
        }
        if let Some(view) = &gradients.dsinks {
            output(self.device, "dsinks", view, [if p.sinks { p.num_heads_q } else { 0 }], 4)?;
        }
        for ((view, shape), argument) in gradients.dscore_tensors.iter().zip(p.score_tensors).zip(DSCORE_TENSORS) {
            if let Some(view) = view {
                output(self.device, argument, view, shape.unwrap_or([0; 4]), 4)?;
            }
        }
        let of_tensors = gradients.dscore_tensors.iter().flatten();
        let summed = gradients.dbias.is_some() || gradients.dalibi_slopes.is_some() || of_tensors.clone().count() > 0;
        let sums = scratch.bias_sums.as_ref().filter(|_| summed);
        match (sums, tiling::bias_sums_len(p)) {
            (Some(sums), len) if len > 0 => {
                output(self.device, "bias_sums", sums, [p.batch, p.num_heads_q, len / (p.batch * p.num_heads_q)], 4)?;
            }
            (None, len) if len > 0 && summed => {
                return Err(AttentionError::Unsupported {
                    option: "scratch.bias_sums",
                    value: "none".into(),
                    why: "gradients of slopes and of what is broadcast are folded from sums; allocate with Scratch::empty",
                });
            }
            _ => {}
        }
        let all = [&gradients.dq, &gradients.dk, &gradients.dv].iter().all(|view| view.is_some());
        let fused = tiles.fused.filter(|_| all);
        match &scratch.dq_accum {
            Some(sums) if fused.is_some() => {
                let shape = [tiling::stats_rows(p), dq_accum_columns(p.head_dim)];
                output(self.device, "dq_accum", sums, shape, 4)?;
            }
            None if fused.is_some() => {
                return Err(AttentionError::Unsupported {
                    option: "scratch.dq_accum",
                    value: "none".into(),
                    why: "blocks of keys add to dq there; allocate with Scratch::empty",
                });
            }
            _ => {}
        }
        let views: Vec<&TensorView> =
            wanted.iter().filter_map(|(_, view, _)| view.as_ref()).chain([&saved.o, &saved.dout]).collect();
        let views = views.into_iter().chain(of_tensors.clone()).map(|view| view.span());
        let rows = [Some(&saved.lse), saved.dlse.as_ref(), sums].into_iter().flatten().map(|view| view.span());
        let slopes = gradients.dalibi_slopes.iter().map(|view| view.span());
        let addresses = self.addresses(views.chain(rows).chain(slopes).chain([scratch.stats.span()]));
        let (dslopes, dsinks) = (gradients.dalibi_slopes.as_ref(), gradients.dsinks.as_ref());
        let none = dslopes.is_none() && dsinks.is_none() && of_tensors.clone().count() == 0;
        if wanted.iter().all(|(_, view, _)| view.is_none()) && none {
            return Ok(());
        }

        // -- nothing to attend to: zeros, but for sinks, which are attended to
        if p.rows() == 0 || p.seq_k == 0 {
            let f32 = ElemType::Float(FloatKind::F32);
            let of_sinks = dsinks.filter(|_| p.rows() > 0);
            let of_sinks = of_sinks.map(|view| Ok((view, self.delta_grid()?, self.dsinks_grid()?))).transpose()?;
            let written = wanted.iter().filter_map(|(_, view, _)| Some((view.as_ref()?.clone(), self.dtype())));
            let written = written
                .chain(dslopes.map(|view| (view.widened(), f32)))
                .chain(dsinks.filter(|_| p.rows() == 0).map(|view| (view.widened(), f32)))
                .chain(of_tensors.map(|view| (view.clone(), f32)))
                .filter(|(view, _)| !view.is_empty());
            let launches: Vec<_> = written
                .map(|(view, dtype)| Ok((elementwise(self.device, "zeros", view.len())?, view, dtype)))
                .collect::<Result<_, AttentionError>>()?;
            for ((count, dim), view, dtype) in launches {
                // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
                unsafe { nothing::zeros::launch_unchecked(self.client, count, dim, addresses, view.arg(), dtype) };
            }
            if let Some((view, delta, count)) = of_sinks {
                self.delta(saved, scratch, delta, addresses);
                self.dsinks(scratch, view, count, addresses);
            }
            return Ok(());
        }

        // -- everything that can fail, before anything runs
        tiling::check_backward_blocks(self.device, p, &tiles)?;
        for tile in tiles.portables() {
            tiling::check_tile(self.device, p, &tile, Stage::Backward)?;
        }
        let (dk, dv) = (gradients.dk.as_ref(), gradients.dv.as_ref());
        let together = tiles.dv.is_none() && dk.is_some() && dv.is_some();
        let delta = self.delta_grid()?;
        let dsinks = dsinks.map(|view| Ok((view, self.dsinks_grid()?))).transpose()?;
        let (mut hopper, mut mma, mut matrix, mut rows) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        if let Some(tiles) = fused {
            hopper.push((HopperResults { dq: gradients.dq.as_ref(), dk, dv }, tiles));
        }
        let mut dq = None;
        if let Some(view) = gradients.dq.as_ref().filter(|_| fused.is_none()) {
            match tiles.dq {
                Gradient::Hopper(tiles) => hopper.push((HopperResults { dq: Some(view), dk: None, dv: None }, tiles)),
                Gradient::Mma(tiles) => mma.push((HopperResults { dq: Some(view), dk: None, dv: None }, tiles)),
                Gradient::Matrix(tile) => {
                    matrix.push(self.check_gradient_matrix(Role::Dq, tile, [Some(view), None])?)
                }
                Gradient::Rows(tile) => rows.push(self.check_gradient_rows(Role::Dq, tile, [Some(view), None])?),
                Gradient::Portable(tile) => {
                    tiling::check_bindings(self.device, p, "dq", 6)?;
                    dq = Some((view, tile, self.query_grid("dq", tile.tile_q)?));
                }
            }
        }
        let mut dkdv = Vec::new();
        for (dk, dv) in if together { vec![(dk, dv)] } else { vec![(dk, None), (None, dv)] } {
            if fused.is_some() || dk.is_none() && dv.is_none() {
                continue;
            }
            match tiles.dv.filter(|_| dk.is_none()).unwrap_or(tiles.dkdv) {
                Gradient::Hopper(tiles) => hopper.push((HopperResults { dq: None, dk, dv }, tiles)),
                Gradient::Mma(tiles) => mma.push((HopperResults { dq: None, dk, dv }, tiles)),
                Gradient::Matrix(tile) => {
                    let role = Role::DkDv { dk: dk.is_some(), dv: dv.is_some() };
                    matrix.push(self.check_gradient_matrix(role, tile, [dk, dv])?);
                }
                Gradient::Rows(tile) => {
                    let role = Role::DkDv { dk: dk.is_some(), dv: dv.is_some() };
                    rows.push(self.check_gradient_rows(role, tile, [dk, dv])?);
                }
                Gradient::Portable(tile) => {
                    tiling::check_bindings(self.device, p, "dkdv", if together { 7 } else { 6 })?;
                    dkdv.push((dk, dv, tile, self.key_grid("dkdv", tile.tile_k)?));
                }
            }
        }
        let mut dbias = None;
        let mut hopper_dbias = None;
        if let Some(view) = &gradients.dbias {
            match tiles.dbias {
                BiasGradient::Hopper(tile) => hopper_dbias = Some((view, tile)),
                BiasGradient::Portable(tile) => {
                    tiling::check_bindings(self.device, p, "dbias", 6)?;
                    let sums = tiling::bias_sums(&view.shape, p);
                    dbias = Some((view, tile, self.sums_grids("dbias", view, sums, tile)?));
                }
            }
        }
        let mut of_slopes = None;
        if let Some(view) = dslopes {
            let Some(tile) = tiles.dalibi_slopes else {
                return Err(AttentionError::Unsupported {
                    option: "tiles.dalibi_slopes",
                    value: "none".into(),
                    why: "the gradient of slopes is asked for, and takes a kernel",
                });
            };
            tiling::check_bindings(self.device, p, "dalibi_slopes", 6)?;
            let view = view.widened();
            let grids = self.sums_grids("dalibi_slopes", &view, Sums::Rows, tile)?;
            of_slopes = Some((view, tile, grids));
        }
        let mut of_tensors = Vec::new();
        for (nth, factor) in [Factor::A, Factor::B].into_iter().enumerate() {
            let Some(view) = &gradients.dscore_tensors[nth] else { continue };
            let Some(tile) = tiles.dscore_tensors else {
                return Err(AttentionError::Unsupported {
                    option: "tiles.dscore_tensors",
                    value: "none".into(),
                    why: "the gradient of a tensor that a function of scores reads is asked for, and takes a kernel",
                });
            };
            tiling::check_bindings(self.device, p, "dscore_tensors", 6)?;
            let grids = self.sums_grids("dscore_tensors", view, tiling::bias_sums(&view.shape, p), tile)?;
            of_tensors.push((view, factor, tile, grids));
        }
        let of_sums = |tile, factor| tiling::blueprint_beside(tiles.dq.kernel(), p, tile, factor);
        self.check_hopper_backward(saved, &hopper, hopper_dbias)?;
        self.check_mma_backward(saved, &mma)?;

        let portable = dq.is_some() || !dkdv.is_empty() || dbias.is_some() || of_slopes.is_some() || dsinks.is_some();
        let portable = portable || !of_tensors.is_empty();
        if portable || !matrix.is_empty() || !rows.is_empty() {
            self.delta(saved, scratch, delta, addresses);
        }
        if let Some((view, count)) = dsinks {
            self.dsinks(scratch, view, count, addresses);
        }
        for gradient in matrix {
            self.gradient_matrix(saved, scratch, gradient, addresses);
        }
        for gradient in rows {
            self.gradient_rows(saved, scratch, gradient, addresses);
        }
        if let Some((dq, tile, grid)) = dq {
            self.dq(saved, scratch, dq, tile, grid, addresses);
        }
        for (dk, dv, tile, grid) in dkdv {
            self.dkdv(saved, scratch, dk, dv, tile, grid, addresses);
        }
        if let Some((dbias, tile, grids)) = dbias {
            self.dbias(saved, scratch, dbias, of_sums(tile, Factor::One), grids, addresses);
        }
        if let Some((view, tile, grids)) = of_slopes {
            self.dbias(saved, scratch, &view, of_sums(tile, Factor::Slope), grids, addresses);
        }
        for (view, factor, tile, grids) in of_tensors {
            self.dbias(saved, scratch, view, of_sums(tile, factor), grids, addresses);
        }
        // They read scratch in a layout of their own.
        self.backward_mma(saved, scratch, &mma)?;
        self.backward_hopper(saved, scratch, &hopper, hopper_dbias)?;
        for (view, keys) in [(&gradients.dq, false), (&gradients.dk, true), (&gradients.dv, true)] {
            if let Some(view) = view {
                self.fill(view, None, keys);
            }
        }
        Ok(())
    }

    #[cfg(not(feature = "cuda"))]
    fn check_hopper_backward(
        &self,
        _: &Saved,
        wanted: &[Wanted],
        bias: Option<WantedBias>,
    ) -> Result<(), AttentionError> {
        if wanted.is_empty() && bias.is_none() {
            return Ok(());
        }
        let why = "it was not compiled: that takes the feature cuda".into();
        Err(AttentionError::KernelUnavailable { kernel: tiling::Kernel::Hopper.name(), why })
    }

    #[cfg(not(feature = "cuda"))]
    fn backward_hopper(
        &self,
        _: &Saved,
        _: &Scratch,
        _: &[Wanted],
        _: Option<WantedBias>,
    ) -> Result<(), AttentionError> {
        Ok(())
    }

    #[cfg(not(feature = "cuda"))]
    fn check_mma_backward(&self, _: &Saved, wanted: &[WantedMma]) -> Result<(), AttentionError> {
        if wanted.is_empty() {
            return Ok(());
        }
        let why = "it was not compiled: that takes the feature cuda".into();
        Err(AttentionError::KernelUnavailable { kernel: tiling::Kernel::Mma.name(), why })
    }

    #[cfg(not(feature = "cuda"))]
    fn backward_mma(&self, _: &Saved, _: &Scratch, _: &[WantedMma]) -> Result<(), AttentionError> {
        Ok(())
    }

    /// lse and delta as the portable kernels keep them.
    pub(super) fn portable_stats(&self, scratch: &Scratch) -> TensorArg {
        let rows = self.problem.rows();
        TensorView { handle: scratch.stats.handle.clone(), shape: [2, rows], strides: [rows, 1] }.arg()
    }

    fn delta_grid(&self) -> Result<CubeCount, AttentionError> {
        let cubes = self.problem.rows().div_ceil(delta::ROWS) as u64;
        let (x, y, z) = tiling::cube_count(self.device, "delta", cubes)?;
        Ok(CubeCount::Static(x, y, z))
    }

    fn dsinks_grid(&self) -> Result<CubeCount, AttentionError> {
        let (x, y, z) = tiling::cube_count(self.device, "dsinks", self.problem.num_heads_q as u64)?;
        Ok(CubeCount::Static(x, y, z))
    }

    fn delta(&self, saved: &Saved, scratch: &Scratch, count: CubeCount, addresses: AddressType) {
        let p = self.problem;
        let vectorizes = |view: &TensorView| view.vectorizes(WIDTH, p.dtype.size());
        let width = if vectorizes(&saved.o) && vectorizes(&saved.dout) { WIDTH } else { 1 };
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            delta::delta::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d((delta::ROWS * delta::UNITS_PER_ROW) as u32),
                addresses,
                width,
                saved.o.arg(),
                saved.dout.arg(),
                saved.lse.arg(),
                saved.dlse.as_ref().map(|dlse| dlse.arg()).into(),
                self.portable_stats(scratch),
                p.num_heads_q as u32,
                p.seq_q as u32,
                p.head_dim_v,
                self.dtype(),
            );
        }
    }

    fn dq(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dq: &TensorView,
        tile: TileShape,
        (grid, count): (GridLaunch, CubeCount),
        addresses: AddressType,
    ) {
        let route = self.route(Blocks::Queries, tile.tile_q, tile.tile_k);
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            portable::dq::dq::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses.max(route.addresses()),
                self.width(&[&saved.dout, dq]),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                self.portable_stats(scratch),
                self.mask().into(),
                self.bias().into(),
                dq.arg(),
                self.score(Stage::Backward, &route),
                self.problem.band().into_launch(),
                grid,
                tiling::blueprint(self.problem, tile, Factor::of_product(self.problem)),
                [self.dtype(), self.mask_type()],
            );
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn dkdv(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dk: Option<&TensorView>,
        dv: Option<&TensorView>,
        tile: TileShape,
        (grid, count): (GridLaunch, CubeCount),
        addresses: AddressType,
    ) {
        let views: Vec<_> = [Some(&saved.dout), dk, dv].into_iter().flatten().collect();
        let route = self.route(Blocks::Keys, tile.tile_k, tile.tile_q);
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            portable::dkdv::dkdv::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses.max(route.addresses()),
                self.width(&views),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                self.portable_stats(scratch),
                self.mask().into(),
                self.bias().into(),
                dk.map(|dk| dk.arg()).into(),
                dv.map(|dv| dv.arg()).into(),
                self.score(Stage::Backward, &route),
                self.problem.band().into_launch(),
                grid,
                tiling::blueprint(self.problem, tile, Factor::of_product(self.problem)),
                [self.dtype(), self.mask_type()],
            );
        }
    }

    /// The gradient of the sinks, from lse and delta in scratch.
    fn dsinks(&self, scratch: &Scratch, dsinks: &TensorView<1>, count: CubeCount, addresses: AddressType) {
        let (p, Some(sinks)) = (self.problem, &self.inputs.sinks) else { return };
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            dsinks::dsinks::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(dsinks::UNITS as u32),
                addresses,
                self.portable_stats(scratch),
                sinks.arg(),
                dsinks.arg(),
                p.batch as u32,
                p.num_heads_q as u32,
                p.seq_q as u32,
            );
        }
    }

    /// Where the gradient of the bias, or of slopes, is computed, and folded if it must be.
    fn sums_grids(
        &self,
        kernel: &'static str,
        dbias: &TensorView,
        sums: Sums,
        tile: TileShape,
    ) -> Result<DbiasGrids, AttentionError> {
        let p = self.problem;
        let q_blocks = p.seq_q.div_ceil(tile.tile_q);
        let k_blocks = p.seq_k.div_ceil(tile.tile_k);
        let (blocks, heads, batches) = match sums {
            Sums::Tile => (q_blocks * k_blocks, dbias.shape[1], dbias.shape[0]),
            Sums::Columns => (k_blocks, p.num_heads_q, p.batch),
            Sums::Rows => (q_blocks, p.num_heads_q, p.batch),
        };
        let fold = match sums {
            Sums::Tile => None,
            Sums::Columns | Sums::Rows => {
                // A thread for each element, or a thread block where many terms are to be added.
                let terms = tiling::sums_len(sums, p) / dbias.len();
                let lanes = if terms < dbias::FOLD_UNITS { 1 } else { dbias::FOLD_UNITS };
                let cubes = (dbias.len() * lanes).div_ceil(dbias::FOLD_UNITS);
                let (x, y, z) = tiling::cube_count(self.device, "fold", cubes as u64)?;
                Some((lanes, CubeCount::Static(x, y, z)))
            }
        };
        Ok(DbiasGrids { sums, heads, batches, grid: self.grid(kernel, blocks, heads, batches)?, fold })
    }

    /// The gradient of the bias, or of what else the blueprint's factor is for, as a tensor of rank 4.
    fn dbias(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dbias: &TensorView,
        blueprint: portable::Blueprint,
        DbiasGrids { sums, heads, batches, grid: (grid, count), fold }: DbiasGrids,
        addresses: AddressType,
    ) {
        let p = self.problem;
        let (tile, factor) = (blueprint.tile, blueprint.factor);
        // What is folded afterwards is summed in scratch, which has been checked.
        let f32 = ElemType::Float(FloatKind::F32);
        let partial = scratch.bias_sums.as_ref().filter(|_| sums != Sums::Tile).map(|scratch| {
            let length = tiling::sums_len(sums, p) / (p.batch * p.num_heads_q);
            TensorView::contiguous(scratch.handle.clone(), [p.batch, p.num_heads_q, length])
        });
        let dtype = if factor == Factor::One { self.dtype() } else { f32 };
        let (out, out_type) = match &partial {
            Some(partial) => (partial.arg(), f32),
            None => (dbias.arg(), dtype),
        };
        // Sequences, not blocks of them: a thread block has a part of the bias, which may belong to several.
        let lists = match sums {
            Sums::Columns => self.lists(Blocks::Keys, tile.tile_k, tile.tile_q, false),
            Sums::Tile | Sums::Rows => self.lists(Blocks::Queries, tile.tile_q, tile.tile_k, false),
        };
        let route = Route { schedule: self.schedule(Blocks::Queries, MAX_SEQ), lists };
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            dbias::dbias::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses.max(route.addresses()),
                self.width(&[&saved.dout]),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                self.portable_stats(scratch),
                self.mask().into(),
                self.bias().into(),
                out,
                self.score(Stage::Backward, &route),
                p.band().into_launch(),
                grid,
                p.num_heads_q as u32,
                (p.batch / batches) as u32,
                (p.num_heads_q / heads) as u32,
                sums,
                blueprint,
                [self.dtype(), self.mask_type(), out_type],
            );
        }
        if let (Some(partial), Some((lanes, count))) = (&partial, fold) {
            let along = if sums == Sums::Columns { 3 } else { 2 };
            // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
            unsafe {
                dbias::fold::launch_unchecked(
                    self.client,
                    count,
                    CubeDim::new_1d(dbias::FOLD_UNITS as u32),
                    addresses,
                    partial.arg(),
                    dbias.arg(),
                    along,
                    lanes,
                    dtype,
                );
            }
        }
    }
}
