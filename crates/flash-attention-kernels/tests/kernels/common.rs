//! Runs a case on the device under test and on the oracle, and compares.
//!
//! Environment variables (see [`lanes`] for those that choose kernels):
//!
//! - `FLASH_TEST_DEVICE`: the device, `wgpu` (the default), `vulkan` or `cuda`, if its feature is compiled in.
//! - `FLASH_TEST_PRECISION=tf32`: products of f32 may be rounded to tf32.
//! - `FLASH_TEST_TUNED=1`: the tuner chooses the kernels (with the feature `autotune`).
//! - `FLASH_TEST_VERDICTS=1`: prints each error beside the error of the emulated roundings.
//! - `REQUIRE_WGPU=1`: tests fail if there is no adapter. Otherwise they print a message and pass.
#![allow(dead_code, unused_imports, reason = "each test program uses a part of it")]

#[path = "guards.rs"]
mod guards;
#[path = "judging.rs"]
mod judging;
#[path = "lanes.rs"]
pub mod lanes;
#[path = "pool.rs"]
mod pool;
#[cfg(not(target_family = "wasm"))]
#[path = "quick.rs"]
mod quick;

pub use guards::*;
pub use judging::{close, same};
pub use lanes::{forced_kernel, supports};

use cubecl::client::Client;
use cubecl::future::block_on;
#[cfg(feature = "autotune")]
use flash_attention_kernels::tuning;
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, BackwardOrder, BackwardTiles, BlockLists, Dtype, Forward,
    Gradient, Gradients, HopperGradient, Inputs, Kernel, MaskStorage, Plan, Precision, RowsTile, Saved, Scratch,
    TensorView, TileShape, backward_with, dropout_kept, forward, forward_with, plan, plan_with,
    tiling::{Device, fused_on},
};
use flash_attention_reference::{self as reference, Tensors};

/// The client of the device under test. Without a device, prints a message and returns `None`.
pub fn client() -> Option<Client> {
    use cubecl::device::WgpuDeviceKind::DefaultDevice;
    #[cfg(not(target_family = "wasm"))]
    quick::compile_quickly();
    let name = lanes::device();
    let device = match name.as_str() {
        "cuda" => cubecl::Device::cuda(0),
        "vulkan" => cubecl::Device::vulkan(DefaultDevice),
        "wgpu" => cubecl::Device::wgpu(DefaultDevice),
        other => {
            panic!("FLASH_TEST_DEVICE is {other}; it must be wgpu, vulkan or cuda, and its feature must be compiled in")
        }
    };
    match device {
        Ok(device) => Some(device.client()),
        Err(error) => {
            let required = name != "wgpu" || std::env::var("REQUIRE_WGPU").as_deref() == Ok("1");
            assert!(!required, "a device is required, but there is none: {error}");
            eprintln!("skipped: there is no wgpu adapter: {error}");
            None
        }
    }
}

/// Precision of f32 products, from `FLASH_TEST_PRECISION`.
pub fn chosen_precision() -> Precision {
    match std::env::var("FLASH_TEST_PRECISION").as_deref() {
        Err(_) | Ok("full") => Precision::Full,
        Ok("tf32") => Precision::Tf32,
        Ok(other) => panic!("FLASH_TEST_PRECISION is {other}; it must be full or tf32"),
    }
}

/// Whether to run the large sets of cases. True unless the device is the default one, which is often software, or
/// `FLASH_TEST_THOROUGH=0` is set.
pub fn thorough() -> bool {
    std::env::var("FLASH_TEST_DEVICE").is_ok_and(|name| name != "wgpu")
        && std::env::var("FLASH_TEST_THOROUGH").as_deref() != Ok("0")
}

/// Element type of cases that are written for f32, from `FLASH_TEST_DTYPE`: f16 and bf16 test the kernels for half precision.
pub fn chosen_dtype() -> Dtype {
    match std::env::var("FLASH_TEST_DTYPE").as_deref() {
        Err(_) | Ok("f32") => Dtype::F32,
        Ok("f16") => Dtype::F16,
        Ok("bf16") => Dtype::BF16,
        Ok(other) => panic!("FLASH_TEST_DTYPE is {other}; it must be f32, f16 or bf16"),
    }
}

