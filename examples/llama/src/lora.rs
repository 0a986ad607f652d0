//! Low-rank adapters (LoRA, arXiv:2106.09685), in files with the names of the library PEFT.
//!
//! Burn composes the weight `W + alpha/rank · A·B` of each adapted layer in every step. Beside the factors, that costs a product of
//! `d_in · rank · d_out` and, in training, the memory of the composed weight and of a gradient of its size, layer by layer.

use crate::error::Error;
use crate::parameters::{Slot, slots};
use crate::weights::{Weights, placed};
use burn::module::{Lora, Module, Param};
use burn::tensor::{DType, Tensor};
use burn_flash_attention::FlashDecoder;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// `adapter_config.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AdapterConfig {
    /// `LORA`
    pub peft_type: String,
    /// Rank of the factors.
    pub r: usize,
    /// The product of the factors counts `lora_alpha / r` times.
    pub lora_alpha: f64,
    /// Names of the adapted layers, as `q_proj`.
    pub target_modules: Vec<String>,
    /// Another scale than `lora_alpha / r`, which this program does not have.
    #[serde(default)]
    pub use_rslora: bool,
    /// Magnitudes beside the factors, which this program does not have.
    #[serde(default)]
    pub use_dora: bool,
}

impl AdapterConfig {
    /// Adapters for the layers whose names begin so: `q`, `k`, `v`, `o`, `gate`, `up`, `down`.
    ///
    /// # Errors
    ///
    /// [`Error::Flag`] for a rank of 0, a scale that is not finite, and other names.
    pub fn new(rank: usize, alpha: f64, targets: &[String]) -> Result<Self, Error> {
        let wrong = |flag, value: &dyn ToString, why: &str| {
            Err(Error::Flag { flag, value: value.to_string(), why: why.to_string() })
        };
        if rank == 0 {
            return wrong("rank", &rank, "it must be at least 1");
        }
        if !alpha.is_finite() {
            return wrong("alpha", &alpha, "it must be finite");
        }
        let known = ["q", "k", "v", "o", "gate", "up", "down"];
        if let Some(target) = targets.iter().find(|target| !known.contains(&target.as_str())) {
            return wrong("targets", target, "layers are q, k, v, o, gate, up and down");
        }
        let target_modules = targets.iter().map(|target| format!("{target}_proj")).collect();
        let peft_type = "LORA".to_string();
        Ok(AdapterConfig { peft_type, r: rank, lora_alpha: alpha, target_modules, use_rslora: false, use_dora: false })
    }

    /// The name of an adapted layer in a file, if the parameter of this name is its weight.
    fn layer(&self, parameter: &str) -> Option<String> {
        let layer = parameter.strip_suffix(".weight")?;
        let own = layer.rsplit('.').next()?;
        self.target_modules.iter().any(|target| target == own).then(|| format!("base_model.model.{layer}"))
    }

    /// Freezes a model and gives its targets adapters, which change nothing at first: `B` is 0.
    pub fn attach(&self, model: FlashDecoder) -> FlashDecoder {
        let mut model = model.no_grad();
        for (name, slot) in slots(&mut model) {
            if let (Slot::Linear(weight), Some(_)) = (slot, self.layer(&name)) {
                *weight = weight.clone().apply_lora(Lora::new(self.r, self.lora_alpha));
            }
        }
        model
    }

    /// Writes the adapters of a model into a folder: `adapter_config.json` and `adapter_model.safetensors`, in f32.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] and [`Error::Damaged`] name the file, [`Error::Execution`] if the device fails.
    pub fn save(&self, model: &FlashDecoder, folder: &Path) -> Result<(), Error> {
        let mut factors = Vec::new();
        let mut model = model.clone();
        for (name, slot) in slots(&mut model) {
            let Slot::Linear(weight) = slot else { continue };
            let Some((layer, adapter)) = self.layer(&name).zip(weight.adapter()) else { continue };
            for (factor, value) in [("lora_A", &adapter.a), ("lora_B", &adapter.b)] {
                let data = value.val().transpose().try_into_data().map_err(Error::execution)?;
                factors.push((format!("{layer}.{factor}.weight"), data.convert_dtype(DType::F32)));
            }
        }
        let (config_path, path) = (folder.join("adapter_config.json"), folder.join("adapter_model.safetensors"));
        let views = factors.iter().map(|(name, data)| {
            let view = TensorView::new(Dtype::F32, data.shape().to_vec(), data.as_bytes());
            view.map(|view| (name, view)).map_err(Error::damaged(&path, "safetensors file"))
        });
        let views = views.collect::<Result<Vec<_>, _>>()?;
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
        serialize_to_file(views, None, &path).map_err(Error::damaged(&path, "place for a safetensors file"))?;
        let text = serde_json::to_string_pretty(self).map_err(Error::damaged(&config_path, "configuration"))?;
        fs::write(&config_path, text).map_err(Error::io(&config_path))
    }
}

/// Adds the adapters of a folder to the weights of a model.
///
/// # Errors
///
/// [`Error::Io`] and [`Error::Damaged`]; [`Error::Unsupported`] for other adapters than LoRA; [`Error::MissingTensor`], [`Error::Shape`],
/// [`Error::ElementType`] and [`Error::UnusedTensor`] if the adapters are not those of this model.
pub fn merge(model: &mut FlashDecoder, folder: &Path) -> Result<(), Error> {
    let path = folder.join("adapter_config.json");
    let text = fs::read(&path).map_err(Error::io(&path))?;
    let config: AdapterConfig =
        serde_json::from_slice(&text).map_err(Error::damaged(&path, "configuration of an adapter"))?;
    let unsupported = |name, value: String| {
        let why = "adapters are LoRA with the scale lora_alpha / r".to_string();
        Err(Error::Unsupported { path: path.clone(), name, value, why })
    };
    match &config {
        AdapterConfig { peft_type, .. } if peft_type != "LORA" => return unsupported("peft_type", peft_type.clone()),
        AdapterConfig { use_rslora: true, .. } => return unsupported("use_rslora", "true".to_string()),
        AdapterConfig { use_dora: true, .. } => return unsupported("use_dora", "true".to_string()),
        AdapterConfig { r: 0, .. } => return unsupported("r", "0".to_string()),
        _ => {}
    }
    let weights = Weights::of_file(&folder.join("adapter_model.safetensors"))?;
    let mut used = BTreeSet::new();
    for (name, slot) in slots(model) {
        let (Slot::Linear(weight), Some(layer)) = (slot, config.layer(&name)) else { continue };
        let base = weight.val();
        let (device, [d_in, d_out]) = (base.device(), base.dims());
        let mut factor = |factor: &str, shape: [usize; 2]| -> Result<Tensor<2>, Error> {
            let name = format!("{layer}.{factor}.weight");
            let data = weights.tensor(&name, &shape)?;
            used.insert(name);
            Ok(placed::<2>(data, (&device, DType::F32)).transpose())
        };
        let delta = factor("lora_A", [config.r, d_in])?.matmul(factor("lora_B", [d_out, config.r])?);
        let merged = base.clone().cast(DType::F32) + delta * (config.lora_alpha / config.r as f64);
        *weight = Param::from_tensor(merged.cast(base.dtype()));
    }
    weights.check_used(|name| used.contains(name))
}
