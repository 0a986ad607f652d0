//! Options of attention.

mod serialization;

use crate::block_mask::BlockMask;
use crate::slopes::AlibiSlopes;
use crate::tensors::Tensors;
use burn::tensor::kind::Basic;
use burn::tensor::ops::{AttentionModuleOptions, CausalAlignment};
use burn::tensor::{Bool, Int, Tensor};
use flash_attention_kernels::mods::{MaskFn, ScoreFn};
use flash_attention_kernels::{Alignment, AttentionOptions, BackwardOrder, Precision};

/// Options of [`flash_attention`](crate::flash_attention).
///
/// Scores are `score_mod(softcap(q·kᵀ · softmax_scale))`, or `softcap(q·kᵀ · softmax_scale) / temperature`, set to −∞ where the mask, causality, a window, `mask_mod` or the block mask hides
/// them, plus bias and slopes. A sink is one more logit in each row of the softmax. Dropout applies to the probabilities.
///
/// ```
/// use burn_flash_attention::FlashAttentionOptions;
///
/// // Mistral's sliding window: each token sees itself and the 4095 before it.
/// let options = FlashAttentionOptions::new().with_causal(true).with_window_left(4095);
/// let text = serde_json::to_string(&options)?;
/// let back: FlashAttentionOptions = serde_json::from_str(&text)?;
/// assert_eq!(back.window_left, Some(4095));
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// # Serialization
///
/// Numbers serialize; tensors and functions do not. Serializing options that contain one is an error, so that nothing is lost silently.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct FlashAttentionOptions {
    /// Factor on `q·kᵀ`. `None`: `1/√head_dim`.
    pub softmax_scale: Option<f32>,
    /// Hides keys that come after the query.
    pub causal: bool,
    /// Position of the queries among the keys, for `causal` and windows. Default: bottom-right, the last query is aligned with the
    /// last key.
    pub alignment: Alignment,
    /// Whether queries continue the sequence of the keys, so that functions receive their position among the keys: with a cache.
    pub(crate) continued: bool,
    /// Keys seen before the query's own position. `None`: all.
    pub window_left: Option<usize>,
    /// Keys seen after the query's own position. `None`: all (none where `causal`).
    pub window_right: Option<usize>,
    /// Scores become `softcap · tanh(score / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
    pub softcap: Option<f32>,
    /// Dropout rate of the probabilities; those kept are scaled by `1 / (1 − dropout)`. Applied whenever it is above 0: pass 0 when
    /// evaluating.
    pub dropout: f32,
    /// Seed of dropout. Which pairs are dropped depends on the seed, batch, head, query and key, not on the device. `None`: a new seed each
    /// call, drawn on the device by Burn's generator, which [`Device::seed`](burn::tensor::Device::seed) initialises.
    pub dropout_seed: Option<u64>,
    /// Order in which the backward sums. Default: fixed, so that the same call gives the same bits.
    pub backward_order: BackwardOrder,
    /// Precision of f32 products. Default: that of f32.
    pub precision: Precision,
    /// `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`; true hides. Never expanded.
    pub mask: Option<Tensor<4, Bool>>,
    /// `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, of the dtype of `q`; added to the scores. Never expanded.
    /// Differentiable.
    pub bias: Option<Tensor<4>>,
    /// ALiBi slopes: the decrease of scores with the distance between query and key. Differentiable.
    pub alibi_slopes: Option<AlibiSlopes>,
    /// `[batch]`: number of queries of each batch that belong to its sequence, counted from the first; the rest is padding, with output 0.
    /// Causality and windows are aligned with the ends of sequences. Larger values are clamped to `seq_q`.
    pub seq_lens_q: Option<Tensor<1, Int>>,
    /// `[batch]`: number of keys of each batch that belong to its sequence, counted from the first; the rest is hidden.
    pub seq_lens_k: Option<Tensor<1, Int>>,
    /// `[sequences + 1]`: first query of each packed sequence, counted through the batches, and the end of the last one. Sequences do not see
    /// each other. A sequence ends with the batch that it begins in; queries of no sequence have output 0. Must be non-negative and
    /// non-decreasing, which is not validated: reading it would synchronise the device.
    pub cu_seqlens_q: Option<Tensor<1, Int>>,
    /// `[sequences + 1]`: the same for keys, for as many sequences.
    pub cu_seqlens_k: Option<Tensor<1, Int>>,
    /// `[num_heads_q]`: one more logit for each head, with value vector 0, so that a head can attend to nothing (gpt-oss; StreamingLLM,
    /// arXiv:2309.17453). A sink of 0 is burn-nn's quiet softmax. Differentiable.
    pub sinks: Option<Tensor<1>>,
    /// `[num_heads_q]`: the scores of a head are divided by its temperature, after the softcap and before bias and slopes
    /// ([`mods::Temperature`](crate::mods::Temperature)). Must be above 0, which is not validated: reading it would synchronise the device.
    /// Excludes `score_mod`. Differentiable.
    pub temperature: Option<Tensor<1>>,
    /// Function of scores, applied after the softcap and before bias and slopes.
    pub score_mod: Option<ScoreFn>,
    /// Tensors `a` and `b` that `score_mod` reads: at most two, `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, f32. Never expanded.
    /// Differentiable.
    pub score_tensors: Vec<Tensor<4>>,
    /// Function that hides pairs, in addition to causality, windows and mask.
    pub mask_mod: Option<MaskFn>,
    /// Tensors that `mask_mod` reads, of the same shapes. Not differentiable: visibility is a step function.
    pub mask_tensors: Vec<Tensor<4>>,
    /// Blocks of queries and keys that see each other, and those for which mask and `mask_mod` are evaluated.
    pub block_mask: Option<BlockMask>,
}

