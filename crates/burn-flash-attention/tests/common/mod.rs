//! Runs a case through this crate, through the same mathematics composed of Burn's operations, and through the oracle, and compares the
//! error of the first with the error of the second.
//!
//! - `FLASH_TEST_DEVICE`: `flex`, `wgpu`, `vulkan` or `cuda`, if its feature is compiled in. By default Flex, and wgpu if there is an
//!   adapter.
//! - `FLASH_TEST_KERNEL`: the kernel that must run in f32; a case that runs another one fails. By default `mma` on CUDA, else `portable`,
//!   or `rows` on a software adapter. Flex has its own.
//! - `REQUIRE_WGPU=1`: fails if there is no adapter.
#![allow(dead_code)]

#[path = "../../../flash-attention-kernels/tests/kernels/quick.rs"]
mod quick;

use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData, Tolerance, activation};
use burn_flash_attention::{AttentionPlan, BlockMask, FlashAttentionOptions, flash_attention_with_lse, plan};
use flash_attention_kernels::mods::{Pair, ScoreFn, Values};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, dropout};
use flash_attention_reference::mods::{Bent, Sloped};
use flash_attention_reference::{self as reference, Comparison, Emulation, Judged, Operands};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::panic::{AssertUnwindSafe, catch_unwind};

// -- devices

/// A device under test.
#[derive(Clone, Debug)]
pub struct Target {
    pub name: String,
    /// The device, without autodiff.
    pub device: Device,
    /// The forward kernel that must run in f32, or several, separated by bars.
    pub kernel: String,
    /// The forward kernel that must run in f16 and bf16.
    pub half: String,
}

impl Target {
    /// The kernel that must run, or several, separated by bars. Kernels of `mma.sync` take no block masks.
    pub fn expected_kernel(&self, problem: &AttentionProblem) -> &str {
        match problem.dtype {
            Dtype::F32 if self.kernel == "mma" && problem.block_mask.is_some() => "portable",
            Dtype::F32 => &self.kernel,
            _ => &self.half,
        }
    }
}

/// The devices under test.
pub fn targets() -> Vec<Target> {
    match std::env::var("FLASH_TEST_DEVICE") {
        Ok(name) => vec![target(&name).unwrap_or_else(|| {
            panic!("FLASH_TEST_DEVICE is {name}, but there is no such device, or its feature is not compiled in")
        })],
        Err(_) => ["flex", "wgpu"].into_iter().filter_map(target).collect(),
    }
}

/// The device of this name. If there is none or its feature is not compiled in, prints a message and returns `None`.
pub fn target(name: &str) -> Option<Target> {
    let device = device(name);
    if device.is_none() {
        let required = name == "wgpu" && std::env::var("REQUIRE_WGPU").as_deref() == Ok("1");
        assert!(!required, "REQUIRE_WGPU=1, but there is no wgpu device");
        eprintln!("skipped on {name}: there is no such device");
    }
    let named = |variable: &str, default: &str| std::env::var(variable).unwrap_or_else(|_| default.to_string());
    let (kernel, half) = match name {
        "flex" => ("host".to_string(), "host".to_string()),
        // A Hopper GPU, unless the environment names other kernels.
        "cuda" => (named("FLASH_TEST_KERNEL", "mma"), named("FLASH_TEST_HALF_KERNEL", "hopper")),
        _ => (named("FLASH_TEST_KERNEL", "portable|rows"), named("FLASH_TEST_HALF_KERNEL", "portable|rows")),
    };
    device.map(|device| Target { name: name.to_string(), device, kernel, half })
}

fn device(name: &str) -> Option<Device> {
    #[allow(unused_imports)]
    use burn::tensor::{DeviceKind, DeviceType};
    quick::compile_quickly();
    match name {
        #[cfg(feature = "flex")]
        "flex" => Some(Device::flex()),
        #[cfg(feature = "wgpu")]
        "wgpu" => Device::enumerate(DeviceType::Wgpu).into_vec().into_iter().next(),
        #[cfg(feature = "vulkan")]
        "vulkan" => Device::enumerate(DeviceType::Vulkan).into_vec().into_iter().next(),
        #[cfg(feature = "cuda")]
        "cuda" => Device::enumerate(DeviceType::Cuda).into_vec().into_iter().next(),
        _ => None,
    }
}

