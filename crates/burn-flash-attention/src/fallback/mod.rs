//! Attention on Flex: loops on the host over the same tiles, with the same meaning, as the kernels.
//!
//! Inputs are read as f32, whatever their dtype, and sums are in f32. Memory is linear in the sequence in both passes.
//! Tiles are shared out among threads so that each sum is taken by one thread in one order: results are the same bits
//! in every run and with any number of threads.

mod backward;
mod blocks;
mod cache;
mod e4m3;
mod few;
mod forward;
mod math;
mod matrix;
mod rotary;
mod rows;
mod sequences;
mod tile;

use crate::backend::{
    AttentionGradients, AttentionOutput, CacheLengths, CacheTensors, CachedAttentionOutput, FlashAttentionOps, Lse,
    Saved, Wanted,
};
use crate::plan::HostPlan;
use crate::problem::{dtype, problem};
use crate::tensors::{Extras, Tensors};
use blocks::States;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{Flex, FlexTensor, Layout};
use cache::{Appended, Pages};
use flash_attention_kernels::mods::TENSORS;
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, Dtype, dropout};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rows::{Elements, Rows};
use sequences::Sequences;
use std::ops::Range;
use tile::{Attention, Broadcast, Functions, Heads, TILE_K, TILE_Q, Tables};

impl FlashAttentionOps for Flex {
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        extras: Extras<Self>,
        options: AttentionOptions,
        _lse: Lse,
    ) -> AttentionOutput<Self> {
        Call::new(q, [k, v].map(KeysValues::Tensor), extras, options).forward()
    }

    fn flash_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        extras: Extras<Self>,
        saved: Saved<Self>,
        wanted: Wanted,
        options: AttentionOptions,
    ) -> AttentionGradients<Self> {
        let call = Call::new(q, [k, v].map(KeysValues::Tensor), extras, options);
        let [out, lse, dout] = [saved.out, saved.lse, saved.dout].map(floats);
        let dlse = saved.dlse.into_option().map(floats);
        let saved =
            backward::Saved::new(&call.problem, slice(&out), slice(&lse), slice(&dout), dlse.as_ref().map(slice));
        let attention = call.attention();
        let gradients = backward::backward(&attention, &saved, wanted);
        let problem = &call.problem;
        let slopes = problem.alibi_slopes.filter(|_| wanted.dalibi_slopes);
        let slopes = slopes.map(|shape| tensor(backward::slopes(&attention, &saved, shape), shape, Dtype::F32));
        let sinks = (problem.sinks && wanted.dsinks).then(|| backward::sinks(&attention, &saved));
        let [dscore_a, dscore_b] = std::array::from_fn(|nth| {
            let shape = problem.score_tensors[nth].filter(|_| wanted.dscore_tensors[nth]);
            shape.map(|shape| tensor(backward::score_tensor(&attention, &saved, nth, shape), shape, Dtype::F32))
        });
        let some = |data: Option<Vec<f32>>, shape| data.map(|data| tensor(data, shape, problem.dtype)).into();
        AttentionGradients {
            dq: some(gradients.dq, problem.q_shape()),
            dk: some(gradients.dk, problem.k_shape()),
            dv: some(gradients.dv, problem.v_shape()),
            dbias: some(gradients.dbias, problem.bias.unwrap_or_default()),
            dalibi_slopes: slopes.into(),
            dsinks: sinks.map(|sinks| tensor(sinks, [problem.num_heads_q], Dtype::F32)).into(),
            dscore_a: dscore_a.into(),
            dscore_b: dscore_b.into(),
        }
    }

    fn flash_attention_with_kvcache(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cache: CacheTensors<Self>,
        extras: Extras<Self>,
        options: AttentionOptions,
        lengths: CacheLengths,
    ) -> CachedAttentionOutput<Self> {
        let Appended { cache, used, extras } = cache::append([k, v], cache, extras, lengths);
        let attention = Call::new(q, used, extras, options).forward();
        CachedAttentionOutput { attention, cache }
    }

    fn flash_attention_block_states(
        empty: IntTensor<Self>,
        extras: Extras<Self>,
        problem: AttentionProblem,
    ) -> IntTensor<Self> {
        let (tensors, ..) = extras.into_tensors::<FlexTensor>();
        let mask = tensors.mask.as_ref().map(|mask| Broadcast::new(mask.storage::<u8>(), mask.layout()));
        let of =
            problem.block_mask.unwrap_or_else(|| panic!("block states were given for a problem without a block mask"));
        let ends = [&tensors.cu_seqlens_q, &tensors.cu_seqlens_k].map(|ends| ends.as_ref().map(integers));
        let sequences = ends[0].as_ref().zip(ends[1].as_ref()).map(|(q, k)| Sequences::packed(&problem, q, k));
        let tables = tables(tensors.mask_tensors());
        let states = blocks::classify(&problem, of, mask.as_ref(), &tables, sequences.as_ref());
        let layout = Layout::contiguous(empty.layout().shape().clone());
        FlexTensor::new(Bytes::from_elems(states), layout, DType::I32)
    }
}

