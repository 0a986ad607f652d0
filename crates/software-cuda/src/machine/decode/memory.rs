//! Decoding of loads, stores, copies and barriers in memory.

use super::*;

impl Decoder<'_> {
    pub(super) fn load(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let [to, at] = ops else { return self.refuse("another number of operands") };
        let ty = parts[parts.len() - 1];
        let size = self.size(ty)?;
        let to = self.vector(to).iter().map(|one| match one {
            Operand::Sink => Ok(None),
            one => self.place(one).map(Some),
        });
        let to: Box<[_]> = to.collect::<Result<_, _>>()?;
        if to.iter().flatten().any(|place| size == 8 && !place.wide) {
            return self.refuse("registers that are too narrow");
        }
        Ok(Op::Load { to, size, signed: ty.starts_with('s'), at: self.address(at, self.space(parts)?)? })
    }

    pub(super) fn store(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let [at, from] = ops else { return self.refuse("another number of operands") };
        let size = self.size(parts[parts.len() - 1])?;
        let mut places = Vec::new();
        for one in self.vector(from) {
            places.push(match one {
                Operand::Register(register) => self.place_of(*register)?,
                one => Place { slot: self.source(one, size == 8)?, wide: size == 8 },
            });
        }
        if places.iter().any(|place| size == 8 && !place.wide) {
            return self.refuse("registers that are too narrow");
        }
        Ok(Op::Store { from: places.into(), size, at: self.address(at, self.space(parts)?)? })
    }

    pub(super) fn atomic(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let ty = parts[parts.len() - 1];
        let size = self.size(ty)?;
        let wide = size == 8;
        let signed = ty.starts_with('s');
        let change = parts[1..].iter().find_map(|part| {
            Some(match (*part, ty) {
                ("add", "f32") => Change::AddF32,
                ("add", "f64") => Change::AddF64,
                ("add", "f16x2") => Change::AddF16x2,
                ("add", "bf16x2") => Change::AddBf16x2,
                ("add", "f16") => Change::AddF16,
                ("add", "bf16") => Change::AddBf16,
                ("add", _) => Change::Add,
                ("min", _) => Change::Min(signed),
                ("max", _) => Change::Max(signed),
                ("inc", _) => Change::Increment,
                ("dec", _) => Change::Decrement,
                ("exch", _) => Change::Exchange,
                ("cas", _) => Change::CompareExchange,
                ("and", _) => Change::And,
                ("or", _) => Change::Or,
                ("xor", _) => Change::Xor,
                _ => return None,
            })
        });
        let Some(change) = change else { return self.refuse("an unknown operation") };
        if ty.starts_with('f') && matches!(change, Change::Min(_) | Change::Max(_)) || size == 1 {
            return self.refuse("an unknown operation");
        }
        let ops = if parts[0] == "red" { [&[Operand::Sink], ops].concat() } else { ops.to_vec() };
        if ops.len() < 3 {
            return self.refuse("another number of operands");
        }
        let to = match &ops[0] {
            Operand::Sink => None,
            to => Some(self.vector(to).iter().map(|one| self.place(one)).collect::<Result<Box<[_]>, _>>()?),
        };
        let mut with = Vec::new();
        for one in self.vector(&ops[2]) {
            with.push(self.source(one, wide)?);
        }
        let other = match ops.get(3) {
            Some(other) => self.source(other, wide)?,
            None => with[0],
        };
        Ok(Op::Atomic { change, size, to, at: self.address(&ops[1], self.space(parts)?)?, with: with.into(), other })
    }

    pub(super) fn mbarrier(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let has = |modifier: &str| parts[1..].contains(&modifier);
        let space = self.space(parts)?;
        match (parts.get(1), ops) {
            (Some(&"init"), [at, count]) => Ok(Op::BarrierInit(self.address(at, space)?, self.source(count, false)?)),
            (Some(&"inval"), [at]) => Ok(Op::BarrierInvalidate(self.address(at, space)?)),
            (Some(&"expect_tx" | &"complete_tx"), [at, bytes]) => Ok(Op::BarrierBytes {
                at: self.address(at, space)?,
                bytes: self.source(bytes, false)?,
                completes: parts[1] == "complete_tx",
            }),
            (Some(&"arrive"), [state, at, more @ ..]) if !has("noComplete") => {
                let state = self.optional_target(state, true)?;
                let at = self.address(at, space)?;
                let one = self.constant(1, false);
                let operand = more.first().map(|operand| self.source(operand, false)).transpose()?;
                let (count, expects) = if has("expect_tx") { (one, operand) } else { (operand.unwrap_or(one), None) };
                Ok(Op::BarrierArrive { at, count, expects, state })
            }
            (Some(&"arrive"), [at]) => {
                let count = self.constant(1, false);
                Ok(Op::BarrierArrive { at: self.address(at, space)?, count, expects: None, state: None })
            }
            (Some(&"test_wait" | &"try_wait"), [is, at, phase, ..]) => {
                let wide = !has("parity");
                let phase = Place { slot: self.source(phase, wide)?, wide };
                Ok(Op::BarrierTest { at: self.address(at, space)?, is: self.predicate_target(is)?, phase })
            }
            _ => self.refuse("an unknown operation"),
        }
    }

    pub(super) fn copy(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let has = |modifier: &str| parts[1..].contains(&modifier);
        let count = |operand: Option<&Operand>| match operand {
            Some(Operand::Immediate(count)) => Ok(*count as usize),
            _ => self.refuse("a number expected"),
        };
        let reduces = parts.get(1) == Some(&"reduce");
        if parts.get(if reduces { 2 } else { 1 }) != Some(&"async") {
            return self.refuse("an unknown copy");
        }
        match (has("bulk"), has("commit_group"), has("wait_group"), has("wait_all")) {
            (true, true, ..) => return Ok(Op::BulkCommit),
            (true, _, true, _) => return Ok(Op::BulkWait(count(ops.first())?)),
            (false, true, ..) => return Ok(Op::CopyCommit),
            (false, _, true, _) => return Ok(Op::CopyWait(count(ops.first())?)),
            (false, _, _, true) => return Ok(Op::CopyWaitAll),
            (true, ..) if has("prefetch") => return Ok(Op::Nothing),
            (false, ..) => {
                let [to, from, _, ..] = ops else { return self.refuse("another number of operands") };
                if !has("ca") && !has("cg") {
                    return self.refuse("an unknown copy");
                }
                let size = count(ops.get(2))?;
                let read = ops.get(3).map(|read| self.source(read, false)).transpose()?;
                let (to, from) = (self.address(to, Space::Shared)?, self.address(from, Space::Global)?);
                return Ok(Op::CopyAsync { to, from, size, read });
            }
            _ => {}
        }
        let loads = has("mbarrier::complete_tx::bytes");
        if has("im2col") || has("multicast::cluster") || reduces && (loads || has("tensor")) {
            return self.refuse("an unknown copy");
        }
        let reduces = match (reduces, parts[parts.len() - 1]) {
            (false, _) => None,
            (true, "f32") if has("add") => Some((Change::AddF32, 4)),
            (true, "u32" | "s32") if has("add") => Some((Change::Add, 4)),
            _ => return self.refuse("an unknown reduction"),
        };
        let (to_space, from_space) =
            if loads { (Space::Shared, Space::Global) } else { (Space::Global, Space::Shared) };
        let barrier = if loads {
            match ops.get(if has("tensor") { 2 } else { 3 }) {
                Some(at) => Some(self.address(at, Space::Shared)?),
                None => return self.refuse("another number of operands"),
            }
        } else {
            None
        };
        let [to, from, ..] = ops else { return self.refuse("another number of operands") };
        let map = if loads { from } else { to };
        let box_at = match map {
            Operand::Address(_, coordinates) if has("tensor") => {
                Some(coordinates.iter().map(|one| self.source(one, false)).collect::<Result<Box<[_]>, _>>()?)
            }
            _ => None,
        };
        // A tensor map may be a parameter, which has a generic address.
        let space = |space: Space| if has("tensor") && space == Space::Global { Space::Generic } else { space };
        let bytes = if has("tensor") { 0 } else { self.source(ops.get(2).unwrap_or(&Operand::Sink), false)? };
        let (to, from) = (self.address(to, space(to_space))?, self.address(from, space(from_space))?);
        Ok(Op::Bulk(Box::new(Bulk { to, from, box_at, bytes, barrier, reduces })))
    }
}
