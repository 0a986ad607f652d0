//! GPT-2's weights, loaded from a file in the layout of Hugging Face's `transformers`.
//!
//! Its `Conv1D` stores weights as `[inputs, outputs]`, like Burn's `Linear`, and `c_attn` holds queries, keys and values side by side, like
//! the model's `qkv`. Nothing has to be transposed. `lm_head` is missing or equal to `wte`.

use crate::config::ModelShape;
use crate::error::Error;
use crate::model::Gpt;
use burn::store::{ModuleSnapshot, ModuleStore, SafetensorsStore, StoreTensor, bridge};
use burn::tensor::TensorData;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

/// Names of a block's tensors in GPT-2 and in the model.
const BLOCK: [(&str, &str); 12] = [
    ("ln_1.weight", "attention_norm.gamma"),
    ("ln_1.bias", "attention_norm.beta"),
    ("attn.c_attn.weight", "attention.qkv.weight"),
    ("attn.c_attn.bias", "attention.qkv.bias"),
    ("attn.c_proj.weight", "attention.projection.weight"),
    ("attn.c_proj.bias", "attention.projection.bias"),
    ("ln_2.weight", "mlp_norm.gamma"),
    ("ln_2.bias", "mlp_norm.beta"),
    ("mlp.c_fc.weight", "mlp.up.weight"),
    ("mlp.c_fc.bias", "mlp.up.bias"),
    ("mlp.c_proj.weight", "mlp.down.weight"),
    ("mlp.c_proj.bias", "mlp.down.bias"),
];

/// Channels of each head, in all sizes of GPT-2.
const HEAD_DIM: usize = 64;

/// A weights file, whose tensors and shapes have been read.
pub struct Weights {
    /// Path of the file.
    pub path: PathBuf,
    tensors: BTreeMap<String, StoreTensor>,
    /// Numbers of layers, heads, channels, positions and tokens.
    pub shape: ModelShape,
}

/// Fields of the `config.json` next to the weights that describe the model.
#[derive(Deserialize, Default)]
struct Description {
    n_head: Option<usize>,
    activation_function: Option<String>,
    layer_norm_epsilon: Option<f64>,
    scale_attn_weights: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
}

impl Weights {
    /// Reads names and shapes of the tensors. The number of heads comes from `--heads` or from the `config.json` next to the file. Without
    /// either, heads have 64 channels, as in all sizes of GPT-2.
    ///
    /// # Errors
    ///
    /// One sentence that names the file and the tensor: if the file is not a safetensors file, lacks a tensor, or has an unknown tensor or
    /// one of another shape.
    pub fn open(path: &Path, heads: Option<usize>) -> Result<Self, Error> {
        let problem = |problem: String| Error::Weights { path: path.to_path_buf(), problem };
        if !path.is_file() {
            return Err(problem("does not exist".to_string()));
        }
        let foreign = |error: &dyn Display| problem(format!("is not a readable safetensors file: {error}"));
        let mut store = SafetensorsStore::from_file(path);
        let read = store.get_all_tensors().map_err(|error| foreign(&error))?;
        let mut tensors: BTreeMap<_, _> = read
            .iter()
            .map(|(name, tensor)| (name.strip_prefix("transformer.").unwrap_or(name).to_string(), tensor.clone()))
            .collect();
        // The head equals the embedding, and causal masks are not weights.
        tensors.retain(|name, _| {
            name != "lm_head.weight" && !name.ends_with(".attn.bias") && !name.ends_with(".attn.masked_bias")
        });

        let table = |name: &str| match tensors.get(name).map(StoreTensor::shape) {
            Some(&[rows, columns]) => Ok([rows, columns]),
            Some(shape) => Err(problem(format!("holds {name} of shape {shape:?}; it must have two dimensions"))),
            None => Err(problem(format!("lacks {name}; it must hold GPT-2's weights as Hugging Face names them"))),
        };
        let ([vocabulary, width], [context, _]) = (table("wte.weight")?, table("wpe.weight")?);
        let layers = (0..).take_while(|layer| tensors.keys().any(|name| in_block(name, *layer))).count();
        let description = Description::beside(path)?;
        let heads = match (heads, description.n_head) {
            (Some(given), Some(weights)) if given != weights => {
                return Err(Error::NotTheWeights { flag: "heads", given, weights });
            }
            (given, described) => described.or(given).unwrap_or((width / HEAD_DIM).max(1)),
        };
        let weights =
            Self { path: path.to_path_buf(), tensors, shape: ModelShape { layers, heads, width, context, vocabulary } };
        weights.check()?;
        Ok(weights)
    }