/// One case: a problem, its data and their memory layouts.
#[derive(Clone, Debug)]
pub struct Case {
    pub problem: AttentionProblem,
    /// Without dropout, which follows from `seed`.
    pub tensors: Tensors,
    pub dout: Vec<f64>,
    pub dlse: Option<Vec<f64>>,
    pub mask_storage: MaskStorage,
    /// Block states on the device and the tile lists made from them, if several runs share both.
    pub shared_blocks: Option<(TensorView, BlockLists)>,
    /// Dropout seed, if the options have dropout.
    pub seed: [u32; 2],
    /// Layouts of q, k, v and dout.
    pub layouts: [Layout; 4],
    /// Layouts of the mask and the bias.
    pub extra_layouts: [Layout; 2],
    /// Offsets in elements from the start of the buffer: q, k, v, dout, mask, bias, results.
    pub offsets: [usize; 7],
    pub poison: Poison,
    pub tiles: Option<(Forward, BackwardTiles)>,
    /// Which of dq, dk, dv, dbias, dalibi_slopes, dsinks, dscore_tensors are requested.
    pub wanted: [bool; 7],
    /// Whether the fused kernel computes dq, dk and dv where it can. `FLASH_TEST_ORDER=fixed` and `FLASH_TEST_ORDER=fast` set this and the
    /// order of its additions for all cases.
    pub fused: bool,
    /// Number of splits of a group's query heads in the fused kernel, if it divides the group.
    pub splits: usize,
    /// Positions of a page, if the forward reads keys and values in pages.
    pub page_size: Option<usize>,
    /// Scales of K and V of each page of a head, `[batch, num_heads_kv, pages of a sequence]`, if these pages are in e4m3.
    pub kv_scales: Option<[Vec<f32>; 2]>,
    /// Whether the tuner chooses the kernels, if it is compiled in. `FLASH_TEST_TUNED=1` sets this for all cases.
    pub tuned: bool,
}

pub struct Results {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Option<Vec<f64>>,
    pub dk: Option<Vec<f64>>,
    pub dv: Option<Vec<f64>>,
    pub dbias: Option<Vec<f64>>,
    pub dalibi_slopes: Option<Vec<f64>>,
    pub dsinks: Option<Vec<f64>>,
    pub dscore_tensors: [Option<Vec<f64>>; 2],
    pub forward: Forward,
    pub backward: BackwardTiles,
}

/// Sizes of a case: `[batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v]`.
pub type Sizes = [usize; 7];

impl Case {
    pub fn new(sizes: Sizes, dtype: Dtype, options: AttentionOptions) -> Self {
        let [b, hq, hk, sq, sk, d, dv] = sizes;
        let dtype = if dtype == Dtype::F32 { chosen_dtype() } else { dtype };
        let order = std::env::var("FLASH_TEST_ORDER").ok();
        let backward_order = match order.as_deref() {
            Some("fast") => BackwardOrder::Fast,
            _ => options.backward_order,
        };
        let options = AttentionOptions { precision: chosen_precision(), backward_order, ..options };
        let problem =
            AttentionProblem::new(&[b, hq, sq, d], &[b, hk, sk, d], &[b, hk, sk, dv], dtype, options).unwrap();
        let data = |shape: [usize; 4], seed| {
            let mut values = reference::normal(shape.iter().product(), seed);
            reference::round_to(&mut values, dtype);
            values
        };
        Case {
            problem,
            tensors: Tensors {
                q: data(problem.q_shape(), 1),
                k: data(problem.k_shape(), 2),
                v: data(problem.v_shape(), 3),
                ..Default::default()
            },
            dout: data(problem.o_shape(), 4),
            dlse: None,
            mask_storage: MaskStorage::U32,
            shared_blocks: None,
            seed: [0x1234_5678, 9],
            layouts: [Layout::Contiguous; 4],
            extra_layouts: [Layout::Contiguous; 2],
            offsets: [0; 7],
            poison: Poison::Nan,
            tiles: None,
            wanted: [true; 7],
            fused: order.is_some(),
            splits: 1,
            page_size: None,
            kv_scales: None,
            tuned: std::env::var("FLASH_TEST_TUNED").is_ok_and(|tuned| tuned == "1"),
        }
    }

    /// The case by itself or, for the fused kernel, with a fixed order of its additions and with none.
    pub fn in_orders(self) -> Vec<Self> {
        let mut any_order = self.clone();
        any_order.problem.options.backward_order = BackwardOrder::Fast;
        if self.fused { vec![self, any_order] } else { vec![self] }
    }

