//! Launches the backward: delta, then a kernel for each gradient asked for.

mod portable_kernels;

use super::{Call, Inputs, elementwise, input, output};
use crate::error::AttentionError;
use crate::hopper::{BiasTile, dq_accum_columns};
use crate::matrix::Role;
use crate::mods::TENSORS;
use crate::portable::GridLaunch;
use crate::portable::dbias::Sums;
use crate::portable::nothing;
use crate::problem::{AttentionProblem, BackwardOrder};
use crate::score::Factor;
use crate::tensor::TensorView;
use crate::tiling::{self, BackwardTiles, BiasGradient, Device, Gradient, HopperGradient, MmaGradient, Stage};
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
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
}
