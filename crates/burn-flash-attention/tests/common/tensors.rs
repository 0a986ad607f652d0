//! The tensors of a case on a device.

use super::{Data, How, Layout};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};
use burn_flash_attention::{BlockMask, FlashAttentionOptions};
use flash_attention_kernels::Dtype;

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
        let mask = problem.mask.zip(data.tensors.mask.as_ref()).map(|(shape, mask)| mask_tensor(mask, shape, device));
        let bias =
            problem.bias.zip(data.tensors.bias.as_ref()).map(|(shape, bias)| leaf(bias, shape, how.tracked.bias));
        let of_heads = |tensor: Tensor<1>, tracked: bool| if tracked { tensor.require_grad() } else { tensor };
        let f32s = |values: &Vec<f64>| tensor(values, [values.len()], Dtype::F32, device);
        let slopes = problem.alibi_slopes.zip(data.tensors.alibi_slopes.as_ref()).map(|(shape, slopes)| {
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
        let score_tensors = (0..2).filter_map(|nth| {
            table(&data.tensors.score_tensors[nth], problem.score_tensors[nth], how.tracked.tensors[nth])
        });
        let mask_tensors =
            (0..2).filter_map(|nth| table(&data.tensors.mask_tensors[nth], problem.mask_tensors[nth], false));
        let block_mask = problem.block_mask.zip(data.tensors.block_mask.as_ref()).map(|(of, states)| {
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
        options.seq_lens_q = lens(data.tensors.seq_lens_q.as_ref());
        options.seq_lens_k = lens(data.tensors.seq_lens_k.as_ref());
        options.cu_seqlens_q = lens(data.tensors.cu_seqlens_q.as_ref());
        options.cu_seqlens_k = lens(data.tensors.cu_seqlens_k.as_ref());
        options.alibi_slopes = slopes.clone().map(|slopes| slopes.into());
        options.sinks = data.tensors.sinks.as_ref().map(|sinks| of_heads(f32s(sinks), how.tracked.sinks));
        Tensors {
            slopes,
            q: leaf(&data.tensors.q, problem.q_shape(), how.tracked.q),
            k: leaf(&data.tensors.k, problem.k_shape(), how.tracked.k),
            v: leaf(&data.tensors.v, problem.v_shape(), how.tracked.v),
            options,
        }
    }
}

/// Standard normal random numbers.
pub fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}
