//! Validate, choose, compute the grid, launch. No mathematics.

use crate::error::AttentionError;
use crate::portable::dbias::Sums;
use crate::portable::tile::{TileShape, WIDTH};
use crate::portable::{self, GridLaunch, dbias, delta, nothing};
use crate::problem::AttentionProblem;
use crate::score::ScoreLaunch;
use crate::tensor::TensorView;
use crate::tiling::{self, Device, Stage};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType, FloatKind, UIntKind};
use cubecl::prelude::*;

/// How a boolean mask is stored. True (nonzero) hides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskStorage {
    /// One byte an element.
    U8,
    /// Four bytes an element, as on devices without 8-bit storage.
    U32,
}

/// A boolean mask: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, true hides.
#[derive(Clone, Debug)]
pub struct MaskView {
    /// The mask's own shape and strides; it is never expanded.
    pub tensor: TensorView,
    /// Its element type.
    pub storage: MaskStorage,
}

/// What attention reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[batch, num_heads_q, seq_q, head_dim]`.
    pub q: TensorView,
    /// `[batch, num_heads_kv, seq_k, head_dim]`.
    pub k: TensorView,
    /// `[batch, num_heads_kv, seq_k, head_dim_v]`.
    pub v: TensorView,
    /// Hides pairs.
    pub mask: Option<MaskView>,
    /// Added to the scores: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, of the dtype of `q`.
    pub bias: Option<TensorView>,
}

/// What the backward reads beside the inputs.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The forward's output, `[batch, num_heads_q, seq_q, head_dim_v]`.
    pub o: TensorView,
    /// The forward's log-sum-exp, `[batch, num_heads_q, seq_q]`, f32.
    pub lse: TensorView<3>,
    /// Gradient of `o`.
    pub dout: TensorView,
    /// Gradient of `lse`, f32, if it has one.
    pub dlse: Option<TensorView<3>>,
}

/// Where the backward writes; what is `None` is not computed and costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    /// Shape and dtype of `q`.
    pub dq: Option<TensorView>,
    /// Shape and dtype of `k`.
    pub dk: Option<TensorView>,
    /// Shape and dtype of `v`.
    pub dv: Option<TensorView>,
    /// Shape and dtype of the bias.
    pub dbias: Option<TensorView>,
}

/// Computes `o` and `lse`.
///
/// `o` has the shape `[batch, num_heads_q, seq_q, head_dim_v]` and the dtype of `q`; `lse`, the natural logarithm of the
/// sum of exponentials of each row's scores, `[batch, num_heads_q, seq_q]`, is f32. A row that sees no key gets `o = 0`
/// and `lse = −∞`. (FlashAttention-2, arXiv:2307.08691, algorithm 1.)
///
/// Returns the tiles that ran. Errors name the argument at fault; nothing has been launched then.
pub fn forward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    o: &TensorView,
    lse: &TensorView<3>,
) -> Result<TileShape, AttentionError> {
    let tile = tiling::forward_tile(&Device::of(client), problem)?;
    forward_with(client, problem, inputs, o, lse, tile)?;
    Ok(tile)
}

/// [`forward`] with tiles of the caller's choice.
pub fn forward_with(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    o: &TensorView,
    lse: &TensorView<3>,
    tile: TileShape,
) -> Result<(), AttentionError> {
    let device = Device::of(client);
    let call = Call::new(client, &device, problem, inputs)?;
    output(&device, "o", o, problem.o_shape(), problem.dtype.size())?;
    output(&device, "lse", lse, problem.lse_shape(), 4)?;
    let addresses = call.addresses([o.span(), lse.span()]);
    if problem.rows() == 0 {
        return Ok(());
    }
    if problem.seq_k == 0 {
        let (count, dim) = elementwise(&device, "zeros", o.len())?;
        unsafe { nothing::zeros::launch_unchecked(client, count, dim, addresses, o.arg(), call.dtype()) };
        let (count, dim) = elementwise(&device, "empty_lse", lse.len())?;
        unsafe { nothing::empty_lse::launch_unchecked(client, count, dim, addresses, lse.arg()) };
        return Ok(());
    }
    tiling::check_tile(&device, problem, &tile, Stage::Forward)?;
    call.check_bindings("forward", 5)?;
    let (grid, count) = call.query_grid("forward", tile)?;
    unsafe {
        portable::forward::forward::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(tile.units() as u32),
            addresses,
            call.width(&[o]),
            inputs.q.arg(),
            inputs.k.arg(),
            inputs.v.arg(),
            call.mask().into(),
            call.bias().into(),
            o.arg(),
            lse.arg(),
            call.score(),
            problem.band().into_launch(),
            grid,
            tiling::blueprint(problem, tile),
            [call.dtype(), call.mask_type()],
        );
    }
    Ok(())
}

