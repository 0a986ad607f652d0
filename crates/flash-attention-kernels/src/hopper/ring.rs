//! Stages of shared memory: TMA fills them, products empty them, `mbarrier`s tell each of the other.
//!
//! Of K, of V and of a tiled bias there is a ring of stages each. The first warp of the first warpgroup loads K, that of the
//! second V and the one after it the bias, ahead of the products and over the borders of work items; or a warp that does nothing
//! else loads them all. A stage's barrier `full` completes when its bytes have come, `empty` when the last warp is done with them.

use super::delta::{stats_all, stats_at};
use super::ops::*;
use super::schedule::{Item, Walk};
use super::{Blueprint, HopperTile, PANEL, Role, SLOTS, WARP_UNITS, WARPGROUP_ROWS, WARPGROUP_UNITS, WORDS};
use crate::blocks::{Visit, entry_at, visit_of};
use crate::extras::Extras;
use crate::mask::Band;
use cubecl::prelude::*;

/// Where words of an item lie. The first four are what loading needs.
#[derive(Clone, Copy)]
pub enum Of {
    /// First key of the last tile, with which to begin.
    KLast,
    /// Tiles; 0 where there is no more work.
    Steps,
    /// Key/value head.
    HeadKv,
    /// Batch.
    Batch,
    /// Query head.
    Head,
    /// First query.
    QStart,
    /// [`BLIND`], [`CONTINUED`], [`CONTINUES`].
    Flags,
    /// Batch of the results.
    BatchOut,
    /// The sequence, where there are several, and where its rows and its columns begin and end.
    Sequence,
    RowsBegin,
    RowsEnd,
    ColumnsBegin,
    ColumnsEnd,
}

/// There is nothing to see: the one tile must be hidden.
pub const BLIND: u32 = 1;
/// It adds to what the item before has computed, of the same block: with another query head of its group.
pub const CONTINUED: u32 = 2;
/// The next one adds to it.
pub const CONTINUES: u32 = 4;

/// Where words of a cursor lie.
#[derive(Clone, Copy)]
enum To {
    /// First key of the next tile, or where its entry lies. Tiles go from the last to the first.
    KStart,
    /// Tiles left in the item, the next one counted; 0 before the first item, [`END`] after the last.
    Left,
    /// Key/value head.
    Head,
    /// Batch.
    Batch,
    /// The stage of the next tile.
    Stage,
    /// The parity of its barriers' phase.
    Phase,
    /// How many items have been entered.
    Nth,
    /// The number of the next item in its group.
    OfGroup,
}

/// No item is left.
const END: u32 = u32::MAX;

/// The rings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ring {
    /// Of K. It leads: who loads it finds out what there is to do.
    K,
    /// Of V.
    V,
    /// Of the bias.
    Bias,
}

impl Ring {
    /// The warp that loads: its warpgroup waits for it.
    fn warp(self) -> u32 {
        let of_warpgroup = (WARPGROUP_UNITS / WARP_UNITS) as u32;
        match self {
            Ring::K => 0,
            Ring::V => of_warpgroup,
            Ring::Bias => of_warpgroup + 1,
        }
    }

    /// Bytes of a stage.
    fn bytes(self, blueprint: Blueprint) -> u32 {
        let bytes = match self {
            Ring::K => blueprint.k_bytes(),
            Ring::V => blueprint.v_bytes(),
            Ring::Bias => blueprint.b_bytes(),
        };
        bytes as u32
    }

    /// Panels of a stage of K or V.
    fn panels(self, blueprint: Blueprint) -> u32 {
        (if self == Ring::V { blueprint.panels_v() } else { blueprint.panels() }) as u32
    }
}

/// A factor of 0 for each dimension that a bias repeats, else of 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Spread {
    /// Of the batch.
    pub batch: u32,
    /// Of the query head.
    pub head: u32,
}

/// A place in a ring: the stage, and the parity of its barriers' phase.
#[derive(CubeType, Clone)]
pub struct Place {
    pub stage: u32,
    pub phase: u32,
}

#[cube]
impl Place {
    /// The first.
    pub fn first() -> Place {
        Place { stage: 0u32, phase: 0u32 }
    }

    /// Moves on.
    pub fn advance(&mut self, #[comptime] stages: usize) {
        self.stage += 1;
        if self.stage == comptime!(stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1;
        }
    }

