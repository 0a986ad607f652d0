//! The gradient of a bias that has an element for each pair of query and key: a block of it at a time.
//!
//! ```text
//! for each block of 128 queries and some tiles of keys, for each batch and head that share it, for each tile:
//!     S = Q Kᵀ    dP = dO Vᵀ    P = 2^(c S' − lse)    dB += P ∘ (dP − delta)
//! ```
//!
//! with `S'` the score with softcap, bias and mask, lse in base 2, and `c = log2(e)`. The sum lies in registers, and is taken in
//! a fixed order. (FlashAttention-2, arXiv:2307.08691, algorithm 2, of which this is `dS`.)
//!
//! What is added up leaves few registers, and what is loaded for two products is as much as for a forward's of twice the size:
//! memory decides. Rows of Q and dO stay for all tiles of a block, and so does the block of the bias for all batches and heads
//! that share it; tiles of K and V stream by. Loads run ahead over the borders of heads and of blocks: one thread tells all others
//! which head of which block comes when (a *turn* here), in slots of shared memory.
//!
//! ```text
//! warp of warpgroup   0                    1                    2          3
//! 0                   what comes next; K   its rows of a bias   its Q      its dO
//! 1                   V                    its rows of a bias   its Q      its dO
//! ```
//!
//! Blocks of which the band shows nothing are no turns: they are filled with zeros when all else is done.

use super::delta::stats_rows;
use super::dropout::{dropout_backward, keep_mask};
use super::forward::Stride;
use super::ops::*;
use super::pipeline::{PipelineState, load_panels};
use super::rows::{exchange, vector_of_pair};
use super::schedule::Divisor;
use super::scores::{Factors, apply_mask, apply_score_mod_of_head, probability_log2, products};
use super::{BiasBlueprint, BiasTile, PANEL, SLOTS, WARPGROUP_ROWS, WORDS};
use crate::blocks::Visit;
use crate::mask::{Band, Blocks};
use cubecl::prelude::*;

/// How blocks are numbered: those of which the band shows something, by matrices of the bias, blocks of queries, blocks of keys.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct DbiasScheduler {
    /// How many there are; fewer than 2^31.
    pub num_tiles: u32,
    /// Matrices of the bias: its batches and heads.
    pub matrices: u32,
    /// Blocks of queries.
    pub q_blocks: Divisor,
    /// Blocks of keys.
    pub k_blocks: Divisor,
    /// Heads of the bias.
    pub heads: Divisor,
    /// Batches that share a matrix.
    pub group_batches: u32,
    /// Heads that share a matrix.
    pub group_heads: Divisor,
    /// Query heads that share a key/value head.
    pub group_size: Divisor,
    /// Batches.
    pub batches: u32,
    /// Heads of `q` in a batch.
    pub num_heads_q: u32,
}

/// A block: of which matrix, the number of the block of queries, and that of keys among those that the queries see.
#[derive(CubeType, Clone, Copy, Debug, PartialEq, Eq)]
#[expand(derive(Clone))]
pub struct Block {
    /// Of the bias, `batch · heads + head`.
    pub matrix: u32,
    /// Of the block of queries.
    pub row: u32,
    /// Of the block of keys.
    pub nth: u32,
}

impl DbiasScheduler {
    /// The blocks of a bias `[bias_batch, bias_heads, Sq, Sk]` for queries of `[batch, num_heads_q]`.
    pub fn new(
        band: &Band,
        tile: BiasTile,
        [bias_batch, bias_heads]: [usize; 2],
        [batch, num_heads_q, num_heads_kv]: [usize; 3],
    ) -> Self {
        let (tile_q, block_k) = (BiasTile::TILE_Q as u32, tile.block_k() as u32);
        let q_blocks = band.seq_q.div_ceil(tile_q);
        let matrices = (bias_batch * bias_heads) as u32;
        let seen = |row: u32| {
            let blocks = band.k_blocks(row * tile_q, tile_q, block_k);
            blocks.end - blocks.start
        };
        DbiasScheduler {
            num_tiles: matrices * (0..q_blocks).map(seen).sum::<u32>(),
            matrices,
            q_blocks: Divisor::new(q_blocks),
            k_blocks: Divisor::new(band.seq_k.div_ceil(block_k)),
            heads: Divisor::new(bias_heads as u32),
            group_batches: (batch / bias_batch) as u32,
            group_heads: Divisor::new((num_heads_q / bias_heads) as u32),
            group_size: Divisor::new((num_heads_q / num_heads_kv) as u32),
            batches: batch as u32,
            num_heads_q: num_heads_q as u32,
        }
    }

    /// The launch argument.
    pub fn into_launch(self) -> DbiasSchedulerLaunch {
        DbiasSchedulerLaunch::new(
            self.num_tiles,
            self.matrices,
            self.q_blocks.into_launch(),
            self.k_blocks.into_launch(),
            self.heads.into_launch(),
            self.group_batches,
            self.group_heads.into_launch(),
            self.group_size.into_launch(),
            self.batches,
            self.num_heads_q,
        )
    }
}

