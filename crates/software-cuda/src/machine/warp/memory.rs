//! Loads, stores, atomics and copies.

use super::*;

impl Warp {
    #[inline(always)]
    pub(super) fn load(
        &mut self,
        to: &[Option<Place>],
        size: usize,
        signed: bool,
        at: Address,
        active: u32,
        block: &mut Block<'_>,
    ) -> Result<(), Failure> {
        let local_bytes = self.local.len() / LANES;
        let total = size * to.len();
        let uniform = at.base.is_none() && at.space != Space::Local;
        let mut first = None;
        for lane in lanes_of(active) {
            let from = match first {
                Some(from) if uniform => from,
                _ => {
                    let address = self.address(at, lane);
                    let local = &mut self.local[lane * local_bytes..][..local_bytes];
                    let (from, lies) = block.resolve(at.space, address, total, local)?;
                    let read = match lies {
                        Lies::Shared => {
                            block.order.read(self.number, from as usize - block.shared.as_ptr() as usize, total)
                        }
                        Lies::Global => block.global_reads(address, total),
                        Lies::Elsewhere => Ok(()),
                    };
                    if let Err(failure) = read {
                        // Words that were partly written are not spoiled, since the written part may be the one that is used.
                        let nothing = |nth: usize| match lies {
                            Lies::Shared => {
                                block.order.nothing(from as usize - block.shared.as_ptr() as usize + nth * size, size)
                            }
                            _ => block.global_nothing(address + (nth * size) as u64, size),
                        };
                        let lost = to.iter().enumerate().filter(|(nth, _)| nothing(*nth));
                        let lost: Vec<_> = lost.map(|(_, place)| *place).collect();
                        self.spoiled(&lost, if uniform { active } else { 1 << lane }, failure)?;
                    }
                    from
                }
            };
            first = Some(from);
            for (nth, place) in to.iter().enumerate() {
                let Some(place) = place else { continue };
                // SAFETY: the range was just checked to be allocated.
                let value = unsafe {
                    let from = from.add(nth * size);
                    match (size, signed) {
                        (1, false) => u64::from(from.read()),
                        (1, true) => from.cast::<i8>().read() as u64,
                        (2, false) => u64::from(from.cast::<u16>().read_unaligned()),
                        (2, true) => from.cast::<i16>().read_unaligned() as u64,
                        (4, false) => u64::from(from.cast::<u32>().read_unaligned()),
                        (4, true) => from.cast::<i32>().read_unaligned() as u64,
                        _ => from.cast::<u64>().read_unaligned(),
                    }
                };
                self.set(*place, lane, value);
            }
        }
        Ok(())
    }

    /// The first of these registers that is spoiled in a lane.
    pub(super) fn spoils_of(&self, from: &[Place], lane: usize) -> Slot {
        let mut slots = from.iter().flat_map(|place| place.slot..=place.slot + Slot::from(place.wide));
        slots.find(|slot| self.spoils.is(*slot, lane)).unwrap_or(from[0].slot)
    }

