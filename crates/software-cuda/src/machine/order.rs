//! Happens-before order of accesses to shared memory, by warps and by asynchronous operations.
//!
//! Every warp has a clock, and barriers tell it about the clocks of others: vector clocks, as in race detectors. For each piece of shared
//! memory, the last write and the reads since then are recorded. An access is a race if it conflicts with an earlier access that is not
//! known to have happened before, whatever order the warps happened to run in.
//!
//! Products of warpgroups and bulk copies access shared memory through the asynchronous proxy. They see writes through the generic proxy
//! only after `fence.proxy.async`. A second vector of clocks therefore records the accesses that were fenced.
//!
//! Lanes of a warp are not distinguished, nor single bytes from their neighbours. Reads of less than four bytes are not recorded.

use super::block::Failure;
use crate::error::Kind;

/// Number of clocks: of warps, of barriers in shared memory, and two special ones.
const AGENTS: usize = 128;
/// Clock of the first barrier.
const FIRST_BARRIER: u32 = 32;
/// Clock of memory that may be accessed at any time: it always counts as known.
const ANYONE: u32 = 126;
/// Clock of memory that must not be read: it never counts as known.
const NOBODY: u32 = 127;
/// Bits of a clock in a stamp.
const BITS: u32 = 25;

/// Clock and time of a write (the upper half), and its line.
type Stamp = u64;

/// Times of the clock `NOBODY`: nothing was written yet, a copy was not waited for, a spoiled value was written.
const UNWRITTEN: u32 = 1;
const UNDER_WAY: u32 = 2;
const WORTHLESS: u32 = 3;

/// Stamp of memory that was not written yet.
const NEVER: Stamp = ((NOBODY << BITS | UNWRITTEN) as u64) << 32;

fn stamp(agent: u32, clock: u32, line: u32) -> Stamp {
    u64::from(agent << BITS | clock) << 32 | u64::from(line)
}

fn agent(stamp: Stamp) -> u32 {
    (stamp >> (32 + BITS)) as u32
}

fn clock(stamp: Stamp) -> u32 {
    (stamp >> 32) as u32 & ((1 << BITS) - 1)
}

/// Latest known time of each clock.
#[derive(Clone, Debug)]
struct Known([u32; AGENTS]);

impl Known {
    fn new() -> Known {
        let mut known = Known([0; AGENTS]);
        known.0[ANYONE as usize] = u32::MAX;
        known
    }

    fn join(&mut self, other: &Known) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
    }

    #[inline(always)]
    fn sees(&self, stamp: Stamp) -> bool {
        clock(stamp) <= self.0[agent(stamp) as usize & (AGENTS - 1)]
    }
}

/// Knowledge of a warp, or that a barrier passes on: of all accesses, and of those that the asynchronous proxy sees.
#[derive(Clone, Debug)]
struct View {
    all: Known,
    fenced: Known,
}

impl View {
    fn new() -> View {
        View { all: Known::new(), fenced: Known::new() }
    }

    fn join(&mut self, other: &View) {
        self.all.join(&other.all);
        self.fenced.join(&other.fenced);
    }
}

/// Knowledge that a barrier gathers from arriving warps, and that it gives to warps that leave.
#[derive(Clone, Debug)]
struct Meeting {
    gathering: View,
    done: View,
}

impl Meeting {
    fn new() -> Meeting {
        Meeting { gathering: View::new(), done: View::new() }
    }

    fn complete(&mut self) {
        self.done = std::mem::replace(&mut self.gathering, View::new());
    }
}

/// An mbarrier in shared memory.
#[derive(Clone, Debug)]
struct Phases {
    at: usize,
    /// Number of completed phases.
    over: u32,
    meeting: Meeting,
}

/// An asynchronous read, which this warp has waited for at this time.
struct Waited {
    bytes: (usize, usize),
    warp: u32,
    clock: u32,
    line: u32,
}

/// Order of a block's accesses to its shared memory.
pub struct Order {
    /// Last write of every two bytes.
    writes: Vec<Stamp>,
    /// For every four bytes, the time at which each warp read them last.
    reads: Vec<u32>,
    warps: Vec<View>,
    named: Vec<Meeting>,
    barriers: Vec<Phases>,
    waited: Vec<Waited>,
    /// Whether a page contains bytes of an entry of `waited`.
    pages: Vec<bool>,
    /// Whether accesses are tracked.
    on: bool,
}

