//! Registers of asynchronous products. They must not be accessed before the product is waited for, and a register that was written must not
//! be multiplied before a fence.
//!
//! A move from register to register only renames. Compilers insert moves between products with the same accumulator, which the assembler
//! removes again. Moves are therefore allowed at any time, and copy the state of the register.

use super::block::Failure;
use super::operands::Operands;
use super::program::{Left, Slot, Wgmma};
use crate::error::Kind;

/// State of a warp's registers for its products.
pub struct Registers {
    /// The group, counted from 1, in which a product writes each register, and the one in which a product reads it; 0 for none.
    written_in: Vec<u32>,
    read_in: Vec<u32>,
    /// The fence count at the last write of each register; 0 if it needs no fence.
    fences: Vec<u32>,
    /// Number of fences so far, plus 1.
    fence: u32,
    /// Whether there was a fence.
    fenced: bool,
    /// The last group that contains a product.
    last: u32,
    /// Whether registers are tracked.
    on: bool,
}

impl Registers {
    /// Creates the state for this many lines, none of them in use. `on`: whether the program has products of warpgroups.
    pub fn new(lines: usize, on: bool) -> Registers {
        let lines = if on { lines } else { 0 };
        Registers {
            written_in: vec![0; lines],
            read_in: vec![0; lines],
            fences: vec![0; lines],
            fence: 1,
            fenced: false,
            last: 0,
            on,
        }
    }

    /// Starts a block.
    pub fn begin(&mut self) {
        self.written_in.fill(0);
        self.read_in.fill(0);
        self.fences.fill(0);
        (self.fence, self.fenced, self.last) = (1, false, 0);
    }

    /// Checks an instruction other than a move or product. Groups up to `retired` have been waited for.
    #[inline(always)]
    pub fn touched(&mut self, operands: &Operands, retired: u64) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        if u64::from(self.last) > retired {
            self.check(operands, retired)?;
        }
        for slot in &operands.writes {
            self.fences[*slot as usize] = self.fence;
        }
        Ok(())
    }

    fn check(&self, operands: &Operands, retired: u64) -> Result<(), Failure> {
        let runs = |slot: &&Slot| u64::from(self.written_in[**slot as usize]) > retired;
        if operands.reads.iter().any(|slot| runs(&slot)) {
            return Err((Kind::Race, "a register is read in which a product adds up that was not waited for".into()));
        }
        if operands.writes.iter().any(|slot| runs(&slot)) {
            return Err((
                Kind::Race,
                "a register is written in which a product adds up that was not waited for".into(),
            ));
        }
        if operands.writes.iter().any(|slot| u64::from(self.read_in[*slot as usize]) > retired) {
            return Err((Kind::Race, "a register is written that a product reads, which was not waited for".into()));
        }
        Ok(())
    }

    /// A register is copied to another one.
    #[inline(always)]
    pub fn moved(&mut self, to: Slot, from: Slot) {
        if self.on {
            let (to, from) = (to as usize, from as usize);
            self.written_in[to] = self.written_in[from];
            self.fences[to] = self.fences[from];
            self.read_in[to] = 0;
        }
    }

    /// `wgmma.fence`.
    pub fn fence(&mut self) {
        (self.fence, self.fenced) = (self.fence + 1, true);
    }

    /// Checks a product that starts in this group, counted from 0.
    pub fn multiplied(&mut self, wgmma: &Wgmma, group: u64) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        if !self.fenced {
            return Err((Kind::Fence, "a product with no `wgmma.fence` before it".into()));
        }
        let left: &[Slot] = if let Left::Registers(slots) = &wgmma.a { slots } else { &[] };
        if wgmma.sums.iter().any(|slot| self.fences[*slot as usize] == self.fence) {
            return Err((Kind::Fence, "a product with no `wgmma.fence` after its accumulator was written".into()));
        }
        if left.iter().any(|slot| self.fences[*slot as usize] == self.fence) {
            return Err((Kind::Fence, "a product with no `wgmma.fence` after its first operand was written".into()));
        }
        self.last = group as u32 + 1;
        for slot in &wgmma.sums {
            (self.written_in[*slot as usize], self.fences[*slot as usize]) = (self.last, 0);
        }
        left.iter().for_each(|slot| self.read_in[*slot as usize] = self.last);
        Ok(())
    }
}
