//! A warp: its registers, where its lanes are, and what instructions do.
//!
//! Where lanes go different ways, one way is gone after the other, up to where they meet.

use super::block::{Block, Failure, Mbarrier, Reading, Source, Transfer};
use super::float::{from_bf16, from_f16, to_bf16, to_f16};
use super::lanes::{LANES, Line};
use super::matrix::{self, Descriptor};
use super::program::*;
use super::tensor::TensorMap;
use super::{Launch, SHARED_WINDOW};
use crate::error::Kind;
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering as Memory};

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It did something.
    Goes,
    /// It did nothing but wait.
    Waits,
}

/// Lanes that go the same way: where they are, and where they meet others.
#[derive(Clone, Copy, Debug)]
struct Way {
    at: u32,
    meets: u32,
    lanes: u32,
}

/// A lane's copy to shared memory that has not happened yet.
struct Copy {
    to: usize,
    bytes: [u8; 16],
    size: usize,
}

/// A warp.
pub struct Warp {
    /// Its number in the block.
    pub number: u32,
    lines: Vec<Line>,
    predicates: Vec<u32>,
    /// The last one is gone first.
    ways: Vec<Way>,
    /// Lanes that have not ended.
    alive: u32,
    /// The named barrier that it waits for, and how often that was complete before.
    barrier: Option<(u32, u32)>,
    /// Each lane's local memory, one after the other.
    local: Vec<u8>,
    /// Copies since the last group, and groups of them.
    copies: Vec<Copy>,
    copy_groups: VecDeque<Vec<Copy>>,
    /// Groups of products that were committed, and that were waited for; products of this warp.
    committed: u64,
    retired: u64,
    products: u64,
    /// The line of the instruction that ran last.
    line: u32,
}

/// The lanes of a mask.
fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// What comes after an instruction.
enum Next {
    /// The one after it.
    On,
    /// Another warp's turn, and then the one after it.
    Pause,
}

impl Warp {
    /// A warp of a launch that has not begun.
    pub fn new(number: u32, launch: &Launch<'_>) -> Warp {
        let program = launch.program;
        let mut warp = Warp {
            number,
            lines: vec![Line([0; LANES]); program.lines.max(3)],
            predicates: vec![0; program.predicates],
            ways: Vec::new(),
            alive: 0,
            barrier: None,
            local: vec![0; LANES * program.local_bytes],
            copies: Vec::new(),
            copy_groups: VecDeque::new(),
            committed: 0,
            retired: 0,
            products: 0,
            line: 0,
        };
        for (slot, bits, wide) in &program.constants {
            warp.fill(*slot, *bits, *wide);
        }
        warp
    }

    fn fill(&mut self, slot: Slot, bits: u64, wide: bool) {
        for lane in 0..LANES {
            if wide { self.set_wide(slot, lane, bits) } else { self.lines[slot as usize].0[lane] = bits as u32 }
        }
    }

    /// Begins a block.
    pub fn begin(&mut self, block: &Block<'_>) {
        let launch = block.launch;
        let [x, y, z] = launch.threads;
        let first = self.number * 32;
        let count = (x * y * z - first).min(32);
        self.alive = if count == 32 { !0 } else { (1 << count) - 1 };
        self.ways = vec![Way { at: 0, meets: NOWHERE, lanes: self.alive }];
        self.barrier = None;
        self.copies.clear();
        self.copy_groups.clear();
        (self.committed, self.retired, self.products) = (0, 0, 0);
        // What registers hold before they are written is nothing that a program may depend on.
        for (special, slot) in &launch.program.specials {
            for lane in 0..LANES as u32 {
                let thread = first + lane;
                let value = match *special {
                    Special::Thread(0) => thread % x,
                    Special::Thread(1) => thread / x % y,
                    Special::Thread(_) => thread / x / y,
                    Special::Threads(dimension) => launch.threads[dimension],
                    Special::Block(dimension) => block.index[dimension],
                    Special::Blocks(dimension) => launch.grid[dimension],
                    Special::Lane => lane,
                    Special::Warp => self.number,
                    Special::Warps => (x * y * z).div_ceil(32),
                    Special::Multiprocessor => block.number as u32,
                    Special::LaneMask(order, or_equal) => {
                        let equal = 1u32 << lane;
                        let others = match order {
                            Ordering::Less => equal - 1,
                            Ordering::Greater => !(equal - 1) & !equal,
                            Ordering::Equal => equal,
                        };
                        others | if or_equal { equal } else { 0 }
                    }
                    Special::DynamicShared => launch.dynamic_shared as u32,
                    Special::Constant(value) => value,
                    Special::Parameter(offset) => {
                        self.set_wide(*slot, lane as usize, launch.parameters.as_ptr() as u64 + offset as u64);
                        continue;
                    }
                };
                self.lines[*slot as usize].0[lane as usize] = value;
            }
        }
    }

