//! AdamW as in nanoGPT: weight decay of matrices only, and gradients clipped by their norm over all parameters.
//!
//! Burn's AdamW updates each parameter. Burn's `ModuleOptimizer`, which would update the whole model, cannot do this:
//! - `GradientClipping::Norm` clips each parameter by its own norm.
//! - `ModuleOptimizer::load_record` loads the state to `Device::default()`, which may not exist. It skips a state that the record lacks, and
//!   panics on a tensor without a parameter's id.
//!
//! Here the moments are saved, loaded and moved as modules of the model's shape.

use crate::config::Config;
use crate::error::Error;
use crate::model::Gpt;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, AdamWState, AdaptiveMomentumState, GradientsParams, Optimizer};
use burn::tensor::{Device, FloatDType, Tensor};

/// The optimizer and its state.
pub struct AdamW {
    /// First moments, by parameter. Empty before the first update.
    first: GradientsParams,
    /// Second moments, by parameter.
    second: GradientsParams,
    /// Number of steps taken, for the bias correction of the moments.
    pub updates: usize,
    /// Loss scale, only for f16.
    pub loss_scale: Option<LossScale>,
}

impl AdamW {
    pub fn new(config: &Config) -> Self {
        let loss_scale = (config.dtype.float() == FloatDType::F16).then(LossScale::default);
        Self { first: GradientsParams::new(), second: GradientsParams::new(), updates: 0, loss_scale }
    }

    /// An optimizer with the moments of [`AdamW::moments`].
    pub fn with_moments([first, second]: &[Gpt; 2], updates: usize, loss_scale: Option<LossScale>) -> Self {
        Self { first: values(first), second: values(second), updates, loss_scale }
    }

    /// First and second moments in modules of the model's shape.
    pub fn moments(&self, model: &Gpt) -> [Gpt; 2] {
        [&self.first, &self.second].map(|moment| model.valid().map(&mut Replace { moment }))
    }

    /// A copy of the state on another device, for the model's copy there.
    pub fn copy(&self, model: &Gpt, device: &Device) -> Self {
        Self::with_moments(&self.moments(model).to_device(device), self.updates, self.loss_scale.clone())
    }

    /// Factor for the loss before the backward.
    pub fn scale(&self) -> f32 {
        self.loss_scale.as_ref().map_or(1.0, |loss_scale| loss_scale.scale)
    }

    /// One update of the model.
    ///
    /// # Errors
    ///
    /// If the device failed. Only f16 waits for the device and finds out.
    pub fn step(
        &mut self,
        model: Gpt,
        gradients: GradientsParams,
        learning_rate: f64,
        config: &Config,
    ) -> Result<Gpt, Error> {
        let scale = self.scale();
        let norm = norm(&model, &gradients);
        if let Some(loss_scale) = &mut self.loss_scale {
            let norm: f32 = norm.clone().try_into_scalar().map_err(|error| Error::device(&error))?;
            if !loss_scale.accept(norm.is_finite()) {
                return Ok(model);
            }
        }
        // The factor stays on the device, so that nothing waits for it.
        let factor = match config.grad_clip {
            0.0 => norm.ones_like(),
            clip => (norm / scale + 1e-6).recip().mul_scalar(clip).clamp_max(1.0),
        };
        let factor = factor / scale;
        let model =
            model.map(&mut Update { optimizer: self, gradients, factor, learning_rate, config, in_linear: false });
        self.updates += 1;
        Ok(model)
    }
}

/// Loss scaling: small gradients would underflow in f16, so the loss is multiplied by the largest scale without overflow.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LossScale {
    scale: f32,
    /// Number of steps since the last change of the scale.
    steady: usize,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { scale: 65536.0, steady: 0 }
    }
}

impl LossScale {
    /// Whether to apply these gradients. The scale is halved if they overflowed, and raised from time to time.
    fn accept(&mut self, finite: bool) -> bool {
        self.steady += 1;
        if !finite {
            *self = Self { scale: (self.scale / 2.0).max(1.0), steady: 0 };
        } else if self.steady == 2000 {
            *self = Self { scale: self.scale * 2.0, steady: 0 };
        }
        finite
    }
}