/// Defines setters of optional fields.
macro_rules! with {
    ($($(#[$doc:meta])* $name:ident: $field:ident, $type:ty;)*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $field: impl Into<Option<$type>>) -> Self {
            self.$field = $field.into();
            self
        }
    )*};
}

impl FlashAttentionOptions {
    /// Full attention, scaled by `1/√head_dim`.
    ///
    /// ```
    /// assert!(!burn_flash_attention::FlashAttentionOptions::new().causal);
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether keys that come after the query are hidden.
    ///
    /// ```
    /// assert!(burn_flash_attention::FlashAttentionOptions::new().with_causal(true).causal);
    /// ```
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the dropout rate: at least 0 and below 1, rounded to a multiple of 1 / 65536.
    ///
    /// ```
    /// let options = burn_flash_attention::FlashAttentionOptions::new().with_dropout(0.1);
    /// assert_eq!(options.dropout, 0.1);
    /// ```
    pub fn with_dropout(mut self, dropout: f32) -> Self {
        self.dropout = dropout;
        self
    }

    /// Sets the ALiBi slopes, `[num_heads_q]` or `[batch, num_heads_q]`.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let slopes = Tensor::<1>::ones([8], &Device::default().autodiff()).require_grad();
    /// let options = burn_flash_attention::FlashAttentionOptions::new().with_alibi_slopes(slopes);
    /// ```
    pub fn with_alibi_slopes(mut self, slopes: impl Into<AlibiSlopes>) -> Self {
        self.alibi_slopes = Some(slopes.into());
        self
    }

    /// Sets the position of the queries among the keys, for `causal` and windows.
    ///
    /// ```
    /// use burn_flash_attention::{Alignment, FlashAttentionOptions};
    ///
    /// let torch = FlashAttentionOptions::new().with_causal(true).with_alignment(Alignment::TopLeft);
    /// assert_eq!(torch.alignment, Alignment::TopLeft);
    /// ```
    pub fn with_alignment(mut self, alignment: Alignment) -> Self {
        self.alignment = alignment;
        self
    }

    /// Sets the order in which the backward sums.
    ///
    /// ```
    /// use burn_flash_attention::{BackwardOrder, FlashAttentionOptions};
    ///
    /// let fast = FlashAttentionOptions::new().with_backward_order(BackwardOrder::Fast);
    /// assert_eq!(FlashAttentionOptions::new().backward_order, BackwardOrder::Deterministic);
    /// # assert_eq!(fast.backward_order, BackwardOrder::Fast);
    /// ```
    pub fn with_backward_order(mut self, backward_order: BackwardOrder) -> Self {
        self.backward_order = backward_order;
        self
    }

