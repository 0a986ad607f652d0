//! Optional operands besides mask and bias: slopes, sinks, sequences, dropout, functions, block lists. Kernels take them as one
//! argument. Absent operands are not compiled into the kernel.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::dropout::Dropout;
use crate::mask::Band;
use crate::mods::Mods;
use crate::pages::{KeyPlace, PageTable};
use crate::sequences::{Block, Bounds, block_of};
use cubecl::prelude::*;

/// Optional operands of a kernel. They are documented in [`score`](crate::score), [`sequences`](crate::sequences),
/// [`dropout`](mod@crate::dropout), [`mods`](crate::mods), [`blocks`](crate::blocks) and [`pages`](crate::pages).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Extras {
    /// ALiBi slopes `[batch | 1, H]`.
    pub slopes: ComptimeOption<&'static Tensor<f32>>,
    /// Sinks `[H]`.
    pub sinks: ComptimeOption<&'static Tensor<f32>>,
    /// Dropout of probabilities.
    pub dropout: Dropout,
    /// The [schedule](mod@crate::sequences) of the kernel's blocks, if there are several sequences.
    pub schedule: ComptimeOption<&'static Tensor<u32>>,
    /// Lengths of the sequences, in place of a schedule, if each of them has one block.
    pub lengths: ComptimeOption<Bounds>,
    /// The user's `score_mod` and `mask_mod`.
    pub mods: Mods,
    /// The [lists](mod@crate::blocks) of visited tiles, if there is a block mask.
    pub lists: ComptimeOption<&'static Tensor<u32>>,
    /// The pages of keys and values, if they are in pages.
    pub pages: ComptimeOption<PageTable>,
}

impl Extras {
    /// No optional operand, on the host.
    ///
    /// ```
    /// assert!(!flash_attention_kernels::extras::Extras::none().is_varlen());
    /// ```
    pub fn none() -> Self {
        let dropout = Dropout { seed: ComptimeOption::None, threshold: 0, factor: 1.0 };
        let (slopes, sinks, schedule) = (ComptimeOption::None, ComptimeOption::None, ComptimeOption::None);
        let (lengths, lists, pages) = (ComptimeOption::None, ComptimeOption::None, ComptimeOption::None);
        Extras { slopes, sinks, dropout, schedule, lengths, mods: Mods::none(), lists, pages }
    }

    /// Whether there are several sequences.
    pub fn is_varlen(&self) -> bool {
        self.schedule.is_some() || self.lengths.is_some()
    }

    /// Whether there is a block mask.
    pub fn is_sparse(&self) -> bool {
        self.lists.is_some()
    }
}

impl ExtrasExpand {
    /// [`Extras::is_varlen`] while a kernel is compiled.
    pub fn is_varlen(&self) -> bool {
        self.schedule.is_some() || self.lengths.is_some()
    }

    /// [`Extras::is_sparse`] while a kernel is compiled.
    pub fn is_sparse(&self) -> bool {
        self.lists.is_some()
    }
}

#[cube]
impl Extras {
    /// Number of blocks in the schedule, or `otherwise` without a schedule.
    pub fn blocks(&self, otherwise: u32) -> u32 {
        let mut blocks = otherwise;
        #[comptime]
        if let ComptimeOption::Some(list) = &self.schedule {
            blocks = list[0];
        }
        #[comptime]
        if let ComptimeOption::Some(lengths) = &self.lengths {
            blocks = lengths.sequences;
        }
        blocks
    }

    /// The `nth` block of the schedule, or the block of the `nth` sequence. Without sequences, the block that begins at `start` in this batch.
    pub fn block(&self, nth: u32, band: &Band, batch: u32, start: u32) -> Block {
        if comptime!(self.schedule.is_some()) {
            block_of(self.schedule.unwrap(), band, nth)
        } else if comptime!(self.lengths.is_some()) {
            self.lengths.unwrap().block(nth, band)
        } else {
            Block { batch, start, band: *band }
        }
    }

    /// Where a key of a batch is in K and V.
    pub fn place(&self, batch: usize, key: u32) -> KeyPlace {
        if comptime!(self.pages.is_some()) {
            self.pages.unwrap().place(batch, key)
        } else {
            KeyPlace { batch, row: key }
        }
    }

    /// The slope of a head, or 0 without slopes.
    pub fn slope(&self, batch: usize, head: usize) -> f32 {
        let mut slope = 0.0f32.runtime();
        #[comptime]
        if let ComptimeOption::Some(slopes) = &self.slopes {
            slope = slopes[batch * slopes.stride(0) + head * slopes.stride(1)];
        }
        slope
    }

    /// The sink of a head, or `otherwise` without sinks.
    pub fn sink(&self, head: usize, otherwise: f32) -> f32 {
        let mut sink = otherwise;
        #[comptime]
        if let ComptimeOption::Some(sinks) = &self.sinks {
            sink = sinks[head * sinks.stride(0)];
        }
        sink
    }
}
