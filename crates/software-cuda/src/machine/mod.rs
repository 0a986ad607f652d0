//! Interpreter of programs: thread blocks run on threads of the host, the warps of a block in turn, 32 lanes at a time.
//!
//! Shared memory begins at [`SHARED_START`], as on hardware. Addresses of global memory and of parameters are the host's. The generic space
//! has windows for shared and for local memory, at addresses that the host does not use.

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

/// First address of shared memory.
pub const SHARED_START: usize = 1024;
/// Address of shared memory in the generic space.
pub const SHARED_WINDOW: u64 = 0x7100_0000_0000_0000;
/// Address of local memory in the generic space.
pub const LOCAL_WINDOW: u64 = 0x7200_0000_0000_0000;

/// Global memory that may be accessed: ranges in order, each with its first address, the address after its last, and which bytes were
/// written, if that is tracked.
#[derive(Clone, Debug, Default)]
pub struct Ranges(Vec<(u64, u64, Option<Arc<Written>>)>);

impl Ranges {
    /// Creates it from ranges in any order.
    pub fn new(pieces: Vec<(u64, u64, Option<Arc<Written>>)>) -> Ranges {
        let mut pieces = pieces;
        pieces.sort_unstable_by_key(|(begin, ..)| *begin);
        Ranges(pieces)
    }

    /// The range that contains an address.
    pub fn around(&self, at: u64) -> Option<(u64, u64, Option<&Written>)> {
        let nth = self.0.partition_point(|(begin, ..)| *begin <= at);
        let (begin, end, written) = self.0[..nth].last()?;
        (at < *end).then_some((*begin, *end, written.as_deref()))
    }
}

/// Settings of launches.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Number of threads of the host.
    pub threads: usize,
    /// Seed of the order of warps and the timing of copies; 0 for a fixed order and immediate copies.
    pub seed: u64,
    /// Whether to check the order of accesses, and waits for products before their registers are used.
    pub checks: bool,
}

/// A launch of a kernel.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub program: &'a Program,
    /// Number of blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// Parameters as stored in memory.
    pub parameters: &'a [u8],
    /// Global memory.
    pub memory: &'a Ranges,
    /// Settings.
    pub settings: Settings,
}

impl Launch<'_> {
    /// Runs all blocks.
    ///
    /// # Errors
    ///
    /// The first fault.
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