/// Updates the parameters one after the other.
struct Update<'a> {
    optimizer: &'a mut AdamW,
    gradients: GradientsParams,
    factor: Tensor<1>,
    learning_rate: f64,
    config: &'a Config,
    /// Whether the parameter belongs to a linear layer.
    in_linear: bool,
}

impl ModuleMapper for Update<'_> {
    fn enter_module(&mut self, _name: &str, container_type: &str) {
        self.in_linear = container_type == "Struct:Linear";
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let Some(gradient) = self.gradients.remove::<D>(id) else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let gradient = gradient * self.factor.clone().unsqueeze();
        let AdamW { first, second, updates, .. } = &mut *self.optimizer;
        let moments = first.remove(id).zip(second.remove(id));
        let state = moments.map(|(m, v)| AdamWState::new(AdaptiveMomentumState::new(*updates, m, v)));

        // Norms and biases are vectors; embeddings are tables of vectors.
        let decay = if D == 2 && self.in_linear { self.config.weight_decay } else { 0.0 };
        let rule = AdamWConfig::new()
            .with_beta_1(self.config.beta1 as f32)
            .with_beta_2(self.config.beta2 as f32)
            .with_epsilon(1e-8)
            .with_weight_decay(decay as f32)
            .build();
        let distributed = tensor.is_distributed();
        let (value, state) = rule.step(self.learning_rate, tensor.inner(), gradient, state);
        if let Some(AdamWState { momentum }) = state {
            first.register(id, momentum.moment_1);
            second.register(id, momentum.moment_2);
        }
        let value = Tensor::from_inner(value).require_grad();
        Param::from_mapped_value(id, if distributed { value.set_distributed(id) } else { value }, mapper)
    }
}

/// Norm of all gradients together.
fn norm(model: &Gpt, gradients: &GradientsParams) -> Tensor<1> {
    struct Squares<'a>(&'a GradientsParams, Vec<Tensor<1>>);
    impl ModuleVisitor for Squares<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.extend(self.0.get::<D>(param.id).map(|gradient| gradient.square().sum()));
        }
    }
    let mut squares = Squares(gradients, Vec::new());
    model.visit(&mut squares);
    Tensor::cat(squares.1, 0).sum().sqrt()
}

/// Values of a module without autodiff, by parameter.
fn values(module: &Gpt) -> GradientsParams {
    struct Values(GradientsParams);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.register(param.id, param.val());
        }
    }
    let mut values = Values(GradientsParams::new());
    module.visit(&mut values);
    values.0
}

/// Replaces each parameter by its moment, which is zero before the first update.
struct Replace<'a> {
    moment: &'a GradientsParams,
}

impl ModuleMapper for Replace<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let moment = self.moment.get(id).unwrap_or_else(|| value.zeros_like());
        Param::from_mapped_value(id, moment, mapper)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::{AdamW, values};
    use crate::config::Config;
    use crate::device;
    use crate::model::Gpt;
    use burn::module::Module;
    use burn::store::ModuleSnapshot;

    /// An update with gradients of zero is the decay alone.
    #[test]
    fn matrices_decay_and_nothing_else() {
        let found = device::choose("flex").unwrap();
        let config = Config { layers: 1, heads: 2, width: 16, weight_decay: 0.5, ..Config::suited_to(&found) };
        let model = Gpt::new(&config, &found.device.autodiff());
        let mut optimizer = AdamW::new(&config);
        let [zeros, _] = optimizer.moments(&model);
        let updated = optimizer.step(model.clone(), values(&zeros), 0.1, &config).unwrap();

        let tensors = |model: &Gpt| {
            model.valid().collect(None, None, false).into_iter().map(|tensor| {
                let (name, _, _, _, bytes) = tensor.into_parts().unwrap();
                (name, bytes.to_vec())
            })
        };
        let changed = tensors(&model).zip(tensors(&updated)).filter(|(before, after)| before != after);
        let mut names: Vec<_> = changed.map(|((name, _), _)| name).collect();
        names.sort();
        let expected = ["attention.projection", "attention.qkv", "mlp.down", "mlp.up"];
        assert_eq!(names, expected.map(|layer| format!("blocks.0.{layer}.weight")));
    }
}
