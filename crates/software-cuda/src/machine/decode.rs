//! Decoding of PTX statements into a program.

mod memory;
mod products;

use super::SHARED_START;
use super::arithmetic::{arithmetic, comparison};
use super::lanes::{Alu, lanes1, lanes2, lanes3};
use super::operands::{Operands, operands};
use super::program::*;
use crate::error::Error;
use crate::ptx::{self, Base, Class, Function, Operand, Register, Statement, Variable};
use std::cmp::Ordering;
use std::collections::HashMap;

/// Meaning of a variable's name.
#[derive(Clone, Copy, Debug)]
enum Symbol {
    /// An address in shared, local or global memory.
    Address(u64),
    /// Offset of a parameter.
    Parameter(usize),
}

/// Decodes a function. `globals` are the addresses of the module's variables in global memory.
///
/// # Errors
///
/// If an instruction is not supported: the first one.
pub fn decode(function: &Function, shared: &[Variable], globals: &HashMap<String, u64>) -> Result<Program, Error> {
    let mut symbols = HashMap::new();
    let (mut shared_bytes, mut local_bytes) = (0usize, 0usize);
    let variables = || function.variables.iter().chain(shared);
    for variable in variables().filter(|variable| variable.size > 0) {
        let (bytes, start) =
            if variable.space == "local" { (&mut local_bytes, 0) } else { (&mut shared_bytes, SHARED_START) };
        let offset = (start + *bytes).next_multiple_of(variable.align) - start;
        symbols.insert(variable.name.as_str(), Symbol::Address((start + offset) as u64));
        *bytes = offset + variable.size;
    }
    // Shared memory of the launch follows the other variables, aligned for all of its variables.
    let dynamic = || variables().filter(|variable| variable.size == 0);
    let align = dynamic().map(|variable| variable.align).max().unwrap_or(1);
    shared_bytes = (SHARED_START + shared_bytes).next_multiple_of(align) - SHARED_START;
    symbols.extend(dynamic().map(|v| (v.name.as_str(), Symbol::Address((SHARED_START + shared_bytes) as u64))));
    symbols.extend(globals.iter().map(|(name, at)| (name.as_str(), Symbol::Address(*at))));
    symbols.extend(function.parameters.iter().map(|p| (p.name.as_str(), Symbol::Parameter(p.offset))));

    let [predicates, words, longs] = function.registers.map(|count| count as usize);
    let mut decoder = Decoder {
        symbols,
        words,
        lines: words + 2 * longs,
        constants: HashMap::new(),
        specials: HashMap::new(),
        carry: None,
        statement: &function.statements,
        at: 0,
    };
    let mut code = Vec::with_capacity(function.statements.len() + 1);
    for nth in 0..function.statements.len() {
        decoder.at = nth;
        let statement = &function.statements[nth];
        let guard = statement
            .guard
            .map(|guard| Predicate { index: guard.predicate + 1, flip: if guard.negated { !0 } else { 0 } });
        let op = decoder.op(statement)?;
        code.push(Instruction { operands: operands(&op), op, guard, line: statement.line });
    }
    let multiplies = code.iter().any(|instruction| matches!(instruction.op, Op::Wgmma(_)));
    let line = code.last().map_or(0, |last| last.line);
    code.push(Instruction { op: Op::Exit, operands: Operands::default(), guard: None, line });
    super::flow::join(&mut code);
    Ok(Program {
        name: function.name.clone(),
        code,
        lines: decoder.lines,
        predicates: predicates + 1,
        constants: decoder.constants.iter().map(|((bits, wide), slot)| (*slot, *bits, *wide)).collect(),
        specials: decoder.specials.iter().map(|(special, slot)| (*special, *slot)).collect(),
        parameters: function.parameters.iter().map(|p| (p.offset, p.size)).collect(),
        parameter_bytes: function.parameter_bytes,
        shared_bytes,
        local_bytes: local_bytes.next_multiple_of(16),
        multiplies,
    })
}

struct Decoder<'a> {
    symbols: HashMap<&'a str, Symbol>,
    words: usize,
    lines: usize,
    constants: HashMap<(u64, bool), Slot>,
    specials: HashMap<Special, Slot>,
    /// Register for the carry, if an instruction uses one.
    carry: Option<Slot>,
    statement: &'a [Statement],
    at: usize,
}

