//! Launch of the backward: delta, then one kernel for each requested gradient, or for several of them.

mod portable_kernels;
mod sums;

use super::{Argument, Call, Inputs, Launch, elementwise};
use crate::error::{AttentionError, Result};
use crate::fragment::Role;
use crate::mods::TENSORS;
use crate::portable::nothing;
use crate::problem::{AttentionProblem, PagedKv};
use crate::score::Factors;
use crate::tensor::TensorView;
#[cfg(not(feature = "cuda"))]
use crate::tiling::NOT_COMPILED;
use crate::tiling::{self, BackwardTiles, BiasGradient, Case, Device, Gradient, recent};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;
use sums::ScoreGradient;

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
/// algorithm 2. Either one kernel computes `dq` and another one `dk` and `dv`, or one kernel computes all three.)
///
/// Errors name the argument at fault; in that case nothing has been launched.
pub fn backward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    saved: &Saved,
    gradients: &Gradients,
) -> Result<(), AttentionError> {
    let device = recent::device(client);
    let call = differentiable(client, &device, problem, inputs)?;
    let tiles = recent::backward(&device, problem)?;
    // Allocates scratch only after the problem has been validated.
    call.backward(saved, gradients, &Scratch::of(client, problem, tiles.fused.is_some()), tiles)
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
    let device = recent::device(client);
    let call = differentiable(client, &device, problem, inputs)?;
    let tiles = tiles.map_or_else(|| recent::backward(&device, problem), Ok)?;
    call.backward(saved, gradients, scratch, tiles)
}

/// The call, unless it has no gradient.
fn differentiable<'a>(
    client: &'a Client,
    device: &'a Device,
    problem: &'a AttentionProblem,
    inputs: &'a Inputs,
) -> Result<Call<'a>> {
    if let Some(PagedKv { num_pages, page_size, .. }) = problem.pages {
        return Err(AttentionError::Unsupported {
            option: "page_table",
            value: format!("{num_pages} pages of {page_size} positions"),
            why: "keys and values in pages have no gradient; give them as tensors [batch, num_heads_kv, seq_k, head_dim]",
        });
    }
    Call::new(client, device, problem, inputs)
}

/// Memory that the backward needs besides inputs, outputs and gradients. Its initial contents do not matter.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// `lse` and delta of each row, `[2, n]`, f32. `n` is `batch · num_heads_q · seq_q`, with `seq_q` rounded up to a multiple
    /// of 128, or of 384 for a head dimension above 192.
    pub stats: TensorView<2>,
    /// Partial sums for the gradients of a broadcast bias, of slopes and of tensors of `score_mod`, `[n · batch, num_heads_q, seq_q
    /// or seq_k]`, f32. `n` is the number of these tensors.
    pub bias_sums: Option<TensorView<3>>,
    /// `dq` in f32, for kernels in which blocks of keys add to it: `[n, head_dim rounded up to a multiple of 64]`, with the `n`
    /// of `stats`.
    pub dq_accum: Option<TensorView<2>>,
    /// Number of blocks of keys that have added to each tile of queries of `dq_accum`, if they add in a fixed order: `[n / 64, 4]`,
    /// u32.
    pub dq_turns: Option<TensorView<2>>,
}

impl Scratch {
    /// Allocates the scratch that the problem needs on this device.
    pub fn empty(client: &Client, problem: &AttentionProblem) -> Self {
        Scratch::of(client, problem, tiling::adds_dq(Case { device: &recent::device(client), problem }))
    }

    /// [`Scratch::empty`] where it is known whether blocks of keys add to `dq`.
    fn of(client: &Client, problem: &AttentionProblem, adds_dq: bool) -> Self {
        let in_order = adds_dq && Role::All.adds_in_order(problem);
        Scratch {
            stats: TensorView::empty_words(client, [2, tiling::stats_rows(problem)]),
            bias_sums: tiling::bias_sums_shape(problem).map(|shape| TensorView::empty_words(client, shape)),
            dq_accum: adds_dq.then(|| TensorView::empty_words(client, tiling::dq_accum_shape(problem))),
            dq_turns: in_order.then(|| TensorView::empty_words(client, tiling::dq_turns_shape(problem))),
        }
    }
}

