//! Layers of a GPT, written so that their gradients are fast in Burn.
//!
//! Burn sums a column of a matrix in one thread. The gradient of a parameter that is added to or multiplied with every row of activations
//! is such a sum. Here rows are broadcast in several [stages](Stages), so that the sum is also computed in stages. Measurements are in
//! docs/performance.md.

use burn::nn::{LayerNorm, Linear};
use burn::tensor::activation::sigmoid;
use burn::tensor::{FloatDType, Tensor, module};
use std::f64::consts::PI;

/// Maximum number of rows that one thread sums.
const STAGE: usize = 32;

/// Keeps a norm from dividing by zero; GPT-2's value.
const EPSILON: f64 = 1e-5;

/// Rows of activations as three dimensions, of which the last two are at most [`STAGE`] long.
struct Stages {
    dims: [usize; 3],
    columns: usize,
}

impl Stages {
    fn new([batch, context, columns]: [usize; 3]) -> Self {
        let rows = batch * context;
        // The largest power of two that divides the number of rows, at most STAGE.
        let part = |rows: usize| 1 << rows.trailing_zeros().min(STAGE.ilog2());
        let inner = part(rows);
        let middle = part(rows / inner);
        Self { dims: [rows / inner / middle, middle, inner], columns }
    }

    /// Splits the rows of `x [batch, context, columns]` into three dimensions.
    fn split(&self, x: Tensor<3>) -> Tensor<4> {
        let [outer, middle, inner] = self.dims;
        x.reshape([outer, middle, inner, self.columns])
    }

    /// Repeats `row [columns]` along all dimensions of the rows but the last, along which operations broadcast it.
    fn repeat(&self, row: Tensor<1>) -> Tensor<4> {
        let ([outer, middle, _], columns) = (self.dims, self.columns);
        row.reshape([1, 1, 1, columns]).expand([outer, 1, 1, columns]).expand([outer, middle, 1, columns])
    }
}

/// `x [batch, context, inputs] · weight + bias` in `dtype`, with weights stored in f32.
pub fn linear(layer: &Linear, x: Tensor<3>, dtype: FloatDType) -> Tensor<3> {
    let y = module::linear(x.cast(dtype), layer.weight.val().cast(dtype), None);
    let Some(bias) = &layer.bias else { return y };
    let shape = y.dims();
    let stages = Stages::new(shape);
    (stages.split(y) + stages.repeat(bias.val().cast(dtype))).reshape(shape)
}

/// Normalizes each row of `x [batch, context, width]` to mean 0 and variance 1, then multiplies by gamma and adds beta.
pub fn layer_norm(layer: &LayerNorm, x: Tensor<3>) -> Tensor<3> {
    let shape = x.dims();
    let stages = Stages::new(shape);
    let x = stages.split(x);
    let centred = x.clone() - x.mean_dim(3);
    let deviation = (centred.clone().square().mean_dim(3) + EPSILON).sqrt();
    let scaled = centred / deviation * stages.repeat(layer.gamma.val());
    match &layer.beta {
        Some(beta) => (scaled + stages.repeat(beta.val())).reshape(shape),
        None => scaled.reshape(shape),
    }
}

/// GPT-2's approximation of GELU, `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`, computed by `1 + tanh(u) = 2 sigmoid(2u)`.
pub fn gelu(x: Tensor<3>) -> Tensor<3> {
    let u = (x.clone().square() * 0.044715 + 1.0) * x.clone() * (8.0 / PI).sqrt();
    x * sigmoid(u)
}

/// Mean over all tokens of `ln Σ exp(logits) − logit of the target`, for f32 `logits [batch, context, vocabulary]`. The logits of the
/// targets are computed from the input of the head, `x [batch, context, width]`, and the rows of the head's table that belong to the
/// targets.
///
/// They are not gathered from the logits, because the gradient of a gather is as large as the logits.
pub fn cross_entropy(logits: Tensor<3>, x: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    let highest = logits.clone().detach().max_dim(2);
    let sum = (logits - highest.clone()).exp().sum_dim(2).log() + highest;
    let target = (x.cast(FloatDType::F32) * targets.cast(FloatDType::F32)).sum_dim(2);
    (sum - target).mean()
}
