//! Stages of shared memory: TMA fills them, products empty them, `mbarrier`s tell each of the other.
//!
//! Of K and of V there is a ring of stages each. The first warp of the first warpgroup loads K and that of the second V,
//! ahead of the products and over the borders of work items. A stage's barrier `full` completes when its bytes have come,
//! `empty` when the last warp is done with them.

use super::ops::*;
use super::schedule::{Item, Walk};
use super::{Blueprint, HopperTile, PANEL, SLOTS, WARPGROUP_ROWS, WARPGROUP_UNITS, WORDS};
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
    /// 1 where there is nothing to see: the one tile must be hidden.
    Blind,
}

/// Where words of a cursor lie.
#[derive(Clone, Copy)]
enum To {
    /// First key of the next tile. Tiles go from the last to the first.
    KStart,
    /// Tiles left in the item, the next one counted. 0: there is no more work.
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
}

/// Where things lie in shared memory, as addresses.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Memory {
    /// Rows of Q, one tile for each warpgroup.
    pub q: u32,
    /// Tiles of K.
    pub k: u32,
    /// Tiles of V.
    pub v: u32,
    /// Barriers of Q, K and V that complete when bytes have come.
    pub full_q: u32,
    pub full_k: u32,
    pub full_v: u32,
    /// Barriers of Q that complete when the warps of the warpgroup are done, of K and V when all are.
    pub empty_q: u32,
    pub empty_k: u32,
    pub empty_v: u32,
    /// Barriers of the slots: an item has been written.
    pub known: u32,
    /// The slots.
    pub slots: u32,
    /// The cursors of K and V.
    cursors: u32,
}

#[cube]
impl Memory {
    /// The layout of a team's memory from `base` on, and its barriers made. All units must call it.
    pub fn new(base: u32, #[comptime] blueprint: Blueprint) -> Memory {
        let stages = comptime!(blueprint.tile.stages as u32);
        let warpgroups = comptime!(blueprint.tile.warpgroups as u32);
        let q = base;
        let k = q + comptime!(warpgroups * blueprint.q_bytes() as u32);
        let v = k + comptime!(stages * blueprint.k_bytes() as u32);
        let full_q = v + comptime!(stages * blueprint.v_bytes() as u32);
        let empty_q = full_q + comptime!(8 * warpgroups);
        let full_k = empty_q + comptime!(8 * warpgroups);
        let full_v = full_k + comptime!(8 * stages);
        let empty_k = full_v + comptime!(8 * stages);
        let empty_v = empty_k + comptime!(8 * stages);
        let known = empty_v + comptime!(8 * stages);
        let slots = known + comptime!(8 * SLOTS as u32);
        let cursors = slots + comptime!(4 * (SLOTS * WORDS) as u32);
        let of_team = UNIT_POS % comptime!(warpgroups * WARPGROUP_UNITS as u32);
        if of_team == 0 {
            #[unroll]
            for i in 0..warpgroups {
                mbarrier_init(full_q + comptime!(8 * i), 1u32);
                mbarrier_init(empty_q + comptime!(8 * i), 4u32);
            }
            #[unroll]
            for i in 0..stages {
                mbarrier_init(full_k + comptime!(8 * i), 1u32);
                mbarrier_init(full_v + comptime!(8 * i), 1u32);
                // One arrival of each warp.
                mbarrier_init(empty_k + comptime!(8 * i), comptime!(4 * warpgroups));
                mbarrier_init(empty_v + comptime!(8 * i), comptime!(4 * warpgroups));
            }
            #[unroll]
            for i in 0..comptime!(SLOTS as u32) {
                mbarrier_init(known + comptime!(8 * i), 1u32);
            }
            #[unroll]
            for i in 0..comptime!(2 * WORDS as u32) {
                store_shared(cursors + comptime!(4 * i), 0u32);
            }
            sync_async_proxy_shared();
        }
        sync_cube();
        Memory { q, k, v, full_q, full_k, full_v, empty_q, empty_k, empty_v, known, slots, cursors }
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

    fn write_item(&self, nth: u32, item: &Item) {
        let at = self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
        store_shared(at + comptime!(4 * Of::KLast as u32), item.k_last);
        store_shared(at + comptime!(4 * Of::Steps as u32), item.steps);
        store_shared(at + comptime!(4 * Of::HeadKv as u32), item.head_kv);
        store_shared(at + comptime!(4 * Of::Batch as u32), item.batch);
        store_shared(at + comptime!(4 * Of::Head as u32), item.head);
        store_shared(at + comptime!(4 * Of::QStart as u32), item.q_start);
        store_shared(at + comptime!(4 * Of::Blind as u32), u32::cast_from(item.blind));
    }

    fn cursor(&self, #[comptime] leads: bool, #[comptime] word: To) -> u32 {
        load_shared(self.cursors + comptime!(4 * ((!leads) as usize * WORDS + word as usize) as u32))
    }

    fn set_cursor(&self, #[comptime] leads: bool, #[comptime] word: To, value: u32) {
        store_shared(self.cursors + comptime!(4 * ((!leads) as usize * WORDS + word as usize) as u32), value);
    }
}

/// What loading depends on. Where it stands lies in shared memory, but for the number of the item after the current one: that
/// has been asked for, and waiting for it would take longer than anything else here.
#[derive(CubeType)]
pub struct Loader {
    memory: Memory,
    walk: Walk,
    band: Band,
    warp: u32,
    ahead: u32,
}

#[cube]
impl Loader {
    /// Before the first item, which is that of the team's own number.
    pub fn new(memory: Memory, walk: Walk, band: Band, team: u32, warp: u32, #[comptime] tile: HopperTile) -> Loader {
        let number = CUBE_POS as u32 * comptime!(tile.teams as u32) + team;
        Loader { memory, walk, band, warp, ahead: number }
    }

