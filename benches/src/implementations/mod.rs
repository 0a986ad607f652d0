//! Implementations to time: the kernels called directly, and attention through Burn's tensors.

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
    /// This repository's, with the fastest order of sums in the backward.
    OursFast,
    /// This repository's, with factors of f32 products rounded to tf32.
    OursTf32,
    /// Burn's `module::attention`.
    Burn,
    /// Attention by its definition: matrix products, mask and softmax, as operations of Burn.
    Composed,
    /// The two matrix products of the forward alone, as operations of Burn: a bound on what its matrix products can reach. This is not
    /// attention, so it is not compared with the oracle.
    Products,
}

impl Implementation {
    /// Name in results.
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

    /// Order in which its backward sums, if it has the option.
    pub fn backward_order(self) -> BackwardOrder {
        match self {
            Implementation::OursFast => BackwardOrder::Fast,
            _ => BackwardOrder::Deterministic,
        }
    }

    /// Precision of its f32 products, if it has the option.
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

    /// Whether this case and pass are timed for it. Only our kernels can be called one at a time, the order of the backward does not affect
    /// the forward, tf32 does not affect half precision, and products have no causality.
    pub fn has(self, case: &Case, pass: Pass) -> bool {
        match self {
            Implementation::Products => pass == Pass::Forward && !case.causal && case.variant == Variant::None,
            Implementation::Ours => true,
            Implementation::OursFast => pass != Pass::Forward,
            Implementation::OursTf32 => case.dtype == Dtype::F32,
            // They have neither functions nor block masks, their dropout differs, and Burn's has no sinks.
            _ if case.variant.is_function() || case.variant.is_direct() => false,
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

/// A pass over a problem, ready to be called.
pub trait Prepared: Work {
    /// The kernel that runs.
    fn kernel(&self) -> String;
    /// Results of the last call, for the first inputs.
    fn results(&mut self) -> Result<Results, Error>;
}

/// Uploads `data` to the device for the pass. Its problem holds the order of sums in our backward and the precision of our products.
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

/// Number of input sets that alternate, so that no inputs are cached: 256 MB in total, more than any GPU caches, or as many as are allowed.
/// peers.py has the same number.
pub fn input_sets(case: &Case) -> usize {
    let most = if case.is_decoding() { 512 } else { 8 };
    (256_000_000 / case.bytes().max(1)).clamp(1, most)
}
