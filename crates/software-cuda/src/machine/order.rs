//! What is ordered before what: accesses to shared memory by warps and by what runs beside them.
//!
//! Every warp has a clock, and knows of the other clocks what barriers have told it: a happens-before relation by vector clocks, as
//! race detectors keep it. Shared memory remembers who wrote it last and who has read it since. An access is a race if the one that
//! it conflicts with is not known to have happened before, whatever order the warps happened to run in.
//!
//! Products of warpgroups and bulk copies access shared memory through the asynchronous proxy. What was written through the generic
//! one they see only after `fence.proxy.async`; so a second vector of clocks says up to where that has been done.
//!
//! Lanes of a warp are not told apart, nor neighbours of single bytes. Reads of less than four bytes are not remembered.

use super::block::Failure;
use crate::error::Kind;

/// Clocks that are told apart: of warps, of barriers in shared memory, and two that are none.
const AGENTS: usize = 128;
/// The first barrier's.
const FIRST_BARRIER: u32 = 32;
/// What everybody may access at any time: this clock is always known.
const ANYONE: u32 = 126;
/// What nobody may read: this clock is never known.
const NOBODY: u32 = 127;
/// Bits of a clock in a stamp.
const BITS: u32 = 25;

/// Who wrote, when (the upper half), and in which line.
type Stamp = u64;

/// Times of nobody's: when nothing was written yet, when a copy was not waited for, when nothing was written to what is written.
const UNWRITTEN: u32 = 1;
const UNDER_WAY: u32 = 2;
const WORTHLESS: u32 = 3;

/// Nothing was written yet.
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

/// What is known of each clock.
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

/// What a warp knows, or a barrier hands on: of accesses, and of those that the asynchronous proxy sees.
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

/// What those who come to a barrier know, and those who leave it.
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

/// A barrier in shared memory.
#[derive(Clone, Debug)]
struct Phases {
    at: usize,
    /// Those that are over.
    over: u32,
    meeting: Meeting,
}

/// What was read through the asynchronous proxy and waited for by this warp at this time.
struct Waited {
    bytes: (usize, usize),
    warp: u32,
    clock: u32,
    line: u32,
}

/// The order of a block's accesses to its shared memory.
pub struct Order {
    /// For every two bytes.
    writes: Vec<Stamp>,
    /// For every four bytes, the clock of each warp that read them.
    reads: Vec<u32>,
    warps: Vec<View>,
    named: Vec<Meeting>,
    barriers: Vec<Phases>,
    waited: Vec<Waited>,
    /// Pages that something in `waited` lies in.
    pages: Vec<bool>,
    /// Whether any of this is done.
    on: bool,
}

/// Bytes of shared memory that are looked up together.
const PAGE: usize = 256;

impl Order {
    /// Of a block with so many bytes and warps.
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

    /// Begins a block: nothing is written, and all that was before is over.
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

    /// What is wrong with a read of what was written so.
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

    /// A warp writes; `size` 1 is not looked after.
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

    /// A warp changes memory atomically, which others may do, too: to plain accesses that is a read.
    pub fn change(&mut self, warp: u32, at: usize, size: usize) -> Result<(), Failure> {
        self.read(warp, at, size)
    }

    /// Refuses to write what somebody else may still access.
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

    /// Whether nothing was written to any of these bytes.
    pub fn nothing(&self, at: usize, size: usize) -> bool {
        let worth = |stamp: &Stamp| agent(*stamp) != NOBODY || clock(*stamp) == UNDER_WAY;
        self.on && !self.writes[at / 2..(at + size).div_ceil(2)].iter().any(worth)
    }

    /// What was just written in this line is worth nothing.
    pub fn forget(&mut self, at: usize, size: usize, line: u32) {
        if self.on {
            self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp(NOBODY, WORTHLESS, line));
        }
    }

    // -- copies of single lanes

    /// A warp asks for a copy to shared memory, which it has to wait for.
    pub fn copy_begins(&mut self, warp: u32, at: usize, size: usize, line: u32) -> Result<(), Failure> {
        if self.on {
            self.overwrites(warp, at, size)?;
            self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp(NOBODY, UNDER_WAY, line));
        }
        Ok(())
    }

    /// It has waited for it.
    pub fn copy_ends(&mut self, warp: u32, at: usize, size: usize, line: u32) {
        if self.on {
            let stamp = stamp(warp, self.now(warp), line);
            self.writes[at / 2..(at + size).div_ceil(2)].fill(stamp);
        }
    }

    // -- the asynchronous proxy

    /// `fence.proxy.async`: what a warp knows of, the asynchronous proxy sees.
    pub fn fence(&mut self, warp: u32) {
        if self.on {
            let view = &mut self.warps[warp as usize];
            view.fenced = view.all.clone();
            self.tick(warp);
        }
    }

    /// Refuses to have these bytes read through the asynchronous proxy.
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

    /// A warp has waited for what reads these bytes through the asynchronous proxy.
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

    /// A warp asks for a copy to shared memory that counts at a barrier.
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

    /// A warp comes to a named barrier, which that may complete.
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

    /// The number of a barrier in shared memory; past the last one if there are too many to be told apart.
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

    /// Refuses a barrier in shared memory whose initialisation a warp cannot know of.
    pub fn uses(&self, warp: u32, at: usize) -> Result<(), Failure> {
        if !self.on {
            return Ok(());
        }
        match self.warps[warp as usize].all.sees(self.writes[at / 2]) {
            true => Ok(()),
            false => Err(self.early(self.writes[at / 2], at, 8)),
        }
    }

    /// A warp arrives at a barrier in shared memory: what comes after that is not part of the phase.
    pub fn arrives(&mut self, warp: u32, at: usize) {
        if !self.on {
            return;
        }
        let nth = self.barrier(at);
        if let Some(phases) = self.barriers.get_mut(nth) {
            phases.meeting.gathering.join(&self.warps[warp as usize]);
        }
    }

    /// It has done so.
    pub fn arrived(&mut self, warp: u32) {
        if self.on {
            self.tick(warp);
        }
    }

    /// A phase of a barrier in shared memory is over.
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

    /// A warp has seen that.
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