    /// The one after this.
    pub fn next(&self, #[comptime] stages: usize) -> Place {
        let wraps = self.stage + 1 == comptime!(stages as u32);
        Place { stage: select(wraps, 0u32, self.stage + 1), phase: self.phase ^ u32::cast_from(wraps) }
    }
}

/// Where things lie in shared memory, as addresses.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Memory {
    /// Rows of Q, one tile for each warpgroup.
    pub q: u32,
    /// Those of dO.
    pub d: u32,
    /// Tiles of K.
    pub k: u32,
    /// Tiles of V.
    pub v: u32,
    /// Tiles of the bias.
    pub b: u32,
    /// Tiles of `dSᵀ`.
    pub ds: u32,
    /// The log-sum-exp and delta of streamed tiles.
    pub lse: u32,
    pub delta: u32,
    /// Barriers of Q, K, V and the bias that complete when bytes have come.
    pub full_q: u32,
    pub full_k: u32,
    pub full_v: u32,
    pub full_b: u32,
    /// Barriers of Q and dO that complete when the warps that multiply with them are done, of the others when all are.
    pub empty_q: u32,
    pub empty_d: u32,
    pub empty_k: u32,
    pub empty_v: u32,
    pub empty_b: u32,
    /// Barriers of the slots: an item has been written.
    pub known: u32,
    /// The slots.
    pub slots: u32,
    /// The rings' cursors.
    cursors: u32,
    /// With a block mask, the entry of the tile in each stage of K.
    entries: u32,
}

#[cube]
impl Memory {
    /// The layout of a team's memory from `base` on, and its barriers made. All units must call it.
    pub fn new(base: u32, #[comptime] blueprint: Blueprint) -> Memory {
        let stages = comptime!(blueprint.tile.stages as u32);
        let warpgroups = comptime!(blueprint.tile.warpgroups as u32);
        let q = base;
        let d = q + comptime!(warpgroups * blueprint.q_bytes() as u32);
        let k = d + comptime!(warpgroups * blueprint.d_bytes() as u32);
        let v = k + comptime!(stages * blueprint.k_bytes() as u32);
        let b = v + comptime!(stages * blueprint.v_bytes() as u32);
        let ds = b + comptime!(stages * blueprint.b_bytes() as u32);
        let lse = ds + comptime!(2 * blueprint.ds_bytes() as u32);
        let delta = lse + comptime!(stages * blueprint.stats_bytes() as u32);
        let full_q = delta + comptime!(stages * blueprint.stats_bytes() as u32);
        let empty_q = full_q + comptime!(8 * warpgroups);
        let empty_d = empty_q + comptime!(8 * warpgroups);
        let full_k = empty_d + comptime!(8 * warpgroups);
        let full_v = full_k + comptime!(8 * stages);
        let full_b = full_v + comptime!(8 * stages);
        let empty_k = full_b + comptime!(8 * stages);
        let empty_v = empty_k + comptime!(8 * stages);
        let empty_b = empty_v + comptime!(8 * stages);
        let known = empty_b + comptime!(8 * stages);
        let slots = known + comptime!(8 * SLOTS as u32);
        let cursors = slots + comptime!(4 * (SLOTS * WORDS) as u32);
        let entries = cursors + comptime!(4 * (3 * WORDS) as u32);
        let units = comptime!(warpgroups * WARPGROUP_UNITS as u32);
        let within = UNIT_POS % units;
        let mut first = within == 0;
        if comptime!(blueprint.tile.loader) {
            first = first && UNIT_POS < comptime!(blueprint.tile.teams as u32 * units);
        }
        if first {
            #[unroll]
            for i in 0..warpgroups {
                mbarrier_init(full_q + comptime!(8 * i), 1u32);
                mbarrier_init(
                    empty_q + comptime!(8 * i),
                    comptime!(if blueprint.reduces() { 4 * warpgroups } else { 4 }),
                );
                mbarrier_init(empty_d + comptime!(8 * i), 4u32);
            }
            #[unroll]
            for i in 0..stages {
                mbarrier_init(full_k + comptime!(8 * i), 1u32);
                mbarrier_init(full_v + comptime!(8 * i), 1u32);
                mbarrier_init(full_b + comptime!(8 * i), 1u32);
                // One arrival of each warp.
                mbarrier_init(empty_k + comptime!(8 * i), comptime!(4 * warpgroups));
                mbarrier_init(empty_v + comptime!(8 * i), comptime!(4 * warpgroups));
                mbarrier_init(empty_b + comptime!(8 * i), comptime!(4 * warpgroups));
            }
            #[unroll]
            for i in 0..comptime!(SLOTS as u32) {
                mbarrier_init(known + comptime!(8 * i), 1u32);
            }
            #[unroll]
            for i in 0..comptime!(3 * WORDS as u32) {
                store_shared(cursors + comptime!(4 * i), 0u32);
            }
            sync_async_proxy_shared();
        }
        sync_cube();
        Memory {
            q,
            d,
            k,
            v,
            b,
            ds,
            lse,
            delta,
            full_q,
            full_k,
            full_v,
            full_b,
            empty_q,
            empty_d,
            empty_k,
            empty_v,
            empty_b,
            known,
            slots,
            cursors,
            entries,
        }
    }