    /// Whether all lanes have ended.
    pub fn done(&self) -> bool {
        self.alive == 0
    }

    /// The line of the instruction that ran last.
    pub fn line(&self) -> u32 {
        self.line
    }

    /// What it waits for, for a message.
    pub fn waits_for(&self) -> String {
        match self.barrier {
            Some((id, _)) => format!(" (barrier {id})"),
            None if self.ways.len() > 1 => {
                format!(" (lanes {:#010x})", self.ways.last().map_or(0, |way| way.lanes))
            }
            None => String::new(),
        }
    }

    // -- registers

    #[inline(always)]
    fn pointer(&mut self, slot: Slot) -> *mut u32 {
        debug_assert!((slot as usize) < self.lines.len());
        // SAFETY: decoding gives no other slots than there are lines for.
        unsafe { self.lines.as_mut_ptr().add(slot as usize).cast() }
    }

    #[inline(always)]
    fn word(&self, slot: Slot, lane: usize) -> u32 {
        self.lines[slot as usize].0[lane]
    }

    #[inline(always)]
    fn wide(&self, slot: Slot, lane: usize) -> u64 {
        debug_assert!(slot as usize + 1 < self.lines.len());
        // SAFETY: decoding gives registers of 64 bits two lines.
        unsafe { self.lines.as_ptr().add(slot as usize).cast::<u64>().add(lane).read() }
    }

    #[inline(always)]
    fn set_wide(&mut self, slot: Slot, lane: usize, value: u64) {
        debug_assert!(slot as usize + 1 < self.lines.len());
        // SAFETY: as above.
        unsafe { self.lines.as_mut_ptr().add(slot as usize).cast::<u64>().add(lane).write(value) }
    }

    #[inline(always)]
    fn value(&self, place: Place, lane: usize) -> u64 {
        if place.wide { self.wide(place.slot, lane) } else { u64::from(self.word(place.slot, lane)) }
    }

    #[inline(always)]
    fn set(&mut self, place: Place, lane: usize, value: u64) {
        if place.wide {
            self.set_wide(place.slot, lane, value);
        } else {
            self.lines[place.slot as usize].0[lane] = value as u32;
        }
    }

