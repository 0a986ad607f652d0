//! Launches what belongs to several sequences: schedules, and what fills the rest.

use super::Call;
use crate::error::AttentionError;
use crate::sequences::{BoundsLaunch, HEADER, UNITS, WORDS, fill, schedule};
use crate::tensor::TensorView;
use crate::tiling;
use cubecl::ir::AddressType;
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

impl Call<'_> {
    /// Whatever can fail of the others.
    pub(super) fn check_sequences(&self) -> Result<(), AttentionError> {
        let p = self.problem;
        let Some(sequences) = p.num_sequences() else { return Ok(()) };
        tiling::cube_count(self.device, "schedule", sequences.max(1) as u64)?;
        for (heads, seq) in [(p.num_heads_q, p.seq_q), (p.num_heads_kv, p.seq_k)] {
            tiling::cube_count(self.device, "fill", (p.batch * heads * seq.div_ceil(UNITS)) as u64)?;
        }
        Ok(())
    }

    /// Blocks of `tile` of so many rows, and the batches that each has as many in: of several sequences, the most that there can be in all.
    pub(super) fn blocks(&self, rows: usize, tile: usize) -> (usize, usize) {
        match self.problem.num_sequences() {
            Some(sequences) => ((self.problem.batch * rows / tile + sequences).max(1), 1),
            None => (rows.div_ceil(tile), self.problem.batch),
        }
    }

    /// The schedule of blocks of `tile` rows, if there are several sequences.
    pub(super) fn schedule(&self, of: Blocks, tile: usize) -> Option<TensorView<1>> {
        let p = self.problem;
        let sequences = p.num_sequences()?;
        let rows = if of == Blocks::Queries { p.seq_q } else { p.seq_k };
        let (capacity, _) = self.blocks(rows, tile);
        let len = HEADER + WORDS * capacity;
        let list = TensorView::contiguous(self.client.empty(4 * len), [len]);
        let (x, y, z) = tiling::cube_count(self.device, "schedule", sequences.max(1) as u64).ok()?;
        // SAFETY: bounds have been checked against their buffers, what they say is cut to the tensors, and the list to its length.
        unsafe {
            schedule::launch_unchecked(
                self.client,
                CubeCount::Static(x, y, z),
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                self.bounds(sequences),
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
        let Some(sequences) = self.problem.num_sequences() else { return };
        let [batch, heads, rows, _] = out.shape;
        if out.is_empty() {
            return;
        }
        let cubes = (batch * heads * rows.div_ceil(UNITS)) as u64;
        let Ok((x, y, z)) = tiling::cube_count(self.device, "fill", cubes) else { return };
        // SAFETY: views have been checked against their buffers.
        unsafe {
            fill::launch_unchecked(
                self.client,
                CubeCount::Static(x, y, z),
                CubeDim::new_1d(UNITS as u32),
                self.addresses([out.span()].into_iter().chain(lse.map(|lse| lse.span()))),
                self.bounds(sequences),
                out.arg(),
                lse.map(|lse| lse.arg()).into(),
                self.sinks().filter(|_| lse.is_some()).into(),
                keys,
                self.dtype(),
            );
        }
    }

    fn bounds(&self, sequences: usize) -> BoundsLaunch {
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