impl<'a> Decoder<'a> {
    fn refuse<T>(&self, what: impl Into<String>) -> Result<T, Error> {
        let Statement { line, opcode, .. } = &self.statement[self.at];
        Err(Error::Unsupported { line: *line, text: opcode.clone(), what: what.into() })
    }

    fn constant(&mut self, bits: u64, wide: bool) -> Slot {
        let bits = if wide { bits } else { bits & 0xFFFF_FFFF };
        let next = self.lines;
        let slot = *self.constants.entry((bits, wide)).or_insert(next as Slot);
        if slot as usize == next {
            self.lines += 1 + usize::from(wide);
        }
        slot
    }

    fn special(&mut self, special: Special) -> Slot {
        let next = self.lines;
        let slot = *self.specials.entry(special).or_insert(next as Slot);
        if slot as usize == next {
            self.lines += 1 + usize::from(matches!(special, Special::Parameter(_)));
        }
        slot
    }

    /// `add`, `addc`, `mad` or `madc`, with a carry in or out.
    fn carry(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let next = self.lines as Slot;
        let carry = *self.carry.get_or_insert(next);
        if carry == next {
            self.lines += 1;
        }
        let (product, rest) = match parts[0] {
            "mad" | "madc" => (parts.get(1).copied().unwrap_or_default(), &parts[2..]),
            _ => ("lo", &parts[1..]),
        };
        let takes = parts[0].ends_with('c');
        let high = match product {
            "lo" => false,
            "hi" => true,
            _ => return self.refuse("neither half of a product"),
        };
        let gives = match rest {
            ["cc", "u32"] => true,
            ["u32"] if takes => false,
            _ => return self.refuse("a carry of another type"),
        };
        let [to, a, b, c] = match (parts[0], ops) {
            ("mad" | "madc", [to, a, b, c]) => [to, a, b, c],
            ("add" | "addc", [to, a, c]) => [to, a, &Operand::Immediate(1), c],
            _ => return self.refuse("another number of operands"),
        };
        let from = [self.source(a, false)?, self.source(b, false)?, self.source(c, false)?];
        Ok(Op::Carry { to: self.target(to, false)?, from, carry, high, takes, gives })
    }

    /// The register as a place.
    fn place_of(&self, register: Register) -> Result<Place, Error> {
        match register.class {
            Class::Word => Ok(Place { slot: register.index, wide: false }),
            Class::Long => Ok(Place { slot: (self.words + 2 * register.index as usize) as Slot, wide: true }),
            Class::Predicate => self.refuse("a predicate is no number"),
        }
    }

    fn place(&self, operand: &Operand) -> Result<Place, Error> {
        match operand {
            Operand::Register(register) => self.place_of(*register),
            other => self.refuse(format!("a register expected, not {other:?}")),
        }
    }

    fn target(&self, operand: &Operand, wide: bool) -> Result<Slot, Error> {
        let place = self.place(operand)?;
        if place.wide != wide { self.refuse("a register of another width") } else { Ok(place.slot) }
    }

    fn optional_target(&self, operand: &Operand, wide: bool) -> Result<Option<Slot>, Error> {
        if *operand == Operand::Sink { Ok(None) } else { self.target(operand, wide).map(Some) }
    }

    /// Slot that holds an operand's value.
    fn source(&mut self, operand: &Operand, wide: bool) -> Result<Slot, Error> {
        match operand {
            Operand::Register(_) => self.target(operand, wide),
            Operand::Immediate(bits) => Ok(self.constant(*bits, wide)),
            Operand::Single(x) => {
                let bits = if wide { x.to_bits() } else { u64::from((*x as f32).to_bits()) };
                Ok(self.constant(bits, wide))
            }
            Operand::Special(name) if !wide => {
                let special = self.special_of(name)?;
                Ok(self.special(special))
            }
            Operand::Symbol(name) => match self.symbols.get(name.as_str()) {
                Some(Symbol::Address(at)) => Ok(self.constant(*at, wide)),
                Some(Symbol::Parameter(offset)) if wide => Ok(self.special(Special::Parameter(*offset))),
                _ => self.refuse(format!("`{name}` is not known")),
            },
            other => self.refuse(format!("{other:?} is no operand")),
        }
    }

