//! Rotary position embedding on Flex.

use super::{floats, slice, tensor};
use crate::problem::dtype;
use crate::rotary::{RotaryOps, Rotation};
use burn_flex::{Flex, FlexTensor};
use flash_attention_kernels::RotaryLayout;
use flash_attention_kernels::rotary::rotated;
use rayon::prelude::*;

impl RotaryOps for Flex {
    fn apply_rotary(x: FlexTensor, cos: FlexTensor, sin: FlexTensor, rotation: Rotation) -> FlexTensor {
        let shape: [usize; 4] = x.layout().shape().dims();
        let [_, heads, seq, head_dim] = shape;
        let [batches, .., pairs]: [usize; 4] = cos.layout().shape().dims();
        // `api` has checked the same.
        let dtype = dtype("x", x.dtype()).unwrap_or_else(|error| panic!("{error}"));
        let [x, cos, sin] = [x, cos, sin].map(floats);
        let (cos, sin) = (slice(&cos), slice(&sin));
        let sign = if rotation.inverse { -1.0 } else { 1.0 };
        let mut data = slice(&x).to_vec();
        data.par_chunks_exact_mut((seq * head_dim).max(1)).enumerate().for_each(|(head, rows)| {
            let batch = if batches == 1 { 0 } else { head / heads };
            for (row, at) in rows.chunks_exact_mut(head_dim).zip(batch * seq..) {
                for pair in 0..pairs {
                    let (a, b) = match rotation.layout {
                        RotaryLayout::Interleaved => (2 * pair, 2 * pair + 1),
                        _ => (pair, pair + pairs),
                    };
                    let angle = at * pairs + pair;
                    (row[a], row[b]) = rotated(row[a], row[b], cos[angle], sign * sin[angle]);
                }
            }
        });
        tensor(data, shape, dtype)
    }
}
