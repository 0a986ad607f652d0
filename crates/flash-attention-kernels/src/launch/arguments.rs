//! Launch arguments.

use super::e4m3::words;
use super::route::Route;
use super::{Call, Inputs, Saved, Scratch};
use crate::dropout::{DropoutLaunch, factor, threshold};
use crate::e4m3::KvStorage;
use crate::extras::ExtrasLaunch;
use crate::fragment::{QkvLaunch, Role, ScoresLaunch, SideLaunch, SidesLaunch, StatisticsLaunch, StoredArgs, WIDTH};
use crate::mask::Band;
use crate::mods::{ModsLaunch, TENSORS, TableLaunch, TablesLaunch};
use crate::pages::PageTableLaunch;
use crate::problem::{AttentionOptions, AttentionProblem, PagedKv};
use crate::score::ScoreLaunch;
use crate::tensor::{AnyView, TensorView};
use crate::tiling;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

impl Call<'_> {
    /// Number of elements read and written at a time: a vector if every tensor allows it.
    pub(super) fn width<'v>(&self, views: impl IntoIterator<Item = &'v TensorView>) -> usize {
        let Inputs { q, k, v, .. } = self.inputs;
        let size = self.problem.dtype.size();
        let read: &[&TensorView] = match self.problem.kv_storage() {
            KvStorage::Elements => &[q, k, v],
            // Words are read of others.
            KvStorage::E4m3 => &[q],
        };
        width(read.iter().copied(), size).min(width(views, size))
    }

    /// Operands of the forward.
    pub(super) fn qkv<E: Float, N: Size>(&self) -> QkvLaunch<E, N> {
        let Inputs { q, k, v, .. } = self.inputs;
        let stored = |view: &TensorView| match self.problem.kv_storage() {
            KvStorage::Elements => StoredArgs::Elements(view.arg()),
            KvStorage::E4m3 => StoredArgs::E4m3(words(view).arg()),
        };
        QkvLaunch::new(q.arg(), stored(k), stored(v))
    }

    pub(super) fn dtype(&self) -> ElemType {
        tiling::element_type(self.problem.dtype)
    }

    /// Element types of the inputs and of the mask.
    pub(super) fn dtypes(&self) -> [ElemType; 2] {
        [self.dtype(), self.inputs.mask_type()]
    }

    /// The optional operands. The backward needs no sinks, because lse includes them.
    pub(super) fn extras(&self, role: Role, route: &Route) -> ExtrasLaunch {
        let sinks = self.sinks().filter(|_| role == Role::Forward);
        let slopes = self.inputs.alibi_slopes.as_ref().map(|slopes| slopes.broadcast_arg());
        let rate = self.problem.options.dropout;
        let seed = self.seed.as_ref().map(|seed| seed.arg());
        let dropout = DropoutLaunch::new(seed.into(), threshold(rate), factor(rate));
        let schedule = route.schedule.as_ref().map(|schedule| schedule.arg());
        let lengths = route.lengths.then(|| self.bounds());
        let lists = route.lists.as_ref().map(|lists| lists.broadcast_arg());
        let mods = mods(self.problem, self.inputs);
        let pages = self.problem.pages.zip(self.inputs.page_table.as_ref());
        let pages = pages.map(|(shape, table)| page_table(shape, table)).into();
        let (schedule, lengths) = (schedule.into(), lengths.into());
        ExtrasLaunch::new(slopes.into(), sinks.into(), dropout, schedule, lengths, mods, lists.into(), pages)
    }

    pub(super) fn sinks(&self) -> Option<TensorArg> {
        self.inputs.sinks.as_ref().map(|sinks| sinks.arg())
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
        role: Role,
        route: &Route,
        band: &Band,
        scaled: bool,
    ) -> ScoresLaunch<E, M, NB, NM> {
        let scale = self.problem.softmax_scale();
        let (capped, softcap) = (self.problem.options.softcap.is_some(), self.problem.options.softcap.unwrap_or(1.0));
        let inner = 2.0 * LOG2_E * scale / softcap;
        let exponent = if scaled { LOG2_E } else { LOG2_E * scale };
        let extras = self.extras(role, route);
        let Inputs { mask, bias, .. } = self.inputs;
        ScoresLaunch::new(
            ScoreLaunch::new(scale, softcap, 1.0 / softcap, inner, exponent, capped, extras),
            mask.as_ref().map(|mask| mask.tensor.broadcast_arg()).into(),
            bias.as_ref().map(|bias| bias.broadcast_arg()).into(),
            band.into_launch(),
        )
    }
}

/// Number of elements of `size` bytes read and written at a time: a vector if every tensor allows it.
pub(super) fn width<'v>(views: impl IntoIterator<Item = &'v TensorView>, size: usize) -> usize {
    if views.into_iter().all(|view| view.vectorizes(WIDTH, size)) { WIDTH } else { 1 }
}

/// The page table as a launch argument.
pub(super) fn page_table(shape: PagedKv, table: &TensorView<2>) -> PageTableLaunch {
    let [sequence, page] = table.strides;
    // SAFETY: the view has been checked against its buffer.
    let pages = unsafe { BufferArg::from_raw_parts(table.handle.clone(), table.span() as usize) };
    PageTableLaunch::new(pages, sequence, page, shape.num_pages as u32, shape.page_size as u32)
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
