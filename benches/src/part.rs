//! Kernels with tiles of their own.

use crate::implementations::Tensors;
use flash_attention_kernels::{AttentionProblem, Gradients};

/// A kernel with tiles of its own.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The output.
    Forward,
    /// The gradient of the queries.
    Dq,
    /// The gradients of keys and values.
    Dkdv,
    /// All three gradients.
    Fused,
    /// The gradient of the bias, by the kernel for Hopper.
    Dbias,
}

impl Part {
    /// Kernels that every device has.
    pub const EVERYWHERE: [Part; 3] = [Part::Forward, Part::Dq, Part::Dkdv];

    pub fn name(self) -> &'static str {
        match self {
            Part::Forward => "forward",
            Part::Dq => "dq",
            Part::Dkdv => "dkdv",
            Part::Fused => "fused",
            Part::Dbias => "dbias",
        }
    }

    /// Floating-point operations, as counted in papers. Of the backward's five products, each kernel recomputes the scores and dP, and adds
    /// its own products. The fused kernel computes all five.
    pub fn flops(self, p: &AttentionProblem) -> f64 {
        match self {
            Part::Forward => p.forward_flops(),
            Part::Dq => 1.5 * p.forward_flops(),
            Part::Dkdv => 2.0 * p.forward_flops(),
            Part::Fused => p.backward_flops(),
            Part::Dbias => p.forward_flops(),
        }
    }

    /// Gradients that it writes, if any.
    pub fn wanted(self, tensors: &Tensors) -> Gradients {
        let Gradients { dq, dk, dv, dbias, .. } = tensors.gradients.clone();
        match self {
            Part::Forward => Gradients::default(),
            Part::Dq => Gradients { dq, ..Default::default() },
            Part::Dkdv => Gradients { dk, dv, ..Default::default() },
            Part::Fused => Gradients { dq, dk, dv, ..Default::default() },
            Part::Dbias => Gradients { dbias, ..Default::default() },
        }
    }
}
