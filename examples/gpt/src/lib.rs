//! A GPT with flash attention: trains, continues texts, loads GPT-2's weights.
//!
//! [`model`] is the model and `train` the training loop. `compare` compares implementations of attention, and `cli` is the program. The
//! other modules support a run.

mod cache;
mod checkpoint;
mod cli;
mod compare;
pub mod config;
pub mod data;
pub mod device;
pub mod error;
pub mod files;
pub mod flags;
mod generate;
mod gradients;
mod layers;
mod losses;
pub mod model;
mod optimizer;
mod plot;
pub mod probe;
mod replica;
mod run;
pub mod tokenizer;
mod train;
pub mod weights;

pub use cli::main;
