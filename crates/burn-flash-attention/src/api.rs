//! Public functions. All errors are found here, before anything runs.

use crate::backend::{FlashAttentionOps, Lse};
use crate::checks::{function_tensors, same_device, same_dtype, unsupported, unwrapped};
use crate::options::{FlashAttentionOptions, OfTensor};
use crate::plan::AttentionPlan;
use crate::problem::{dims, dtype, problem, slices};
use crate::tensors::Extras;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::kind::Basic;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Distribution, Int, IntDType, Tensor};
use flash_attention_kernels::mods::TENSORS;
#[cfg(feature = "autotune")]
use flash_attention_kernels::tuning::Tuned;
use flash_attention_kernels::{AttentionError, AttentionProblem};

/// Attention, `softmax(q·kᵀ · softmax_scale) · v`, exactly, without storing the scores: memory grows with the sequence
/// and not with its square, in the backward too (FlashAttention-2, arXiv:2307.08691).
///
/// # Shapes
///
/// - `q`: `[batch, num_heads_q, seq_q, head_dim]`
/// - `k`: `[batch, num_heads_kv, seq_k, head_dim]`
/// - `v`: `[batch, num_heads_kv, seq_k, head_dim_v]`
/// - returns `[batch, num_heads_q, seq_q, head_dim_v]`
///
/// `num_heads_q` is a multiple of `num_heads_kv`: query head `h` attends with head `h / (num_heads_q / num_heads_kv)`.
/// All have the same element type: f32, f16 or bf16. Sums are f32. Any strides are accepted. Head dimensions are at most 256.
///
/// The output of a query that sees no key is 0. Differentiable with respect to `q`, `k`, `v`, bias, slopes, sinks and score tensors; gradient
/// kernels run for tracked tensors only.
///
/// # Panics
///
/// With the message of the error that [`try_flash_attention`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, flash_attention};
///
/// let device = Device::flex().autodiff();
/// let q = Tensor::<4>::random([1, 4, 8, 16], Distribution::Default, &device).require_grad();
/// let kv = Tensor::<4>::random([1, 2, 8, 16], Distribution::Default, &device);
///
/// let out = flash_attention(q.clone(), kv.clone(), kv, &FlashAttentionOptions::new().with_causal(true));
/// let gradients = out.sum().backward();
/// assert_eq!(q.grad(&gradients).unwrap().dims(), [1, 4, 8, 16]);
/// # }
/// ```
#[track_caller]
pub fn flash_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: &FlashAttentionOptions) -> Tensor<4> {
    unwrapped(try_flash_attention(q, k, v, options))
}

/// [`flash_attention`] with a typed error instead of a panic. Nothing has run when an error is returned.
///
/// # Errors
///
/// Each [`AttentionError`] names the argument at fault and its value.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AttentionError, FlashAttentionOptions, try_flash_attention};
///
/// let zeros = |heads| Tensor::<4>::zeros([1, heads, 8, 16], &Device::flex());
/// let error = try_flash_attention(zeros(6), zeros(4), zeros(4), &FlashAttentionOptions::new()).unwrap_err();
/// assert_eq!(error, AttentionError::HeadsNotGrouped { num_heads_q: 6, num_heads_kv: 4 });
/// # }
/// ```
pub fn try_flash_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    attend(q, k, v, options, Lse::Constant).map(|(out, _)| out)
}

/// [`flash_attention`] that also returns the log-sum-exp of each row of scores: `lse [batch, num_heads_q, seq_q]`, natural logarithm, f32,
/// −∞ if a query sees no key and there is no sink. Differentiable.
///
/// Attention over splits of the keys can be combined into attention over all keys:
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor, Tolerance};
/// use burn_flash_attention::{FlashAttentionOptions, flash_attention, flash_attention_with_lse};
///
/// let random = |seq| Tensor::<4>::random([1, 1, seq, 8], Distribution::Default, &Device::flex());
/// let (q, k, v) = (random(4), random(6), random(6));
/// let options = FlashAttentionOptions::new();
/// let part = |keys: std::ops::Range<usize>| {
///     let (k, v) = (k.clone().slice_dim(2, keys.clone()), v.clone().slice_dim(2, keys));
///     let (out, lse) = flash_attention_with_lse(q.clone(), k, v, &options);
///     let weight = lse.exp().unsqueeze_dim::<4>(3);
///     (out * weight.clone(), weight)
/// };
/// let ((a, weight_a), (b, weight_b)) = (part(0..2), part(2..6));
/// let merged = (a + b) / (weight_a + weight_b);
/// let whole = flash_attention(q, k, v, &options);
/// merged.into_data().assert_approx_eq::<f32>(&whole.into_data(), Tolerance::default());
/// # }
/// ```
///
/// # Panics
///
/// With the message of the error that [`try_flash_attention_with_lse`] returns.
#[track_caller]
pub fn flash_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    unwrapped(try_flash_attention_with_lse(q, k, v, options))
}

