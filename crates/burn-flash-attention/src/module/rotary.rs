//! Rotary position embedding.

use super::{check_number, unwrapped};
use crate::checks::{agree, same_device};
use crate::kv_cache::AttentionCache;
use crate::problem::dtype;
use crate::rotary;
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use flash_attention_kernels::{AttentionError, RotaryLayout};
use serde::{Deserialize, Serialize};
use std::f64::consts::TAU;

/// Change of frequencies for more positions than a model was trained with. Fields have the names of `rope_parameters` in checkpoints of Hugging
/// Face.
///
/// ```
/// use burn_flash_attention::RotaryScaling;
///
/// // Llama 3.2.
/// let scaling = RotaryScaling::Llama3 {
///     factor: 32.0,
///     low_freq_factor: 1.0,
///     high_freq_factor: 4.0,
///     original_max_position_embeddings: 8192,
/// };
/// assert_ne!(scaling, RotaryScaling::None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// None.
    #[default]
    None,
    /// Frequencies are divided by `factor` (position interpolation, arXiv:2306.15595, equation 4).
    Linear {
        /// The divisor, at least 1.
        factor: f64,
    },
    /// Low frequencies are divided by `factor`, high ones stay (The Llama 3 Herd of Models, arXiv:2407.21783; Llama 3.1's code).
    Llama3 {
        /// The divisor of low frequencies, at least 1.
        factor: f64,
        /// Periods longer than `original_max_position_embeddings / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Periods shorter than `original_max_position_embeddings / high_freq_factor` are high frequencies. Above `low_freq_factor`.
        high_freq_factor: f64,
        /// Positions that the model was first trained with.
        original_max_position_embeddings: usize,
    },
    /// Frequencies of few turns are divided by `factor`, those of many stay, and rotated vectors grow (YaRN, arXiv:2309.00071,
    /// section 3.2 and 3.3).
    Yarn {
        /// The divisor of low frequencies, at least 1.
        factor: f64,
        /// Turns over the original positions above which a frequency stays: 32 in the paper. Above `beta_slow`.
        beta_fast: f64,
        /// Turns below which a frequency is divided: 1 in the paper.
        beta_slow: f64,
        /// Positions that the model was first trained with.
        original_max_position_embeddings: usize,
        /// Factor on rotated vectors. `None`: `0.1 ln(factor) + 1` (equation 22).
        attention_factor: Option<f64>,
        /// Whether the bounds between the frequencies are rounded to whole pairs: true in the paper's code, false in gpt-oss.
        truncate: bool,
    },
}

/// Configuration of a [`RotaryEmbedding`].
///
/// ```
/// use burn_flash_attention::RotaryEmbeddingConfig;
///
/// // Llama 2.
/// let config = RotaryEmbeddingConfig::new(4096);
/// assert_eq!(config.base, 10000.0);
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<RotaryEmbeddingConfig>(&text)?.max_positions, 4096);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Config, Debug, PartialEq)]
#[non_exhaustive]
pub struct RotaryEmbeddingConfig {
    /// Number of positions, from 0 on, whose angles are computed in advance: `4 · max_positions · rotary_dim` bytes.
    pub max_positions: usize,
    /// Pair `i` turns by `base^(−2i / rotary_dim)` a position. Default: 10,000
    #[config(default = 10000.0)]
    pub base: f64,
    /// Number of columns of a head that are rotated, from the first one on: even. Default: all
    #[config(default = "None")]
    pub rotary_dim: Option<usize>,
    /// Columns that are rotated as a pair. Default: [`RotaryLayout::HalfSplit`]
    #[config(default = "RotaryLayout::HalfSplit")]
    pub layout: RotaryLayout,
    /// Change of frequencies. Default: [`RotaryScaling::None`]
    #[config(default = "RotaryScaling::None")]
    pub scaling: RotaryScaling,
}

