//! Attention through Burn's tensors: ours, Burn's own, and composed from matrix products, mask and softmax.

use super::{Implementation, Prepared, feed};
use crate::case::{Pass, SOFTCAP, Variant};
use crate::data::{Data, Results, Values};
use crate::error::Error;
use crate::timing::Work;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation, module};
use burn_flash_attention::{FlashAttentionOptions, flash_attention};
use cubecl::client::Client;
use flash_attention_kernels::{AttentionProblem, Dtype};

/// Forward, or forward and backward through autodiff, alternating between sets of inputs.
pub(super) struct Tensors {
    device: Device,
    implementation: Implementation,
    problem: AttentionProblem,
    variant: Variant,
    pass: Pass,
    inputs: Vec<Inputs>,
    /// Results of the last call: output, then gradients.
    last: Option<(Tensor<4>, Vec<Tensor<4>>)>,
}

struct Inputs {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    bias: Option<Tensor<4>>,
    mask: Option<Tensor<4, Bool>>,
    dout: Tensor<4>,
    slopes: Option<Tensor<1>>,
    sinks: Option<Tensor<1>>,
    /// `data.sequences`.
    sequences: Option<Tensor<1, Int>>,
    /// ALiBi biases `[1, heads_q, seq_q, seq_k]`, for implementations without slopes; computed once, as in models.
    ramp: Option<Tensor<4>>,
    /// Mask of causality or window, for implementations without these options; computed once, as in models.
    hidden: Option<Tensor<4, Bool>>,
}

impl Tensors {
    pub fn new(
        device: &cubecl::Device,
        implementation: Implementation,
        pass: Pass,
        data: &[Data],
    ) -> Result<Self, Error> {
        let inner = Device::new(device.clone());
        let device = if pass == Pass::Autodiff { inner.autodiff() } else { inner };
        let (problem, variant) = (data[0].problem, data[0].case.variant);
        if variant.is_function() || variant.is_direct() {
            return Err(Error::Other(format!("not supported: {variant} is timed with kernels called directly")));
        }
        let inputs = data.iter().map(|data| Inputs::new(data, implementation, &device)).collect();
        Ok(Tensors { device, implementation, problem, variant, pass, inputs, last: None })
    }

