//! GPT-2, as in nanoGPT: read from top to bottom.
//!
//! Shapes: `batch` windows of `context` tokens, `width` channels, `heads` heads of `head_dim = width / heads`.
//! Master weights, the residual stream, norms and the loss are f32. With a half-precision dtype, matrix products and attention are computed
//! in that dtype, and their operands are cast to it.

pub use crate::cache::Cache;

use crate::cache::BlockCache;
use crate::config::{AttentionKind, Config};
use crate::data::{Batch, Documents, Stream, rng};
use crate::error::Error;
use crate::layers::{cross_entropy, gelu, layer_norm, linear};
use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::activation::softmax;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData, module};
use burn_flash_attention::{
    AlibiSlopes, AttentionError, FlashAttentionOptions, KvCacheConfig, KvStorage, flash_attention,
    flash_attention_with_kvcache, plan,
};
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

/// The language model.
#[derive(Module, Debug)]
pub struct Gpt {
    /// Also the weights of the output head: the logit of a token is the product with its embedding.
    token_embedding: Embedding,
    /// `None` with ALiBi, whose slopes encode positions.
    position_embedding: Option<Embedding>,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
    #[module(skip)]
    dtype: FloatDType,
}

impl Gpt {
    /// A model with random weights, the same on every device.
    pub fn new(config: &Config, device: &Device) -> Self {
        Self::init(config, &mut Draw::Normal(Box::new(rng(config.seed, Stream::Weights, 0))), device)
    }

    /// A model of zeros, for weights to be loaded into.
    pub fn zeros(config: &Config, device: &Device) -> Self {
        Self::init(config, &mut Draw::Zeros, device)
    }

    fn init(config: &Config, draw: &mut Draw, device: &Device) -> Self {
        let mut embedding = |rows| Embedding { weight: draw.matrix([rows, config.width], 0.02, device) };
        Self {
            token_embedding: embedding(config.vocabulary),
            position_embedding: (!config.alibi).then(|| embedding(config.context)),
            dropout: DropoutConfig::new(config.dropout).init(),
            blocks: (0..config.layers).map(|_| Block::new(config, draw, device)).collect(),
            norm: LayerNormConfig::new(config.width).init(device),
            dtype: config.dtype.float(),
        }
    }