/// Computes the gradients asked for, launching only what they need.
///
/// `dq`, `dk`, `dv` and `dbias` have the shape and dtype of what they are the gradient of. Every sum is taken in a fixed
/// order: the same call gives the same bits. (FlashAttention-2, arXiv:2307.08691, algorithm 2, with one kernel for `dq`
/// and one for `dk` and `dv` in place of atomic additions.)
///
/// Errors name the argument at fault; nothing has been launched then.
pub fn backward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    saved: &Saved,
    gradients: &Gradients,
) -> Result<(), AttentionError> {
    let scratch = Scratch::empty(client, problem);
    backward_with(client, problem, inputs, saved, gradients, &scratch, None)
}

/// [`backward`] with scratch of the caller's and, if given, tiles of its choice.
pub fn backward_with(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    saved: &Saved,
    gradients: &Gradients,
    scratch: &Scratch,
    tiles: Option<BackwardTiles>,
) -> Result<(), AttentionError> {
    let device = Device::of(client);
    let call = Call::new(client, &device, problem, inputs)?;
    let tiles = match tiles {
        Some(tiles) => tiles,
        None => {
            let (tile, dkdv_together) = tiling::backward_tile(&device, problem)?;
            BackwardTiles { dq: tile, dkdv: tile, dkdv_together }
        }
    };
    call.backward(saved, gradients, scratch, tiles)
}

/// Tiles of the backward's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardTiles {
    /// Of `dq` and of the bias's gradient.
    pub dq: TileShape,
    /// Of `dk` and `dv`.
    pub dkdv: TileShape,
    /// Whether `dk` and `dv` come from one launch.
    pub dkdv_together: bool,
}

/// Memory that the backward needs beside inputs, outputs and gradients; contents do not matter.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// `lse` and delta of each row, `[2, batch · num_heads_q · seq_q]`, f32.
    pub stats: TensorView<2>,
    /// Sums that the gradient of a broadcast bias is folded from, `[batch, num_heads_q, seq_q or seq_k]`, f32.
    pub bias_sums: Option<TensorView<3>>,
}

impl Scratch {
    /// Allocates what the problem needs.
    pub fn empty(client: &Client, problem: &AttentionProblem) -> Self {
        let rows = problem.rows();
        let len = tiling::bias_sums_len(problem);
        let heads = problem.batch * problem.num_heads_q;
        let bias_sums = (len > 0).then(|| {
            let shape = [problem.batch, problem.num_heads_q, len / heads];
            TensorView::contiguous(client.empty(4 * len), shape)
        });
        Scratch { stats: TensorView::contiguous(client.empty(8 * rows.max(1)), [2, rows]), bias_sums }
    }
}

/// A validated call on a device.
struct Call<'a> {
    client: &'a Client,
    device: &'a Device,
    problem: &'a AttentionProblem,
    inputs: &'a Inputs,
}