/// Bytes from which an output is too large to be found missing only when it is allocated: there the process aborts.
const LARGE: usize = 1 << 30;

/// Whether the host has the memory for an output, of which nothing is touched.
fn check_output(problem: &AttentionProblem) -> Result<(), AttentionError> {
    let bytes = size_of::<f32>().saturating_mul(problem.rows()).saturating_mul(problem.head_dim_v);
    if bytes >= LARGE && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        let (bytes, device) = (bytes as u64, "Flex".to_string());
        return Err(AttentionError::Allocation { tensor: "o", bytes, max: None, device });
    }
    Ok(())
}

/// How the loops would go about this problem.
pub(crate) fn plan(problem: &AttentionProblem) -> Result<HostPlan, AttentionError> {
    check_output(problem)?;
    let threads = rayon::current_num_threads();
    let rows = problem.rows();
    let (q, o) = (rows * problem.head_dim, rows * problem.head_dim_v);
    let kv_rows = problem.batch * problem.num_heads_kv * problem.seq_k;
    let kv = kv_rows * (problem.head_dim + problem.head_dim_v);
    // Half-precision inputs are widened once, and their gradients summed in f32 before they are narrowed. Pages are gathered in f32.
    let widened = if problem.dtype == Dtype::F32 && problem.pages.is_none() { 0 } else { 2 * (q + o + kv) };
    let tiles = threads * (tile::Scratch::LEN + TILE_K * problem.head_dim.max(problem.head_dim_v));
    let splits = tile::num_splits(problem) * (o + 2 * rows);
    let scratch_bytes = size_of::<f32>() * (tiles + splits + widened);
    Ok(HostPlan { tile_q: TILE_Q, tile_k: TILE_K, threads, scratch_bytes })
}

/// Keys or values of a call.
enum KeysValues {
    /// `[batch, heads, seq_k, dim]`.
    Tensor(FlexTensor),
    Pages(Pages),
}

/// The arguments of a call. `q`, slopes and sinks are contiguous and in f32; `k` and `v` have contiguous rows or pages; the other tensors are as they
/// come. The seed of dropout is two words.
struct Call {
    problem: AttentionProblem,
    q: FlexTensor,
    kv: [KeysValues; 2],
    tensors: Tensors<FlexTensor>,
    seed: Option<[u32; 2]>,
    sequences: Option<Sequences>,
    states: Option<States>,
}

