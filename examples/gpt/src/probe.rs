//! Checks whether a device computes correctly in half precision, before a model depends on it.
//!
//! With Burn 0.23.0-pre.1, the product of two bf16 tensors is wrong through Vulkan on some GPUs (docs/upstream.md). Training there shows no
//! other symptom than a model that learns badly. Every operation of Burn that the model computes in half precision is therefore tried on
//! small tensors and compared with the host.

use crate::config::Dtype;
use crate::device::Found;
use crate::error::Error;
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Rows and columns: one size that vectors of any length divide, and one that they do not.
const SIZES: [[usize; 2]; 2] = [[64, 64], [33, 31]];

/// Checks that `found` supports the dtype and, for half precision, that Burn's operations in it are correct: conversion, elementwise sum
/// and product, exponential, sigmoid, sum along a dimension and matrix product.
///
/// # Errors
///
/// [`Error::Dtype`] if the device does not support the dtype, [`Error::WrongResult`] for the first result whose error exceeds rounding, and
/// [`Error::Device`] if the device failed.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// let cpu = gpt::device::choose("flex").unwrap();
/// gpt::probe::check(&cpu, gpt::config::Dtype::Bf16).unwrap();
/// # }
/// ```
pub fn check(found: &Found, dtype: Dtype) -> Result<(), Error> {
    if !found.device.supports_dtype(dtype.float()) {
        return Err(Error::Dtype { dtype: dtype.name(), device: found.to_string() });
    }
    match dtype {
        Dtype::F32 => Ok(()),
        Dtype::Bf16 | Dtype::F16 => compare(found, dtype, &OPERATIONS),
    }
}

/// An operation of Burn, and the same operation on the host.
#[derive(Clone, Copy)]
struct Operation {
    name: &'static str,
    on_device: fn(Tensor<2>, Tensor<2>, FloatDType) -> Tensor<2>,
    on_host: fn(&Matrix, &Matrix) -> Vec<Expected>,
}

/// Expected element of a result.
struct Expected {
    value: f64,
    /// Largest rounding error, in multiples of the distance between neighbouring numbers at 1.
    rounding: f64,
    /// Description of the operands.
    from: String,
}

/// A row-major matrix on the host.
struct Matrix {
    columns: usize,
    values: Vec<f64>,
}

/// A conversion may truncate, an exponential may be the hardware's, and sums may be kept in half precision.
const OPERATIONS: [Operation; 7] = [
    Operation {
        name: "conversion to f32 and back",
        on_device: |a, _, dtype| (a.cast(FloatDType::F32) * 0.375).cast(dtype),
        on_host: |a, b| by_element(a, b, |a, _| (0.375 * a, 1.0, format!("0.375 · {a}"))),
    },
    Operation {
        name: "sum",
        on_device: |a, b, _| a + b,
        on_host: |a, b| by_element(a, b, |a, b| (a + b, 1.0, format!("{a} + {b}"))),
    },
    Operation {
        name: "product",
        on_device: |a, b, _| a * b,
        on_host: |a, b| by_element(a, b, |a, b| (a * b, 1.0, format!("{a} · {b}"))),
    },
    Operation {
        name: "exponential",
        on_device: |a, _, _| a.exp(),
        on_host: |a, b| by_element(a, b, |a, _| (a.exp(), 4.0 + 2.0 * a.abs(), format!("exp({a})"))),
    },
    Operation {
        name: "sigmoid",
        on_device: |a, _, _| sigmoid(a),
        on_host: |a, b| {
            by_element(a, b, |a, _| (1.0 / (1.0 + (-a).exp()), 4.0 + 2.0 * a.abs(), format!("sigmoid({a})")))
        },
    },
    Operation {
        name: "sum of rows",
        on_device: |a, _, _| a.sum_dim(1),
        on_host: |a, _| a.rows().map(|row| Expected::sum(row.iter().copied())).collect(),
    },
    Operation {
        name: "matrix product",
        on_device: |a, b, _| a.matmul(b.transpose()),
        on_host: |a, b| {
            let element = |row: &[f64], column: &[f64]| Expected::sum(row.iter().zip(column).map(|(a, b)| a * b));
            a.rows().flat_map(|row| b.rows().map(move |column| element(row, column))).collect()
        },
    },
];

fn by_element(a: &Matrix, b: &Matrix, result: fn(f64, f64) -> (f64, f64, String)) -> Vec<Expected> {
    let element = |(a, b): (&f64, &f64)| {
        let (value, rounding, from) = result(*a, *b);
        Expected { value, rounding: rounding * value.abs(), from }
    };
    a.values.iter().zip(&b.values).map(element).collect()
}

impl Expected {
    /// The rounding error of a sum grows with the square root of its length, in any order of summation.
    fn sum(terms: impl ExactSizeIterator<Item = f64> + Clone) -> Self {
        let (count, size) = (terms.len(), terms.clone().map(f64::abs).sum::<f64>());
        let from = format!("a sum of {count} terms");
        Self { value: terms.sum(), rounding: (count as f64).sqrt() * size, from }
    }
}

