//! A call with all its arguments, and the checks for a refused call.

use crate::common::*;
use cubecl::client::Client;
use cubecl::logging::{LaunchObservation, LaunchObserver};
use flash_attention_kernels::mods::{MaskFn, ScoreFn};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, BackwardTiles, Dtype, Forward, Gradients, HopperTile, Inputs,
    MaskStorage, MaskView, Saved, Scratch, TensorView, TileShape, backward, backward_with, block_states, dropout_kept,
    forward, forward_with,
};
use flash_attention_reference::mods::{Bent, Strided};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

thread_local! {
    /// Number of launches of this thread.
    static LAUNCHED: Cell<usize> = const { Cell::new(0) };
}

/// Counts launches of each thread.
struct Count;

impl LaunchObserver for Count {
    fn launched(&self, _kernel: &'static str) {
        LAUNCHED.set(LAUNCHED.get() + 1);
    }
}

/// Launches of this thread since the first call of this function in the process.
pub fn launched() -> usize {
    static OBSERVATION: OnceLock<LaunchObservation> = OnceLock::new();
    OBSERVATION.get_or_init(|| LaunchObservation::new(Arc::new(Count)));
    LAUNCHED.get()
}

/// An entry point. `With` means that the caller chooses the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    Forward,
    ForwardWith,
    Backward,
    BackwardWith,
    States,
    Kept,
}

/// Reads an output with its guards, bit by bit.
type Read = Box<dyn Fn() -> Vec<u64>>;

/// Every argument of every entry point.
#[derive(Clone)]
pub struct Call {
    pub client: Client,
    pub problem: AttentionProblem,
    pub inputs: Inputs,
    pub saved: Saved,
    pub gradients: Gradients,
    pub scratch: Scratch,
    pub forward: Forward,
    pub backward: BackwardTiles,
    pub states: TensorView,
    pub seed: TensorView<1>,
    pub kept: TensorView,
    /// The poisoned outputs, with their initial contents.
    outputs: Rc<Vec<(Read, Vec<u64>)>>,
}

/// The smallest tiles, which every device takes.
pub const TILE: TileShape = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };

/// Tiles for Hopper.
pub const HOPPER: HopperTile =
    HopperTile { consumer_groups: 1, warpgroups: 2, tile_k: 64, stages: 2, ping_pong: false, producer_warp: false };

/// A tensor of zeros, with a buffer for elements of up to four bytes.
pub fn zeros<const RANK: usize>(client: &Client, shape: [usize; RANK]) -> TensorView<RANK> {
    TensorView::contiguous(client.create_from_slice(&vec![0; 4 * shape.iter().product::<usize>()]), shape)
}

impl Call {
    /// Arguments that match the problem.
    pub fn new(client: &Client, problem: AttentionProblem) -> Self {
        fn output<const RANK: usize>(
            client: &Client,
            outputs: &mut Vec<(Read, Vec<u64>)>,
            dtype: Dtype,
            shape: [usize; RANK],
        ) -> TensorView<RANK> {
            let guarded = Guarded::output(client, dtype, shape, Poison::Nan);
            let (view, client) = (guarded.view.clone(), client.clone());
            let read: Read = Box::new(move || guarded.read(&client, "an output").iter().map(|x| x.to_bits()).collect());
            let held = read();
            outputs.push((read, held));
            view
        }
        let (p, f32, mut outputs) = (&problem, Dtype::F32, Vec::new());
        let all = &mut outputs;
        let tensor = |shape: Option<[usize; 4]>| shape.map(|shape| zeros(client, shape));
        let lens = |there: bool| there.then(|| zeros(client, [p.batch]));
        let ends = || p.cu_seqlens.map(|sequences| zeros(client, [sequences + 1]));
        let inputs = Inputs {
            mask: tensor(p.mask).map(|tensor| MaskView { tensor, storage: MaskStorage::U32 }),
            bias: tensor(p.bias),
            alibi_slopes: p.alibi_slopes.map(|shape| zeros(client, shape)),
            sinks: p.sinks.then(|| zeros(client, [p.num_heads_q])),
            dropout_seed: (p.options.dropout > 0.0).then(|| zeros(client, [2])),
            seq_lens_q: lens(p.seq_lens_q),
            seq_lens_k: lens(p.seq_lens_k),
            cu_seqlens_q: ends(),
            cu_seqlens_k: ends(),
            score_tensors: p.score_tensors.map(tensor),
            mask_tensors: p.mask_tensors.map(tensor),
            block_mask: tensor(p.block_mask.map(|mask| mask.blocks)),
            ..Inputs::new(zeros(client, p.q_shape()), zeros(client, p.k_shape()), zeros(client, p.v_shape()))
        };
        let saved = Saved {
            o: output(client, all, p.dtype, p.o_shape()),
            lse: output(client, all, f32, p.lse_shape()),
            dout: zeros(client, p.o_shape()),
            dlse: Some(zeros(client, p.lse_shape())),
        };
        let gradients = Gradients {
            dq: Some(output(client, all, p.dtype, p.q_shape())),
            dk: Some(output(client, all, p.dtype, p.k_shape())),
            dv: Some(output(client, all, p.dtype, p.v_shape())),
            dbias: p.bias.map(|shape| output(client, all, p.dtype, shape)),
            dalibi_slopes: p.alibi_slopes.map(|shape| output(client, all, f32, shape)),
            dsinks: p.sinks.then(|| output(client, all, f32, [p.num_heads_q])),
            dscore_tensors: p.score_tensors.map(|shape| shape.map(|shape| output(client, all, f32, shape))),
        };
        let Scratch { stats, bias_sums, .. } = Scratch::empty(client, p);
        let scratch = Scratch {
            stats: output(client, all, f32, stats.shape),
            bias_sums: bias_sums.map(|sums| output(client, all, f32, sums.shape)),
            dq_accum: Some(output(client, all, f32, [stats.shape[1], p.head_dim.next_multiple_of(64)])),
            dq_turns: Some(output(client, all, f32, [stats.shape[1] / 64, 4])),
        };
        Call {
            states: output(client, all, f32, p.block_mask.map_or([1; 4], |mask| mask.blocks)),
            kept: output(client, all, f32, p.scores_shape()),
            seed: zeros(client, [2]),
            client: client.clone(),
            forward: TILE.into(),
            backward: BackwardTiles::portable(TILE, true),
            outputs: Rc::new(outputs),
            problem,
            inputs,
            saved,
            gradients,
            scratch,
        }
    }