    /// Waits until the `nth` item of this team is known.
    pub fn await_item(&self, nth: u32) {
        mbarrier_wait(self.known + nth % comptime!(SLOTS as u32) * 8, (nth / comptime!(SLOTS as u32)) % 2);
    }

    /// A word of the `nth` item, which is known. Read when it is needed: registers are what this kernel lacks.
    pub fn item(&self, nth: u32, #[comptime] word: Of) -> u32 {
        load_shared(
            self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32) + comptime!(4 * word as u32),
        )
    }

    /// The query head of the `nth` item.
    pub fn query_head(&self, nth: u32, #[comptime] blueprint: Blueprint) -> u32 {
        if comptime!(blueprint.transposed()) { self.item(nth, Of::HeadKv) } else { self.item(nth, Of::Head) }
    }

    fn write_item(&self, nth: u32, item: &Item, flags: u32) {
        let at = self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
        store_shared(at + comptime!(4 * Of::KLast as u32), item.k_last);
        store_shared(at + comptime!(4 * Of::Steps as u32), item.steps);
        store_shared(at + comptime!(4 * Of::HeadKv as u32), item.head_kv);
        store_shared(at + comptime!(4 * Of::Batch as u32), item.batch);
        store_shared(at + comptime!(4 * Of::Head as u32), item.head);
        store_shared(at + comptime!(4 * Of::QStart as u32), item.q_start);
        store_shared(at + comptime!(4 * Of::Flags as u32), u32::cast_from(item.blind) | flags);
        store_shared(at + comptime!(4 * Of::BatchOut as u32), item.batch_out);
        if comptime!(item.band.ragged) {
            store_shared(at + comptime!(4 * Of::Sequence as u32), item.band.sequence);
            store_shared(at + comptime!(4 * Of::RowsBegin as u32), item.band.begin_q);
            store_shared(at + comptime!(4 * Of::RowsEnd as u32), item.band.end_q);
            store_shared(at + comptime!(4 * Of::ColumnsBegin as u32), item.band.begin_k);
            store_shared(at + comptime!(4 * Of::ColumnsEnd as u32), item.band.end_k);
        }
    }

    /// What the rows of the `nth` item see, if `band` is what the options make of all.
    pub fn band(&self, nth: u32, band: &Band, #[comptime] ragged: bool) -> Band {
        if comptime!(ragged) {
            let (begin_q, end_q) = (self.item(nth, Of::RowsBegin), self.item(nth, Of::RowsEnd));
            let (begin_k, end_k) = (self.item(nth, Of::ColumnsBegin), self.item(nth, Of::ColumnsEnd));
            band.of(self.item(nth, Of::Sequence), begin_q, end_q, begin_k, end_k)
        } else {
            *band
        }
    }

    /// What is known of the tile at a place of the ring of K, which has come: with a block mask, what its entry says, else this.
    pub fn visit(&self, place: &Place, start: u32, edge: bool, #[comptime] blueprint: Blueprint) -> Visit {
        if comptime!(blueprint.sparse) {
            visit_of(load_shared(self.entries + place.stage * 4), comptime!(blueprint.tile.tile_k as u32))
        } else {
            Visit { start, whole: !edge, masked: true.runtime() }
        }
    }

    /// Waits for a tile of a tiled bias, which has the place of that of K in its ring; returns where a warpgroup's part of it
    /// lies.
    pub fn await_bias(&self, place: &Place, warpgroup: u32, #[comptime] blueprint: Blueprint) -> u32 {
        if comptime!(blueprint.tiled_bias()) {
            mbarrier_wait(self.full_b + place.stage * 8, place.phase);
        }
        let of_warpgroup = comptime!((blueprint.b_bytes() / blueprint.tile.warpgroups) as u32);
        self.b + place.stage * comptime!(blueprint.b_bytes() as u32) + warpgroup * of_warpgroup
    }

    /// Lets a tile of a tiled bias be overwritten.
    pub fn release_bias(&self, place: &Place, #[comptime] blueprint: Blueprint) {
        if comptime!(blueprint.tiled_bias()) {
            // All units of the warp have read it.
            sync_plane();
            let lane = UNIT_POS % 32;
            if lane == 0 {
                mbarrier_arrive(self.empty_b + place.stage * 8);
            }
        }
    }

    /// The first stage of a ring, and its barriers `full` and `empty`.
    fn ring(&self, #[comptime] ring: Ring) -> (u32, u32, u32) {
        match comptime!(ring) {
            Ring::K => (self.k, self.full_k, self.empty_k),
            Ring::V => (self.v, self.full_v, self.empty_v),
            Ring::Bias => (self.b, self.full_b, self.empty_b),
        }
    }

    fn cursor(&self, #[comptime] ring: Ring, #[comptime] word: To) -> u32 {
        load_shared(self.cursors + comptime!(4 * (ring as usize * WORDS + word as usize) as u32))
    }

    fn set_cursor(&self, #[comptime] ring: Ring, #[comptime] word: To, value: u32) {
        store_shared(self.cursors + comptime!(4 * (ring as usize * WORDS + word as usize) as u32), value);
    }
}