    fn special_of(&self, name: &str) -> Result<Special, Error> {
        let (base, dimension) = match name.split_once('.') {
            Some((base, "x")) => (base, 0),
            Some((base, "y")) => (base, 1),
            Some((base, "z")) => (base, 2),
            _ => (name, 3),
        };
        Ok(match (base, dimension) {
            ("%tid", 0..3) => Special::Thread(dimension),
            ("%ntid", 0..3) => Special::Threads(dimension),
            ("%ctaid" | "%clusterid", 0..3) => Special::Block(dimension),
            ("%nctaid" | "%nclusterid", 0..3) => Special::Blocks(dimension),
            ("%cluster_ctaid", 0..3) | ("%cluster_ctarank", 3) => Special::Constant(0),
            ("%cluster_nctaid", 0..3) | ("%cluster_nctarank", 3) => Special::Constant(1),
            ("%laneid", 3) => Special::Lane,
            ("%warpid", 3) => Special::Warp,
            ("%nwarpid", 3) => Special::Warps,
            ("%smid", 3) => Special::Multiprocessor,
            ("%gridid" | "%clock", 3) => Special::Constant(0),
            ("%lanemask_eq", 3) => Special::LaneMask(Ordering::Equal, false),
            ("%lanemask_lt", 3) => Special::LaneMask(Ordering::Less, false),
            ("%lanemask_le", 3) => Special::LaneMask(Ordering::Less, true),
            ("%lanemask_gt", 3) => Special::LaneMask(Ordering::Greater, false),
            ("%lanemask_ge", 3) => Special::LaneMask(Ordering::Greater, true),
            ("%dynamic_smem_size", 3) => Special::DynamicShared,
            _ => return self.refuse(format!("there is no `{name}`")),
        })
    }

    fn predicate(&self, operand: &Operand) -> Result<Predicate, Error> {
        match operand {
            Operand::Register(Register { class: Class::Predicate, index }) => {
                Ok(Predicate { index: index + 1, flip: 0 })
            }
            Operand::Negated(register) => Ok(Predicate { index: register.index + 1, flip: !0 }),
            Operand::Immediate(bits) => Ok(Predicate { index: 0, flip: if *bits != 0 { !0 } else { 0 } }),
            other => self.refuse(format!("a predicate expected, not {other:?}")),
        }
    }

    fn predicate_target(&self, operand: &Operand) -> Result<u32, Error> {
        match operand {
            Operand::Register(Register { class: Class::Predicate, index }) => Ok(index + 1),
            other => self.refuse(format!("a predicate expected, not {other:?}")),
        }
    }

    fn optional_predicate(&self, operand: &Operand) -> Result<Option<u32>, Error> {
        if *operand == Operand::Sink { Ok(None) } else { self.predicate_target(operand).map(Some) }
    }

    fn address(&self, operand: &Operand, space: Space) -> Result<Address, Error> {
        let Operand::Address(ptx::Address { base, offset }, _) = operand else {
            return self.refuse(format!("an address expected, not {operand:?}"));
        };
        Ok(match base {
            Base::Zero => Address { space, base: None, wide: true, offset: *offset },
            Base::Register(register) => {
                let place = self.place_of(*register)?;
                Address { space, base: Some(place.slot), wide: place.wide, offset: *offset }
            }
            Base::Symbol(name) => match self.symbols.get(name.as_str()) {
                Some(Symbol::Address(at)) => Address { space, base: None, wide: true, offset: *at as i64 + offset },
                Some(Symbol::Parameter(at)) => {
                    Address { space: Space::Parameter, base: None, wide: true, offset: *at as i64 + offset }
                }
                None => return self.refuse(format!("`{name}` is not known")),
            },
        })
    }