impl RotaryEmbeddingConfig {
    /// Angles in radians by which the pairs of a head turn a position, and the factor on rotated vectors.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the setting and its value: an odd or too large `rotary_dim`, or numbers out of range.
    ///
    /// ```
    /// let config = burn_flash_attention::RotaryEmbeddingConfig::new(4096).with_base(100.0);
    /// let (frequencies, factor) = config.frequencies(4)?;
    /// assert_eq!((frequencies, factor), (vec![1.0, 0.1], 1.0));
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn frequencies(&self, head_dim: usize) -> Result<(Vec<f64>, f64), AttentionError> {
        let rotary_dim = self.rotary_dim.unwrap_or(head_dim);
        if rotary_dim == 0 || rotary_dim % 2 == 1 || rotary_dim > head_dim {
            return Err(AttentionError::Unsupported {
                option: "rotary_dim",
                value: format!("{rotary_dim} of {head_dim} columns"),
                why: "pairs of columns of a head are rotated; it must be even, above 0 and at most head_dim",
            });
        }
        check_number("base", self.base, self.base > 1.0, "above 1")?;
        let frequencies = (0..rotary_dim / 2).map(|pair| self.base.powf(-2.0 * pair as f64 / rotary_dim as f64));
        self.scaling.apply(frequencies.collect(), self.base)
    }

    /// Creates the embedding for heads of this dimension.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::RotaryEmbeddingConfig::new(128);
    /// assert_eq!(config.init(64, &burn::tensor::Device::flex()).max_positions(), 128);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, head_dim: usize, device: &Device) -> RotaryEmbedding {
        unwrapped(self.try_init(head_dim, device))
    }

    /// [`init`](Self::init) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Those of [`frequencies`](Self::frequencies).
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::RotaryEmbeddingConfig::new(128).with_rotary_dim(Some(96));
    /// let error = config.try_init(64, &burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().starts_with("rotary_dim = 96 of 64 columns is not supported"));
    /// # }
    /// ```
    pub fn try_init(&self, head_dim: usize, device: &Device) -> Result<RotaryEmbedding, AttentionError> {
        let (frequencies, factor) = self.frequencies(head_dim)?;
        let shape = [self.max_positions, frequencies.len()];
        // In f64: an angle of 100,000 radians has an error of 0.004 in f32, and devices differ in sines of large angles.
        let table = |of: fn(f64) -> f64| {
            let all = (0..self.max_positions).flat_map(|at| frequencies.iter().map(move |turn| at as f64 * turn));
            let values: Vec<f32> = all.map(|angle| (factor * of(angle)) as f32).collect();
            Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
        };
        Ok(RotaryEmbedding { cos: table(f64::cos), sin: table(f64::sin), head_dim, config: self.clone() })
    }
}

impl RotaryScaling {
    /// Changed frequencies, and the factor on rotated vectors.
    fn apply(self, mut frequencies: Vec<f64>, base: f64) -> Result<(Vec<f64>, f64), AttentionError> {
        let divisor = |factor: f64| check_number("factor", factor, factor >= 1.0, "at least 1");
        let mut attention = 1.0;
        match self {
            RotaryScaling::None => {}
            RotaryScaling::Linear { factor } => {
                divisor(factor)?;
                frequencies.iter_mut().for_each(|turn| *turn /= factor);
            }
            RotaryScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, .. } => {
                divisor(factor)?;
                check_number("low_freq_factor", low, low > 0.0, "above 0")?;
                check_number("high_freq_factor", high, high > low, "above low_freq_factor")?;
                let positions = self.original_positions()?;
                for turn in &mut frequencies {
                    // 1 for high frequencies, 0 for low ones, linear in the number of turns between them.
                    let kept = ((positions * *turn / TAU - low) / (high - low)).clamp(0.0, 1.0);
                    *turn *= kept + (1.0 - kept) / factor;
                }
            }
            RotaryScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, truncate, .. } => {
                divisor(factor)?;
                check_number("beta_slow", beta_slow, beta_slow > 0.0, "above 0")?;
                check_number("beta_fast", beta_fast, beta_fast > beta_slow, "above beta_slow")?;
                attention = attention_factor.unwrap_or(0.1 * factor.ln() + 1.0);
                check_number("attention_factor", attention, attention > 0.0, "above 0")?;
                let (positions, pairs) = (self.original_positions()?, frequencies.len() as f64);
                // The pair that makes so many turns over the original positions.
                let pair_of = |turns: f64| pairs * (positions / (turns * TAU)).ln() / base.ln();
                let (mut first, mut last) = (pair_of(beta_fast), pair_of(beta_slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                (first, last) = (first.max(0.0), last.min(2.0 * pairs - 1.0));
                for (pair, turn) in frequencies.iter_mut().enumerate() {
                    let kept = 1.0 - ((pair as f64 - first) / (last - first).max(0.001)).clamp(0.0, 1.0);
                    *turn *= kept + (1.0 - kept) / factor;
                }
            }
        }
        Ok((frequencies, attention))
    }