/// What loading depends on. Where it stands lies in shared memory, but for the number of the item after the current one: that
/// has been asked for, and waiting for it would take longer than anything else here.
#[derive(CubeType)]
pub struct Loader {
    memory: Memory,
    walk: Walk,
    band: Band,
    spread: Spread,
    extras: Extras,
    warp: u32,
    ahead: u32,
}

#[cube]
impl Loader {
    /// Before the first item, which is that of the team's own number.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        memory: Memory,
        walk: Walk,
        band: Band,
        spread: Spread,
        extras: Extras,
        team: u32,
        warp: u32,
        #[comptime] tile: HopperTile,
    ) -> Loader {
        let number = CUBE_POS as u32 * comptime!(tile.teams as u32) + team;
        let walk = walk.scheduled(&extras);
        Loader { memory, walk, band, spread, extras, warp, ahead: number }
    }

    /// The first loads: all stages, where no warp does nothing else. Cursors enter an item the first time. `stats`: lse and delta of
    /// each query, where they come with its tiles.
    #[allow(clippy::too_many_arguments)]
    pub fn fill<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        b: &TensorMap<E, Tiled>,
        stats: &[u32],
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        if comptime!(!blueprint.tile.loader) {
            let stages = comptime!(blueprint.tile.stages);
            if self.warp == comptime!(Ring::K.warp()) {
                for _ in 0..stages + 1 {
                    self.load(q, d, k, stats, counter, Ring::K, blueprint);
                }
            }
            if self.warp == comptime!(Ring::V.warp()) {
                // In the forward, V is wanted a step after K.
                for _ in 0..comptime!(if blueprint.role == Role::Forward { stages } else { stages + 1 }) {
                    self.load(q, d, v, stats, counter, Ring::V, blueprint);
                }
            }
            if comptime!(blueprint.tiled_bias()) && self.warp == comptime!(Ring::Bias.warp()) {
                for _ in 0..stages + 1 {
                    self.load(q, d, b, stats, counter, Ring::Bias, blueprint);
                }
            }
        }
        self.memory.await_item(0u32);
        // By a warp that loads nothing else now: what is asked for last comes last, after the stages of all multiprocessors.
        let (warpgroup, of_warpgroup) = (self.warp / 4, self.warp % 4);
        if of_warpgroup == 2 && self.memory.item(0u32, Of::Steps) != 0 {
            load_kept(q, &self.memory, 0u32, warpgroup, Kept::Q, blueprint);
            if comptime!(blueprint.differentiates()) {
                load_kept(d, &self.memory, 0u32, warpgroup, Kept::D, blueprint);
            }
        }
    }

    /// All loads of K, V and the bias, by a warp that does nothing else; of the forward, in the order in which its steps free the
    /// stages, V one after K.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        b: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        // The first call of each only enters the first item.
        self.load(q, q, k, counter, counter, Ring::K, blueprint);
        if comptime!(blueprint.tiled_bias()) {
            self.load(q, q, b, counter, counter, Ring::Bias, blueprint);
        }
        let mut left = self.memory.cursor(Ring::K, To::Left);
        while left != END {
            self.load(q, q, k, counter, counter, Ring::K, blueprint);
            if comptime!(blueprint.tiled_bias()) {
                self.load(q, q, b, counter, counter, Ring::Bias, blueprint);
            }
            self.load(q, q, v, counter, counter, Ring::V, blueprint);
            left = self.memory.cursor(Ring::V, To::Left);
        }
    }

    /// Fills the stages that the step before has freed: in the forward once in each step that multiplies both K and V, else in
    /// each but the very first.
    #[allow(clippy::too_many_arguments)]
    pub fn refill<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        b: &TensorMap<E, Tiled>,
        stats: &[u32],
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        if comptime!(!blueprint.tile.loader) {
            if self.warp == comptime!(Ring::K.warp()) {
                self.load(q, d, k, stats, counter, Ring::K, blueprint);
            }
            if self.warp == comptime!(Ring::V.warp()) {
                self.load(q, d, v, stats, counter, Ring::V, blueprint);
            }
            if comptime!(blueprint.tiled_bias()) && self.warp == comptime!(Ring::Bias.warp()) {
                self.load(q, d, b, stats, counter, Ring::Bias, blueprint);
            }
        }
    }

    /// Enters the next item, and returns how many tiles are left to load. K leads: it finds out which item that is and tells
    /// everybody.
    fn enter<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        #[comptime] ring: Ring,
        #[comptime] blueprint: Blueprint,
    ) -> u32 {
        let nth = self.memory.cursor(ring, To::Nth);
        if comptime!(ring == Ring::K) {
            let number = plane_broadcast(self.ahead, 0u32);
            if number < self.walk.items {
                let mut of_group = 0u32;
                let mut flags = 0u32;
                if comptime!(blueprint.transposed()) {
                    of_group = self.memory.cursor(ring, To::OfGroup);
                    let last = of_group + 1 == self.walk.group_size.divisor;
                    flags = select(of_group == 0, 0u32, CONTINUED) | select(last, 0u32, CONTINUES);
                    self.memory.set_cursor(ring, To::OfGroup, select(last, 0u32, of_group + 1));
                }
                let item = self.walk.item(number, of_group, &self.band, &self.extras, blueprint);
                self.memory.write_item(nth, &item, flags);
                // There is room for one Q and one dO only, but they need not come from far then.
                #[unroll]
                for tile in 0..comptime!(blueprint.tile.warpgroups as u32) {
                    let row = item.q_start + comptime!(tile * WARPGROUP_ROWS as u32);
                    #[unroll]
                    for panel in 0..comptime!(blueprint.panels() as u32) {
                        tma_prefetch(q, item.batch, item.head, row, comptime!(panel * PANEL as u32));
                    }
                    #[unroll]
                    for panel in 0..comptime!(if blueprint.differentiates() { blueprint.panels_v() as u32 } else { 0 })
                    {
                        tma_prefetch(d, item.batch, item.head, row, comptime!(panel * PANEL as u32));
                    }
                }
            } else {
                let slot = self.memory.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
                store_shared(slot + comptime!(4 * Of::Steps as u32), 0u32);
            }
            let lane = UNIT_POS % 32;
            if lane == 0 {
                mbarrier_arrive(self.memory.known + nth % comptime!(SLOTS as u32) * 8);
            }
        } else {
            self.memory.await_item(nth);
        }
        // All at once: each read waits some 30 cycles.
        let k_last = self.memory.item(nth, Of::KLast);
        let steps = self.memory.item(nth, Of::Steps);
        let head = if comptime!(ring == Ring::Bias) {
            self.memory.query_head(nth, blueprint) * self.spread.head
        } else {
            self.memory.item(nth, Of::HeadKv)
        };
        let mut batch = self.memory.item(nth, Of::Batch);
        if comptime!(ring == Ring::Bias) {
            batch *= self.spread.batch;
        }
        self.memory.set_cursor(ring, To::KStart, k_last);
        self.memory.set_cursor(ring, To::Head, head);
        self.memory.set_cursor(ring, To::Batch, batch);
        self.memory.set_cursor(ring, To::Nth, nth + 1);
        select(steps == 0, END, steps)
    }

    /// Loads the next tile, once all warps are done with what its stage held, and moves on; not if there is none. A cursor that
    /// is in no item yet only enters the first one.
    #[allow(clippy::too_many_arguments)]
    fn load<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        map: &TensorMap<E, Tiled>,
        stats: &[u32],
        counter: &[u32],
        #[comptime] ring: Ring,
        #[comptime] blueprint: Blueprint,
    ) {
        let next = self.memory.cursor(ring, To::KStart);
        let mut left = self.memory.cursor(ring, To::Left);
        let head = self.memory.cursor(ring, To::Head);
        let batch = self.memory.cursor(ring, To::Batch);
        let mut place =
            Place { stage: self.memory.cursor(ring, To::Stage), phase: self.memory.cursor(ring, To::Phase) };
        if left != END {
            if left > 0 {
                let bytes = comptime!(ring.bytes(blueprint));
                let (start, full, empty) = self.memory.ring(ring);
                let to = start + place.stage * bytes;
                let full = full + place.stage * 8;
                // A stage's first load waits for the phase before the first, which counts as over.
                mbarrier_wait(empty + place.stage * 8, place.phase ^ 1);
                let k_start = if comptime!(blueprint.sparse) {
                    let entry = entry_at(&self.extras, next);
                    if comptime!(ring == Ring::K) {
                        store_shared(self.memory.entries + place.stage * 4, entry);
                    }
                    visit_of(entry, comptime!(blueprint.tile.tile_k as u32)).start
                } else {
                    next
                };
                let with_stats = comptime!(ring != Ring::Bias && blueprint.transposed());
                let stats_bytes = comptime!(if with_stats { blueprint.stats_bytes() as u32 } else { 0 });
                mbarrier_expect(full, comptime!(bytes + stats_bytes));
                if comptime!(with_stats) {
                    let to = if comptime!(ring == Ring::K) { self.memory.lse } else { self.memory.delta };
                    let of_lse = stats_at(&self.band, &self.walk, batch, head, k_start, blueprint);
                    let from = if comptime!(ring == Ring::K) {
                        of_lse
                    } else {
                        of_lse + stats_all(&self.band, &self.walk, blueprint)
                    };
                    // Copies start at multiples of 16 bytes.
                    let from = if comptime!(blueprint.ragged) { from / 4 * 4 } else { from };
                    bulk_load(stats, from, blueprint.stats_bytes(), to + place.stage * stats_bytes, full);
                }
                if comptime!(ring == Ring::Bias && blueprint.transposed()) {
                    // A panel of keys for each warpgroup.
                    let first_key = self.memory.item(self.memory.cursor(ring, To::Nth) - 1, Of::QStart);
                    #[unroll]
                    for panel in 0..comptime!(blueprint.tile.warpgroups as u32) {
                        let at = to + comptime!(panel * bytes / blueprint.tile.warpgroups as u32);
                        tma_load(map, at, full, batch, head, k_start, first_key + comptime!(panel * PANEL as u32));
                    }
                } else if comptime!(ring == Ring::Bias) {
                    let first_row = self.memory.item(self.memory.cursor(ring, To::Nth) - 1, Of::QStart);
                    let panels = comptime!(blueprint.panels_b() as u32);
                    let panel_bytes = comptime!(bytes / (panels * blueprint.tile.warpgroups as u32));
                    #[unroll]
                    for tile in 0..comptime!(blueprint.tile.warpgroups as u32) {
                        let row = first_row + comptime!(tile * WARPGROUP_ROWS as u32);
                        #[unroll]
                        for panel in 0..panels {
                            let at = to + comptime!((tile * panels + panel) * panel_bytes);
                            tma_load(map, at, full, batch, head, row, k_start + comptime!(panel * PANEL as u32));
                        }
                    }
                } else {
                    load_panels(map, to, bytes, ring.panels(blueprint), full, batch, head, k_start);
                }
                place.advance(blueprint.tile.stages);
                self.memory.set_cursor(ring, To::Stage, place.stage);
                self.memory.set_cursor(ring, To::Phase, place.phase);
                let step = comptime!(if blueprint.sparse { 1 } else { blueprint.tile.tile_k as u32 });
                self.memory.set_cursor(ring, To::KStart, next - step);
                left -= 1;
            }
            if left == 0 {
                left = self.enter(q, d, ring, blueprint);
            }
            self.memory.set_cursor(ring, To::Left, left);
            // As late as the answer still comes in time: who takes an item early may be busy for long before it.
            if comptime!(ring == Ring::K) && left == 1 {
                // Another query head of the same group is no other number.
                let mut of_group = 0u32;
                if comptime!(blueprint.transposed()) {
                    of_group = self.memory.cursor(ring, To::OfGroup);
                }
                if of_group == 0 {
                    self.ahead = self.walk.next(counter, blueprint.tile);
                }
            }
        }
    }
}

