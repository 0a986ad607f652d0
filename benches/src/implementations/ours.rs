//! Kernels of this repository, called directly.

use super::Prepared;
use crate::case::{Pass, Variant};
use crate::data::{Data, Results, Values, page_table};
use crate::error::Error;
use crate::timing::{Work, sync};
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use flash_attention_kernels::launch::{MaskStorage, MaskView};
use flash_attention_kernels::{
    AttentionProblem, BackwardTiles, Dtype, Forward, Gradients, Inputs, Kernel, KvStorage, Plan, Saved, Scratch,
    TensorView, backward_with, block_states, forward_with, plan, plan_with,
};

/// Forward, backward or both, alternating between sets of inputs.
pub(super) struct Kernels {
    client: Client,
    problem: AttentionProblem,
    plan: Plan,
    pass: Pass,
    tensors: Vec<Tensors>,
}

/// One set of inputs, with memory for its results.
pub(crate) struct Tensors {
    pub inputs: Inputs,
    pub saved: Saved,
    /// Empty, and without scratch, if only the forward runs.
    pub gradients: Gradients,
    scratch: Option<Scratch>,
}

impl Kernels {
    pub fn new(client: Client, kernel: Option<Kernel>, pass: Pass, data: &[Data]) -> Result<Self, Error> {
        let problem = data[0].problem_of_kernels()?;
        let plan = match kernel {
            Some(kernel) => {
                plan_with(&client, &problem, kernel).map_err(|error| Error::Other(format!("not supported: {error}")))?
            }
            None => plan(&client, &problem)?,
        };
        let tensors = data.iter().map(|data| Tensors::new(&client, data, pass)).collect::<Result<_, _>>()?;
        let kernels = Kernels { client, problem, plan, pass, tensors };
        if pass == Pass::Backward {
            // The backward reads the saved results of the forward.
            kernels.tensors.iter().try_for_each(|tensors| kernels.forward(tensors))?;
        }
        Ok(kernels)
    }

    fn forward(&self, tensors: &Tensors) -> Result<(), Error> {
        tensors.forward(&self.client, &self.problem, self.plan.forward)
    }

    fn backward(&self, tensors: &Tensors) -> Result<(), Error> {
        tensors.backward(&self.client, &self.problem, &tensors.gradients, self.plan.backward)
    }
}

