//! Execution of less frequent instructions.

use super::*;

impl Warp {
    #[inline(never)]
    pub(super) fn execute_rare(&mut self, op: &Op, active: u32, block: &mut Block<'_>) -> Result<Next, Failure> {
        match op {
            Op::Alu(..)
            | Op::Move(..)
            | Op::Compare(..)
            | Op::Logic(..)
            | Op::Lookup(..)
            | Op::Select(..)
            | Op::Pack(..) => {}
            Op::Unpack(..) | Op::Load { .. } | Op::Store { .. } | Op::Branch { .. } | Op::Exit => {}
            Op::Nothing => {}
            Op::ProxyFence => block.order.fence(self.number),
            Op::WgmmaFence => self.registers.fence(),
            Op::BulkCommit => self.stored += 1,
            Op::BulkWait(left) => {
                block.has_read(Reader::Store, self.number, self.stored.saturating_sub(*left as u64));
            }
            Op::Yield => return Ok(Next::Pause),
            Op::Trap => return Err((Kind::Undefined, "`trap`".into())),
            Op::Atomic { change, size, to, at, with, other } => {
                self.atomic(*change, *size, to.as_deref(), *at, (with, *other), active, block)?;
            }
            Op::Shuffle { how, to, inside, from, by, clamp, members } => {
                self.members(*members, active)?;
                self.shuffle(*how, *to, *inside, [*from, *by, *clamp], active);
            }
            Op::Vote { vote, of, members } => {
                self.members(*members, active)?;
                let members = self.word(*members, active.trailing_zeros() as usize) & active;
                let ballot = self.predicate(*of) & members;
                let all = |is: bool| if is { !0 } else { 0 };
                match vote {
                    Vote::All(to) => self.set_predicate(*to, all(ballot == members), active),
                    Vote::Any(to) => self.set_predicate(*to, all(ballot != 0), active),
                    Vote::Uniform(to) => self.set_predicate(*to, all(ballot == members || ballot == 0), active),
                    Vote::Ballot(to) => self.blend(*to, &[ballot; LANES], active),
                }
            }
            Op::Match { to, of, members } => {
                self.members(*members, active)?;
                let values: Vec<_> = (0..LANES).map(|lane| self.value(*of, lane)).collect();
                for lane in lanes_of(active) {
                    let same = lanes_of(active).filter(|other| values[*other] == values[lane]);
                    self.lines[*to as usize].0[lane] = same.fold(0, |sum, other| sum | 1 << other);
                }
            }
            Op::Reduce { change, to, of, members } => {
                self.members(*members, active)?;
                let mut values = lanes_of(active).map(|lane| self.word(*of, lane));
                let first = values.next().unwrap_or_default();
                let result = values.fold(first, |sum, x| changed(*change, u64::from(sum), u64::from(x), 0, 4) as u32);
                self.blend(*to, &[result; LANES], active);
            }
            Op::ActiveMask(to) => self.blend(*to, &[active; LANES], active),
            Op::Elect { to, is, members } => {
                self.members(*members, active)?;
                let leader = active.trailing_zeros();
                if let Some(to) = to {
                    self.blend(*to, &[leader; LANES], active);
                }
                if let Some(is) = is {
                    self.set_predicate(*is, 1 << leader, active);
                }
            }
            Op::WarpBarrier(members) => {
                let members = self.word(*members, active.trailing_zeros() as usize);
                if members & self.alive & !active != 0 {
                    return Err(absent(members & self.alive, active));
                }
            }
            Op::Barrier { id, threads, waits } => {
                self.aligned(active, "a barrier is met")?;
                return self.named_barrier(*id, *threads, *waits, block);
            }
            Op::BarrierInit(at, count) => {
                for lane in lanes_of(active) {
                    let count = self.word(*count, lane) as i32;
                    let at = self.shared_address(*at, lane);
                    let word = block.shared(at, 8)?.cast::<u64>();
                    let state = Mbarrier { odd: false, count, pending: count, bytes: 0 };
                    block.order.write(self.number, at as usize, 8, self.line)?;
                    // SAFETY: eight bytes of shared memory.
                    unsafe { word.write_unaligned(state.bits()) };
                }
            }
            Op::BarrierInvalidate(at) => {
                for lane in lanes_of(active) {
                    let at = self.shared_address(*at, lane);
                    let word = block.shared(at, 8)?.cast::<u64>();
                    block.order.write(self.number, at as usize, 8, self.line)?;
                    // SAFETY: eight bytes of shared memory.
                    unsafe { word.write_unaligned(!0) };
                }
            }
            Op::BarrierArrive { at, count, expects, state } => {
                for lane in lanes_of(active) {
                    let at = self.shared_address(*at, lane);
                    let count = self.word(*count, lane) as i32;
                    let bytes = expects.map_or(0, |slot| self.word(slot, lane) as i32);
                    if let Some(to) = state {
                        let before = block.mbarrier_state(at)?.bits();
                        self.set_wide(*to, lane, before);
                    }
                    block.shared(at, 8)?;
                    block.order.uses(self.number, at as usize)?;
                    block.order.arrives(self.number, at as usize);
                    block.mbarrier(at, |state| {
                        state.bytes += bytes;
                        state.pending -= count;
                    })?;
                }
                block.order.arrived(self.number);
            }
            Op::BarrierBytes { at, bytes, completes } => {
                for lane in lanes_of(active) {
                    let bytes = self.word(*bytes, lane) as i32;
                    let bytes = if *completes { -bytes } else { bytes };
                    block.mbarrier(self.shared_address(*at, lane), |state| state.bytes += bytes)?;
                }
            }
            Op::BarrierTest { at, is, phase } => {
                let (mut over, mut last) = (0, None);
                for lane in lanes_of(active) {
                    let at = self.shared_address(*at, lane);
                    let state = block.mbarrier_state(at)?;
                    if last != Some(at) {
                        block.order.uses(self.number, at as usize)?;
                    }
                    let phase = self.value(*phase, lane);
                    let odd = if self.is_state(op) { phase >> 63 != 0 } else { phase & 1 != 0 };
                    over |= u32::from(state.odd != odd) << lane;
                    if state.odd != odd && last != Some(at) {
                        block.order.phase_is_over(self.number, at as usize);
                    }
                    last = Some(at);
                }
                self.set_predicate(*is, over, active);
                self.phase = if over != active { last } else { None };
                if over != active {
                    return Ok(Next::Pause);
                }
            }
            Op::CopyAsync { to, from, size, read } => {
                for lane in lanes_of(active) {
                    let count = read.map_or(*size, |slot| (self.word(slot, lane) as usize).min(*size));
                    let (to, line) = (self.address(*to, lane) as usize, self.line);
                    let mut copy = Copy { to, bytes: [0; 16], size: *size, done: false, worthless: false, line };
                    let at = self.address(*from, lane);
                    if count > 0 {
                        if !(at as usize).is_multiple_of(*size) {
                            return Err((Kind::Alignment, format!("a copy of {size} bytes from {at:#x}")));
                        }
                        let from = block.global(at, 1)?;
                        block.global(at + count as u64 - 1, 1)?;
                        copy.worthless = block.global_reads(at, count).is_err();
                        // SAFETY: its first and its last byte are allocated, and a range this small cannot span two allocations.
                        let bytes = unsafe { std::slice::from_raw_parts(from, count) };
                        copy.bytes[..count].copy_from_slice(bytes);
                    }
                    block.shared(copy.to as u64, *size)?;
                    block.order.copy_begins(self.number, copy.to, *size, self.line)?;
                    // The copy completes when it is waited for, or at any time before.
                    if block.draw(2) == 0 {
                        self.copy(&copy, block)?;
                        copy.done = true;
                    }
                    self.copies.push(copy);
                }
            }
            Op::CopyCommit => {
                let copies = std::mem::take(&mut self.copies);
                self.copy_groups.push_back(copies);
            }
            Op::CopyWaitAll => {
                let copies = std::mem::take(&mut self.copies);
                self.copy_groups.push_back(copies);
                self.wait_for_copies(0, block)?;
            }
            Op::CopyWait(left) => self.wait_for_copies(*left, block)?,
            Op::Bulk(bulk) => self.bulk(bulk, active, block)?,
            Op::LoadMatrix { to, transposed, at } => {
                self.aligned(active, "`ldmatrix`")?;
                for (nth, to) in to.iter().enumerate() {
                    let mut matrix = [[0u16; 8]; 8];
                    let mut missing = None;
                    for (row, elements) in matrix.iter_mut().enumerate() {
                        let at = self.shared_address(*at, 8 * nth + row);
                        let bytes = block.shared(at, 16)?;
                        if let Err(failure) = block.order.read(self.number, at as usize, 16) {
                            let lanes = if *transposed { 0x1111_1111 << (row / 2) } else { 15 << (4 * row) };
                            missing = Some((missing.map_or(0, |(lanes, _)| lanes) | lanes, failure));
                        }
                        // SAFETY: 16 bytes of shared memory.
                        *elements = unsafe { bytes.cast::<[u16; 8]>().read_unaligned() };
                    }
                    let line = &mut self.lines[*to as usize].0;
                    for (lane, word) in line.iter_mut().enumerate() {
                        let (row, column) = (lane / 4, lane % 4 * 2);
                        let [low, high] = match transposed {
                            false => [matrix[row][column], matrix[row][column + 1]],
                            true => [matrix[column][row], matrix[column + 1][row]],
                        };
                        *word = u32::from(low) | u32::from(high) << 16;
                    }
                    if let Some((lanes, failure)) = missing {
                        self.spoiled(&[Some(Place { slot: *to, wide: false })], lanes, failure)?;
                    }
                }
            }
            Op::StoreMatrix { from, transposed, at } => {
                self.aligned(active, "`stmatrix`")?;
                for (nth, from) in from.iter().enumerate() {
                    let mut matrix = [[0u16; 8]; 8];
                    for (lane, word) in self.lines[*from as usize].0.iter().enumerate() {
                        for half in 0..2 {
                            let (row, column) = (lane / 4, lane % 4 * 2 + half);
                            let to = if *transposed { &mut matrix[column][row] } else { &mut matrix[row][column] };
                            *to = (word >> (16 * half)) as u16;
                        }
                    }
                    for (row, elements) in matrix.iter().enumerate() {
                        let at = self.shared_address(*at, 8 * nth + row);
                        let bytes = block.shared(at, 16)?;
                        block.writes(at as usize, 16)?;
                        block.order.write(self.number, at as usize, 16, self.line)?;
                        if (0..LANES).any(|lane| self.spoils.stored(lane)) {
                            block.order.forget(at as usize, 16, self.line);
                        }
                        // SAFETY: 16 bytes of shared memory.
                        unsafe { bytes.cast::<[u16; 8]>().write_unaligned(*elements) };
                    }
                }
            }
            Op::Carry { to, from, carry, high, takes, gives } => {
                let [a, b, c] = from.map(|slot| self.lines[slot as usize].0.map(u64::from));
                let carried = self.lines[*carry as usize].0;
                let sums: [u64; LANES] = std::array::from_fn(|lane| {
                    let product = a[lane] * b[lane];
                    let half = if *high { product >> 32 } else { product & 0xFFFF_FFFF };
                    half + c[lane] + if *takes { u64::from(carried[lane]) } else { 0 }
                });
                self.blend(*to, &sums.map(|sum| sum as u32), active);
                if *gives {
                    self.blend(*carry, &sums.map(|sum| (sum >> 32) as u32), active);
                }
            }
            Op::Mma(mma) => {
                self.aligned(active, "`mma`")?;
                self.mma(mma);
            }
            Op::MmaFragments(products) => {
                self.aligned(active, "`wmma`")?;
                products.iter().for_each(|mma| self.mma(mma));
            }
            Op::LoadFragment { fragment, to, at, stride, size, columns } => {
                self.aligned(active, "`wmma`")?;
                let stride = u64::from(self.word(*stride, 0)) * *size as u64;
                let lines = Lines { at: self.shared_address(*at, 0), stride, size: *size, columns: *columns };
                let (registers, lost, why) = fragments::load(block, self.number, *fragment, &lines, to.len())?;
                for (slot, register) in to.iter().zip(&registers) {
                    self.lines[*slot as usize].0 = *register;
                }
                if let Some(failure) = why {
                    for (slot, lanes) in to.iter().zip(&lost).filter(|(_, lanes)| **lanes != 0) {
                        self.spoils.spoil([*slot], *lanes, failure.clone(), self.line);
                    }
                }
            }
            Op::StoreFragment { from, at, stride, columns } => {
                self.aligned(active, "`wmma`")?;
                let stride = u64::from(self.word(*stride, 0)) * 4;
                let lines = Lines { at: self.shared_address(*at, 0), stride, size: 4, columns: *columns };
                let registers: Vec<_> = from.iter().map(|slot| self.lines[*slot as usize].0).collect();
                let lost: Vec<_> = from.iter().map(|slot| self.spoils.lanes(*slot)).collect();
                fragments::store(block, self.number, &lines, &registers, &lost, self.line)?;
            }
            Op::Wgmma(wgmma) => {
                self.aligned(active, "`wgmma`")?;
                self.wgmma(wgmma, block)?;
            }
            Op::WgmmaCommit => self.committed += 1,
            Op::WgmmaWait(left) => {
                let before = self.committed.saturating_sub(*left as u64);
                if before > self.retired {
                    self.retired = before;
                    block.has_read(Reader::Product, self.number, before);
                }
            }
        }
        Ok(Next::On)
    }

    /// Whether a test of a barrier takes a state instead of a parity.
    pub(super) fn is_state(&self, op: &Op) -> bool {
        matches!(op, Op::BarrierTest { phase: Place { wide: true, .. }, .. })
    }

    /// Refuses an instruction that some of its member lanes do not execute.
    pub(super) fn members(&self, members: Slot, active: u32) -> Result<(), Failure> {
        let members = self.word(members, active.trailing_zeros() as usize);
        if active & !members != 0 {
            return Err((Kind::Undefined, format!("lanes {active:#010x} name only {members:#010x} as members")));
        }
        if members & self.alive & !active == 0 { Ok(()) } else { Err(absent(members & self.alive, active)) }
    }
}