/// The name of the kernel that a plan chose.
pub fn kernel_name(plan: &AttentionPlan) -> &'static str {
    match plan {
        AttentionPlan::Host(_) => "host",
        AttentionPlan::Kernel(plan) => plan.forward.kernel().name(),
        other => panic!("{other:?}"),
    }
}

// -- cases

/// Memory layout of an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Row-major.
    #[default]
    Contiguous,
    /// `[batch, seq, heads, dim]` in memory, as after `swap_dims(1, 2)` of a projection.
    HeadsInner,
    /// The last two dimensions transposed in memory.
    Transposed,
    /// A slice of a larger tensor.
    Offset,
}

/// Which inputs get gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracked {
    pub q: bool,
    pub k: bool,
    pub v: bool,
    pub bias: bool,
    pub slopes: bool,
    pub sinks: bool,
    /// The tensors of the score function.
    pub tensors: [bool; 2],
}

impl Tracked {
    pub const ALL: Tracked =
        Tracked { q: true, k: true, v: true, bias: true, slopes: true, sinks: true, tensors: [true, true] };
    pub const NONE: Tracked =
        Tracked { q: false, k: false, v: false, bias: false, slopes: false, sinks: false, tensors: [false, false] };

    /// All 16 subsets of q, k, v and the bias.
    pub fn subsets() -> impl Iterator<Item = Tracked> {
        (0..16).map(|n| Tracked { q: n & 1 != 0, k: n & 2 != 0, v: n & 4 != 0, bias: n & 8 != 0, ..Tracked::NONE })
    }

    /// All 8 subsets of bias, slopes and sinks, with q tracked.
    pub fn subsets_of_extras() -> impl Iterator<Item = Tracked> {
        (0..8).map(|n| Tracked { q: true, bias: n & 1 != 0, slopes: n & 2 != 0, sinks: n & 4 != 0, ..Tracked::NONE })
    }

    /// All 8 subsets of the bias and a function's two tensors, without q.
    pub fn subsets_of_tensors() -> impl Iterator<Item = Tracked> {
        (0..8).map(|n| Tracked { bias: n & 1 != 0, tensors: [n & 2 != 0, n & 4 != 0], ..Tracked::NONE })
    }

    pub fn any(self) -> bool {
        self != Tracked::NONE
    }
}

/// Terms of the loss: `Σ dout∘out`, `Σ dlse∘lse` or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    pub out: bool,
    pub lse: bool,
}

impl Loss {
    pub const OUT: Loss = Loss { out: true, lse: false };
    pub const LSE: Loss = Loss { out: false, lse: true };
    pub const BOTH: Loss = Loss { out: true, lse: true };
}

/// Settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub tracked: Tracked,
    pub loss: Loss,
    pub layout: Layout,
    pub checkpointing: bool,
}

impl Default for How {
    fn default() -> Self {
        How { tracked: Tracked::ALL, loss: Loss::OUT, layout: Layout::Contiguous, checkpointing: false }
    }
}

/// Values of the tensors of a case, rounded to its dtype.
#[derive(Clone, Debug)]
pub struct Data {
    pub problem: AttentionProblem,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub mask: Option<Vec<bool>>,
    pub bias: Option<Vec<f64>>,
    pub slopes: Option<Vec<f64>>,
    pub sinks: Option<Vec<f64>>,
    pub seq_lens_q: Option<Vec<usize>>,
    pub seq_lens_k: Option<Vec<usize>>,
    pub cu_seqlens: Option<[Vec<usize>; 2]>,
    pub score_tensors: [Option<Vec<f64>>; 2],
    pub mask_tensors: [Option<Vec<f64>>; 2],
    pub block_states: Option<Vec<u32>>,
    pub dout: Vec<f64>,
    pub dlse: Vec<f64>,
}

/// The problem of sizes `[batch, num_heads_q, num_heads_kv, seq_q, seq_k, head_dim, head_dim_v]`.
pub fn problem(sizes: [usize; 7], dtype: Dtype, options: AttentionOptions) -> AttentionProblem {
    let [batch, num_heads_q, num_heads_kv, seq_q, seq_k, head_dim, head_dim_v] = sizes;
    AttentionProblem::new(
        &[batch, num_heads_q, seq_q, head_dim],
        &[batch, num_heads_kv, seq_k, head_dim],
        &[batch, num_heads_kv, seq_k, head_dim_v],
        dtype,
        options,
    )
    .unwrap()
}