    /// Checks that the file has exactly the expected tensors, with their shapes.
    fn check(&self) -> Result<(), Error> {
        let problem = |problem: String| Err(Error::Weights { path: self.path.clone(), problem });
        let names = self.names();
        for (name, _) in &names {
            let expected = self.expected(name);
            match self.tensors.get(name).map(StoreTensor::shape) {
                Some(shape) if shape == expected => {}
                Some(shape) => return problem(format!("holds {name} of shape {shape:?}; it must be {expected:?}")),
                None => return problem(format!("lacks {name}")),
            }
        }
        match self.tensors.keys().find(|name| names.iter().all(|(known, _)| known != *name)) {
            Some(name) => problem(format!("holds {name}, which GPT-2 does not have")),
            None => Ok(()),
        }
    }

    /// Names of all tensors in the file and in the model.
    fn names(&self) -> Vec<(String, String)> {
        let outer = [
            ("wte.weight", "token_embedding.weight"),
            ("wpe.weight", "position_embedding.weight"),
            ("ln_f.weight", "norm.gamma"),
            ("ln_f.bias", "norm.beta"),
        ];
        let outer = outer.into_iter().map(|(theirs, ours)| (theirs.to_string(), ours.to_string()));
        let block = |layer| {
            BLOCK.iter().map(move |(theirs, ours)| (format!("h.{layer}.{theirs}"), format!("blocks.{layer}.{ours}")))
        };
        outer.chain((0..self.shape.layers).flat_map(block)).collect()
    }

    fn expected(&self, name: &str) -> Vec<usize> {
        let ModelShape { width, context, vocabulary, .. } = self.shape;
        let outputs = match name.rsplit_once('.').map_or(name, |(layer, _)| layer.rsplit('.').next().unwrap_or(layer)) {
            "wte" => return vec![vocabulary, width],
            "wpe" => return vec![context, width],
            "c_attn" => 3 * width,
            "c_fc" => 4 * width,
            _ => width,
        };
        let inputs = if name.contains("mlp.c_proj") { 4 * width } else { width };
        let is_matrix = name.ends_with("weight") && !name.contains("ln_");
        if is_matrix { vec![inputs, outputs] } else { vec![outputs] }
    }

    /// Loads the weights into the model, in f32. If the model's context is shorter than theirs, the positions beyond it are left out.
    ///
    /// # Errors
    ///
    /// If a tensor cannot be read.
    pub fn load(&self, mut model: Gpt, context: usize) -> Result<Gpt, Error> {
        let problem = |problem: String| Error::Weights { path: self.path.clone(), problem };
        let mut tensors = Vec::new();
        for (theirs, ours) in self.names() {
            let data = self.tensors[&theirs].to_data();
            let data = data.map_err(|error| problem(format!("holds {theirs}, which cannot be read: {error}")))?;
            let mut data = data.convert::<f32>();
            if theirs == "wpe.weight" {
                let values = data.iter::<f32>().take(context * self.shape.width).collect();
                data = TensorData::new::<f32, _>(values, [context, self.shape.width]);
            }
            tensors.push(bridge::from_data(data, ours, None));
        }
        let result = model.apply(tensors, None, None, false);
        match (result.errors.first(), result.missing.first(), result.unused.first()) {
            (Some(error), ..) => Err(problem(format!("does not fit the model: {error}"))),
            (_, Some((name, _)), _) | (_, _, Some(name)) => Err(problem(format!("does not fit the model's {name}"))),
            (None, None, None) => Ok(model),
        }
    }
}

fn in_block(name: &str, layer: usize) -> bool {
    name.strip_prefix("h.").and_then(|rest| rest.split_once('.')).is_some_and(|(number, _)| number == layer.to_string())
}

impl Description {
    /// Reads the description next to the weights, if there is one. Returns an error if it describes a model that this one cannot represent.
    fn beside(weights: &Path) -> Result<Self, Error> {
        let path = weights.with_file_name("config.json");
        if !path.is_file() {
            return Ok(Self::default());
        }
        let problem = |problem: String| Error::Weights { path: path.clone(), problem };
        let text = fs::read(&path).map_err(Error::io(&path))?;
        let read: Self = serde_json::from_slice(&text).map_err(|error| problem(format!("is not readable: {error}")))?;
        let ours = [
            ("activation_function", read.activation_function.as_deref().is_none_or(|name| name == "gelu_new")),
            ("layer_norm_epsilon", read.layer_norm_epsilon.is_none_or(|epsilon| epsilon == 1e-5)),
            ("scale_attn_weights", read.scale_attn_weights.unwrap_or(true)),
            ("scale_attn_by_inverse_layer_idx", !read.scale_attn_by_inverse_layer_idx.unwrap_or(false)),
        ];
        match ours.into_iter().find(|(_, ok)| !ok) {
            Some((name, _)) => Err(problem(format!("has a value of {name} that is not GPT-2's"))),
            None => Ok(read),
        }
    }
}