impl Call {
    fn new(q: FlexTensor, kv: [KeysValues; 2], extras: Extras<Flex>, options: AttentionOptions) -> Self {
        let (mut tensors, block_sizes, _) = extras.into_tensors::<FlexTensor>();
        let problem = dtype("q", q.dtype()).and_then(|dtype| {
            let shape = |tensor: &FlexTensor| tensor.layout().shape().to_vec();
            let [k, v] = kv.each_ref().map(|of| match of {
                KeysValues::Tensor(tensor) => shape(tensor),
                KeysValues::Pages(pages) => pages.shape().to_vec(),
            });
            problem([&shape(&q), &k, &v], &tensors.each_ref().map(shape), block_sizes, dtype, options)
        });
        // `api` has checked the same.
        let problem = problem.unwrap_or_else(|error| panic!("{error}"));
        let read = |tensor: &Option<FlexTensor>| tensor.as_ref().map(integers);
        let seed = read(&tensors.dropout_seed)
            .map(|words| [words[0], words[1]])
            .or(options.dropout_seed.map(dropout::seed))
            .filter(|_| options.dropout > 0.0);
        let sequences = problem.is_varlen().then(|| match (read(&tensors.cu_seqlens_q), read(&tensors.cu_seqlens_k)) {
            (Some(q), Some(k)) => Sequences::packed(&problem, &q, &k),
            _ => {
                let (q, k) = (read(&tensors.seq_lens_q), read(&tensors.seq_lens_k));
                Sequences::padded(&problem, q.as_deref(), k.as_deref())
            }
        });
        let states = problem.block_mask.zip(read(&tensors.block_mask)).map(|(of, states)| States::new(of, states));
        tensors.alibi_slopes = tensors.alibi_slopes.map(floats);
        tensors.sinks = tensors.sinks.map(floats);
        let kv = kv.map(|of| with_rows(of, tile::reads_once(&problem)));
        Call { problem, q: floats(q), kv, tensors, seed, sequences, states }
    }

    fn forward(&self) -> AttentionOutput<Flex> {
        let (out, lse) = forward::forward(&self.attention());
        AttentionOutput {
            out: tensor(out, self.problem.o_shape(), self.problem.dtype),
            lse: tensor(lse, self.problem.lse_shape(), Dtype::F32),
        }
    }

    fn attention(&self) -> Attention<'_> {
        let tensors = &self.tensors;
        let mask = tensors.mask.as_ref().map(|mask| Broadcast::new(mask.storage::<u8>(), mask.layout()));
        let bias = tensors.bias.as_ref().map(|bias| match bias.dtype() {
            DType::F16 => tile::Bias::F16(Broadcast::new(bias.storage::<f16>(), bias.layout())),
            DType::BF16 => tile::Bias::BF16(Broadcast::new(bias.storage::<bf16>(), bias.layout())),
            _ => tile::Bias::F32(Broadcast::new(bias.storage::<f32>(), bias.layout())),
        });
        let heads =
            Heads { slopes: tensors.alibi_slopes.as_ref().map(slice), sinks: tensors.sinks.as_ref().map(slice) };
        let q = Rows::contiguous(slice(&self.q), self.problem.q_shape());
        let functions =
            Functions { of_score: tables(tensors.score_tensors()), of_mask: tables(tensors.mask_tensors()) };
        let (sequences, states) = (self.sequences.as_ref(), self.states.as_ref());
        let options = tile::Optional { mask, bias, heads, functions, seed: self.seed, sequences, states };
        Attention::new(&self.problem, q, self.kv.each_ref().map(rows), options)
    }
}

/// What a function reads, where it lies.
fn tables(tensors: [Option<&FlexTensor>; TENSORS]) -> Tables<'_> {
    tensors.map(|tensor| tensor.map(|tensor| Broadcast::new(tensor.storage(), tensor.layout())))
}

/// Keys or values, where the rows of a head lie one after the other: a copy only where it is not like that already. The part of a cache that
/// is used is read where it lies. Halves are widened and pages are gathered, unless each is read `once`.
fn with_rows(of: KeysValues, once: bool) -> KeysValues {
    let tensor = match of {
        KeysValues::Pages(_) if once => return of,
        KeysValues::Pages(ref pages) => {
            let layout = Layout::contiguous(Shape::new(pages.shape()));
            return KeysValues::Tensor(widened(&rows(&of), layout));
        }
        KeysValues::Tensor(tensor) => tensor,
    };
    let [_, _, seq, dim]: [usize; 4] = tensor.layout().shape().dims();
    let strides: [isize; 4] = std::array::from_fn(|n| tensor.layout().strides()[n]);
    let follow = (dim == 1 || strides[3] == 1) && (seq == 1 || strides[2] == dim as isize);
    if !follow || strides[..2].iter().any(|stride| *stride < 0) || tensor.layout().num_elements() == 0 {
        return KeysValues::Tensor(floats(tensor));
    }
    if once || tensor.dtype() == DType::F32 {
        return KeysValues::Tensor(tensor);
    }
    let layout = Layout::contiguous(tensor.layout().shape().clone());
    KeysValues::Tensor(widened(&rows(&KeysValues::Tensor(tensor)), layout))
}