impl Data {
    /// Standard normal tensors, and a mask that hides three pairs in ten.
    pub fn random(problem: AttentionProblem, seed: u64) -> Self {
        let floats = |shape: &[usize], n: u64| {
            let mut values = reference::normal(shape.iter().product(), 16 * seed + n);
            reference::round_to(&mut values, problem.dtype);
            values
        };
        let f32s = |len, n: u64, times: f64| {
            let mut values = reference::normal(len, 16 * seed + n);
            values.iter_mut().for_each(|x| *x *= times);
            reference::round_to(&mut values, Dtype::F32);
            values
        };
        let mut of_lens = StdRng::seed_from_u64(16 * seed + 9);
        let mut lens = |seq: usize| (0..problem.batch).map(|_| of_lens.random_range(0..=seq)).collect();
        // Sequences begin and end anywhere: within a batch, across its end, or are empty.
        let cu_seqlens = problem.cu_seqlens.map(|sequences| {
            let mut of_ends = StdRng::seed_from_u64(16 * seed + 10);
            [problem.seq_q, problem.seq_k].map(|seq| {
                let all = problem.batch * seq;
                let mut ends: Vec<_> = (0..sequences + 1).map(|_| of_ends.random_range(0..=all)).collect();
                ends.sort_unstable();
                ends
            })
        });
        let mut rng = StdRng::seed_from_u64(16 * seed + 8);
        let mut dlse = reference::normal(problem.rows(), 16 * seed + 7);
        reference::round_to(&mut dlse, Dtype::F32);
        Data {
            problem,
            q: floats(&problem.q_shape(), 0),
            k: floats(&problem.k_shape(), 1),
            v: floats(&problem.v_shape(), 2),
            mask: problem.mask.map(|shape| (0..shape.iter().product()).map(|_| rng.random_bool(0.3)).collect()),
            bias: problem.bias.map(|shape| floats(&shape, 3)),
            slopes: problem.alibi_slopes.map(|[batch, heads]| f32s(batch * heads, 5, 0.1)),
            sinks: problem.sinks.then(|| f32s(problem.num_heads_q, 6, 2.0)),
            seq_lens_q: problem.seq_lens_q.then(|| lens(problem.seq_q)),
            seq_lens_k: problem.seq_lens_k.then(|| lens(problem.seq_k)),
            cu_seqlens,
            score_tensors: std::array::from_fn(|nth| {
                problem.score_tensors[nth].map(|shape| f32s(shape.iter().product(), 11 + nth as u64, 0.5))
            }),
            mask_tensors: std::array::from_fn(|nth| {
                let len = problem.mask_tensors[nth]?.iter().product();
                Some(reference::mods::documents(len, 16 * seed + 13 + nth as u64))
            }),
            block_states: problem.block_mask.map(|mask| {
                let mut of_states = StdRng::seed_from_u64(16 * seed + 15);
                (0..mask.blocks.iter().product::<usize>()).map(|_| of_states.random_range(0..3)).collect()
            }),
            dout: floats(&problem.o_shape(), 4),
            dlse,
        }
    }