#[cube]
impl DbiasScheduler {
    /// The blocks of keys that a block of queries sees anything of.
    pub fn seen(&self, band: &Band, row: u32, #[comptime] tile: BiasTile) -> Blocks {
        let tile_q = comptime!(BiasTile::TILE_Q as u32);
        band.k_blocks(row * tile_q, tile_q, comptime!(tile.block_k() as u32))
    }

    /// The block that comes so many after this one, which there must be.
    pub fn after(&self, block: &Block, by: u32, band: &Band, #[comptime] tile: BiasTile) -> Block {
        let mut matrix = block.matrix;
        let mut row = block.row;
        let mut nth = block.nth + by;
        if comptime!(band.bounded_above || band.bounded_below) {
            // No more than all thread blocks take at a time.
            let first = self.seen(band, row, tile);
            let mut count = first.end - first.start;
            while nth >= count {
                nth -= count;
                row += 1;
                if row == self.q_blocks.divisor {
                    row = 0u32;
                    matrix += 1;
                }
                let seen = self.seen(band, row, tile);
                count = seen.end - seen.start;
            }
        } else {
            row += self.k_blocks.divide(nth);
            nth = self.k_blocks.modulo(nth);
            matrix += self.q_blocks.divide(row);
            row = self.q_blocks.modulo(row);
        }
        Block { matrix, row, nth }
    }
}

/// Where rows of the result start, and from an element of a row to the next: in vectors of 8 bytes, or in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub struct BiasStrides {
    /// Of rows.
    pub rows: Stride,
    /// Of elements.
    pub column: usize,
}

/// Where words of a slot lie: of one batch and head that shares a block.
#[derive(Clone, Copy)]
enum WorkTileField {
    /// [`TURN`], [`LAST`]; 0 where there is no more work.
    Flags,
    /// First query.
    QStart,
    /// First key.
    KStart,
    /// Batch.
    Batch,
    /// Query head.
    Head,
    /// Key/value head.
    HeadKv,
    /// Batch of the bias.
    BiasBatch,
    /// Head of the bias.
    BiasHead,
}

/// The warp that loads K, and finds out what comes next.
const WARP_K: u32 = 0;
/// The one that loads V.
const WARP_V: u32 = 4;
/// Of each warpgroup, the one that loads its rows of a bias.
const WARP_BIAS: u32 = 1;
/// That of Q.
const WARP_Q: u32 = 2;
/// That of dO.
const WARP_D: u32 = 3;

/// There is something to do.
const TURN: u32 = 1;
/// It is the last one of its block.
const LAST: u32 = 2;

/// Where words of the cursor lie.
#[derive(Clone, Copy)]
enum CursorField {
    /// The block's number.
    Number,
    /// [`Block::matrix`].
    Matrix,
    /// [`Block::row`].
    Row,
    /// [`Block::nth`].
    Nth,
    /// The next of those that share the block.
    Member,
}

/// Shared memory: where it starts, and what lies where.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Memory {
    base: u32,
    #[cube(comptime)]
    blueprint: BiasBlueprint,
}

#[cube]
impl Memory {
    /// Makes the barriers, and puts the cursor before the first block. All threads must call it.
    fn new(base: u32, #[comptime] blueprint: BiasBlueprint) -> Memory {
        let at = comptime!(blueprint.memory());
        let rows = comptime!((blueprint.tile.row_stages * BiasTile::WARPGROUPS) as u32);
        let stages = comptime!(blueprint.tile.stages as u32);
        let groups = comptime!((blueprint.groups_b() * BiasTile::WARPGROUPS) as u32);
        if UNIT_POS == 0 {
            // Who comes: one with the bytes, each warp of the warpgroup or of the thread block when it is done.
            #[unroll]
            for i in 0..rows {
                mbarrier_init(base + comptime!(at.full_q as u32 + 8 * i), 1u32);
                mbarrier_init(base + comptime!(at.full_d as u32 + 8 * i), 1u32);
                mbarrier_init(base + comptime!(at.empty_q as u32 + 8 * i), 4u32);
                mbarrier_init(base + comptime!(at.empty_d as u32 + 8 * i), 4u32);
            }
            #[unroll]
            for i in 0..stages {
                mbarrier_init(base + comptime!(at.full_k as u32 + 8 * i), 1u32);
                mbarrier_init(base + comptime!(at.full_v as u32 + 8 * i), 1u32);
                mbarrier_init(base + comptime!(at.empty_k as u32 + 8 * i), comptime!(4 * BiasTile::WARPGROUPS as u32));
                mbarrier_init(base + comptime!(at.empty_v as u32 + 8 * i), comptime!(4 * BiasTile::WARPGROUPS as u32));
            }
            #[unroll]
            for i in 0..groups {
                mbarrier_init(base + comptime!(at.full_b as u32 + 8 * i), 1u32);
                mbarrier_init(base + comptime!(at.empty_b as u32 + 8 * i), 4u32);
            }
            #[unroll]
            for i in 0..comptime!(SLOTS as u32) {
                mbarrier_init(base + comptime!(at.known as u32 + 8 * i), 1u32);
            }
            #[unroll]
            for i in 0..comptime!(WORDS as u32) {
                // No block has so many that share it: the first turn enters a block.
                let value = comptime!(if i == CursorField::Member as u32 { u32::MAX } else { 0 }).runtime();
                store_shared(base + comptime!(at.cursor as u32 + 4 * i), value);
            }
            sync_async_proxy_shared();
        }
        sync_cube();
        Memory { base, blueprint }
    }