    /// Spoils registers that were loaded from unwritten memory. Any other failure is a fault.
    #[cold]
    pub(super) fn spoiled(&mut self, to: &[Option<Place>], lanes: u32, failure: Failure) -> Result<(), Failure> {
        if failure.0 != Kind::Uninitialised {
            return Err(failure);
        }
        let slots = to.iter().flatten().flat_map(|place| place.slot..=place.slot + Slot::from(place.wide));
        self.spoils.spoil(slots, lanes, failure, self.line);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn store(
        &mut self,
        from: &[Place],
        size: usize,
        at: Address,
        active: u32,
        block: &mut Block<'_>,
    ) -> Result<(), Failure> {
        let local_bytes = self.local.len() / LANES;
        let total = size * from.len();
        for lane in lanes_of(active) {
            let address = self.address(at, lane);
            let local = &mut self.local[lane * local_bytes..][..local_bytes];
            let (to, lies) = block.resolve(at.space, address, total, local)?;
            match lies {
                Lies::Shared => {
                    let at = to as usize - block.shared.as_ptr() as usize;
                    block.writes(at, total)?;
                    block.order.write(self.number, at, total, self.line)?;
                    if self.spoils.stored(lane) {
                        block.order.forget(at, total, self.line);
                    }
                }
                Lies::Global if self.spoils.stored(lane) => {
                    return Err(self.spoils.reason(self.spoils_of(from, lane)));
                }
                Lies::Global => block.global_writes(address, total),
                Lies::Elsewhere => {}
            }
            for (nth, place) in from.iter().enumerate() {
                let value = self.value(*place, lane);
                // SAFETY: the range was just checked to be allocated.
                unsafe {
                    let to = to.add(nth * size);
                    match size {
                        1 => to.write(value as u8),
                        2 => to.cast::<u16>().write_unaligned(value as u16),
                        4 => to.cast::<u32>().write_unaligned(value as u32),
                        _ => to.cast::<u64>().write_unaligned(value),
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn atomic(
        &mut self,
        change: Change,
        size: usize,
        to: Option<&[Place]>,
        at: Address,
        (with, other): (&[Slot], Slot),
        active: u32,
        block: &mut Block<'_>,
    ) -> Result<(), Failure> {
        let wide = size == 8;
        for lane in lanes_of(active) {
            let address = self.address(at, lane);
            let (pointer, lies) = block.resolve(at.space, address, size * with.len(), &mut [])?;
            match lies {
                Lies::Shared => {
                    let at = pointer as usize - block.shared.as_ptr() as usize;
                    block.writes(at, size * with.len())?;
                    block.order.change(self.number, at, size * with.len())?;
                }
                Lies::Global if change != Change::Exchange => block.global_reads(address, size * with.len())?,
                Lies::Global => block.global_writes(address, size * with.len()),
                Lies::Elsewhere => {}
            }
            let other = self.value(Place { slot: other, wide }, lane);
            for (nth, slot) in with.iter().enumerate() {
                let x = self.value(Place { slot: *slot, wide }, lane);
                // SAFETY: the range was just checked to be allocated, and addresses are multiples of the size.
                let before =
                    unsafe { exchange(pointer.add(nth * size), size, |old| changed(change, old, x, other, size)) };
                if let Some(to) = to {
                    self.set(to[nth], lane, before);
                }
            }
        }
        Ok(())
    }

    pub(super) fn copy(&self, copy: &Copy, block: &mut Block<'_>) -> Result<(), Failure> {
        block.writes(copy.to, copy.size)?;
        block.shared[copy.to..copy.to + copy.size].copy_from_slice(&copy.bytes[..copy.size]);
        Ok(())
    }

    pub(super) fn wait_for_copies(&mut self, left: usize, block: &mut Block<'_>) -> Result<(), Failure> {
        while self.copy_groups.len() > left {
            for copy in self.copy_groups.pop_front().unwrap_or_default() {
                if !copy.done {
                    self.copy(&copy, block)?;
                }
                block.order.copy_ends(self.number, copy.to, copy.size, copy.line);
                if copy.worthless {
                    block.order.forget(copy.to, copy.size, copy.line);
                }
            }
        }
        Ok(())
    }

    pub(super) fn bulk(&mut self, bulk: &Bulk, active: u32, block: &mut Block<'_>) -> Result<(), Failure> {
        for lane in lanes_of(active) {
            let (memory, shared) = if bulk.barrier.is_some() { (bulk.from, bulk.to) } else { (bulk.to, bulk.from) };
            let shared = self.address(shared, lane) as usize;
            let memory_at = self.address(memory, lane);
            let elsewhere = match &bulk.box_at {
                None => {
                    let bytes = self.word(bulk.bytes, lane) as usize;
                    if (bytes | shared | memory_at as usize) & 15 != 0 {
                        let what =
                            format!("a copy of {bytes} bytes between {memory_at:#x} and {shared:#x} of shared memory");
                        return Err((Kind::Alignment, what));
                    }
                    Source::Bytes(memory_at, bytes)
                }
                Some(coordinates) => {
                    let (map, _) = block.resolve(memory.space, memory_at, 128, &mut [])?;
                    // SAFETY: 128 bytes were just checked to be allocated.
                    let Some(map) = (unsafe { TensorMap::read(map) }) else {
                        return Err((Kind::Undefined, format!("there is no tensor map at {memory_at:#x}")));
                    };
                    if map.rank as usize != coordinates.len() {
                        let what =
                            format!("{} coordinates for a tensor map of {} dimensions", coordinates.len(), map.rank);
                        return Err((Kind::Undefined, what));
                    }
                    if !shared.is_multiple_of(128) {
                        return Err((Kind::Alignment, format!("a box at {shared:#x} of shared memory")));
                    }
                    let mut at = [0; 5];
                    at.iter_mut().zip(coordinates).for_each(|(at, slot)| *at = self.word(*slot, lane) as i32);
                    Source::Box(Box::new(map), at)
                }
            };
            let size = match &elsewhere {
                Source::Bytes(_, size) => *size,
                Source::Box(map, _) => map.box_bytes(),
            };
            if size == 0 {
                continue;
            }
            block.shared(shared as u64, size)?;
            let Some(barrier) = bulk.barrier else {
                block.order.proxy_reads(self.number, shared, size)?;
                block.copy_back(shared, &elsewhere, bulk.reduces)?;
                let (bytes, line) = ((shared, shared + size), self.line);
                block.reads(Reading { reader: Reader::Store, warp: self.number, group: self.stored, bytes, line });
                continue;
            };
            block.writes(shared, size)?;
            let barrier = self.address(barrier, lane) as usize;
            block.shared(barrier as u64, 8)?;
            block.order.proxy_writes(self.number, shared, size, barrier, self.line)?;
            let due = block.round + block.draw(6);
            let place = block.place(self.number, self.line);
            block.transfers.push(Transfer { due, to: shared, from: elsewhere, barrier, place });
        }
        Ok(())
    }
}