    pub fn inputs(&self) -> reference::Inputs<'_> {
        reference::Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            mask: self.mask.as_deref(),
            bias: self.bias.as_deref(),
            alibi_slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            seq_lens_q: self.seq_lens_q.as_deref(),
            seq_lens_k: self.seq_lens_k.as_deref(),
            cu_seqlens_q: self.cu_seqlens.as_ref().map(|[q, _]| &q[..]),
            cu_seqlens_k: self.cu_seqlens.as_ref().map(|[_, k]| &k[..]),
            dropout: self.dropout_seed().map(|seed| reference::Dropout { seed, first: [0, 0] }),
            score_tensors: self.score_tensors.each_ref().map(Option::as_deref),
            mask_tensors: self.mask_tensors.each_ref().map(Option::as_deref),
            block_mask: self.block_states.as_deref(),
        }
    }

    /// The dropout seed, if there is dropout.
    pub fn dropout_seed(&self) -> Option<[u32; 2]> {
        let options = &self.problem.options;
        (options.dropout > 0.0).then(|| dropout::seed(options.dropout_seed.expect("tests with dropout set its seed")))
    }

    /// The oracle's results.
    pub fn oracle(&self, how: How) -> Results {
        let output = reference::forward(&self.problem, &self.inputs());
        let (dout, dlse) = self.loss(how);
        let gradients = reference::backward(&self.problem, &self.inputs(), &dout, dlse);
        Results::of(reference::Attention { output, gradients }, how.tracked)
    }

    /// The oracle's results, the emulated results with the roundings of the kernel of this name, and the expected spread of their
    /// difference.
    pub fn expected(&self, how: How, kernel: &str) -> [Results; 3] {
        let operands = match kernel {
            "hopper" | "matrix" => Operands::Inputs,
            "mma" if self.problem.dtype != Dtype::F32 => Operands::Inputs,
            _ => Operands::F32,
        };
        let emulation = Emulation { dtype: self.problem.dtype, operands };
        let (dout, dlse) = self.loss(how);
        let of = reference::expected(&self.problem, &self.inputs(), &dout, dlse, emulation);
        [of.exact, of.emulated, of.spread].map(|of| Results::of(of, how.tracked))
    }

    /// The gradients of output and lse.
    fn loss(&self, how: How) -> (Vec<f64>, Option<&[f64]>) {
        let dout = if how.loss.out { self.dout.clone() } else { vec![0.0; self.dout.len()] };
        (dout, how.loss.lse.then_some(&self.dlse))
    }
}

/// Outputs and gradients, read back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Option<Vec<f64>>,
    pub dk: Option<Vec<f64>>,
    pub dv: Option<Vec<f64>>,
    pub dbias: Option<Vec<f64>>,
    pub dslopes: Option<Vec<f64>>,
    pub dsinks: Option<Vec<f64>>,
    /// Gradients of the score function's tensors.
    pub dtensors: [Option<Vec<f64>>; 2],
}

impl Results {
    /// The output, and the gradients of tracked tensors.
    fn of(attention: reference::Attention, tracked: Tracked) -> Self {
        let reference::Attention { output, gradients } = attention;
        let Tracked { q, k, v, bias, slopes, sinks, tensors } = tracked;
        let [dscore_a, dscore_b] = gradients.dscore_tensors;
        Results {
            dtensors: [dscore_a.filter(|_| tensors[0]), dscore_b.filter(|_| tensors[1])],
            out: output.o,
            lse: output.lse,
            dq: q.then_some(gradients.dq),
            dk: k.then_some(gradients.dk),
            dv: v.then_some(gradients.dv),
            dbias: gradients.dbias.filter(|_| bias),
            dslopes: gradients.dalibi_slopes.filter(|_| slopes),
            dsinks: gradients.dsinks.filter(|_| sinks),
        }
    }

    /// Output and gradients with their names and row lengths. Missing gradients are `None`.
    fn tensors(&self, problem: &AttentionProblem) -> [(&'static str, usize, Option<&[f64]>); 9] {
        let bias_row = problem.bias.map_or(1, |shape| shape[3].max(1));
        [
            ("out", problem.head_dim_v, Some(&self.out)),
            ("dq", problem.head_dim, self.dq.as_deref()),
            ("dk", problem.head_dim, self.dk.as_deref()),
            ("dv", problem.head_dim_v, self.dv.as_deref()),
            ("dbias", bias_row, self.dbias.as_deref()),
            ("dalibi_slopes", 1, self.dslopes.as_deref()),
            ("dsinks", 1, self.dsinks.as_deref()),
            ("da", 1, self.dtensors[0].as_deref()),
            ("db", 1, self.dtensors[1].as_deref()),
        ]
    }
}

// -- tensors

pub fn burn_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
    }
}

/// A tensor with these values and this dtype on the device.
pub fn tensor<const D: usize>(values: &[f64], shape: [usize; D], dtype: Dtype, device: &Device) -> Tensor<D> {
    let dtype = burn_dtype(dtype);
    Tensor::from_data(TensorData::new(values.to_vec(), shape).convert_dtype(dtype), (device, dtype))
}

