//! Options of attention.

use crate::error::AttentionError;
use crate::mask::{Alignment, Band};
use crate::mods::{MaskFn, ScoreFn};
use serde::{Deserialize, Serialize};

/// Order in which gradients are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BackwardOrder {
    /// Fixed: the same call gives the same bits.
    #[default]
    Deterministic,
    /// Any order: thread blocks may add to `dq` as they finish, so that results differ between runs by rounding. Fixed if there is no such
    /// kernel or it would not be faster.
    Fast,
}

/// Precision of f32 products. Half-precision products are not affected, and sums are always f32.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, Precision};
///
/// let fast = AttentionOptions { precision: Precision::Tf32, ..Default::default() };
/// assert_eq!(AttentionOptions::default().precision, Precision::Full);
/// # assert_ne!(fast, AttentionOptions::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// That of f32, by multiply-adds or by split matrix products.
    #[default]
    Full,
    /// Factors may be rounded to tf32, which has 11 significant bits, as f16, and the range of f32: two to three times as fast on devices
    /// with tf32 matrix products. Elsewhere the same as [`Full`](Precision::Full), as the plan reports.
    Tf32,
}

/// Options that are numbers and functions; those that are tensors belong to the problem.
///
/// Scores are `score_mod(softcap(q·kᵀ · softmax_scale))`, set to −∞ where the mask, causality, a window or `mask_mod` hides them, plus
/// bias and slopes. Functions serialize as their names, for readers; such options cannot be deserialized.
///
/// ```
/// use flash_attention_kernels::AttentionOptions;
///
/// let sliding = AttentionOptions { causal: true, window_left: Some(1023), ..Default::default() };
/// assert_eq!(sliding.softmax_scale, None); // 1/√head_dim
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionOptions {
    /// Factor on `q·kᵀ`. `None`: `1/√head_dim`.
    pub softmax_scale: Option<f32>,
    /// Hides keys that come after the query.
    pub causal: bool,
    /// Position of the queries among the keys, for `causal` and windows.
    pub alignment: Alignment,
    /// Keys seen before the query's own position. `None`: all.
    pub window_left: Option<usize>,
    /// Keys seen after the query's own position. `None`: all (none where `causal`).
    pub window_right: Option<usize>,
    /// Scores become `softcap · tanh(score / softcap)` (Gemma 2, arXiv:2408.00118, section 2). On NVIDIA GPUs the backward
    /// recovers them from probabilities and bias in f32, whose resolution is 2⁻⁷ beside a bias of 10⁵: the derivative `1 − (score / softcap)²` has
    /// an error of a few of these steps over `softcap`.
    pub softcap: Option<f32>,
    /// Dropout rate of the probabilities, rounded to a multiple of 1 / 65536; those kept are scaled by `1 / (1 − dropout)`
    /// ([`dropout`](crate::dropout)). 0: no dropout.
    pub dropout: f32,
    /// Seed of dropout. `None`: read from a tensor, so that it can be drawn on the device.
    pub dropout_seed: Option<u64>,
    /// Function of scores, applied after the softcap and before bias and slopes ([`mods`](crate::mods)).
    pub score_mod: Option<ScoreFn>,
    /// Function that hides pairs, in addition to causality, windows and masks ([`mods`](crate::mods)).
    pub mask_mod: Option<MaskFn>,
    /// Order in which the backward sums.
    pub backward_order: BackwardOrder,
    /// Precision of f32 products.
    pub precision: Precision,
}

impl AttentionOptions {
    /// Validates the numbers.
    pub fn validate(&self) -> Result<(), AttentionError> {
        let check = |option, value: Option<f32>, ok: fn(f32) -> bool, requirement| match value {
            Some(x) if !ok(x) => Err(AttentionError::Option { option, value: x as f64, requirement }),
            _ => Ok(()),
        };
        let positive = |x: f32| x.is_finite() && x > 0.0;
        check("softmax_scale", self.softmax_scale, positive, "a finite number above 0")?;
        check("softcap", self.softcap, positive, "a finite number above 0")?;
        check("dropout", Some(self.dropout), |p| (0.0..1.0).contains(&p), "at least 0 and below 1")
    }
}

impl Band {
    /// The band of `seq_q` queries over `seq_k` keys under these options. Lengths are at most [`MAX_SEQ`](super::MAX_SEQ).
    pub fn new(seq_q: usize, seq_k: usize, options: &AttentionOptions) -> Self {
        let right = if options.causal { Some(0) } else { options.window_right };
        Band::of_window(seq_q, seq_k, options.window_left, right, options.alignment)
    }
}