/// [`flash_attention_with_lse`] with a typed error instead of a panic. Nothing has run when an error is returned.
///
/// # Errors
///
/// Each [`AttentionError`] names the argument at fault and its value.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, try_flash_attention_with_lse};
///
/// let zeros = || Tensor::<4>::zeros([1, 1, 8, 16], &Device::flex());
/// let options = FlashAttentionOptions::new().with_softcap(-1.0);
/// let error = try_flash_attention_with_lse(zeros(), zeros(), zeros(), &options).unwrap_err();
/// assert_eq!(error.to_string(), "softcap is -1; it must be a finite number above 0");
/// # }
/// ```
pub fn try_flash_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    attend(q, k, v, options, Lse::Tracked)
}

/// [`flash_attention`] on packed sequences, each of which sees its own keys only. The device lists the blocks that exist; the longest sequences
/// are processed first.
///
/// # Shapes
///
/// - `q`: `[total_q, num_heads_q, head_dim]`
/// - `k`: `[total_k, num_heads_kv, head_dim]`
/// - `v`: `[total_k, num_heads_kv, head_dim_v]`
/// - `cu_seqlens_q`, `cu_seqlens_k`: `[sequences + 1]`; sequence `s` is `q[cu_seqlens_q[s]..cu_seqlens_q[s + 1]]` with the keys
///   `cu_seqlens_k[s]..cu_seqlens_k[s + 1]`. A sequence may have no queries or no keys.
/// - returns `[total_q, num_heads_q, head_dim_v]`, 0 for queries that belong to no sequence
///
/// Causality, windows and the positions that functions receive are relative to each sequence. Mask, bias and tensors of functions broadcast to
/// `[1, num_heads_q, total_q, total_k]`; slopes are `[num_heads_q]`. For documents packed into the rows of a batch, use
/// [`cu_seqlens_q`](FlashAttentionOptions::cu_seqlens_q) and [`cu_seqlens_k`](FlashAttentionOptions::cu_seqlens_k) with
/// [`flash_attention`].
///
/// # Panics
///
/// With the message of the error that [`try_flash_attention_varlen`] returns.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, flash_attention_varlen};
///
/// // Three sentences, of 5, 2 and 9 words.
/// let device = Device::flex().autodiff();
/// let x = Tensor::<3>::random([16, 4, 8], Distribution::Default, &device).require_grad();
/// let ends = Tensor::<1, Int>::from_data([0, 5, 7, 16], &device);
/// let options = FlashAttentionOptions::new().with_causal(true);
/// let out = flash_attention_varlen(x.clone(), x.clone(), x.clone(), ends.clone(), ends, &options);
/// assert_eq!(x.grad(&out.sum().backward()).unwrap().dims(), [16, 4, 8]);
/// # }
/// ```
#[track_caller]
pub fn flash_attention_varlen(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    cu_seqlens_q: Tensor<1, Int>,
    cu_seqlens_k: Tensor<1, Int>,
    options: &FlashAttentionOptions,
) -> Tensor<3> {
    unwrapped(try_flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, options))
}

/// [`flash_attention_varlen`] with a typed error instead of a panic. Nothing has run when an error is returned.
///
/// # Errors
///
/// Each [`AttentionError`] names the argument at fault and its value. The contents of `cu_seqlens` are not validated, which would synchronise
/// the device. Positions past the end are clamped.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, try_flash_attention_varlen};
///
/// let zeros = || Tensor::<3>::zeros([16, 4, 8], &Device::flex());
/// let ends = |ends: &[i32]| Tensor::<1, Int>::from_data(ends, &Device::flex());
/// let (q, k) = (ends(&[0, 7, 16]), ends(&[0, 16]));
/// let error = try_flash_attention_varlen(zeros(), zeros(), zeros(), q, k, &FlashAttentionOptions::new()).unwrap_err();
/// assert!(error.to_string().starts_with("cu_seqlens_k has sequences + 1 2"));
/// # }
/// ```
pub fn try_flash_attention_varlen(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    cu_seqlens_q: Tensor<1, Int>,
    cu_seqlens_k: Tensor<1, Int>,
    options: &FlashAttentionOptions,
) -> Result<Tensor<3>, AttentionError> {
    // One batch, read where it lies.
    let [q, k, v] = [q, k, v].map(|tensor| tensor.unsqueeze_dim::<4>(0).swap_dims(1, 2));
    let options = options.clone().with_cu_seqlens_q(cu_seqlens_q).with_cu_seqlens_k(cu_seqlens_k);
    try_flash_attention(q, k, v, &options).map(|out| out.swap_dims(1, 2).squeeze_dim(0))
}