    /// Sets the precision of f32 products. It does not affect half precision.
    ///
    /// ```
    /// use burn_flash_attention::{FlashAttentionOptions, Precision};
    ///
    /// let fast = FlashAttentionOptions::new().with_precision(Precision::Tf32);
    /// assert_eq!(FlashAttentionOptions::new().precision, Precision::Full);
    /// # assert_eq!(fast.precision, Precision::Tf32);
    /// ```
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the score function and the tensors that it reads as `a` and `b`: at most two, f32, each `[batch | 1, num_heads_q | 1, seq_q |
    /// 1, seq_k | 1]` (FlexAttention, arXiv:2412.05496, section 3). The function is compiled into the kernels of the forward, and its
    /// derivatives into the kernels of the backward.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_attention::mods::{Pair, Partials, ScoreFn, ScoreMod, Values};
    /// use burn_flash_attention::{FlashAttentionOptions, flash_attention};
    /// use cubecl::prelude::*;
    ///
    /// /// A learned temperature for each head.
    /// struct Temperature;
    ///
    /// #[cube]
    /// impl ScoreMod for Temperature {
    ///     const ADDITIVE: bool = false;
    ///
    ///     fn score(score: f32, _pair: Pair, values: Values) -> f32 {
    ///         score * values.a
    ///     }
    ///
    ///     fn backward(score: f32, _pair: Pair, values: Values) -> Partials {
    ///         Partials { score: values.a, a: score, b: 0.0f32 }
    ///     }
    /// }
    ///
    /// let device = Device::flex().autodiff();
    /// let x = Tensor::<4>::random([1, 4, 8, 16], Distribution::Default, &device);
    /// let temperatures = Tensor::<4>::ones([1, 4, 1, 1], &device).require_grad();
    /// let options = FlashAttentionOptions::new().with_score_mod(ScoreFn::of::<Temperature>(), [temperatures.clone()]);
    /// let out = flash_attention(x.clone(), x.clone(), x, &options);
    /// assert_eq!(temperatures.grad(&out.sum().backward()).unwrap().dims(), [1, 4, 1, 1]);
    /// # }
    /// ```
    pub fn with_score_mod(mut self, function: ScoreFn, tensors: impl IntoIterator<Item = Tensor<4>>) -> Self {
        self.score_mod = Some(function);
        self.score_tensors = tensors.into_iter().collect();
        self
    }

    /// Sets the function that hides pairs and the tensors that it reads as `a` and `b`: at most two, f32, each `[batch | 1, num_heads_q |
    /// 1, seq_q | 1, seq_k | 1]`. Its result does not matter for pairs that are hidden otherwise.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_attention::mods::{MaskFn, MaskMod, Pair, Values};
    /// use burn_flash_attention::{FlashAttentionOptions, flash_attention};
    /// use cubecl::prelude::*;
    ///
    /// /// Causal, but for a prefix that all see (PrefixLM): `a` is its length, of a tensor `[batch, 1, 1, 1]`.
    /// struct Prefix;
    ///
    /// #[cube]
    /// impl MaskMod for Prefix {
    ///     fn sees(pair: Pair, values: Values) -> bool {
    ///         pair.j <= pair.i || (pair.j as f32) < values.a
    ///     }
    /// }
    ///
    /// let x = Tensor::<4>::random([2, 4, 8, 16], Distribution::Default, &Device::flex());
    /// let lengths = Tensor::<4>::from_data([[[[3.0]]], [[[5.0]]]], &Device::flex());
    /// let options = FlashAttentionOptions::new().with_mask_mod(MaskFn::of::<Prefix>(), [lengths]);
    /// assert_eq!(flash_attention(x.clone(), x.clone(), x, &options).dims(), [2, 4, 8, 16]);
    /// # }
    /// ```
    pub fn with_mask_mod(mut self, function: MaskFn, tensors: impl IntoIterator<Item = Tensor<4>>) -> Self {
        self.mask_mod = Some(function);
        self.mask_tensors = tensors.into_iter().collect();
        self
    }