    /// Waits until it is known what the `turn`th turn is.
    fn await_turn(&self, turn: u32) {
        let known = comptime!(self.blueprint.memory().known as u32);
        mbarrier_wait(self.base + known + turn % comptime!(SLOTS as u32) * 8, (turn / comptime!(SLOTS as u32)) % 2);
    }

    /// A word of the `turn`th turn, which is known.
    fn word(&self, turn: u32, #[comptime] word: WorkTileField) -> u32 {
        let at = comptime!(self.blueprint.memory().slots as u32 + 4 * word as u32);
        load_shared(self.base + at + turn % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32))
    }

    fn set_word(&self, turn: u32, #[comptime] word: WorkTileField, value: u32) {
        let at = comptime!(self.blueprint.memory().slots as u32 + 4 * word as u32);
        store_shared(self.base + at + turn % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32), value);
    }

    fn cursor(&self, #[comptime] word: CursorField) -> u32 {
        load_shared(self.base + comptime!(self.blueprint.memory().cursor as u32 + 4 * word as u32))
    }

    fn set_cursor(&self, #[comptime] word: CursorField, value: u32) {
        store_shared(self.base + comptime!(self.blueprint.memory().cursor as u32 + 4 * word as u32), value);
    }

    /// Posts the `turn`th turn: the next head of the block, or the first one of block `next`. Returns whether that was the block's
    /// last. By one warp.
    fn post(&self, turn: u32, next: u32, scheduler: &DbiasScheduler, band: &Band) -> bool {
        let tile = comptime!(self.blueprint.tile);
        let group = opaque(scheduler.group_batches) * scheduler.group_heads.divisor;
        let mut member = self.cursor(CursorField::Member);
        let mut matrix = self.cursor(CursorField::Matrix);
        let mut row = self.cursor(CursorField::Row);
        let mut nth = self.cursor(CursorField::Nth);
        let number = self.cursor(CursorField::Number);
        // All threads have read it before one writes.
        sync_plane();
        let enters = member >= group;
        let ends = enters && next >= scheduler.num_tiles;
        if enters && !ends {
            let block = scheduler.after(&Block { matrix, row, nth }, next - number, band, tile);
            matrix = block.matrix;
            row = block.row;
            nth = block.nth;
            self.set_cursor(CursorField::Number, next);
            self.set_cursor(CursorField::Matrix, matrix);
            self.set_cursor(CursorField::Row, row);
            self.set_cursor(CursorField::Nth, nth);
            member = 0u32;
        }
        let last = member + 1 == group;
        let of_batch = scheduler.group_heads.divide(member);
        let (bias_batch, bias_head) = (scheduler.heads.divide(matrix), scheduler.heads.modulo(matrix));
        let head = bias_head * scheduler.group_heads.divisor + scheduler.group_heads.modulo(member);
        let seen = scheduler.seen(band, row, tile);
        self.set_word(turn, WorkTileField::Flags, select(ends, 0u32, select(last, TURN | LAST, TURN)));
        self.set_word(turn, WorkTileField::QStart, row * comptime!(BiasTile::TILE_Q as u32));
        self.set_word(turn, WorkTileField::KStart, (seen.start + nth) * comptime!(tile.block_k() as u32));
        self.set_word(turn, WorkTileField::Batch, bias_batch * scheduler.group_batches + of_batch);
        self.set_word(turn, WorkTileField::Head, head);
        self.set_word(turn, WorkTileField::HeadKv, scheduler.group_size.divide(head));
        self.set_word(turn, WorkTileField::BiasBatch, bias_batch);
        self.set_word(turn, WorkTileField::BiasHead, bias_head);
        self.set_cursor(CursorField::Member, select(ends, u32::MAX, member + 1));
        let lane = UNIT_POS % 32;
        if lane == 0 {
            mbarrier_arrive(
                self.base + comptime!(self.blueprint.memory().known as u32) + turn % comptime!(SLOTS as u32) * 8,
            );
        }
        last && !ends
    }
}