    /// Element size of an argument: the problem's dtype, or four bytes.
    pub fn size_of(&self, argument: &str) -> usize {
        let of_problem = ["q", "k", "v", "bias", "o", "dout", "dq", "dk", "dv", "dbias"].contains(&argument);
        if of_problem { self.problem.dtype.size() } else { 4 }
    }

    pub fn run(&self, entry: Entry) -> Result<(), AttentionError> {
        let Call { client, problem: p, inputs, saved, gradients, scratch, .. } = self;
        match entry {
            Entry::Forward => forward(client, p, inputs, &saved.o, &saved.lse).map(|_| ()),
            Entry::ForwardWith => forward_with(client, p, inputs, &saved.o, &saved.lse, self.forward),
            Entry::Backward => backward(client, p, inputs, saved, gradients),
            Entry::BackwardWith => backward_with(client, p, inputs, saved, gradients, scratch, Some(self.backward)),
            Entry::States => block_states(client, p, inputs, &self.states),
            Entry::Kept => dropout_kept(client, p, &self.seed, &self.kept),
        }
    }

    /// Asserts that the call is refused with the expected error, launches nothing and writes nothing. Returns the error.
    pub fn refused(&self, entry: Entry, name: &str, expected: impl Fn(&AttentionError) -> bool) -> AttentionError {
        let before = launched();
        let error = self.run(entry).expect_err(name);
        assert!(expected(&error), "{entry:?}, {name}: {error:?}");
        assert_eq!(launched(), before, "{entry:?}, {name}: kernels were launched");
        for (read, held) in self.outputs.iter() {
            assert!(read() == *held, "{entry:?}, {name}: an output was written");
        }
        let options = AttentionOptions { causal: true, ..Default::default() };
        Case::new([1, 4, 4, 64, 64, 16, 16], Dtype::F32, options).check(&self.client);
        assert!(launched() > before, "the launches of a correct call must be counted");
        error
    }
}

/// A problem without options, in the lane's element type.
pub fn plain() -> AttentionProblem {
    let [q, kv] = [[2, 4, 8, 4], [2, 2, 9, 4]];
    AttentionProblem::new(&q, &kv, &kv, chosen_dtype(), AttentionOptions::default()).unwrap()
}

/// A problem with every option but packed sequences.
pub fn full() -> AttentionProblem {
    let (score_mod, mask_mod) = (Some(ScoreFn::of::<Bent>()), Some(MaskFn::of::<Strided>()));
    let options = AttentionOptions { dropout: 0.25, score_mod, mask_mod, ..Default::default() };
    let mut p = plain();
    p.options = options;
    let p = p.with_mask(&[2, 4, 8, 9]).and_then(|p| p.with_bias(&[1, 4, 1, 9]));
    let p = p.and_then(|p| p.with_alibi_slopes(&[1, 4])).and_then(|p| p.with_sinks(&[4]));
    let p = p.and_then(|p| p.with_seq_lens_q(&[2])).and_then(|p| p.with_seq_lens_k(&[2]));
    let p = p.and_then(|p| p.with_score_tensors(&[&[1, 4, 1, 1], &[1, 1, 8, 1]]));
    let p = p.and_then(|p| p.with_mask_tensors(&[&[1, 4, 1, 1], &[1, 1, 8, 1]]));
    p.and_then(|p| p.with_block_mask(&[2, 4, 1, 1], 128, 128)).unwrap()
}

/// A problem with packed sequences.
pub fn packed() -> AttentionProblem {
    plain().with_cu_seqlens(&[3], &[3]).unwrap()
}