    /// Positions that the model was first trained with: above 0.
    fn original_positions(self) -> Result<f64, AttentionError> {
        let positions = match self {
            RotaryScaling::Llama3 { original_max_position_embeddings: positions, .. }
            | RotaryScaling::Yarn { original_max_position_embeddings: positions, .. } => positions as f64,
            RotaryScaling::None | RotaryScaling::Linear { .. } => 1.0,
        };
        check_number("original_max_position_embeddings", positions, positions > 0.0, "above 0").map(|()| positions)
    }
}

/// Rotary position embedding (RoFormer, arXiv:2104.09864, section 3.2): pairs of columns of queries and keys are rotated by angles
/// proportional to their position, so that scores depend on distances.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::RotaryEmbeddingConfig;
///
/// let device = Device::flex();
/// let rotary = RotaryEmbeddingConfig::new(128).init(64, &device);
/// let q = Tensor::<4>::random([2, 8, 10, 64], Distribution::Default, &device);
/// // Positions 5 to 14.
/// let angles = rotary.angles(5, 10)?;
/// assert_eq!(rotary.apply(q, &angles).dims(), [2, 8, 10, 64]);
/// # }
/// # Ok::<(), burn_flash_attention::AttentionError>(())
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct RotaryEmbedding {
    /// `[max_positions, rotary_dim / 2]`, f32.
    cos: Tensor<2>,
    sin: Tensor<2>,
    head_dim: usize,
    /// What the embedding was made with.
    #[module(skip)]
    config: RotaryEmbeddingConfig,
}

/// Cosines and sines of the angles of some positions. The layers of a model share them.
#[derive(Clone, Debug)]
pub struct RotaryAngles {
    /// `[batch | 1, 1, seq, rotary_dim / 2]`, f32.
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl ModuleDisplay for RotaryEmbedding {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let rotary_dim = 2 * self.cos.dims()[1];
        content.add("max_positions", &self.max_positions()).add("rotary_dim", &rotary_dim).optional()
    }
}

impl RotaryEmbedding {
    /// Number of positions, from 0 on.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let rotary = burn_flash_attention::RotaryEmbeddingConfig::new(128).init(64, &burn::tensor::Device::flex());
    /// assert_eq!(rotary.max_positions(), 128);
    /// # }
    /// ```
    pub fn max_positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Angles of `seq` positions from `start` on, the same in each batch.
    ///
    /// # Errors
    ///
    /// [`SequenceTooLong`](AttentionError::SequenceTooLong) for positions past the last one.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let rotary = burn_flash_attention::RotaryEmbeddingConfig::new(128).init(64, &burn::tensor::Device::flex());
    /// let error = rotary.angles(100, 29).unwrap_err();
    /// assert_eq!(error.to_string(), "positions is 129; sequences of at most 128 are supported");
    /// # }
    /// ```
    pub fn angles(&self, start: usize, seq: usize) -> Result<RotaryAngles, AttentionError> {
        self.check_positions(start.saturating_add(seq))?;
        let rows = |table: &Tensor<2>| table.clone().narrow(0, start, seq).unsqueeze();
        Ok(RotaryAngles { cos: rows(&self.cos), sin: rows(&self.sin) })
    }

    /// Angles of the positions `[batch | 1, seq]`, which only the device knows. They must be below
    /// [`max_positions`](Self::max_positions), which is not validated: reading them would synchronise the device. They are clamped.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    ///
    /// let device = Device::flex();
    /// let rotary = burn_flash_attention::RotaryEmbeddingConfig::new(128).init(64, &device);
    /// // The next token of two sequences.
    /// let angles = rotary.angles_at(Tensor::<2, Int>::from_data([[7], [40]], &device));
    /// let q = Tensor::<4>::ones([2, 8, 1, 64], &device);
    /// assert_eq!(rotary.apply(q, &angles).dims(), [2, 8, 1, 64]);
    /// # }
    /// ```
    pub fn angles_at(&self, positions: Tensor<2, Int>) -> RotaryAngles {
        let ([batch, seq], [max, pairs]) = (positions.dims(), self.cos.dims());
        let flat = positions.reshape([batch * seq]).clamp(0, max.saturating_sub(1) as i64);
        let rows = |table: &Tensor<2>| table.clone().select(0, flat.clone()).reshape([batch, 1, seq, pairs]);
        RotaryAngles { cos: rows(&self.cos), sin: rows(&self.sin) }
    }

