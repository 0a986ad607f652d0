//! What is timed: the kernels called directly, and three attentions through Burn's tensors.

mod burn;
mod ours;

pub(crate) use ours::Tensors;

use crate::case::{Case, Pass};
use crate::data::{Data, Results};
use crate::error::Error;
use crate::timing::Work;
use clap::ValueEnum;
use flash_attention_kernels::Kernel;
use serde::{Deserialize, Serialize};

/// An implementation of attention in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Implementation {
    /// This repository's.
    Ours,
    /// Burn's `module::attention`.
    Burn,
    /// Products, mask, softmax: attention as it is written down, in Burn's operations.
    Composed,
}

impl Implementation {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Implementation::Ours => "ours",
            Implementation::Burn => "burn",
            Implementation::Composed => "composed",
        }
    }

    /// Whether it has this pass: only our kernels can be called one at a time.
    pub fn has(self, pass: Pass) -> bool {
        match self {
            Implementation::Ours => true,
            Implementation::Burn | Implementation::Composed => matches!(pass, Pass::Forward | Pass::Autodiff),
        }
    }
}

/// One pass over one problem, ready to be called.
pub trait Prepared: Work {
    /// The kernel that runs.
    fn kernel(&self) -> String;
    /// What the last call computed from the first inputs.
    fn results(&mut self) -> Result<Results, Error>;
}

/// Puts `data` on the device, ready for the pass.
pub fn prepare(
    device: &cubecl::Device,
    implementation: Implementation,
    kernel: Option<Kernel>,
    pass: Pass,
    data: &[Data],
) -> Result<Box<dyn Prepared>, Error> {
    match (implementation, pass) {
        (Implementation::Ours, Pass::Forward | Pass::Backward | Pass::Both) => {
            Ok(Box::new(ours::Kernels::new(device.client(), kernel, pass, data)?))
        }
        _ => Ok(Box::new(burn::Tensors::new(device, implementation, pass, data)?)),
    }
}

/// How many sets of inputs take turns, so that none is found in a cache: 256 MB of them, more than any GPU caches.
pub fn input_sets(case: &Case) -> usize {
    (256_000_000 / case.bytes().max(1)).clamp(1, 8)
}
