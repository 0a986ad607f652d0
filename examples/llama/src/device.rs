//! Where and in which element type a model computes.

use crate::error::Error;
use burn::tensor::{DType, Device};

/// Flags of every command.
#[derive(clap::Args, Clone, Debug)]
pub struct Place {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long, default_value = "auto", global = true)]
    pub device: String,
    /// Element type of weights, products, attention and cache.
    #[arg(long, default_value = "f32", global = true)]
    pub dtype: Dtype,
}

/// Element type of a model.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::BF16,
            Dtype::F16 => DType::F16,
        }
    }
}

impl Place {
    /// The device, without autodiff, and the element type.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if there is no such device, [`Error::Flag`] if it does not compute in the element type.
    pub fn choose(&self) -> Result<(Device, DType), Error> {
        let found = nanogpt::device::choose(&self.device).map_err(Error::Device)?;
        let dtype = DType::from(self.dtype);
        if !found.device.supports_dtype(dtype) {
            let value = dtype.name().to_string();
            return Err(Error::Flag { flag: "dtype", value, why: format!("{} does not compute in it", found.id) });
        }
        eprintln!("device     {}, {}", found.id, dtype.name());
        Ok((found.device, dtype))
    }
}