pub fn mask_tensor(values: &[bool], shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

/// The tensor's values, for any dtype.
pub fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().try_into_vec::<f64>().unwrap()
}

/// The same values in this memory layout.
pub fn laid_out(tensor: Tensor<4>, layout: Layout) -> Tensor<4> {
    // Permuting, copying and permuting back leaves a strided view.
    let copied = |tensor: Tensor<4>| {
        let (data, dtype) = (tensor.clone().into_data(), tensor.dtype());
        Tensor::<4>::from_data(data, (&tensor.device(), dtype))
    };
    match layout {
        Layout::Contiguous => tensor,
        Layout::HeadsInner => copied(tensor.swap_dims(1, 2)).swap_dims(1, 2),
        Layout::Transposed => copied(tensor.swap_dims(2, 3)).swap_dims(2, 3),
        Layout::Offset => {
            let [b, h, s, d] = tensor.dims();
            let larger = Tensor::<4>::full([b, h, s + 2, d + 1], f32::NAN, (&tensor.device(), tensor.dtype()));
            let inner = [0..b, 0..h, 1..s + 1, 1..d + 1];
            larger.slice_assign(inner.clone(), tensor).slice(inner)
        }
    }
}

/// The tensors of a case on a device.
pub struct Tensors {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    /// `[batch | 1, num_heads_q]`.
    pub slopes: Option<Tensor<2>>,
    pub options: FlashAttentionOptions,
}

impl Tensors {
    pub fn new(data: &Data, device: &Device, how: How) -> Self {
        let problem = &data.problem;
        let leaf = |values: &[f64], shape, tracked: bool| {
            let tensor = laid_out(tensor(values, shape, problem.dtype, device), how.layout);
            if tracked { tensor.detach().require_grad() } else { tensor }
        };
        let mask = problem.mask.zip(data.mask.as_ref()).map(|(shape, mask)| mask_tensor(mask, shape, device));
        let bias = problem.bias.zip(data.bias.as_ref()).map(|(shape, bias)| leaf(bias, shape, how.tracked.bias));
        let of_heads = |tensor: Tensor<1>, tracked: bool| if tracked { tensor.require_grad() } else { tensor };
        let f32s = |values: &Vec<f64>| tensor(values, [values.len()], Dtype::F32, device);
        let slopes = problem.alibi_slopes.zip(data.slopes.as_ref()).map(|(shape, slopes)| {
            let slopes = f32s(slopes).reshape(shape).detach();
            if how.tracked.slopes { slopes.require_grad() } else { slopes }
        });
        let lens = |lens: Option<&Vec<usize>>| {
            let lens: Vec<i32> = lens?.iter().map(|len| *len as i32).collect();
            Some(Tensor::<1, Int>::from_data(lens.as_slice(), device))
        };
        let table = |values: &Option<Vec<f64>>, shape: Option<[usize; 4]>, tracked: bool| {
            let tensor = tensor(values.as_ref()?, shape?, Dtype::F32, device);
            // The strides must be those of the layout, except in dimensions of 1.
            let tensor = laid_out(tensor, how.layout);
            Some(if tracked { tensor.detach().require_grad() } else { tensor })
        };
        let score_tensors = (0..2)
            .filter_map(|nth| table(&data.score_tensors[nth], problem.score_tensors[nth], how.tracked.tensors[nth]));
        let mask_tensors = (0..2).filter_map(|nth| table(&data.mask_tensors[nth], problem.mask_tensors[nth], false));
        let block_mask = problem.block_mask.zip(data.block_states.as_ref()).map(|(of, states)| {
            let states: Vec<i32> = states.iter().map(|state| *state as i32).collect();
            let states = Tensor::<4, Int>::from_data(TensorData::new(states, of.blocks), device);
            BlockMask::new(states, of.block_q, of.block_k)
        });
        let mut options = FlashAttentionOptions::from(problem.options);
        options.block_mask = block_mask;
        options.score_tensors = score_tensors.collect();
        options.mask_tensors = mask_tensors.collect();
        options.mask = mask;
        options.bias = bias;
        options.seq_lens_q = lens(data.seq_lens_q.as_ref());
        options.seq_lens_k = lens(data.seq_lens_k.as_ref());
        options.cu_seqlens_q = lens(data.cu_seqlens.as_ref().map(|[q, _]| q));
        options.cu_seqlens_k = lens(data.cu_seqlens.as_ref().map(|[_, k]| k));
        options.alibi_slopes = slopes.clone().map(|slopes| slopes.into());
        options.sinks = data.sinks.as_ref().map(|sinks| of_heads(f32s(sinks), how.tracked.sinks));
        Tensors {
            slopes,
            q: leaf(&data.q, problem.q_shape(), how.tracked.q),
            k: leaf(&data.k, problem.k_shape(), how.tracked.k),
            v: leaf(&data.v, problem.v_shape(), how.tracked.v),
            options,
        }
    }
}

