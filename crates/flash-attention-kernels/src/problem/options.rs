//! Options of attention, and element types.

use crate::error::AttentionError;
use crate::mods::{MaskFn, ScoreFn};
use serde::{Deserialize, Serialize};

/// Element type of `q`, `k`, `v`, `o`, the bias and their gradients. Arithmetic is in f32 whatever it is, but for products that
/// [`Precision`] allows to be less precise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
}

impl Dtype {
    /// Size in bytes.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
        }
    }

    /// The name used in messages and result files.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::BF16 => "bf16",
        }
    }
}

/// Where the diagonal of causal masks and windows lies when `seq_q` and `seq_k` differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alignment {
    /// The last query is aligned with the last key: query `i` stands at key `i + seq_k − seq_q`.
    #[default]
    BottomRight,
    /// The first query is aligned with the first key: query `i` stands at key `i`.
    TopLeft,
}

/// In which order the sums of gradients are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackwardOrder {
    /// A fixed one: the same call gives the same bits.
    #[default]
    Deterministic,
    /// Whichever is fastest: a kernel may add to `dq` in whatever order its thread blocks come by. What differs from run to run is
    /// what rounding in another order leaves. Where there is no such kernel, or it would not be faster, a fixed one.
    Fast,
}

/// How precisely f32 is multiplied. Half precision is multiplied as it is, and everything is added up in f32.
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
pub enum Precision {
    /// As f32, whether by multiply-adds or by matrix products.
    #[default]
    Full,
    /// Factors may be rounded to tf32, which has 11 significant bits as f16 has, and the range of f32: two to three times as
    /// fast where a device multiplies matrices of it. Elsewhere as [`Full`](Precision::Full): a plan says what was passed over.
    Tf32,
}

/// What is done with the scores between `q·kᵀ` and the output, but for what tensors do.
///
/// Scores are `score_mod(softcap(q·kᵀ · softmax_scale))`, set to −∞ where mask, causality, window or `mask_mod` hide them, plus bias
/// and slopes. Functions serialize as their names, for who reads; such options cannot be read back.
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
    /// Where query 0 stands among the keys, for `causal` and windows.
    pub alignment: Alignment,
    /// Keys seen before the query's own position. `None`: all.
    pub window_left: Option<usize>,
    /// Keys seen after the query's own position. `None`: all (none where `causal`).
    pub window_right: Option<usize>,
    /// Scores become `softcap · tanh(score / softcap)` (Gemma 2, arXiv:2408.00118, section 2). On NVIDIA GPUs the backward recovers
    /// them from probabilities and bias, in f32, whose steps are 2⁻⁷ beside a bias of 10⁵: their derivative, `1 − (score / softcap)²`, is
    /// known to a few of these steps over `softcap`.
    pub softcap: Option<f32>,
    /// The probability with which a pair's probability is dropped, rounded to a multiple of 1 / 65536; what is kept is divided by that
    /// of keeping ([`dropout`](crate::dropout)). 0: none is.
    pub dropout: f32,
    /// What draws of dropout depend on. `None`: on a tensor, so that it can be drawn on the device.
    pub dropout_seed: Option<u64>,
    /// What makes scores of scores, after the softcap and before bias and slopes ([`mods`](crate::mods)).
    pub score_mod: Option<ScoreFn>,
    /// What hides pairs, beside causality, windows and masks ([`mods`](crate::mods)).
    pub mask_mod: Option<MaskFn>,
    /// In which order the backward adds up.
    pub backward_order: BackwardOrder,
    /// How precisely f32 is multiplied.
    pub precision: Precision,
}

impl AttentionOptions {
    /// Checks the numbers among the options.
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
