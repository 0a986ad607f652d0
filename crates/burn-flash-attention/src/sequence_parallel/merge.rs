//! Merging attention over parts of the keys by their log-sum-exp, in f32. The only file here that handles −∞.

use burn::tensor::{DType, Tensor};
use std::ops::Range;

/// Attention of queries over some of the keys.
#[derive(Clone, Debug)]
pub struct Part {
    /// `[batch, num_heads_q, seq_q, head_dim_v]`, f32.
    pub out: Tensor<4>,
    /// `[batch, num_heads_q, seq_q]`, f32; −∞ for a query that sees none of these keys.
    pub lse: Tensor<3>,
}

impl Part {
    /// The part that attention has returned, in f32.
    pub fn new((out, lse): (Tensor<4>, Tensor<3>)) -> Self {
        Part { out: out.cast(DType::F32), lse }
    }

    /// Attention over the keys of both parts (Ring Attention, arXiv:2310.01889, algorithm 1): `lse = ln(e^a + e^b)`, `out = e^(a − lse) out_a +
    /// e^(b − lse) out_b`.
    pub fn merge(self, other: Part) -> Part {
        let largest = self.lse.clone().max_pair(other.lse.clone());
        // −∞ − −∞ is NaN. Any finite number in its place gives e^−∞ = 0.
        let nothing = largest.clone().equal_elem(f32::NEG_INFINITY);
        let reference = largest.mask_fill(nothing.clone(), 0.0);
        let [a, b] = [self.lse, other.lse].map(|lse| (lse - reference.clone()).exp());
        let sum = a.clone() + b.clone();
        let lse = reference + sum.clone().log();
        let divisor = sum.mask_fill(nothing, 1.0);
        let [a, b] = [a, b].map(|weight| (weight / divisor.clone()).unsqueeze_dim::<4>(3));
        Part { out: self.out * a + other.out * b, lse }
    }

    /// Merges a part of these rows only.
    pub fn merge_rows(self, rows: Range<usize>, other: Part) -> Part {
        if rows.len() == self.lse.dims()[2] {
            return self.merge(other);
        }
        let Part { out, lse } = self;
        let [batch, heads, _, head_dim_v] = out.dims();
        let own = Part { out: out.clone().slice_dim(2, rows.clone()), lse: lse.clone().slice_dim(2, rows.clone()) };
        let merged = own.merge(other);
        Part {
            out: out.slice_assign([0..batch, 0..heads, rows.clone(), 0..head_dim_v], merged.out),
            lse: lse.slice_assign([0..batch, 0..heads, rows], merged.lse),
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;

    /// A part of one element a row, with these outputs and log-sum-exps.
    fn part<const N: usize>(out: [f32; N], lse: [f32; N]) -> Part {
        let device = Device::flex();
        Part {
            out: Tensor::<1>::from_data(out, &device).reshape([1, 1, N, 1]),
            lse: Tensor::<1>::from_data(lse, &device).reshape([1, 1, N]),
        }
    }

    /// The outputs and log-sum-exps.
    fn values(part: Part) -> (Vec<f32>, Vec<f32>) {
        (part.out.try_into_vec_as().unwrap(), part.lse.try_into_vec_as().unwrap())
    }

    const NONE: f32 = f32::NEG_INFINITY;

    #[test]
    fn weights_are_exponentials() {
        let ln = f32::ln;
        let (out, lse) = values(part([1.0, 5.0], [ln(3.0), ln(2.0)]).merge(part([9.0, 7.0], [ln(1.0), ln(2.0)])));
        for (found, expected) in out.iter().chain(&lse).zip([3.0, 6.0, ln(4.0), ln(4.0)]) {
            assert!((found - expected).abs() < 1e-6, "{out:?} {lse:?}");
        }
    }

    #[test]
    fn rows_that_saw_nothing_take_the_other_part() {
        let (out, lse) =
            values(part([0.0, 2.0, 0.0], [NONE, 1.5, NONE]).merge(part([3.0, 0.0, 0.0], [-4.0, NONE, NONE])));
        assert_eq!((out, lse), (vec![3.0, 2.0, 0.0], vec![-4.0, 1.5, NONE]));
    }

    #[test]
    fn extreme_log_sum_exps_do_not_overflow() {
        let (large, small) = (3e38, -3e38);
        let (out, lse) =
            values(part([1.0, 1.0, 1.0], [large, small, large]).merge(part([3.0, 3.0, 3.0], [large, small, small])));
        assert_eq!((out, lse), (vec![2.0, 2.0, 1.0], vec![large, small, large]));
    }

    #[test]
    fn other_rows_stay() {
        let all = part([1.0, 1.0], [0.0, 0.0]);
        let (out, lse) = values(all.merge_rows(1..2, part([3.0], [0.0])));
        assert_eq!((out, lse[0]), (vec![1.0, 2.0], 0.0));
        assert!((lse[1] - 2f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_nan_is_not_hidden() {
        let (out, lse) = values(part([1.0], [f32::NAN]).merge(part([1.0], [0.0])));
        assert!(out[0].is_nan() && lse[0].is_nan());
    }
}
