//! Splits of the keys: what they write.

#[cfg(feature = "cuda")]
mod combine;
#[cfg(feature = "cuda")]
pub(super) use combine::outputs;

use super::Call;
use crate::tensor::TensorView;

/// What splits of the keys write.
pub(super) struct KeySplits {
    /// `[P · B, H, S, D]` in f32 for `P` splits.
    pub o: TensorView,
    /// `[P · B, H, S]`.
    pub lse: TensorView<3>,
}

impl Call<'_> {
    /// Allocates what splits of the keys write, in `columns` columns. `None` if there is one split.
    pub(super) fn key_splits(&self, num_splits: usize, columns: usize) -> Option<KeySplits> {
        let p = self.problem;
        let lse = [num_splits * p.batch, p.num_heads_q, p.seq_q];
        (num_splits > 1).then(|| {
            let o = TensorView::empty_words(self.client, [lse[0], lse[1], lse[2], columns]);
            KeySplits { o, lse: TensorView::empty_words(self.client, lse) }
        })
    }
}
