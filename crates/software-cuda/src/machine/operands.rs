//! Registers that an instruction reads and writes.

use super::program::{Address, Left, Op, Place, Slot, Vote};

/// Lines of the register file.
#[derive(Clone, Debug, Default)]
pub struct Operands {
    /// Lines that are read.
    pub reads: Box<[Slot]>,
    /// Lines that are written.
    pub writes: Box<[Slot]>,
    /// Lines that are used as addresses, or otherwise must not be spoiled.
    pub addresses: Box<[Slot]>,
}

/// Lists while they are collected.
#[derive(Default)]
struct Lists {
    reads: Vec<Slot>,
    writes: Vec<Slot>,
    addresses: Vec<Slot>,
}

impl Lists {
    fn read(&mut self, slot: Slot, wide: bool) {
        self.reads.extend(slot..=slot + Slot::from(wide));
    }

    fn write(&mut self, slot: Slot, wide: bool) {
        self.writes.extend(slot..=slot + Slot::from(wide));
    }

    fn address(&mut self, at: &Address) {
        if let Some(slot) = at.base {
            self.addresses.extend(slot..=slot + Slot::from(at.wide));
        }
    }

    fn place_read(&mut self, place: &Place) {
        self.read(place.slot, place.wide);
    }

    fn place_written(&mut self, place: &Place) {
        self.write(place.slot, place.wide);
    }
}

/// Operands of an instruction. The accumulator of a warpgroup's product is left out. A move has no operands, because it only renames.
pub fn operands(op: &Op) -> Operands {
    let mut lists = Lists::default();
    match op {
        Op::Alu(alu, to, from) => {
            lists.write(*to, alu.wide[0]);
            for (nth, slot) in from.iter().enumerate().take(alu.arity) {
                lists.read(*slot, alu.wide[1 + nth]);
            }
        }
        Op::Compare(compare, _, _, from, _) => from.iter().for_each(|slot| lists.read(*slot, compare.wide)),
        Op::Lookup(to, from, _) => {
            lists.write(*to, false);
            from.iter().for_each(|slot| lists.read(*slot, false));
        }
        Op::Carry { to, from, carry, takes, gives, .. } => {
            lists.write(*to, false);
            from.iter().for_each(|slot| lists.read(*slot, false));
            if *takes {
                lists.read(*carry, false);
            }
            if *gives {
                lists.write(*carry, false);
            }
        }
        Op::Select(to, from, _) => {
            lists.place_written(to);
            from.iter().for_each(|slot| lists.read(*slot, to.wide));
        }
        Op::Pack(to, from) => {
            lists.place_written(to);
            from.iter().for_each(|slot| lists.read(*slot, false));
        }
        Op::Unpack(to, from) => {
            lists.place_read(from);
            to.iter().flatten().for_each(|slot| lists.write(*slot, false));
        }
        Op::Load { to, at, .. } => {
            lists.address(at);
            to.iter().flatten().for_each(|place| lists.place_written(place));
        }
        Op::Store { from, at, .. } => {
            lists.address(at);
            from.iter().for_each(|place| lists.place_read(place));
        }
        Op::Atomic { size, to, with, at, .. } => {
            lists.address(at);
            to.iter().flat_map(|to| to.iter()).for_each(|place| lists.place_written(place));
            with.iter().for_each(|slot| lists.read(*slot, *size == 8));
        }
        Op::Shuffle { to, from, .. } => {
            lists.write(*to, false);
            lists.read(*from, false);
        }
        Op::Vote { vote: Vote::Ballot(to), .. } | Op::ActiveMask(to) => lists.write(*to, false),
        Op::Match { to, of, .. } => {
            lists.write(*to, false);
            lists.place_read(of);
        }
        Op::Reduce { to, of, .. } => {
            lists.write(*to, false);
            lists.read(*of, false);
        }
        Op::Elect { to: Some(to), .. } => lists.write(*to, false),
        Op::LoadMatrix { to, at, .. } => {
            lists.address(at);
            to.iter().for_each(|slot| lists.write(*slot, false));
        }
        Op::StoreMatrix { from, at, .. } => {
            lists.address(at);
            from.iter().for_each(|slot| lists.read(*slot, false));
        }
        Op::BarrierInit(at, count) => {
            lists.address(at);
            lists.addresses.push(*count);
        }
        Op::BarrierInvalidate(at) | Op::BarrierArrive { at, .. } | Op::BarrierBytes { at, .. } => lists.address(at),
        Op::BarrierTest { at, phase, .. } => {
            lists.address(at);
            lists.addresses.push(phase.slot);
        }
        Op::Barrier { id, threads, .. } => lists.addresses.extend([Some(*id), *threads].into_iter().flatten()),
        Op::CopyAsync { to, from, read, .. } => {
            lists.address(to);
            lists.address(from);
            lists.addresses.extend(read);
        }
        Op::Bulk(bulk) => {
            lists.address(&bulk.to);
            lists.address(&bulk.from);
            bulk.barrier.iter().for_each(|at| lists.address(at));
            lists.addresses.extend(bulk.box_at.iter().flat_map(|at| at.iter()));
        }
        Op::Mma(mma) => {
            mma.d.iter().for_each(|slot| lists.write(*slot, false));
            mma.a.iter().chain(&mma.b).chain(&mma.c).for_each(|slot| lists.read(*slot, false));
        }
        Op::MmaFragments(products) => {
            for mma in products.iter() {
                mma.d.iter().for_each(|slot| lists.write(*slot, false));
                mma.a.iter().chain(&mma.b).chain(&mma.c).for_each(|slot| lists.read(*slot, false));
            }
        }
        Op::LoadFragment { to, at, stride, .. } => {
            lists.address(at);
            lists.addresses.push(*stride);
            to.iter().for_each(|slot| lists.write(*slot, false));
        }
        Op::StoreFragment { from, at, stride, .. } => {
            lists.address(at);
            lists.addresses.push(*stride);
            from.iter().for_each(|slot| lists.read(*slot, false));
        }
        Op::Wgmma(wgmma) => {
            if let Left::Registers(slots) = wgmma.a {
                slots.iter().for_each(|slot| lists.read(*slot, false));
            }
        }
        _ => {}
    }
    Operands { reads: lists.reads.into(), writes: lists.writes.into(), addresses: lists.addresses.into() }
}
