//! The machine that runs programs: blocks on threads of the host, warps of a block in turn, 32 lanes at a time.
//!
//! Shared memory begins at [`SHARED_START`], as on the hardware. Addresses of global memory and of parameters are those of the
//! host; the generic space has windows, where the host has nothing, for shared and for local memory.

mod arithmetic;
mod block;
mod change;
mod decode;
mod float;
mod flow;
mod fragments;
pub mod lanes;
mod matrix;
mod mbarrier;
mod operands;
mod order;
pub mod program;
mod registers;
mod spoils;
pub mod tensor;
mod warp;
pub mod written;

pub use decode::decode;

use crate::error::Error;
use block::Block;
use program::Program;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use written::Written;

/// The first address of shared memory.
pub const SHARED_START: usize = 1024;
/// Where the generic space has shared memory.
pub const SHARED_WINDOW: u64 = 0x7100_0000_0000_0000;
/// Where the generic space has local memory.
pub const LOCAL_WINDOW: u64 = 0x7200_0000_0000_0000;

/// Global memory that may be accessed: pieces in order, each from its first address to the one past its last, and what of it was
/// written, if that is looked after.
#[derive(Clone, Debug, Default)]
pub struct Ranges(Vec<(u64, u64, Option<Arc<Written>>)>);

impl Ranges {
    /// Of pieces in any order.
    pub fn new(pieces: Vec<(u64, u64, Option<Arc<Written>>)>) -> Ranges {
        let mut pieces = pieces;
        pieces.sort_unstable_by_key(|(begin, ..)| *begin);
        Ranges(pieces)
    }

    /// The piece that an address lies in.
    pub fn around(&self, at: u64) -> Option<(u64, u64, Option<&Written>)> {
        let nth = self.0.partition_point(|(begin, ..)| *begin <= at);
        let (begin, end, written) = self.0[..nth].last()?;
        (at < *end).then_some((*begin, *end, written.as_deref()))
    }
}

/// How launches are run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Threads of the host.
    pub threads: usize,
    /// What the order of warps and the time of copies are drawn from; 0 for the plain order and copies at once.
    pub seed: u64,
    /// Whether accesses are checked to be ordered, and registers of products to be waited for.
    pub checks: bool,
}

/// A launch of a kernel.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub program: &'a Program,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: [u32; 3],
    /// Bytes of shared memory that the launch adds.
    pub dynamic_shared: usize,
    /// Parameters as they lie in memory.
    pub parameters: &'a [u8],
    /// Global memory.
    pub memory: &'a Ranges,
    /// How it is run.
    pub settings: Settings,
}

impl Launch<'_> {
    /// Runs all blocks.
    ///
    /// # Errors
    ///
    /// The first fault that is met.
    pub fn run(&self) -> Result<(), Error> {
        let count = self.grid.iter().map(|blocks| u64::from(*blocks)).product::<u64>();
        let next = AtomicU64::new(0);
        let failed = Mutex::new(None);
        let work = || {
            let mut block = Block::new(self);
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                if nth >= count {
                    return;
                }
                let [x, y] = [u64::from(self.grid[0]), u64::from(self.grid[1])];
                let index = [(nth % x) as u32, (nth / x % y) as u32, (nth / x / y) as u32];
                if let Err(error) = block.run(index, nth) {
                    next.store(count, Ordering::Relaxed);
                    failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
                    return;
                }
            }
        };
        let threads = (self.settings.threads as u64).min(count);
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        match failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