/// Rows `q [B, H, Sq, D]`, `d [B, H, Sq, Dv]` (dO) and tiles `k [B, Hkv, Sk, D]`, `v [B, Hkv, Sk, Dv]` to the gradient of the bias,
/// `out [1 | B, 1 | H, Sq, Sk]`: in vectors of 8 bytes, or, if its rows are none, element by element in `elements`, which is the
/// same tensor. `stats`: lse and delta of all queries, from [`delta`](mod@crate::hopper::delta). Boxes of the maps: 64 columns of
/// 64 rows, or of a tile. `b`: a tiled bias; any map, if there is none.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn dbias<E: Float, M: Numeric, NB: Size, NM: Size>(
    q: &TensorMap<E, Tiled>,
    d: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    mask: ComptimeOption<&Tensor<Vector<M, NM>>>,
    bias: ComptimeOption<&Tensor<Vector<E, NB>>>,
    out: &mut [Vector<u32, Const<2>>],
    elements: &mut [E],
    stats: &[u32],
    counter: &[u32],
    strides: BiasStrides,
    factors: Factors,
    band: Band,
    scheduler: DbiasScheduler,
    #[comptime] blueprint: BiasBlueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (tile, scores) = comptime!((blueprint.tile, blueprint.scores));
    let (tile_k, tiles, stages) = comptime!((tile.tile_k, tile.tiles, tile.stages));
    let (row_stages, ahead) = comptime!((tile.row_stages, tile.ahead()));
    let s_len = comptime!(tile_k / 2);
    let at = comptime!(blueprint.memory());
    let bounded = comptime!(band.bounded_above || band.bounded_below);

    // -- shared memory, barriers, descriptors
    let shared =
        Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / scores.dtype.size()), 1024usize);
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let (warpgroup, of_warpgroup) = (warp / 4, warp % 4);
    let lane = UNIT_POS % 32;
    let base = shared_address::<E>(&shared[0..1024]);
    let memory = Memory::new(base, blueprint);
    // Descriptors count in units of 16 bytes.
    let start = descriptor::<E>(&shared[0..1024], 16usize, 1024usize);
    let q_rows = start + u64::cast_from(warpgroup * comptime!((scores.q_bytes() / 16) as u32));
    let d_rows =
        start + u64::cast_from(warpgroup * comptime!((scores.d_bytes() / 16) as u32) + comptime!((at.d / 16) as u32));

    // -- the first loads
    let mut next = CUBE_POS as u32;
    if warp == WARP_K {
        #[unroll]
        for turn in 0..comptime!(ahead as u32 + 1) {
            let number = plane_broadcast(next, 0u32);
            if memory.post(turn.runtime(), number, &scheduler, &band) {
                next = CUBE_COUNT as u32 + take_ticket(counter, opaque(scheduler.num_tiles) - 1);
            }
        }
    }
    let mut first = PipelineState::first();
    #[unroll]
    for nth in 0..comptime!(stages - 1) {
        let turn = comptime!((nth / tiles) as u32).runtime();
        if warp == WARP_K {
            load_tile(k, &memory, turn, &first, comptime!(nth % tiles), false, blueprint);
        }
        if warp == WARP_V {
            load_tile(v, &memory, turn, &first, comptime!(nth % tiles), true, blueprint);
        }
        first.advance(stages);
    }
    if of_warpgroup == WARP_BIAS {
        #[unroll]
        for group in 0..comptime!(blueprint.groups_b()) {
            load_bias(b, &memory, 0u32.runtime(), 0u32.runtime(), warpgroup, group, blueprint);
        }
    }
    #[unroll]
    for turn in 0..comptime!(row_stages as u32) {
        let turn = turn.runtime();
        if of_warpgroup == WARP_Q {
            load_rows(q, stats, &memory, &band, &scheduler, turn, warpgroup, false, blueprint);
        }
        if of_warpgroup == WARP_D {
            load_rows(d, stats, &memory, &band, &scheduler, turn, warpgroup, true, blueprint);
        }
    }

    let mut sums = Sequence::<Array<f32>>::new();
    #[unroll]
    for nth in 0..tiles {
        sums.push(Array::<f32>::new(s_len));
        clear(sums.index_mut(nth), s_len);
    }
    let mut state = PipelineState::first();
    let mut turn = 0u32;
    // How many blocks are done.
    let mut done = 0u32;
    memory.await_turn(0u32.runtime());
    while memory.word(turn, WorkTileField::Flags) != 0 {
        let base = opaque(base);
        let memory = Memory { base, blueprint };
        let (stage, phase) = row_state(turn, tile);
        let of_stage = stage * comptime!(BiasTile::WARPGROUPS as u32);
        let rows_at = of_stage + warpgroup;
        let q_stage = u64::cast_from(of_stage * comptime!((scores.q_bytes() / 16) as u32));
        let d_stage = u64::cast_from(of_stage * comptime!((scores.d_bytes() / 16) as u32));
        mbarrier_wait(base + comptime!(at.full_q as u32) + rows_at * 8, phase);
        mbarrier_wait(base + comptime!(at.full_k as u32) + state.stage * 8, state.phase);
        let of_row = rows_at * comptime!(blueprint.stats_bytes() as u32) + of_warpgroup * 64 + lane / 4 * 4;
        let lse0 = f32::reinterpret(load_shared(base + comptime!(at.lse as u32) + of_row));
        let lse1 = f32::reinterpret(load_shared(base + comptime!(at.lse as u32 + 32) + of_row));
        // What is no number must not make one of what is hidden: its score is -inf, and its probability 0 after all numbers.
        let lse0 = select(lse0 * 0.0f32 == 0.0f32, lse0, f32::MIN);
        let lse1 = select(lse1 * 0.0f32 == 0.0f32, lse1, f32::MIN);

        #[unroll]
        for of_turn in 0..tiles {
            let base = opaque(base);
            let memory = Memory { base, blueprint };
            // -- S and dP
            let mut s = Array::<f32>::new(s_len);
            let mut ds = Array::<f32>::new(s_len);
            let k_tile = start
                + u64::cast_from(
                    state.stage * comptime!((scores.k_bytes() / 16) as u32) + comptime!((at.k / 16) as u32),
                );
            let v_tile = start
                + u64::cast_from(
                    state.stage * comptime!((scores.v_bytes() / 16) as u32) + comptime!((at.v / 16) as u32),
                );
            wgmma_fence();
            products(&mut s, q_rows + q_stage, k_tile, scores.head_dim, scores);
            wgmma_commit();
            if comptime!(of_turn == 0) {
                mbarrier_wait(base + comptime!(at.full_d as u32) + rows_at * 8, phase);
            }
            mbarrier_wait(base + comptime!(at.full_v as u32) + state.stage * 8, state.phase);
            wgmma_fence();
            products(&mut ds, d_rows + d_stage, v_tile, scores.head_dim_v, scores);
            wgmma_commit();

            // -- loads to where the tile before this one was
            let later = comptime!(of_turn + stages - 1);
            let to = before(&state, tile);
            if warp == WARP_K {
                load_tile(
                    k,
                    &memory,
                    turn + comptime!((later / tiles) as u32),
                    &to,
                    comptime!(later % tiles),
                    false,
                    blueprint,
                );
            }
            if warp == WARP_V {
                load_tile(
                    v,
                    &memory,
                    turn + comptime!((later / tiles) as u32),
                    &to,
                    comptime!(later % tiles),
                    true,
                    blueprint,
                );
            }
            wgmma_wait(1usize);
            pin(&mut s, s_len);
            if lane == 0 {
                mbarrier_arrive(base + comptime!(at.empty_k as u32) + state.stage * 8);
            }
            if comptime!(of_turn + 1 == tiles) {
                if lane == 0 {
                    mbarrier_arrive(base + comptime!(at.empty_q as u32) + rows_at * 8);
                }
                if of_warpgroup == WARP_Q {
                    load_rows(
                        q,
                        stats,
                        &memory,
                        &band,
                        &scheduler,
                        turn + comptime!(row_stages as u32),
                        warpgroup,
                        false,
                        blueprint,
                    );
                }
            }

            // -- P
            let group = comptime!(of_turn * tile_k / blueprint.group_b());
            let group_at = warpgroup * comptime!(blueprint.groups_b() as u32) + comptime!(group as u32);
            if comptime!(scores.tiled_bias()) {
                mbarrier_wait(base + comptime!(at.full_b as u32) + group_at * 8, done % 2);
            }
            let tile_b = base + comptime!(at.b as u32) + group_at * comptime!(blueprint.group_bytes() as u32);
            let sixteenth = comptime!(of_turn * tile_k % blueprint.group_b() / 16);
            // What a slot holds is read again when it is needed: registers are what this kernel lacks.
            let first_row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
            let first_key = memory.word(turn, WorkTileField::KStart) + comptime!((of_turn * tile_k) as u32);
            let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::Head));
            let visit = Visit { start: first_key, fully_visible: true.runtime(), masked: true.runtime() };
            let _ = apply_score_mod_of_head(
                &mut s, &factors, &band, &mask, &bias, batch, head, first_row, &visit, tile_b, sixteenth, scores,
            );
            if comptime!(bounded) {
                // Past the ends of the sequences nothing is written.
                if !band.fully_visible(first_row, first_key, comptime!(WARPGROUP_ROWS as u32), comptime!(tile_k as u32))
                {
                    apply_mask(&mut s, &band, false, first_row, first_key, tile_k);
                }
            }
            #[unroll]
            for n in 0..s_len {
                let lse = if comptime!(n % 4 < 2) { lse0 } else { lse1 };
                s[n] = probability_log2(s[n], factors.exponent, lse, scores.dtype);
            }
            pin(&mut s, s_len);
            let words = keep_mask(&factors, batch, head, &band, first_row, first_key, scores);
            let leaves_group = comptime!(scores.tiled_bias() && (of_turn + 1) * tile_k % blueprint.group_b() == 0);
            if comptime!(leaves_group) && memory.word(turn, WorkTileField::Flags) & LAST != 0 {
                // All threads of the warp have read it.
                sync_plane();
                if lane == 0 {
                    mbarrier_arrive(base + comptime!(at.empty_b as u32) + group_at * 8);
                }
                if of_warpgroup == WARP_BIAS {
                    load_bias(b, &memory, turn + 1, done + 1, warpgroup, group, blueprint);
                }
            }

            // -- dS
            let empty_v = base + comptime!(at.empty_v as u32) + state.stage * 8;
            state.advance(stages);
            // The branch of this wait is what keeps the assembler from moving the wait for dP above the exponentials.
            if comptime!(of_turn + 1 < tiles) {
                mbarrier_wait(base + comptime!(at.full_k as u32) + state.stage * 8, state.phase);
            } else {
                memory.await_turn(turn + 1);
            }
            wgmma_wait(0usize);
            pin(&mut ds, s_len);
            if lane == 0 {
                mbarrier_arrive(empty_v);
            }
            let delta0 = f32::reinterpret(load_shared(base + comptime!(at.delta as u32) + of_row));
            let delta1 = f32::reinterpret(load_shared(base + comptime!(at.delta as u32 + 32) + of_row));
            if comptime!(of_turn + 1 == tiles) {
                // All threads of the warp have read delta.
                sync_plane();
                if lane == 0 {
                    mbarrier_arrive(base + comptime!(at.empty_d as u32) + rows_at * 8);
                }
                if of_warpgroup == WARP_D {
                    load_rows(
                        d,
                        stats,
                        &memory,
                        &band,
                        &scheduler,
                        turn + comptime!(row_stages as u32),
                        warpgroup,
                        true,
                        blueprint,
                    );
                }
            }
            dropout_backward(&mut ds, &words, &factors, tile_k);
            let sum = sums.index_mut(of_turn);
            #[unroll]
            for n in 0..s_len {
                let delta = if comptime!(n % 4 < 2) { delta0 } else { delta1 };
                // What is hidden has no gradient, whatever dO and V hold there.
                sum[n] = select(s[n] == 0.0f32, sum[n], fma(s[n], ds[n] - delta, sum[n]));
            }
            // Or it would wait for the next tile, with all that it is made of.
            pin(sum, s_len);
            // Where fewest registers are in use.
            if comptime!(of_turn == 0) && warp == WARP_K {
                let number = plane_broadcast(next, 0u32);
                if memory.post(turn + comptime!(ahead as u32 + 1), number, &scheduler, &band) {
                    next = CUBE_COUNT as u32 + take_ticket(counter, opaque(scheduler.num_tiles) - 1);
                }
            }
        }

        // -- results
        if memory.word(turn, WorkTileField::Flags) & LAST != 0 {
            let first_row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
            let k_start = memory.word(turn, WorkTileField::KStart);
            let row = first_row + of_warpgroup * 16 + lane / 4;
            let (bias_batch, bias_head) =
                (memory.word(turn, WorkTileField::BiasBatch), memory.word(turn, WorkTileField::BiasHead));
            #[unroll]
            for r in 0..2usize {
                let row = row + comptime!(8 * r as u32);
                let at = strides.rows.at(bias_batch as usize, bias_head as usize, row);
                let live = band.is_query(row);
                if comptime!(blueprint.vectors) {
                    store_vectors(&sums, r, out, at, &band, live, k_start, blueprint);
                } else {
                    store_elements(&sums, r, elements, at, strides.column, &band, live, k_start, blueprint);
                }
            }
            #[unroll]
            for nth in 0..tiles {
                clear(sums.index_mut(nth), s_len);
            }
            done += 1;
        }
        turn += 1;
    }

    // -- what the band hides
    if comptime!(bounded) {
        fill_hidden(out, elements, &strides, &band, &scheduler, warp, blueprint);
    }
}

