//! Launch of the backward: delta, then one kernel for each requested gradient, or for several of them.

mod portable_kernels;

use super::{Call, Inputs, Launch, elementwise, input, output};
use crate::error::AttentionError;
use crate::fragment::grid::GridLaunch;
use crate::fragment::role::Role;
use crate::hopper::{BiasTile, dq_accum_columns};
use crate::mods::TENSORS;
use crate::portable::dbias::Sums;
use crate::portable::nothing;
use crate::portable::tile::TileShape;
use crate::problem::{AttentionProblem, BackwardOrder};
use crate::score::Factor;
use crate::tensor::TensorView;
use crate::tiling::{self, BackwardTiles, BiasGradient, Device, Gradient, HopperGradient, MmaGradient, Stage};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;

/// Tensors that the backward reads besides the inputs.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The forward's output, `[batch, num_heads_q, seq_q, head_dim_v]`.
    pub o: TensorView,
    /// The forward's `lse`, `[batch, num_heads_q, seq_q]`, f32.
    pub lse: TensorView<3>,
    /// Gradient of `o`.
    pub dout: TensorView,
    /// Gradient of `lse`, f32, if `lse` has one.
    pub dlse: Option<TensorView<3>>,
}

/// Outputs of the backward. A gradient that is `None` is not computed and costs nothing.
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
    /// Shape of the ALiBi slopes, f32.
    pub dalibi_slopes: Option<TensorView<2>>,
    /// Shape of the sinks, f32.
    pub dsinks: Option<TensorView<1>>,
    /// Shapes of the tensors that `score_mod` reads, f32.
    pub dscore_tensors: [Option<TensorView>; TENSORS],
}

/// Computes the requested gradients, and launches only the kernels that they need.
///
/// Each gradient has the shape and dtype of its tensor. Sums are taken in a fixed order, so that the same call gives the same
/// bits, unless the options ask for [`BackwardOrder::Fast`](crate::BackwardOrder::Fast). (FlashAttention-2, arXiv:2307.08691,
/// algorithm 2, with one kernel for `dq` and one for `dk` and `dv` instead of atomic additions.)
///
/// Errors name the argument at fault; in that case nothing has been launched.
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
    // Allocates scratch only after the problem has been validated.
    call.backward(saved, gradients, &Scratch::empty(client, problem), tiles)
}

/// [`backward`] with scratch allocated by the caller and, if given, tiles chosen by the caller.
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

/// Memory that the backward needs besides inputs, outputs and gradients. Its initial contents do not matter.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// `lse` and delta of each row, `[2, n]`, f32. `n` is `batch · num_heads_q · seq_q`, with `seq_q` rounded up to a multiple
    /// of 128, or of 384 for a head dimension above 192.
    pub stats: TensorView<2>,
    /// Partial sums for the gradients of a broadcast bias, of slopes and of tensors of `score_mod`, `[batch, num_heads_q, seq_q
    /// or seq_k]`, f32.
    pub bias_sums: Option<TensorView<3>>,
    /// `dq` in f32, for kernels in which blocks of keys add to it: `[n, head_dim rounded up to a multiple of 64]`, with the `n`
    /// of `stats`.
    pub dq_accum: Option<TensorView<2>>,
}

impl Scratch {
    /// Allocates the scratch that the problem needs on this device.
    pub fn empty(client: &Client, problem: &AttentionProblem) -> Self {
        let rows = tiling::stats_rows(problem);
        let len = tiling::bias_sums_len(problem);
        let heads = problem.batch * problem.num_heads_q;
        let bias_sums = (len > 0).then(|| {
            let shape = [problem.batch, problem.num_heads_q, len / heads];
            TensorView::contiguous(client.empty(4 * len), shape)
        });
        // Reading the device's properties takes time, too.
        let fast = problem.options.backward_order == BackwardOrder::Fast;
        let dq_accum = (fast && tiling::adds_dq(&Device::of(client), problem)).then(|| {
            let columns = dq_accum_columns(problem.head_dim);
            TensorView::contiguous(client.empty(4 * (rows * columns).max(1)), [rows, columns])
        });
        Scratch { stats: TensorView::contiguous(client.empty(8 * rows.max(1)), [2, rows]), bias_sums, dq_accum }
    }
}

