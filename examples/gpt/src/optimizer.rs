//! AdamW as in nanoGPT: weight decay of matrices only, and gradients clipped by their norm over all parameters.
//!
//! Burn's own optimizers clip each parameter separately, and load their state to the default device, which may not exist. Here the moments
//! are saved, loaded and moved as modules of the model's shape.

use crate::config::Config;
use crate::error::Error;
use crate::model::Gpt;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Device, FloatDType, Tensor};

const EPSILON: f64 = 1e-8;

/// The optimizer and its state.
pub struct AdamW {
    /// First moments, by parameter.
    first: GradientsParams,
    /// Second moments, by parameter.
    second: GradientsParams,
    /// Number of steps taken, for the bias correction of the moments.
    pub updates: usize,
    /// Loss scale, only for f16.
    pub loss_scale: Option<LossScale>,
}

impl AdamW {
    pub fn new(model: &Gpt, config: &Config) -> Self {
        let loss_scale = (config.dtype.float() == FloatDType::F16).then(LossScale::default);
        Self { first: collect(model, true), second: collect(model, true), updates: 0, loss_scale }
    }

    /// A copy of the state on another device, for the model's copy there.
    pub fn copy(&self, model: &Gpt, device: &Device) -> Self {
        let moved = |moment| collect(&model.valid().map(&mut Replace { moment }).to_device(device), false);
        Self {
            first: moved(&self.first),
            second: moved(&self.second),
            updates: self.updates,
            loss_scale: self.loss_scale.clone(),
        }
    }

    /// The moments, for a checkpoint.
    pub fn records(&self, model: &Gpt) -> [ModuleRecord; 2] {
        [&self.first, &self.second].map(|moment| model.valid().map(&mut Replace { moment }).into_record())
    }

    /// Loads the moments from a checkpoint.
    pub fn load(&mut self, model: &Gpt, [first, second]: [ModuleRecord; 2]) -> Result<(), RecordError> {
        self.first = collect(&model.valid().try_load_record(first)?, false);
        self.second = collect(&model.valid().try_load_record(second)?, false);
        Ok(())
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
        self.updates += 1;
        Ok(model.map(&mut Update {
            optimizer: self,
            gradients,
            factor: factor / scale,
            learning_rate,
            config,
            path: Vec::new(),
        }))
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
    path: Vec<String>,
}

impl ModuleMapper for Update<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let Some(gradient) = self.gradients.remove::<D>(id) else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let gradient = gradient * self.factor.clone().unsqueeze();
        let Config { beta1, beta2, weight_decay, .. } = *self.config;
        let optimizer = &mut *self.optimizer;
        let moment = |moments: &mut GradientsParams| moments.remove::<D>(id).expect("every parameter has its moments");

        let m = moment(&mut optimizer.first) * beta1 + gradient.clone() * (1.0 - beta1);
        let v = moment(&mut optimizer.second) * beta2 + gradient.square() * (1.0 - beta2);
        let correction = |beta: f64| 1.0 - beta.powf(optimizer.updates as f64);
        let update = (m.clone() / correction(beta1)) / ((v.clone() / correction(beta2)).sqrt() + EPSILON);
        optimizer.first.register(id, m);
        optimizer.second.register(id, v);

        // Norms and biases are vectors; embeddings are tables of vectors.
        let is_embedding = self.path.iter().any(|name| name.ends_with("embedding"));
        let decay = if D == 2 && !is_embedding { weight_decay } else { 0.0 };
        let distributed = tensor.is_distributed();
        let value = tensor.inner() * (1.0 - self.learning_rate * decay) - update * self.learning_rate;
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

/// Values of a module by parameter, or zeros of the same shapes.
fn collect(module: &Gpt, zeros: bool) -> GradientsParams {
    struct Collect(GradientsParams, bool);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val().inner();
            self.0.register(param.id, if self.1 { value.zeros_like() } else { value });
        }
    }
    let mut collect = Collect(GradientsParams::new(), zeros);
    module.visit(&mut collect);
    collect.0
}

/// Replaces each parameter by its moment.
struct Replace<'a> {
    moment: &'a GradientsParams,
}

impl ModuleMapper for Replace<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(id, self.moment.get(id).unwrap_or(value), mapper)
    }
}
