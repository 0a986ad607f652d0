//! Validation of shapes.

use super::MAX_SEQ;
use crate::error::{AttentionError, Result};

/// A shape of this rank.
pub fn ranked<const RANK: usize>(argument: &'static str, shape: &[usize]) -> Result<[usize; RANK]> {
    let (rank, expected) = (shape.len(), RANK);
    shape.try_into().map_err(|_| AttentionError::Rank { argument, rank, shape: shape.to_vec(), expected })
}

/// Checks that a dimension of a tensor has the `expected` size, which the tensor `expected_by` sets.
pub fn agree(
    argument: &'static str,
    shape: &[usize],
    dim: usize,
    dimension: &'static str,
    expected_by: &'static str,
    expected: usize,
) -> Result<()> {
    if shape[dim] == expected {
        return Ok(());
    }
    let (value, shape) = (shape[dim], shape.to_vec());
    Err(AttentionError::Dimension { argument, dimension, value, shape, expected_by, expected })
}

/// Checks that each of the first `dims` dimensions of a shape is 1 or the expected size.
///
/// # Errors
///
/// [`AttentionError::Broadcast`], which names the first dimension that is neither.
///
/// ```
/// use flash_attention_kernels::problem::check_broadcast;
///
/// assert!(check_broadcast("mask", [1, 4, 1, 9], [2, 4, 8, 9], 4).is_ok());
/// assert!(check_broadcast("mask", [1, 4, 1, 9], [2, 4, 8, 7], 4).unwrap_err().to_string().ends_with("dimension 3 is 9"));
/// ```
pub fn check_broadcast(
    argument: &'static str,
    shape: [usize; 4],
    expected: [usize; 4],
    dims: usize,
) -> Result<(), AttentionError> {
    match (0..dims).find(|&dim| shape[dim] != 1 && shape[dim] != expected[dim]) {
        None => Ok(()),
        Some(dimension) => {
            Err(AttentionError::Broadcast { argument, shape, expected, dimension, value: shape[dimension] })
        }
    }
}

/// Checks that a tensor has at most `max` elements. An empty dimension counts as 1, because scratch is padded.
pub fn check_elements(argument: &'static str, shape: [usize; 4], max: u64) -> Result<()> {
    let elements = shape.into_iter().try_fold(1u64, |product, n| product.checked_mul(n.max(1) as u64));
    match elements {
        Some(elements) if elements <= max => Ok(()),
        _ => Err(AttentionError::Elements { argument, shape, max }),
    }
}

/// Checks that a length is at most [`MAX_SEQ`].
pub fn check_length(argument: &'static str, value: usize) -> Result<()> {
    if value <= MAX_SEQ { Ok(()) } else { Err(AttentionError::SequenceTooLong { argument, value, max: MAX_SEQ }) }
}
