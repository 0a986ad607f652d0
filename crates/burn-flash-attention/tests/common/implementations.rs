//! A case run through this crate, and through the same mathematics composed of Burn's operations.

use super::{Data, How, Layout, Results, Target, Tensors, Tracked, kernel_name, laid_out, mask_tensor, read, tensor};
use burn::tensor::{DType, Int, Tensor, activation};
use burn_flash_attention::{BlockMask, flash_attention_with_lse, plan};
use flash_attention_kernels::mods::{Pair, ScoreFn, Values};
use flash_attention_kernels::{AttentionProblem, Dtype, dropout};
use flash_attention_reference as reference;
use flash_attention_reference::mods::{Bent, Sloped};

/// Runs this crate's attention. Fails if another kernel than the target's would run.
pub fn flash(data: &Data, target: &Target, how: How) -> Results {
    run(data, target, how, |Tensors { q, k, v, options, .. }| {
        let plan = plan(q, k, v, options).unwrap();
        let expected = target.expected_kernel(&data.problem);
        assert!(expected.split('|').any(|name| name == kernel_name(&plan)), "{plan}");
        flash_attention_with_lse(q.clone(), k.clone(), v.clone(), options)
    })
}

/// Runs attention composed of Burn's operations.
pub fn composed(data: &Data, target: &Target, how: How) -> Results {
    run(data, target, How { layout: Layout::Contiguous, ..how }, |tensors| composed_attention(&data.problem, tensors))
}

fn run(data: &Data, target: &Target, how: How, attention: impl Fn(&Tensors) -> (Tensor<4>, Tensor<3>)) -> Results {
    let problem = &data.problem;
    let mut device = target.device.clone();
    if how.tracked.any() {
        device = device.autodiff();
        if how.checkpointing {
            device = device.gradient_checkpointing();
        }
    }
    let tensors = Tensors::new(data, &device, how);
    let (out, lse) = attention(&tensors);
    assert_eq!((out.dims(), lse.dims()), (problem.o_shape(), problem.lse_shape()));
    let (out_values, lse_values) = (read(out.clone().detach()), read(lse.clone().detach()));
    let mut results = Results { out: out_values, lse: lse_values, ..Results::default() };
    let Tracked { q, k, v, bias, slopes, sinks, tensors: of_function } = how.tracked;
    let extras = bias && tensors.options.bias.is_some()
        || slopes && tensors.slopes.is_some()
        || sinks && tensors.options.sinks.is_some()
        || tensors.options.score_tensors.iter().zip(of_function).any(|(_, tracked)| tracked);
    if q || k || v || extras {
        // The loss is f32, because it sums many terms.
        let mut loss = Tensor::<1>::zeros([1], &device);
        if how.loss.out {
            let dout = laid_out(tensor(&data.dout, problem.o_shape(), problem.dtype, &device), how.layout);
            loss = loss + (out * dout).cast(DType::F32).sum();
        }
        if how.loss.lse {
            // Fully masked rows would make the loss −∞. Their gradient is not read.
            let dead = lse.clone().detach().lower_elem(f32::MIN);
            let dlse = tensor(&data.dlse, problem.lse_shape(), Dtype::F32, &device);
            loss = loss + (lse.cast(DType::F32).mask_fill(dead, 0.0) * dlse).sum();
        }
        let gradients = loss.backward();
        let gradient = |tensor: &Tensor<4>| tensor.grad(&gradients).map(read);
        results.dq = gradient(&tensors.q);
        results.dk = gradient(&tensors.k);
        results.dv = gradient(&tensors.v);
        results.dbias = tensors.options.bias.as_ref().and_then(gradient);
        results.dslopes = tensors.slopes.as_ref().and_then(|slopes| slopes.grad(&gradients)).map(read);
        results.dtensors = std::array::from_fn(|nth| tensors.options.score_tensors.get(nth).and_then(gradient));
        results.dsinks = tensors.options.sinks.as_ref().and_then(|sinks| sinks.grad(&gradients)).map(read);
    }
    results
}