/// Outputs of one launch: `dq`, or one or both of `dk` and `dv`, or, for Hopper, all three; and sums, for Hopper.
#[derive(Clone, Copy, Default)]
pub(super) struct Results<'a> {
    pub dq: Option<&'a TensorView>,
    pub dk: Option<&'a TensorView>,
    pub dv: Option<&'a TensorView>,
    /// Factors of sums over the columns of the kernel.
    pub sums: Factors,
    /// Whether rows are keys if there are only sums.
    pub sums_of_keys: bool,
}

impl<'a> Results<'a> {
    /// The role of the kernel that computes them.
    pub(super) fn role(&self) -> Role {
        match (self.dq, self.dk, self.dv) {
            (Some(_), None, None) => Role::Dq,
            (Some(_), ..) => Role::All,
            (None, None, None) => Role::Sums { keys: self.sums_of_keys },
            (None, dk, dv) => Role::DkDv { dk: dk.is_some(), dv: dv.is_some() },
        }
    }

    /// The requested outputs.
    pub(super) fn all(&self) -> impl Iterator<Item = &'a TensorView> + use<'a> {
        [self.dq, self.dk, self.dv].into_iter().flatten()
    }

    /// The launch argument of the gradient of Q or K.
    pub(super) fn dqk(&self) -> Option<TensorArg> {
        self.dq.or(self.dk).map(|view| view.arg())
    }
}

/// Values that the launches of a backward share.
#[derive(Clone, Copy)]
pub(super) struct Backward<'a> {
    pub call: &'a Call<'a>,
    pub saved: &'a Saved,
    pub scratch: &'a Scratch,
    /// The address type that reaches every element that the kernels read and write.
    pub addresses: AddressType,
}

impl Gradients {
    /// The launch that computes all gradients of `q`, `k` and `v`, if there is one and all are requested.
    fn fused(&self, tiles: &BackwardTiles) -> Option<(Results<'_>, Gradient)> {
        let (dq, dk, dv) = (self.dq.as_ref(), self.dk.as_ref(), self.dv.as_ref());
        let kernel = tiles.fused.filter(|_| dq.is_some() && dk.is_some() && dv.is_some())?;
        Some((Results { dq, dk, dv, ..Default::default() }, Gradient::Hopper(kernel)))
    }

    /// Requested gradients of tensors of the inputs' dtype.
    fn of_inputs(&self) -> impl Iterator<Item = &TensorView> {
        [&self.dq, &self.dk, &self.dv, &self.dbias].into_iter().flatten()
    }

    /// Requested gradients of f32 tensors that scores depend on, in four dimensions.
    fn of_scores(&self) -> impl Iterator<Item = TensorView> {
        let slopes = self.dalibi_slopes.as_ref().map(|view| view.widened());
        slopes.into_iter().chain(self.dscore_tensors.iter().flatten().cloned())
    }

    /// Whether no gradient is requested.
    pub(crate) fn is_empty(&self) -> bool {
        self.of_inputs().count() + self.of_scores().count() == 0 && self.dsinks.is_none()
    }

    /// Whether a requested gradient may be folded from partial sums.
    fn are_summed(&self) -> bool {
        self.dbias.is_some() || self.of_scores().count() > 0
    }

    /// The results of the launches for `dq`, and for `dk` and `dv`, with their kernels.
    fn several(&self, tiles: &BackwardTiles) -> Vec<(Results<'_>, Gradient)> {
        let (dq, dk, dv) = (self.dq.as_ref(), self.dk.as_ref(), self.dv.as_ref());
        let none = Results::default();
        let of_dq = (Results { dq, ..none }, tiles.dq);
        let launches = match tiles.dv {
            Some(of_dv) => vec![of_dq, (Results { dk, ..none }, tiles.dkdv), (Results { dv, ..none }, of_dv)],
            None => vec![of_dq, (Results { dk, dv, ..none }, tiles.dkdv)],
        };
        launches.into_iter().filter(|(results, _)| results.all().count() > 0).collect()
    }
}