    /// Writes a whole register in these lanes.
    #[inline(always)]
    fn blend(&mut self, slot: Slot, values: &[u32; LANES], lanes: u32) {
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
    fn predicate(&self, predicate: Predicate) -> u32 {
        self.predicates[predicate.index as usize] ^ predicate.flip
    }

    #[inline(always)]
    fn set_predicate(&mut self, index: u32, values: u32, lanes: u32) {
        let predicate = &mut self.predicates[index as usize];
        *predicate = *predicate & !lanes | values & lanes;
    }

    #[inline(always)]
    fn address(&self, at: Address, lane: usize) -> u64 {
        match (at.base, at.wide) {
            (None, _) => at.offset as u64,
            (Some(slot), true) => self.wide(slot, lane).wrapping_add(at.offset as u64),
            (Some(slot), false) => u64::from(self.word(slot, lane).wrapping_add(at.offset as u32)),
        }
    }

    /// An address in the shared window, whatever space it is written in.
    fn shared_address(&self, at: Address, lane: usize) -> u64 {
        let address = self.address(at, lane);
        if at.space == Space::Generic { address.wrapping_sub(SHARED_WINDOW) } else { address }
    }

    // -- turns

    /// Runs so many instructions at most.
    pub fn turn(&mut self, block: &mut Block<'_>, budget: u32) -> Result<Stop, Failure> {
        if let Some((id, times)) = self.barrier {
            if block.barriers[id as usize].times == times {
                return Ok(Stop::Waits);
            }
            self.barrier = None;
        }
        let mut left = budget;
        let program = block.launch.program;
        'ways: while left > 0 {
            let Some(Way { mut at, meets, lanes }) = self.ways.last().copied() else { break };
            let top = self.ways.len() - 1;
            while at != meets && lanes != 0 {
                if left == 0 {
                    self.ways[top].at = at;
                    break 'ways;
                }
                left -= 1;
                let instruction = &program.code[at as usize];
                let active = match instruction.guard {
                    None => lanes,
                    Some(guard) => lanes & self.predicate(guard),
                };
                at += 1;
                match &instruction.op {
                    Op::Branch { to, meets: join } => {
                        if active == lanes {
                            at = *to;
                        } else if active != 0 {
                            // Where they meet, all of them go on; if that is where others are met, no need to remember it.
                            if *join == meets {
                                self.ways.pop();
                            } else {
                                self.ways[top].at = *join;
                            }
                            self.ways.push(Way { at: *to, meets: *join, lanes: active });
                            self.ways.push(Way { at, meets: *join, lanes: lanes & !active });
                            continue 'ways;
                        }
                    }
                    Op::Exit if active != 0 => {
                        self.alive &= !active;
                        self.ways[top].at = at;
                        self.ways.iter_mut().for_each(|way| way.lanes &= !active);
                        continue 'ways;
                    }
                    _ if active == 0 => {}
                    op => {
                        self.line = instruction.line;
                        if let Next::Pause = self.execute(op, active, block)? {
                            self.ways[top].at = at;
                            break 'ways;
                        }
                    }
                }
            }
            self.ways.pop();
        }
        if self.alive == 0 {
            self.end(block)?;
        }
        // A wait is a few instructions around a test.
        Ok(if budget - left > 8 || self.alive == 0 { Stop::Goes } else { Stop::Waits })
    }

    fn end(&mut self, block: &mut Block<'_>) -> Result<(), Failure> {
        block.live -= 1;
        self.wait_for_copies(0, block)?;
        let copies = std::mem::take(&mut self.copies);
        for copy in copies {
            self.copy(&copy, block)?;
        }
        // Nobody waits for what is left.
        self.committed += 1;
        self.retired = self.committed;
        block.has_read(self.number, self.retired);
        Ok(())
    }

    /// Refuses what all lanes must do together.
    fn aligned(&self, active: u32, what: &str) -> Result<(), Failure> {
        if active == self.alive {
            Ok(())
        } else {
            Err((
                Kind::Undefined,
                format!("{what} by lanes {active:#010x} of {:#010x} that have to do it together", self.alive),
            ))
        }
    }

