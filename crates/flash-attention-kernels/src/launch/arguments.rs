//! Launch arguments.

use super::route::Route;
use super::{Call, Inputs, MaskStorage, Saved, Scratch};
use crate::dropout::{DropoutLaunch, factor, threshold};
use crate::extras::ExtrasLaunch;
use crate::fragment::{QkvLaunch, ScoresLaunch, SideLaunch, SidesLaunch, StatisticsLaunch, WIDTH};
use crate::mask::Band;
use crate::mods::{ModsLaunch, TENSORS, TableLaunch, TablesLaunch};
use crate::problem::{AttentionOptions, AttentionProblem};
use crate::score::ScoreLaunch;
use crate::tensor::TensorView;
use crate::tiling::{self, Stage};
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

impl Call<'_> {
    /// Number of elements read and written at a time: a vector if every tensor allows it.
    pub(super) fn width(&self, views: &[&TensorView]) -> usize {
        let Inputs { q, k, v, .. } = self.inputs;
        let size = self.problem.dtype.size();
        let all = [q, k, v].into_iter().chain(views.iter().copied()).all(|view| view.vectorizes(WIDTH, size));
        if all { WIDTH } else { 1 }
    }

    pub(super) fn dtype(&self) -> ElemType {
        tiling::element_type(self.problem.dtype)
    }

    pub(super) fn mask_type(&self) -> ElemType {
        mask_type(self.inputs)
    }

    /// The optional operands. The backward needs no sinks, because lse includes them.
    pub(super) fn extras(&self, stage: Stage, route: &Route) -> ExtrasLaunch {
        let sinks = self.sinks().filter(|_| stage == Stage::Forward);
        let slopes = self.inputs.alibi_slopes.as_ref().map(|slopes| slopes.broadcast_arg());
        let schedule = route.schedule.as_ref().map(|schedule| schedule.arg());
        let lists = route.lists.as_ref().map(|lists| lists.broadcast_arg());
        let mods = mods(self.problem, self.inputs);
        ExtrasLaunch::new(slopes.into(), sinks.into(), self.dropout(), schedule.into(), mods, lists.into())
    }

    pub(super) fn sinks(&self) -> Option<TensorArg> {
        self.inputs.sinks.as_ref().map(|sinks| sinks.arg())
    }

    pub(super) fn dropout(&self) -> DropoutLaunch {
        let rate = self.problem.options.dropout;
        let seed = self.seed.as_ref().map(|seed| seed.arg());
        DropoutLaunch::new(seed.into(), threshold(rate), factor(rate))
    }

    /// Operands of the forward.
    pub(super) fn qkv<E: Float, N: Size>(&self) -> QkvLaunch<E, N> {
        let Inputs { q, k, v, .. } = self.inputs;
        QkvLaunch::new(q.arg(), k.arg(), v.arg())
    }

    /// Operands of a backward whose rows are queries, or keys if `transposed`.
    pub(super) fn sides<E: Float, N: Size>(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        transposed: bool,
    ) -> SidesLaunch<E, N> {
        let queries = SideLaunch::new(self.inputs.q.arg(), saved.dout.arg());
        let keys = SideLaunch::new(self.inputs.k.arg(), self.inputs.v.arg());
        let (rows, cols) = if transposed { (keys, queries) } else { (queries, keys) };
        SidesLaunch::new(rows, cols, StatisticsLaunch::new(self.stats(scratch)))
    }

    /// `lse` and delta of each query, `[2, B, H, Sq]`.
    pub(super) fn stats(&self, scratch: &Scratch) -> TensorArg {
        let p = self.problem;
        TensorView::contiguous(scratch.stats.handle.clone(), [2, p.batch, p.num_heads_q, p.seq_q]).arg()
    }

    /// Everything that scores depend on besides products, with this band of rows and columns. The softmax of a kernel multiplies
    /// products by the scale itself unless scores are `scaled` before it.
    pub(super) fn scores<E: Float, M: Numeric, NB: Size, NM: Size>(
        &self,
        stage: Stage,
        route: &Route,
        band: &Band,
        scaled: bool,
    ) -> ScoresLaunch<E, M, NB, NM> {
        let scale = self.problem.softmax_scale();
        let (capped, softcap) = (self.problem.options.softcap.is_some(), self.problem.options.softcap.unwrap_or(1.0));
        let inner = 2.0 * LOG2_E * scale / softcap;
        let exponent = if scaled { LOG2_E } else { LOG2_E * scale };
        let extras = self.extras(stage, route);
        let Inputs { mask, bias, .. } = self.inputs;
        ScoresLaunch::new(
            ScoreLaunch::new(scale, softcap, 1.0 / softcap, inner, exponent, capped, extras),
            mask.as_ref().map(|mask| mask.tensor.broadcast_arg()).into(),
            bias.as_ref().map(|bias| bias.broadcast_arg()).into(),
            band.into_launch(),
        )
    }
}

/// The user's functions and their tensors.
pub(super) fn mods(problem: &AttentionProblem, inputs: &Inputs) -> ModsLaunch {
    let table = |view: &Option<TensorView>| {
        let varies = |dim: usize| view.as_ref().is_some_and(|view| view.shape[dim] > 1);
        TableLaunch::new(view.as_ref().map(|view| view.broadcast_arg()).into(), varies(2), varies(3))
    };
    let tables = |[a, b]: &[Option<TensorView>; TENSORS]| TablesLaunch::new(table(a), table(b));
    let AttentionOptions { score_mod, mask_mod, .. } = problem.options;
    ModsLaunch::new(score_mod, tables(&inputs.score_tensors), mask_mod, tables(&inputs.mask_tensors))
}

/// Element type of the mask.
pub(super) fn mask_type(inputs: &Inputs) -> ElemType {
    ElemType::UInt(match inputs.mask.as_ref().map(|mask| mask.storage) {
        Some(MaskStorage::U8) => UIntKind::U8,
        Some(MaskStorage::U32) | None => UIntKind::U32,
    })
}
