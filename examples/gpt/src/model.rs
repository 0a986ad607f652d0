//! GPT-2, as in nanoGPT: read from top to bottom.
//!
//! Shapes: `batch` windows of `context` tokens, `width` channels, `heads` heads of `head_dim = width / heads`.
//! Master weights, the residual stream, norms and the loss are f32; with a half dtype the matrix products and attention are
//! in that dtype, their operands cast on the way in.

use crate::config::{AttentionKind, Config};
use crate::data::{Stream, VOCABULARY, rng};
use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig, Embedding, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData, module};
use burn_flash_attention::{AttentionError, FlashAttentionOptions, flash_attention, plan};
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

/// The language model.
#[derive(Module, Debug)]
pub struct Gpt {
    /// Also the output head: the logit of a token is the product with its embedding.
    token_embedding: Embedding,
    position_embedding: Embedding,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
    #[module(skip)]
    dtype: FloatDType,
}

impl Gpt {
    /// A model with random weights, the same on every device.
    pub fn new(config: &Config, device: &Device) -> Self {
        let rng = &mut rng(config.seed, Stream::Weights, 0);
        let embedding = |rows, rng: &mut StdRng| Embedding { weight: normal([rows, config.width], 0.02, rng, device) };
        Self {
            token_embedding: embedding(VOCABULARY, rng),
            position_embedding: embedding(config.context, rng),
            dropout: DropoutConfig::new(config.dropout).init(),
            blocks: (0..config.layers).map(|_| Block::new(config, rng, device)).collect(),
            norm: LayerNormConfig::new(config.width).init(device),
            dtype: config.dtype.float(),
        }
    }

    /// `tokens [batch, context]` → `logits [batch, context, vocabulary]`, f32.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, context] = tokens.dims();
        let positions = Tensor::arange(0..context as i64, &tokens.device()).unsqueeze::<2>();

        let x = self.token_embedding.forward(tokens) + self.position_embedding.forward(positions);
        let x = self.dropout.forward(x);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let x = self.norm.forward(x);

        let head = self.token_embedding.weight.val().transpose().cast(self.dtype);
        x.cast(self.dtype).matmul(head.unsqueeze()).cast(FloatDType::F32)
    }

    /// The mean cross-entropy, in nats per byte, of predicting `targets [batch, context]`.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let logits = self.forward(tokens).flatten::<2>(0, 1);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets.flatten(0, 1))
    }
}

/// `x + attention(norm(x))`, then `x + mlp(norm(x))`.
#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: CausalSelfAttention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: &Config, rng: &mut StdRng, device: &Device) -> Self {
        Self {
            attention_norm: LayerNormConfig::new(config.width).init(device),
            attention: CausalSelfAttention::new(config, rng, device),
            mlp_norm: LayerNormConfig::new(config.width).init(device),
            mlp: Mlp::new(config, rng, device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x));
        x.clone() + self.mlp.forward(self.mlp_norm.forward(x))
    }
}

#[derive(Module, Debug)]
struct CausalSelfAttention {
    /// Queries, keys and values in one product.
    qkv: Linear,
    projection: Linear,
    dropout: Dropout,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    kind: AttentionKind,
    #[module(skip)]
    dtype: FloatDType,
}

impl CausalSelfAttention {
    fn new(config: &Config, rng: &mut StdRng, device: &Device) -> Self {
        Self {
            qkv: linear([config.width, 3 * config.width], 0.02, rng, device),
            projection: linear([config.width, config.width], residual_std(config), rng, device),
            dropout: DropoutConfig::new(config.dropout).init(),
            heads: config.heads,
            kind: config.attention,
            dtype: config.dtype.float(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, context, width] = x.dims();
        let qkv = apply(&self.qkv, x, self.dtype);
        // [batch, heads, context, head_dim], as views: attention takes any strides.
        let part = |index: usize| {
            let part = qkv.clone().narrow(2, index * width, width);
            part.reshape([batch, context, self.heads, width / self.heads]).swap_dims(1, 2)
        };
        let y = attention(self.kind, part(0), part(1), part(2));
        let y = y.swap_dims(1, 2).reshape([batch, context, width]);
        self.dropout.forward(apply(&self.projection, y, self.dtype).cast(FloatDType::F32))
    }
}

/// Causal attention over `[batch, heads, context, head_dim]`, in one of the ways that can be compared.
fn attention(kind: AttentionKind, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    match kind {
        AttentionKind::Flash => flash_attention(q, k, v, &flash_options()),
        AttentionKind::Burn => {
            let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
            module::attention(q, k, v, None, None, options)
        }
        AttentionKind::Composed => {
            let [_, _, context, head_dim] = q.dims();
            let hidden = Tensor::<2, Bool>::tril_mask([context, context], 0, &q.device()).unsqueeze::<4>();
            let scores = q.matmul(k.transpose()) / (head_dim as f64).sqrt();
            softmax(scores.mask_fill(hidden, f32::NEG_INFINITY), 3).matmul(v)
        }
    }
}

fn flash_options() -> FlashAttentionOptions {
    FlashAttentionOptions::new().with_causal(true)
}

/// What will compute attention, in words; an error if flash attention cannot.
pub fn attention_plan(config: &Config, device: &Device) -> Result<String, AttentionError> {
    match config.attention {
        AttentionKind::Flash => {
            let shape = [config.batch, config.heads, config.context, config.width / config.heads];
            let q = Tensor::<4>::zeros(shape, (device, DType::from(config.dtype.float())));
            Ok(format!("flash: {}", plan(&q, &q, &q, &flash_options())?))
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
    fn new(config: &Config, rng: &mut StdRng, device: &Device) -> Self {
        Self {
            up: linear([config.width, 4 * config.width], 0.02, rng, device),
            down: linear([4 * config.width, config.width], residual_std(config), rng, device),
            dropout: DropoutConfig::new(config.dropout).init(),
            dtype: config.dtype.float(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = gelu(apply(&self.up, x, self.dtype));
        self.dropout.forward(apply(&self.down, x, self.dtype).cast(FloatDType::F32))
    }
}

/// `x · weight + bias` in `dtype`, from weights kept in f32.
fn apply(layer: &Linear, x: Tensor<3>, dtype: FloatDType) -> Tensor<3> {
    let bias = layer.bias.as_ref().map(|bias| bias.val().cast(dtype));
    module::linear(x.cast(dtype), layer.weight.val().cast(dtype), bias)
}

/// What is added to the residual stream starts smaller, as there are two such sums a layer (GPT-2).
fn residual_std(config: &Config) -> f32 {
    0.02 / (2.0 * config.layers as f32).sqrt()
}

fn linear(shape: [usize; 2], std: f32, rng: &mut StdRng, device: &Device) -> Linear {
    let bias = Tensor::zeros([shape[1]], (device, DType::F32));
    Linear { weight: normal(shape, std, rng, device), bias: Some(Param::from_tensor(bias)) }
}

/// Drawn on the host, so that a seed means the same weights everywhere.
fn normal(shape: [usize; 2], std: f32, rng: &mut StdRng, device: &Device) -> Param<Tensor<2>> {
    let normal = Normal::new(0.0, std).expect("a standard deviation is finite");
    let values: Vec<f32> = normal.sample_iter(rng).take(shape[0] * shape[1]).collect();
    Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), (device, DType::F32)))
}