/// Drop-in replacement for [`burn::tensor::module::attention`]: the same signature and meaning.
///
/// Mask and bias broadcast in any dimension and are not expanded. Panics with an [`AttentionError`] for f64, head dimensions above 256 and
/// scales that are not positive, which Burn accepts.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor, Tolerance, ops::AttentionModuleOptions};
///
/// let x = Tensor::<4>::random([2, 3, 5, 8], Distribution::Default, &Device::flex());
/// let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
/// let ours = burn_flash_attention::attention(x.clone(), x.clone(), x.clone(), None, None, options);
/// let burns = burn::tensor::module::attention(x.clone(), x.clone(), x, None, None, options);
/// ours.into_data().assert_approx_eq::<f32>(&burns.into_data(), Tolerance::default());
/// # }
/// ```
///
/// # Panics
///
/// With the message of the [`AttentionError`] that says what is wrong.
#[track_caller]
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Tensor<4> {
    let options = FlashAttentionOptions { mask, bias: attn_bias, ..FlashAttentionOptions::from(options) };
    flash_attention(query, key, value, &options)
}

/// The kernels, tiles and memory that [`flash_attention`] would use for these arguments. Runs nothing.
///
/// # Errors
///
/// The [`AttentionError`] that [`try_flash_attention`] would return.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, plan};
///
/// let q = Tensor::<4>::zeros([1, 8, 1024, 64], &Device::flex());
/// let plan = plan(&q, &q, &q, &FlashAttentionOptions::new())?;
/// assert!(plan.to_string().starts_with("host loops"));
/// # }
/// # Ok::<(), burn_flash_attention::AttentionError>(())
/// ```
pub fn plan(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    options: &FlashAttentionOptions,
) -> Result<AttentionPlan, AttentionError> {
    let (device, problem) = posed(q, k, v, options)?;
    on_device(device.as_dispatch(), &problem)
}

/// What CubeCL's tuner found to be the fastest for calls of this size on this device, in this process or an earlier one. Nothing
/// is timed or run, and nothing found yet is `None`: the first call, and the first backward, find it, or keep to [`plan()`]
/// where timing would take more than a few seconds. On Flex there is nothing to find.
///
/// # Errors
///
/// The [`AttentionError`] that [`try_flash_attention`] would return.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, tuned};
///
/// let q = Tensor::<4>::zeros([1, 8, 1024, 64], &Device::flex());
/// match tuned(&q, &q, &q, &FlashAttentionOptions::new())?.forward {
///     Some(forward) => println!("{} kernel, blocks of {} queries", forward.kernel().name(), forward.tile_q()),
///     None => println!("as planned"),
/// }
/// # }
/// # Ok::<(), burn_flash_attention::AttentionError>(())
/// ```
#[cfg(feature = "autotune")]
pub fn tuned(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    options: &FlashAttentionOptions,
) -> Result<Tuned, AttentionError> {
    let (device, problem) = posed(q, k, v, options)?;
    check_on_device(device.as_dispatch(), &problem)?;
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => flash_attention_kernels::tuning::tuned(&device.client(), &problem),
        #[allow(unreachable_patterns)]
        _ => Ok(Tuned::default()),
    }
}

/// Output and log-sum-exp.
fn attend(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &FlashAttentionOptions,
    lse: Lse,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let (device, problem) = posed(&q, &k, &v, options)?;
    check_on_device(device.as_dispatch(), &problem)?;
    let seed = (options.dropout > 0.0 && options.dropout_seed.is_none()).then(|| drawn_seed(&q.device()));
    let options = options.with_temperature_as_function(&q)?;
    let extras = extras(&options, seed);
    let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
    let output = Dispatch::flash_attention(q, k, v, extras, options.numbers(), lse);
    Ok((Tensor::from_dispatch(output.out), Tensor::from_dispatch(output.lse)))
}

/// The tensors of the options, as kernels read them: those of heads and of functions in f32.
pub(crate) fn extras(options: &FlashAttentionOptions, seed: Option<Tensor<1, Int>>) -> Extras<Dispatch> {
    let read = FlashAttentionOptions {
        alibi_slopes: options.alibi_slopes.clone().map(|slopes| slopes.into_tensor().cast(DType::F32).into()),
        sinks: options.sinks.clone().map(|sinks| sinks.cast(DType::F32)),
        score_tensors: options.score_tensors.iter().map(|tensor| tensor.clone().cast(DType::F32)).collect(),
        ..options.clone()
    };
    let mut tensors = read.tensors(&IntoDispatch);
    tensors.dropout_seed = seed.map(Tensor::into_dispatch);
    let lists = options.block_mask.as_ref().map(|mask| mask.lists.clone()).unwrap_or_default();
    Extras::new(tensors, options.block_sizes(), lists)
}

