//! Stages of shared memory: TMA fills them, products empty them, `mbarrier`s tell each of the other.
//!
//! Of K and of V there is a ring of stages each. Unit 0 loads ahead of the products, over the borders of work items. A
//! stage's barrier `full` completes when its bytes have come, `empty` when the last warp is done with them.

use super::ops::*;
use super::schedule::{Item, Walk};
use super::{Blueprint, PANEL, SLOTS, WARPGROUP_ROWS, WORDS};
use crate::mask::Band;
use cubecl::prelude::*;

/// Where words of an item lie.
#[derive(Clone, Copy)]
pub enum Of {
    /// Batch.
    Batch,
    /// Query head.
    Head,
    /// Key/value head.
    HeadKv,
    /// First query.
    QStart,
    /// First key of the last tile, with which to begin.
    KLast,
    /// Tiles; 0 where there is no more work.
    Steps,
    /// 1 where there is nothing to see: the one tile must be hidden.
    Blind,
}

/// Where words of a cursor lie.
#[derive(Clone, Copy)]
enum To {
    /// How many items have been entered.
    Nth,
    /// How many tiles have been loaded.
    Count,
    /// Tiles left in the item, the next one counted. 0: there is no more work.
    Left,
    /// First key of the next tile. Tiles go from the last to the first.
    KStart,
    /// Key/value head.
    Head,
    /// Batch.
    Batch,
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
    /// Barriers of K and V that complete when all warps are done.
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
    /// The layout from `base` on, and its barriers made. All units must call it.
    pub fn new(base: u32, #[comptime] blueprint: Blueprint) -> Memory {
        let stages = comptime!(blueprint.tile.stages as u32);
        let q = base;
        let k = q + comptime!(2 * blueprint.q_bytes() as u32);
        let v = k + comptime!(stages * blueprint.k_bytes() as u32);
        let full_q = v + comptime!(stages * blueprint.v_bytes() as u32);
        let full_k = full_q + 16;
        let full_v = full_k + comptime!(8 * stages);
        let empty_k = full_v + comptime!(8 * stages);
        let empty_v = empty_k + comptime!(8 * stages);
        let known = empty_v + comptime!(8 * stages);
        let slots = known + comptime!(8 * SLOTS as u32);
        let cursors = slots + comptime!(4 * (SLOTS * WORDS) as u32);
        if UNIT_POS == 0 {
            #[unroll]
            for i in 0..2u32 {
                mbarrier_init(full_q + comptime!(8 * i), 1u32);
            }
            #[unroll]
            for i in 0..stages {
                mbarrier_init(full_k + comptime!(8 * i), 1u32);
                mbarrier_init(full_v + comptime!(8 * i), 1u32);
                // One arrival of each warp.
                mbarrier_init(empty_k + comptime!(8 * i), 8u32);
                mbarrier_init(empty_v + comptime!(8 * i), 8u32);
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
        Memory { q, k, v, full_q, full_k, full_v, empty_k, empty_v, known, slots, cursors }
    }

    /// Waits until the `nth` item of this cube is known.
    pub fn await_item(&self, nth: u32) {
        mbarrier_wait(self.known + nth % comptime!(SLOTS as u32) * 8, (nth / comptime!(SLOTS as u32)) % 2);
    }

    /// A word of the `nth` item, which is known. Read when it is needed: registers are what this kernel lacks.
    pub fn item(&self, nth: u32, #[comptime] word: Of) -> u32 {
        load_shared(
            self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32) + comptime!(4 * word as u32),
        )
    }

    fn write_item(&self, nth: u32, item: &Item, head_kv: u32) {
        let at = self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
        store_shared(at + comptime!(4 * Of::Batch as u32), item.batch);
        store_shared(at + comptime!(4 * Of::Head as u32), item.head);
        store_shared(at + comptime!(4 * Of::HeadKv as u32), head_kv);
        store_shared(at + comptime!(4 * Of::QStart as u32), item.q_start);
        store_shared(at + comptime!(4 * Of::KLast as u32), item.k_last);
        store_shared(at + comptime!(4 * Of::Steps as u32), item.steps);
        store_shared(at + comptime!(4 * Of::Blind as u32), u32::cast_from(item.blind));
    }

    fn cursor(&self, #[comptime] leads: bool, #[comptime] word: To) -> u32 {
        load_shared(self.cursors + comptime!(4 * ((!leads) as usize * WORDS + word as usize) as u32))
    }

    fn set_cursor(&self, #[comptime] leads: bool, #[comptime] word: To, value: u32) {
        store_shared(self.cursors + comptime!(4 * ((!leads) as usize * WORDS + word as usize) as u32), value);
    }
}

/// What loading depends on. Only unit 0 loads; where it stands lies in shared memory, but for the number of the item
/// after the current one: that has been asked for, and waiting for it would take longer than anything else here.
#[derive(CubeType)]
pub struct Loader {
    memory: Memory,
    walk: Walk,
    band: Band,
    ahead: u32,
}

#[cube]
impl Loader {
    /// Before the first item, which is that of the cube's own number.
    pub fn new(memory: Memory, walk: Walk, band: Band) -> Loader {
        Loader { memory, walk, band, ahead: CUBE_POS as u32 }
    }

