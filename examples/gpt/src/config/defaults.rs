//! Defaults for a device or for loaded weights, used where no flag is given.

use super::{AttentionKind, Config, Dtype, ModelShape};
use crate::device::{Found, Strength};
use crate::tokenizer::Tokenizer;

/// nanoGPT's character model on a GPU.
impl Default for Config {
    fn default() -> Self {
        Self {
            device: "auto".to_string(),
            devices: Vec::new(),
            data: None,
            tokenizer: Tokenizer::Bytes,
            weights: None,
            attention: AttentionKind::Flash,
            dtype: Dtype::F32,
            layers: 6,
            heads: 6,
            width: 384,
            context: 256,
            alibi: false,
            sinks: false,
            window: 0,
            pack: false,
            vocabulary: Tokenizer::Bytes.vocabulary(),
            batch: 64,
            grad_accum: 1,
            checkpointing: false,
            steps: 5000,
            lr: 1e-3,
            min_lr: 1e-4,
            warmup: 100,
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            grad_clip: 1.0,
            dropout: 0.2,
            seed: 1337,
            eval_interval: 250,
            eval_batches: 200,
            sample_tokens: 500,
        }
    }
}

impl Config {
    /// nanoGPT's character model on a discrete GPU, and smaller models where that would take a day.
    pub fn suited_to(found: &Found) -> Self {
        let gpu = Self::default();
        match found.strength {
            Strength::Discrete => gpu,
            Strength::Integrated => Self {
                layers: 4,
                heads: 4,
                width: 256,
                context: 128,
                batch: 32,
                steps: 2000,
                dropout: 0.0,
                eval_batches: 50,
                ..gpu
            },
            Strength::Cpu => Self {
                layers: 4,
                heads: 4,
                width: 128,
                context: 64,
                batch: 12,
                steps: 300,
                warmup: 30,
                dropout: 0.0,
                eval_interval: 50,
                eval_batches: 20,
                sample_tokens: 300,
                ..gpu
            },
            Strength::Software => Self {
                layers: 2,
                heads: 2,
                width: 64,
                context: 32,
                batch: 8,
                steps: 100,
                warmup: 10,
                dropout: 0.0,
                eval_interval: 50,
                eval_batches: 5,
                sample_tokens: 100,
                ..gpu
            },
        }
    }

    /// Finetuning as in nanoGPT, with fewer steps: pretrained weights are large, and should change little.
    pub fn suited_to_weights(self, shape: ModelShape) -> Self {
        let ModelShape { layers, heads, width, context, vocabulary } = shape;
        Self {
            tokenizer: Tokenizer::Gpt2,
            layers,
            heads,
            width,
            context,
            vocabulary,
            batch: 1,
            grad_accum: 32,
            steps: 20,
            lr: 3e-5,
            min_lr: 3e-6,
            warmup: 2,
            dropout: 0.0,
            eval_interval: 5,
            eval_batches: 40,
            ..self
        }
    }
}
