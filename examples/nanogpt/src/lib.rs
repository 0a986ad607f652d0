//! [nanoGPT](https://github.com/karpathy/nanoGPT) in Burn: [`model`] is the GPT, [`train`] trains it, [`device`] chooses the device.

pub mod device;
pub mod model;
pub mod train;