/// Zeros.
#[cube]
fn clear(sum: &mut Array<f32>, #[comptime] len: usize) {
    #[unroll]
    for n in 0..len {
        sum[n] = 0.0f32;
    }
}

/// Stage and parity of the rows of a turn.
#[cube]
fn row_state(turn: u32, #[comptime] tile: BiasTile) -> (u32, u32) {
    let stages = comptime!(tile.row_stages as u32);
    (turn % stages, turn / stages % 2)
}

/// The state of the tile that is one fewer than there are stages after that at `state`: where the tile before it was.
#[cube]
fn before(state: &PipelineState, #[comptime] tile: BiasTile) -> PipelineState {
    let first = state.stage == 0;
    PipelineState {
        stage: select(first, comptime!(tile.stages as u32), state.stage) - 1,
        phase: state.phase ^ u32::cast_from(!first),
    }
}

/// Loads the `nth` tile of K of a turn, or of V, once all warps are done with what its place held; not if there is no such turn.
/// By one warp.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_tile<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    turn: u32,
    state: &PipelineState,
    #[comptime] nth: usize,
    #[comptime] is_v: bool,
    #[comptime] blueprint: BiasBlueprint,
) {
    let (at, scores) = comptime!((blueprint.memory(), blueprint.scores));
    let (tiles, full, empty) =
        comptime!(if is_v { (at.v, at.full_v, at.empty_v) } else { (at.k, at.full_k, at.empty_k) });
    let (bytes, panels) =
        comptime!(if is_v { (scores.v_bytes(), scores.panels_v()) } else { (scores.k_bytes(), scores.panels()) });
    memory.await_turn(turn);
    if memory.word(turn, WorkTileField::Flags) != 0 {
        let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::HeadKv));
        let key = memory.word(turn, WorkTileField::KStart) + comptime!((nth * blueprint.tile.tile_k) as u32);
        let full = memory.base + comptime!(full as u32) + state.stage * 8;
        let to = memory.base + comptime!(tiles as u32) + state.stage * comptime!(bytes as u32);
        // A stage's first load waits for the phase before the first, which counts as over.
        mbarrier_wait(memory.base + comptime!(empty as u32) + state.stage * 8, state.phase ^ 1);
        mbarrier_expect(full, comptime!(bytes as u32).runtime());
        load_panels(map, to, bytes as u32, panels as u32, full, batch, head, key);
    }
}

