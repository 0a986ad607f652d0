//! FlashAttention kernels.
pub mod error;
pub mod launch;
pub mod mask;
pub mod portable;
pub mod problem;
pub mod score;
pub mod softmax;
pub mod tensor;
pub mod tiling;
pub use error::AttentionError;
pub use launch::{
    BackwardTiles, Gradients, Inputs, MaskStorage, MaskView, Saved, Scratch, backward, backward_with, forward,
    forward_with,
};
pub use portable::tile::TileShape;
pub use problem::{Alignment, AttentionOptions, AttentionProblem, Dtype, MAX_HEAD_DIM, MAX_SEQ};
pub use tensor::TensorView;
pub use tiling::{Kernel, Plan, plan};