/// Names of the tensors' gradients in error messages.
const DSCORE_TENSORS: [&str; TENSORS] = ["dscore_tensors[0]", "dscore_tensors[1]"];

/// Outputs of one launch: `dq`, or one or both of `dk` and `dv`, or, for Hopper, all three.
#[derive(Clone, Copy)]
pub(super) struct Results<'a> {
    pub dq: Option<&'a TensorView>,
    pub dk: Option<&'a TensorView>,
    pub dv: Option<&'a TensorView>,
}

impl<'a> Results<'a> {
    /// The role of the kernel that computes them.
    pub(super) fn role(&self) -> Role {
        match (self.dq, self.dk, self.dv) {
            (Some(_), None, None) => Role::Dq,
            (Some(_), ..) => Role::All,
            (None, dk, dv) => Role::DkDv { dk: dk.is_some(), dv: dv.is_some() },
        }
    }

    /// The requested outputs.
    pub(super) fn all(&self) -> impl Iterator<Item = &'a TensorView> + use<'a> {
        [self.dq, self.dk, self.dv].into_iter().flatten()
    }

    /// Tensors that a kernel reads and writes in vectors besides the inputs.
    pub(super) fn views(&self, saved: &'a Saved) -> Vec<&'a TensorView> {
        self.all().chain([&saved.dout]).collect()
    }

    /// The launch argument of the gradient of Q or K.
    pub(super) fn dqk(&self) -> Option<TensorArg> {
        self.dq.or(self.dk).map(|view| view.arg())
    }
}

/// A launch of a Hopper gradient kernel.
pub(super) type Wanted<'a> = (Results<'a>, HopperGradient);

/// A launch of an `mma.sync` gradient kernel.
pub(super) type WantedMma<'a> = (Results<'a>, MmaGradient);

/// A launch of the Hopper kernel for the bias's gradient.
pub(super) type WantedBias<'a> = (&'a TensorView, BiasTile);

/// Values that the launches of a backward share.
#[derive(Clone, Copy)]
pub(super) struct Backward<'a> {
    pub call: &'a Call<'a>,
    pub saved: &'a Saved,
    pub scratch: &'a Scratch,
    /// The address type that reaches every element that the kernels read and write.
    pub addresses: AddressType,
}