    /// Adds a random mask of this shape that hides about a third of the pairs.
    pub fn with_mask(mut self, shape: [usize; 4]) -> Self {
        self.problem = self.problem.with_mask(&shape).unwrap();
        let draws = reference::normal(shape.iter().product(), 5);
        self.tensors.mask = Some(draws.into_iter().map(|x| x > 0.43).collect());
        self
    }

    /// Adds a random bias of this shape.
    pub fn with_bias(mut self, shape: [usize; 4]) -> Self {
        self.problem = self.problem.with_bias(&shape).unwrap();
        let mut bias = reference::normal(shape.iter().product(), 6);
        reference::round_to(&mut bias, self.problem.dtype);
        self.tensors.bias = Some(bias);
        self
    }

    /// Adds random slopes of this shape, of either sign and about as large as ALiBi's.
    pub fn with_alibi_slopes(mut self, shape: [usize; 2]) -> Self {
        self.problem = self.problem.with_alibi_slopes(&shape).unwrap();
        let mut slopes = reference::normal(shape.iter().product(), 8);
        slopes.iter_mut().for_each(|slope| *slope *= 0.1);
        reference::round_to(&mut slopes, Dtype::F32);
        self.tensors.alibi_slopes = Some(slopes);
        self
    }

    /// Adds sinks, some of them larger than all scores.
    pub fn with_sinks(mut self) -> Self {
        let heads = self.problem.num_heads_q;
        self.problem = self.problem.with_sinks(&[heads]).unwrap();
        let mut sinks = reference::normal(heads, 9);
        sinks.iter_mut().for_each(|sink| *sink *= 4.0);
        reference::round_to(&mut sinks, Dtype::F32);
        self.tensors.sinks = Some(sinks);
        self
    }

    /// Adds tensors of these shapes for the score function, about as large as slopes.
    pub fn with_score_tensors(mut self, shapes: &[[usize; 4]]) -> Self {
        let all: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
        self.problem = self.problem.with_score_tensors(&all).unwrap();
        for (nth, shape) in shapes.iter().enumerate() {
            let mut values = reference::normal(shape.iter().product(), 10 + nth as u64);
            values.iter_mut().for_each(|value| *value *= 0.1);
            reference::round_to(&mut values, Dtype::F32);
            self.tensors.score_tensors[nth] = Some(values);
        }
        self
    }

    /// Adds tensors of these shapes for the mask function, with integers from 0 to 2.
    pub fn with_mask_tensors(mut self, shapes: &[[usize; 4]]) -> Self {
        let all: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
        self.problem = self.problem.with_mask_tensors(&all).unwrap();
        for (nth, shape) in shapes.iter().enumerate() {
            let draws = reference::normal(shape.iter().product(), 12 + nth as u64);
            self.tensors.mask_tensors[nth] =
                Some(draws.into_iter().map(|x| (x.abs() * 1.5).floor().min(2.0)).collect());
        }
        self
    }

    /// Adds a block mask of this shape with these states.
    pub fn with_block_mask(mut self, shape: [usize; 4], [block_q, block_k]: [usize; 2], states: Vec<u32>) -> Self {
        assert_eq!(states.len(), shape.iter().product::<usize>(), "one state for each block of {shape:?}");
        self.problem = self.problem.with_block_mask(&shape, block_q, block_k).unwrap();
        self.tensors.block_mask = Some(states);
        self
    }

    /// Sets the number of queries of each batch's sequence.
    pub fn with_seq_lens_q(mut self, lens: &[usize]) -> Self {
        self.problem = self.problem.with_seq_lens_q(&[lens.len()]).unwrap();
        self.tensors.seq_lens_q = Some(lens.to_vec());
        self
    }

    /// Sets the number of keys of each batch's sequence.
    pub fn with_seq_lens_k(mut self, lens: &[usize]) -> Self {
        self.problem = self.problem.with_seq_lens_k(&[lens.len()]).unwrap();
        self.tensors.seq_lens_k = Some(lens.to_vec());
        self
    }

    /// Adds packed sequences with these cumulative lengths of queries and keys.
    pub fn with_cu_seqlens(mut self, q: &[usize], k: &[usize]) -> Self {
        self.problem = self.problem.with_cu_seqlens(&[q.len()], &[k.len()]).unwrap();
        (self.tensors.cu_seqlens_q, self.tensors.cu_seqlens_k) = (Some(q.to_vec()), Some(k.to_vec()));
        self
    }