    fn attention(&self, inputs: &Inputs) -> Tensor<4> {
        let Inputs { q, k, v, bias, mask, hidden, slopes, sinks, sequences, ramp, .. } = inputs;
        let (q, k, v, p) = (q.clone(), k.clone(), v.clone(), &self.problem);
        match self.implementation {
            Implementation::Ours | Implementation::OursFast | Implementation::OursTf32 => {
                let mut options = FlashAttentionOptions::new()
                    .with_causal(p.options.causal)
                    .with_backward_order(p.options.backward_order)
                    .with_precision(p.options.precision);
                if let Variant::Window(keys) = self.variant {
                    options = options.with_window_left(keys - 1);
                }
                if self.variant == Variant::Softcap {
                    options = options.with_softcap(SOFTCAP);
                }
                if let Some(slopes) = slopes {
                    options = options.with_alibi_slopes(slopes.clone());
                }
                options = options.with_sinks(sinks.clone()).with_dropout(p.options.dropout);
                options = options.with_dropout_seed(p.options.dropout_seed);
                if p.cu_seqlens.is_some() {
                    options = options.with_cu_seqlens_q(sequences.clone()).with_cu_seqlens_k(sequences.clone());
                } else {
                    options = options.with_seq_lens_q(sequences.clone()).with_seq_lens_k(sequences.clone());
                }
                if let Some(mask) = mask {
                    options = options.with_mask(mask.clone());
                }
                if let Some(bias) = bias {
                    options = options.with_bias(bias.clone());
                }
                flash_attention(q, k, v, &options)
            }
            Implementation::Burn => {
                let options = AttentionModuleOptions {
                    softcap: (self.variant == Variant::Softcap).then_some(f64::from(SOFTCAP)),
                    is_causal: p.options.causal,
                    ..Default::default()
                };
                let scores = p.scores_shape();
                // Burn's operation takes neither grouped heads nor broadcast masks.
                let mask = match self.variant {
                    Variant::Window(_) => hidden.clone(),
                    _ => mask.clone(),
                };
                let mask = mask.map(|mask| mask.expand(scores));
                let bias = bias.as_ref().or(ramp.as_ref()).map(|bias| bias.clone().expand(scores));
                module::attention(q, repeated(k, p), repeated(v, p), mask, bias, options)
            }
            Implementation::Composed => {
                let mut scores = q.matmul(repeated(k, p).swap_dims(2, 3)).mul_scalar(p.softmax_scale());
                if self.variant == Variant::Softcap {
                    scores = scores.div_scalar(SOFTCAP).tanh().mul_scalar(SOFTCAP);
                }
                for added in [bias, ramp].into_iter().flatten() {
                    scores = scores + added.clone();
                }
                for hidden in [mask, hidden].into_iter().flatten() {
                    scores = scores.mask_fill(hidden.clone().expand(p.scores_shape()), f32::NEG_INFINITY);
                }
                let Some(sinks) = sinks else { return activation::softmax(scores, 3).matmul(repeated(v, p)) };
                // The sink is one more column, which is not multiplied by any value.
                let column = sinks.clone().cast(scores.dtype()).reshape([1, p.num_heads_q, 1, 1]);
                let scores = Tensor::cat(vec![scores, column.expand([p.batch, p.num_heads_q, p.seq_q, 1])], 3);
                activation::softmax(scores, 3).narrow(3, 0, p.seq_k).matmul(repeated(v, p))
            }
            // Scaled, because f16 would overflow otherwise.
            Implementation::Products => {
                let q = q.mul_scalar(p.softmax_scale());
                q.matmul(repeated(k, p).swap_dims(2, 3)).matmul(repeated(v, p))
            }
        }
    }
}

/// Repeats key/value heads for the query heads that share them.
fn repeated(x: Tensor<4>, p: &AttentionProblem) -> Tensor<4> {
    if p.group_size() == 1 {
        return x;
    }
    let [batch, heads, seq, dim] = x.dims();
    let group = p.group_size();
    x.unsqueeze_dim::<5>(2).expand([batch, heads, group, seq, dim]).reshape([batch, heads * group, seq, dim])
}