impl Call<'_> {
    fn backward(&self, saved: &Saved, gradients: &Gradients, scratch: &Scratch, tiles: BackwardTiles) -> Result<()> {
        let of_scores = gradients.of_pairs(&tiles, self.problem);
        let kernels = gradients.launches(&tiles, self.problem, &of_scores);
        let fused = kernels.iter().any(|(results, _)| results.role() == Role::All);
        let addresses = self.validate_backward(saved, gradients, scratch, fused)?;
        let backward = Backward { call: self, saved, scratch, addresses };
        let launches = if gradients.is_empty() {
            Vec::new()
        } else if self.problem.rows() == 0 || self.problem.seq_k == 0 {
            backward.of_nothing(gradients)?
        } else {
            backward.prepare(gradients, &tiles, of_scores, kernels)?
        };
        launches.into_iter().for_each(|launch| launch());
        Ok(())
    }

    /// Checks all tensors, and returns the address type that reaches every element. `fused` is whether one kernel computes `dq`, `dk` and
    /// `dv`.
    fn validate_backward(
        &self,
        saved: &Saved,
        gradients: &Gradients,
        scratch: &Scratch,
        fused: bool,
    ) -> Result<AddressType> {
        let (p, size) = (self.problem, self.problem.dtype.size());
        let sums = tiling::bias_sums_shape(p).filter(|_| gradients.are_summed());
        let bias_sums = scratch.bias_sums.as_ref().filter(|_| sums.is_some());
        let dq_accum = scratch.dq_accum.as_ref().filter(|_| fused);
        let in_order = Role::All.adds_in_order(p);
        let dq_turns = scratch.dq_turns.as_ref().filter(|_| fused && in_order);
        let [dscore_a, dscore_b] = &gradients.dscore_tensors;
        let saved = [
            Argument::new("o", &saved.o, Some(p.o_shape()), size),
            Argument::new("lse", &saved.lse, Some(p.lse_shape()), 4),
            Argument::new("dout", &saved.dout, Some(p.o_shape()), size),
            Argument::new("dlse", &saved.dlse, saved.dlse.as_ref().map(|_| p.lse_shape()), 4),
        ];
        saved.iter().try_for_each(|argument| argument.check(self.device))?;
        let written = [
            Argument::new("dq", &gradients.dq, Some(p.q_shape()), size),
            Argument::new("dk", &gradients.dk, Some(p.k_shape()), size),
            Argument::new("dv", &gradients.dv, Some(p.v_shape()), size),
            Argument::new("dbias", &gradients.dbias, p.bias, size),
            Argument::new("dscore_tensors[0]", dscore_a, p.score_tensors[0], 4),
            Argument::new("dscore_tensors[1]", dscore_b, p.score_tensors[1], 4),
            Argument::new("stats", &scratch.stats, Some([2, tiling::stats_rows(p)]), 4),
            Argument::new("dalibi_slopes", &gradients.dalibi_slopes, p.alibi_slopes, 4),
            Argument::new("dsinks", &gradients.dsinks, p.sinks.then_some([p.num_heads_q]), 4),
            Argument::new("bias_sums", bias_sums, sums, 4),
            Argument::new("dq_accum", dq_accum, Some(tiling::dq_accum_shape(p)), 4),
            Argument::new("dq_turns", dq_turns, Some(tiling::dq_turns_shape(p)), 4),
        ];
        written.iter().try_for_each(|argument| argument.check_output(self.device))?;
        let missing = |option, why| Err(AttentionError::Unsupported { option, value: "none".into(), why });
        if sums.is_some() && bias_sums.is_none() {
            let why = "gradients of slopes and of broadcast tensors need partial sums; allocate with Scratch::empty";
            return missing("scratch.bias_sums", why);
        }
        if fused && dq_accum.is_none() {
            return missing("scratch.dq_accum", "blocks of keys accumulate dq there; allocate with Scratch::empty");
        }
        if fused && in_order && dq_turns.is_none() {
            return missing("scratch.dq_turns", "blocks of keys add to dq in turn; allocate with Scratch::empty");
        }
        let views: Vec<_> = saved.iter().chain(&written).filter_map(|argument| argument.view).collect();
        Ok(self.addresses(&views))
    }
}