// -- the two implementations

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

// -- comparison

/// Tolerance for comparisons with Burn's operations in f32. On CUDA Burn's products round their factors to tf32.
pub fn burns_own(target: &Target) -> Tolerance<f32> {
    Tolerance::absolute(if target.name == "cuda" { 5e-3 } else { 1e-5 })
}

/// Standard normal random numbers.
pub fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// Asserts that our result is close to that of Burn's operations.
pub fn close<const D: usize>(target: &Target, what: &str, ours: Tensor<D>, burns: Tensor<D>) {
    let (ours, burns) = (ours.into_data(), burns.into_data());
    // The absolute bound of tf32 is for elements of about 1. Gradients of weights are larger sums.
    let squares = burns.iter::<f32>().map(|x| x * x).sum::<f32>();
    let rms = (squares / burns.num_elements().max(1) as f32).sqrt();
    let tolerance = if target.name == "cuda" { Tolerance::absolute(5e-3 * rms.max(1.0)) } else { burns_own(target) }
        .set_relative(1e-4);
    let compared = catch_unwind(AssertUnwindSafe(|| ours.assert_approx_eq::<f32>(&burns, tolerance)));
    assert!(compared.is_ok(), "{what} on {}: {ours}, expected {burns}", target.name);
}

/// Runs a case and checks its errors. In f32 they are compared with the errors of the same mathematics composed of Burn's operations:
/// outputs at most twice, gradients at most three times as large (plus a floor), mean errors 1.5 times, each block of 64 rows three times.
/// In half precision composed operations round intermediate results, so [`check_near`] is used instead.
pub fn check(data: &Data, target: &Target, how: How) {
    if data.problem.dtype != Dtype::F32 {
        return check_near(data, target, how);
    }
    let name = format!("{:?} {how:?} on {}", data.problem, target.name);
    let (flash, composed, oracle) = (flash(data, target, how), composed(data, target, how), data.oracle(how));
    compare(&name, data, &flash, &composed, &oracle);
}

/// Runs a case and asserts that its errors are within the bounds for a kernel's roundings, and that a gradient scaled by 1.02 would not be.
/// Also used for small problems, whose composed operations may happen to be exact.
pub fn check_near(data: &Data, target: &Target, how: How) {
    let problem = &data.problem;
    let found = flash(data, target, how);
    let kernel = target.expected_kernel(problem);
    let [exact, emulated, spread] = data.expected(how, kernel);
    let name = |what: &str| format!("{what} of {problem:?} {how:?} on {}", target.name);
    let all = [&found, &exact, &emulated, &spread].map(|of| of.tensors(problem));
    for nth in 0..all[0].len() {
        let [(what, row_len, found), (_, _, exact), (_, _, emulated), (_, _, spread)] =
            all.each_ref().map(|of| of[nth]);
        assert_eq!(found.map(<[f64]>::len), exact.map(<[f64]>::len), "{}", name(what));
        let (Some(computed), Some(exact), Some(emulated)) = (found, exact, emulated) else { continue };
        let judged = if what == "out" { Judged::Output } else { Judged::Gradient };
        let (name, dtype) = (name(what), problem.dtype);
        let comparison = Comparison { name: &name, judged, dtype, row_len, computed, exact, emulated, spread };
        comparison.binds().unwrap_or_else(|unfit| panic!("{unfit}"));
    }
    close_lse(&name("lse"), problem.dtype, &found.lse, &exact.lse);
}

