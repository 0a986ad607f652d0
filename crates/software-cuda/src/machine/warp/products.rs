//! Matrix products, and exchanges with other lanes and warps.

use super::*;

impl Warp {
    pub(super) fn shuffle(
        &mut self,
        how: Shuffle,
        to: Slot,
        inside: Option<u32>,
        [from, by, clamp]: [Slot; 3],
        active: u32,
    ) {
        let (slot, from) = (from, self.lines[from as usize].0);
        let (by, clamp) = (&self.lines[by as usize].0, &self.lines[clamp as usize].0);
        let mut result = [0; LANES];
        let mut within = 0;
        let mut sources = [0; LANES];
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
            sources[lane as usize] = if is { other } else { lane } as usize & 31;
            result[lane as usize] = from[sources[lane as usize]];
        }
        if self.spoils.any() {
            self.spoils.shuffled(to, slot, active, |lane| sources[lane]);
        }
        self.blend(to, &result, active);
        if let Some(inside) = inside {
            self.set_predicate(inside, within, active);
        }
    }

    pub(super) fn named_barrier(
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
        block.order.meets(self.number, id as usize, barrier.arrived == threads);
        if barrier.arrived == threads {
            barrier.arrived = 0;
            barrier.times += 1;
            if waits {
                block.order.leaves(self.number, id as usize);
            }
        } else if waits {
            self.barrier = Some((id, barrier.times));
            return Ok(Next::Pause);
        }
        Ok(Next::On)
    }

    // -- products

    pub(super) fn mma(&mut self, mma: &Mma) {
        let mut columns = [[[0f32; 8]; 2]; 16];
        let mut rows = [[[0f32; 4]; 2]; 16];
        let line = |slot: &Slot| &self.lines[*slot as usize];
        let (a, b): (Vec<_>, Vec<_>) = (mma.a.iter().map(line).collect(), mma.b.iter().map(line).collect());
        matrix::left(mma.element, &a, &mut columns[..mma.depth]);
        matrix::right(mma.element, &b, &mut rows[..mma.depth]);
        let mut sums = mma.c.map(|slot| self.lines[slot as usize]);
        let [c0, c1, c2, c3] = &mut sums;
        // SAFETY: four different lines, which this function owns.
        unsafe { matrix::multiply(&[c0, c1, c2, c3], &columns[..mma.depth], &rows[..mma.depth]) };
        for (slot, sum) in mma.d.iter().zip(sums) {
            self.lines[*slot as usize] = sum;
        }
    }

    pub(super) fn wgmma(&mut self, wgmma: &Wgmma, block: &mut Block<'_>) -> Result<(), Failure> {
        let line = self.line;
        self.registers.multiplied(wgmma, self.committed)?;
        let (mut seen, mut failure) = (Vec::new(), None);
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
                let bytes = descriptor.left(&block.shared, wgmma.element, transposed, first, &mut columns, &mut seen);
                let bytes = bytes.map_err(nowhere)?;
                failure = seen.drain(..).find_map(|at| block.order.proxy_reads(self.number, at as usize, 16).err());
                block.reads(Reading { reader: Reader::Product, warp: self.number, group, bytes, line });
            }
        }
        if wgmma.negated[0] != wgmma.negated[1] {
            columns.iter_mut().flatten().flatten().for_each(|x| *x = -*x);
        }
        // All warps of a warpgroup multiply by the same second operand: the first warp reads it for all.
        let mut operands = std::mem::take(&mut block.operands[self.number as usize / 4]);
        let nth = (self.products - operands.first) as usize;
        self.products += 1;
        if operands.rows.len() == nth {
            let mut rows = vec![[[0f32; 4]; 2]; 2 * wgmma.columns];
            let descriptor = Descriptor::new(self.wide(wgmma.b, 0)).ok_or_else(based)?;
            let bytes = descriptor.right(&block.shared, wgmma.element, wgmma.b_transposed, &mut rows, &mut seen);
            operands.rows.push_back((rows, seen, bytes.map_err(nowhere)?, 4));
        }
        let (rows, seen, bytes, left) = &mut operands.rows[nth];
        if rows.len() != 2 * wgmma.columns {
            return Err((Kind::Undefined, "the warps of a warpgroup multiply with different operands".into()));
        }
        failure =
            failure.or_else(|| seen.iter().find_map(|at| block.order.proxy_reads(self.number, *at as usize, 16).err()));
        if let Some((Kind::Fence, _)) = failure {
            return failure.map_or(Ok(()), Err);
        }
        block.reads(Reading { reader: Reader::Product, warp: self.number, group, bytes: *bytes, line });
        let adds = self.predicate(wgmma.adds);
        if adds != 0 && adds != !0 {
            return Err((Kind::Undefined, "whether to add differs between lanes".into()));
        }
        if adds == 0 && self.spoils.any() && !self.spoils.reads(wgmma) {
            self.spoils.clean(wgmma.sums.iter().copied(), !0);
        }
        if let Some(failure) = failure {
            self.spoils.spoil(wgmma.sums.iter().copied(), !0, failure, line);
        }
        if adds == 0 {
            wgmma.sums.iter().for_each(|slot| self.lines[*slot as usize] = Line([0; LANES]));
        }
        let sums: Vec<_> = wgmma.sums.iter().map(|slot| self.pointer(*slot).cast::<Line>()).collect();
        // SAFETY: lines of this warp. Where PTX gives the same line several times, all but one are left unchanged.
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