impl Tensors {
    /// Uploads the inputs. A block mask of a function is computed here, before anything is timed.
    pub fn new(client: &Client, data: &Data, pass: Pass) -> Result<Self, Error> {
        let p = &data.problem_of_kernels()?;
        let size = p.dtype.size();
        let upload = |values: &Values, shape| TensorView::contiguous(client.create_from_slice(&values.bytes), shape);
        let empty =
            |shape: [usize; 4]| TensorView::contiguous(client.empty(shape.iter().product::<usize>() * size), shape);
        let mask = data.mask.as_ref().zip(p.mask).map(|(mask, shape)| {
            // WGSL has no bytes. Four bytes for each element work on every device.
            let bytes: Vec<u8> = mask.iter().flat_map(|hides| u32::from(*hides).to_le_bytes()).collect();
            let tensor = TensorView::contiguous(client.create_from_slice(&bytes), shape);
            MaskView { tensor, storage: MaskStorage::U32 }
        });
        let floats = |values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            client.create_from_slice(&bytes)
        };
        let words = |words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|x| x.to_le_bytes()).collect();
            client.create_from_slice(&bytes)
        };
        let sequences = |is: bool| {
            let of = data.sequences.as_ref().filter(|_| is)?;
            Some(TensorView::contiguous(words(of), [of.len()]))
        };
        let table = |of: &Option<Vec<f32>>, shape: Option<[usize; 4]>| {
            of.as_ref().zip(shape).map(|(values, shape)| TensorView::contiguous(floats(values), shape))
        };
        let (k, v, table_of_pages) = match p.pages {
            None => (upload(&data.k, p.k_shape()), upload(&data.v, p.v_shape()), None),
            Some(pages) => {
                let table = page_table(pages);
                let pool = |values: &Values, shape| {
                    let pool = client.create_from_slice(&data.in_pages(values, pages, &table));
                    match pages.storage {
                        KvStorage::E4m3 => TensorView::e4m3_pages(pool, shape),
                        _ => TensorView::contiguous(pool, shape),
                    }
                };
                let (k, v) = (pool(&data.k, p.k_shape()), pool(&data.v, p.v_shape()));
                (k, v, Some(TensorView::contiguous(words(&table), [p.batch, pages.max_pages])))
            }
        };
        let slopes = data.slopes.as_ref().zip(p.alibi_slopes);
        let mut inputs = Inputs {
            mask,
            bias: data.bias.as_ref().zip(p.bias).map(|(bias, shape)| upload(bias, shape)),
            alibi_slopes: slopes.map(|(slopes, shape)| TensorView::contiguous(floats(slopes), shape)),
            sinks: data.sinks.as_ref().map(|sinks| TensorView::contiguous(floats(sinks), [p.num_heads_q])),
            seq_lens_q: sequences(p.seq_lens_q),
            seq_lens_k: sequences(p.seq_lens_k),
            cu_seqlens_q: sequences(p.cu_seqlens.is_some()),
            cu_seqlens_k: sequences(p.cu_seqlens.is_some()),
            score_tensors: p.score_tensors.map(|shape| table(&data.slopes, shape)),
            mask_tensors: p.mask_tensors.map(|shape| table(&data.documents, shape)),
            page_table: table_of_pages,
            ..Inputs::new(upload(&data.q, p.q_shape()), k, v)
        };
        if let Some(mask) = p.block_mask {
            let states = match &data.blocks {
                Some(states) => TensorView::contiguous(words(states), mask.blocks),
                None => {
                    let states =
                        TensorView::contiguous(client.empty(4 * mask.blocks.iter().product::<usize>()), mask.blocks);
                    block_states(client, p, &inputs, &states)?;
                    states
                }
            };
            inputs.block_mask = Some(states);
        }
        let with_backward = pass != Pass::Forward;
        let variant = data.case.variant;
        let with_function = matches!(variant, Variant::AlibiFunctionGradient | Variant::TemperatureGradient);
        let of_function = p.score_tensors[0].filter(|_| with_function);
        let gradients = if with_backward {
            Gradients {
                dq: Some(empty(p.q_shape())),
                dk: Some(empty(p.k_shape())),
                dv: Some(empty(p.v_shape())),
                dbias: p.bias.filter(|_| variant != Variant::KeyBias).map(empty),
                dalibi_slopes: (variant == Variant::AlibiGradient).then(|| floats_of(client, [1, p.num_heads_q])),
                dsinks: p.sinks.then(|| TensorView::contiguous(client.empty(4 * p.num_heads_q), [p.num_heads_q])),
                dscore_tensors: [of_function.map(|shape| floats_of(client, shape)), None],
            }
        } else {
            Gradients::default()
        };
        let scratch = with_backward.then(|| Scratch::empty(client, p));
        let o = empty(p.o_shape());
        let dout = if with_backward { upload(&data.dout, p.o_shape()) } else { o.clone() };
        let lse = TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
        Ok(Tensors { inputs, saved: Saved { o, lse, dout, dlse: None }, gradients, scratch })
    }

    /// Launches the forward.
    pub fn forward(
        &self,
        client: &Client,
        problem: &AttentionProblem,
        kernel: impl Into<Forward>,
    ) -> Result<(), Error> {
        Ok(forward_with(client, problem, &self.inputs, &self.saved.o, &self.saved.lse, kernel)?)
    }

    /// Launches the backward for these gradients.
    pub fn backward(
        &self,
        client: &Client,
        problem: &AttentionProblem,
        wanted: &Gradients,
        tiles: BackwardTiles,
    ) -> Result<(), Error> {
        let Some(scratch) = &self.scratch else { return Ok(()) };
        Ok(backward_with(client, problem, &self.inputs, &self.saved, wanted, scratch, Some(tiles))?)
    }

    /// Reads the results of the forward and of these gradients.
    pub fn results(&self, client: &Client, dtype: Dtype, wanted: &Gradients) -> Results {
        let read = |handle, dtype| Values { bytes: client.read_one_unchecked(handle).to_vec(), dtype };
        let gradient = |view: &Option<TensorView>| view.as_ref().map(|view| read(view.handle.clone(), dtype));
        Results {
            o: Some(read(self.saved.o.handle.clone(), dtype)),
            lse: Some(read(self.saved.lse.handle.clone(), Dtype::F32)),
            dq: gradient(&wanted.dq),
            dk: gradient(&wanted.dk),
            dv: gradient(&wanted.dv),
            // The oracle samples rows.
            dbias: gradient(&wanted.dbias.clone().filter(|dbias| dbias.shape[2] > 1)),
        }
    }
}

/// A new tensor of f32.
fn floats_of<const RANK: usize>(client: &Client, shape: [usize; RANK]) -> TensorView<RANK> {
    TensorView::contiguous(client.empty(4 * shape.iter().product::<usize>()), shape)
}

impl Work for Kernels {
    fn call(&mut self, turn: usize) -> Result<(), Error> {
        let tensors = &self.tensors[turn % self.tensors.len()];
        match self.pass {
            Pass::Forward => self.forward(tensors),
            Pass::Backward => self.backward(tensors),
            Pass::Both | Pass::Autodiff => self.forward(tensors).and_then(|()| self.backward(tensors)),
        }
    }

    fn finish(&self) -> Result<(), Error> {
        sync(&self.client)
    }

    fn stream(&self) -> Option<&Client> {
        Some(&self.client)
    }

    fn forget(&mut self) {
        let Saved { o, lse, .. } = &self.tensors[0].saved;
        let sizes = [(o.shape.iter().product::<usize>(), self.problem.dtype.size()), (self.problem.rows(), 4)];
        for (handle, (len, size)) in [&o.handle, &lse.handle].into_iter().zip(sizes) {
            // NaN in every type.
            self.client.write(handle, Bytes::from_bytes_vec(vec![0xff; len * size]));
        }
    }
}

impl Prepared for Kernels {
    fn kernel(&self) -> String {
        let forward = self.plan.forward.kernel().name();
        let BackwardTiles { dq, dkdv, dbias, .. } = self.plan.backward;
        let mut backward = vec![dq.kernel().name(), dkdv.kernel().name()];
        if self.problem.bias.is_some() {
            backward.push(dbias.kernel().name());
        }
        let mut kernels = match self.pass {
            Pass::Forward => vec![forward],
            Pass::Backward => backward,
            Pass::Both | Pass::Autodiff => [vec![forward], backward].concat(),
        };
        kernels.dedup();
        kernels.join(", ")
    }

    fn results(&mut self) -> Result<Results, Error> {
        let tensors = &self.tensors[0];
        Ok(tensors.results(&self.client, self.problem.dtype, &tensors.gradients))
    }
}