impl<'a> Call<'a> {
    fn new(
        client: &'a Client,
        device: &'a Device,
        problem: &'a AttentionProblem,
        inputs: &'a Inputs,
    ) -> Result<Self, AttentionError> {
        problem.validate()?;
        tiling::check_dtype(device, problem.dtype)?;
        let size = problem.dtype.size();
        input(device, "q", &inputs.q, problem.q_shape(), size)?;
        input(device, "k", &inputs.k, problem.k_shape(), size)?;
        input(device, "v", &inputs.v, problem.v_shape(), size)?;
        if let Some(mask) = &inputs.mask {
            let expected = problem.mask.unwrap_or(mask.tensor.shape);
            let size = match mask.storage {
                MaskStorage::U8 => 1,
                MaskStorage::U32 => 4,
            };
            input(device, "mask", &mask.tensor, expected, size)?;
        }
        if let Some(bias) = &inputs.bias {
            input(device, "bias", bias, problem.bias.unwrap_or(bias.shape), size)?;
        }
        for (argument, given, stated) in [
            ("mask", inputs.mask.is_some(), problem.mask.is_some()),
            ("bias", inputs.bias.is_some(), problem.bias.is_some()),
        ] {
            if given != stated {
                return Err(AttentionError::Unsupported {
                    option: argument,
                    value: if given { "a tensor" } else { "no tensor" }.into(),
                    why: "the problem states otherwise: build it with with_mask and with_bias for what is given",
                });
            }
        }
        Ok(Call { client, device, problem, inputs })
    }

    /// The address type that reaches every element of the inputs and of these.
    fn addresses(&self, spans: impl IntoIterator<Item = u64>) -> AddressType {
        let Inputs { q, k, v, mask, bias } = self.inputs;
        let inputs = [Some(q), Some(k), Some(v), mask.as_ref().map(|mask| &mask.tensor), bias.as_ref()];
        let farthest = inputs.into_iter().flatten().map(|view| view.span()).chain(spans).max();
        AddressType::from_len(farthest.unwrap_or(0) as usize)
    }

    /// Elements that are read and written at once: a vector where every tensor allows it.
    fn width(&self, views: &[&TensorView]) -> usize {
        let Inputs { q, k, v, .. } = self.inputs;
        let size = self.problem.dtype.size();
        let all = [q, k, v].into_iter().chain(views.iter().copied()).all(|view| view.vectorizes(WIDTH, size));
        if all { WIDTH } else { 1 }
    }

    fn dtype(&self) -> ElemType {
        tiling::element_type(self.problem.dtype)
    }

    fn mask_type(&self) -> ElemType {
        ElemType::UInt(match self.inputs.mask.as_ref().map(|mask| mask.storage) {
            Some(MaskStorage::U8) => UIntKind::U8,
            Some(MaskStorage::U32) | None => UIntKind::U32,
        })
    }

    fn mask(&self) -> Option<TensorArg> {
        self.inputs.mask.as_ref().map(|mask| mask.tensor.broadcast_arg())
    }

    fn bias(&self) -> Option<TensorArg> {
        self.inputs.bias.as_ref().map(|bias| bias.broadcast_arg())
    }

    fn score(&self) -> ScoreLaunch {
        let softcap = self.problem.options.softcap;
        ScoreLaunch::new(self.problem.softmax_scale(), softcap.unwrap_or(1.0), softcap.is_some())
    }

    /// One cube for each block of queries.
    fn query_grid(&self, kernel: &'static str, tile: TileShape) -> Result<(GridLaunch, CubeCount), AttentionError> {
        let p = self.problem;
        self.grid(kernel, p.seq_q.div_ceil(tile.tile_q), p.num_heads_q, p.batch)
    }

    /// One cube for each block of keys.
    fn key_grid(&self, kernel: &'static str, tile: TileShape) -> Result<(GridLaunch, CubeCount), AttentionError> {
        let p = self.problem;
        self.grid(kernel, p.seq_k.div_ceil(tile.tile_k), p.num_heads_kv, p.batch)
    }

