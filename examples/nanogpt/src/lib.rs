//! [nanoGPT](https://github.com/karpathy/nanoGPT) in Burn: [`model`] is the GPT, [`train`] trains it.

pub mod model;
pub mod train;
