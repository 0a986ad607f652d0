//! A warp: its registers, the positions of its lanes, and the execution of instructions.
//!
//! If lanes diverge, the divergent paths are executed one after the other, up to the instruction where they reconverge.

mod lines;
mod memory;
mod products;
mod rare;

use super::block::{Block, Failure, Lies, Reader, Reading, Source, Transfer};
use super::change::{changed, exchange};
use super::fragments::{self, Lines};
use super::lanes::{LANES, Line};
use super::matrix::{self, Descriptor};
use super::mbarrier::Mbarrier;
use super::program::*;
use super::registers::Registers;
use super::spoils::Spoils;
use super::tensor::TensorMap;
use super::{Launch, SHARED_WINDOW};
use crate::error::Kind;
use std::cmp::Ordering;
use std::collections::VecDeque;

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The warp made progress.
    Goes,
    /// The warp only waited.
    Waits,
}

/// Lanes on the same path: their position, and where they reconverge with others.
#[derive(Clone, Copy, Debug)]
struct Way {
    at: u32,
    meets: u32,
    lanes: u32,
}

/// A lane's `cp.async` that was not waited for yet.
struct Copy {
    to: usize,
    bytes: [u8; 16],
    size: usize,
    /// Whether it has already taken place, although the warp cannot rely on it yet.
    done: bool,
    /// Whether some of its source was not written.
    worthless: bool,
    line: u32,
}

/// A warp.
pub struct Warp {
    /// Number of the warp in the block.
    pub number: u32,
    lines: Vec<Line>,
    predicates: Vec<u32>,
    /// Divergent paths. The last one is executed first.
    ways: Vec<Way>,
    /// Lanes that have not ended.
    alive: u32,
    /// The named barrier that the warp waits for, and its number of completions before.
    barrier: Option<(u32, u32)>,
    /// Local memory of all lanes, one after the other.
    local: Vec<u8>,
    /// Copies since the last committed group, and committed groups.
    copies: Vec<Copy>,
    copy_groups: VecDeque<Vec<Copy>>,
    /// Groups of products that were committed, groups that were waited for, and products of this warp.
    committed: u64,
    retired: u64,
    products: u64,
    /// Groups of bulk copies to global memory that were committed.
    stored: u64,
    /// State of the registers that products use.
    registers: Registers,
    /// Spoiled registers.
    spoils: Spoils,
    /// The barrier in shared memory whose phase the last test found incomplete.
    phase: Option<u64>,
    /// Line of the last instruction.
    line: u32,
}

/// Lanes of a mask.
fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// What follows an instruction.
enum Next {
    /// The next instruction.
    On,
    /// A turn of other warps, then the next instruction.
    Pause,
}

impl Warp {
    /// Creates a warp of a launch that has not started.
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
            stored: 0,
            registers: Registers::new(program.lines.max(3), program.multiplies && launch.settings.checks),
            spoils: Spoils::new(program.lines.max(3), program.predicates),
            phase: None,
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

    /// Starts a block.
    pub fn begin(&mut self, block: &Block<'_>) {
        let launch = block.launch;
        let [x, y, z] = launch.threads;
        let first = self.number * 32;
        let count = (x * y * z - first).min(32);
        self.alive = if count == 32 { !0 } else { (1 << count) - 1 };
        self.ways = vec![Way { at: 0, meets: NOWHERE, lanes: self.alive }];
        self.copies.clear();
        self.copy_groups.clear();
        (self.committed, self.retired, self.products, self.stored) = (0, 0, 0, 0);
        (self.phase, self.barrier) = (None, None);
        self.registers.begin();
        self.spoils.begin();
        // Registers that were not written yet keep arbitrary contents, on which no program may depend.
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

    /// Line of the last instruction.
    pub fn line(&self) -> u32 {
        self.line
    }

    /// What the warp waits for, for messages.
    pub fn waits_for(&self, block: &Block<'_>) -> String {
        match (self.barrier, self.phase) {
            (Some((id, _)), _) => format!(" (barrier {id})"),
            (_, Some(at)) => format!(" (barrier at {at:#x} of shared memory{})", block.missing(at)),
            _ if self.ways.len() > 1 => {
                format!(" (lanes {:#010x})", self.ways.last().map_or(0, |way| way.lanes))
            }
            _ => String::new(),
        }
    }

    // -- turns

    /// Runs at most `budget` instructions.
    pub fn turn(&mut self, block: &mut Block<'_>, budget: u32) -> Result<Stop, Failure> {
        if let Some((id, times)) = self.barrier {
            if block.barriers[id as usize].times == times {
                return Ok(Stop::Waits);
            }
            self.barrier = None;
            block.order.leaves(self.number, id as usize);
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
                if self.spoils.any() {
                    self.line = instruction.line;
                    if let Some(guard) = instruction.guard {
                        self.spoils.guards(guard, lanes)?;
                    }
                    if active != 0 {
                        let holds = match instruction.op {
                            Op::Select(.., predicate) => self.predicate(predicate),
                            _ => 0,
                        };
                        self.spoils.run(instruction, active, holds)?;
                    }
                }
                match &instruction.op {
                    Op::Branch { to, meets: join } => {
                        if active == lanes {
                            at = *to;
                        } else if active != 0 {
                            // At the reconvergence point all lanes continue. If the enclosing path ends at the same point, it need not be
                            // kept.
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
                        self.registers.touched(&instruction.operands, self.retired)?;
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
        // A wait is a loop of a few instructions around a test.
        Ok(if budget - left > 8 || self.alive == 0 { Stop::Goes } else { Stop::Waits })
    }

    fn end(&mut self, block: &mut Block<'_>) -> Result<(), Failure> {
        block.live -= 1;
        self.wait_for_copies(0, block)?;
        let copies = std::mem::take(&mut self.copies);
        for copy in copies.into_iter().filter(|copy| !copy.done) {
            self.copy(&copy, block)?;
        }
        if let Some(line) = block.stores(self.number) {
            let what =
                format!("a warp ends before the bulk copy in line {line} was waited for, which reads shared memory");
            return Err((Kind::Race, what));
        }
        // Products that were not waited for end with the warp.
        self.committed += 1;
        self.retired = self.committed;
        block.has_read(Reader::Product, self.number, self.retired);
        Ok(())
    }

    /// Refuses an instruction that not all lanes execute together.
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
                    // SAFETY: decoding has checked that registers have the width that the function uses.
                    unsafe { (alu.run)(to_line, a, b, c) };
                } else {
                    let mut result = [Line([0; LANES]); 2];
                    // SAFETY: as above.
                    unsafe { (alu.run)(result.as_mut_ptr().cast(), a, b, c) };
                    if alu.wide[0] {
                        let result = result.as_ptr().cast::<u64>();
                        for lane in lanes_of(active) {
                            // SAFETY: the result has 32 numbers of 64 bits.
                            self.set_wide(*to, lane, unsafe { result.add(lane).read() });
                        }
                    } else {
                        self.blend(*to, &result[0].0, active);
                    }
                }
            }
            Op::Move(to, from) => {
                self.registers.moved(to.slot, *from);
                if to.wide {
                    self.registers.moved(to.slot + 1, *from + 1);
                    if active == !0 {
                        for nth in 0..2 {
                            self.lines[to.slot as usize + nth] = self.lines[*from as usize + nth];
                        }
                    } else {
                        lanes_of(active).for_each(|lane| self.set_wide(to.slot, lane, self.wide(*from, lane)));
                    }
                } else {
                    let line = self.lines[*from as usize].0;
                    self.blend(to.slot, &line, active);
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
