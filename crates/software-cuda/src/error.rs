//! What can go wrong, as the caller and the one who reads stderr are told it.

/// An error of a module or of a launch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text cannot be read.
    #[error("line {line}: {what}")]
    Syntax {
        /// The line of the PTX.
        line: u32,
        /// What is wrong.
        what: String,
    },
    /// An instruction that is not known here.
    #[error("line {line}: unsupported instruction `{text}`: {what}")]
    Unsupported {
        /// The line of the PTX.
        line: u32,
        /// The instruction.
        text: String,
        /// What about it.
        what: String,
    },
    /// A launch that cannot be.
    #[error("{0}")]
    Launch(String),
    /// A fault of a running kernel.
    #[error("{kind} in {place}: {what}")]
    Fault {
        /// Of which kind.
        kind: Kind,
        /// Where.
        place: Place,
        /// What was done.
        what: String,
    },
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Kind {
    /// Memory that is not there.
    #[error("illegal address")]
    Address,
    /// An address that is not a multiple of what it must be.
    #[error("misaligned address")]
    Alignment,
    /// All wait and none can go on.
    #[error("deadlock")]
    Deadlock,
    /// What PTX leaves undefined.
    #[error("undefined behaviour")]
    Undefined,
    /// Memory that something else may still read or write.
    #[error("race")]
    Race,
    /// Memory or registers that are used by something else before a fence.
    #[error("missing fence")]
    Fence,
    /// Memory that is read before anything was written there.
    #[error("uninitialised memory")]
    Uninitialised,
}

/// Where in a launch.
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