    /// Sets the dropout probability.
    pub fn with_dropout(mut self, dropout: f32) -> Self {
        self.problem.options.dropout = dropout;
        self
    }

    /// The keep mask of dropout, as computed by the device.
    pub fn kept(&self, client: &Client) -> Vec<bool> {
        let bytes: Vec<u8> = self.seed.iter().flat_map(|word| word.to_le_bytes()).collect();
        let seed = TensorView::contiguous(client.create_from_slice(&bytes), [2]);
        let shape = self.problem.scores_shape();
        let out = TensorView::contiguous(client.empty(4 * shape.iter().product::<usize>()), shape);
        dropout_kept(client, &self.problem, &seed, &out).unwrap();
        client.read_one_unchecked(out.handle).chunks_exact(4).map(|word| word[0] == 1).collect()
    }

    /// Adds a gradient of lse.
    pub fn with_dlse(mut self) -> Self {
        let mut dlse = reference::normal(self.problem.rows(), 7);
        reference::round_to(&mut dlse, Dtype::F32);
        self.dlse = Some(dlse);
        self
    }

    /// Sets the memory layouts of `q, k, v, dout`.
    pub fn with_layouts(mut self, layouts: [Layout; 4]) -> Self {
        self.layouts = layouts;
        let p = &self.problem;
        let lay = |n: usize, shape, values: &Vec<f64>| as_laid_out(shape, layouts[n], values.clone());
        (self.tensors.q, self.tensors.k, self.tensors.v, self.dout) = (
            lay(0, p.q_shape(), &self.tensors.q),
            lay(1, p.k_shape(), &self.tensors.k),
            lay(2, p.v_shape(), &self.tensors.v),
            lay(3, p.o_shape(), &self.dout),
        );
        self
    }

    /// Uses the portable kernels with this tile.
    pub fn with_tiles(mut self, tile: TileShape) -> Self {
        self.tiles = Some((tile.into(), BackwardTiles::portable(tile, true)));
        self
    }

    /// Uses the kernels of the family `rows` with this tile.
    pub fn with_rows(mut self, tile: RowsTile) -> Self {
        let smallest = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
        let (of, mut backward) = (Gradient::Rows(tile), BackwardTiles::portable(smallest, true));
        (backward.dq, backward.dkdv) = (of, of);
        self.tiles = Some((tile.into(), backward));
        self
    }

    /// Contiguous `q`, `k` and `v` on the device.
    pub fn qkv(&self, client: &Client) -> [TensorView; 3] {
        let (p, Tensors { q, k, v, .. }) = (&self.problem, &self.tensors);
        [(p.q_shape(), q), (p.k_shape(), k), (p.v_shape(), v)]
            .map(|(shape, values)| place(client, p.dtype, shape, Layout::Contiguous, values).view)
    }

