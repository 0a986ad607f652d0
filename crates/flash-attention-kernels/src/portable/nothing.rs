//! Results where there are no keys, no queries or no batch: outputs and gradients of zeros, and `lse` of −∞ or of the sinks.

use crate::softmax::lse_bits;
use cubecl::prelude::*;

/// Offset of the `position`-th element of a tensor of rank 4.
#[cube]
fn offset<E: CubePrimitive>(tensor: &Tensor<E>, position: usize) -> usize {
    let mut rest = position;
    let mut offset = 0usize;
    #[unroll]
    for n in 0..4usize {
        let dim = comptime!(3 - n);
        offset += rest % tensor.shape(dim) * tensor.stride(dim);
        rest /= tensor.shape(dim);
    }
    offset
}

/// Fills a tensor of rank 4 with zeros.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn zeros<F: Float>(out: &mut Tensor<F>, #[define(F)] _type: ElemType) {
    if ABSOLUTE_POS < out.len() {
        let at = offset(&*out, ABSOLUTE_POS);
        out[at] = F::from_int(0);
    }
}

/// Writes `lse [B, H, Sq]` of rows that see no key: the head's sink, if there are sinks `[H]`, else −∞.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn empty_lse(lse: &mut Tensor<u32>, sinks: ComptimeOption<&Tensor<f32>>) {
    if ABSOLUTE_POS < lse.len() {
        let seq = lse.shape(2);
        let heads = lse.shape(1);
        let (i, head, batch) = (ABSOLUTE_POS % seq, ABSOLUTE_POS / seq % heads, ABSOLUTE_POS / seq / heads);
        let at = batch * lse.stride(0) + head * lse.stride(1) + i * lse.stride(2);
        let mut bits = lse_bits(0.0f32, 0.0f32.runtime());
        #[comptime]
        if let ComptimeOption::Some(sinks) = &sinks {
            bits = u32::reinterpret(sinks[head * sinks.stride(0)]);
        }
        lse[at] = bits;
    }
}
