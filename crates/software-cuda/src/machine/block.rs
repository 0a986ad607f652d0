//! A block: its shared memory, its barriers, its warps in turn, and what runs beside them.

use super::matrix::Row;
use super::program::Space;
use super::tensor::TensorMap;
use super::warp::{Stop, Warp};
use super::{LOCAL_WINDOW, Launch, SHARED_START, SHARED_WINDOW};
use crate::error::{Error, Kind, Place};
use std::collections::VecDeque;
use std::fmt::Write;

/// Instructions that a warp runs before another one does.
const SLICE: u32 = 4096;
/// Rounds in which no warp got on after which none will.
const PATIENCE: u32 = 256;
/// Bytes of shared memory that are looked after together.
const PAGE: usize = 256;

/// A fault without its place.
pub type Failure = (Kind, String);

/// A named barrier.
#[derive(Clone, Copy, Debug, Default)]
pub struct NamedBarrier {
    /// How many threads have come.
    pub arrived: u32,
    /// How many must.
    pub threads: u32,
    /// How often it was complete.
    pub times: u32,
}

/// A copy to shared memory that runs beside the warps.
pub struct Transfer {
    /// The round from which on it is there.
    pub due: u64,
    /// Its shared address.
    pub to: usize,
    /// Its source.
    pub from: Source,
    /// The address of the barrier where its bytes count.
    pub barrier: usize,
    /// Who asked for it.
    pub place: Place,
}

/// What is copied.
pub enum Source {
    /// So many bytes from an address.
    Bytes(u64, usize),
    /// A box at coordinates.
    Box(Box<TensorMap>, [i32; 5]),
}

/// Shared memory that a product reads until it is waited for.
pub struct Reading {
    /// The warp.
    pub warp: u32,
    /// The group of its products, counted from the first; the last one may not be committed yet.
    pub group: u64,
    /// Bytes.
    pub bytes: (usize, usize),
    /// The product's line.
    pub line: u32,
}

/// Second operands of a warpgroup's products that not all of its warps have multiplied with yet.
#[derive(Default)]
pub struct Operands {
    /// The number of the first one.
    pub first: u64,
    /// They, and how many warps are still to come.
    pub rows: VecDeque<(Vec<Row>, (usize, usize), u32)>,
}

/// What the warps of a block have in common.
pub struct Block<'a> {
    /// The launch.
    pub launch: &'a Launch<'a>,
    /// Which block it is.
    pub index: [u32; 3],
    /// Its number.
    pub number: u64,
    /// Shared memory, by its addresses.
    pub shared: Vec<u8>,
    /// Named barriers.
    pub barriers: [NamedBarrier; 16],
    /// Copies under way.
    pub transfers: Vec<Transfer>,
    /// What products read, and how many of them each page.
    readings: Vec<Reading>,
    pages: Vec<u32>,
    /// Of each warpgroup.
    pub operands: Vec<Operands>,
    /// How often all warps had their turn.
    pub round: u64,
    /// Warps that have not ended.
    pub live: u32,
    warps: Vec<Warp>,
    random: u64,
    /// The piece of global memory that was accessed last.
    piece: (u64, u64),
}

