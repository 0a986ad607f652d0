//! Launches for several sequences: schedules, and the kernels that fill rows of no sequence.

use super::{Call, Inputs};
use crate::problem::AttentionProblem;
use crate::sequences::{BoundsLaunch, HEADER, UNITS, WORDS, fill, schedule};
use crate::tensor::{AnyView, TensorView};
use crate::tiling;
use cubecl::prelude::*;

impl Call<'_> {
    /// The schedule of blocks of `tile` queries, or of keys if `keys`, if there are several sequences. `transposed`: for a kernel of
    /// keys whose band is transposed.
    pub(super) fn schedule(&self, keys: bool, transposed: bool, tile: usize) -> Option<TensorView<1>> {
        let sequences = self.problem.num_sequences()?;
        let (rows, _) = self.problem.side(keys);
        let (capacity, _) = tiling::blocks(self.problem, rows, tile);
        let list = TensorView::empty_words(self.client, [HEADER + WORDS * capacity]);
        // SAFETY: bounds have been checked against their buffers. The kernel clips positions to the tensors, and the list to its
        // length.
        unsafe {
            schedule::launch_unchecked(
                self.client,
                tiling::grid(self.device, sequences as u64),
                CubeDim::new_1d(UNITS as u32),
                self.addresses(&[&list]),
                self.bounds(),
                list.arg(),
                tile as u32,
                capacity as u32,
                keys,
                !keys,
                keys && !transposed,
            );
        }
        Some(list)
    }

    /// With several sequences, sets rows of `out` that belong to no sequence to 0, and their `lse` to that of fully masked rows.
    /// Rows are queries, or keys if `keys`.
    pub(super) fn fill(&self, out: &TensorView, lse: Option<&TensorView<3>>, keys: bool) {
        let sinks = self.sinks().filter(|_| lse.is_some());
        self.fill_with(out, lse, sinks, keys, self.dtype());
    }

    /// Whether there may be queries, or keys if `keys`, that belong to no sequence.
    pub(super) fn leaves_rows(&self, keys: bool) -> bool {
        let p = self.problem;
        p.cu_seqlens.is_some() || if keys { p.seq_lens_k } else { p.seq_lens_q }
    }

    /// [`fill`](Self::fill) for a tensor of this element type, whose batches may be a multiple of the problem's.
    pub(super) fn fill_with(
        &self,
        out: &TensorView,
        lse: Option<&TensorView<3>>,
        sinks: Option<TensorArg>,
        keys: bool,
        dtype: ElemType,
    ) {
        let filled = !out.is_empty() && self.leaves_rows(keys);
        if !filled || !self.problem.is_varlen() {
            return;
        }
        let [batches, heads, rows, _] = out.shape;
        let count = tiling::grid(self.device, tiling::fill_cubes([batches, heads, rows]));
        // SAFETY: views have been checked against their buffers.
        unsafe {
            fill::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(UNITS as u32),
                self.addresses(&[out, lse.map_or(out as &dyn AnyView, |lse| lse)]),
                self.bounds(),
                out.arg(),
                lse.map(|lse| lse.arg()).into(),
                sinks.into(),
                keys,
                dtype,
            );
        }
    }

    /// Beginnings and ends of the sequences.
    pub(super) fn bounds(&self) -> BoundsLaunch {
        bounds(self.problem, self.inputs)
    }
}

/// Beginnings and ends of the sequences: without packed sequences or lengths, one for each batch.
pub(super) fn bounds(p: &AttentionProblem, inputs: &Inputs) -> BoundsLaunch {
    let sequences = p.num_sequences().unwrap_or(p.batch);
    let [cu_q, cu_k, lens_q, lens_k] =
        [&inputs.cu_seqlens_q, &inputs.cu_seqlens_k, &inputs.seq_lens_q, &inputs.seq_lens_k]
            .map(|view| view.as_ref().map(|view| view.arg()).into());
    BoundsLaunch::new(cu_q, cu_k, lens_q, lens_k, sequences as u32, p.batch as u32, p.seq_q as u32, p.seq_k as u32)
}