    #[inline(always)]
    fn execute(&mut self, op: &Op, active: u32, block: &mut Block<'_>) -> Result<Next, Failure> {
        match op {
            Op::Alu(alu, to, from) => {
                let [a, b, c] = from.map(|slot| self.pointer(slot).cast_const());
                let to_line = self.pointer(*to);
                if active == !0 {
                    // SAFETY: decoding has seen to it that registers are as wide as the function has them.
                    unsafe { (alu.run)(to_line, a, b, c) };
                } else {
                    let mut result = [Line([0; LANES]); 2];
                    // SAFETY: as above.
                    unsafe { (alu.run)(result.as_mut_ptr().cast(), a, b, c) };
                    if alu.wide[0] {
                        let result = result.as_ptr().cast::<u64>();
                        for lane in lanes_of(active) {
                            // SAFETY: there are 32 numbers of 64 bits.
                            self.set_wide(*to, lane, unsafe { result.add(lane).read() });
                        }
                    } else {
                        self.blend(*to, &result[0].0, active);
                    }
                }
            }
            Op::Compare(compare, to, opposite, [a, b], with) => {
                let (a, b) = (self.pointer(*a), self.pointer(*b));
                // SAFETY: as for arithmetic.
                let holds = unsafe { (compare.run)(a, b) };
                let combined = |holds: u32| match with {
                    None => holds,
                    Some((logic, predicate)) => combine(*logic, holds, self.predicate(*predicate)),
                };
                let (first, second) = (combined(holds), combined(!holds));
                self.set_predicate(*to, first, active);
                if let Some(opposite) = opposite {
                    self.set_predicate(*opposite, second, active);
                }
            }
            Op::Logic(logic, to, [a, b]) => {
                let result = combine(*logic, self.predicate(*a), self.predicate(*b));
                self.set_predicate(*to, result, active);
            }
            Op::Lookup(to, from, table) => {
                let [a, b, c] = from.map(|slot| self.lines[slot as usize].0);
                let mut result = [0; LANES];
                for nth in (0..8).filter(|nth| table >> nth & 1 != 0) {
                    let of = |x: u32, bit: u32| if nth & bit != 0 { x } else { !x };
                    for lane in 0..LANES {
                        result[lane] |= of(a[lane], 4) & of(b[lane], 2) & of(c[lane], 1);
                    }
                }
                self.blend(*to, &result, active);
            }
            Op::Select(to, [a, b], predicate) => {
                let holds = self.predicate(*predicate);
                if to.wide {
                    for lane in lanes_of(active) {
                        let from = if holds >> lane & 1 != 0 { *a } else { *b };
                        self.set_wide(to.slot, lane, self.wide(from, lane));
                    }
                } else {
                    let (a, b) = (&self.lines[*a as usize].0, &self.lines[*b as usize].0);
                    let mut result = [0; LANES];
                    for lane in 0..LANES {
                        result[lane] = if holds >> lane & 1 != 0 { a[lane] } else { b[lane] };
                    }
                    self.blend(to.slot, &result, active);
                }
            }
            Op::Pack(to, from) => {
                let bits = if to.wide { 64 } else { 32 } / from.len();
                let mask = (1u64 << bits) - 1;
                for lane in lanes_of(active) {
                    let parts = from.iter().enumerate();
                    let value = parts
                        .fold(0, |sum, (nth, slot)| sum | (u64::from(self.word(*slot, lane)) & mask) << (nth * bits));
                    self.set(*to, lane, value);
                }
            }
            Op::Unpack(to, from) => {
                let bits = if from.wide { 64 } else { 32 } / to.len();
                let mask = (1u64 << bits) - 1;
                for lane in lanes_of(active) {
                    let value = self.value(*from, lane);
                    for (nth, slot) in to.iter().enumerate() {
                        if let Some(slot) = slot {
                            self.lines[*slot as usize].0[lane] = (value >> (nth * bits) & mask) as u32;
                        }
                    }
                }
            }
            Op::Load { to, size, signed, at } => self.load(to, *size, *signed, *at, active, block)?,
            Op::Store { from, size, at } => self.store(from, *size, *at, active, block)?,
            other => return self.execute_rare(other, active, block),
        }
        Ok(Next::On)
    }