    /// Enters the first item.
    pub fn begin<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        if self.warp == 0 {
            self.enter(q, counter, true, blueprint);
        }
        if self.warp == comptime!(WARPGROUP_UNITS as u32 / 32) {
            self.enter(q, counter, false, blueprint);
        }
    }

    /// The first loads.
    pub fn fill<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        let stages = comptime!(blueprint.tile.stages);
        if self.warp == 0 {
            for _ in 0..stages {
                self.load(q, k, counter, true, blueprint);
            }
        }
        if self.warp == comptime!(WARPGROUP_UNITS as u32 / 32) {
            // V is wanted a step after K.
            for _ in 1..stages {
                self.load(q, v, counter, false, blueprint);
            }
        }
    }

    /// Fills the stages of K and V that the step before has freed: once in each step that multiplies both.
    pub fn refill<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        if self.warp == 0 {
            self.load(q, k, counter, true, blueprint);
        }
        if self.warp == comptime!(WARPGROUP_UNITS as u32 / 32) {
            self.load(q, v, counter, false, blueprint);
        }
    }

    /// Enters the next item. K leads: it finds out which item that is and tells everybody.
    fn enter<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] leads: bool,
        #[comptime] blueprint: Blueprint,
    ) {
        let nth = self.memory.cursor(leads, To::Nth);
        if comptime!(leads) {
            let number = plane_broadcast(self.ahead, 0u32);
            if number < self.walk.items {
                let item = self.walk.item(number, &self.band, blueprint.tile);
                self.memory.write_item(nth, &item);
                // There is room for one Q only, but it need not come from far then.
                let tiles = comptime!(blueprint.tile.warpgroups as u32);
                #[unroll]
                for tile in 0..tiles {
                    let row = item.q_start + comptime!(tile * WARPGROUP_ROWS as u32);
                    #[unroll]
                    for panel in 0..comptime!(blueprint.panels() as u32) {
                        tma_prefetch(q, item.batch, item.head, row, comptime!(panel * PANEL as u32));
                    }
                }
                self.ahead = self.walk.next(counter, blueprint.tile);
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
        let head = self.memory.item(nth, Of::HeadKv);
        let batch = self.memory.item(nth, Of::Batch);
        self.memory.set_cursor(leads, To::KStart, k_last);
        self.memory.set_cursor(leads, To::Left, steps);
        self.memory.set_cursor(leads, To::Head, head);
        self.memory.set_cursor(leads, To::Batch, batch);
        self.memory.set_cursor(leads, To::Nth, nth + 1);
    }

    /// Loads the next tile, once all warps are done with what its stage held, and moves on; not if there is none.
    fn load<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        map: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] leads: bool,
        #[comptime] blueprint: Blueprint,
    ) {
        let k_start = self.memory.cursor(leads, To::KStart);
        let left = self.memory.cursor(leads, To::Left);
        let head = self.memory.cursor(leads, To::Head);
        let batch = self.memory.cursor(leads, To::Batch);
        let mut place =
            Place { stage: self.memory.cursor(leads, To::Stage), phase: self.memory.cursor(leads, To::Phase) };
        if left > 0 {
            let bytes = comptime!((if leads { blueprint.k_bytes() } else { blueprint.v_bytes() }) as u32);
            let panels = comptime!((if leads { blueprint.panels() } else { blueprint.panels_v() }) as u32);
            let mut to = self.memory.v + place.stage * bytes;
            let mut full = self.memory.full_v + place.stage * 8;
            let mut empty = self.memory.empty_v + place.stage * 8;
            if comptime!(leads) {
                to = self.memory.k + place.stage * bytes;
                full = self.memory.full_k + place.stage * 8;
                empty = self.memory.empty_k + place.stage * 8;
            }
            // A stage's first load waits for the phase before the first, which counts as over.
            mbarrier_wait(empty, place.phase ^ 1);
            mbarrier_expect(full, bytes);
            #[unroll]
            for panel in 0..panels {
                let at = to + comptime!(panel * bytes / panels);
                tma_load(map, at, full, batch, head, k_start, comptime!(panel * PANEL as u32));
            }
            place.advance(blueprint.tile.stages);
            self.memory.set_cursor(leads, To::Stage, place.stage);
            self.memory.set_cursor(leads, To::Phase, place.phase);
            if left > 1 {
                self.memory.set_cursor(leads, To::KStart, k_start - comptime!(blueprint.tile.tile_k as u32));
                self.memory.set_cursor(leads, To::Left, left - 1);
            } else {
                self.enter(q, counter, leads, blueprint);
            }
        }
    }
}

/// Loads a warpgroup's rows of Q of the `nth` item. By one warp of it.
#[cube]
pub fn load_q<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    nth: u32,
    warpgroup: u32,
    #[comptime] blueprint: Blueprint,
) {
    let bytes = comptime!(blueprint.q_bytes() as u32);
    let panels = comptime!(blueprint.panels() as u32);
    let full = memory.full_q + warpgroup * 8;
    let to = memory.q + warpgroup * bytes;
    let (batch, head) = (memory.item(nth, Of::Batch), memory.item(nth, Of::Head));
    let row = memory.item(nth, Of::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
    mbarrier_expect(full, bytes);
    #[unroll]
    for panel in 0..panels {
        let at = to + comptime!(panel * bytes / panels);
        tma_load(map, at, full, batch, head, row, comptime!(panel * PANEL as u32));
    }
}