/// Loads a warpgroup's rows of Q of a turn with their lse, or of dO with delta, once all its warps are done with what was there;
/// not if there is no such turn. By one warp.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load_rows<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    stats: &[u32],
    memory: &Memory,
    band: &Band,
    scheduler: &DbiasScheduler,
    turn: u32,
    warpgroup: u32,
    #[comptime] is_d: bool,
    #[comptime] blueprint: BiasBlueprint,
) {
    let (at, scores) = comptime!((blueprint.memory(), blueprint.scores));
    let (tiles, of_stats, full, empty) =
        comptime!(if is_d { (at.d, at.delta, at.full_d, at.empty_d) } else { (at.q, at.lse, at.full_q, at.empty_q) });
    let (bytes, panels) =
        comptime!(if is_d { (scores.d_bytes(), scores.panels_v()) } else { (scores.q_bytes(), scores.panels()) });
    let stats_bytes = comptime!(blueprint.stats_bytes());
    memory.await_turn(turn);
    if memory.word(turn, WorkTileField::Flags) != 0 {
        let (stage, phase) = row_state(turn, blueprint.tile);
        let nth = stage * comptime!(BiasTile::WARPGROUPS as u32) + warpgroup;
        let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::Head));
        let row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
        let full = memory.base + comptime!(full as u32) + nth * 8;
        let to = memory.base + comptime!(tiles as u32) + nth * comptime!(bytes as u32);
        let stats_to = memory.base + comptime!(of_stats as u32) + nth * comptime!(stats_bytes as u32);
        // Heads are filled up to whole blocks there.
        let of_head = stats_rows(opaque(band.seq_q), scores.stats_multiple, false) as usize;
        let heads = opaque(scheduler.num_heads_q) as usize;
        let mut from = (batch as usize * heads + head as usize) * of_head + row as usize;
        if comptime!(is_d) {
            from += scheduler.batches as usize * heads * of_head;
        }
        mbarrier_wait(memory.base + comptime!(empty as u32) + nth * 8, phase ^ 1);
        mbarrier_expect(full, comptime!((bytes + stats_bytes) as u32).runtime());
        load_panels(map, to, bytes as u32, panels as u32, full, batch, head, row);
        bulk_load(stats, from, stats_bytes, stats_to, full);
    }
}