/// Bytes of shared memory in a page.
const PAGE: usize = 256;

impl Order {
    /// Creates the order of a block with this number of bytes and warps.
    pub fn new(bytes: usize, warps: usize, on: bool) -> Order {
        let (bytes, warps) = if on { (bytes, warps) } else { (0, 0) };
        Order {
            writes: vec![NEVER; bytes.div_ceil(2) + 8],
            reads: vec![0; (bytes.div_ceil(4) + 4) * warps],
            warps: vec![View::new(); warps],
            named: vec![Meeting::new(); 16],
            barriers: Vec::new(),
            waited: Vec::new(),
            pages: vec![false; bytes.div_ceil(PAGE) + 1],
            on,
        }
    }

    /// Starts a block: no memory is written, and everything before has happened before.
    pub fn begin(&mut self) {
        if !self.on {
            return;
        }
        self.writes.fill(NEVER);
        self.waited.clear();
        self.pages.fill(false);
        self.barriers.clear();
        self.named.fill(Meeting::new());
        let mut now: Vec<u32> = self.warps.iter().enumerate().map(|(warp, view)| view.all.0[warp] + 1).collect();
        if now.iter().any(|clock| *clock > 1 << (BITS - 1)) {
            self.reads.fill(0);
            now.fill(1);
        }
        let mut start = View::new();
        start.all.0[..now.len()].copy_from_slice(&now);
        self.warps.fill(start);
        self.warps.iter_mut().enumerate().for_each(|(warp, view)| view.all.0[warp] += 1);
    }

    fn now(&self, warp: u32) -> u32 {
        self.warps[warp as usize].all.0[warp as usize]
    }

    fn tick(&mut self, warp: u32) {
        self.warps[warp as usize].all.0[warp as usize] += 1;
    }

    // -- accesses of warps

