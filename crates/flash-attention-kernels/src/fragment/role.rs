//! What a kernel computes.

use crate::problem::AttentionProblem;
use serde::Serialize;

/// What a kernel computes: blocks of rows are kept, tiles of columns stream by.
///
/// ```text
///          rows                     columns                            computes
/// Forward  queries: Q               keys: K, V                         O = softmax(Q Kᵀ) V
/// Dq       queries: Q, dO           keys: K, V                         dQ = dS K
/// DkDv     keys: K, V               queries: Q, dO, lse, delta         dK = dSᵀ Q, dV = Pᵀ dO
/// All      keys: K, V               queries: Q, dO, lse, delta         the same, and dQ += dS K
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Role {
    /// The output and its log-sum-exp.
    Forward,
    /// The gradient of the queries.
    Dq,
    /// Those of keys and values: `S` and `dP` come transposed, and the band is [transposed](crate::mask::Band::transposed()).
    DkDv {
        /// Whether that of the keys is wanted.
        dk: bool,
        /// Whether that of the values is wanted.
        dv: bool,
    },
    /// All three: `dQ` is added up in memory, by whichever block of keys comes by.
    All,
}

impl Role {
    /// Whether keys are rows and queries columns.
    pub fn is_transposed(self) -> bool {
        matches!(self, Role::DkDv { .. } | Role::All)
    }

    /// Whether `dS` is computed, and the accumulator of dQ or dK.
    pub fn differentiates(self) -> bool {
        matches!(self, Role::Dq | Role::DkDv { dk: true, .. } | Role::All)
    }

    /// Whether derivatives of the problem's function are kept: where they are not 1, or the softcap's could not be found again behind it.
    pub fn keeps_derivative(self, problem: &AttentionProblem) -> bool {
        let capped = problem.options.softcap.is_some();
        self.differentiates() && problem.options.score_mod.is_some_and(|function| !function.additive() || capped)
    }
}
