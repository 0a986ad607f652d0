//! Where and in which element type a model computes.

use crate::error::Error;
use burn::tensor::{DType, Device};
use gpt::config::Dtype;

/// Flags of every command.
#[derive(clap::Args, Clone, Debug)]
pub struct Place {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long, default_value = "auto", global = true)]
    pub device: String,
    /// Element type of weights, products, attention and cache: f32, bf16 or f16.
    #[arg(long, default_value = "f32", global = true, hide_possible_values = true)]
    pub dtype: Dtype,
}

impl Place {
    /// The device, without autodiff, and the element type, in which the device's operations have been tried.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if there is no such device, or it does not compute rightly in the element type.
    pub fn choose(&self) -> Result<(Device, DType), Error> {
        let wrong = |error: gpt::error::Error| Error::Device(error.to_string());
        let found = gpt::device::choose(&self.device).map_err(wrong)?;
        gpt::probe::check(&found, self.dtype).map_err(wrong)?;
        eprintln!("device     {found}, {}", self.dtype.name());
        Ok((found.device, self.dtype.float().into()))
    }
}