    pub fn reference_inputs(&self) -> reference::Inputs<'_> {
        let drops = self.problem.options.dropout > 0.0;
        let dropout = drops.then_some(reference::Dropout { seed: self.seed, first: [0, 0] });
        reference::Inputs { dropout, ..self.tensors.inputs() }
    }

    /// The plan of the library, or that of the kernel named by `FLASH_TEST_KERNEL`.
    pub fn plan(&self, client: &Client) -> Result<Plan, AttentionError> {
        planned(client, &self.problem)
    }

    /// Block states copied to the device, if the case has a block mask.
    pub fn blocks_on(&self, client: &Client) -> Option<TensorView> {
        let bytes: Vec<u8> = self.tensors.block_mask.as_ref()?.iter().flat_map(|state| state.to_le_bytes()).collect();
        Some(TensorView::contiguous(client.create_from_slice(&bytes), self.problem.block_mask.unwrap().blocks))
    }

    /// Runs forward and backward on the device.
    pub fn run(&self, client: &Client) -> Result<Results, AttentionError> {
        block_on(self.run_async(client))
    }

    /// [`run`](Self::run), for a browser, which cannot block.
    pub async fn run_async(&self, client: &Client) -> Result<Results, AttentionError> {
        let p = &self.problem;
        let dtype = p.dtype;
        let [of_q, of_k, of_v, of_dout, of_mask, of_bias, of_results] = self.offsets;
        let put = |offset, shape, layout, values: &[f64]| place_at(client, dtype, offset, shape, layout, values);
        fn floats<const RANK: usize>(client: &Client, values: &[f64], shape: [usize; RANK]) -> TensorView<RANK> {
            TensorView::contiguous(client.create_from_slice(&to_bytes(values, Dtype::F32)), shape)
        }
        fn lengths(client: &Client, lens: &[usize]) -> TensorView<1> {
            let bytes: Vec<u8> = lens.iter().flat_map(|len| (*len as u32).to_le_bytes()).collect();
            TensorView::contiguous(client.create_from_slice(&bytes), [lens.len()])
        }
        let q = put(of_q, p.q_shape(), self.layouts[0], &self.tensors.q);
        let k = put(of_k, p.k_shape(), self.layouts[1], &self.tensors.k);
        let v = put(of_v, p.v_shape(), self.layouts[2], &self.tensors.v);
        let dout = put(of_dout, p.o_shape(), self.layouts[3], &self.dout);
        let [mask_layout, bias_layout] = self.extra_layouts;
        let bias = self.tensors.bias.as_ref().map(|bias| put(of_bias, p.bias.unwrap(), bias_layout, bias));
        let mask = self.tensors.mask.as_ref();
        let mask = mask.map(|mask| place_mask(client, self.mask_storage, of_mask, p.mask.unwrap(), mask_layout, mask));
        let tensors = |values: &[Option<Vec<f64>>; 2], shapes: [Option<[usize; 4]>; 2]| {
            [0, 1].map(|nth| values[nth].as_ref().map(|values| floats(client, values, shapes[nth].unwrap())))
        };
        let (block_mask, block_lists) = match &self.shared_blocks {
            Some((states, lists)) => (Some(states.clone()), lists.clone()),
            None => (self.blocks_on(client), BlockLists::default()),
        };
        let inputs = Inputs {
            q: q.view.clone(),
            k: k.view.clone(),
            v: v.view.clone(),
            mask,
            bias: bias.as_ref().map(|bias| bias.view.clone()),
            alibi_slopes: self
                .tensors
                .alibi_slopes
                .as_ref()
                .map(|slopes| floats(client, slopes, p.alibi_slopes.unwrap())),
            sinks: self.tensors.sinks.as_ref().map(|sinks| floats(client, sinks, [p.num_heads_q])),
            seq_lens_q: self.tensors.seq_lens_q.as_ref().map(|lens| lengths(client, lens)),
            seq_lens_k: self.tensors.seq_lens_k.as_ref().map(|lens| lengths(client, lens)),
            cu_seqlens_q: self.tensors.cu_seqlens_q.as_ref().map(|ends| lengths(client, ends)),
            cu_seqlens_k: self.tensors.cu_seqlens_k.as_ref().map(|ends| lengths(client, ends)),
            score_tensors: tensors(&self.tensors.score_tensors, p.score_tensors),
            mask_tensors: tensors(&self.tensors.mask_tensors, p.mask_tensors),
            page_table: None,
            block_mask,
            block_lists,
            dropout_seed: (p.options.dropout > 0.0 && p.options.dropout_seed.is_none()).then(|| {
                let bytes: Vec<u8> = self.seed.iter().flat_map(|word| word.to_le_bytes()).collect();
                TensorView::contiguous(client.create_from_slice(&bytes), [2])
            }),
        };
        let o = Guarded::output_at(client, dtype, of_results, p.o_shape(), self.poison);
        let lse = Guarded::output_at(client, Dtype::F32, of_results, p.lse_shape(), self.poison);
        let of_forward = self.forward_problem();
        let forced = match (self.tiles, forced_kernel(dtype)) {
            (Some((forward, _)), _) => Some(forward),
            (None, Some(_)) => Some(planned(client, &of_forward)?.forward),
            (None, None) => None,
        };
        let given = self.forward_inputs(client, &inputs);
        let ran = match forced {
            Some(forced) => forward_with(client, &of_forward, &given, &o.view, &lse.view, forced).map(|()| forced)?,
            #[cfg(feature = "autotune")]
            None if self.tuned => tuning::forward_tuned(client, &of_forward, &given, &o.view, &lse.view)?,
            None => forward(client, &of_forward, &given, &o.view, &lse.view)?,
        };
        let kernel = ran.kernel();
        let few = self.tiles.is_none() && p.options.dropout == 0.0 && p.block_mask.is_none();
        let few = few && (lanes::device() == "cuda" || p.cu_seqlens.is_none());
        let decoding = few.then(|| [p.group_size() * p.seq_q, p.seq_k]);
        match self.tiles {
            Some((forced, _)) => assert_eq!(kernel, forced.kernel(), "{p:?}"),
            // Hopper's kernel reads no pages, and that of `mma.sync` only whole vectors.
            None if self.page_size.is_some() => {}
            None => lanes::assert_kernel(kernel, dtype, decoding),
        }
        let mut planned = match (self.tiles, self.page_size) {
            (Some((_, backward)), _) => backward,
            // Only forwards read pages. With tf32, lse must be of scores that are rounded as in the backward.
            (None, Some(_)) => plan_with(client, p, kernel)?.backward,
            (None, None) => self.plan(client)?.backward,
        };
        let of_gradients = match self.page_size {
            Some(_) if self.tiles.is_none() => planned.dq.kernel(),
            _ => lanes::kernel_of_gradients(kernel, dtype, decoding),
        };

        let dlse = self
            .dlse
            .as_ref()
            .map(|dlse| TensorView::contiguous(client.create_from_slice(&to_bytes(dlse, Dtype::F32)), p.lse_shape()));
        let saved = Saved { o: o.view.clone(), lse: lse.view.clone(), dout: dout.view.clone(), dlse };
        let output =
            |wanted: bool, shape| wanted.then(|| Guarded::output_at(client, dtype, of_results, shape, self.poison));
        let [wq, wk, wv, wb, wa, ws, wt] = self.wanted;
        let dq = output(wq, p.q_shape());
        let dk = output(wk, p.k_shape());
        let dv = output(wv, p.v_shape());
        let dbias = output(wb && p.bias.is_some(), p.bias.unwrap_or([0; 4]));
        let view = |out: &Option<Guarded>| out.as_ref().map(|out| out.view.clone());
        let dslopes = p.alibi_slopes.filter(|_| wa);
        let dslopes = dslopes.map(|shape| Guarded::output_at(client, Dtype::F32, of_results, shape, self.poison));
        let dsinks =
            (ws && p.sinks).then(|| Guarded::output_at(client, Dtype::F32, of_results, [p.num_heads_q], self.poison));
        let dscore_tensors = p.score_tensors.map(|shape| {
            shape.filter(|_| wt).map(|shape| Guarded::output_at(client, Dtype::F32, of_results, shape, self.poison))
        });
        let gradients = Gradients {
            dq: view(&dq),
            dk: view(&dk),
            dv: view(&dv),
            dbias: view(&dbias),
            dalibi_slopes: dslopes.as_ref().map(|out| out.view.clone()),
            dsinks: dsinks.as_ref().map(|out| out.view.clone()),
            dscore_tensors: dscore_tensors.each_ref().map(view),
        };

        // Scratch is poisoned and guarded like an output.
        let plain = Scratch::empty(client, p);
        let stats = Guarded::output(client, Dtype::F32, plain.stats.shape, self.poison);
        let sums = plain.bias_sums.as_ref().map(|s| Guarded::output(client, Dtype::F32, s.shape, self.poison));
        let can = of_gradients == Kernel::Hopper;
        if self.fused && can {
            planned.fused = fused_on(&Device::of(client), p);
            let splits = if p.group_size().is_multiple_of(self.splits) { self.splits } else { 1 };
            planned.fused = planned.fused.map(|fused| HopperGradient { num_splits: splits, ..fused });
            assert_eq!(planned.fused.is_some(), self.fusible(), "{p:?}");
        }
        let dq_accum = planned.fused.map(|_| {
            let shape = [plain.stats.shape[1], p.head_dim.next_multiple_of(64)];
            Guarded::output(client, Dtype::F32, shape, self.poison)
        });
        let dq_turns = planned.fused.filter(|_| p.options.backward_order == BackwardOrder::Deterministic).map(|_| {
            let shape = [plain.stats.shape[1] / 64, 4];
            Guarded::output(client, Dtype::F32, shape, self.poison)
        });
        let scratch = Scratch {
            stats: stats.view.clone(),
            bias_sums: sums.as_ref().map(|s| s.view.clone()),
            dq_accum: dq_accum.as_ref().map(|s| s.view.clone()),
            dq_turns: dq_turns.as_ref().map(|s| s.view.clone()),
        };
        match forced {
            #[cfg(feature = "autotune")]
            None if self.tuned && planned.fused.is_none() => {
                planned = tuning::backward_tuned(client, p, &inputs, &saved, &gradients)?;
            }
            _ => backward_with(client, p, &inputs, &saved, &gradients, &scratch, Some(planned))?,
        }
        assert_eq!([planned.dq.kernel(), planned.dkdv.kernel()], [of_gradients; 2], "{p:?}");
        let hopper = |is: bool| if can && is { Kernel::Hopper } else { Kernel::Portable };
        // Hopper's kernels of dq and dk also sum the gradients of tensors that are broadcast over queries or keys.
        let summed = |[.., sq, sk]: [usize; 4]| [sq, sk] != [p.seq_q, p.seq_k];
        let each_pair = p.bias.is_some_and(|[.., sq, sk]| !summed([1, 1, sq, sk]) && sq * sk > 1);
        let of_bias = each_pair && !p.is_varlen() && p.block_mask.is_none() || p.bias.is_some_and(summed);
        assert_eq!(planned.dbias.kernel(), hopper(of_bias), "{p:?}");
        let of_slopes = (planned.dalibi_slopes, p.alibi_slopes.map(|_| summed([1; 4])));
        let of_tensors = planned.dscore_tensors.into_iter().zip(p.score_tensors.map(|shape| shape.map(summed)));
        for (of, summed) in of_tensors.chain([of_slopes]) {
            if let Some(summed) = summed {
                assert_eq!(of.map(|of| of.kernel()), Some(hopper(summed)), "{p:?}");
            }
        }

        let read = async |out: &Option<Guarded>, name| match out {
            Some(out) => Some(out.read_async(client, name).await),
            None => None,
        };
        stats.read_async(client, "stats").await;
        if let Some(sums) = sums {
            sums.read_async(client, "bias_sums").await;
        }
        if let Some(sums) = dq_accum {
            sums.read_async(client, "dq_accum").await;
        }
        if let Some(turns) = dq_turns {
            turns.read_async(client, "dq_turns").await;
        }
        Ok(Results {
            o: o.read_async(client, "o").await,
            lse: lse.read_async(client, "lse").await,
            dq: read(&dq, "dq").await,
            dk: read(&dk, "dk").await,
            dv: read(&dv, "dv").await,
            dbias: read(&dbias, "dbias").await,
            dalibi_slopes: match &dslopes {
                Some(out) => Some(out.read_async(client, "dalibi_slopes").await),
                None => None,
            },
            dsinks: match &dsinks {
                Some(out) => Some(out.read_async(client, "dsinks").await),
                None => None,
            },
            dscore_tensors: [
                read(&dscore_tensors[0], "dscore_tensors[0]").await,
                read(&dscore_tensors[1], "dscore_tensors[1]").await,
            ],
            forward: ran,
            backward: planned,
        })
    }

    /// Whether the fused kernel for dq, dk and dv takes this case: no bias, one sequence per batch, no block mask in a fixed order, both head
    /// dimensions at most 128, and `head_dim_v` at most 64 if `head_dim` is; or both above 192, in any order and without a block mask.
    fn fusible(&self) -> bool {
        let p = &self.problem;
        let any_order = p.options.backward_order == BackwardOrder::Fast;
        let plain = p.bias.is_none() && !p.is_varlen() && (any_order || p.block_mask.is_none());
        let wide = p.head_dim.min(p.head_dim_v) > 192;
        if wide {
            return plain && any_order && p.block_mask.is_none();
        }
        plain && p.head_dim.max(p.head_dim_v) <= 128 && (p.head_dim > 64 || p.head_dim_v <= 64)
    }
}

/// The plan of the library, or that of the kernel named by `FLASH_TEST_KERNEL`.
fn planned(client: &Client, problem: &AttentionProblem) -> Result<Plan, AttentionError> {
    match forced_kernel(problem.dtype) {
        Some(kernel) => plan_with(client, problem, kernel),
        None => plan(client, problem),
    }
}

pub fn causal() -> AttentionOptions {
    AttentionOptions { causal: true, ..Default::default() }
}

/// Checks each case on the device, if there is one and the lane has the case's element type.
pub fn all(cases: impl IntoIterator<Item = Case>) {
    let Some(client) = client() else { return };
    for case in cases.into_iter().flat_map(Case::in_orders) {
        if supports(&client, case.problem.dtype) {
            case.check(&client);
        }
    }
}