    fn grid(
        &self,
        kernel: &'static str,
        blocks: usize,
        heads: usize,
        batches: usize,
    ) -> Result<(GridLaunch, CubeCount), AttentionError> {
        let cubes = blocks as u64 * heads as u64 * batches as u64;
        let (x, y, z) = tiling::cube_count(self.device, kernel, cubes)?;
        let grid = GridLaunch::new(blocks as u32, heads as u32, batches as u32, self.problem.group_size() as u32);
        Ok((grid, CubeCount::Static(x, y, z)))
    }

    /// Checks that the device binds `needed` buffers and those of mask and bias at once.
    fn check_bindings(&self, kernel: &'static str, needed: usize) -> Result<(), AttentionError> {
        let (mask, bias) = (self.problem.mask.is_some(), self.problem.bias.is_some());
        let needed = needed + usize::from(mask) + usize::from(bias);
        let available = self.device.bindings;
        if needed <= available {
            return Ok(());
        }
        Err(AttentionError::Bindings { kernel, needed, mask, bias, available })
    }

    fn backward(
        &self,
        saved: &Saved,
        gradients: &Gradients,
        scratch: &Scratch,
        tiles: BackwardTiles,
    ) -> Result<(), AttentionError> {
        // -- validate
        let p = self.problem;
        let size = p.dtype.size();
        input(self.device, "o", &saved.o, p.o_shape(), size)?;
        input(self.device, "lse", &saved.lse, p.lse_shape(), 4)?;
        input(self.device, "dout", &saved.dout, p.o_shape(), size)?;
        if let Some(dlse) = &saved.dlse {
            input(self.device, "dlse", dlse, p.lse_shape(), 4)?;
        }
        let wanted = [
            ("dq", &gradients.dq, p.q_shape()),
            ("dk", &gradients.dk, p.k_shape()),
            ("dv", &gradients.dv, p.v_shape()),
            ("dbias", &gradients.dbias, p.bias.unwrap_or([0; 4])),
        ];
        for (argument, view, shape) in wanted {
            if let Some(view) = view {
                output(self.device, argument, view, shape, size)?;
            }
        }
        output(self.device, "stats", &scratch.stats, [2, p.rows()], 4)?;
        let views: Vec<&TensorView> =
            wanted.iter().filter_map(|(_, view, _)| view.as_ref()).chain([&saved.o, &saved.dout]).collect();
        let rows = [Some(&saved.lse), saved.dlse.as_ref()].into_iter().flatten().map(|view| view.span());
        let addresses = self.addresses(views.iter().map(|view| view.span()).chain(rows));
        if wanted.iter().all(|(_, view, _)| view.is_none()) {
            return Ok(());
        }

        // -- nothing to attend to: zeros
        if p.rows() == 0 || p.seq_k == 0 {
            for view in wanted.iter().filter_map(|(_, view, _)| view.as_ref()).filter(|view| !view.is_empty()) {
                let (count, dim) = elementwise(self.device, "zeros", view.len())?;
                unsafe { nothing::zeros::launch_unchecked(self.client, count, dim, addresses, view.arg(), self.dtype()) };
            }
            return Ok(());
        }

        // -- everything that can fail, before anything runs
        for tile in [tiles.dq, tiles.dkdv] {
            tiling::check_tile(self.device, p, &tile, Stage::Backward)?;
        }
        let (with_dk, with_dv) = (gradients.dk.is_some(), gradients.dv.is_some());
        let together = tiles.dkdv_together && with_dk && with_dv;
        if gradients.dq.is_some() {
            self.check_bindings("dq", 6)?;
        }
        if with_dk || with_dv {
            self.check_bindings("dkdv", if together { 7 } else { 6 })?;
        }
        if gradients.dbias.is_some() {
            self.check_bindings("dbias", 6)?;
        }

        self.delta(saved, scratch, addresses)?;
        if let Some(dq) = &gradients.dq {
            self.dq(saved, scratch, dq, tiles.dq, addresses)?;
        }
        let (dk, dv) = (gradients.dk.as_ref(), gradients.dv.as_ref());
        let launches = if together { vec![(dk, dv)] } else { vec![(dk, None), (None, dv)] };
        for (dk, dv) in launches {
            if dk.is_some() || dv.is_some() {
                self.dkdv(saved, scratch, dk, dv, tiles.dkdv, addresses)?;
            }
        }
        if let Some(dbias) = &gradients.dbias {
            self.dbias(saved, scratch, dbias, tiles.dq, addresses)?;
        }
        Ok(())
    }