    /// Whether this is the embedding of a configuration for heads of this dimension.
    pub(super) fn is_of(&self, config: &RotaryEmbeddingConfig, head_dim: usize) -> bool {
        self.config == *config && self.head_dim == head_dim
    }

    /// Whether another embedding has the same angles.
    pub(super) fn is_same(&self, other: &RotaryEmbedding) -> bool {
        self.is_of(&other.config, other.head_dim)
    }

    /// Angles of `new` positions of each sequence after those in the cache.
    pub(super) fn angles_after(&self, cache: &impl AttentionCache, new: usize) -> Result<RotaryAngles, AttentionError> {
        let Some(before) = cache.differing_lens() else { return self.angles(cache.max_len(), new) };
        self.check_positions(cache.max_len().saturating_add(new))?;
        let (batch, device) = (before.dims()[0], before.device());
        let nth = Tensor::<1, Int>::arange(0..new as i64, &device).cast(before.dtype());
        let positions = before.reshape([batch, 1]) + nth.reshape([1, new]);
        Ok(self.angles_at(positions))
    }

    fn check_positions(&self, end: usize) -> Result<(), AttentionError> {
        let max = self.max_positions();
        if end <= max {
            return Ok(());
        }
        Err(AttentionError::SequenceTooLong { argument: "positions", value: end, max })
    }

    /// Rotates queries or keys `[batch, heads, seq, head_dim]`, in one pass. Computes in f32 for any element type, which the result has.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_apply`](Self::try_apply) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let rotary = burn_flash_attention::RotaryEmbeddingConfig::new(8).init(2, &Device::flex());
    /// let x = Tensor::<4>::from_data([[[[1.0, 0.0], [1.0, 0.0]]]], &Device::flex());
    /// let rotated = rotary.apply(x, &rotary.angles(0, 2)?).into_data();
    /// let rotated: Vec<f32> = rotated.iter().collect();
    /// assert_eq!(rotated, [1.0, 0.0, 1f64.cos() as f32, 1f64.sin() as f32]);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    #[track_caller]
    pub fn apply(&self, x: Tensor<4>, angles: &RotaryAngles) -> Tensor<4> {
        unwrapped(self.try_apply(x, angles))
    }

    /// [`apply`](Self::apply) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// [`Dimension`](AttentionError::Dimension) if the angles are of another number of positions or sequences, or heads have another dimension;
    /// [`Device`](AttentionError::Device) if the angles are on another device.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let rotary = burn_flash_attention::RotaryEmbeddingConfig::new(8).init(4, &Device::flex());
    /// let angles = rotary.angles(0, 3)?;
    /// let error = rotary.try_apply(Tensor::zeros([1, 1, 2, 4], &Device::flex()), &angles).unwrap_err();
    /// assert!(error.to_string().starts_with("x has seq 2"));
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn try_apply(&self, x: Tensor<4>, angles: &RotaryAngles) -> Result<Tensor<4>, AttentionError> {
        self.check(x.dims(), angles)?;
        let device = x.device();
        same_device("angles", &angles.cos.device(), &device)?;
        rotary::check(device.inner().as_dispatch(), dtype("x", x.dtype())?, x.dims())?;
        Ok(rotary::apply(x, angles.cos.clone(), angles.sin.clone(), self.config.layout))
    }

    fn check(&self, x: [usize; 4], angles: &RotaryAngles) -> Result<(), AttentionError> {
        let [batch, _, seq, _] = angles.cos.dims();
        agree("x", &x, (3, "head_dim"), ("the rotary embedding", self.head_dim))?;
        agree("x", &x, (2, "seq"), ("the angles", seq))?;
        if batch != 1 {
            agree("x", &x, (0, "batch"), ("the angles", batch))?;
        }
        agree("angles", &angles.cos.dims(), (3, "rotary_dim / 2"), ("the rotary embedding", self.cos.dims()[1]))
    }
}