impl Inputs {
    fn new(data: &Data, implementation: Implementation, device: &Device) -> Self {
        let p = &data.problem;
        let leaf = |values: &Values, shape| {
            let x = tensor(values, shape, p.dtype, device);
            if device.is_autodiff() { x.require_grad() } else { x }
        };
        let mask = data.mask.as_ref().zip(p.mask);
        // Burn's own operation has causality, but no windows.
        let told = match implementation {
            Implementation::Ours | Implementation::OursFast | Implementation::OursTf32 => true,
            Implementation::Burn => !matches!(data.case.variant, Variant::Window(_)),
            Implementation::Composed | Implementation::Products => false,
        };
        let hidden = (p.options.causal && !told).then(|| {
            let shift = p.seq_k as i64 - p.seq_q as i64;
            let later = Tensor::<2, Bool>::tril_mask([p.seq_q, p.seq_k], shift, device);
            let hidden = match data.case.variant {
                Variant::Window(keys) => {
                    let earlier = Tensor::<2, Bool>::triu_mask([p.seq_q, p.seq_k], shift + 1 - keys as i64, device);
                    later.bool_or(earlier)
                }
                _ => later,
            };
            hidden.unsqueeze()
        });
        let f32s = |values: &Vec<f32>| Tensor::<1>::from_data(values.as_slice(), (device, DType::F32));
        let slopes = data.slopes.as_ref().map(f32s);
        let ours = matches!(implementation, Implementation::Ours | Implementation::OursFast | Implementation::OursTf32);
        let ramp = slopes.clone().filter(|_| !ours).map(|slopes| {
            let at = |n: usize| Tensor::<1, Int>::arange(0..n as i64, device).float().cast(DType::F32);
            let diagonal = p.seq_k as f32 - p.seq_q as f32;
            let distances = (at(p.seq_q).unsqueeze_dim::<2>(1) + diagonal - at(p.seq_k).unsqueeze_dim(0)).abs();
            let slopes = slopes.neg().reshape([1, p.num_heads_q, 1, 1]);
            (slopes * distances.unsqueeze::<4>()).cast(burn_dtype(p.dtype))
        });
        let sinks = data.sinks.as_ref().map(f32s);
        Inputs {
            slopes,
            sequences: data.sequences.as_ref().map(|of| {
                Tensor::from_data(TensorData::from(&of.iter().map(|n| *n as i32).collect::<Vec<_>>()[..]), device)
            }),
            sinks: sinks.map(|sinks| if device.is_autodiff() { sinks.require_grad() } else { sinks }),
            ramp,
            q: leaf(&data.q, p.q_shape()),
            k: leaf(&data.k, p.k_shape()),
            v: leaf(&data.v, p.v_shape()),
            bias: data.bias.as_ref().zip(p.bias).map(|(bias, shape)| leaf(bias, shape)),
            mask: mask.map(|(mask, shape)| Tensor::from_data(TensorData::new(mask.clone(), shape), device)),
            dout: tensor(&data.dout, p.o_shape(), p.dtype, device),
            hidden,
        }
    }
}

fn burn_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
    }
}

fn tensor(values: &Values, shape: [usize; 4], dtype: Dtype, device: &Device) -> Tensor<4> {
    let dtype = burn_dtype(dtype);
    Tensor::from_data(TensorData::from_bytes_vec(values.bytes.clone(), shape, dtype), (device, dtype))
}

impl Work for Tensors {
    fn call(&mut self, turn: usize) -> Result<(), Error> {
        // Frees the last results first, as a training step does before the next one.
        self.last = None;
        let inputs = &self.inputs[turn % self.inputs.len()];
        let o = self.attention(inputs);
        let gradients = if self.pass == Pass::Autodiff {
            let gradients = feed::loss(o.clone(), inputs.dout.clone()).backward();
            let leaves = [Some(&inputs.q), Some(&inputs.k), Some(&inputs.v), inputs.bias.as_ref()];
            leaves.into_iter().flatten().filter_map(|x| x.grad(&gradients)).collect()
        } else {
            Vec::new()
        };
        self.last = Some((o.detach(), gradients));
        Ok(())
    }

    fn finish(&self) -> Result<(), Error> {
        self.device.sync().map_err(|error| Error::Other(format!("the device failed: {error}")))
    }

    fn stream(&self) -> Option<&Client> {
        None
    }
}

impl Prepared for Tensors {
    fn kernel(&self) -> String {
        match self.implementation {
            Implementation::Ours | Implementation::OursFast | Implementation::OursTf32 => "planned",
            Implementation::Burn => "module::attention",
            Implementation::Composed => "matmul, softmax, matmul",
            Implementation::Products => "matmul, matmul",
        }
        .into()
    }

    fn results(&mut self) -> Result<Results, Error> {
        self.call(0)?;
        let (o, gradients) =
            self.last.take().ok_or_else(|| Error::Other("there are no results, because no call was made".into()))?;
        let dtype = self.problem.dtype;
        let read = |x: Tensor<4>| Values { bytes: x.into_data().bytes().to_vec(), dtype };
        let mut gradients = gradients.into_iter().map(read);
        Ok(Results {
            o: (self.implementation != Implementation::Products).then(|| read(o)),
            lse: None,
            dq: gradients.next(),
            dk: gradients.next(),
            dv: gradients.next(),
            dbias: gradients.next(),
        })
    }
}