/// Loads a warpgroup's rows of a group of columns of the bias, for the block whose first turn this is, the `nth` one, once all its
/// warps are done with those of the block before; not if there is no such turn. By one warp.
#[cube]
fn load_bias<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    turn: u32,
    nth: u32,
    warpgroup: u32,
    #[comptime] group: usize,
    #[comptime] blueprint: BiasBlueprint,
) {
    let at = comptime!(blueprint.memory());
    let (bytes, panels) = comptime!((blueprint.group_bytes() as u32, (blueprint.group_b() / PANEL) as u32));
    memory.await_turn(turn);
    if memory.word(turn, WorkTileField::Flags) != 0 {
        let of_cube = warpgroup * comptime!(blueprint.groups_b() as u32) + comptime!(group as u32);
        let (batch, head) = (memory.word(turn, WorkTileField::BiasBatch), memory.word(turn, WorkTileField::BiasHead));
        let row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
        let column = memory.word(turn, WorkTileField::KStart) + comptime!((group * blueprint.group_b()) as u32);
        let full = memory.base + comptime!(at.full_b as u32) + of_cube * 8;
        let to = memory.base + comptime!(at.b as u32) + of_cube * bytes;
        mbarrier_wait(memory.base + comptime!(at.empty_b as u32) + of_cube * 8, (nth % 2) ^ 1);
        mbarrier_expect(full, bytes.runtime());
        #[unroll]
        for panel in 0..panels {
            let to = to + comptime!(panel * bytes / panels);
            tma_load(map, to, full, batch, head, row, column + comptime!(panel * PANEL as u32));
        }
    }
}

