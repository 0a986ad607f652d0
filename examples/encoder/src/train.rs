//! Training of a classifier.

use crate::data::{Batch, Data};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

/// Sizes of a classifier.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sizes {
    /// Size of a token's vector.
    pub d_model: usize,
    /// Number of attention heads.
    pub n_heads: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Most tokens of a text.
    pub max_len: usize,
    /// Number of classes.
    pub classes: usize,
}

/// A model that classifies texts.
pub trait Classifier: Module {
    /// A model with new parameters.
    fn new(sizes: &Sizes, device: &Device) -> Self;

    /// Logits of the classes, `[texts, classes]`.
    fn logits(&self, batch: &Batch, device: &Device) -> Tensor<2>;
}

/// A classifier with its optimizer.
pub struct Trainer<C: Classifier> {
    /// The model.
    pub model: C,
    optimizer: ModuleOptimizer,
    learning_rate: f64,
    device: Device,
}

impl<C: Classifier> Trainer<C> {
    /// Trains this model, which is on a device with autodiff.
    pub fn new(model: C, learning_rate: f64, device: Device) -> Self {
        Trainer { model, optimizer: AdamWConfig::new().build().into(), learning_rate, device }
    }

    /// One step. Returns the mean loss of the texts before it, which is still on the device.
    pub fn step(&mut self, batch: &Batch) -> Tensor<1> {
        let classes = Tensor::<1, Int>::from_data(batch.classes.as_slice(), &self.device);
        let logits = self.model.logits(batch, &self.device);
        let loss = CrossEntropyLossConfig::new().init(&self.device).forward(logits, classes);
        let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        self.model = self.optimizer.step(self.learning_rate, self.model.clone(), gradients);
        loss.inner()
    }

    /// The rate of texts that are classified correctly, of `batches` batches of the texts for validation.
    pub fn accuracy(&self, data: &Data, texts: usize, batches: u64) -> f32 {
        let device = self.device.clone().inner();
        let model = self.model.valid();
        let correct = (0..batches).map(|nth| {
            let batch = data.batch(texts, nth, true);
            let classes = Tensor::<1, Int>::from_data(batch.classes.as_slice(), &device);
            let found = model.logits(&batch, &device).argmax(1).reshape([texts]);
            found.equal(classes).int().sum().into_scalar::<i64>()
        });
        correct.sum::<i64>() as f32 / (texts as u64 * batches) as f32
    }
}