impl Matrix {
    /// Random numbers from -1 to 2, rounded to the dtype. Their sums are far from 0.
    fn random([rows, columns]: [usize; 2], dtype: FloatDType, rng: &mut StdRng) -> Self {
        let values: Vec<f32> = (0..rows * columns).map(|_| rng.random_range(-1.0..2.0)).collect();
        let rounded = TensorData::new(values, [rows, columns]).convert_dtype(DType::from(dtype));
        Self { columns, values: rounded.iter::<f64>().collect() }
    }

    fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.values.chunks(self.columns)
    }

    fn on(&self, device: &Device, dtype: FloatDType) -> Tensor<2> {
        let shape = [self.values.len() / self.columns, self.columns];
        let dtype = DType::from(dtype);
        Tensor::from_data(TensorData::new(self.values.clone(), shape).convert_dtype(dtype), (device, dtype))
    }
}

fn compare(found: &Found, dtype: Dtype, operations: &[Operation]) -> Result<(), Error> {
    // The distance from 1 to the next number, and the smallest normal number.
    let (distance, smallest) = match dtype.float() {
        FloatDType::F16 => (2f64.powi(-10), 2f64.powi(-14)),
        FloatDType::BF16 => (2f64.powi(-7), 2f64.powi(-126)),
        _ => (2f64.powi(-23), 2f64.powi(-126)),
    };
    let (device, float) = (found.device.clone().inner(), dtype.float());
    let rng = &mut StdRng::seed_from_u64(0);
    for size in SIZES {
        let (a, b) = (Matrix::random(size, float, rng), Matrix::random(size, float, rng));
        for operation in operations {
            let result = (operation.on_device)(a.on(&device, float), b.on(&device, float), float);
            let result = result.try_into_data().map_err(|error| Error::device(&error))?;
            for (found_value, expected) in result.iter::<f64>().zip((operation.on_host)(&a, &b)) {
                let off = (found_value - expected.value).abs();
                // A NaN fails this comparison.
                let is_rounding = off <= distance * expected.rounding + smallest;
                if !is_rounding {
                    return Err(Error::WrongResult {
                        operation: operation.name,
                        dtype: dtype.name(),
                        device: found.to_string(),
                        from: expected.from,
                        found: found_value as f32,
                        expected: expected.value as f32,
                    });
                }
            }
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::{OPERATIONS, Operation, check, compare};
    use crate::config::Dtype;
    use crate::device::choose;
    use crate::error::Error;
    use burn::tensor::{FloatDType, Tensor};

    type OnDevice = fn(Tensor<2>, Tensor<2>, FloatDType) -> Tensor<2>;

    fn with_fault(name: &str, on_device: OnDevice) -> Vec<Operation> {
        let operations: Vec<_> = OPERATIONS
            .into_iter()
            .map(|operation| if operation.name == name { Operation { on_device, ..operation } } else { operation })
            .collect();
        assert!(operations.iter().any(|operation| operation.name == name), "there is no operation {name}");
        operations
    }

    fn refused(name: &str, dtype: Dtype, on_device: OnDevice) -> Error {
        let cpu = choose("flex").unwrap();
        let error = compare(&cpu, dtype, &with_fault(name, on_device)).unwrap_err();
        assert!(matches!(&error, Error::WrongResult { operation, .. } if *operation == name), "{name}: {error}");
        error
    }

    #[test]
    fn a_device_that_is_right_passes() {
        let cpu = choose("flex").unwrap();
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            check(&cpu, dtype).unwrap();
        }
    }

    #[test]
    fn a_wrong_product_is_one_sentence_with_its_numbers() {
        let error = refused("product", Dtype::Bf16, |a, b, _| (a * b).zeros_like() + 2e38).to_string();
        for part in
            ["product in bf16 is wrong on CPU with", "(flex): ", " · ", " gave 1.99", "e38", ", expected ", "--dtype"]
        {
            assert!(error.contains(part), "the error {error:?} lacks {part:?}");
        }
        assert!(!error.contains('\n') && !error.contains(". "), "{error}");
    }

    #[test]
    fn small_and_large_faults_of_each_operation_are_found() {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            refused("product", dtype, |a, b, _| a * b * 1.02);
            refused("product", dtype, |a, _, _| a.clone() * a);
            refused("sum", dtype, |a, b, _| (a + b) * 1.02);
            refused("sum", dtype, |a, b, _| a - b);
            refused("exponential", dtype, |a, _, _| a.exp() * f32::NAN);
            refused("matrix product", dtype, |a, b, _| a.transpose().matmul(b).transpose().zeros_like());
            for operation in OPERATIONS {
                refused(
                    operation.name,
                    dtype,
                    match operation.name {
                        "sum of rows" => |a, _, _| a.sum_dim(1).zeros_like(),
                        "matrix product" => |a, b, _| a.matmul(b.transpose()).zeros_like(),
                        _ => |a, _, _| a.zeros_like(),
                    },
                );
            }
        }
    }

    /// A fault that only sizes reveal that vectors do not divide, as of a kernel that skips the last elements.
    #[test]
    fn a_fault_of_odd_sizes_is_found() {
        refused("product", Dtype::Bf16, |a, b, _| {
            let product = a * b;
            let [rows, columns] = product.dims();
            if columns % 4 == 0 {
                return product;
            }
            let tail = columns % 4;
            let kept = product.clone().narrow(1, 0, columns - tail);
            Tensor::cat(vec![kept, product.narrow(1, columns - tail, tail).zeros_like()], 1).reshape([rows, columns])
        });
    }
}
