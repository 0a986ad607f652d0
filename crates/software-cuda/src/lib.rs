//! A CUDA driver in software, for machines without a GPU. It reports an NVIDIA Hopper device and interprets PTX on the host.
//!
//! The library exports the functions of the CUDA driver API that CubeCL calls. A program that loads the driver at run time loads this
//! library if it is found as `libcuda.so`; `.ci/with-software-cuda` arranges that. All calls are synchronous: they run in the calling
//! thread, and launches also in some others. Launches can be recorded in a graph; copies cannot.
//!
//! Faults are reported on stderr, with the line of the PTX, and returned by the launch. In addition to wrong results, these faults are
//! detected:
//!
//! - accesses outside of allocations, and misaligned accesses;
//! - waits that never end, with the arrivals that barriers lack; barriers and collective instructions used in ways that PTX does not allow;
//! - races of warps in shared memory, independent of the order in which they happened to run: accesses of different warps, one of them a
//!   write, that no barrier orders. These include `cp.async` copies that were not waited for, bulk copies to shared memory whose barrier
//!   was not waited for, and writes to shared memory that a bulk copy or a warpgroup's product may still read;
//! - missing fences: `fence.proxy.async` between a warp's write and a read through the asynchronous proxy; `wgmma.fence` before a
//!   warpgroup's first product, and after a write to a register that a product uses;
//! - registers of a warpgroup's products that are read or written before the products are waited for;
//! - branches, addresses and results in global memory that depend on unwritten shared or global memory;
//! - blocks that end while copies are pending.
//!
//! Not detected are races between lanes of one warp, races for single bytes, races for global memory, and reads of unwritten memory in
//! allocations that the program subdivides and reuses.
//!
//! Warps run in a random order, and asynchronous copies complete at random times, which differ between launches. In half of the blocks, one
//! random warp falls behind the others or runs ahead of them.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `SOFTWARE_CUDA_MULTIPROCESSORS` | multiprocessors that the device has | 4 |
//! | `SOFTWARE_CUDA_THREADS` | threads of the host that run blocks | as many as there are processors |
//! | `SOFTWARE_CUDA_SEED` | what orders and times are drawn from; 0 for fixed ones | the launch's number |
//! | `SOFTWARE_CUDA_CHECKS` | 0: no races, fences and registers of products are looked for | 1 |
//! | `SOFTWARE_CUDA_UNINITIALISED` | 0: global memory counts as written | 1 |
//! | `SOFTWARE_CUDA_MEMORY` | bytes of memory that the device has | 141 GiB |
//! | `SOFTWARE_CUDA_STICKY` | 1: after a launch that failed all calls fail with its error, as on hardware | 0 |
//! | `SOFTWARE_CUDA_PTX` | a directory: keep the PTX of modules there | |
//! | `SOFTWARE_CUDA_TRACE` | 1: say on stderr how long each launch took | |

pub mod driver;
mod error;
pub mod machine;
pub mod ptx;

pub use error::{Error, Kind, Place};

use machine::program::Program;
use std::collections::HashMap;

/// Kernels by name, and the memory of the module's variables.
#[derive(Debug, Default)]
pub struct Module {
    /// The kernels.
    pub kernels: HashMap<String, Program>,
    /// Variables in global memory, with their contents.
    pub globals: HashMap<String, Vec<u64>>,
}

impl Module {
    /// Parses and decodes PTX.
    ///
    /// # Errors
    ///
    /// If the text cannot be parsed or is not supported.
    pub fn new(text: &str) -> Result<Module, Error> {
        let parsed = ptx::parse(text)?;
        let mut module = Module::default();
        let (shared, others): (Vec<_>, Vec<_>) = parsed.variables.into_iter().partition(|v| v.space == "shared");
        for variable in others {
            let mut words = vec![0u64; variable.size.max(variable.bytes.len()).div_ceil(8)];
            for (nth, byte) in variable.bytes.iter().enumerate() {
                words[nth / 8] |= u64::from(*byte) << (8 * (nth % 8));
            }
            module.globals.insert(variable.name, words);
        }
        let globals = module.globals.iter().map(|(name, words)| (name.clone(), words.as_ptr() as u64)).collect();
        for function in &parsed.functions {
            let program = machine::decode(function, &shared, &globals)?;
            module.kernels.insert(function.name.clone(), program);
        }
        Ok(module)
    }

    /// Address ranges of the variables in global memory.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.globals.values().map(|words| (words.as_ptr() as u64, words.as_ptr() as u64 + 8 * words.len() as u64))
    }
}
