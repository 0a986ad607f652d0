//! Launches what belongs to several sequences: schedules, and what fills the rest.

use super::Call;
use crate::error::AttentionError;
use crate::problem::AttentionProblem;
use crate::sequences::{BoundsLaunch, HEADER, UNITS, WORDS, fill, schedule};
use crate::tensor::TensorView;
use crate::tiling::{self, Device};
#[cfg(feature = "cuda")]
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

/// Whose blocks a schedule lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    /// Of queries.
    Queries,
    /// Of keys.
    Keys,
    /// Of keys, for a kernel whose band is transposed.
    KeysTurned,
}

/// How many there are, and the thread blocks of what tells where they lie.
pub(super) struct Sequences {
    number: usize,
    /// Of [`schedule`].
    schedule: CubeCount,
    /// Of [`fill`], for queries and for keys.
    fill: [CubeCount; 2],
}

impl Sequences {
    /// Those of a problem, if there are several; an error where the device cannot count so many thread blocks.
    pub(super) fn of(device: &Device, problem: &AttentionProblem) -> Result<Option<Self>, AttentionError> {
        let Some(number) = problem.num_sequences() else { return Ok(None) };
        let [schedule, of_queries, of_keys] =
            tiling::sequence_grids(device, problem)?.map(|(x, y, z)| CubeCount::Static(x, y, z));
        Ok(Some(Sequences { number, schedule, fill: [of_queries, of_keys] }))
    }
}

impl Call<'_> {
    /// Blocks of `tile` of so many rows, and the batches that each has as many in: of several sequences, the most that there can be in all.
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
        // SAFETY: bounds have been checked against their buffers, what they say is cut to the tensors, and the list to its length.
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

    /// Makes what belongs to no sequence 0, if there are several, of a tensor of queries or of keys, and `lse` what it is there.
    pub(super) fn fill(&self, out: &TensorView, lse: Option<&TensorView<3>>, keys: bool) {
        let Some(sequences) = self.sequences.as_ref().filter(|_| !out.is_empty() && self.leaves_rows(keys)) else {
            return;
        };
        let count = sequences.fill[usize::from(keys)].clone();
        let sinks = self.sinks().filter(|_| lse.is_some());
        self.launch_fill(sequences.number, count, out, lse, sinks, keys, self.dtype());
    }

    /// Whether there may be queries, or keys, that belong to no sequence.
    fn leaves_rows(&self, keys: bool) -> bool {
        let p = self.problem;
        p.cu_seqlens.is_some() || if keys { p.seq_lens_k } else { p.seq_lens_q }
    }

    /// The thread blocks that [`fill_splits`](Self::fill_splits) takes, if it has anything to do, for an output `[P · B, H, S, D]`.
    #[cfg(feature = "cuda")]
    pub(super) fn splits_grid(
        &self,
        [batches, heads, rows, _]: [usize; 4],
    ) -> Result<Option<CubeCount>, AttentionError> {
        if !self.leaves_rows(false) {
            return Ok(None);
        }
        let (x, y, z) = tiling::fill_grid(self.device, [batches, heads, rows])?;
        Ok(Some(CubeCount::Static(x, y, z)))
    }

    /// [`fill`](Self::fill) of what splits of the keys give, in f32: sinks count where these are put together.
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
