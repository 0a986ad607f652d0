//! Tracking of values that come from unwritten memory, or from products that read too early. A correct program does not use them.
//!
//! Kernels read more than they use: several words at once, one of which tells whether the others count, or a tile before it is known to
//! exist. Reading such memory is therefore no fault. The loaded value is spoiled, and so is everything computed from it. A branch, an
//! address or a result in global memory that depends on it is a fault. Shared memory that it is written to counts as unwritten.

use super::block::Failure;
use super::lanes::LANES;
use super::operands::Operands;
use super::program::{Instruction, Left, Op, Predicate, Slot, Wgmma};
use crate::error::Kind;

/// Spoiled lanes of a warp's registers and predicates.
#[derive(Default)]
pub struct Spoils {
    registers: Vec<u32>,
    predicates: Vec<u32>,
    /// Index of the reason that spoiled each register last.
    of_register: Vec<u32>,
    of_predicate: Vec<u32>,
    reasons: Vec<Failure>,
    /// Lanes in which the last store writes a spoiled value.
    stored: u32,
}

impl Spoils {
    /// Creates the state for this many registers and predicates, none of them spoiled.
    pub fn new(registers: usize, predicates: usize) -> Spoils {
        Spoils {
            registers: vec![0; registers],
            predicates: vec![0; predicates],
            of_register: vec![0; registers],
            of_predicate: vec![0; predicates],
            reasons: Vec::new(),
            stored: 0,
        }
    }

    /// Begins a block.
    pub fn begin(&mut self) {
        if !self.reasons.is_empty() {
            self.registers.fill(0);
            self.predicates.fill(0);
            self.reasons.clear();
        }
        self.stored = 0;
    }

    /// Whether anything was spoiled in this block.
    #[inline(always)]
    pub fn any(&self) -> bool {
        !self.reasons.is_empty()
    }

    /// Spoils lanes of registers for this reason.
    pub fn spoil(&mut self, slots: impl IntoIterator<Item = Slot>, lanes: u32, (kind, what): Failure, line: u32) {
        let what = format!("something depends on what line {line} has read: {what}");
        if self.reasons.last().is_none_or(|last| last.1 != what) {
            self.reasons.push((kind, what));
        }
        for slot in slots {
            if self.registers[slot as usize] == 0 {
                self.of_register[slot as usize] = self.reasons.len() as u32 - 1;
            }
            self.registers[slot as usize] |= lanes;
        }
    }

    /// Marks registers as not spoiled in these lanes.
    pub fn clean(&mut self, slots: impl IntoIterator<Item = Slot>, lanes: u32) {
        slots.into_iter().for_each(|slot| self.registers[slot as usize] &= !lanes);
    }

    /// Whether the last store wrote a spoiled value in this lane.
    pub fn stored(&self, lane: usize) -> bool {
        self.stored >> lane & 1 != 0
    }

    /// Whether a lane of a register is spoiled.
    pub fn is(&self, slot: Slot, lane: usize) -> bool {
        self.registers[slot as usize] >> lane & 1 != 0
    }

    /// Spoiled lanes of a register.
    pub fn lanes(&self, slot: Slot) -> u32 {
        self.registers[slot as usize]
    }

    /// Whether the register operand of a product is spoiled.
    pub fn reads(&self, wgmma: &Wgmma) -> bool {
        matches!(wgmma.a, Left::Registers(slots) if slots.iter().any(|slot| self.registers[*slot as usize] != 0))
    }

    /// Reason why a register is spoiled.
    pub fn reason(&self, slot: Slot) -> Failure {
        self.reasons
            .get(self.of_register[slot as usize] as usize)
            .cloned()
            .unwrap_or((Kind::Uninitialised, String::new()))
    }

    /// Refuses a guard that is spoiled.
    pub fn guards(&self, guard: Predicate, lanes: u32) -> Result<(), Failure> {
        match self.predicates[guard.index as usize] & lanes {
            0 => Ok(()),
            _ => Err(self.reasons[self.of_predicate[guard.index as usize] as usize].clone()),
        }
    }

    /// Lanes in which any of these registers is spoiled, and the index of the last one's reason.
    fn of(&self, slots: &[Slot], lanes: u32) -> (u32, u32) {
        slots.iter().fold((0, 0), |(mask, why), slot| match self.registers[*slot as usize] & lanes {
            0 => (mask, why),
            some => (mask | some, self.of_register[*slot as usize]),
        })
    }