    fn vector<'o>(&self, operand: &'o Operand) -> &'o [Operand] {
        match operand {
            Operand::Vector(all) => all,
            one => std::slice::from_ref(one),
        }
    }

    fn targets(&self, operand: &Operand) -> Result<Box<[Slot]>, Error> {
        self.vector(operand).iter().map(|one| self.target(one, false)).collect()
    }

    fn sources(&mut self, operand: &Operand) -> Result<Box<[Slot]>, Error> {
        self.vector(operand).iter().map(|one| self.source(one, false)).collect()
    }

    fn four(&mut self, operand: &Operand) -> Result<[Slot; 4], Error> {
        match self.sources(operand)?[..] {
            [a, b, c, d] => Ok([a, b, c, d]),
            _ => self.refuse("four registers expected"),
        }
    }

    fn alu(&mut self, alu: Alu, operands: &[Operand]) -> Result<Op, Error> {
        if operands.len() != 1 + alu.arity {
            return self.refuse("another number of operands");
        }
        let to = self.target(&operands[0], alu.wide[0])?;
        let mut from = [to; 3];
        for (nth, operand) in operands[1..].iter().enumerate() {
            from[nth] = self.source(operand, alu.wide[1 + nth])?;
        }
        // Operands that are not read count as one word wide.
        for slot in &mut from[alu.arity..] {
            *slot = 0;
        }
        Ok(Op::Alu(alu, to, from))
    }

    fn op(&mut self, statement: &'a Statement) -> Result<Op, Error> {
        let parts: Vec<&str> = statement.opcode.split('.').collect();
        let has = |modifier: &str| parts[1..].contains(&modifier);
        let ops = &statement.operands[..];
        let ty = *parts.last().unwrap_or(&"");
        let arity = |count: usize| match ops.len() == count {
            true => Ok(()),
            false => self.refuse("another number of operands"),
        };
        match parts[0] {
            "mov" if ty == "pred" => {
                arity(2)?;
                let of = self.predicate(&ops[1])?;
                Ok(Op::Logic(Logic::Or, self.predicate_target(&ops[0])?, [of, of]))
            }
            "not" if ty == "pred" => {
                arity(2)?;
                let of = self.predicate(&ops[1])?;
                let of = Predicate { flip: !of.flip, ..of };
                Ok(Op::Logic(Logic::Or, self.predicate_target(&ops[0])?, [of, of]))
            }
            "and" | "or" | "xor" if ty == "pred" => {
                arity(3)?;
                let logic = self.logic(parts[0])?;
                let of = [self.predicate(&ops[1])?, self.predicate(&ops[2])?];
                Ok(Op::Logic(logic, self.predicate_target(&ops[0])?, of))
            }
            "mov" if matches!(ops, [_, Operand::Vector(_)]) => {
                let to = self.place(&ops[0])?;
                let from = self.vector(&ops[1]).iter();
                let half = to.wide && from.len() == 2;
                if !half && from.clone().any(|one| self.place(one).is_ok_and(|place| place.wide)) {
                    return self.refuse("wide parts");
                }
                Ok(Op::Pack(to, self.sources(&ops[1])?))
            }
            "mov" if matches!(ops, [Operand::Vector(_), _]) => {
                let to = self.vector(&ops[0]).iter();
                let to = to.map(|one| self.optional_target(one, false)).collect::<Result<_, _>>()?;
                Ok(Op::Unpack(to, self.place(&ops[1])?))
            }
            "mov" if matches!(ty, "b32" | "u32" | "s32" | "f32" | "b64" | "u64" | "s64" | "f64") => {
                arity(2)?;
                let to = self.place(&ops[0])?;
                if to.wide != ty.ends_with("64") {
                    return self.refuse("a register of another width");
                }
                Ok(Op::Move(to, self.source(&ops[1], to.wide)?))
            }
            "setp" => self.compare(&parts, ops),
            "selp" => {
                arity(4)?;
                let to = self.place(&ops[0])?;
                let from = [self.source(&ops[1], to.wide)?, self.source(&ops[2], to.wide)?];
                Ok(Op::Select(to, from, self.predicate(&ops[3])?))
            }
            "lop3" => {
                arity(5)?;
                let Operand::Immediate(table) = ops[4] else { return self.refuse("a table that is no number") };
                let from = [self.source(&ops[1], false)?, self.source(&ops[2], false)?, self.source(&ops[3], false)?];
                Ok(Op::Lookup(self.target(&ops[0], false)?, from, table as u8))
            }
            "bfi" if ty == "b32" => {
                arity(5)?;
                let (Operand::Immediate(at), Operand::Immediate(length)) = (&ops[3], &ops[4]) else {
                    return self.refuse("a field that registers tell");
                };
                // `bfi` with three registers: the third one holds position and length.
                let field = self.constant(at & 255 | (length & 255) << 8, false);
                let insert = lanes3(|a: u32, b: u32, field: u32| {
                    let (at, length) = (field & 255, field >> 8);
                    let bits = if at > 31 || length == 0 { 0 } else { !0 >> (32 - length.min(32)) << at };
                    a.checked_shl(at).unwrap_or(0) & bits | b & !bits
                });
                let (to, a, b) =
                    (self.target(&ops[0], false)?, self.source(&ops[1], false)?, self.source(&ops[2], false)?);
                Ok(Op::Alu(insert, to, [a, b, field]))
            }
            "cvta" => {
                arity(2)?;
                // Shared and local memory have windows in the generic space; other addresses are unchanged.
                let window = match (has("shared") || has("shared::cta"), has("local")) {
                    (true, _) => super::SHARED_WINDOW,
                    (_, true) => super::LOCAL_WINDOW,
                    _ => 0,
                };
                let window = if has("to") { window.wrapping_neg() } else { window };
                let wide = ty == "u64";
                let (to, from) = (self.target(&ops[0], wide)?, self.source(&ops[1], wide)?);
                let add = if wide {
                    lanes2(|a: u64, b: u64| a.wrapping_add(b))
                } else {
                    lanes2(|a: u32, b: u32| a.wrapping_add(b))
                };
                Ok(Op::Alu(add, to, [from, self.constant(window, wide), 0]))
            }
            // Each block is a cluster of its own.
            "mapa" => {
                arity(3)?;
                let wide = ty == "u64";
                let copy = if wide { lanes1(|a: u64| a) } else { lanes1(|a: u32| a) };
                Ok(Op::Alu(copy, self.target(&ops[0], wide)?, [self.source(&ops[1], wide)?, 0, 0]))
            }
            "bra" => match ops {
                [Operand::Label(to)] => Ok(Op::Branch { to: *to, meets: NOWHERE }),
                _ => self.refuse("a label expected"),
            },
            "ret" | "exit" => Ok(Op::Exit),
            "trap" => Ok(Op::Trap),
            "nanosleep" => Ok(Op::Yield),
            "fence" if has("proxy") && (has("async") || has("async::global") || has("async::shared::cta")) => {
                Ok(Op::ProxyFence)
            }
            "fence" if has("mbarrier_init") => Ok(Op::ProxyFence),
            "fence" | "membar" | "griddepcontrol" | "setmaxnreg" | "prefetch" | "prefetchu" | "discard" => {
                Ok(Op::Nothing)
            }
            "ld" | "ldu" => self.load(&parts, ops),
            "st" => self.store(&parts, ops),
            "atom" | "red" => self.atomic(&parts, ops),
            "shfl" => {
                arity(5)?;
                let how = match parts.get(2) {
                    Some(&"up") => Shuffle::Up,
                    Some(&"down") => Shuffle::Down,
                    Some(&"bfly") => Shuffle::Butterfly,
                    Some(&"idx") => Shuffle::Index,
                    _ => return self.refuse("an unknown mode"),
                };
                let (to, inside) = match &ops[0] {
                    Operand::Pair(to, inside) => (self.target(to, false)?, self.optional_predicate(inside)?),
                    to => (self.target(to, false)?, None),
                };
                Ok(Op::Shuffle {
                    how,
                    to,
                    inside,
                    from: self.source(&ops[1], false)?,
                    by: self.source(&ops[2], false)?,
                    clamp: self.source(&ops[3], false)?,
                    members: self.source(&ops[4], false)?,
                })
            }
            "vote" => {
                arity(3)?;
                let vote = match parts.get(2) {
                    Some(&"all") => Vote::All(self.predicate_target(&ops[0])?),
                    Some(&"any") => Vote::Any(self.predicate_target(&ops[0])?),
                    Some(&"uni") => Vote::Uniform(self.predicate_target(&ops[0])?),
                    Some(&"ballot") => Vote::Ballot(self.target(&ops[0], false)?),
                    _ => return self.refuse("an unknown mode"),
                };
                Ok(Op::Vote { vote, of: self.predicate(&ops[1])?, members: self.source(&ops[2], false)? })
            }
            "match" if has("any") => {
                arity(3)?;
                let wide = ty == "b64";
                let of = Place { slot: self.source(&ops[1], wide)?, wide };
                Ok(Op::Match { to: self.target(&ops[0], false)?, of, members: self.source(&ops[2], false)? })
            }
            "redux" => {
                arity(3)?;
                let change = match (parts[2], ty) {
                    ("add", _) => Change::Add,
                    ("min", ty) => Change::Min(ty == "s32"),
                    ("max", ty) => Change::Max(ty == "s32"),
                    ("and", _) => Change::And,
                    ("or", _) => Change::Or,
                    ("xor", _) => Change::Xor,
                    _ => return self.refuse("an unknown operation"),
                };
                let (to, of) = (self.target(&ops[0], false)?, self.source(&ops[1], false)?);
                Ok(Op::Reduce { change, to, of, members: self.source(&ops[2], false)? })
            }
            "activemask" => {
                arity(1)?;
                Ok(Op::ActiveMask(self.target(&ops[0], false)?))
            }
            "elect" => {
                arity(2)?;
                let Operand::Pair(to, is) = &ops[0] else { return self.refuse("a pair expected") };
                let (to, is) = (self.optional_target(to, false)?, self.optional_predicate(is)?);
                Ok(Op::Elect { to, is, members: self.source(&ops[1], false)? })
            }
            "bar" | "barrier" if has("warp") => {
                arity(1)?;
                Ok(Op::WarpBarrier(self.source(&ops[0], false)?))
            }
            "bar" | "barrier" if (has("sync") || has("arrive")) && !has("cluster") => {
                let id = match ops.first() {
                    Some(id) => self.source(id, false)?,
                    None => return self.refuse("another number of operands"),
                };
                let threads = ops.get(1).map(|threads| self.source(threads, false)).transpose()?;
                Ok(Op::Barrier { id, threads, waits: has("sync") })
            }
            // Each block is a cluster of its own, so this is a barrier of its warps.
            "barrier" if has("cluster") => match has("arrive") {
                true => Ok(Op::Nothing),
                false => {
                    let id = self.constant(15, false);
                    Ok(Op::Barrier { id, threads: None, waits: true })
                }
            },
            "mbarrier" => self.mbarrier(&parts, ops),
            "cp" => self.copy(&parts, ops),
            "ldmatrix" if has("m8n8") && has("b16") => {
                arity(2)?;
                let (to, at) = (self.targets(&ops[0])?, self.address(&ops[1], Space::Shared)?);
                Ok(Op::LoadMatrix { to, transposed: has("trans"), at })
            }
            "stmatrix" if has("m8n8") && has("b16") => {
                arity(2)?;
                let (from, at) = (self.sources(&ops[1])?, self.address(&ops[0], Space::Shared)?);
                Ok(Op::StoreMatrix { from, transposed: has("trans"), at })
            }
            "mma" => self.mma(&parts, ops),
            "wgmma" => self.wgmma(&parts, ops),
            "wmma" => self.wmma(&parts, ops),
            "addc" | "madc" => self.carry(&parts, ops),
            "add" | "mad" if has("cc") => self.carry(&parts, ops),
            _ => match arithmetic(&parts) {
                Some(alu) => self.alu(alu, ops),
                None => self.refuse("there is no such arithmetic here"),
            },
        }
    }

    fn logic(&self, name: &str) -> Result<Logic, Error> {
        match name {
            "and" => Ok(Logic::And),
            "or" => Ok(Logic::Or),
            "xor" => Ok(Logic::Xor),
            _ => self.refuse(format!("`{name}` is no logic")),
        }
    }

    fn compare(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let Some(compare) = comparison(parts) else { return self.refuse("an unknown comparison") };
        if ops.len() < 3 {
            return self.refuse("another number of operands");
        }
        let (to, opposite) = match &ops[0] {
            Operand::Pair(to, opposite) => (self.predicate_target(to)?, Some(self.predicate_target(opposite)?)),
            to => (self.predicate_target(to)?, None),
        };
        let from = [self.source(&ops[1], compare.wide)?, self.source(&ops[2], compare.wide)?];
        let with = match ops.get(3) {
            Some(with) => Some((self.logic(parts[2])?, self.predicate(with)?)),
            None => None,
        };
        Ok(Op::Compare(compare, to, opposite, from, with))
    }

    fn space(&self, parts: &[&str]) -> Result<Space, Error> {
        for part in &parts[1..] {
            return Ok(match *part {
                "global" | "const" => Space::Global,
                "shared" | "shared::cta" | "shared::cluster" => Space::Shared,
                "local" => Space::Local,
                "param" | "param::entry" => Space::Parameter,
                _ => continue,
            });
        }
        Ok(Space::Generic)
    }

    fn size(&self, ty: &str) -> Result<usize, Error> {
        match ty {
            "b8" | "u8" | "s8" => Ok(1),
            "b16" | "u16" | "s16" | "f16" | "bf16" => Ok(2),
            "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => Ok(4),
            "b64" | "u64" | "s64" | "f64" => Ok(8),
            _ => self.refuse(format!("an element of type `{ty}`")),
        }
    }
}
