//! Options of an attention call that are numbers, enums or functions.

use crate::error::AttentionError;
use crate::mask::{Alignment, Band};
use crate::mods::{MaskFn, ScoreFn};
use serde::{Deserialize, Serialize};

/// Order of summation in the backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BackwardOrder {
    /// A fixed order: the same call gives the same bits. Where thread blocks add to `dq`, they wait for each other.
    #[default]
    Deterministic,
    /// Any order: thread blocks may add to `dq` in the order in which they finish, which is faster by up to a tenth. Results then
    /// differ between runs by rounding. The order stays fixed if there is no such kernel or if it would not be faster.
    Fast,
}

/// Precision of products of f32 operands. Products of f16 and bf16 are not affected. Sums are always f32.
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
    /// Full f32 precision, by multiply-adds or by split tf32 products.
    #[default]
    Full,
    /// Operands may be rounded to tf32, which has 11 significant bits, like f16, and the range of f32. This is two to three
    /// times as fast on devices with tf32 matrix products. On other devices it equals [`Full`](Precision::Full), and the plan
    /// says so.
    Tf32,
}

/// Options that are numbers or functions. Optional tensors belong to the problem.
///
/// A score is `score_mod(softcap(q·kᵀ · softmax_scale))`. It is set to −∞ where the mask, causality, a window or `mask_mod`
/// hides the pair. Bias and slopes are then added. Functions are serialized as their names, for human readers; options that
/// contain a function cannot be deserialized.
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
    /// Hides keys after the query's position.
    pub causal: bool,
    /// Alignment of queries and keys, for `causal` and windows.
    pub alignment: Alignment,
    /// Whether queries continue the sequence of the keys, as in decoding: functions then receive a query's position among the keys,
    /// which `alignment` gives, in place of its position among the queries.
    pub continued: bool,
    /// Number of keys visible before the query's own position. `None`: all.
    pub window_left: Option<usize>,
    /// Number of keys visible after the query's own position. `None`: all (none if `causal`).
    pub window_right: Option<usize>,
    /// Scores become `softcap · tanh(score / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
    ///
    /// On NVIDIA GPUs the backward recovers the capped score from the probability and the bias in f32. Next to a bias of 10⁵
    /// the resolution is 2⁻⁷, and the derivative `1 − (score / softcap)²` has an error of a few such steps divided by
    /// `softcap`.
    pub softcap: Option<f32>,
    /// Dropout rate of the probabilities, rounded to a multiple of 1 / 65536. Kept probabilities are scaled by `1 / (1 −
    /// dropout)` ([`dropout`](crate::dropout)). 0: no dropout.
    pub dropout: f32,
    /// Seed of dropout. `None`: the seed is read from a tensor, so that it can be generated on the device.
    pub dropout_seed: Option<u64>,
    /// Score modification, applied after the softcap and before bias and slopes ([`mods`](crate::mods)).
    pub score_mod: Option<ScoreFn>,
    /// Mask function: hides pairs in addition to causality, windows and masks ([`mods`](crate::mods)).
    pub mask_mod: Option<MaskFn>,
    /// Order of summation in the backward.
    pub backward_order: BackwardOrder,
    /// Precision of f32 products.
    pub precision: Precision,
}

impl AttentionOptions {
    /// Validates the numeric options.
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
    /// The band of `seq_q` queries over `seq_k` keys under these options. Both lengths are at most [`MAX_SEQ`](super::MAX_SEQ).
    pub fn new(seq_q: usize, seq_k: usize, options: &AttentionOptions) -> Self {
        let right = if options.causal { Some(0) } else { options.window_right };
        let band = Band::of_window(seq_q, seq_k, options.window_left, right, options.alignment);
        Band { continued: options.continued, ..band }
    }
}
