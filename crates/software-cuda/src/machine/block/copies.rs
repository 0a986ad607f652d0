//! Asynchronous copies, and barriers in shared memory.

use super::*;

impl Block<'_> {
    /// Completes the copies that are due; returns whether there were any.
    pub(super) fn transfer(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut nth = 0;
        while nth < self.transfers.len() {
            if self.transfers[nth].due > self.round {
                nth += 1;
                continue;
            }
            any = true;
            let transfer = self.transfers.swap_remove(nth);
            if let Err((kind, what)) = self.copy(&transfer) {
                return Err(Error::Fault { kind, place: transfer.place, what });
            }
        }
        Ok(any)
    }

    pub(super) fn copy(&mut self, transfer: &Transfer) -> Result<(), Failure> {
        let to = transfer.to;
        let bytes = match &transfer.from {
            Source::Bytes(from, size) => {
                self.writes(to, *size)?;
                let pointer = self.global(*from, *size)?;
                for at in (0..*size).step_by(16) {
                    if self.global_reads(*from + at as u64, 16).is_err() {
                        self.order.forget(to + at, 16, transfer.place.line);
                    }
                }
                let from = pointer;
                let to = self.shared(to as u64, *size)?;
                // SAFETY: both were checked to hold this many bytes, and shared memory does not overlap global memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to, *size) };
                *size
            }
            Source::Box(map, at) => {
                let bytes = map.box_bytes();
                self.writes(to, bytes)?;
                self.shared(to as u64, bytes)?;
                let width = usize::from(map.sides[0]) * usize::from(map.element);
                for (from, line, part) in map.lines(*at) {
                    let pointer = if part.is_empty() { std::ptr::null_mut() } else { self.global(from, part.len())? };
                    let worthless = !part.is_empty() && self.global_reads(from, part.len()).is_err();
                    for at in (0..width).step_by(16) {
                        let end = (at + 16).min(width);
                        let place = map.swizzle.apply(to + line + at);
                        let Some(chunk) = self.shared.get_mut(place..place + (end - at)) else {
                            return Err((
                                Kind::Address,
                                format!("a box at {to:#x} of shared memory is not aligned to its swizzle"),
                            ));
                        };
                        let (begin, end) = (part.start.clamp(at, end), part.end.clamp(at, end));
                        if end - begin < chunk.len() {
                            chunk.fill(0);
                        }
                        if begin < end {
                            // SAFETY: the whole part was checked to lie in global memory, and this is a piece of it.
                            let bytes =
                                unsafe { std::slice::from_raw_parts(pointer.add(begin - part.start), end - begin) };
                            chunk[begin - at..end - at].copy_from_slice(bytes);
                        }
                        let read = from.wrapping_add(begin.wrapping_sub(part.start) as u64);
                        if worthless && begin < end && self.global_reads(read, end - begin).is_err() {
                            self.order.forget(place, 16, transfer.place.line);
                        }
                    }
                }
                bytes
            }
        };
        self.mbarrier(transfer.barrier as u64, |state| state.bytes -= bytes as i32)
    }

    /// Writes a box of shared memory, or bytes, to global memory, or reduces into global memory.
    pub fn copy_back(&mut self, from: usize, to: &Source, reduces: Option<(Change, usize)>) -> Result<(), Failure> {
        match (to, reduces) {
            (Source::Bytes(to, size), Some((change, element))) => {
                for at in (0..*size).step_by(element) {
                    let x = self.shared((from + at) as u64, element)?.cast::<u32>();
                    let pointer = self.global(*to + at as u64, element)?;
                    self.global_reads(*to + at as u64, element)?;
                    // SAFETY: both were checked to be allocated, four bytes each.
                    unsafe {
                        let x = u64::from(x.read_unaligned());
                        exchange(pointer, element, |old| changed(change, old, x, 0, element));
                    }
                }
            }
            (Source::Bytes(to, size), None) => {
                let from = self.shared(from as u64, *size)?;
                let pointer = self.global(*to, *size)?;
                self.global_writes(*to, *size);
                let to = pointer;
                // SAFETY: both were checked to hold this many bytes, and shared memory does not overlap global memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to, *size) };
            }
            (Source::Box(map, at), _) => {
                self.shared(from as u64, map.box_bytes())?;
                for (to, line, part) in map.lines(*at).filter(|(.., part)| !part.is_empty()) {
                    let pointer = self.global(to, part.len())?;
                    self.global_writes(to, part.len());
                    let to = pointer;
                    for at in part.clone() {
                        let byte = self.shared[map.swizzle.apply(from + line + at)];
                        // SAFETY: the part was checked to lie in global memory.
                        unsafe { to.add(at - part.start).write(byte) };
                    }
                }
            }
        }
        Ok(())
    }

    // -- barriers in memory

    /// Changes a barrier, and completes its phase if nothing is pending any more.
    pub fn mbarrier(&mut self, at: u64, change: impl FnOnce(&mut Mbarrier)) -> Result<(), Failure> {
        let word = self.shared(at, 8)?.cast::<u64>();
        // SAFETY: eight bytes of shared memory.
        let mut state = Mbarrier::from_bits(unsafe { word.read_unaligned() });
        if !state.valid() {
            return Err((Kind::Undefined, format!("there is no barrier at {at:#x} of shared memory")));
        }
        change(&mut state);
        if state.pending < 0 {
            return Err((Kind::Undefined, format!("more arrivals than the barrier at {at:#x} counts")));
        }
        if state.pending == 0 && state.bytes == 0 {
            state.odd = !state.odd;
            state.pending = state.count;
            self.order.phase_ends(at as usize);
        }
        // SAFETY: as above.
        unsafe { word.write_unaligned(state.bits()) };
        Ok(())
    }

    /// Arrivals and bytes that a barrier's phase lacks, for messages.
    pub fn missing(&self, at: u64) -> String {
        let bits = self.shared.get(at as usize..at as usize + 8).and_then(|bytes| bytes.try_into().ok());
        let state = Mbarrier::from_bits(u64::from_le_bytes(bits.unwrap_or_default()));
        format!(", which lacks {} arrivals and {} bytes", state.pending, state.bytes)
    }

    /// State of a barrier.
    pub fn mbarrier_state(&mut self, at: u64) -> Result<Mbarrier, Failure> {
        // SAFETY: eight bytes of shared memory.
        let state = Mbarrier::from_bits(unsafe { self.shared(at, 8)?.cast::<u64>().read_unaligned() });
        match state.valid() {
            true => Ok(state),
            false => Err((Kind::Undefined, format!("there is no barrier at {at:#x} of shared memory"))),
        }
    }
}
