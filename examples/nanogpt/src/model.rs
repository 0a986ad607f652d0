//! GPT-2 as in nanoGPT, with flash attention. Read it from top to bottom; names are nanoGPT's.
//!
//! Dropout applies on devices with autodiff, as everywhere in Burn: training records gradients, validation does not.

use burn::config::Config;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig, Embedding, Initializer, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_flash_attention::{AttentionError, AttentionPlan, FlashAttentionOptions, flash_attention, plan};

/// Sizes of a [`Gpt`].
#[derive(Config, Debug)]
pub struct GptConfig {
    /// Longest context, in tokens.
    pub block_size: usize,
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Number of attention heads.
    pub n_head: usize,
    /// Channels of the residual stream, a multiple of `n_head`.
    pub n_embd: usize,
    /// Dropout rate of embeddings, attention probabilities and the outputs that are added to the residual stream.
    pub dropout: f64,
}

impl GptConfig {
    /// The kernels that compute attention for a batch. Returns an error if there are none, for example because heads are too large.
    pub fn attention_plan(&self, batch_size: usize, device: &Device) -> Result<AttentionPlan, AttentionError> {
        let q = Tensor::zeros([batch_size, self.n_head, self.block_size, self.n_embd / self.n_head], device);
        plan(&q, &q, &q, &FlashAttentionOptions::new().with_causal(true))
    }

    /// Standard deviation of the weights whose product is added to the residual stream: smaller, since there are two such sums in a block
    /// (GPT-2).
    fn residual_std(&self) -> f64 {
        0.02 / (2.0 * self.n_layer as f64).sqrt()
    }
}

/// Random weights with the standard deviation `std`, and biases of zero.
fn linear([n_in, n_out]: [usize; 2], std: f64, device: &Device) -> Linear {
    let weight = Initializer::Normal { mean: 0.0, std }.init([n_in, n_out], device);
    Linear { weight, bias: Some(Initializer::Zeros.init([n_out], device)) }
}

/// Attention in which each token sees itself and the tokens before it.
#[derive(Module, Debug)]
pub struct CausalSelfAttention {
    /// Queries, keys and values of all heads in one product.
    pub c_attn: Linear,
    /// Projection of the heads' outputs.
    pub c_proj: Linear,
    dropout: Dropout,
    #[module(skip)]
    n_head: usize,
}

impl CausalSelfAttention {
    /// A layer with random weights.
    pub fn new(config: &GptConfig, device: &Device) -> Self {
        let n_embd = config.n_embd;
        Self {
            c_attn: linear([n_embd, 3 * n_embd], 0.02, device),
            c_proj: linear([n_embd, n_embd], config.residual_std(), device),
            dropout: DropoutConfig::new(config.dropout).init(),
            n_head: config.n_head,
        }
    }

    /// `x [batch, seq, n_embd]` → the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, n_embd] = x.dims();
        let dropout = if x.device().is_autodiff() { self.dropout.prob as f32 } else { 0.0 };
        let qkv = self.c_attn.forward(x);
        // Views [batch, n_head, seq, head_dim]: the kernels read any strides.
        let [q, k, v] = [0, 1, 2].map(|part| {
            let part = qkv.clone().narrow(2, part * n_embd, n_embd);
            part.reshape([batch, seq, self.n_head, n_embd / self.n_head]).swap_dims(1, 2)
        });
        let y = flash_attention(q, k, v, &FlashAttentionOptions::new().with_causal(true).with_dropout(dropout));
        let y = y.swap_dims(1, 2).reshape([batch, seq, n_embd]);
        self.dropout.forward(self.c_proj.forward(y))
    }
}

/// Two linear layers with a GELU between them, applied to each token separately.
#[derive(Module, Debug)]
pub struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
    dropout: Dropout,
}

