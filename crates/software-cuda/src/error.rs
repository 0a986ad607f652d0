//! Errors, as returned and as reported on stderr.

/// An error of a module or of a launch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text cannot be parsed.
    #[error("line {line}: {what}")]
    Syntax {
        /// Line of the PTX.
        line: u32,
        /// What is wrong.
        what: String,
    },
    /// An instruction that is not supported.
    #[error("line {line}: unsupported instruction `{text}`: {what}")]
    Unsupported {
        /// Line of the PTX.
        line: u32,
        /// The instruction.
        text: String,
        /// The reason.
        what: String,
    },
    /// A launch with invalid arguments.
    #[error("{0}")]
    Launch(String),
    /// A fault of a running kernel.
    #[error("{kind} in {place}: {what}")]
    Fault {
        /// Kind of the fault.
        kind: Kind,
        /// Place of the fault.
        place: Place,
        /// Description of the fault.
        what: String,
    },
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Kind {
    /// An access outside of memory.
    #[error("illegal address")]
    Address,
    /// A misaligned address.
    #[error("misaligned address")]
    Alignment,
    /// All warps wait, and none can continue.
    #[error("deadlock")]
    Deadlock,
    /// Behaviour that PTX leaves undefined.
    #[error("undefined behaviour")]
    Undefined,
    /// A conflicting access to memory that is not ordered.
    #[error("race")]
    Race,
    /// A missing fence between accesses to memory or registers.
    #[error("missing fence")]
    Fence,
    /// A value that depends on unwritten memory.
    #[error("uninitialised memory")]
    Uninitialised,
}

/// Place in a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The kernel.
    pub kernel: String,
    /// The block.
    pub block: [u32; 3],
    /// The warp.
    pub warp: u32,
    /// The line of the PTX.
    pub line: u32,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Place { kernel, block: [x, y, z], warp, line } = self;
        write!(f, "{kernel}, block ({x}, {y}, {z}), warp {warp}, line {line}")
    }
}