    fn delta(&self, saved: &Saved, scratch: &Scratch, addresses: AddressType) -> Result<(), AttentionError> {
        let p = self.problem;
        let (x, y, z) = tiling::cube_count(self.device, "delta", p.rows().div_ceil(delta::ROWS) as u64)?;
        let vectorizes = |view: &TensorView| view.vectorizes(WIDTH, p.dtype.size());
        let width = if vectorizes(&saved.o) && vectorizes(&saved.dout) { WIDTH } else { 1 };
        unsafe {
            delta::delta::launch_unchecked(
                self.client,
                CubeCount::Static(x, y, z),
                CubeDim::new_1d((delta::ROWS * delta::UNITS_PER_ROW) as u32),
                addresses,
                width,
                saved.o.arg(),
                saved.dout.arg(),
                saved.lse.arg(),
                saved.dlse.as_ref().map(|dlse| dlse.arg()).into(),
                scratch.stats.arg(),
                p.num_heads_q as u32,
                p.seq_q as u32,
                p.head_dim_v,
                self.dtype(),
            );
        }
        Ok(())
    }

    fn dq(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dq: &TensorView,
        tile: TileShape,
        addresses: AddressType,
    ) -> Result<(), AttentionError> {
        let (grid, count) = self.query_grid("dq", tile)?;
        unsafe {
            portable::dq::dq::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses,
                self.width(&[&saved.dout, dq]),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                scratch.stats.arg(),
                self.mask().into(),
                self.bias().into(),
                dq.arg(),
                self.score(),
                self.problem.band().into_launch(),
                grid,
                tiling::blueprint(self.problem, tile),
                [self.dtype(), self.mask_type()],
            );
        }
        Ok(())
    }

    fn dkdv(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dk: Option<&TensorView>,
        dv: Option<&TensorView>,
        tile: TileShape,
        addresses: AddressType,
    ) -> Result<(), AttentionError> {
        let (grid, count) = self.key_grid("dkdv", tile)?;
        let views: Vec<_> = [Some(&saved.dout), dk, dv].into_iter().flatten().collect();
        unsafe {
            portable::dkdv::dkdv::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses,
                self.width(&views),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                scratch.stats.arg(),
                self.mask().into(),
                self.bias().into(),
                dk.map(|dk| dk.arg()).into(),
                dv.map(|dv| dv.arg()).into(),
                self.score(),
                self.problem.band().into_launch(),
                grid,
                tiling::blueprint(self.problem, tile),
                [self.dtype(), self.mask_type()],
            );
        }
        Ok(())
    }

    fn dbias(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dbias: &TensorView,
        tile: TileShape,
        addresses: AddressType,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        let sums = tiling::bias_sums(&dbias.shape, p);
        let q_blocks = p.seq_q.div_ceil(tile.tile_q);
        let k_blocks = p.seq_k.div_ceil(tile.tile_k);
        // What the grid numbers, and how many batches and heads share what a cube writes.
        let (blocks, heads, batches) = match sums {
            Sums::Tile => (q_blocks * k_blocks, dbias.shape[1], dbias.shape[0]),
            Sums::Columns => (k_blocks, p.num_heads_q, p.batch),
            Sums::Rows => (q_blocks, p.num_heads_q, p.batch),
        };
        let (grid, count) = self.grid("dbias", blocks, heads, batches)?;
        let out = match (sums, &scratch.bias_sums) {
            (Sums::Tile, _) => dbias.arg(),
            (_, Some(sums)) => sums.arg(),
            (_, None) => {
                return Err(AttentionError::Unsupported {
                    option: "scratch.bias_sums",
                    value: "none".into(),
                    why: "a broadcast bias's gradient is folded from sums; allocate with Scratch::empty",
                });
            }
        };
        let out_type = match sums {
            Sums::Tile => self.dtype(),
            _ => ElemType::Float(FloatKind::F32),
        };
        unsafe {
            portable::dbias::dbias::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses,
                self.width(&[&saved.dout]),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                scratch.stats.arg(),
                self.mask().into(),
                self.bias().into(),
                out,
                self.score(),
                p.band().into_launch(),
                grid,
                p.num_heads_q as u32,
                (p.batch / batches) as u32,
                (p.num_heads_q / heads) as u32,
                sums,
                tiling::blueprint(p, tile),
                [self.dtype(), self.mask_type(), out_type],
            );
        }
        if let (Sums::Columns | Sums::Rows, Some(partial)) = (sums, &scratch.bias_sums) {
            let along = if sums == Sums::Columns { 3 } else { 2 };
            // A unit for each element, or a cube where many terms are to be added.
            let terms = partial.len() / dbias.len();
            let lanes = if terms < dbias::FOLD_UNITS { 1 } else { dbias::FOLD_UNITS };
            let cubes = (dbias.len() * lanes).div_ceil(dbias::FOLD_UNITS);
            let (x, y, z) = tiling::cube_count(self.device, "fold", cubes as u64)?;
            unsafe {
                portable::dbias::fold::launch_unchecked(
                    self.client,
                    CubeCount::Static(x, y, z),
                    CubeDim::new_1d(dbias::FOLD_UNITS as u32),
                    addresses,
                    partial.arg(),
                    dbias.arg(),
                    along,
                    lanes,
                    self.dtype(),
                );
            }
        }
        Ok(())
    }
}

