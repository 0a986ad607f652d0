//! What attention may have beside products, mask and bias: a slope and a sink of each head, lengths of each batch, dropout. Kernels get
//! all of it as one argument, and what is not there is not compiled.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::dropout::Dropout;
use crate::mask::Band;
use cubecl::prelude::*;

/// The tensors of it. What each means: [`score`](crate::score), [`mask`](crate::mask), [`dropout`](mod@crate::dropout).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Extras {
    /// Slopes `[batch | 1, H]`.
    pub slopes: ComptimeOption<&'static Tensor<f32>>,
    /// Sinks `[H]`.
    pub sinks: ComptimeOption<&'static Tensor<f32>>,
    /// Of probabilities.
    pub dropout: Dropout,
    /// How many of the queries are a sequence, `[B]`; the first ones.
    pub lens_q: ComptimeOption<&'static Tensor<u32>>,
    /// How many of the keys.
    pub lens_k: ComptimeOption<&'static Tensor<u32>>,
}

impl Extras {
    /// Whether sequences may end before tensors do.
    pub fn is_ragged(&self) -> bool {
        self.lens_q.is_some() || self.lens_k.is_some()
    }
}

impl ExtrasExpand {
    /// [`Extras::is_ragged`], while a kernel is made.
    pub fn is_ragged(&self) -> bool {
        self.lens_q.is_some() || self.lens_k.is_some()
    }
}

#[cube]
impl Extras {
    /// The band of a batch's sequence.
    pub fn band(&self, band: &Band, batch: usize) -> Band {
        let ragged = comptime!(self.is_ragged());
        let mut len_q = band.seq_q;
        #[comptime]
        if let ComptimeOption::Some(lens) = &self.lens_q {
            len_q = lens[batch * lens.stride(0)];
        }
        let mut len_k = band.seq_k;
        #[comptime]
        if let ComptimeOption::Some(lens) = &self.lens_k {
            len_k = lens[batch * lens.stride(0)];
        }
        if comptime!(ragged) { band.of(len_q, len_k) } else { *band }
    }

    /// The slope of a head, 0 if there is none.
    pub fn slope(&self, batch: usize, head: usize) -> f32 {
        let mut slope = 0.0f32.runtime();
        #[comptime]
        if let ComptimeOption::Some(slopes) = &self.slopes {
            slope = slopes[batch * slopes.stride(0) + head * slopes.stride(1)];
        }
        slope
    }

    /// The sink of a head, if there is one; else `otherwise`.
    pub fn sink(&self, head: usize, otherwise: f32) -> f32 {
        let mut sink = otherwise;
        #[comptime]
        if let ComptimeOption::Some(sinks) = &self.sinks {
            sink = sinks[head * sinks.stride(0)];
        }
        sink
    }
}