pub fn compare(name: &str, data: &Data, flash: &Results, composed: &Results, oracle: &Results) {
    let problem = &data.problem;
    let (d, dv) = (problem.head_dim, problem.head_dim_v);
    let bias_row = problem.bias.map_or(1, |shape| shape[3].max(1));
    within(&format!("out, {name}"), [&flash.out, &composed.out, &oracle.out], dv, 2.0, 1e-5);
    for (what, row, [flash, composed, oracle]) in [
        ("dq", d, [&flash.dq, &composed.dq, &oracle.dq]),
        ("dk", d, [&flash.dk, &composed.dk, &oracle.dk]),
        ("dv", dv, [&flash.dv, &composed.dv, &oracle.dv]),
        ("dbias", bias_row, [&flash.dbias, &composed.dbias, &oracle.dbias]),
    ] {
        assert_eq!(flash.is_some(), oracle.is_some(), "whether there is a {what} (left) and should be (right), {name}");
        if let (Some(flash), Some(composed), Some(oracle)) = (flash, composed, oracle) {
            within(&format!("{what}, {name}"), [flash, composed, oracle], row, 3.0, 3e-4);
        }
    }
    // These gradients have few elements, each a sum over many pairs, so only their largest error is compared, relative to the
    // largest element.
    for (what, [flash, composed, oracle]) in [
        ("dalibi_slopes", [&flash.dslopes, &composed.dslopes, &oracle.dslopes]),
        ("dsinks", [&flash.dsinks, &composed.dsinks, &oracle.dsinks]),
        ("da", [&flash.dtensors[0], &composed.dtensors[0], &oracle.dtensors[0]]),
        ("db", [&flash.dtensors[1], &composed.dtensors[1], &oracle.dtensors[1]]),
    ] {
        assert_eq!(flash.is_some(), oracle.is_some(), "whether there is a {what} (left) and should be (right), {name}");
        if let (Some(flash), Some(composed), Some(oracle)) = (flash, composed, oracle) {
            let [ours, theirs] = [flash, composed].map(|found| reference::Error::between(found, oracle, 1).max);
            let size = oracle.iter().fold(1.0f64, |size, x| size.max(x.abs()));
            assert!(ours <= 3.0 * theirs + 1e-4 * size, "{what}, {name}: largest error {ours}, composed {theirs}");
        }
    }
    close_lse(&format!("lse, {name}"), problem.dtype, &flash.lse, &oracle.lse);
}

fn close_lse(name: &str, dtype: Dtype, found: &[f64], oracle: &[f64]) {
    assert_eq!(found.len(), oracle.len(), "{name}: length");
    let tolerance = if dtype == Dtype::F32 { 1e-5 } else { 1e-3 };
    for (row, (found, oracle)) in found.iter().zip(oracle).enumerate() {
        let near = (found - oracle).abs() <= tolerance * (1.0 + oracle.abs());
        assert!(near || found == oracle, "{name}: row {row} is {found}, the oracle has {oracle}");
    }
}

fn within(what: &str, [flash, composed, oracle]: [&[f64]; 3], row: usize, factor: f64, floor: f64) {
    let ours = reference::Error::between(flash, oracle, row);
    let theirs = reference::Error::between(composed, oracle, row);
    assert!(ours.max <= factor * theirs.max + floor, "{what}: largest error {}, composed {}", ours.max, theirs.max);
    // One unit in the last place of f32 is always allowed, because the composed operations may be exact.
    let rms = (oracle.iter().map(|x| x * x).sum::<f64>() / oracle.len().max(1) as f64).sqrt();
    let unit = f64::from(f32::EPSILON) * rms.max(1.0);
    // Skipped: gradients that are mathematically 0 (a bias that shifts whole rows, a single key) are pure rounding error, and the
    // mean of few elements is random.
    if rms < 1e-9 || oracle.len() < 32 {
        return;
    }
    assert!(ours.mean <= 1.5 * theirs.mean + unit, "{what}: mean error {}, composed {}", ours.mean, theirs.mean);
    for (block, (ours, theirs)) in ours.block_rms.iter().zip(&theirs.block_rms).enumerate() {
        assert!(*ours <= 3.0 * theirs + unit, "{what}: block {block} has error {ours}, composed {theirs}");
    }
}
