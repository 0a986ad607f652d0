//! Checks of sizes, element types and devices of tensors.

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Tensor};
use flash_attention_kernels::AttentionError;
use flash_attention_kernels::mods::TENSORS;
use std::fmt::Display;

/// Checks element type and device of the tensors that a function reads. `names` are the arguments' names in errors.
pub(crate) fn function_tensors(
    names: [&'static str; TENSORS],
    tensors: &[Tensor<4>],
    device: &Device,
) -> Result<(), AttentionError> {
    for (tensor, argument) in tensors.iter().zip(names) {
        if tensor.dtype() != DType::F32 {
            return Err(AttentionError::Unsupported {
                option: argument,
                value: format!("a tensor of {}", tensor.dtype().name()),
                why: "functions read f32 for any dtype of q; cast the tensor",
            });
        }
        same_device(argument, &tensor.device(), device)?;
    }
    Ok(())
}

/// Checks one size of an argument.
pub(crate) fn agree(
    argument: &'static str,
    shape: &[usize],
    (dim, dimension): (usize, &'static str),
    (expected_by, expected): (&'static str, usize),
) -> Result<(), AttentionError> {
    if shape[dim] == expected {
        return Ok(());
    }
    Err(AttentionError::Dimension {
        argument,
        dimension,
        value: shape[dim],
        shape: shape.to_vec(),
        expected_by,
        expected,
    })
}

pub(crate) fn same_dtype(argument: &'static str, dtype: DType, expected: DType) -> Result<(), AttentionError> {
    if dtype == expected {
        return Ok(());
    }
    Err(AttentionError::MixedDtypes {
        argument,
        dtype: dtype.name().to_string(),
        expected: expected.name().to_string(),
    })
}

/// Checks that both are the same device. A device with autodiff may be combined with one without, but not with one that has another
/// checkpointing strategy.
pub(crate) fn same_device(argument: &'static str, device: &Device, expected: &Device) -> Result<(), AttentionError> {
    let strategies = (device.gradient_checkpointing_strategy(), expected.gradient_checkpointing_strategy());
    let mixed = matches!(strategies, (Some(strategy), Some(expected)) if strategy != expected);
    if device == expected && !mixed {
        return Ok(());
    }
    Err(AttentionError::Device { argument, device: format!("{device:?}"), expected: format!("{expected:?}") })
}

/// Checks that this crate has an implementation for the device.
pub(crate) fn check_device(device: &DispatchDevice) -> Result<(), AttentionError> {
    match device {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => Ok(()),
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => Ok(()),
        #[allow(unreachable_patterns)]
        other => Err(unsupported(other)),
    }
}

pub(crate) fn unsupported(device: &DispatchDevice) -> AttentionError {
    AttentionError::Unsupported {
        option: "device",
        value: format!("{device:?}"),
        why: "attention runs on CubeCL's devices and on Flex; enable this crate's feature for the device",
    }
}

/// An option or argument whose value is not supported.
pub(crate) fn unsupported_value(option: &'static str, value: impl Display, why: &'static str) -> AttentionError {
    AttentionError::Unsupported { option, value: value.to_string(), why }
}

/// Returns the value, or panics with the error's message, as Burn's operations do.
#[track_caller]
pub(crate) fn unwrapped<T, E: Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}