    /// A warp reads.
    #[inline(always)]
    pub fn read(&mut self, warp: u32, at: usize, size: usize) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        let stamps = &self.writes[at / 2..(at + size).div_ceil(2)];
        let first = stamps[0];
        let known = &self.warps[warp as usize].all;
        if !(stamps.iter().fold(0, |sum, stamp| sum | (stamp ^ first)) == 0 && known.sees(first)) {
            self.reads_early(warp, at, size)?;
        }
        let (now, warps) = (self.now(warp), self.warps.len());
        for word in at.div_ceil(4)..(at + size) / 4 {
            self.reads[word * warps + warp as usize] = now;
        }
        Ok(())
    }

    #[cold]
    fn reads_early(&self, warp: u32, at: usize, size: usize) -> Result<(), Failure> {
        let known = &self.warps[warp as usize].all;
        match self.writes[at / 2..(at + size).div_ceil(2)].iter().find(|stamp| !known.sees(**stamp)) {
            Some(stamp) => Err(self.early(*stamp, at, size)),
            None => Ok(()),
        }
    }

    /// Failure of a read of memory with this stamp.
    fn early(&self, stamp: Stamp, at: usize, size: usize) -> Failure {
        let (line, place) = (stamp as u32, format!("{size} bytes at {at:#x} of shared memory are read"));
        match agent(stamp) {
            NOBODY if stamp == NEVER => {
                (Kind::Uninitialised, format!("{place}, which nothing in this block has written"))
            }
            NOBODY if clock(stamp) == WORTHLESS => {
                (Kind::Uninitialised, format!("{place}, where line {line} has put what nothing was written to"))
            }
            NOBODY => (Kind::Race, format!("{place} before the copy in line {line} was waited for")),
            agent if agent >= FIRST_BARRIER => {
                let barrier = self.barriers.get((agent - FIRST_BARRIER) as usize).map_or(0, |phases| phases.at);
                let what = format!(
                    "{place} before the barrier at {barrier:#x}, where the copy in line {line} counts, was waited for"
                );
                (Kind::Race, what)
            }
            agent => (Kind::Race, format!("{place} with no barrier after warp {agent} wrote them in line {line}")),
        }
    }

    /// A warp writes. Writes of 1 byte are not tracked.
    #[inline(always)]
    pub fn write(&mut self, warp: u32, at: usize, size: usize, line: u32) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        if size == 1 {
            self.writes[at / 2] = stamp(ANYONE, 0, line);
            return Ok(());
        }
        self.overwrites(warp, at, size)?;
        let stamp = stamp(warp, self.now(warp), line);
        self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp);
        Ok(())
    }

    /// A warp changes memory atomically. Other warps may do so concurrently, so this conflicts with plain accesses as a read does.
    pub fn change(&mut self, warp: u32, at: usize, size: usize) -> Result<(), Failure> {
        self.read(warp, at, size)
    }

    /// Refuses to write memory that others may still access.
    #[inline(always)]
    fn overwrites(&self, warp: u32, at: usize, size: usize) -> Result<(), Failure> {
        let known = &self.warps[warp as usize].all;
        let mut last = NEVER;
        for stamp in &self.writes[at / 2..(at + size).div_ceil(2)] {
            let nothing = agent(*stamp) == NOBODY && clock(*stamp) != UNDER_WAY;
            if *stamp != last && !nothing && !known.sees(*stamp) {
                return Err(self.written(*stamp, at, size));
            }
            last = *stamp;
        }
        let warps = self.warps.len();
        let reads = &self.reads[at / 4 * warps..(at + size).div_ceil(4) * warps];
        for clocks in reads.chunks_exact(warps) {
            if let Some(other) = (0..warps).find(|other| clocks[*other] > known.0[*other]) {
                return Err((
                    Kind::Race,
                    format!(
                        "{size} bytes at {at:#x} of shared memory are written with no barrier after warp {other} read them"
                    ),
                ));
            }
        }
        if self.pages[at / PAGE..=(at + size - 1) / PAGE].contains(&true) {
            for Waited { bytes: (begin, end), warp: other, clock, line } in &self.waited {
                if at < *end && at + size > *begin && *clock > known.0[*other as usize] {
                    let what = format!(
                        "{size} bytes at {at:#x} of shared memory are written with no barrier after warp {other} waited for what \
                         reads them in line {line}"
                    );
                    return Err((Kind::Race, what));
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn written(&self, stamp: Stamp, at: usize, size: usize) -> Failure {
        let who = match agent(stamp) {
            NOBODY => format!("line {} has begun to copy, which was not waited for", stamp as u32),
            agent if agent >= FIRST_BARRIER => {
                format!("line {} has begun to copy, whose barrier was not waited for", stamp as u32)
            }
            agent => format!("warp {agent} wrote them in line {}", stamp as u32),
        };
        (Kind::Race, format!("{size} bytes at {at:#x} of shared memory are written with no barrier after {who}"))
    }

    /// Whether none of these bytes was written.
    pub fn nothing(&self, at: usize, size: usize) -> bool {
        let worth = |stamp: &Stamp| agent(*stamp) != NOBODY || clock(*stamp) == UNDER_WAY;
        self.on && !self.writes[at / 2..(at + size).div_ceil(2)].iter().any(worth)
    }

    /// Marks bytes that were just written by this line as spoiled.
    pub fn forget(&mut self, at: usize, size: usize, line: u32) {
        if self.on {
            self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp(NOBODY, WORTHLESS, line));
        }
    }

    // -- cp.async

    /// A warp issues a copy to shared memory, which it has to wait for.
    pub fn copy_begins(&mut self, warp: u32, at: usize, size: usize, line: u32) -> Result<(), Failure> {
        if self.on {
            self.overwrites(warp, at, size)?;
            self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp(NOBODY, UNDER_WAY, line));
        }
        Ok(())
    }

    /// The warp has waited for the copy.
    pub fn copy_ends(&mut self, warp: u32, at: usize, size: usize, line: u32) {
        if self.on {
            let stamp = stamp(warp, self.now(warp), line);
            self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp);
        }
    }

    // -- the asynchronous proxy

    /// `fence.proxy.async`: the asynchronous proxy sees everything that the warp knows of.
    pub fn fence(&mut self, warp: u32) {
        if self.on {
            let view = &mut self.warps[warp as usize];
            view.fenced = view.all.clone();
            self.tick(warp);
        }
    }

    /// Refuses a read through the asynchronous proxy that is not ordered after the writes.
    #[inline(always)]
    pub fn proxy_reads(&self, warp: u32, at: usize, size: usize) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        let known = &self.warps[warp as usize].fenced;
        let mut last = None;
        for stamp in &self.writes[at / 2..(at + size).div_ceil(2)] {
            if last != Some(*stamp) && !known.sees(*stamp) {
                return Err(self.unfenced(warp, *stamp, at, size));
            }
            last = Some(*stamp);
        }
        Ok(())
    }

    #[cold]
    fn unfenced(&self, warp: u32, stamp: Stamp, at: usize, size: usize) -> Failure {
        if !self.warps[warp as usize].all.sees(stamp) {
            return self.early(stamp, at, size);
        }
        let (line, writer) = (stamp as u32, agent(stamp));
        let what = format!(
            "{size} bytes at {at:#x} of shared memory are read through the asynchronous proxy with no `fence.proxy.async` after \
             warp {writer} wrote them in line {line}"
        );
        (Kind::Fence, what)
    }

    /// A warp has waited for an asynchronous read of these bytes.
    pub fn proxy_has_read(&mut self, warp: u32, bytes: (usize, usize), line: u32) {
        if !self.on {
            return;
        }
        let clock = self.now(warp);
        match self.waited.iter_mut().find(|waited| waited.warp == warp && waited.bytes == bytes) {
            Some(waited) => (waited.clock, waited.line) = (clock, line),
            None => self.waited.push(Waited { bytes, warp, clock, line }),
        }
        self.pages[bytes.0 / PAGE..=(bytes.1 - 1) / PAGE].fill(true);
    }

    /// A warp issues a copy to shared memory whose bytes a barrier counts.
    pub fn proxy_writes(
        &mut self,
        warp: u32,
        at: usize,
        size: usize,
        barrier: usize,
        line: u32,
    ) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        self.proxy_reads(warp, barrier, 8)?;
        self.overwrites(warp, at, size)?;
        let nth = self.barrier(barrier);
        let stamp = match self.barriers.get(nth) {
            Some(phases) => stamp(FIRST_BARRIER + nth as u32, phases.over + 1, line),
            None => stamp(ANYONE, 0, line),
        };
        self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp);
        Ok(())
    }

    // -- barriers

    /// A warp arrives at a named barrier, possibly as the last one.
    pub fn meets(&mut self, warp: u32, id: usize, complete: bool) {
        if self.on {
            self.named[id].gathering.join(&self.warps[warp as usize]);
            self.tick(warp);
            if complete {
                self.named[id].complete();
            }
        }
    }

    /// A warp leaves a named barrier.
    pub fn leaves(&mut self, warp: u32, id: usize) {
        if self.on {
            self.warps[warp as usize].join(&self.named[id].done);
        }
    }

    /// Index of a barrier in shared memory. It is past the end if there are too many barriers to track.
    fn barrier(&mut self, at: usize) -> usize {
        if let Some(nth) = self.barriers.iter().position(|phases| phases.at == at) {
            return nth;
        }
        if self.barriers.len() < (ANYONE - FIRST_BARRIER) as usize {
            self.barriers.push(Phases { at, over: 0, meeting: Meeting::new() });
            return self.barriers.len() - 1;
        }
        usize::MAX
    }

    /// Refuses a barrier in shared memory if its initialisation did not happen before.
    pub fn uses(&self, warp: u32, at: usize) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        match self.warps[warp as usize].all.sees(self.writes[at / 2]) {
            true => Ok(()),
            false => Err(self.early(self.writes[at / 2], at, 8)),
        }
    }

    /// A warp arrives at a barrier in shared memory. What the warp does afterwards is not part of the phase.
    pub fn arrives(&mut self, warp: u32, at: usize) {
        if !self.on {
            return;
        }
        let nth = self.barrier(at);
        if let Some(phases) = self.barriers.get_mut(nth) {
            phases.meeting.gathering.join(&self.warps[warp as usize]);
        }
    }

    /// The arrival is complete: the warp's clock advances.
    pub fn arrived(&mut self, warp: u32) {
        if self.on {
            self.tick(warp);
        }
    }

    /// A phase of a barrier in shared memory completes.
    pub fn phase_ends(&mut self, at: usize) {
        if !self.on {
            return;
        }
        let nth = self.barrier(at);
        if let Some(phases) = self.barriers.get_mut(nth) {
            phases.over += 1;
            phases.meeting.complete();
            let (agent, over) = (FIRST_BARRIER as usize + nth, phases.over);
            phases.meeting.done.all.0[agent] = over;
            phases.meeting.done.fenced.0[agent] = over;
        }
    }

    /// A warp has observed that a phase is complete.
    pub fn phase_is_over(&mut self, warp: u32, at: usize) {
        if !self.on {
            return;
        }
        let nth = self.barrier(at);
        if let Some(phases) = self.barriers.get(nth) {
            self.warps[warp as usize].join(&phases.meeting.done);
        }
    }
}
