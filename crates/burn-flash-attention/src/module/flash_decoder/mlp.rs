//! Feed-forward network of a decoder layer.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation};
use serde::{Deserialize, Serialize};

/// Activation of an [`Mlp`].
///
/// ```
/// assert_eq!(burn_flash_attention::MlpActivation::default(), burn_flash_attention::MlpActivation::Silu);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MlpActivation {
    /// `x / (1 + e^−x)`: Llama, Mistral, Qwen.
    #[default]
    Silu,
    /// GELU.
    Gelu,
    /// GELU in its approximation by tanh: Gemma, GPT-2.
    GeluApproximate,
    /// `max(x, 0)`.
    Relu,
}

/// Configuration of an [`Mlp`].
///
/// ```
/// use burn_flash_attention::{MlpActivation, MlpConfig};
///
/// // Gemma 2's.
/// let config = MlpConfig::new(9216).with_activation(MlpActivation::GeluApproximate);
/// assert!(config.gated);
/// ```
#[derive(Config, Debug, PartialEq)]
#[non_exhaustive]
pub struct MlpConfig {
    /// Size of the inner vectors.
    pub d_ff: usize,
    /// Activation. Default: SiLU
    #[config(default = "MlpActivation::Silu")]
    pub activation: MlpActivation,
    /// Whether the activation of one layer is a factor of another one (GLU Variants Improve Transformer, arXiv:2002.05202). Default: true
    #[config(default = true)]
    pub gated: bool,
    /// Whether the layers have biases. Default: false
    #[config(default = false)]
    pub bias: bool,
}

/// Feed-forward network: `down(activation(gate(x)) · up(x))`, or `down(activation(up(x)))` without a gate.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let mlp = burn_flash_attention::MlpConfig::new(24).init(8, &device);
/// assert_eq!(mlp.forward(Tensor::zeros([2, 3, 8], &device)).dims(), [2, 3, 8]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Mlp {
    /// `d_model` to `d_ff`, before the activation.
    pub gate: Option<Linear>,
    /// `d_model` to `d_ff`.
    pub up: Linear,
    /// `d_ff` to `d_model`.
    pub down: Linear,
    #[module(skip)]
    activation: MlpActivation,
}

impl MlpConfig {
    /// Creates a network over vectors of this size with new parameters.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::MlpConfig::new(24).with_gated(false);
    /// assert!(config.init(8, &burn::tensor::Device::flex()).gate.is_none());
    /// # }
    /// ```
    pub fn init(&self, d_model: usize, device: &Device) -> Mlp {
        self.init_with(d_model, &LinearConfig::new(0, 0).initializer, device)
    }

    /// [`init`](Self::init) with this initializer.
    pub(super) fn init_with(&self, d_model: usize, initializer: &Initializer, device: &Device) -> Mlp {
        let linear = |d_input, d_output| {
            let config = LinearConfig::new(d_input, d_output).with_initializer(initializer.clone());
            config.with_bias(self.bias).init(device)
        };
        Mlp {
            gate: self.gated.then(|| linear(d_model, self.d_ff)),
            up: linear(d_model, self.d_ff),
            down: linear(self.d_ff, d_model),
            activation: self.activation,
        }
    }
}

impl Mlp {
    /// Computes the network of each vector of `[batch, seq, d_model]`.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let device = Device::flex();
    /// let mlp = burn_flash_attention::MlpConfig::new(24).init(8, &device);
    /// // Without biases, zeros stay zeros.
    /// assert_eq!(mlp.forward(Tensor::zeros([2, 3, 8], &device)).abs().sum().into_scalar::<f32>(), 0.0);
    /// # }
    /// ```
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let up = self.up.forward(x.clone());
        let activate = |x| match self.activation {
            MlpActivation::Silu => activation::silu(x),
            MlpActivation::Gelu => activation::gelu(x),
            MlpActivation::GeluApproximate => activation::gelu_approximate(x),
            MlpActivation::Relu => activation::relu(x),
        };
        self.down.forward(match &self.gate {
            Some(gate) => activate(gate.forward(x)) * up,
            None => activate(up),
        })
    }
}