/// All rows in f32, in this layout.
fn widened(rows: &Rows<Elements<'_>>, layout: Layout) -> FlexTensor {
    let [_, heads, seq, dim]: [usize; 4] = layout.shape().dims();
    let mut data = vec![0.0; layout.num_elements()];
    for (head, to) in data.chunks_exact_mut((seq * dim).max(1)).enumerate() {
        rows.widen(head / heads, head % heads, 0, to);
    }
    FlexTensor::new(Bytes::from_elems(data), layout, DType::F32)
}

/// The rows of keys or values of [`with_rows`].
fn rows(of: &KeysValues) -> Rows<Elements<'_>> {
    let tensor = match of {
        KeysValues::Tensor(tensor) => tensor,
        KeysValues::Pages(pages) => return Rows::contiguous(Elements::Pages(pages), pages.shape()),
    };
    let layout = tensor.layout();
    let strides = [0, 1].map(|dim| layout.strides()[dim].unsigned_abs());
    let start = layout.start_offset();
    let elements = match tensor.dtype() {
        DType::F16 => Elements::F16(&tensor.storage()[start..]),
        DType::BF16 => Elements::BF16(&tensor.storage()[start..]),
        _ => Elements::F32(&tensor.storage()[start..]),
    };
    Rows::new(elements, strides, layout.shape()[3])
}

/// The tensor, contiguous and in f32: a copy only where it is not already.
fn floats(tensor: FlexTensor) -> FlexTensor {
    let tensor = tensor.to_contiguous();
    let data = match tensor.dtype() {
        DType::F16 => tensor.storage::<f16>()[elements(&tensor)].to_f32_vec(),
        DType::BF16 => tensor.storage::<bf16>()[elements(&tensor)].to_f32_vec(),
        _ => return tensor,
    };
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(tensor.layout().shape().clone()), DType::F32)
}

fn slice(tensor: &FlexTensor) -> &[f32] {
    &tensor.storage()[elements(tensor)]
}

/// The words of a tensor of integers.
fn integers(tensor: &FlexTensor) -> Vec<u32> {
    words(&tensor.clone().to_contiguous())
}

/// The words of a contiguous tensor of integers.
fn words(integers: &FlexTensor) -> Vec<u32> {
    match integers.dtype() {
        DType::I64 => integers.storage::<i64>()[elements(integers)].iter().map(|x| *x as u32).collect(),
        _ => integers.storage::<i32>()[elements(integers)].iter().map(|x| *x as u32).collect(),
    }
}

/// Where a contiguous tensor's elements lie in its storage.
fn elements(tensor: &FlexTensor) -> Range<usize> {
    let start = tensor.layout().start_offset();
    start..start + tensor.layout().num_elements()
}

/// A tensor of that shape and dtype; the values are rounded to it.
fn tensor<const RANK: usize>(data: Vec<f32>, shape: [usize; RANK], dtype: Dtype) -> FlexTensor {
    let layout = Layout::contiguous(Shape::new(shape));
    match dtype {
        Dtype::F32 => FlexTensor::new(Bytes::from_elems(data), layout, DType::F32),
        Dtype::F16 => {
            let mut halves = vec![f16::ZERO; data.len()];
            halves.convert_from_f32_slice(&data);
            FlexTensor::new(Bytes::from_elems(halves), layout, DType::F16)
        }
        Dtype::BF16 => {
            let mut halves = vec![bf16::ZERO; data.len()];
            halves.convert_from_f32_slice(&data);
            FlexTensor::new(Bytes::from_elems(halves), layout, DType::BF16)
        }
    }
}