impl<'a> Block<'a> {
    /// A block that has not begun.
    pub fn new(launch: &'a Launch<'a>) -> Block<'a> {
        let threads = launch.threads.iter().product::<u32>();
        let warps = threads.div_ceil(32);
        let bytes = SHARED_START + launch.program.shared_bytes + launch.dynamic_shared;
        Block {
            launch,
            index: [0; 3],
            number: 0,
            shared: vec![0; bytes],
            barriers: [NamedBarrier::default(); 16],
            transfers: Vec::new(),
            readings: Vec::new(),
            pages: vec![0; bytes.div_ceil(PAGE) + 1],
            operands: (0..warps.div_ceil(4)).map(|_| Operands::default()).collect(),
            round: 0,
            live: warps,
            warps: (0..warps).map(|number| Warp::new(number, launch)).collect(),
            random: 0,
            piece: (0, 0),
        }
    }

    /// Runs it as one of these blocks.
    pub fn run(&mut self, index: [u32; 3], number: u64) -> Result<(), Error> {
        (self.index, self.number) = (index, number);
        // What a block finds in shared memory is whatever was there: numbers that spoil what they touch.
        self.shared.fill(0xFF);
        self.barriers = [NamedBarrier::default(); 16];
        self.operands.iter_mut().for_each(|operands| *operands = Operands::default());
        self.live = self.warps.len() as u32;
        self.random = self.launch.settings.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number;
        let mut warps = std::mem::take(&mut self.warps);
        warps.iter_mut().for_each(|warp| warp.begin(self));
        let result = self.turns(&mut warps);
        self.warps = warps;
        result
    }

    fn turns(&mut self, warps: &mut [Warp]) -> Result<(), Error> {
        let mut order: Vec<usize> = (0..warps.len()).collect();
        let mut idle = 0;
        loop {
            self.round += 1;
            if self.launch.settings.seed != 0 {
                for nth in (1..order.len()).rev() {
                    let other = self.draw(nth as u64 + 1) as usize;
                    order.swap(nth, other);
                }
            }
            let mut got_on = false;
            for nth in &order {
                let warp = &mut warps[*nth];
                if warp.done() {
                    continue;
                }
                match warp.turn(self, SLICE) {
                    Ok(Stop::Waits) => {}
                    Ok(Stop::Goes) => got_on = true,
                    Err((kind, what)) => {
                        return Err(Error::Fault { kind, place: self.place(warp.number, warp.line()), what });
                    }
                }
            }
            got_on |= self.transfer()?;
            if self.live == 0 && self.transfers.is_empty() {
                return Ok(());
            }
            idle = if got_on || !self.transfers.is_empty() { 0 } else { idle + 1 };
            if idle > PATIENCE {
                return Err(self.deadlock(warps));
            }
        }
    }

    fn deadlock(&self, warps: &[Warp]) -> Error {
        let mut what = String::from("no warp gets on:");
        let mut first = None;
        for warp in warps.iter().filter(|warp| !warp.done()) {
            first = first.or(Some(warp));
            let _ = write!(what, " warp {} waits in line {}{};", warp.number, warp.line(), warp.waits_for());
        }
        let place = first.map_or_else(Place::default, |warp| self.place(warp.number, warp.line()));
        Error::Fault { kind: Kind::Deadlock, place, what: what.trim_end_matches(';').into() }
    }

    /// A place in this block.
    pub fn place(&self, warp: u32, line: u32) -> Place {
        Place { kernel: self.launch.program.name.clone(), block: self.index, warp, line }
    }

    /// A number below this one, as the seed has it; 0 without one.
    pub fn draw(&mut self, below: u64) -> u64 {
        if self.launch.settings.seed == 0 {
            return 0;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % below
    }

    // -- memory

    /// Where an address of shared memory lies here.
    #[inline(always)]
    pub fn shared(&mut self, at: u64, size: usize) -> Result<*mut u8, Failure> {
        if at < SHARED_START as u64 || at + size as u64 > self.shared.len() as u64 {
            let end = self.shared.len();
            return Err((Kind::Address, format!("{size} bytes at {at:#x} of shared memory, which ends at {end:#x}")));
        }
        if at & (size as u64 - 1) != 0 && size <= 16 && size.is_power_of_two() {
            return Err((Kind::Alignment, format!("{size} bytes at {at:#x} of shared memory")));
        }
        // SAFETY: it was just checked to lie within.
        Ok(unsafe { self.shared.as_mut_ptr().add(at as usize) })
    }

    /// The same of global memory.
    #[inline(always)]
    pub fn global(&mut self, at: u64, size: usize) -> Result<*mut u8, Failure> {
        if at < self.piece.0 || at.wrapping_add(size as u64) > self.piece.1 {
            self.find(at, size)?;
        }
        if at & (size as u64 - 1) != 0 && size <= 16 && size.is_power_of_two() {
            return Err((Kind::Alignment, format!("{size} bytes at {at:#x} of global memory")));
        }
        Ok(at as *mut u8)
    }

    #[cold]
    fn find(&mut self, at: u64, size: usize) -> Result<(), Failure> {
        let parameters = self.launch.parameters.as_ptr_range();
        let piece = match self.launch.memory.around(at) {
            Some(piece) => piece,
            None if (parameters.start as u64..parameters.end as u64).contains(&at) => {
                (parameters.start as u64, parameters.end as u64)
            }
            None => {
                return Err((Kind::Address, format!("{size} bytes at {at:#x}, where no global memory is allocated")));
            }
        };
        if at + size as u64 > piece.1 {
            let over = at + size as u64 - piece.1;
            return Err((
                Kind::Address,
                format!("{size} bytes at {at:#x}, {over} of them after the end of an allocation"),
            ));
        }
        self.piece = piece;
        Ok(())
    }

    /// Where an address of a lane lies, whose local memory is this, and whether it is shared memory.
    #[inline(always)]
    pub fn resolve(
        &mut self,
        space: Space,
        at: u64,
        size: usize,
        local: &mut [u8],
    ) -> Result<(*mut u8, bool), Failure> {
        match space {
            Space::Shared => Ok((self.shared(at, size)?, true)),
            Space::Global => Ok((self.global(at, size)?, false)),
            Space::Generic if at >> 56 == SHARED_WINDOW >> 56 => Ok((self.shared(at - SHARED_WINDOW, size)?, true)),
            Space::Generic if at >> 56 == LOCAL_WINDOW >> 56 => {
                Ok((Self::local(at - LOCAL_WINDOW, size, local)?, false))
            }
            Space::Generic => Ok((self.global(at, size)?, false)),
            Space::Local => Ok((Self::local(at, size, local)?, false)),
            Space::Parameter => {
                let bytes = self.launch.parameters;
                match bytes.get(at as usize..at as usize + size) {
                    Some(bytes) => Ok((bytes.as_ptr().cast_mut(), false)),
                    None => Err((Kind::Address, format!("{size} bytes at {at:#x} of parameters"))),
                }
            }
        }
    }

    fn local(at: u64, size: usize, local: &mut [u8]) -> Result<*mut u8, Failure> {
        match local.get_mut(at as usize..(at as usize).saturating_add(size)) {
            Some(bytes) => Ok(bytes.as_mut_ptr()),
            None => Err((Kind::Address, format!("{size} bytes at {at:#x} of local memory"))),
        }
    }

    // -- products that read shared memory

    /// Looks after what a product reads.
    pub fn reads(&mut self, reading: Reading) {
        for page in &mut self.pages[reading.bytes.0 / PAGE..=(reading.bytes.1 - 1) / PAGE] {
            *page += 1;
        }
        self.readings.push(reading);
    }

    /// A warp has waited for all groups before this one.
    pub fn has_read(&mut self, warp: u32, before: u64) {
        let pages = &mut self.pages;
        self.readings.retain(|reading| {
            let keep = reading.warp != warp || reading.group >= before;
            if !keep {
                for page in &mut pages[reading.bytes.0 / PAGE..=(reading.bytes.1 - 1) / PAGE] {
                    *page -= 1;
                }
            }
            keep
        });
    }

    /// Refuses to write what a product may still read.
    #[inline(always)]
    pub fn writes(&self, at: usize, size: usize) -> Result<(), Failure> {
        if self.readings.is_empty() || self.pages[at / PAGE..=(at + size - 1) / PAGE].iter().all(|count| *count == 0) {
            return Ok(());
        }
        self.races(at, size)
    }

    #[cold]
    fn races(&self, at: usize, size: usize) -> Result<(), Failure> {
        for Reading { warp, bytes: (begin, end), line, .. } in &self.readings {
            if at < *end && at + size > *begin {
                let what = format!(
                    "{size} bytes at {at:#x} of shared memory are written while the product in line {line}, which warp {warp} has \
                     not waited for, may still read them"
                );
                return Err((Kind::Race, what));
            }
        }
        Ok(())
    }

    // -- copies

    /// Does what copies are due; whether there were any.
    fn transfer(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut nth = 0;
        while nth < self.transfers.len() {
            if self.transfers[nth].due > self.round {
                nth += 1;
                continue;
            }
            any = true;
            let transfer = self.transfers.swap_remove(nth);
            if let Err((kind, what)) = self.copy(&transfer) {
                return Err(Error::Fault { kind, place: transfer.place, what });
            }
        }
        Ok(any)
    }

    fn copy(&mut self, transfer: &Transfer) -> Result<(), Failure> {
        let to = transfer.to;
        let bytes = match &transfer.from {
            Source::Bytes(from, size) => {
                self.writes(to, *size)?;
                let from = self.global(*from, *size)?;
                let to = self.shared(to as u64, *size)?;
                // SAFETY: both were found to hold as many bytes, and shared memory is no part of global memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to, *size) };
                *size
            }
            Source::Box(map, at) => {
                let bytes = map.box_bytes();
                self.writes(to, bytes)?;
                self.shared(to as u64, bytes)?;
                let width = usize::from(map.sides[0]) * usize::from(map.element);
                for (from, line, part) in map.lines(*at) {
                    let from = if part.is_empty() { std::ptr::null_mut() } else { self.global(from, part.len())? };
                    for at in (0..width).step_by(16) {
                        let end = (at + 16).min(width);
                        let place = map.swizzle.apply(to + line + at);
                        let Some(chunk) = self.shared.get_mut(place..place + (end - at)) else {
                            return Err((
                                Kind::Address,
                                format!("a box at {to:#x} of shared memory is not aligned to its swizzle"),
                            ));
                        };
                        let (begin, end) = (part.start.clamp(at, end), part.end.clamp(at, end));
                        if end - begin < chunk.len() {
                            chunk.fill(0);
                        }
                        if begin < end {
                            // SAFETY: the part was found to lie in global memory, and this is some of it.
                            let bytes =
                                unsafe { std::slice::from_raw_parts(from.add(begin - part.start), end - begin) };
                            chunk[begin - at..end - at].copy_from_slice(bytes);
                        }
                    }
                }
                bytes
            }
        };
        self.mbarrier(transfer.barrier as u64, |state| state.bytes -= bytes as i32)
    }

    /// Writes a box of shared memory, or bytes, to global memory.
    pub fn copy_back(&mut self, from: usize, to: &Source) -> Result<(), Failure> {
        match to {
            Source::Bytes(to, size) => {
                let from = self.shared(from as u64, *size)?;
                let to = self.global(*to, *size)?;
                // SAFETY: both were found to hold as many bytes, and shared memory is no part of global memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to, *size) };
            }
            Source::Box(map, at) => {
                self.shared(from as u64, map.box_bytes())?;
                for (to, line, part) in map.lines(*at).filter(|(.., part)| !part.is_empty()) {
                    let to = self.global(to, part.len())?;
                    for at in part.clone() {
                        let byte = self.shared[map.swizzle.apply(from + line + at)];
                        // SAFETY: the part was found to lie in global memory.
                        unsafe { to.add(at - part.start).write(byte) };
                    }
                }
            }
        }
        Ok(())
    }

    // -- barriers in memory

    /// Changes a barrier, and ends its phase if that completes it.
    pub fn mbarrier(&mut self, at: u64, change: impl FnOnce(&mut Mbarrier)) -> Result<(), Failure> {
        let word = self.shared(at, 8)?.cast::<u64>();
        // SAFETY: eight bytes of shared memory.
        let mut state = Mbarrier::from_bits(unsafe { word.read_unaligned() });
        if !state.valid() {
            return Err((Kind::Undefined, format!("there is no barrier at {at:#x} of shared memory")));
        }
        change(&mut state);
        if state.pending < 0 {
            return Err((Kind::Undefined, format!("more arrivals than the barrier at {at:#x} counts")));
        }
        if state.pending == 0 && state.bytes == 0 {
            state.odd = !state.odd;
            state.pending = state.count;
        }
        // SAFETY: as above.
        unsafe { word.write_unaligned(state.bits()) };
        Ok(())
    }

    /// The state of a barrier.
    pub fn mbarrier_state(&mut self, at: u64) -> Result<Mbarrier, Failure> {
        // SAFETY: eight bytes of shared memory.
        let state = Mbarrier::from_bits(unsafe { self.shared(at, 8)?.cast::<u64>().read_unaligned() });
        match state.valid() {
            true => Ok(state),
            false => Err((Kind::Undefined, format!("there is no barrier at {at:#x} of shared memory"))),
        }
    }
}