/// Writes one of a thread's two rows, which starts at vector `at` of `out`; nothing if not `live`. Neighbours exchange what they
/// hold, so that the four threads of a row write 32 bytes of it together: all must call it.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store_vectors(
    sums: &Sequence<Array<f32>>,
    #[comptime] row: usize,
    out: &mut [Vector<u32, Const<2>>],
    at: usize,
    band: &Band,
    live: bool,
    k_start: u32,
    #[comptime] blueprint: BiasBlueprint,
) {
    let dtype = comptime!(blueprint.scores.dtype);
    let of_four = vector_of_pair();
    let at = at + (k_start / 4 + of_four) as usize;
    let to = &mut out[at..at + 1];
    #[unroll]
    for i in 0..comptime!(blueprint.tile.block_k() / 16) {
        let sum = sums.index(comptime!(16 * i / blueprint.tile.tile_k));
        let n = comptime!(16 * i % blueprint.tile.tile_k / 2 + 2 * row);
        let first = pack(sum[n], sum[n + 1], dtype);
        let second = pack(sum[n + 4], sum[n + 5], dtype);
        let (low, high) = exchange(first, second);
        let is_key = band.is_key(k_start + comptime!(16 * i as u32) + of_four * 4);
        store_pair(to, comptime!(4 * i), low, high, live && is_key);
    }
}

/// The same, element by element.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store_elements<E: Float>(
    sums: &Sequence<Array<f32>>,
    #[comptime] row: usize,
    elements: &mut [E],
    at: usize,
    column: usize,
    band: &Band,
    live: bool,
    k_start: u32,
    #[comptime] blueprint: BiasBlueprint,
) {
    let first = k_start + UNIT_POS % 4 * 2;
    #[unroll]
    for i in 0..comptime!(blueprint.tile.block_k() / 8) {
        let sum = sums.index(comptime!(8 * i / blueprint.tile.tile_k));
        let n = comptime!(8 * i % blueprint.tile.tile_k / 2 + 2 * row);
        let packed = pack(sum[n], sum[n + 1], blueprint.scores.dtype);
        #[unroll]
        for e in 0..2usize {
            let key = first + comptime!((8 * i + e) as u32);
            let at = at + key as usize * column;
            let to = &mut elements[at..at + 1];
            store_half(to, packed, comptime!(e == 1), live && band.is_key(key));
        }
    }
}

/// Fills what lies in blocks of which the band shows nothing with zeros, 8 rows at a time.
#[cube]
fn fill_hidden<E: Float>(
    out: &mut [Vector<u32, Const<2>>],
    elements: &mut [E],
    strides: &BiasStrides,
    band: &Band,
    scheduler: &DbiasScheduler,
    warp: u32,
    #[comptime] blueprint: BiasBlueprint,
) {
    let tile = comptime!(blueprint.tile);
    let (at_once, of_block) = comptime!((8u32, BiasTile::TILE_Q as u32 / 8));
    let (warps, wide) = comptime!((BiasTile::WARPGROUPS as u32 * 4, if blueprint.vectors { 4u32 } else { 1u32 }));
    let lane = UNIT_POS % 32;
    let mut nth = CUBE_POS as u32 * warps + warp;
    while nth < scheduler.matrices * scheduler.q_blocks.divisor * of_block {
        let (block, part) = (nth / of_block, nth % of_block);
        let (matrix, row_block) = (scheduler.q_blocks.divide(block), scheduler.q_blocks.modulo(block));
        let (batch, head) = (scheduler.heads.divide(matrix), scheduler.heads.modulo(matrix));
        let seen = scheduler.seen(band, row_block, tile);
        let before = seen.start * comptime!(tile.block_k() as u32);
        let after = seen.end * comptime!(tile.block_k() as u32);
        for of_part in 0..at_once {
            let row = row_block * comptime!(BiasTile::TILE_Q as u32) + part * at_once + of_part;
            if band.is_query(row) {
                let at = strides.rows.at(batch as usize, head as usize, row);
                #[unroll]
                for side in 0..2usize {
                    let mut key = if comptime!(side == 0) { lane * wide } else { after + lane * wide };
                    let end = if comptime!(side == 0) { before } else { band.seq_k };
                    while key < end {
                        if comptime!(blueprint.vectors) {
                            out[at + (key / 4) as usize] = Vector::<u32, Const<2>>::new(0u32);
                        } else {
                            elements[at + key as usize * strides.column] = E::from_int(0);
                        }
                        key += 32 * wide;
                    }
                }
            }
        }
        nth += CUBE_COUNT as u32 * warps;
    }
}