    /// Enters the next item. K leads: it finds out which item that is and tells everybody.
    pub fn enter(&mut self, counter: &[u32], #[comptime] leads: bool, #[comptime] blueprint: Blueprint) {
        let nth = self.memory.cursor(leads, To::Nth);
        if comptime!(leads) {
            if self.ahead < self.walk.items {
                let item = self.walk.item(self.ahead, &self.band, comptime!(blueprint.tile.tile_k as u32));
                self.memory.write_item(nth, &item, item.head / self.walk.group_size);
                self.ahead = self.walk.next(counter);
            } else {
                let slot = self.memory.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
                store_shared(slot + comptime!(4 * Of::Steps as u32), 0u32);
            }
            mbarrier_arrive(self.memory.known + nth % comptime!(SLOTS as u32) * 8);
        }
        self.memory.set_cursor(leads, To::Nth, nth + 1);
        self.memory.set_cursor(leads, To::Left, self.memory.item(nth, Of::Steps));
        self.memory.set_cursor(leads, To::KStart, self.memory.item(nth, Of::KLast));
        self.memory.set_cursor(leads, To::Head, self.memory.item(nth, Of::HeadKv));
        self.memory.set_cursor(leads, To::Batch, self.memory.item(nth, Of::Batch));
    }

    /// Loads the next tile and moves on; not if there is none. `again`: into a stage that was in use, once all warps are
    /// done with it.
    pub fn load<E: CubePrimitive>(
        &mut self,
        map: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] leads: bool,
        #[comptime] again: bool,
        #[comptime] blueprint: Blueprint,
    ) {
        // All at once: each read waits some 30 cycles.
        let left = self.memory.cursor(leads, To::Left);
        let count = self.memory.cursor(leads, To::Count);
        let k_start = self.memory.cursor(leads, To::KStart);
        let head = self.memory.cursor(leads, To::Head);
        let batch = self.memory.cursor(leads, To::Batch);
        if left > 0 {
            let stages = comptime!(blueprint.tile.stages as u32);
            let bytes = comptime!((if leads { blueprint.k_bytes() } else { blueprint.v_bytes() }) as u32);
            let panels = comptime!((if leads { blueprint.panels() } else { blueprint.panels_v() }) as u32);
            let stage = count % stages;
            let mut to = self.memory.v + stage * bytes;
            let mut full = self.memory.full_v + stage * 8;
            let mut empty = self.memory.empty_v + stage * 8;
            if comptime!(leads) {
                to = self.memory.k + stage * bytes;
                full = self.memory.full_k + stage * 8;
                empty = self.memory.empty_k + stage * 8;
            }
            if comptime!(again) {
                // The load before this one into the stage had the other parity, and so its release.
                mbarrier_wait(empty, (count / stages % 2) ^ 1);
            }
            mbarrier_expect(full, bytes);
            #[unroll]
            for panel in 0..panels {
                let at = to + comptime!(panel * bytes / panels);
                tma_load(map, at, full, batch, head, k_start, comptime!(panel * PANEL as u32));
            }
            self.memory.set_cursor(leads, To::Count, count + 1);
            if left > 1 {
                self.memory.set_cursor(leads, To::Left, left - 1);
                self.memory.set_cursor(leads, To::KStart, k_start - comptime!(blueprint.tile.tile_k as u32));
            } else {
                self.enter(counter, leads, blueprint);
            }
        }
    }

    /// Fills what the last step has freed: a stage of K, and of V where `v_freed`.
    pub fn refill<E: CubePrimitive>(
        &mut self,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        v_freed: bool,
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        self.load(k, counter, true, true, blueprint);
        if v_freed {
            self.load(v, counter, false, true, blueprint);
        }
    }
}

/// Loads a warpgroup's rows of Q of the `nth` item. By one unit of it.
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