/// A seed of two 32-bit numbers from Burn's generator, drawn on the device without synchronising.
fn drawn_seed(device: &Device) -> Tensor<1, Int> {
    let range = Distribution::Uniform(f64::from(i32::MIN), f64::from(i32::MAX));
    Tensor::<1, Int>::random([2], range, (device, DType::I32))
}

/// The problem that these arguments describe, and their device without autodiff.
pub(crate) fn posed(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    options: &FlashAttentionOptions,
) -> Result<(Device, AttentionProblem), AttentionError> {
    posed_over(q, k, v, [k.dims(), v.dims()], options)
}

/// The problem of these queries over keys and values of these shapes, to which `k` and `v` belong.
pub(crate) fn posed_over(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    [k_shape, v_shape]: [[usize; 4]; 2],
    options: &FlashAttentionOptions,
) -> Result<(Device, AttentionProblem), AttentionError> {
    let q_dtype = dtype("q", q.dtype())?;
    function_tensors(["score_tensors[0]", "score_tensors[1]"], &options.score_tensors, &q.device())?;
    let options = options.with_temperature_as_function(q)?;
    let [of_q, of_k, of_v] = [q, k, v].map(|tensor| Describe.of(tensor));
    let found = options.tensors(&Describe);
    for (argument, other) in [("k", Some(&of_k)), ("v", Some(&of_v)), ("bias", found.bias.as_ref())] {
        other.map_or(Ok(()), |other| same_dtype(argument, other.dtype, q.dtype()))?;
    }
    for (argument, other) in [("alibi_slopes", &found.alibi_slopes), ("sinks", &found.sinks)] {
        other.as_ref().map_or(Ok(()), |other| dtype(argument, other.dtype).map(|_| ()))?;
    }
    let device = q.device();
    function_tensors(["mask_tensors[0]", "mask_tensors[1]"], &options.mask_tensors, &device)?;
    for (argument, other) in [("k", &of_k), ("v", &of_v)].into_iter().chain(found.named()) {
        same_device(argument, &other.device, &device)?;
    }
    let shapes = found.map(|found| found.shape);
    let qkv = [&*of_q.shape, &k_shape, &v_shape];
    let problem = problem(qkv, &shapes, options.block_sizes(), q_dtype, options.numbers())?;
    // The problem names two tensors of a function. It refuses more, which must not be lost here.
    if options.score_tensors.len() > TENSORS {
        problem.with_score_tensors(&slices(&dims(&options.score_tensors)))?;
    }
    if options.mask_tensors.len() > TENSORS {
        problem.with_mask_tensors(&slices(&dims(&options.mask_tensors)))?;
    }
    Ok((device.inner(), problem))
}

/// Shape, dtype and device of a tensor.
struct Described {
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
}

/// Describes tensors.
struct Describe;

impl OfTensor<Described> for Describe {
    fn of<const D: usize, K: Basic>(&self, tensor: &Tensor<D, K>) -> Described {
        Described { shape: tensor.dims().to_vec(), dtype: tensor.dtype(), device: tensor.device() }
    }
}

/// Hands tensors to the backend, integers in 32 bits.
struct IntoDispatch;

impl OfTensor<DispatchTensor> for IntoDispatch {
    fn of<const D: usize, K: Basic>(&self, tensor: &Tensor<D, K>) -> DispatchTensor {
        tensor.clone().into_dispatch()
    }

    fn of_int<const D: usize>(&self, tensor: &Tensor<D, Int>) -> DispatchTensor {
        tensor.clone().cast(IntDType::I32).into_dispatch()
    }
}

/// What that device would run.
#[allow(unused_variables)]
pub(crate) fn on_device(device: &DispatchDevice, problem: &AttentionProblem) -> Result<AttentionPlan, AttentionError> {
    match device {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => {
            flash_attention_kernels::plan(&device.client(), problem).map(AttentionPlan::Kernel)
        }
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => crate::fallback::plan(problem).map(AttentionPlan::Host),
        #[allow(unreachable_patterns)]
        other => Err(unsupported(other)),
    }
}

/// Checks that [`on_device`] finds no error.
pub(crate) fn check_on_device(device: &DispatchDevice, problem: &AttentionProblem) -> Result<(), AttentionError> {
    match device {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => flash_attention_kernels::check(&device.client(), problem),
        other => on_device(other, problem).map(drop),
    }
}
