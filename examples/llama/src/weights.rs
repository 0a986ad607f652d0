//! Files of weights, mapped into memory: `model.safetensors`, or the shards of `model.safetensors.index.json`.

use crate::error::Error;
use crate::families::Family;
use crate::parameters::{Slot, slots};
use burn::module::Param;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flash_attention::FlashDecoder;
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// What a damaged file should have been.
const KIND: &str = "safetensors file";

/// Tensors of one safetensors file or of several.
pub struct Weights {
    /// The file, or the folder of several.
    path: PathBuf,
    files: Vec<Mapped>,
    /// The file that holds a tensor, and where.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
}

/// A file in memory.
struct Mapped {
    path: PathBuf,
    bytes: Mmap,
    /// Where elements begin.
    start: usize,
}

/// `model.safetensors.index.json`: the file of each tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Opens the weights of a folder.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] and [`Error::Damaged`] name the file; [`Error::MissingTensor`] if a shard lacks a tensor of the index.
    pub fn of_folder(folder: &Path) -> Result<Self, Error> {
        let index_path = folder.join("model.safetensors.index.json");
        let single = folder.join("model.safetensors");
        if single.exists() || !index_path.exists() {
            return Self::of_files(single.clone(), [single]);
        }
        let index = fs::read(&index_path).map_err(Error::io(&index_path))?;
        let index: Index = serde_json::from_slice(&index).map_err(Error::damaged(&index_path, "index of shards"))?;
        let names: BTreeSet<_> = index.weight_map.values().collect();
        let weights = Self::of_files(folder.to_path_buf(), names.into_iter().map(|name| folder.join(name)))?;
        match index.weight_map.into_iter().find(|(name, file)| weights.file_of(name) != Some(&folder.join(file))) {
            Some((name, file)) => Err(Error::MissingTensor { path: folder.join(file), name }),
            None => Ok(weights),
        }
    }

    /// Opens one file.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] and [`Error::Damaged`].
    pub fn of_file(path: &Path) -> Result<Self, Error> {
        Self::of_files(path.to_path_buf(), [path.to_path_buf()])
    }

    fn of_files(path: PathBuf, paths: impl IntoIterator<Item = PathBuf>) -> Result<Self, Error> {
        let mut weights = Weights { path, files: Vec::new(), tensors: BTreeMap::new() };
        for path in paths {
            let file = File::open(&path).map_err(Error::io(&path))?;
            // SAFETY: the bytes are undefined if another process writes to the file meanwhile, which no reader of weights can exclude. They
            // are only read as numbers, and every bit pattern is one.
            let bytes = unsafe { Mmap::map(&file) }.map_err(Error::io(&path))?;
            let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(Error::damaged(&path, KIND))?;
            let nth = weights.files.len();
            weights.tensors.extend(metadata.tensors().into_iter().map(|(name, info)| (name, (nth, info.clone()))));
            // The length of the header, in eight bytes, comes first.
            weights.files.push(Mapped { path, bytes, start: header + 8 });
        }
        Ok(weights)
    }

    /// The file that holds a tensor.
    fn file_of(&self, name: &str) -> Option<&PathBuf> {
        self.tensors.get(name).map(|(file, _)| &self.files[*file].path)
    }

    /// A tensor of this shape, as it is stored.
    pub(crate) fn tensor(&self, name: &str, expected: &[usize]) -> Result<TensorData, Error> {
        let missing = || Error::MissingTensor { path: self.path.clone(), name: name.to_string() };
        let (file, info) = self.tensors.get(name).ok_or_else(missing)?;
        let Mapped { path, bytes, start } = &self.files[*file];
        let (path, name) = (path.clone(), name.to_string());
        if info.shape != expected {
            return Err(Error::Shape { path, name, shape: info.shape.clone(), expected: expected.to_vec() });
        }
        let dtype = match info.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(Error::ElementType { path, name, dtype: other.to_string() }),
        };
        let (begin, end) = info.data_offsets;
        Ok(TensorData::from_bytes_vec(bytes[start + begin..start + end].to_vec(), info.shape.clone(), dtype))
    }

    /// Loads all parameters of a model, in this element type.
    ///
    /// # Errors
    ///
    /// [`Error::MissingTensor`], [`Error::Shape`], [`Error::ElementType`] and [`Error::UnusedTensor`].
    pub fn load(&self, model: &mut FlashDecoder, family: &Family, at: (&Device, DType)) -> Result<(), Error> {
        let tied = model.head.is_none();
        let mut used = BTreeSet::new();
        for (name, slot) in slots(model) {
            let data = self.tensor(&name, &slot.shape())?;
            used.insert(name);
            match slot {
                Slot::Linear(weight) => *weight = Param::from_tensor(placed::<2>(data, at).transpose()),
                Slot::Table(weight) => *weight = Param::from_tensor(placed(data, at)),
                Slot::Norm(weight) => *weight = Param::from_tensor(placed::<1>(data, at) + family.norm_offset),
                Slot::Vector(vector) => *vector = Param::from_tensor(placed(data, at)),
            }
        }
        // Buffers of older versions of transformers, and the embedding once more.
        let known = |name: &str| name.ends_with(".rotary_emb.inv_freq") || tied && name == "lm_head.weight";
        self.check_used(|name| used.contains(name) || known(name))
    }

    /// Checks that no tensor is left over.
    pub(crate) fn check_used(&self, is_used: impl Fn(&str) -> bool) -> Result<(), Error> {
        match self.tensors.iter().find(|(name, _)| !is_used(name)) {
            Some((name, (file, _))) => {
                Err(Error::UnusedTensor { path: self.files[*file].path.clone(), name: name.clone() })
            }
            None => Ok(()),
        }
    }
}

/// A tensor on the device, in this element type. Its memory is that of things that stay.
pub(crate) fn placed<const D: usize>(data: TensorData, (device, dtype): (&Device, DType)) -> Tensor<D> {
    device.memory_persistent_allocations(data, |data| Tensor::from_data(data, (device, dtype)))
}
