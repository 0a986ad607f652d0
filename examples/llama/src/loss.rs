//! Cross-entropy without the logits of all tokens at once.

use burn::module::Param;
use burn::tensor::{DType, Int, Tensor, activation::log_softmax};
use burn_flash_attention::FlashDecoder;

/// A loss whose gradients by hidden vectors and head are known already.
///
/// The gradients of `objective` are those of the loss, but its value is not.
#[derive(Clone, Debug)]
pub struct ChunkedLoss {
    /// `[1]`, f32, untracked: the loss in nats per token.
    pub value: Tensor<1>,
    /// `[1]`, f32: what to call `backward` of.
    pub objective: Tensor<1>,
}

/// What is predicted: for each of `[batch, seq]` positions the next token, and its weight in the mean.
#[derive(Clone, Debug)]
pub struct Targets {
    /// The next token of each position.
    pub tokens: Tensor<2, Int>,
    /// f32: 1, or 0 where the next token is not predicted.
    pub weights: Tensor<2>,
    /// Sum of the weights: above 0.
    pub count: f64,
}

/// Mean cross-entropy of the targets, given the hidden vectors `[batch, seq, d_model]` of [`FlashDecoder::try_hidden`].
///
/// Logits are computed for `chunk` positions at a time. On a device with autodiff, each chunk runs backward at once, down to its hidden
/// vectors and the weights of the head, so that one chunk's logits exist at a time: `chunk · vocab_size` elements instead of
/// `batch · seq · vocab_size`. With `L` the loss, `h` the hidden vectors and `W` the head, the objective is `Σ h · ∂L/∂h + Σ W · ∂L/∂W`
/// with constant second factors, and its gradients are those of `L` by the chain rule. It serves the training of all weights as well as
/// that of adapters: a head that is frozen takes no gradient.
///
/// # Panics
///
/// If `chunk` is 0, or sizes differ.
pub fn cross_entropy(model: &FlashDecoder, hidden: Tensor<3>, targets: &Targets, chunk: usize) -> ChunkedLoss {
    assert!(chunk > 0, "chunk is 0; it must be at least 1");
    let [batch, seq, d_model] = hidden.dims();
    let rows = batch * seq;
    let hidden = hidden.reshape([1, rows, d_model]);
    let (tokens, weights) = (targets.tokens.clone().reshape([rows, 1]), targets.weights.clone().reshape([rows, 1]));
    let head = Head::of(model);
    let is_tracked = hidden.is_autodiff();
    let (mut value, mut of_hidden, mut of_head) =
        (Tensor::zeros([1], (&hidden.device().inner(), DType::F32)), Vec::new(), None);
    for begin in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - begin);
        let part = leaf(hidden.clone().narrow(1, begin, count), is_tracked);
        let logits = head.model.logits(part.clone()).cast(DType::F32);
        let logits = logits.reshape([count as i32, -1]);
        let likely = log_softmax(logits, 1).gather(1, tokens.clone().narrow(0, begin, count));
        let loss = (likely * weights.clone().narrow(0, begin, count)).sum() / -targets.count;
        value = value + loss.clone().without_autodiff();
        if is_tracked {
            let mut gradients = loss.backward();
            of_hidden.extend(part.grad_remove(&mut gradients));
            if let Some(gradient) = head.weight.grad_remove(&mut gradients) {
                let gradient = gradient.cast(DType::F32);
                of_head = Some(of_head.map_or(gradient.clone(), |sum: Tensor<2>| sum + gradient));
            }
        }
    }
    if !is_tracked {
        return ChunkedLoss { objective: value.clone(), value };
    }
    let mut objective = product(hidden, Tensor::cat(of_hidden, 1));
    if let Some(gradient) = of_head {
        objective = objective + product(head.tracked, gradient);
    }
    ChunkedLoss { value, objective }
}

/// The head of a model, cut off from the graph of its weights.
struct Head {
    /// The model with the cut weights.
    model: FlashDecoder,
    /// The weights, as a leaf of each chunk's graph.
    weight: Tensor<2>,
    /// The weights in the graph of the model.
    tracked: Tensor<2>,
}

impl Head {
    fn of(model: &FlashDecoder) -> Self {
        let mut model = model.clone();
        let parameter = match &mut model.head {
            Some(head) => &mut head.weight,
            None => &mut model.embedding.weight,
        };
        let tracked = parameter.val();
        let weight = leaf(tracked.clone(), tracked.is_tracked());
        *parameter = Param::initialized(parameter.id, weight.clone());
        Head { model, weight, tracked }
    }
}

/// The same elements as a leaf, which takes a gradient or none.
fn leaf<const D: usize>(x: Tensor<D>, requires_grad: bool) -> Tensor<D> {
    if !x.is_autodiff() {
        return x;
    }
    x.detach().set_require_grad(requires_grad)
}

/// `Σ x · gradient` in f32, of which the gradient by `x` is the constant `gradient`.
fn product<const D: usize>(x: Tensor<D>, gradient: Tensor<D>) -> Tensor<1> {
    (x.cast(DType::F32) * gradient.cast(DType::F32)).sum()
}
