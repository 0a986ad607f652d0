//! GPT-2, as in nanoGPT: read from top to bottom.
//!
//! Shapes: `batch` windows of `context` tokens, `width` channels, `heads` heads of `head_dim = width / heads`.
//! Master weights, the residual stream, norms and the loss are f32. With a half-precision dtype, matrix products and attention are computed
//! in that dtype, and their operands are cast to it.

use crate::config::{AttentionKind, Config};
use crate::data::{Batch, Documents, Stream, rng};
use crate::layers::{cross_entropy, gelu, layer_norm, linear};
use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::activation::softmax;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData, module};
use burn_flash_attention::{AlibiSlopes, AttentionError, FlashAttentionOptions, flash_attention, plan};
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
        let x = layer_norm(&self.norm, self.read(tokens, None, None)).cast(self.dtype);
        self.logits(x).narrow(2, 0, vocabulary)
    }

    /// Mean cross-entropy of a batch's targets, in nats per token.
    pub fn loss(&self, batch: &Batch) -> Tensor<1> {
        let x = self.read(batch.tokens.clone(), None, batch.documents.as_ref());
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

    /// Continues after the tokens in the cache: `tokens [batch, new]`, which are added to the cache → logits after the last token, `[batch,
    /// vocabulary]`. There must be one new token, or no tokens in the cache.
    pub fn next(&self, tokens: Tensor<2, Int>, cache: &mut Cache) -> Tensor<2> {
        let vocabulary = self.token_embedding.weight.dims()[0];
        let [_, new] = tokens.dims();
        let last = self.read(tokens, Some(cache), None).narrow(1, new - 1, 1);
        self.logits(layer_norm(&self.norm, last).cast(self.dtype)).narrow(2, 0, vocabulary).squeeze_dim(1)
    }

    /// `tokens [batch, new]` → output of the last block, `[batch, new, width]`.
    fn read(&self, tokens: Tensor<2, Int>, cache: Option<&mut Cache>, documents: Option<&Documents>) -> Tensor<3> {
        let new = tokens.dims()[1];
        let x = self.embed(tokens, cache.as_ref().map_or(0, |cache| cache.len), documents);
        match cache {
            None => self.blocks.iter().fold(x, |x, block| block.forward(x, None, documents)),
            Some(cache) => {
                cache.len += new;
                cache.layers.resize(self.blocks.len(), None);
                let mut layers = cache.layers.iter_mut();
                self.blocks.iter().fold(x, |x, block| block.forward(x, layers.next(), documents))
            }
        }
    }

    /// `tokens [batch, new]` → input of the first block, `[batch, new, width]`. Positions count from `first`, or within the documents.
    pub(crate) fn embed(&self, tokens: Tensor<2, Int>, first: usize, documents: Option<&Documents>) -> Tensor<3> {
        let positions = first as i64..(first + tokens.dims()[1]) as i64;
        let positions = match documents {
            Some(documents) => documents.positions.clone(),
            None => Tensor::arange(positions, &tokens.device()).unsqueeze::<2>(),
        };
        let x = self.token_embedding.forward(tokens);
        self.dropout.forward(match &self.position_embedding {
            Some(embedding) => x + embedding.forward(positions),
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

/// Cache of the tokens that a model has read: their keys and values, `[batch, heads, tokens, head_dim]` in each layer.
#[derive(Default)]
pub struct Cache {
    layers: Vec<Option<[Tensor<4>; 2]>>,
    len: usize,
}

impl Cache {
    /// Number of tokens read.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token has been read.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

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

    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        cache: Option<&mut Option<[Tensor<4>; 2]>>,
        documents: Option<&Documents>,
    ) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(layer_norm(&self.attention_norm, x), cache, documents);
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

    fn forward(
        &self,
        x: Tensor<3>,
        cache: Option<&mut Option<[Tensor<4>; 2]>>,
        documents: Option<&Documents>,
    ) -> Tensor<3> {
        let [batch, context, width] = x.dims();
        let qkv = linear(&self.qkv, x, self.dtype);
        // [batch, heads, context, head_dim], as views: attention takes any strides.
        let part = |index: usize| {
            let part = qkv.clone().narrow(2, index * width, width);
            part.reshape([batch, context, self.heads, width / self.heads]).swap_dims(1, 2)
        };
        let (mut k, mut v) = (part(1), part(2));
        if let Some(cache) = cache {
            if let Some([before_k, before_v]) = cache.take() {
                (k, v) = (Tensor::cat(vec![before_k, k], 2), Tensor::cat(vec![before_v, v], 2));
            }
            *cache = Some([k.clone(), v.clone()]);
        }
        let y = self.attend(part(0), k, v, documents);
        let y = y.swap_dims(1, 2).reshape([batch, context, width]);
        self.dropout.forward(linear(&self.projection, y, self.dtype).cast(FloatDType::F32))
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
                let mut scores = q.matmul(k.transpose()) / (head_dim as f64).sqrt();
                if is_causal {
                    let hidden = Tensor::<2, Bool>::tril_mask([context, context], 0, &scores.device()).unsqueeze::<4>();
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