    /// `tokens [batch, context]` → `logits [batch, context, vocabulary]`, f32.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let vocabulary = self.token_embedding.weight.dims()[0];
        let x = layer_norm(&self.norm, self.read(tokens, None)).cast(self.dtype);
        self.logits(x).narrow(2, 0, vocabulary)
    }

    /// Mean cross-entropy of a batch's targets, in nats per token.
    pub fn loss(&self, batch: &Batch) -> Tensor<1> {
        let x = self.read(batch.tokens.clone(), batch.documents.as_ref());
        self.head_loss(x, batch.targets.clone())
    }

    /// `loss` for the output of the last block, `x [batch, context, width]`.
    pub(crate) fn head_loss(&self, x: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
        let x = layer_norm(&self.norm, x).cast(self.dtype);
        let targets = self.token_embedding.forward(targets).cast(self.dtype);
        cross_entropy(self.logits(x.clone()), x, targets)
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// An empty cache for `batch` sequences of up to `capacity` tokens, on the model's device. Flash attention stores keys and values as
    /// `storage` says.
    ///
    /// # Errors
    ///
    /// If flash attention cannot have a cache of this size.
    pub fn cache(&self, batch: usize, capacity: usize, storage: KvStorage) -> Result<Cache, AttentionError> {
        let of_block = |block: &Block| block.attention.cache(batch, capacity, storage);
        let blocks = self.blocks.iter().map(of_block).collect::<Result<_, _>>()?;
        let kind = self.blocks.first().map_or(AttentionKind::Flash, |block| block.attention.kind);
        Ok(Cache::new(blocks, kind, batch, capacity))
    }

    /// Reads new tokens of each sequence, at least one, after those in the cache, and adds them to the cache → logits after the last token of
    /// each sequence, `[batch, vocabulary]`.
    ///
    /// # Errors
    ///
    /// If the cache has no room for the tokens, or if their numbers differ and attention is not flash attention.
    ///
    /// # Panics
    ///
    /// If a sequence has no new token, or for another number of sequences than the cache's.
    pub fn next(&self, new: &[&[u32]], cache: &mut Cache) -> Result<Tensor<2>, Error> {
        let [vocabulary, _] = self.token_embedding.weight.dims();
        let new = cache.append(new, &self.token_embedding.weight.device())?;
        let mut x = self.embed(new.tokens.clone(), Some(new.positions.clone()));
        for (block, cache) in self.blocks.iter().zip(&mut cache.blocks) {
            x = block.continued(x, cache, new.seq_lens.as_ref());
        }
        let last = layer_norm(&self.norm, new.last(x)).cast(self.dtype);
        Ok(self.logits(last).narrow(2, 0, vocabulary).squeeze_dim(1))
    }

    /// `tokens [batch, context]` → output of the last block, `[batch, context, width]`.
    fn read(&self, tokens: Tensor<2, Int>, documents: Option<&Documents>) -> Tensor<3> {
        let x = self.embed(tokens, documents.map(|documents| documents.positions.clone()));
        self.blocks.iter().fold(x, |x, block| block.forward(x, documents))
    }

    /// `tokens [batch, context]` → input of the first block, `[batch, context, width]`. Without `positions [batch, context]`, they count from
    /// 0.
    pub(crate) fn embed(&self, tokens: Tensor<2, Int>, positions: Option<Tensor<2, Int>>) -> Tensor<3> {
        let ([_, context], device) = (tokens.dims(), tokens.device());
        let x = self.token_embedding.forward(tokens);
        let counted = || Tensor::arange(0..context as i64, &device).unsqueeze::<2>();
        self.dropout.forward(match &self.position_embedding {
            Some(embedding) => x + embedding.forward(positions.unwrap_or_else(counted)),
            None => x,
        })
    }

    /// Logits for the output of the last norm, `x [batch, context, width]`. The vocabulary is padded to a multiple of [`VOCABULARY_TILE`]
    /// with tokens that never occur.
    fn logits(&self, x: Tensor<3>) -> Tensor<3> {
        let table = self.token_embedding.weight.val().cast(self.dtype);
        let [vocabulary, width] = table.dims();
        let padding = vocabulary.next_multiple_of(VOCABULARY_TILE) - vocabulary;
        let device = &table.device();
        let zeros = || Tensor::zeros([padding, width], (device, DType::from(self.dtype)));
        let table = if padding > 0 { Tensor::cat(vec![table, zeros()], 0) } else { table };
        // As one matrix product: for a batch of products, Burn would sum the gradients of as many tables.
        let [batch, context, _] = x.dims();
        let logits = x.reshape([batch * context, width]).matmul(table.transpose());
        let logits = logits.reshape([batch, context, vocabulary + padding]).cast(FloatDType::F32);
        if padding == 0 {
            return logits;
        }
        let never = Tensor::<1>::full([padding], -1e30, (device, DType::F32));
        logits + Tensor::cat(vec![Tensor::zeros([vocabulary], (device, DType::F32)), never], 0).unsqueeze()
    }
}

/// Matrix products whose width is not a multiple of a tile are several times slower, and GPT-2 has 50,257 tokens.
const VOCABULARY_TILE: usize = 128;

