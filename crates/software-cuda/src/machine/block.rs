//! A thread block: its shared memory, its barriers, its warps in turn, and asynchronous copies.

mod copies;

use super::change::{changed, exchange};
use super::matrix::Row;
use super::mbarrier::Mbarrier;
use super::order::Order;
use super::program::{Change, Space};
use super::tensor::TensorMap;
use super::warp::{Stop, Warp};
use super::written::Written;
use super::{LOCAL_WINDOW, Launch, SHARED_START, SHARED_WINDOW};
use crate::error::{Error, Kind, Place};
use std::collections::VecDeque;
use std::fmt::Write;

/// Maximum number of instructions that a warp runs in a turn.
const SLICE: u32 = 4096;
/// Number of rounds without progress after which the block counts as deadlocked.
const PATIENCE: u32 = 256;
/// A slow warp has a turn in one of this many rounds.
const SLOW: u64 = 8;
/// Bytes of shared memory that are tracked together.
const PAGE: usize = 256;

/// A fault without its place.
pub type Failure = (Kind, String);

/// Memory that an address lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// Shared memory.
    Shared,
    /// Global memory.
    Global,
    /// Local memory or parameters.
    Elsewhere,
}

/// A named barrier.
#[derive(Clone, Copy, Debug, Default)]
pub struct NamedBarrier {
    /// Threads that have arrived.
    pub arrived: u32,
    /// Threads that must arrive.
    pub threads: u32,
    /// How often the barrier was completed.
    pub times: u32,
}

/// An asynchronous copy to shared memory.
pub struct Transfer {
    /// The round in which it completes, at the earliest.
    pub due: u64,
    /// Its destination in shared memory.
    pub to: usize,
    /// Its source.
    pub from: Source,
    /// Address of the barrier that counts its bytes.
    pub barrier: usize,
    /// Place of the instruction that issued it.
    pub place: Place,
}

/// Source of a copy.
pub enum Source {
    /// An address, and a number of bytes.
    Bytes(u64, usize),
    /// A box of a tensor, at coordinates.
    Box(Box<TensorMap>, [i32; 5]),
}

/// Asynchronous reader of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// A product of a warpgroup.
    Product,
    /// A bulk copy to global memory.
    Store,
}

/// A range of shared memory that is read asynchronously until the reader is waited for.
pub struct Reading {
    /// The reader.
    pub reader: Reader,
    /// The warp that issued it.
    pub warp: u32,
    /// The warp's group of products or copies, counted from the first; the last group may not be committed yet.
    pub group: u64,
    /// First byte, and the byte after the last.
    pub bytes: (usize, usize),
    /// Line of the instruction.
    pub line: u32,
}

/// Second operand of a product: its rows, the addresses of the 16-byte vectors that it was read from, its byte range, and the number of
/// warps that have yet to use it.
pub type Shared = (Vec<Row>, Vec<u32>, (usize, usize), u32);

/// Second operands of a warpgroup's products that some of its warps have yet to use.
#[derive(Default)]
pub struct Operands {
    /// Number of the first operand.
    pub first: u64,
    /// The operands.
    pub rows: VecDeque<Shared>,
}

/// Which warps have a turn in every round, and which only in one of [`SLOW`]. Hardware guarantees no warp its share, so that a warp may run
/// far ahead of the others or fall far behind.
#[derive(Clone, Copy, Debug)]
enum Pace {
    /// All warps have a turn in every round.
    Alike,
    /// This warp is slow.
    Behind(usize),
    /// All other warps are slow.
    Ahead(usize),
}

impl Pace {
    fn slow(self, warp: usize) -> bool {
        match self {
            Pace::Alike => false,
            Pace::Behind(one) => warp == one,
            Pace::Ahead(one) => warp != one,
        }
    }
}

/// State that the warps of a block share.
pub struct Block<'a> {
    /// The launch.
    pub launch: &'a Launch<'a>,
    /// Index of the block in the grid.
    pub index: [u32; 3],
    /// Linear number of the block.
    pub number: u64,
    /// Shared memory, indexed by address.
    pub shared: Vec<u8>,
    /// Named barriers.
    pub barriers: [NamedBarrier; 16],
    /// Pending copies to shared memory.
    pub transfers: Vec<Transfer>,
    /// Asynchronous reads of shared memory, and their number for each page.
    readings: Vec<Reading>,
    pages: Vec<u32>,
    /// Second operands of each warpgroup.
    pub operands: Vec<Operands>,
    /// Number of rounds, in each of which all warps have a turn.
    pub round: u64,
    /// Number of warps that have not ended.
    pub live: u32,
    warps: Vec<Warp>,
    random: u64,
    /// The range of global memory accessed last, and which of its bytes were written.
    piece: (u64, u64, Option<&'a Written>),
    /// Happens-before order of the accesses to shared memory.
    pub order: Order,
}

