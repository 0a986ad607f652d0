//! Layouts of shared memory: tiles of the operands with their barriers, and words.

use super::{SLOTS, WORDS};
use crate::tensor_core::LINE;

/// An operand that is loaded to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Rows of Q, in tiles of 64.
    Q,
    /// Rows of dO, in tiles of 64.
    D,
    /// Tiles of K.
    K,
    /// Tiles of V.
    V,
    /// Tiles of a tiled bias.
    Bias,
}

/// A region of shared memory: an array over pipeline stages, warpgroups or slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// Tiles of an operand.
    Tiles(Operand),
    /// Tiles of `dSᵀ`.
    Ds,
    /// Arguments of `score_mod`, which each thread keeps here for itself.
    Arguments,
    /// lse of the tiles' queries.
    Lse,
    /// Delta of the tiles' queries.
    Delta,
    /// Barriers that complete when the bytes of a tile have arrived.
    Full(Operand),
    /// Barriers that complete when all warps that read a tile have released it.
    Empty(Operand),
    /// Barriers of the slots, which complete when a work tile has been written.
    Known,
    /// Slots of decoded work tiles.
    Slots,
    /// Cursors of the pipelines.
    Cursors,
    /// With a block mask, the list entry of the tile in each stage of K.
    Entries,
}

/// A blueprint that defines a layout of shared memory.
pub trait Layout: Copy {
    /// Number and bytes of each operand's tiles, in the order of [`Operand`].
    fn tiles(&self) -> [(Operand, usize, usize); 5];

    /// Bytes of a tile of an operand.
    fn bytes(&self, operand: Operand) -> u32 {
        self.tiles()[operand as usize].2 as u32
    }

    /// Number of warpgroups that read, and release, a tile of an operand.
    fn readers(&self, operand: Operand) -> usize;

    /// Bytes of `dSᵀ`, lse and delta.
    fn gradients(&self) -> [usize; 3];

    /// Bytes of arguments of `score_mod`.
    fn arguments(&self) -> usize {
        0
    }

    /// Words of cursors and of list entries.
    fn words(&self) -> [usize; 2];

    /// All regions with their bytes, in their order: bulk copies and barriers have alignments of 16 and 8 bytes, words of 4.
    fn regions(&self) -> impl Iterator<Item = (Region, usize)> {
        let ([ds, lse, delta], [cursors, entries]) = (self.gradients(), self.words());
        let tiles = self.tiles();
        let barriers = |(of, number, _)| [(Region::Full(of), 8 * number), (Region::Empty(of), 8 * number)];
        let gradients =
            [(Region::Ds, ds), (Region::Arguments, self.arguments()), (Region::Lse, lse), (Region::Delta, delta)];
        let words = [
            (Region::Known, 8 * SLOTS),
            (Region::Slots, 4 * WORDS * SLOTS),
            (Region::Cursors, 4 * cursors),
            (Region::Entries, 4 * entries),
        ];
        let of_tiles = tiles.map(|(of, number, bytes)| (Region::Tiles(of), number * bytes));
        of_tiles.into_iter().chain(gradients).chain(tiles.into_iter().flat_map(barriers)).chain(words)
    }

    /// Offset of a region in bytes.
    fn offset(&self, region: Region) -> u32 {
        self.regions().take_while(|(of, _)| *of != region).map(|(_, bytes)| bytes as u32).sum()
    }

    /// Offset of an operand's tiles in a descriptor, in units of 16 bytes.
    fn units(&self, operand: Operand) -> u64 {
        u64::from(self.offset(Region::Tiles(operand)) / 16)
    }

    /// Bytes of all regions: a multiple of 1,024, to which swizzled tiles are aligned.
    fn total(&self) -> usize {
        self.regions().map(|(_, bytes)| bytes).sum::<usize>().next_multiple_of(1024)
    }
}

/// Difference between the descriptors of a tile of `lines` lines when it is read by columns and by rows: the distance between two
/// panels replaces that of 16 bytes.
pub fn columns_offset(lines: usize) -> u64 {
    ((lines * LINE / 16 - 1) as u64) << 16
}