/// `x + attention(norm(x))`, then `x + mlp(norm(x))`.
#[derive(Module, Debug)]
pub(crate) struct Block {
    attention_norm: LayerNorm,
    attention: CausalSelfAttention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: &Config, draw: &mut Draw, device: &Device) -> Self {
        Self {
            attention_norm: LayerNormConfig::new(config.width).init(device),
            attention: CausalSelfAttention::new(config, draw, device),
            mlp_norm: LayerNormConfig::new(config.width).init(device),
            mlp: Mlp::new(config, draw, device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<3>, documents: Option<&Documents>) -> Tensor<3> {
        self.around(x, |q, k, v| self.attention.attend(q, k, v, documents))
    }

    /// For new tokens after those in the cache; see [`CausalSelfAttention::attend_cached`].
    fn continued(&self, x: Tensor<3>, cache: &mut BlockCache, seq_lens: Option<&Tensor<1, Int>>) -> Tensor<3> {
        self.around(x, |q, k, v| self.attention.attend_cached(q, k, v, cache, seq_lens))
    }

    fn around(&self, x: Tensor<3>, attend: impl FnOnce(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(layer_norm(&self.attention_norm, x), attend);
        x.clone() + self.mlp.forward(layer_norm(&self.mlp_norm, x))
    }
}

#[derive(Module, Debug)]
struct CausalSelfAttention {
    /// Computes queries, keys and values in one product.
    qkv: Linear,
    projection: Linear,
    /// Attention sinks: the score of one more key for each head, whose value is 0.
    sinks: Option<Param<Tensor<1>>>,
    dropout: Dropout,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    kind: AttentionKind,
    #[module(skip)]
    alibi: bool,
    /// Number of tokens that each token sees, including itself; 0 means all before it.
    #[module(skip)]
    window: usize,
    #[module(skip)]
    dtype: FloatDType,
}

impl CausalSelfAttention {
    fn new(config: &Config, draw: &mut Draw, device: &Device) -> Self {
        Self {
            qkv: new_linear([config.width, 3 * config.width], 0.02, draw, device),
            projection: new_linear([config.width, config.width], residual_std(config), draw, device),
            sinks: config.sinks.then(|| Param::from_tensor(Tensor::zeros([config.heads], (device, DType::F32)))),
            dropout: DropoutConfig::new(config.dropout).init(),
            heads: config.heads,
            kind: config.attention,
            alibi: config.alibi,
            window: config.window,
            dtype: config.dtype.float(),
        }
    }

    /// `attend` computes attention of queries, keys and values, `[batch, heads, context, head_dim]`.
    fn forward(&self, x: Tensor<3>, attend: impl FnOnce(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>) -> Tensor<3> {
        let [batch, context, width] = x.dims();
        let qkv = linear(&self.qkv, x, self.dtype);
        // [batch, heads, context, head_dim], as views: attention takes any strides.
        let part = |index: usize| {
            let part = qkv.clone().narrow(2, index * width, width);
            part.reshape([batch, context, self.heads, width / self.heads]).swap_dims(1, 2)
        };
        let y = attend(part(0), part(1), part(2)).swap_dims(1, 2).reshape([batch, context, width]);
        self.dropout.forward(linear(&self.projection, y, self.dtype).cast(FloatDType::F32))
    }

    /// An empty cache for `batch` sequences of up to `capacity` tokens.
    fn cache(&self, batch: usize, capacity: usize, storage: KvStorage) -> Result<BlockCache, AttentionError> {
        if self.kind != AttentionKind::Flash {
            return Ok(BlockCache::Concatenated(None));
        }
        let [width, _] = self.projection.weight.dims();
        let config = KvCacheConfig::new(batch, self.heads, width / self.heads, capacity)
            .with_dtype(Some(self.dtype))
            .with_storage(Some(storage));
        let cache = config.try_init(&self.projection.weight.device())?;
        Ok(BlockCache::Preallocated(Box::new(cache)))
    }

    /// Causal attention of new tokens over all tokens so far. Keys and values are added to the cache. `seq_lens [batch]` is the number of new
    /// tokens of each sequence, if not all are.
    fn attend_cached(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        cache: &mut BlockCache,
        seq_lens: Option<&Tensor<1, Int>>,
    ) -> Tensor<4> {
        match cache {
            BlockCache::Preallocated(cache) => {
                let options = self.flash_options(&q.device()).with_seq_lens_q(seq_lens.cloned());
                flash_attention_with_kvcache(q, k, v, cache.as_mut(), &options)
            }
            BlockCache::Concatenated(cache) => {
                let (k, v) = match cache.take().map(|before| *before) {
                    Some([before_k, before_v]) => {
                        (Tensor::cat(vec![before_k, k], 2), Tensor::cat(vec![before_v, v], 2))
                    }
                    None => (k, v),
                };
                *cache = Some(Box::new([k.clone(), v.clone()]));
                self.attend(q, k, v, None)
            }
        }
    }

    /// Causal attention over `[batch, heads, context, head_dim]`, by the selected implementation. The last query sees every key, or those
    /// of its window.
    fn attend(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, documents: Option<&Documents>) -> Tensor<4> {
        let [_, _, context, head_dim] = q.dims();
        let is_causal = context > 1;
        match self.kind {
            AttentionKind::Flash => {
                let ends = documents.map(|documents| documents.ends.clone());
                let options = self.flash_options(&q.device()).with_cu_seqlens_q(ends.clone()).with_cu_seqlens_k(ends);
                flash_attention(q, k, v, &options)
            }
            AttentionKind::Burn => {
                module::attention(q, k, v, None, None, AttentionModuleOptions { is_causal, ..Default::default() })
            }
            AttentionKind::Composed => {
                let keys = k.dims()[2];
                let mut scores = q.matmul(k.transpose()) / (head_dim as f64).sqrt();
                if is_causal {
                    let (shape, before) = ([context, keys], (keys - context) as i64);
                    let hidden = Tensor::<2, Bool>::tril_mask(shape, before, &scores.device()).unsqueeze::<4>();
                    scores = scores.mask_fill(hidden, f32::NEG_INFINITY);
                }
                self.dropout.forward(softmax(scores, 3)).matmul(v)
            }
        }
    }

    fn flash_options(&self, device: &Device) -> FlashAttentionOptions {
        // Dropout applies where gradients are recorded, as in burn-nn.
        let dropout = if device.is_autodiff() { self.dropout.prob as f32 } else { 0.0 };
        let options = flash_options(self.alibi, self.window, self.heads, device).with_dropout(dropout);
        options.with_sinks(self.sinks.as_ref().map(|sinks| sinks.val()))
    }
}

fn flash_options(alibi: bool, window: usize, heads: usize, device: &Device) -> FlashAttentionOptions {
    let options = FlashAttentionOptions::new().with_causal(true).with_window_left(window.checked_sub(1));
    if alibi { options.with_alibi_slopes(AlibiSlopes::geometric(heads, device)) } else { options }
}

/// Describes the kernels that will compute attention. Returns an error if flash attention cannot compute it.
pub fn attention_plan(config: &Config, device: &Device) -> Result<String, AttentionError> {
    match config.attention {
        AttentionKind::Flash => {
            let shape = [config.batch, config.heads, config.context, config.width / config.heads];
            let q = Tensor::<4>::zeros(shape, (device, DType::from(config.dtype.float())));
            let options = flash_options(config.alibi, config.window, config.heads, device);
            // There is at least one document in each row.
            let ends = config.pack.then(|| Tensor::<1, Int>::zeros([config.batch + 1], device));
            let options = options.with_cu_seqlens_q(ends.clone()).with_cu_seqlens_k(ends);
            Ok(format!("flash: {}", plan(&q, &q, &q, &options)?))
        }
        AttentionKind::Burn => Ok("burn: burn::tensor::module::attention".to_string()),
        AttentionKind::Composed => Ok("composed: matmul, mask, softmax, matmul".to_string()),
    }
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
    dropout: Dropout,
    #[module(skip)]
    dtype: FloatDType,
}

impl Mlp {
    fn new(config: &Config, draw: &mut Draw, device: &Device) -> Self {
        Self {
            up: new_linear([config.width, 4 * config.width], 0.02, draw, device),
            down: new_linear([4 * config.width, config.width], residual_std(config), draw, device),
            dropout: DropoutConfig::new(config.dropout).init(),
            dtype: config.dtype.float(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = gelu(linear(&self.up, x, self.dtype));
        self.dropout.forward(linear(&self.down, x, self.dtype).cast(FloatDType::F32))
    }
}

/// Standard deviation of the weights whose product is added to the residual stream: smaller, since there are two such sums in a layer
/// (GPT-2).
fn residual_std(config: &Config) -> f32 {
    0.02 / (2.0 * config.layers as f32).sqrt()
}

fn new_linear(shape: [usize; 2], std: f32, draw: &mut Draw, device: &Device) -> Linear {
    let bias = Tensor::zeros([shape[1]], (device, DType::F32));
    Linear { weight: draw.matrix(shape, std, device), bias: Some(Param::from_tensor(bias)) }
}

/// Source of a new model's matrices.
enum Draw {
    /// Drawn on the host, so that a seed gives the same weights on every device.
    Normal(Box<StdRng>),
    Zeros,
}

impl Draw {
    fn matrix(&mut self, shape: [usize; 2], std: f32, device: &Device) -> Param<Tensor<2>> {
        Param::from_tensor(match self {
            Draw::Zeros => Tensor::zeros(shape, (device, DType::F32)),
            Draw::Normal(rng) => {
                let normal = Normal::new(0.0, std).expect("a standard deviation is finite");
                let values: Vec<f32> = normal.sample_iter(rng).take(shape[0] * shape[1]).collect();
                Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
            }
        })
    }
}