    with! {
        /// Sets the factor on `q·kᵀ`: a finite number above 0.
        ///
        /// ```
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_softmax_scale(0.25);
        /// assert_eq!(options.softmax_scale, Some(0.25));
        /// ```
        with_softmax_scale: softmax_scale, f32;
        /// Sets how many keys are seen before the query's own position.
        ///
        /// ```
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_window_left(127);
        /// assert_eq!(options.window_left, Some(127));
        /// ```
        with_window_left: window_left, usize;
        /// Sets how many keys are seen after the query's own position.
        ///
        /// ```
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_window_right(0);
        /// assert_eq!(options.window_right, Some(0));
        /// ```
        with_window_right: window_right, usize;
        /// Sets the softcap: a finite number above 0.
        ///
        /// ```
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_softcap(50.0);
        /// assert_eq!(options.softcap, Some(50.0));
        /// ```
        with_softcap: softcap, f32;
        /// Sets the mask: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, true hides.
        ///
        /// ```no_run
        /// use burn::tensor::{Bool, Device, Tensor};
        ///
        /// // The second of two keys is padding.
        /// let mask = Tensor::<4, Bool>::from_data([[[[false, true]]]], &Device::default());
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_mask(mask);
        /// ```
        with_mask: mask, Tensor<4, Bool>;
        /// Sets the bias: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, of the dtype of `q`.
        ///
        /// ```no_run
        /// use burn::tensor::{Device, Tensor};
        ///
        /// // One learned number for each of 8 heads and 128 keys.
        /// let bias = Tensor::<4>::zeros([1, 8, 1, 128], &Device::default().autodiff()).require_grad();
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_bias(bias);
        /// ```
        with_bias: bias, Tensor<4>;
        /// Sets the sinks: `[num_heads_q]`.
        ///
        /// ```no_run
        /// use burn::tensor::{Device, Tensor};
        ///
        /// let sinks = Tensor::<1>::zeros([8], &Device::default().autodiff()).require_grad();
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_sinks(sinks);
        /// ```
        with_sinks: sinks, Tensor<1>;
        /// Sets the temperature of each head: `[num_heads_q]`.
        ///
        /// ```
        /// # #[cfg(feature = "flex")] {
        /// use burn::tensor::{Device, Distribution, Tensor};
        /// use burn_flash_attention::{FlashAttentionOptions, flash_attention};
        ///
        /// let device = Device::flex().autodiff();
        /// let x = Tensor::<4>::random([1, 4, 8, 16], Distribution::Default, &device);
        /// let temperature = Tensor::<1>::ones([4], &device).require_grad();
        /// let options = FlashAttentionOptions::new().with_softmax_scale(1.0).with_temperature(temperature.clone());
        /// let out = flash_attention(x.clone(), x.clone(), x, &options);
        /// assert_eq!(temperature.grad(&out.sum().backward()).unwrap().dims(), [4]);
        /// # }
        /// ```
        with_temperature: temperature, Tensor<1>;
        /// Sets the number of queries of each batch that belong to its sequence: `[batch]`.
        ///
        /// ```no_run
        /// use burn::tensor::{Device, Int, Tensor};
        ///
        /// // Two texts of a batch, filled up to the length of the longer one, attend to themselves.
        /// let lens = Tensor::<1, Int>::from_data([1024, 700], &Device::default());
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_causal(true);
        /// let options = options.with_seq_lens_q(lens.clone()).with_seq_lens_k(lens);
        /// ```
        with_seq_lens_q: seq_lens_q, Tensor<1, Int>;
        /// Sets the number of keys of each batch that belong to its sequence: `[batch]`.
        ///
        /// ```no_run
        /// use burn::tensor::{Device, Int, Tensor};
        ///
        /// // What a decoder has in its cache.
        /// let lens = Tensor::<1, Int>::from_data([17, 512], &Device::default());
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_seq_lens_k(lens);
        /// ```
        with_seq_lens_k: seq_lens_k, Tensor<1, Int>;
        /// Sets the first query of each packed sequence, counted through the batches, and the end of the last one: `[sequences + 1]`.
        ///
        /// ```no_run
        /// use burn::tensor::{Device, Int, Tensor};
        ///
        /// // Rows of 1024 tokens: the first is a document of 700 and one of 324, the second a document by itself.
        /// let ends = Tensor::<1, Int>::from_data([0, 700, 1024, 2048], &Device::default());
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_causal(true);
        /// let options = options.with_cu_seqlens_q(ends.clone()).with_cu_seqlens_k(ends);
        /// ```
        with_cu_seqlens_q: cu_seqlens_q, Tensor<1, Int>;
        /// Sets the first key of each packed sequence, counted through the batches, and the end of the last one: `[sequences + 1]`.
        ///
        /// ```no_run
        /// use burn::tensor::{Device, Int, Tensor};
        ///
        /// let ends = |ends| Tensor::<1, Int>::from_data(ends, &Device::default());
        /// let options = burn_flash_attention::FlashAttentionOptions::new();
        /// let options = options.with_cu_seqlens_q(ends([0, 1, 2])).with_cu_seqlens_k(ends([0, 30, 100]));
        /// ```
        with_cu_seqlens_k: cu_seqlens_k, Tensor<1, Int>;
        /// Sets the block mask.
        ///
        /// ```
        /// # #[cfg(feature = "flex")] {
        /// use burn::tensor::Device;
        /// use burn_flash_attention::{BlockMask, BlockState, FlashAttentionOptions};
        ///
        /// // Each block of 128 tokens by itself.
        /// let state = |_, _, q, k| if q == k { BlockState::Full } else { BlockState::Empty };
        /// let blocks = BlockMask::from_blocks([1, 1, 8, 8], 128, 128, &Device::flex(), state);
        /// let options = FlashAttentionOptions::new().with_block_mask(blocks);
        /// assert_eq!(options.block_mask.unwrap().block_q, 128);
        /// # }
        /// ```
        with_block_mask: block_mask, BlockMask;
        /// Sets the seed of dropout.
        ///
        /// ```
        /// let options = burn_flash_attention::FlashAttentionOptions::new().with_dropout(0.1).with_dropout_seed(7);
        /// assert_eq!(options.dropout_seed, Some(7));
        /// ```
        with_dropout_seed: dropout_seed, u64;
    }