    fn write(&mut self, slots: &[Slot], spoiled: u32, why: u32, lanes: u32) {
        for slot in slots {
            let register = &mut self.registers[*slot as usize];
            *register = *register & !lanes | spoiled;
            if spoiled != 0 {
                self.of_register[*slot as usize] = why;
            }
        }
    }

    fn write_predicate(&mut self, index: u32, spoiled: u32, why: u32, lanes: u32) {
        let predicate = &mut self.predicates[index as usize];
        *predicate = *predicate & !lanes | spoiled;
        if spoiled != 0 {
            self.of_predicate[index as usize] = why;
        }
    }

    /// Propagates spoiled values through an instruction that is about to run in these lanes. For a selection, `holds` are the lanes where
    /// the predicate holds.
    pub fn run(&mut self, instruction: &Instruction, lanes: u32, holds: u32) -> Result<(), Failure> {
        let Operands { reads, writes, addresses } = &instruction.operands;
        let (bad, why) = self.of(addresses, lanes);
        if bad != 0 {
            return Err(self.reasons[why as usize].clone());
        }
        self.stored = 0;
        let (spoiled, why) = self.of(reads, lanes);
        match &instruction.op {
            Op::Move(to, from) => {
                for nth in 0..=Slot::from(to.wide) {
                    let (spoiled, why) = self.of(&[*from + nth], lanes);
                    self.write(&[to.slot + nth], spoiled, why, lanes);
                }
            }
            Op::Compare(_, to, opposite, _, with) => {
                let (spoiled, why) = match with {
                    Some((_, predicate)) if spoiled == 0 => {
                        (self.predicates[predicate.index as usize] & lanes, self.of_predicate[predicate.index as usize])
                    }
                    _ => (spoiled, why),
                };
                for predicate in [Some(to), opposite.as_ref()].into_iter().flatten() {
                    self.write_predicate(*predicate, spoiled, why, lanes);
                }
            }
            Op::Logic(_, to, from) => {
                let (mut spoiled, mut why) = (0, 0);
                for predicate in from {
                    let more = self.predicates[predicate.index as usize] & lanes;
                    (spoiled, why) = if more == 0 {
                        (spoiled, why)
                    } else {
                        (spoiled | more, self.of_predicate[predicate.index as usize])
                    };
                }
                self.write_predicate(*to, spoiled, why, lanes);
            }
            Op::Select(to, [a, b], predicate) => {
                for nth in 0..=Slot::from(to.wide) {
                    let (first, of_first) = self.of(&[*a + nth], lanes & holds);
                    let (second, of_second) = self.of(&[*b + nth], lanes & !holds);
                    let chosen = self.predicates[predicate.index as usize] & lanes;
                    let why = match (first, second) {
                        (0, 0) => self.of_predicate[predicate.index as usize],
                        (0, _) => of_second,
                        _ => of_first,
                    };
                    self.write(&[to.slot + nth], first | second | chosen, why, lanes);
                }
            }
            // The effect of stores and shuffles is handled when they run.
            Op::Store { .. } | Op::StoreMatrix { .. } | Op::StoreFragment { .. } => self.stored = spoiled,
            Op::Shuffle { .. } => {}
            Op::Vote { of, .. } => self.guards(*of, lanes)?,
            Op::Match { .. } | Op::Reduce { .. } | Op::Atomic { .. } if spoiled != 0 => {
                return Err(self.reasons[why as usize].clone());
            }
            Op::Mma(_) | Op::MmaFragments(_) => self.write(writes, if spoiled != 0 { lanes } else { 0 }, why, lanes),
            Op::Wgmma(wgmma) if spoiled != 0 => self.write(&wgmma.sums, lanes, why, lanes),
            _ => self.write(writes, spoiled, why, lanes),
        }
        Ok(())
    }

    /// Propagates spoiled values through a shuffle: lane `l` receives `from` of lane `source(l)`.
    pub fn shuffled(&mut self, to: Slot, from: Slot, lanes: u32, source: impl Fn(usize) -> usize) {
        let before = self.registers[from as usize];
        let spoiled = (0..LANES).fold(0, |sum, lane| sum | (before >> source(lane) & 1) << lane);
        self.write(&[to], spoiled & lanes, self.of_register[from as usize], lanes);
    }
}
