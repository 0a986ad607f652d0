//! Serialization of options: numbers serialize, tensors and functions are errors.

use super::{FlashAttentionOptions, OfTensor};
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use flash_attention_kernels::AttentionOptions;
use serde::{Deserialize, Deserializer, Serialize, Serializer, ser::Error};

impl Serialize for FlashAttentionOptions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let functions = [
            ("score", self.score_mod.map(|function| format!("{function:?}"))),
            ("mask", self.mask_mod.map(|function| format!("{function:?}"))),
        ];
        for (of, function) in functions {
            if let Some(name) = function {
                return Err(S::Error::custom(format!(
                    "{of}_mod is {name}, a function, which options do not serialize; set it again with with_{of}_mod"
                )));
            }
        }
        if let Some((field, shape)) = self.tensor_shapes().into_iter().next() {
            // A function's tensors are set with the function.
            let set = field.split_once("_tensors").map_or(field.into(), |(of, _)| format!("{of}_mod"));
            return Err(S::Error::custom(format!(
                "{field} is a tensor of shape {shape:?}, which options do not serialize; store it separately and set it again with \
                 with_{set}"
            )));
        }
        self.numbers().serialize(serializer)
    }
}

impl FlashAttentionOptions {
    /// The tensors among the options: the argument that errors name, and the shape of each.
    fn tensor_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let temperature = self.temperature.as_ref().map(|tensor| ("temperature", tensor.dims().to_vec()));
        let tensors = self.tensors(&ShapeOf);
        temperature.into_iter().chain(tensors.named().map(|(field, shape)| (field, shape.clone()))).collect()
    }

    /// The arguments of the tensors among the options.
    pub(crate) fn tensor_names(&self) -> Vec<&'static str> {
        self.tensor_shapes().into_iter().map(|(name, _)| name).collect()
    }
}

/// The shape of a tensor.
struct ShapeOf;

impl OfTensor<Vec<usize>> for ShapeOf {
    fn of<const D: usize, K: Basic>(&self, tensor: &Tensor<D, K>) -> Vec<usize> {
        tensor.dims().to_vec()
    }
}

impl<'de> Deserialize<'de> for FlashAttentionOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        AttentionOptions::deserialize(deserializer).map(Self::from)
    }
}
