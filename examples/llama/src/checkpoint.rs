//! A folder of Hugging Face: `config.json`, weights, and the tokens that end a text.

use crate::config::{ModelConfig, Tokens};
use crate::error::Error;
use crate::weights::Weights;
use burn::tensor::{DType, Device};
use burn_flash_attention::FlashDecoder;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

/// A folder of a model, whose configuration has been read.
pub struct Checkpoint {
    /// The folder.
    pub folder: PathBuf,
    /// The model that it describes.
    pub config: ModelConfig,
}

/// `generation_config.json`, as far as this program uses it.
#[derive(Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<Tokens>,
}

impl Checkpoint {
    /// Reads the configuration of a folder. Tokens that end a text are those of `generation_config.json`, if it names any.
    ///
    /// # Errors
    ///
    /// Those of [`ModelConfig::read`].
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let mut config = ModelConfig::read(&folder.join("config.json"))?;
        let path = folder.join("generation_config.json");
        if path.exists() {
            let text = fs::read(&path).map_err(Error::io(&path))?;
            let generation: GenerationConfig =
                serde_json::from_slice(&text).map_err(Error::damaged(&path, "configuration of generation"))?;
            config.eos = generation.eos_token_id.map_or(config.eos, Tokens::into_vec);
        }
        Ok(Checkpoint { folder: folder.to_path_buf(), config })
    }

    /// The decoder with the weights of the folder, in this element type.
    ///
    /// # Errors
    ///
    /// Those of [`Weights::of_folder`] and [`Weights::load`], and of a configuration whose sizes do not fit each other.
    pub fn model(&self, device: &Device, dtype: DType) -> Result<FlashDecoder, Error> {
        let mut model = self.config.decoder.try_init(device)?;
        Weights::of_folder(&self.folder)?.load(&mut model, self.config.family, (device, dtype))?;
        Ok(model)
    }
}
