//! Launches for several sequences: schedules, and the kernels that fill rows of no sequence.

use super::Call;
use crate::error::AttentionError;
use crate::problem::AttentionProblem;
use crate::sequences::{BoundsLaunch, HEADER, UNITS, WORDS, fill, schedule};
use crate::tensor::{AnyView, TensorView};
use crate::tiling::{self, Device};
#[cfg(feature = "cuda")]
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

/// The blocks that a schedule lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    /// Blocks of queries.
    Queries,
    /// Blocks of keys.
    Keys,
    /// Blocks of keys, for a kernel whose band is transposed.
    KeysTurned,
}

/// Number of sequences, and the grids of the kernels that handle them.
pub(super) struct Sequences {
    number: usize,
    /// Grid of [`schedule`].
    schedule: CubeCount,
    /// Grids of [`fill`], for queries and for keys.
    fill: [CubeCount; 2],
}

impl Sequences {
    /// The sequences of a problem, if it distinguishes any. An error if the device cannot launch the grids.
    pub(super) fn of(device: &Device, problem: &AttentionProblem) -> Result<Option<Self>, AttentionError> {
        let Some(number) = problem.num_sequences() else { return Ok(None) };
        let [schedule, fill @ ..] = tiling::sequence_grids(device, problem)?;
        Ok(Some(Sequences { number, schedule, fill }))
    }
}

impl Call<'_> {
    /// Number of blocks of `tile` rows, and the number of batches that each have as many blocks. With several sequences, an upper
    /// bound for all sequences together, and 1.
    pub(super) fn blocks(&self, rows: usize, tile: usize) -> (usize, usize) {
        tiling::blocks(self.problem, rows, tile)
    }

    /// The schedule of blocks of `tile` rows, if there are several sequences.
    pub(super) fn schedule(&self, of: Blocks, tile: usize) -> Option<TensorView<1>> {
        let p = self.problem;
        let sequences = self.sequences.as_ref()?;
        let rows = if of == Blocks::Queries { p.seq_q } else { p.seq_k };
        let (capacity, _) = self.blocks(rows, tile);
        let len = HEADER + WORDS * capacity;
        let list = TensorView::contiguous(self.client.empty(4 * len), [len]);
        // SAFETY: bounds have been checked against their buffers. The kernel clips positions to the tensors, and the list to its
        // length.
        unsafe {
            schedule::launch_unchecked(
                self.client,
                sequences.schedule.clone(),
                CubeDim::new_1d(UNITS as u32),
                self.addresses([list.span()]),
                self.bounds(sequences.number),
                list.arg(),
                tile as u32,
                capacity as u32,
                of != Blocks::Queries,
                of == Blocks::Queries,
                of == Blocks::Keys,
            );
        }
        Some(list)
    }

    /// With several sequences, sets rows of `out` that belong to no sequence to 0, and their `lse` to that of fully masked rows.
    /// Rows are queries, or keys if `keys`.
    pub(super) fn fill(&self, out: &TensorView, lse: Option<&TensorView<3>>, keys: bool) {
        let Some(sequences) = self.sequences.as_ref().filter(|_| !out.is_empty() && self.leaves_rows(keys)) else {
            return;
        };
        let count = sequences.fill[usize::from(keys)].clone();
        let sinks = self.sinks().filter(|_| lse.is_some());
        self.launch_fill(sequences.number, count, out, lse, sinks, keys, self.dtype());
    }

    /// Whether there may be queries, or keys if `keys`, that belong to no sequence.
    fn leaves_rows(&self, keys: bool) -> bool {
        let p = self.problem;
        p.cu_seqlens.is_some() || if keys { p.seq_lens_k } else { p.seq_lens_q }
    }

    /// The grid of [`fill_splits`](Self::fill_splits) for an output `[P · B, H, S, D]`, if it has anything to fill.
    #[cfg(feature = "cuda")]
    pub(super) fn splits_grid(
        &self,
        [batches, heads, rows, _]: [usize; 4],
    ) -> Result<Option<CubeCount>, AttentionError> {
        if !self.leaves_rows(false) {
            return Ok(None);
        }
        tiling::fill_grid(self.device, [batches, heads, rows]).map(Some)
    }

    /// [`fill`](Self::fill) for the f32 results of splits of the keys. Sinks are ignored: they are added when splits are combined.
    #[cfg(feature = "cuda")]
    pub(super) fn fill_splits(&self, count: Option<CubeCount>, out: &TensorView, lse: &TensorView<3>) {
        if let (Some(sequences), Some(count)) = (&self.sequences, count) {
            let f32 = ElemType::Float(FloatKind::F32);
            self.launch_fill(sequences.number, count, out, Some(lse), None, false, f32);
        }
    }

    fn launch_fill(
        &self,
        sequences: usize,
        count: CubeCount,
        out: &TensorView,
        lse: Option<&TensorView<3>>,
        sinks: Option<TensorArg>,
        keys: bool,
        dtype: ElemType,
    ) {
        // SAFETY: views have been checked against their buffers.
        unsafe {
            fill::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(UNITS as u32),
                self.addresses([out.span()].into_iter().chain(lse.map(|lse| lse.span()))),
                self.bounds(sequences),
                out.arg(),
                lse.map(|lse| lse.arg()).into(),
                sinks.into(),
                keys,
                dtype,
            );
        }
    }

    pub(super) fn bounds(&self, sequences: usize) -> BoundsLaunch {
        let (p, inputs) = (self.problem, self.inputs);
        let [cu_q, cu_k, lens_q, lens_k] =
            [&inputs.cu_seqlens_q, &inputs.cu_seqlens_k, &inputs.seq_lens_q, &inputs.seq_lens_k]
                .map(|view| view.as_ref().map(|view| view.arg()));
        BoundsLaunch::new(
            cu_q.into(),
            cu_k.into(),
            lens_q.into(),
            lens_k.into(),
            sequences as u32,
            p.batch as u32,
            p.seq_q as u32,
            p.seq_k as u32,
        )
    }
}
