//! What is timed: the kernels called directly, and three attentions through Burn's tensors.

mod burn;
mod feed;
mod ours;

pub(crate) use ours::Tensors;

use crate::case::{Case, Pass, Variant};
use crate::data::{Data, Results};
use crate::error::Error;
use crate::timing::Work;
use clap::ValueEnum;
use flash_attention_kernels::{BackwardOrder, Dtype, Kernel, Precision};
use serde::{Deserialize, Serialize};

/// An implementation of attention in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Implementation {
    /// This repository's.
    Ours,
    /// The same with sums of the backward in whichever order is fastest.
    OursFast,
    /// The same with factors of f32 rounded to tf32.
    OursTf32,
    /// Burn's `module::attention`.
    Burn,
    /// Products, mask, softmax: attention as it is written down, in Burn's operations.
    Composed,
    /// The two products of the forward alone, in Burn's operations: what its matrix products leave to be had. No attention, so
    /// nothing is compared with the oracle.
    Products,
}

impl Implementation {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Implementation::Ours => "ours",
            Implementation::OursFast => "ours-fast",
            Implementation::OursTf32 => "ours-tf32",
            Implementation::Burn => "burn",
            Implementation::Composed => "composed",
            Implementation::Products => "products",
        }
    }

    /// In which order its backward adds up, as far as it can be asked.
    pub fn backward_order(self) -> BackwardOrder {
        match self {
            Implementation::OursFast => BackwardOrder::Fast,
            _ => BackwardOrder::Deterministic,
        }
    }

    /// How precisely it multiplies f32, as far as it can be asked.
    pub fn precision(self) -> Precision {
        match self {
            Implementation::OursTf32 => Precision::Tf32,
            _ => Precision::Full,
        }
    }

    /// Whether it is this repository's.
    pub fn is_ours(self) -> bool {
        matches!(self, Implementation::Ours | Implementation::OursFast | Implementation::OursTf32)
    }

    /// Whether it has this pass of its own: only our kernels can be called one at a time, the order of the backward is none of
    /// the forward's business, tf32 none of half precision's, and products know no causality.
    pub fn has(self, case: &Case, pass: Pass) -> bool {
        match self {
            Implementation::Products => pass == Pass::Forward && !case.causal && case.variant == Variant::None,
            Implementation::Ours => true,
            Implementation::OursFast => pass != Pass::Forward,
            Implementation::OursTf32 => case.dtype == Dtype::F32,
            // They know neither functions nor blocks, draw otherwise what is dropped, and Burn's has no sinks.
            _ if case.variant.is_function() => false,
            _ if matches!(
                case.variant,
                Variant::Dropout | Variant::Packed(_) | Variant::Documents | Variant::Lengths
            ) =>
            {
                false
            }
            Implementation::Burn if case.variant == Variant::Sinks => false,
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

/// Puts `data` on the device, ready for the pass. Its problem says in which order our backward adds up, and how precisely we
/// multiply.
pub fn prepare(
    device: &cubecl::Device,
    implementation: Implementation,
    kernel: Option<Kernel>,
    pass: Pass,
    data: &[Data],
) -> Result<Box<dyn Prepared>, Error> {
    if implementation.is_ours() && pass != Pass::Autodiff {
        return Ok(Box::new(ours::Kernels::new(device.client(), kernel, pass, data)?));
    }
    Ok(Box::new(burn::Tensors::new(device, implementation, pass, data)?))
}

/// How many sets of inputs take turns, so that none is found in a cache: 256 MB of them, more than any GPU caches.
pub fn input_sets(case: &Case) -> usize {
    (256_000_000 / case.bytes().max(1)).clamp(1, 8)
}