impl Mlp {
    fn new(config: &GptConfig, device: &Device) -> Self {
        let n_embd = config.n_embd;
        Self {
            c_fc: linear([n_embd, 4 * n_embd], 0.02, device),
            c_proj: linear([4 * n_embd, n_embd], config.residual_std(), device),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.dropout.forward(self.c_proj.forward(gelu(self.c_fc.forward(x))))
    }
}

/// Attention and MLP, each of which reads the normalised residual stream and adds to it.
#[derive(Module, Debug)]
pub struct Block {
    ln_1: LayerNorm,
    attn: CausalSelfAttention,
    ln_2: LayerNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: &GptConfig, device: &Device) -> Self {
        Self {
            ln_1: LayerNormConfig::new(config.n_embd).init(device),
            attn: CausalSelfAttention::new(config, device),
            ln_2: LayerNormConfig::new(config.n_embd).init(device),
            mlp: Mlp::new(config, device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attn.forward(self.ln_1.forward(x));
        x.clone() + self.mlp.forward(self.ln_2.forward(x))
    }
}

/// The language model.
#[derive(Module, Debug)]
pub struct Gpt {
    /// Token embeddings, also the weights of the head.
    wte: Embedding,
    /// Position embeddings.
    wpe: Embedding,
    dropout: Dropout,
    h: Vec<Block>,
    ln_f: LayerNorm,
}

impl Gpt {
    /// A model with random weights.
    pub fn new(config: &GptConfig, device: &Device) -> Self {
        let weight = Initializer::Normal { mean: 0.0, std: 0.02 };
        Self {
            wte: Embedding { weight: weight.init([config.vocab_size, config.n_embd], device) },
            wpe: Embedding { weight: weight.init([config.block_size, config.n_embd], device) },
            dropout: DropoutConfig::new(config.dropout).init(),
            h: (0..config.n_layer).map(|_| Block::new(config, device)).collect(),
            ln_f: LayerNormConfig::new(config.n_embd).init(device),
        }
    }

    /// `idx [batch, seq]` → logits of each next token, `[batch, seq, vocab_size]`.
    pub fn forward(&self, idx: Tensor<2, Int>) -> Tensor<3> {
        let [batch, seq] = idx.dims();
        let pos = Tensor::arange(0..seq as i64, &idx.device()).unsqueeze();
        let x = self.dropout.forward(self.wte.forward(idx) + self.wpe.forward(pos));
        let x = self.ln_f.forward(self.h.iter().fold(x, |x, block| block.forward(x)));
        // The head as one matrix product: for a batch of products, Burn would sum the gradients of as many tables.
        let logits = x.flatten::<2>(0, 1).matmul(self.wte.weight.val().transpose());
        let vocab_size = logits.dims()[1];
        logits.reshape([batch, seq, vocab_size])
    }

    /// Logits, and the mean cross-entropy of predicting `targets [batch, seq]`, in nats per token.
    pub fn forward_loss(&self, idx: Tensor<2, Int>, targets: Tensor<2, Int>) -> (Tensor<3>, Tensor<1>) {
        let logits = self.forward(idx);
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = loss.forward(logits.clone().flatten(0, 1), targets.flatten(0, 1));
        (logits, loss)
    }

    /// Appends `max_new_tokens` to `idx [batch, seq]`, each drawn from the model's prediction.
    pub fn generate(&self, mut idx: Tensor<2, Int>, max_new_tokens: usize, temperature: f64) -> Tensor<2, Int> {
        let block_size = self.wpe.weight.dims()[0];
        for _ in 0..max_new_tokens {
            let [batch, seq] = idx.dims();
            let context = seq.min(block_size);
            let logits = self.forward(idx.clone().narrow(1, seq - context, context));
            let logits = logits.narrow(1, context - 1, 1).reshape([batch as i32, -1]) / temperature;
            // The index of the largest sum of a logit and Gumbel noise, −ln(−ln u), is a sample from the softmax.
            let u = logits.random_like(Distribution::Uniform(1e-6, 1.0 - 1e-6));
            let next: Tensor<2, Int> = (logits - u.log().neg().log()).argmax(1);
            idx = Tensor::cat(vec![idx, next], 1);
        }
        idx
    }
}
