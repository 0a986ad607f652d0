//! Access to registers, predicates and addresses of lanes.

use super::*;

impl Warp {
    #[inline(always)]
    pub(super) fn pointer(&mut self, slot: Slot) -> *mut u32 {
        debug_assert!((slot as usize) < self.lines.len());
        // SAFETY: decoding assigns only slots that have a line.
        unsafe { self.lines.as_mut_ptr().add(slot as usize).cast() }
    }

    #[inline(always)]
    pub(super) fn word(&self, slot: Slot, lane: usize) -> u32 {
        self.lines[slot as usize].0[lane]
    }

    #[inline(always)]
    pub(super) fn wide(&self, slot: Slot, lane: usize) -> u64 {
        debug_assert!(slot as usize + 1 < self.lines.len());
        // SAFETY: decoding assigns two lines to registers of 64 bits.
        unsafe { self.lines.as_ptr().add(slot as usize).cast::<u64>().add(lane).read() }
    }

    #[inline(always)]
    pub(super) fn set_wide(&mut self, slot: Slot, lane: usize, value: u64) {
        debug_assert!(slot as usize + 1 < self.lines.len());
        // SAFETY: as above.
        unsafe { self.lines.as_mut_ptr().add(slot as usize).cast::<u64>().add(lane).write(value) }
    }

    #[inline(always)]
    pub(super) fn value(&self, place: Place, lane: usize) -> u64 {
        if place.wide { self.wide(place.slot, lane) } else { u64::from(self.word(place.slot, lane)) }
    }

    #[inline(always)]
    pub(super) fn set(&mut self, place: Place, lane: usize, value: u64) {
        if place.wide {
            self.set_wide(place.slot, lane, value);
        } else {
            self.lines[place.slot as usize].0[lane] = value as u32;
        }
    }

    /// Writes a register in these lanes.
    #[inline(always)]
    pub(super) fn blend(&mut self, slot: Slot, values: &[u32; LANES], lanes: u32) {
        let line = &mut self.lines[slot as usize].0;
        if lanes == !0 {
            *line = *values;
        } else {
            for lane in 0..LANES {
                line[lane] = if lanes >> lane & 1 != 0 { values[lane] } else { line[lane] };
            }
        }
    }

    #[inline(always)]
    pub(super) fn predicate(&self, predicate: Predicate) -> u32 {
        self.predicates[predicate.index as usize] ^ predicate.flip
    }

    #[inline(always)]
    pub(super) fn set_predicate(&mut self, index: u32, values: u32, lanes: u32) {
        let predicate = &mut self.predicates[index as usize];
        *predicate = *predicate & !lanes | values & lanes;
    }

    #[inline(always)]
    pub(super) fn address(&self, at: Address, lane: usize) -> u64 {
        match (at.base, at.wide) {
            (None, _) => at.offset as u64,
            (Some(slot), true) => self.wide(slot, lane).wrapping_add(at.offset as u64),
            (Some(slot), false) => u64::from(self.word(slot, lane).wrapping_add(at.offset as u32)),
        }
    }

    /// An address in shared memory, converted if it is a generic one.
    pub(super) fn shared_address(&self, at: Address, lane: usize) -> u64 {
        let address = self.address(at, lane);
        if at.space == Space::Generic { address.wrapping_sub(SHARED_WINDOW) } else { address }
    }
}