/// Which of the rows that are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Those of Q.
    Q,
    /// Those of dO.
    D,
}

/// Loads a warpgroup's rows of Q, or of dO, of the `nth` item. By one warp of it.
#[cube]
pub fn load_kept<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    nth: u32,
    warpgroup: u32,
    #[comptime] kept: Kept,
    #[comptime] blueprint: Blueprint,
) {
    let (q_bytes, d_bytes) = comptime!((blueprint.q_bytes() as u32, blueprint.d_bytes() as u32));
    let full = memory.full_q + warpgroup * 8;
    let (batch, head) = (memory.item(nth, Of::Batch), memory.item(nth, Of::Head));
    let row = memory.item(nth, Of::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
    if comptime!(kept == Kept::Q) {
        // One barrier is that of both.
        mbarrier_expect(full, comptime!(q_bytes + d_bytes));
        let to = memory.q + warpgroup * q_bytes;
        load_panels(map, to, q_bytes, blueprint.panels() as u32, full, batch, head, row);
    } else {
        let to = memory.d + warpgroup * d_bytes;
        load_panels(map, to, d_bytes, blueprint.panels_v() as u32, full, batch, head, row);
    }
}

/// Loads rows, panel after panel.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn load_panels<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    to: u32,
    #[comptime] bytes: u32,
    #[comptime] panels: u32,
    full: u32,
    batch: u32,
    head: u32,
    row: u32,
) {
    #[unroll]
    for panel in 0..panels {
        let at = to + comptime!(panel * bytes / panels);
        tma_load(map, at, full, batch, head, row, comptime!(panel * PANEL as u32).runtime());
    }
}