/// Attention by its formula, in Burn's operations and in the dtype of the inputs.
pub fn composed_attention(problem: &AttentionProblem, tensors: &Tensors) -> (Tensor<4>, Tensor<3>) {
    assert!(!problem.is_varlen(), "varlen problems are compared only with the oracle");
    let Tensors { q, k, v, slopes, options } = tensors;
    let device = q.device();
    let [batch, heads, seq_q, seq_k] = problem.scores_shape();
    let repeated = |x: &Tensor<4>| {
        let [_, heads_kv, _, dim] = x.dims();
        let group = problem.group_size();
        let x = x.clone().unsqueeze_dim::<5>(2).expand([batch, heads_kv, group, seq_k, dim]);
        x.reshape([batch, heads, seq_k, dim])
    };
    let mut scores = q.clone().matmul(repeated(k).swap_dims(2, 3)).mul_scalar(problem.softmax_scale());
    if let Some(softcap) = problem.options.softcap {
        scores = scores.div_scalar(softcap).tanh().mul_scalar(softcap);
    }
    let band = problem.band();
    let hidden: Vec<bool> = (0..seq_q as u32).flat_map(|i| (0..seq_k as u32).map(move |j| !band.sees(i, j))).collect();
    let mut hidden = mask_tensor(&hidden, [1, 1, seq_q, seq_k], &device).expand([batch, heads, seq_q, seq_k]);
    let mut masked = hidden.clone().bool_and(hidden.clone().bool_not());
    if let Some(mask) = &options.mask {
        masked = masked.bool_or(mask.clone().expand([batch, heads, seq_q, seq_k]));
    }
    if let Some(function) = options.mask_mod {
        let values = tables(&options.mask_tensors, problem);
        let unseen = pairs(problem).zip(values).map(|(pair, values)| !function.sees(pair, values)).collect::<Vec<_>>();
        masked = masked.bool_or(mask_tensor(&unseen, problem.scores_shape(), &device));
    }
    if let Some(BlockMask { states, block_q, block_k, .. }) = &options.block_mask {
        // The state of each block, expanded to its pairs.
        let [of_batch, of_heads, of_q, of_k] = states.dims();
        let states = states.clone().reshape([of_batch, of_heads, of_q, 1, of_k, 1]);
        let states = states.expand([batch, heads, of_q, *block_q, of_k, *block_k]);
        let states = states.reshape([batch, heads, of_q * block_q, of_k * block_k]);
        let states = states.slice([0..batch, 0..heads, 0..seq_q, 0..seq_k]);
        masked = masked.bool_and(states.clone().lower_elem(2)).bool_or(states.equal_elem(0));
    }
    hidden = hidden.bool_or(masked);
    let dtype = scores.dtype();
    if let Some(function) = options.score_mod {
        scores = composed_function(function, scores.cast(DType::F32), problem, &options.score_tensors).cast(dtype);
    }
    if let Some(bias) = &options.bias {
        scores = scores + bias.clone();
    }
    if let Some(slopes) = slopes {
        let far = |i: u32, j: u32| f64::from(band.offset(i, j)).abs();
        let distances: Vec<f64> = (0..seq_q as u32).flat_map(|i| (0..seq_k as u32).map(move |j| far(i, j))).collect();
        let distances = tensor(&distances, [1, 1, seq_q, seq_k], Dtype::F32, &device);
        let [batches, heads] = slopes.dims();
        scores = scores - (slopes.clone().reshape([batches, heads, 1, 1]) * distances).cast(dtype);
    }
    let mut scores = scores.mask_fill(hidden.clone(), f32::NEG_INFINITY);
    if let Some(sinks) = &options.sinks {
        // Sinks are one more key, which every row sees.
        let sinks = sinks.clone().cast(dtype).reshape([1, heads, 1, 1]).expand([batch, heads, seq_q, 1]);
        scores = Tensor::cat(vec![scores, sinks], 3);
        let seen = Tensor::<4>::zeros([batch, heads, seq_q, 1], &device).bool();
        hidden = Tensor::cat(vec![hidden, seen], 3);
    }
    // Scores of fully masked rows are set to 0 before the softmax, and their weights to 0 after it.
    let dead = hidden.clone().all_dim(3);
    let scores = scores.mask_fill(dead.clone(), 0.0);
    let max = scores.clone().detach().max_dim(3);
    let lse = (scores.clone() - max.clone()).exp().sum_dim(3).log() + max;
    let lse = lse.mask_fill(dead, f32::NEG_INFINITY).squeeze_dim(3);
    let mut weights = activation::softmax(scores, 3).mask_fill(hidden, 0.0).narrow(3, 0, seq_k);
    if let Some(seed) = options.dropout_seed.filter(|_| options.dropout > 0.0) {
        let dropped: Vec<bool> = reference::kept(problem, dropout::seed(seed)).iter().map(|kept| !kept).collect();
        let dropped = mask_tensor(&dropped, problem.scores_shape(), &device);
        weights = weights.mask_fill(dropped, 0.0).mul_scalar(dropout::factor(options.dropout));
    }
    (weights.matmul(repeated(v)), lse)
}

/// All pairs of a problem with one sequence per batch, in the order of its scores.
pub fn pairs(problem: &AttentionProblem) -> impl Iterator<Item = Pair> {
    let [batch, heads, seq_q, seq_k] = problem.scores_shape().map(|n| n as u32);
    let rows = (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..seq_q).map(move |i| (b, h, i))));
    rows.flat_map(move |(b, h, i)| (0..seq_k).map(move |j| Pair::of(b, h, i, j)))
}

/// The values of a function's tensors for each of these pairs.
pub fn tables(tensors: &[Tensor<4>], problem: &AttentionProblem) -> impl Iterator<Item = Values> {
    let shape = problem.scores_shape();
    let len = shape.iter().product::<usize>();
    let [a, b] = [0, 1].map(|nth| {
        let values = tensors.get(nth).map(|tensor| read(tensor.clone().detach().expand(shape)));
        values.unwrap_or_else(|| vec![0.0; len])
    });
    a.into_iter().zip(b).map(|(a, b)| Values { a: a as f32, b: b as f32 })
}

/// The score functions of [`reference::mods`] in Burn's operations, in f32.
fn composed_function(
    function: ScoreFn,
    scores: Tensor<4>,
    problem: &AttentionProblem,
    tensors: &[Tensor<4>],
) -> Tensor<4> {
    let constant = |of: &dyn Fn(Pair) -> f32| {
        let values: Vec<f64> = pairs(problem).map(|pair| f64::from(of(pair))).collect();
        tensor(&values, problem.scores_shape(), Dtype::F32, &scores.device())
    };
    if function == ScoreFn::of::<Bent>() {
        let step = constant(&|pair| pair.distance / (16.0 + pair.distance.abs()));
        let (gain, height) = (tensors[0].clone() + 1.0, tensors[1].clone());
        return (scores / 3.0).tanh() * 3.0 * gain + step * height;
    }
    if function == ScoreFn::of::<Sloped>() {
        return scores.clone() - constant(&|pair| pair.distance.abs() / 16.0) * tensors[0].clone();
    }
    assert!(function.additive() && tensors.is_empty(), "{function:?} has no equivalent in Burn's operations");
    scores.clone() + constant(&|pair| function.score(0.0, pair, Values::default()))
}