    #[inline(never)]
    fn execute_rare(&mut self, op: &Op, active: u32, block: &mut Block<'_>) -> Result<Next, Failure> {
        match op {
            Op::Alu(..) | Op::Compare(..) | Op::Logic(..) | Op::Lookup(..) | Op::Select(..) | Op::Pack(..) => {}
            Op::Unpack(..) | Op::Load { .. } | Op::Store { .. } | Op::Branch { .. } | Op::Exit => {}
            Op::Nothing | Op::WgmmaFence | Op::BulkCommit | Op::BulkWait(_) => {}
            Op::Yield => return Ok(Next::Pause),
            Op::Trap => return Err((Kind::Undefined, "`trap`".into())),
            Op::Atomic { change, size, to, at, with, other } => {
                self.atomic(*change, *size, to.as_deref(), *at, with, *other, active, block)?;
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
                    // SAFETY: eight bytes of shared memory.
                    unsafe { word.write_unaligned(state.bits()) };
                }
            }
            Op::BarrierInvalidate(at) => {
                for lane in lanes_of(active) {
                    let word = block.shared(self.shared_address(*at, lane), 8)?.cast::<u64>();
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
                    block.mbarrier(at, |state| {
                        state.bytes += bytes;
                        state.pending -= count;
                    })?;
                }
            }
            Op::BarrierBytes { at, bytes, completes } => {
                for lane in lanes_of(active) {
                    let bytes = self.word(*bytes, lane) as i32;
                    let bytes = if *completes { -bytes } else { bytes };
                    block.mbarrier(self.shared_address(*at, lane), |state| state.bytes += bytes)?;
                }
            }
            Op::BarrierTest { at, is, phase } => {
                let mut over = 0;
                for lane in lanes_of(active) {
                    let state = block.mbarrier_state(self.shared_address(*at, lane))?;
                    let phase = self.value(*phase, lane);
                    let odd = if self.is_state(op) { phase >> 63 != 0 } else { phase & 1 != 0 };
                    over |= u32::from(state.odd != odd) << lane;
                }
                self.set_predicate(*is, over, active);
                if over != active {
                    return Ok(Next::Pause);
                }
            }
            Op::CopyAsync { to, from, size, read } => {
                for lane in lanes_of(active) {
                    let count = read.map_or(*size, |slot| (self.word(slot, lane) as usize).min(*size));
                    let mut copy = Copy { to: self.address(*to, lane) as usize, bytes: [0; 16], size: *size };
                    let at = self.address(*from, lane);
                    if count > 0 {
                        if !(at as usize).is_multiple_of(*size) {
                            return Err((Kind::Alignment, format!("a copy of {size} bytes from {at:#x}")));
                        }
                        let from = block.global(at, 1)?;
                        block.global(at + count as u64 - 1, 1)?;
                        // SAFETY: its first and its last byte are there, and nothing as small lies between two allocations.
                        let bytes = unsafe { std::slice::from_raw_parts(from, count) };
                        copy.bytes[..count].copy_from_slice(bytes);
                    }
                    block.shared(copy.to as u64, *size)?;
                    // It is there when it was waited for, or any time before.
                    if block.draw(2) == 0 { self.copy(&copy, block)? } else { self.copies.push(copy) }
                }
            }
            Op::CopyCommit => {
                let copies = std::mem::take(&mut self.copies);
                self.copy_groups.push_back(copies);
            }
            Op::CopyWait(left) => self.wait_for_copies(*left, block)?,
            Op::Bulk(bulk) => self.bulk(bulk, active, block)?,
            Op::LoadMatrix { to, transposed, at } => {
                self.aligned(active, "`ldmatrix`")?;
                for (nth, to) in to.iter().enumerate() {
                    let mut matrix = [[0u16; 8]; 8];
                    for (row, elements) in matrix.iter_mut().enumerate() {
                        let bytes = block.shared(self.shared_address(*at, 8 * nth + row), 16)?;
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
                        // SAFETY: 16 bytes of shared memory.
                        unsafe { bytes.cast::<[u16; 8]>().write_unaligned(*elements) };
                    }
                }
            }
            Op::Mma(mma) => {
                self.aligned(active, "`mma`")?;
                self.mma(mma);
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
                    block.has_read(self.number, before);
                }
            }
        }
        Ok(Next::On)
    }

    /// Whether a test is one of a state, not of a parity.
    fn is_state(&self, op: &Op) -> bool {
        matches!(op, Op::BarrierTest { phase: Place { wide: true, .. }, .. })
    }

    /// Refuses an instruction that not all do that it names.
    fn members(&self, members: Slot, active: u32) -> Result<(), Failure> {
        let members = self.word(members, active.trailing_zeros() as usize);
        if active & !members != 0 {
            return Err((Kind::Undefined, format!("lanes {active:#010x} name only {members:#010x} as members")));
        }
        if members & self.alive & !active == 0 { Ok(()) } else { Err(absent(members & self.alive, active)) }
    }

    // -- memory

    #[inline(always)]
    fn load(
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
                    block.resolve(at.space, address, total, local)?.0
                }
            };
            first = Some(from);
            for (nth, place) in to.iter().enumerate() {
                let Some(place) = place else { continue };
                // SAFETY: as many bytes were found to be there.
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

    #[inline(always)]
    fn store(
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
            let (to, shared) = block.resolve(at.space, address, total, local)?;
            if shared {
                block.writes(to as usize - block.shared.as_ptr() as usize, total)?;
            }
            for (nth, place) in from.iter().enumerate() {
                let value = self.value(*place, lane);
                // SAFETY: as many bytes were found to be there.
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

    #[allow(clippy::too_many_arguments)]
    fn atomic(
        &mut self,
        change: Change,
        size: usize,
        to: Option<&[Place]>,
        at: Address,
        with: &[Slot],
        other: Slot,
        active: u32,
        block: &mut Block<'_>,
    ) -> Result<(), Failure> {
        let wide = size == 8;
        for lane in lanes_of(active) {
            let address = self.address(at, lane);
            let (pointer, shared) = block.resolve(at.space, address, size * with.len(), &mut [])?;
            if shared {
                block.writes(pointer as usize - block.shared.as_ptr() as usize, size * with.len())?;
            }
            let other = self.value(Place { slot: other, wide }, lane);
            for (nth, slot) in with.iter().enumerate() {
                let x = self.value(Place { slot: *slot, wide }, lane);
                // SAFETY: as many bytes were found to be there, and addresses are multiples of the size.
                let before =
                    unsafe { exchange(pointer.add(nth * size), size, |old| changed(change, old, x, other, size)) };
                if let Some(to) = to {
                    self.set(to[nth], lane, before);
                }
            }
        }
        Ok(())
    }

    fn copy(&self, copy: &Copy, block: &mut Block<'_>) -> Result<(), Failure> {
        block.writes(copy.to, copy.size)?;
        block.shared[copy.to..copy.to + copy.size].copy_from_slice(&copy.bytes[..copy.size]);
        Ok(())
    }

    fn wait_for_copies(&mut self, left: usize, block: &mut Block<'_>) -> Result<(), Failure> {
        while self.copy_groups.len() > left {
            for copy in self.copy_groups.pop_front().unwrap_or_default() {
                self.copy(&copy, block)?;
            }
        }
        Ok(())
    }

    fn bulk(&mut self, bulk: &Bulk, active: u32, block: &mut Block<'_>) -> Result<(), Failure> {
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
                    // SAFETY: 128 bytes were found to be there.
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
            let Some(barrier) = bulk.barrier else {
                block.copy_back(shared, &elsewhere)?;
                continue;
            };
            let size = match &elsewhere {
                Source::Bytes(_, size) => *size,
                Source::Box(map, _) => map.box_bytes(),
            };
            block.shared(shared as u64, size)?;
            block.writes(shared, size)?;
            let barrier = self.address(barrier, lane) as usize;
            let due = block.round + block.draw(6);
            let place = block.place(self.number, self.line);
            block.transfers.push(Transfer { due, to: shared, from: elsewhere, barrier, place });
        }
        Ok(())
    }

    // -- other lanes, other warps

    fn shuffle(&mut self, how: Shuffle, to: Slot, inside: Option<u32>, [from, by, clamp]: [Slot; 3], active: u32) {
        let from = self.lines[from as usize].0;
        let (by, clamp) = (&self.lines[by as usize].0, &self.lines[clamp as usize].0);
        let mut result = [0; LANES];
        let mut within = 0;
        for lane in 0..LANES as i32 {
            let by = (by[lane as usize] & 31) as i32;
            let (segment, clamp) = ((clamp[lane as usize] >> 8 & 31) as i32, (clamp[lane as usize] & 31) as i32);
            let last = lane & segment | clamp & !segment;
            let other = match how {
                Shuffle::Up => lane - by,
                Shuffle::Down => lane + by,
                Shuffle::Butterfly => lane ^ by,
                Shuffle::Index => lane & segment | by & !segment,
            };
            let is = if matches!(how, Shuffle::Up) { other >= last } else { other <= last };
            within |= u32::from(is) << lane;
            result[lane as usize] = from[if is { other } else { lane } as usize & 31];
        }
        self.blend(to, &result, active);
        if let Some(inside) = inside {
            self.set_predicate(inside, within, active);
        }
    }

    fn named_barrier(
        &mut self,
        id: Slot,
        threads: Option<Slot>,
        waits: bool,
        block: &mut Block<'_>,
    ) -> Result<Next, Failure> {
        let lane = self.alive.trailing_zeros() as usize;
        let id = self.word(id, lane);
        let all = block.launch.threads.iter().product::<u32>().next_multiple_of(32);
        let threads = threads.map_or(all, |slot| self.word(slot, lane));
        let Some(barrier) = block.barriers.get_mut(id as usize) else {
            return Err((Kind::Undefined, format!("there is no barrier {id}")));
        };
        if threads == 0 || !threads.is_multiple_of(32) || threads > all {
            return Err((Kind::Undefined, format!("barrier {id} is for {threads} threads")));
        }
        if barrier.arrived > 0 && barrier.threads != threads {
            let what =
                format!("barrier {id} is for {threads} threads, but for {} to those that came before", barrier.threads);
            return Err((Kind::Undefined, what));
        }
        barrier.threads = threads;
        barrier.arrived += 32;
        if barrier.arrived == threads {
            barrier.arrived = 0;
            barrier.times += 1;
        } else if waits {
            self.barrier = Some((id, barrier.times));
            return Ok(Next::Pause);
        }
        Ok(Next::On)
    }

    // -- products

    fn mma(&mut self, mma: &Mma) {
        let mut columns = [[[0f32; 8]; 2]; 16];
        let mut rows = [[[0f32; 4]; 2]; 16];
        let line = |slot: &Slot| &self.lines[*slot as usize];
        let (a, b): (Vec<_>, Vec<_>) = (mma.a.iter().map(line).collect(), mma.b.iter().map(line).collect());
        matrix::left(mma.element, &a, &mut columns[..mma.depth]);
        matrix::right(mma.element, &b, &mut rows[..mma.depth]);
        let mut sums = mma.c.map(|slot| self.lines[slot as usize]);
        let [c0, c1, c2, c3] = &mut sums;
        // SAFETY: four different lines of this function's own.
        unsafe { matrix::multiply(&[c0, c1, c2, c3], &columns[..mma.depth], &rows[..mma.depth]) };
        for (slot, sum) in mma.d.iter().zip(sums) {
            self.lines[*slot as usize] = sum;
        }
    }

    fn wgmma(&mut self, wgmma: &Wgmma, block: &mut Block<'_>) -> Result<(), Failure> {
        let line = self.line;
        let nowhere = |at: usize| (Kind::Address, format!("a product reads 16 bytes at {at:#x} of shared memory"));
        let based = || (Kind::Undefined, "a descriptor with a base offset".to_string());
        let group = self.committed;
        let mut columns = [[[0f32; 8]; 2]; 16];
        match wgmma.a {
            Left::Registers(slots) => {
                let registers = slots.map(|slot| &self.lines[slot as usize]);
                matrix::left(wgmma.element, &registers, &mut columns);
            }
            Left::Shared(slot, transposed) => {
                let descriptor = Descriptor::new(self.wide(slot, 0)).ok_or_else(based)?;
                let first = self.number as usize % 4 * 16;
                let bytes = descriptor.left(&block.shared, wgmma.element, transposed, first, &mut columns);
                let bytes = bytes.map_err(nowhere)?;
                block.reads(Reading { warp: self.number, group, bytes, line });
            }
        }
        if wgmma.negated[0] != wgmma.negated[1] {
            columns.iter_mut().flatten().flatten().for_each(|x| *x = -*x);
        }
        // The warps of a warpgroup multiply with the same: the first one reads it for all.
        let mut operands = std::mem::take(&mut block.operands[self.number as usize / 4]);
        let nth = (self.products - operands.first) as usize;
        self.products += 1;
        if operands.rows.len() == nth {
            let mut rows = vec![[[0f32; 4]; 2]; 2 * wgmma.columns];
            let descriptor = Descriptor::new(self.wide(wgmma.b, 0)).ok_or_else(based)?;
            let bytes =
                descriptor.right(&block.shared, wgmma.element, wgmma.b_transposed, &mut rows).map_err(nowhere)?;
            operands.rows.push_back((rows, bytes, 4));
        }
        let (rows, bytes, left) = &mut operands.rows[nth];
        if rows.len() != 2 * wgmma.columns {
            return Err((Kind::Undefined, "the warps of a warpgroup multiply with different operands".into()));
        }
        block.reads(Reading { warp: self.number, group, bytes: *bytes, line });
        let adds = self.predicate(wgmma.adds);
        if adds != 0 && adds != !0 {
            return Err((Kind::Undefined, "whether to add differs between lanes".into()));
        }
        if adds == 0 {
            wgmma.sums.iter().for_each(|slot| self.lines[*slot as usize] = Line([0; LANES]));
        }
        let sums: Vec<_> = wgmma.sums.iter().map(|slot| self.pointer(*slot).cast::<Line>()).collect();
        // SAFETY: lines of this warp; of those that are not different all but one are left as they are, as PTX has it.
        unsafe { matrix::multiply(&sums, &columns, rows) };
        *left -= 1;
        while operands.rows.front().is_some_and(|(.., left)| *left == 0) {
            operands.rows.pop_front();
            operands.first += 1;
        }
        block.operands[self.number as usize / 4] = operands;
        Ok(())
    }
}

fn absent(members: u32, active: u32) -> Failure {
    (Kind::Undefined, format!("lanes {active:#010x} wait for all of {members:#010x}, which are not where they are"))
}

fn combine(logic: Logic, a: u32, b: u32) -> u32 {
    match logic {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

/// What an atomic operation leaves in memory.
fn changed(change: Change, old: u64, x: u64, other: u64, size: usize) -> u64 {
    let single = |bits: u64| f32::from_bits(bits as u32);
    let halves = |f: fn(u16, u16) -> u16| {
        let of = |shift: u32| u64::from(f((old >> shift) as u16, (x >> shift) as u16)) << shift;
        of(0) | of(16)
    };
    let signed = |x: u64| if size == 8 { x as i64 } else { i64::from(x as i32) };
    let result = match change {
        Change::Add => old.wrapping_add(x),
        Change::AddF32 => u64::from((single(old) + single(x)).to_bits()),
        Change::AddF64 => (f64::from_bits(old) + f64::from_bits(x)).to_bits(),
        Change::AddF16x2 => halves(|a, b| to_f16(from_f16(a) + from_f16(b))),
        Change::AddBf16x2 => halves(|a, b| to_bf16(from_bf16(a) + from_bf16(b))),
        Change::AddF16 => u64::from(to_f16(from_f16(old as u16) + from_f16(x as u16))),
        Change::AddBf16 => u64::from(to_bf16(from_bf16(old as u16) + from_bf16(x as u16))),
        Change::Min(false) => old.min(x),
        Change::Max(false) => old.max(x),
        Change::Min(true) => {
            if signed(old) < signed(x) {
                old
            } else {
                x
            }
        }
        Change::Max(true) => {
            if signed(old) > signed(x) {
                old
            } else {
                x
            }
        }
        Change::Increment => {
            if old >= x {
                0
            } else {
                old + 1
            }
        }
        Change::Decrement => {
            if old == 0 || old > x {
                x
            } else {
                old - 1
            }
        }
        Change::Exchange => x,
        Change::CompareExchange => {
            if old == x {
                other
            } else {
                old
            }
        }
        Change::And => old & x,
        Change::Or => old | x,
        Change::Xor => old ^ x,
    };
    if size == 8 { result } else { result & ((1 << (8 * size)) - 1) }
}

/// Changes memory atomically; returns what it held.
///
/// # Safety
///
/// It is there, aligned, and of 2, 4 or 8 bytes.
unsafe fn exchange(at: *mut u8, size: usize, change: impl Fn(u64) -> u64) -> u64 {
    match size {
        8 => {
            // SAFETY: the caller's promise.
            let atomic = unsafe { AtomicU64::from_ptr(at.cast()) };
            let (mut old, order) = (atomic.load(Memory::SeqCst), Memory::SeqCst);
            while let Err(other) = atomic.compare_exchange_weak(old, change(old), order, order) {
                old = other;
            }
            old
        }
        _ => {
            // Two bytes are changed with their neighbours.
            let shift = if size == 2 { 8 * (at as u32 & 2) } else { 0 };
            let mask = if size == 2 { 0xFFFFu32 << shift } else { !0 };
            // SAFETY: the caller's promise; what is aligned to four bytes and holds two of an allocation, holds all.
            let atomic = unsafe { AtomicU32::from_ptr(at.map_addr(|at| at & !3).cast()) };
            let (mut old, order) = (atomic.load(Memory::SeqCst), Memory::SeqCst);
            loop {
                let new = (change(u64::from((old & mask) >> shift)) as u32) << shift & mask | old & !mask;
                match atomic.compare_exchange_weak(old, new, order, order) {
                    Ok(_) => return u64::from((old & mask) >> shift),
                    Err(other) => old = other,
                }
            }
        }
    }
}
