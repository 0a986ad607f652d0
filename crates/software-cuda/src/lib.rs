//! A CUDA driver in software, for machines without a GPU: it presents itself as an NVIDIA Hopper and interprets PTX on the host.
//!
//! The library exports the functions of the CUDA driver API that CubeCL calls. A program that loads the driver at run time gets
//! this one where it is found as `libcuda.so`; `.ci/with-software-cuda` sees to that. Everything is done at once, in the calling
//! thread and some others, when it is asked for.
//!
//! Faults are told on stderr, with the line of the PTX, and returned by the launch. Beyond wrong results these are: accesses
//! outside allocations, misaligned ones, waits that never end, barriers and collective instructions used as PTX does not allow,
//! and shared memory that is written while a warpgroup's product may still read it. Warps run in a random order, and copies that
//! run beside them come at a random time.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `SOFTWARE_CUDA_MULTIPROCESSORS` | multiprocessors that the device has | 4 |
//! | `SOFTWARE_CUDA_THREADS` | threads of the host that run blocks | as many as there are processors |
//! | `SOFTWARE_CUDA_SEED` | what orders and times are drawn from; 0 for fixed ones | 1 |
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