/// What is in the eight bytes of a barrier.
#[derive(Clone, Copy, Debug)]
pub struct Mbarrier {
    /// Whether the phase that is not over is an odd one.
    pub odd: bool,
    /// Arrivals of a phase.
    pub count: i32,
    /// Those that are still to come.
    pub pending: i32,
    /// Bytes that are still to come; negative if more have come than were expected yet.
    pub bytes: i32,
}

impl Mbarrier {
    /// Takes the bits apart.
    pub fn from_bits(bits: u64) -> Mbarrier {
        let bytes = (bits >> 40 & 0x7F_FFFF) as i32;
        Mbarrier {
            odd: bits >> 63 != 0,
            count: (bits & 0xF_FFFF) as i32,
            pending: (bits >> 20 & 0xF_FFFF) as i32,
            bytes: bytes << 9 >> 9,
        }
    }

    /// The bits.
    pub fn bits(self) -> u64 {
        let bytes = u64::from(self.bytes as u32 & 0x7F_FFFF);
        u64::from(self.odd) << 63 | bytes << 40 | (self.pending as u64) << 20 | self.count as u64
    }

    /// Whether it may be one: what a block finds there is none, nor is one that was made invalid.
    fn valid(self) -> bool {
        (1..0xF_FFFF).contains(&self.count) && self.pending <= self.count
    }
}
