//! A CUDA driver in software, for machines without a GPU: it presents itself as an NVIDIA Hopper and interprets PTX on the host.
//!
//! The library exports the functions of the CUDA driver API that CubeCL calls. A program that loads the driver at run time gets
//! this one where it is found as `libcuda.so`; `.ci/with-software-cuda` sees to that. Everything is done at once, in the calling
//! thread and some others, when it is asked for.
//!
//! Faults are told on stderr, with the line of the PTX, and returned by the launch. Beyond wrong results these are:
//!
//! - accesses outside allocations, and misaligned ones;
//! - waits that never end, with what barriers lack; barriers and collective instructions used as PTX does not allow;
//! - races of warps for shared memory, whatever the order in which they happened to run: accesses of different warps, one of them a
//!   write, that no barrier orders. Copies of lanes that were not waited for, copies to shared memory whose barrier was not, and bulk
//!   copies from it and products of warpgroups that still read what is written belong to them;
//! - missing fences: `fence.proxy.async` between a warp's write and what reads it through the asynchronous proxy, `wgmma.fence` before
//!   the first product of a warpgroup and after registers were written that products use;
//! - registers of products of warpgroups that are read or written before these were waited for;
//! - branches, addresses and results in global memory that depend on shared or global memory to which nothing was written;
//! - blocks that end while copies are under way.
//!
//! Not seen are: races of lanes of one warp, races for single bytes, races for global memory, and of allocations that a program
//! divides up itself what was written before.
//!
//! Warps run in a random order, and copies that run beside them come at a random time; of each launch in another one. In half of
//! the blocks one warp, drawn too, falls behind the others or runs ahead of them.
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

/// Kernels by their names, and the memory that variables of their module have.
#[derive(Debug, Default)]
pub struct Module {
    /// The kernels.
    pub kernels: HashMap<String, Program>,
    /// Variables in global memory: what each holds at first.
    pub globals: HashMap<String, Vec<u64>>,
}

impl Module {
    /// Reads PTX.
    ///
    /// # Errors
    ///
    /// What cannot be read or is not supported.
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

    /// Where variables lie in global memory.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.globals.values().map(|words| (words.as_ptr() as u64, words.as_ptr() as u64 + 8 * words.len() as u64))
    }
}