    /// Applies `f` to each tensor. A seed of dropout is not one of them: it is drawn for each call.
    pub(crate) fn tensors<T>(&self, f: &impl OfTensor<T>) -> Tensors<T> {
        Tensors {
            mask: self.mask.as_ref().map(|mask| f.of(mask)),
            bias: self.bias.as_ref().map(|bias| f.of(bias)),
            alibi_slopes: self.alibi_slopes.clone().map(|slopes| f.of(&slopes.into_tensor())),
            sinks: self.sinks.as_ref().map(|sinks| f.of(sinks)),
            dropout_seed: None,
            seq_lens_q: self.seq_lens_q.as_ref().map(|lens| f.of_int(lens)),
            seq_lens_k: self.seq_lens_k.as_ref().map(|lens| f.of_int(lens)),
            cu_seqlens_q: self.cu_seqlens_q.as_ref().map(|ends| f.of_int(ends)),
            cu_seqlens_k: self.cu_seqlens_k.as_ref().map(|ends| f.of_int(ends)),
            score_a: self.score_tensors.first().map(|tensor| f.of(tensor)),
            score_b: self.score_tensors.get(1).map(|tensor| f.of(tensor)),
            mask_a: self.mask_tensors.first().map(|tensor| f.of(tensor)),
            mask_b: self.mask_tensors.get(1).map(|tensor| f.of(tensor)),
            block_mask: self.block_mask.as_ref().map(|mask| f.of_int(&mask.states)),
        }
    }

    /// Queries and keys of a block of the block mask; 0 without one.
    pub(crate) fn block_sizes(&self) -> [usize; 2] {
        self.block_mask.as_ref().map_or([0; 2], |mask| [mask.block_q, mask.block_k])
    }

    /// The options that are not tensors.
    pub(crate) fn numbers(&self) -> AttentionOptions {
        AttentionOptions {
            softmax_scale: self.softmax_scale,
            causal: self.causal,
            alignment: self.alignment,
            continued: self.continued,
            window_left: self.window_left,
            window_right: self.window_right,
            softcap: self.softcap,
            dropout: self.dropout,
            dropout_seed: self.dropout_seed,
            score_mod: self.score_mod,
            mask_mod: self.mask_mod,
            backward_order: self.backward_order,
            precision: self.precision,
        }
    }
}

/// A function of tensors of any rank and kind.
pub(crate) trait OfTensor<T> {
    fn of<const D: usize, K: Basic>(&self, tensor: &Tensor<D, K>) -> T;

    /// The same for integers.
    fn of_int<const D: usize>(&self, tensor: &Tensor<D, Int>) -> T {
        self.of(tensor)
    }
}

impl From<AttentionOptions> for FlashAttentionOptions {
    fn from(options: AttentionOptions) -> Self {
        FlashAttentionOptions {
            softmax_scale: options.softmax_scale,
            causal: options.causal,
            alignment: options.alignment,
            continued: options.continued,
            window_left: options.window_left,
            window_right: options.window_right,
            softcap: options.softcap,
            dropout: options.dropout,
            dropout_seed: options.dropout_seed,
            score_mod: options.score_mod,
            mask_mod: options.mask_mod,
            backward_order: options.backward_order,
            precision: options.precision,
            ..Default::default()
        }
    }
}

/// Converts Burn's options. Their `scale` and `softcap` are f64; attention computes in f32.
impl From<AttentionModuleOptions> for FlashAttentionOptions {
    fn from(options: AttentionModuleOptions) -> Self {
        FlashAttentionOptions {
            softmax_scale: options.scale.map(|scale| scale as f32),
            causal: options.is_causal,
            alignment: match options.causal_alignment {
                CausalAlignment::BottomRight => Alignment::BottomRight,
                CausalAlignment::TopLeft => Alignment::TopLeft,
            },
            softcap: options.softcap.map(|softcap| softcap as f32),
            ..Default::default()
        }
    }
}