impl<'a> Block<'a> {
    /// Creates a block that has not started.
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
            piece: (0, 0, None),
            order: Order::new(bytes, warps as usize, launch.settings.checks),
        }
    }

    /// Runs the block of this index and number.
    pub fn run(&mut self, index: [u32; 3], number: u64) -> Result<(), Error> {
        (self.index, self.number) = (index, number);
        // A block starts with arbitrary contents of shared memory: here NaN.
        self.shared.fill(0xFF);
        self.order.begin();
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
        let one = self.draw(warps.len() as u64) as usize;
        let pace = [Pace::Alike, Pace::Alike, Pace::Behind(one), Pace::Ahead(one)][self.draw(4) as usize];
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
                // Slow warps must run if no other warp makes progress.
                if warp.done() || idle == 0 && pace.slow(*nth) && self.draw(SLOW) != 0 {
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
            if self.live == 0 {
                return self.left_behind();
            }
            got_on |= self.transfer()?;
            idle = if got_on || !self.transfers.is_empty() { 0 } else { idle + 1 };
            if idle > PATIENCE {
                return Err(self.deadlock(warps));
            }
        }
    }

    /// Refuses to end while copies to shared memory are pending.
    fn left_behind(&mut self) -> Result<(), Error> {
        match self.transfers.first() {
            None => Ok(()),
            Some(transfer) => {
                let what = format!(
                    "the block ends while a copy to {:#x} of shared memory is under way, whose barrier at {:#x} was not waited for",
                    transfer.to, transfer.barrier
                );
                let place = transfer.place.clone();
                self.transfers.clear();
                Err(Error::Fault { kind: Kind::Race, place, what })
            }
        }
    }

    fn deadlock(&self, warps: &[Warp]) -> Error {
        let mut what = String::from("no warp gets on:");
        let mut first = None;
        for warp in warps.iter().filter(|warp| !warp.done()) {
            first = first.or(Some(warp));
            let _ = write!(what, " warp {} waits in line {}{};", warp.number, warp.line(), warp.waits_for(self));
        }
        let place = first.map_or_else(Place::default, |warp| self.place(warp.number, warp.line()));
        Error::Fault { kind: Kind::Deadlock, place, what: what.trim_end_matches(';').into() }
    }

    /// A place in this block, for messages.
    pub fn place(&self, warp: u32, line: u32) -> Place {
        Place { kernel: self.launch.program.name.clone(), block: self.index, warp, line }
    }

    /// A random number below `below`, or 0 if the seed is 0.
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

    /// Pointer to `size` bytes of shared memory, after checks of bounds and alignment.
    #[inline(always)]
    pub fn shared(&mut self, at: u64, size: usize) -> Result<*mut u8, Failure> {
        if at < SHARED_START as u64 || at.saturating_add(size as u64) > self.shared.len() as u64 {
            let end = self.shared.len();
            return Err((Kind::Address, format!("{size} bytes at {at:#x} of shared memory, which ends at {end:#x}")));
        }
        if at & (size as u64 - 1) != 0 && size <= 16 && size.is_power_of_two() {
            return Err((Kind::Alignment, format!("{size} bytes at {at:#x} of shared memory")));
        }
        // SAFETY: the range was just checked to lie within.
        Ok(unsafe { self.shared.as_mut_ptr().add(at as usize) })
    }

    /// Pointer to `size` bytes of global memory, after checks of bounds and alignment.
    #[inline(always)]
    pub fn global(&mut self, at: u64, size: usize) -> Result<*mut u8, Failure> {
        if at < self.piece.0 || at.saturating_add(size as u64) > self.piece.1 {
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
                (parameters.start as u64, parameters.end as u64, None)
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

    /// Refuses to read bytes of global memory that were not written. The range must have been checked by `global`.
    #[inline(always)]
    pub fn global_reads(&self, at: u64, size: usize) -> Result<(), Failure> {
        let (begin, _, Some(written)) = self.piece else { return Ok(()) };
        match written.missing((at - begin) as usize, size) {
            None => Ok(()),
            Some(byte) => Err((
                Kind::Uninitialised,
                format!(
                    "{size} bytes at {at:#x} of global memory are read, and nothing was written to byte {byte} of the allocation"
                ),
            )),
        }
    }

    /// Whether none of these bytes of global memory was written. The range must have been checked by `global`.
    pub fn global_nothing(&self, at: u64, size: usize) -> bool {
        let (begin, _, Some(written)) = self.piece else { return false };
        let at = (at - begin) as usize;
        (at..at + size).all(|byte| written.missing(byte, 1).is_some())
    }

    /// Marks bytes of global memory as written. The range must have been checked by `global`.
    #[inline(always)]
    pub fn global_writes(&self, at: u64, size: usize) {
        if let (begin, _, Some(written)) = self.piece {
            written.mark((at - begin) as usize, size);
        }
    }

    /// Pointer for an address of a lane whose local memory is `local`, and the memory that it lies in.
    #[inline(always)]
    pub fn resolve(
        &mut self,
        space: Space,
        at: u64,
        size: usize,
        local: &mut [u8],
    ) -> Result<(*mut u8, Lies), Failure> {
        match space {
            Space::Shared => Ok((self.shared(at, size)?, Lies::Shared)),
            Space::Global => Ok((self.global(at, size)?, Lies::Global)),
            Space::Generic if at >> 56 == SHARED_WINDOW >> 56 => {
                Ok((self.shared(at - SHARED_WINDOW, size)?, Lies::Shared))
            }
            Space::Generic if at >> 56 == LOCAL_WINDOW >> 56 => {
                Ok((Self::local(at - LOCAL_WINDOW, size, local)?, Lies::Elsewhere))
            }
            Space::Generic => Ok((self.global(at, size)?, Lies::Global)),
            Space::Local => Ok((Self::local(at, size, local)?, Lies::Elsewhere)),
            Space::Parameter => {
                let bytes = self.launch.parameters;
                // A register that was given a parameter's name holds the host's address; an operand is the offset.
                let offset = at.checked_sub(bytes.as_ptr() as u64).unwrap_or(at) as usize;
                match bytes.get(offset..offset.saturating_add(size)) {
                    Some(bytes) => Ok((bytes.as_ptr().cast_mut(), Lies::Elsewhere)),
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

    // -- asynchronous reads of shared memory

    /// Tracks an asynchronous read.
    pub fn reads(&mut self, reading: Reading) {
        for page in &mut self.pages[reading.bytes.0 / PAGE..=(reading.bytes.1 - 1) / PAGE] {
            *page += 1;
        }
        self.readings.push(reading);
    }

    /// Ends the reads of a warp in all groups before this one, after the warp has waited for them.
    pub fn has_read(&mut self, reader: Reader, warp: u32, before: u64) {
        let (pages, order) = (&mut self.pages, &mut self.order);
        self.readings.retain(|reading| {
            let keep = reading.reader != reader || reading.warp != warp || reading.group >= before;
            if !keep {
                order.proxy_has_read(warp, reading.bytes, reading.line);
                for page in &mut pages[reading.bytes.0 / PAGE..=(reading.bytes.1 - 1) / PAGE] {
                    *page -= 1;
                }
            }
            keep
        });
    }

    /// Line of a bulk copy to global memory that a warp has not waited for.
    pub fn stores(&self, warp: u32) -> Option<u32> {
        let mut readings = self.readings.iter();
        readings.find(|reading| reading.reader == Reader::Store && reading.warp == warp).map(|reading| reading.line)
    }

    /// Refuses to write bytes that are still read asynchronously.
    #[inline(always)]
    pub fn writes(&self, at: usize, size: usize) -> Result<(), Failure> {
        if self.readings.is_empty() || self.pages[at / PAGE..=(at + size - 1) / PAGE].iter().all(|count| *count == 0) {
            return Ok(());
        }
        self.races(at, size)
    }

    #[cold]
    fn races(&self, at: usize, size: usize) -> Result<(), Failure> {
        for Reading { reader, warp, bytes: (begin, end), line, .. } in &self.readings {
            if at < *end && at + size > *begin {
                let reader = if *reader == Reader::Product { "product" } else { "bulk copy" };
                let what = format!(
                    "{size} bytes at {at:#x} of shared memory are written while the {reader} in line {line}, which warp {warp} has \
                     not waited for, may still read them"
                );
                return Err((Kind::Race, what));
            }
        }
        Ok(())
    }
}