/// Loads a warpgroup's rows of Q, or of dO, of the item after the `nth`, once all warps are past their last product with those of this
/// one.
#[cube]
pub fn load_next<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    nth: u32,
    warp: u32,
    #[comptime] kept: Kept,
    #[comptime] blueprint: Blueprint,
) {
    let (lane, warpgroup, of_warpgroup) = (UNIT_POS % 32, warp / 4, warp % 4);
    let of_both = if comptime!(kept == Kept::Q) { memory.empty_q } else { memory.empty_d };
    let empty = of_both + warpgroup * 8;
    if lane == 0 {
        // Where dQ is added up, all warps multiply with every warpgroup's rows of Q.
        if comptime!(blueprint.reduces() && kept == Kept::Q) {
            #[unroll]
            for of_other in 0..comptime!(blueprint.tile.warpgroups as u32) {
                mbarrier_arrive(memory.empty_q + comptime!(8 * of_other));
            }
        } else {
            mbarrier_arrive(empty);
        }
    }
    // It becomes known when the last tile of K of this one is loaded, which has been.
    memory.await_item(nth + 1);
    if of_warpgroup == 0 && memory.item(nth + 1, Of::Steps) != 0 {
        mbarrier_wait(empty, nth % 2);
        load_kept(map, memory, nth + 1, warpgroup, kept, blueprint);
    }
}
