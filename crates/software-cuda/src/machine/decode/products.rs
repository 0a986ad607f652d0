//! Decoding of matrix products.

use super::*;

impl Decoder<'_> {
    pub(super) fn mma(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let ["mma", "sync", "aligned", shape, "row", "col", "f32", a, b, "f32"] = parts else {
            return self.refuse("an unknown product");
        };
        let (element, depth) = match (*shape, *a) {
            ("m16n8k16", "f16") => (Element::F16, 16),
            ("m16n8k8", "f16") => (Element::F16, 8),
            ("m16n8k16", "bf16") => (Element::Bf16, 16),
            ("m16n8k8", "bf16") => (Element::Bf16, 8),
            ("m16n8k8", "tf32") => (Element::Tf32, 8),
            ("m16n8k4", "tf32") => (Element::Tf32, 4),
            _ => return self.refuse("an unknown product"),
        };
        let [d, left, right, c] = ops else { return self.refuse("another number of operands") };
        let (d, c) = (self.four(d)?, self.four(c)?);
        let (left, right) = (self.sources(left)?, self.sources(right)?);
        let registers = depth * if element == Element::Tf32 { 2 } else { 1 } / 4;
        if a != b || left.len() != registers || right.len() != registers / 2 {
            return self.refuse("another number of registers");
        }
        Ok(Op::Mma(Box::new(Mma { element, depth, d, a: left, b: right, c })))
    }

    pub(super) fn wmma(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        let columns = |layout: &str| match layout {
            "row" => Ok(false),
            "col" => Ok(true),
            _ => self.refuse("an unknown layout"),
        };
        match (parts, ops) {
            (["wmma", "load", which, "sync", "aligned", layout, shape, rest @ ..], [to, at, stride]) => {
                let columns = columns(layout)?;
                let fragment = match *which {
                    "a" => Fragment::A,
                    "b" => Fragment::B,
                    _ => Fragment::Sums,
                };
                let ty = rest.last().copied().unwrap_or_default();
                let to = self.targets(to)?;
                let size = match (fragment, *shape, ty, to.len()) {
                    (Fragment::Sums, "m16n16k16" | "m16n16k8", "f32", 8) => 4,
                    (Fragment::A | Fragment::B, "m16n16k8", "tf32", 4) => 4,
                    (Fragment::A | Fragment::B, "m16n16k16", "bf16", 4) => 2,
                    (Fragment::A | Fragment::B, "m16n16k16", "f16", 8) => 2,
                    _ => return self.refuse("an unknown fragment"),
                };
                let (at, stride) = (self.address(at, self.space(parts)?)?, self.source(stride, false)?);
                Ok(Op::LoadFragment { fragment, to, at, stride, size, columns })
            }
            (
                ["wmma", "store", "d", "sync", "aligned", layout, "m16n16k16" | "m16n16k8", .., "f32"],
                [at, from, stride],
            ) => {
                let columns = columns(layout)?;
                let from = self.sources(from)?;
                if from.len() != 8 {
                    return self.refuse("an unknown fragment");
                }
                let (at, stride) = (self.address(at, self.space(parts)?)?, self.source(stride, false)?);
                Ok(Op::StoreFragment { from, at, stride, columns })
            }
            (["wmma", "mma", "sync", "aligned", _, _, shape, "f32", rest @ ..], [d, a, b, c]) => {
                let (element, depth) = match (*shape, rest) {
                    ("m16n16k16", ["f32"] | ["f16", "f16", "f32"]) => (Element::F16, 16),
                    ("m16n16k16", ["bf16", "bf16", "f32"]) => (Element::Bf16, 16),
                    ("m16n16k8", ["tf32", "tf32", "f32"]) => (Element::Tf32, 8),
                    _ => return self.refuse("an unknown product"),
                };
                let (d, a, b, c) = (self.targets(d)?, self.sources(a)?, self.sources(b)?, self.sources(c)?);
                if d.len() != 8 || c.len() != 8 || a.len() != b.len() || a.len() < 4 {
                    return self.refuse("another number of registers");
                }
                let of = |half: usize| Mma {
                    element,
                    depth,
                    d: std::array::from_fn(|nth| d[4 * half + nth]),
                    a: a[..4].into(),
                    b: b[2 * half..2 * half + 2].into(),
                    c: std::array::from_fn(|nth| c[4 * half + nth]),
                };
                Ok(Op::MmaFragments(Box::new([of(0), of(1)])))
            }
            _ => self.refuse("an unknown operation"),
        }
    }

    pub(super) fn wgmma(&mut self, parts: &[&str], ops: &[Operand]) -> Result<Op, Error> {
        match parts.get(1) {
            Some(&"fence") => return Ok(Op::WgmmaFence),
            Some(&"commit_group") => return Ok(Op::WgmmaCommit),
            Some(&"wait_group") => match ops.first() {
                Some(Operand::Immediate(count)) => return Ok(Op::WgmmaWait(*count as usize)),
                _ => return self.refuse("a number expected"),
            },
            _ => {}
        }
        let ["wgmma", "mma_async", "sync", "aligned", shape, "f32", a, b] = parts else {
            return self.refuse("an unknown product");
        };
        let element = match (*a, a == b) {
            ("f16", true) => Element::F16,
            ("bf16", true) => Element::Bf16,
            _ => return self.refuse("an unknown product"),
        };
        let columns = shape.strip_prefix("m64n").and_then(|rest| rest.strip_suffix("k16"));
        let Some(columns) = columns.and_then(|columns| columns.parse::<usize>().ok()).filter(|n| n % 8 == 0) else {
            return self.refuse("an unknown shape");
        };
        let [sums, left, right, adds, signs @ ..] = ops else { return self.refuse("another number of operands") };
        let number = |nth: usize| match signs.get(nth) {
            Some(Operand::Immediate(number)) => Ok(*number as i32),
            _ => self.refuse("a number expected"),
        };
        let negated = [number(0)? == -1, number(1)? == -1];
        let in_registers = matches!(left, Operand::Vector(_));
        let b_transposed = number(if in_registers { 2 } else { 3 })? != 0;
        let a_transposed = !in_registers && number(2)? != 0;
        let sums = self.targets(sums)?;
        if sums.len() != columns / 2 {
            return self.refuse("another number of registers");
        }
        let a = if in_registers {
            Left::Registers(self.four(left)?)
        } else {
            Left::Shared(self.source(left, true)?, a_transposed)
        };
        let (b, adds) = (self.source(right, true)?, self.predicate(adds)?);
        Ok(Op::Wgmma(Box::new(Wgmma { element, columns, sums, a, b, b_transposed, adds, negated })))
    }
}
