//! The kernels of this repository, called directly.

use super::Prepared;
use crate::case::Pass;
use crate::data::{Data, Results, Values, to_f64};
use crate::error::Error;
use crate::timing::{Work, sync};
use cubecl::client::Client;
use flash_attention_kernels::launch::{MaskStorage, MaskView};
use flash_attention_kernels::{
    AttentionProblem, BackwardTiles, Dtype, Gradients, Inputs, Kernel, Plan, Saved, Scratch, TensorView, backward_with,
    forward_with, plan,
};

/// Forward, backward or both, with inputs that take turns.
pub(super) struct Kernels {
    client: Client,
    problem: AttentionProblem,
    plan: Plan,
    pass: Pass,
    tensors: Vec<Tensors>,
}

/// One set of inputs, and where its results go.
struct Tensors {
    inputs: Inputs,
    saved: Saved,
    gradients: Option<(Gradients, Scratch)>,
}

impl Kernels {
    pub fn new(client: Client, kernel: Option<Kernel>, pass: Pass, data: &[Data]) -> Result<Self, Error> {
        let problem = data[0].problem;
        let plan = plan(&client, &problem)?;
        if let Some(kernel) = kernel.filter(|kernel| *kernel != plan.kernel) {
            return Err(Error::Other(format!("not supported: {} cannot run this", kernel.name())));
        }
        let tensors = data.iter().map(|data| Tensors::new(&client, data, pass)).collect();
        let kernels = Kernels { client, problem, plan, pass, tensors };
        if pass == Pass::Backward {
            // It reads what the forward saved.
            kernels.tensors.iter().try_for_each(|tensors| kernels.forward(tensors))?;
        }
        Ok(kernels)
    }

    fn forward(&self, tensors: &Tensors) -> Result<(), Error> {
        let Tensors { inputs, saved, .. } = tensors;
        Ok(forward_with(&self.client, &self.problem, inputs, &saved.o, &saved.lse, self.plan.forward)?)
    }

    fn backward(&self, tensors: &Tensors) -> Result<(), Error> {
        let Some((gradients, scratch)) = &tensors.gradients else { return Ok(()) };
        let Plan { backward: tile, dkdv_together, .. } = self.plan;
        let tiles = BackwardTiles { dq: tile, dkdv: tile, dkdv_together };
        let Tensors { inputs, saved, .. } = tensors;
        Ok(backward_with(&self.client, &self.problem, inputs, saved, gradients, scratch, Some(tiles))?)
    }
}

impl Tensors {
    fn new(client: &Client, data: &Data, pass: Pass) -> Self {
        let p = &data.problem;
        let size = p.dtype.size();
        let upload = |values: &Values, shape| TensorView::contiguous(client.create_from_slice(&values.bytes), shape);
        let empty =
            |shape: [usize; 4]| TensorView::contiguous(client.empty(shape.iter().product::<usize>() * size), shape);
        let mask = data.mask.as_ref().zip(p.mask).map(|(mask, shape)| {
            // WGSL has no bytes: four for each, which every device takes.
            let bytes: Vec<u8> = mask.iter().flat_map(|hides| u32::from(*hides).to_le_bytes()).collect();
            let tensor = TensorView::contiguous(client.create_from_slice(&bytes), shape);
            MaskView { tensor, storage: MaskStorage::U32 }
        });
        let inputs = Inputs {
            q: upload(&data.q, p.q_shape()),
            k: upload(&data.k, p.k_shape()),
            v: upload(&data.v, p.v_shape()),
            mask,
            bias: data.bias.as_ref().zip(p.bias).map(|(bias, shape)| upload(bias, shape)),
        };
        let gradients = (pass != Pass::Forward).then(|| {
            let gradients = Gradients {
                dq: Some(empty(p.q_shape())),
                dk: Some(empty(p.k_shape())),
                dv: Some(empty(p.v_shape())),
                dbias: p.bias.map(empty),
            };
            (gradients, Scratch::empty(client, p))
        });
        let o = empty(p.o_shape());
        let dout = if gradients.is_some() { upload(&data.dout, p.o_shape()) } else { o.clone() };
        let lse = TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
        Tensors { inputs, saved: Saved { o, lse, dout, dlse: None }, gradients }
    }
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
}

impl Prepared for Kernels {
    fn kernel(&self) -> String {
        self.plan.kernel.name().into()
    }

    fn results(&mut self) -> Result<Results, Error> {
        let read = |bytes, dtype| to_f64(&self.client.read_one_unchecked(bytes), dtype);
        let dtype = self.problem.dtype;
        let Tensors { saved, gradients, .. } = &self.tensors[0];
        let mut results = Results {
            o: Some(read(saved.o.handle.clone(), dtype)),
            lse: Some(read(saved.lse.handle.clone(), Dtype::F32)),
            ..Default::default()
        };
        if let Some((gradients, _)) = gradients {
            let gradient = |view: &Option<TensorView>| view.as_ref().map(|view| read(view.handle.clone(), dtype));
            results.dq = gradient(&gradients.dq);
            results.dk = gradient(&gradients.dk);
            results.dv = gradient(&gradients.dv);
            results.dbias = gradient(&gradients.dbias);
        }
        Ok(results)
    }
}
