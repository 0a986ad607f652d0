//! Small checkpoints, with what transformers computes from them. Devices are those of the tests of `burn-flash-attention`, with its
//! environment variables.
#![allow(dead_code, unused_imports, reason = "each test program uses a part of it")]

#[path = "../../../../crates/burn-flash-attention/tests/common/devices.rs"]
mod devices;
#[path = "../../../../crates/flash-attention-kernels/tests/kernels/quick.rs"]
mod quick;

pub use devices::*;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flash_attention::FlashDecoder;
use llama::checkpoint::Checkpoint;
use safetensors::SafeTensors;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Folders of checkpoints.
pub const CHECKPOINTS: [&str; 8] = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss"];

/// The folder of a checkpoint.
pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints").join(name)
}

/// The decoder of a checkpoint.
pub fn model(name: &str, device: &Device, dtype: DType) -> FlashDecoder {
    Checkpoint::open(&folder(name)).unwrap().model(device, dtype).unwrap()
}

/// A copy of a checkpoint, to be damaged.
pub fn copy(name: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(folder(name).join(file), directory.path().join(file)).unwrap();
    }
    directory
}

/// Writes a `tokenizer.json` of words `w3` to `w95`, which puts `<s>` before a text, and a chat template.
pub fn add_tokenizer(folder: &Path) {
    let special = ["<unk>", "<s>", "</s>"];
    let words = special.into_iter().map(str::to_string).chain((3..96).map(|id| format!("w{id}")));
    let vocab: serde_json::Map<_, _> = words.enumerate().map(|(id, word)| (word, json!(id))).collect();
    let added = special.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    let (begin, sequence) =
        (json!({"SpecialToken": {"id": "<s>", "type_id": 0}}), json!({"Sequence": {"id": "A", "type_id": 0}}));
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, sequence],
            "pair": [begin, sequence],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{{ bos_token }}{% for message in messages %}\n    {%- if message['role'] == 'system' %} w9 {% endif %}\n \
        {{ message.content.strip() }}{% endfor %}{% if add_generation_prompt %} w4{% endif %}";
    let config = json!({"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"});
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

/// What transformers computes from a checkpoint.
pub struct Expected(Vec<u8>);

impl Expected {
    pub fn of(name: &str) -> Self {
        Expected(std::fs::read(folder(name).join("expected.safetensors")).unwrap())
    }

    fn words(&self, name: &str) -> (Vec<usize>, Vec<[u8; 4]>) {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        (view.shape().to_vec(), view.data().chunks_exact(4).map(|word| word.try_into().unwrap()).collect())
    }

    pub fn integers(&self, name: &str) -> ([usize; 2], Vec<i32>) {
        let (shape, words) = self.words(name);
        (shape.try_into().unwrap(), words.into_iter().map(i32::from_le_bytes).collect())
    }

    pub fn tokens(&self, device: &Device) -> Tensor<2, Int> {
        let (shape, values) = self.integers("tokens");
        Tensor::from_data(TensorData::new(values, shape), device)
    }

    pub fn floats<const D: usize>(&self, name: &str, device: &Device) -> Tensor<D> {
        let (shape, words) = self.words(name);
        let values: Vec<f32> = words.into_iter().map(f32::from_le_bytes).collect();
        Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
    }

    /// The elements of a tensor of any rank.
    pub fn flat(&self, name: &str, device: &Device) -> Tensor<1> {
        let values: Vec<f32> = self.words(name).1.into_iter().map(f32::from_le_bytes).collect();
        Tensor::from_data(values.as_slice(), (device, DType::F32))
    }

    /// Number of tensors whose names begin so.
    pub fn count(&self, prefix: &str) -> usize {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.names().iter().filter(|name| name.starts_with(prefix)).count()
    }
}