impl Backward<'_> {
    /// A grid of thread blocks of `rows` rows each. Rows are queries or keys, depending on the results.
    pub(super) fn rows_grid(&self, results: &Results, rows: usize) -> Result<(GridLaunch, CubeCount), AttentionError> {
        let transposed = results.role().is_transposed();
        let kernel = if transposed { "dkdv" } else { "dq" };
        tiling::check_bindings(self.call.device, self.call.problem, kernel, 5 + results.all().count())?;
        if transposed { self.call.key_grid(kernel, rows) } else { self.call.query_grid(kernel, rows) }
    }
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

        let backward = Backward { call: self, saved, scratch, addresses };

        // -- no queries or no keys: gradients are zeros, except for sinks, which are attended to
        if p.rows() == 0 || p.seq_k == 0 {
            let f32 = ElemType::Float(FloatKind::F32);
            let written = wanted.iter().filter_map(|(_, view, _)| Some((view.as_ref()?.clone(), self.dtype())));
            let written = written
                .chain(dslopes.map(|view| (view.widened(), f32)))
                .chain(dsinks.filter(|_| p.rows() == 0).map(|view| (view.widened(), f32)))
                .chain(of_tensors.map(|view| (view.clone(), f32)))
                .filter(|(view, _)| !view.is_empty());
            let mut launches: Vec<Launch> = Vec::new();
            for (view, dtype) in written {
                let (count, dim) = elementwise(self.device, "zeros", view.len())?;
                launches.push(Box::new(move || {
                    // SAFETY: views have been checked against their buffers. The kernel writes no element beyond the last one.
                    unsafe { nothing::zeros::launch_unchecked(self.client, count, dim, addresses, view.arg(), dtype) };
                }));
            }
            if let Some(view) = dsinks.filter(|_| p.rows() > 0) {
                launches.push(backward.delta()?);
                launches.push(backward.dsinks(view)?);
            }
            launches.into_iter().for_each(|launch| launch());
            return Ok(());
        }

        // -- prepare: everything that can fail, before anything is launched
        tiling::check_backward_blocks(self.device, p, &tiles)?;
        for tile in tiles.portables() {
            tiling::check_tile(self.device, p, &tile, Stage::Backward)?;
        }
        let (dq, dk, dv) = (gradients.dq.as_ref(), gradients.dk.as_ref(), gradients.dv.as_ref());
        let together = tiles.dv.is_none() && dk.is_some() && dv.is_some();
        let of_dq = (Results { dq, dk: None, dv: None }, tiles.dq);
        let of_dkdv = |dk, dv| (Results { dq: None, dk, dv }, tiles.dv.filter(|_| dk.is_none()).unwrap_or(tiles.dkdv));
        let apart = if together { vec![of_dkdv(dk, dv)] } else { vec![of_dkdv(dk, None), of_dkdv(None, dv)] };
        let (mut launches, mut hopper, mut mma): (Vec<Launch>, _, _) = (Vec::new(), Vec::new(), Vec::new());
        match fused {
            Some(tiles) => hopper.push((Results { dq, dk, dv }, tiles)),
            None => {
                for (results, kernel) in
                    [of_dq].into_iter().chain(apart).filter(|(results, _)| results.all().count() > 0)
                {
                    match kernel {
                        Gradient::Hopper(tiles) => hopper.push((results, tiles)),
                        Gradient::Mma(tiles) => mma.push((results, tiles)),
                        Gradient::Matrix(tile) => launches.push(backward.matrix(results, tile)?),
                        Gradient::Rows(tile) => launches.push(backward.rows(results, tile)?),
                        Gradient::Portable(tile) => launches.push(backward.portable(results, tile)?),
                    }
                }
            }
        }
        let mut hopper_dbias = None;
        let factor_tile = |argument, tile: Option<TileShape>| {
            tile.ok_or(AttentionError::Unsupported {
                option: argument,
                value: "none".into(),
                why: "a gradient is asked for that takes a kernel",
            })
        };
        if let Some(view) = &gradients.dbias {
            match tiles.dbias {
                BiasGradient::Hopper(tile) => hopper_dbias = Some((view, tile)),
                BiasGradient::Portable(tile) => {
                    let sums = tiling::bias_sums(&view.shape, p);
                    let blueprint = tiling::blueprint_beside(tiles.dq.kernel(), p, tile, Factor::One);
                    launches.push(backward.dbias("dbias", view.clone(), sums, blueprint)?);
                }
            }
        }
        if let Some(view) = dslopes {
            let tile = factor_tile("tiles.dalibi_slopes", tiles.dalibi_slopes)?;
            let blueprint = tiling::blueprint_beside(tiles.dq.kernel(), p, tile, Factor::Slope);
            launches.push(backward.dbias("dalibi_slopes", view.widened(), Sums::Rows, blueprint)?);
        }
        for (view, factor) in gradients.dscore_tensors.iter().zip([Factor::A, Factor::B]) {
            let Some(view) = view else { continue };
            let tile = factor_tile("tiles.dscore_tensors", tiles.dscore_tensors)?;
            let blueprint = tiling::blueprint_beside(tiles.dq.kernel(), p, tile, factor);
            let sums = tiling::bias_sums(&view.shape, p);
            launches.push(backward.dbias("dscore_tensors", view.clone(), sums, blueprint)?);
        }
        if let Some(view) = dsinks {
            launches.push(backward.dsinks(view)?);
        }
        let delta = backward.delta()?;
        self.check_hopper_backward(saved, &hopper, hopper_dbias)?;
        self.check_mma_backward(saved, &mma)?;

        if !launches.is_empty() {
            delta();
        }
        launches.into_iter().for_each(|launch| launch());
        // These kernels read scratch in a layout of their own.
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
