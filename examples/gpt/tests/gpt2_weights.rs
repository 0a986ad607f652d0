//! GPT-2's weights in Hugging Face's layout: what the model computes with them, beside the same computed here in f64.
#![cfg(all(feature = "flex", unix))]

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use gpt::config::{Args, Config};
use gpt::device;
use gpt::model::{Cache, Gpt};
use gpt::tokenizer::Tokenizer;
use gpt::weights::Weights;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Normal};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const WIDTH: usize = 16;
const CONTEXT: usize = 12;
/// More than bytes, and no multiple of anything that a product of matrices likes.
const VOCABULARY: usize = 300;

/// A GPT-2 in f64, by its file's names; shapes are the file's.
#[derive(Clone)]
struct Reference(BTreeMap<String, (Vec<usize>, Vec<f64>)>);

type Rows = Vec<Vec<f64>>;

impl Reference {
    fn random(seed: u64) -> Self {
        let mut shapes = vec![
            ("wte.weight".to_string(), vec![VOCABULARY, WIDTH]),
            ("wpe.weight".to_string(), vec![CONTEXT, WIDTH]),
            ("ln_f.weight".to_string(), vec![WIDTH]),
            ("ln_f.bias".to_string(), vec![WIDTH]),
        ];
        for layer in 0..LAYERS {
            for (name, shape) in [
                ("ln_1.weight", vec![WIDTH]),
                ("ln_1.bias", vec![WIDTH]),
                ("attn.c_attn.weight", vec![WIDTH, 3 * WIDTH]),
                ("attn.c_attn.bias", vec![3 * WIDTH]),
                ("attn.c_proj.weight", vec![WIDTH, WIDTH]),
                ("attn.c_proj.bias", vec![WIDTH]),
                ("ln_2.weight", vec![WIDTH]),
                ("ln_2.bias", vec![WIDTH]),
                ("mlp.c_fc.weight", vec![WIDTH, 4 * WIDTH]),
                ("mlp.c_fc.bias", vec![4 * WIDTH]),
                ("mlp.c_proj.weight", vec![4 * WIDTH, WIDTH]),
                ("mlp.c_proj.bias", vec![WIDTH]),
            ] {
                shapes.push((format!("h.{layer}.{name}"), shape));
            }
        }
        let rng = &mut StdRng::seed_from_u64(seed);
        let tensor = |(name, shape): (String, Vec<usize>)| {
            // Large enough that every part of the model counts: scores, the bend of GELU, the norms.
            let (mean, std) = match name.as_str() {
                name if name.contains("ln_") && name.ends_with("weight") => (1.0, 0.3),
                _ if shape.len() == 2 => (0.0, 0.4),
                _ => (0.0, 0.2),
            };
            let normal = Normal::new(mean, std).unwrap();
            // As f32 holds them: the file's values are those of this model.
            let values = (0..shape.iter().product()).map(|_| f64::from(normal.sample(&mut *rng) as f32)).collect();
            (name, (shape, values))
        };
        Self(shapes.into_iter().map(tensor).collect())
    }

    /// Writes the file, each name after `prefix`, with what real files hold beside the weights.
    fn save(&self, path: &Path, prefix: &str) {
        let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = self
            .0
            .iter()
            .map(|(name, (shape, values))| {
                let bytes = values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
                (format!("{prefix}{name}"), shape.clone(), bytes)
            })
            .collect();
        for layer in 0..LAYERS {
            let ones = vec![1.0f32; CONTEXT * CONTEXT].into_iter().flat_map(f32::to_le_bytes).collect();
            tensors.push((format!("{prefix}h.{layer}.attn.bias"), vec![1, 1, CONTEXT, CONTEXT], ones));
        }
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn get(&self, name: &str) -> &[f64] {
        &self.0[name].1
    }

    /// `x · weight + bias`, the weight `[inputs, outputs]`.
    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let (weight, bias) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let row = |x: &Vec<f64>| {
            let column = |(column, bias): (usize, &f64)| {
                bias + x.iter().enumerate().map(|(row, x)| x * weight[row * bias_len(weight, x_len(x, &[]), row, column)]).sum::<f64>()
            };
            bias.iter().enumerate().map(column).collect()
        };
        x.iter().map(row).collect()
    }
}