/// Cubes of 256 units, or as many as the device takes, one unit for each element.
fn elementwise(device: &Device, kernel: &'static str, len: usize) -> Result<(CubeCount, CubeDim), AttentionError> {
    let units = device.units.min(256);
    let (x, y, z) = tiling::cube_count(device, kernel, len.div_ceil(units) as u64)?;
    Ok((CubeCount::Static(x, y, z), CubeDim::new_1d(units as u32)))
}

/// Checks a tensor's shape, and that the device can address and its buffer holds what its strides reach.
fn input<const RANK: usize>(
    device: &Device,
    argument: &'static str,
    view: &TensorView<RANK>,
    expected: [usize; RANK],
    elem_size: usize,
) -> Result<(), AttentionError> {
    const NAMES: [&str; 4] = ["dimension 0", "dimension 1", "dimension 2", "dimension 3"];
    for dim in 0..RANK {
        if view.shape[dim] != expected[dim] {
            return Err(AttentionError::Dimension {
                argument,
                dimension: NAMES[dim],
                value: view.shape[dim],
                shape: view.shape.to_vec(),
                expected_by: "the problem",
                expected: expected[dim],
            });
        }
    }
    let (reach, len) = (view.span(), view.handle.size_in_used() / elem_size as u64);
    if reach > u32::MAX as u64 && !device.wide_addresses {
        return Err(AttentionError::AddressSpace { argument, reach, device: device.name.clone() });
    }
    if reach > len {
        return Err(AttentionError::Buffer {
            argument,
            shape: view.shape.to_vec(),
            strides: view.strides.to_vec(),
            reach,
            len,
        });
    }
    Ok(())
}

/// [`input`], and that no two elements are one.
fn output<const RANK: usize>(
    device: &Device,
    argument: &'static str,
    view: &TensorView<RANK>,
    expected: [usize; RANK],
    elem_size: usize,
) -> Result<(), AttentionError> {
    input(device, argument, view, expected, elem_size)?;
    if view.overlaps_itself() {
        return Err(AttentionError::OutputOverlaps {
            argument,
            shape: view.shape.to_vec(),
            strides: view.strides.to_vec(),
        });
    }
    Ok(())
}
