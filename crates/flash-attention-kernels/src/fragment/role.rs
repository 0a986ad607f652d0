//! Roles of kernels: the forward, or the gradients that a kernel computes.

use crate::problem::{AttentionProblem, BackwardOrder};
use serde::Serialize;

/// What a kernel computes. A thread block keeps a block of rows, and tiles of columns stream by.
///
/// ```text
///          rows                     columns                            computes
/// Forward  queries: Q               keys: K, V                         O = softmax(Q Kᵀ) V
/// Dq       queries: Q, dO           keys: K, V                         dQ = dS K
/// DkDv     keys: K, V               queries: Q, dO, lse, delta         dK = dSᵀ Q, dV = Pᵀ dO
/// All      keys: K, V               queries: Q, dO, lse, delta         dK and dV as above, and dQ += dS K
/// Sums     as Dq, or as DkDv                                           sums of dT ∘ factor over the columns
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Role {
    /// The output and the log-sum-exp.
    Forward,
    /// The gradient of the queries.
    Dq,
    /// The gradients of keys and values. `S` and `dP` are transposed, and so is the [band](crate::mask::Band::transposed()).
    DkDv {
        /// Whether the gradient of the keys is computed.
        dk: bool,
        /// Whether the gradient of the values is computed.
        dv: bool,
    },
    /// All three gradients. Blocks of keys add to `dQ` in memory.
    All,
    /// No gradient of Q, K or V: only sums that `Dq` and `DkDv` may compute as well, for the gradients of slopes, of tensors of
    /// `score_mod` and of broadcast biases.
    Sums {
        /// Whether rows are keys.
        keys: bool,
    },
}

impl Role {
    /// Name of the kernel.
    pub fn kernel(self) -> &'static str {
        match self {
            Role::Forward => "forward",
            Role::Dq => "dq",
            Role::DkDv { .. } | Role::All => "dkdv",
            Role::Sums { .. } => "sums",
        }
    }

    /// Whether keys are rows and queries columns.
    pub fn is_transposed(self) -> bool {
        matches!(self, Role::DkDv { .. } | Role::All | Role::Sums { keys: true })
    }

    /// Whether `dS` is computed.
    pub fn differentiates(self) -> bool {
        self.accumulates() || matches!(self, Role::Sums { .. })
    }

    /// Whether dQ or dK is accumulated from `dS`.
    pub fn accumulates(self) -> bool {
        matches!(self, Role::Dq | Role::DkDv { dk: true, .. } | Role::All)
    }

    /// Whether blocks of keys add to `dQ` in a fixed order, and wait for each other.
    pub fn adds_in_order(self, problem: &AttentionProblem) -> bool {
        self == Role::All && problem.options.backward_order == BackwardOrder::Deterministic
    }

    /// Whether the kernel keeps derivatives of the problem's score function: if they are not 1 everywhere, or if there is also a softcap,
    /// whose derivative cannot be recovered from the function's result.
    pub fn keeps_derivative(self, problem: &AttentionProblem) -> bool {
        let capped = problem.options.softcap.is_some();
        self.accumulates() && problem.options.score_mod.is_some_and(|function| !function.additive() || capped)
    }
}