impl<'a> Backward<'a> {
    /// Prepares the launches without queries or without keys. Gradients are zeros, except for sinks, which queries attend to.
    fn of_nothing(self, gradients: &'a Gradients) -> Result<Vec<Launch<'a>>> {
        let Backward { call, addresses, .. } = self;
        let without_rows = call.problem.rows() == 0;
        let dsinks = gradients.dsinks.as_ref();
        let of_sinks = dsinks.filter(|_| without_rows).map(|view| view.widened());
        let of_f32 = gradients.of_scores().chain(of_sinks).map(|view| (view, ElemType::Float(FloatKind::F32)));
        let all = gradients.of_inputs().map(|view| (view.clone(), call.dtype())).chain(of_f32);
        let mut launches: Vec<Launch> = Vec::new();
        for (view, dtype) in all.filter(|(view, _)| !view.is_empty()) {
            let (count, dim) = elementwise(call.device, "zeros", view.len())?;
            launches.push(Box::new(move || {
                // SAFETY: views have been checked against their buffers. The kernel writes no element beyond the last one.
                unsafe { nothing::zeros::launch_unchecked(call.client, count, dim, addresses, view.arg(), dtype) };
            }));
        }
        if let Some(view) = dsinks.filter(|_| !without_rows) {
            launches.push(self.delta()?);
            launches.push(self.dsinks(view)?);
        }
        Ok(launches)
    }

    /// Prepares all launches, in their order: finds everything that can fail, before anything is launched. `of_scores` and `kernels` are
    /// those of the requested gradients.
    fn prepare(
        self,
        gradients: &'a Gradients,
        tiles: &BackwardTiles,
        of_scores: Vec<ScoreGradient>,
        kernels: Vec<(Results<'a>, Gradient)>,
    ) -> Result<Vec<Launch<'a>>> {
        let Backward { call, .. } = self;
        let p = call.problem;
        tiling::check_backward_blocks(call.case(), tiles)?;
        // Kernels of tensor cores have their own layout of `lse` and delta, in the same scratch as the others. They come last.
        let mut launches = Vec::new();
        #[cfg(feature = "cuda")]
        let mut tensor_core = Vec::new();
        of_scores.iter().try_for_each(|of| of.check(tiles, p))?;
        #[cfg(feature = "cuda")]
        let fused = kernels.iter().any(|(results, _)| results.role() == Role::All);
        for (results, kernel) in kernels {
            match kernel {
                Gradient::Portable(tile) => launches.push(tile.gradient(self, results)?),
                Gradient::Matrix(tile) => launches.push(tile.gradient(self, results)?),
                Gradient::Rows(tile) => launches.push(tile.gradient(self, results)?),
                #[cfg(feature = "cuda")]
                Gradient::Hopper(tiles) => {
                    let folds = self.folds(&results, &of_scores)?;
                    tensor_core.push(tiles.gradient(self, results)?);
                    tensor_core.push(Box::new(|_| folds.into_iter().for_each(|fold| fold())));
                }
                #[cfg(feature = "cuda")]
                Gradient::Mma(tiles) => tensor_core.push(tiles.gradient(self, results)?),
                #[cfg(not(feature = "cuda"))]
                Gradient::Hopper(_) | Gradient::Mma(_) => return Err(kernel.kernel().unavailable(NOT_COMPILED.into())),
            }
        }
        match (&gradients.dbias, tiles.dbias) {
            #[cfg(feature = "cuda")]
            (Some(dbias), BiasGradient::Hopper(tile)) => tensor_core.push(self.dbias_hopper(dbias, tile)?),
            #[cfg(not(feature = "cuda"))]
            (Some(_), of @ BiasGradient::Hopper(_)) => return Err(of.kernel().unavailable(NOT_COMPILED.into())),
            _ => {}
        }
        for of in of_scores {
            if let Some(BiasGradient::Portable(tile)) = of.kernel {
                let blueprint = tiling::blueprint_beside(tiles.dq.kernel(), p, tile, of.factor);
                launches.push(self.dbias(of.option.trim_start_matches("tiles."), of.view, of.sums, blueprint)?);
            }
        }
        if let Some(view) = &gradients.dsinks {
            launches.push(self.dsinks(view)?);
        }
        if !launches.is_empty() {
            launches.insert(0, self.delta()?);
        }
        #[cfg(feature = "cuda")]
        if !tensor_core.is_empty() {
            launches.push(self.tensor_core(tensor_core, fused)?);
        }
        launches.push(Box::new(move || {
            for (view, keys) in [(&gradients.dq, false), (&gradients.dk, true), (&gradients.dv, true)] {
                if let Some(view) = view {
                    call.fill(view, None, keys);
                }
            }
        }));
        Ok(launches)
    }
}
