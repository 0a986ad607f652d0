//! Runs and fine-tunes language models of Hugging Face with flash attention.
//!
//! [`checkpoint`] reads a folder: [`config`] says what its `config.json` means, [`families`] what each family has beside it, [`parameters`]
//! what tensors are called, and [`weights`] reads them. [`text`] turns text into tokens and back, [`generate`] continues it with tokens
//! that [`sample`] draws. [`finetune`] trains the adapters of [`lora`] on [`documents`] with the loss of [`loss`], and [`mod@bench`] measures.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod device;
pub mod documents;
pub mod error;
pub mod families;
pub mod finetune;
pub mod generate;
pub mod lora;
pub mod loss;
pub mod parameters;
pub mod sample;
pub mod text;
pub mod weights;
