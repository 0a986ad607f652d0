//! Shapes of the forward of few rows: how threads divide a tile, and what that takes of shared memory.

use crate::fragment::WIDTH;
use serde::Serialize;

/// Tile of the forward of few rows. All numbers are powers of two. Only `tiling` chooses them.
///
/// ```
/// use flash_attention_kernels::FewRowsTile;
///
/// let tile = FewRowsTile { rows: 4, tile_k: 64, lanes: 4, reads: 8 };
/// assert_eq!((tile.units(), tile.keys_of_thread()), (64, 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct FewRowsTile {
    /// Rows of a block: queries of all query heads of a group. At least four.
    pub rows: usize,
    /// Keys of a tile. Each thread turns the products of one key and four rows into scores.
    pub tile_k: usize,
    /// Threads that share a key in the product `Q Kᵀ`. At least a quarter of the rows.
    pub lanes: usize,
    /// Vectors of four elements of K, or of V, that a thread reads before it uses the first one.
    pub reads: usize,
}

impl FewRowsTile {
    /// Threads of a thread block.
    pub fn units(&self) -> usize {
        self.rows / WIDTH * self.tile_k
    }

    /// Keys whose products a thread computes, each over the columns of one lane.
    pub fn keys_of_thread(&self) -> usize {
        self.tile_k / self.slots()
    }

    /// Keys that are read at a time.
    pub(crate) fn slots(&self) -> usize {
        self.units() / self.lanes
    }

    /// Vectors from one lane's partial sums to those of the next one. The padding puts neighbouring lanes into different banks.
    pub(crate) fn lane_pitch(&self) -> usize {
        self.units() + (8 / self.lanes).max(1)
    }

    /// Classes of keys, a power of two near the root of their number: maxima and sums of a row are taken of the keys of a class, and then
    /// of the classes.
    pub(crate) fn classes(&self) -> usize {
        1 << (self.tile_k.ilog2() / 2)
    }

    /// Vectors of the maxima or sums of the classes.
    pub(crate) fn folded_len(&self) -> usize {
        self.rows / WIDTH * self.classes()
    }

    /// Whether the threads divide the tile evenly.
    pub fn is_consistent(&self) -> bool {
        let FewRowsTile { rows, tile_k, lanes, reads } = *self;
        [rows, tile_k, lanes, reads].iter().all(|size| size.is_power_of_two())
            && rows >= WIDTH
            && lanes * WIDTH >= rows
            && lanes <= self.units()
    }
}

/// Everything that the forward of few rows is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct FewRowsBlueprint {
    /// Tile.
    pub tile: FewRowsTile,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// Whether splits of the keys are written, to be combined.
    pub is_split: bool,
}

impl FewRowsBlueprint {
    /// Vectors of a key that a thread reads.
    pub(crate) fn lane_vectors(&self) -> usize {
        self.head_dim.div_ceil(WIDTH * self.tile.lanes)
    }

    /// Vectors of each of its keys that a thread reads at a time.
    pub(crate) fn columns_at_once(&self) -> usize {
        let most = (self.tile.reads / self.tile.keys_of_thread()).clamp(1, self.lane_vectors());
        (1..=most).rev().find(|n| self.lane_vectors().is_multiple_of(*n)).unwrap_or(1)
    }

    /// Vectors of a query in shared memory.
    pub(crate) fn query_vectors(&self) -> usize {
        self.lane_vectors() * self.tile.lanes
    }

    /// Vectors of all queries in shared memory.
    pub(crate) fn queries_len(&self) -> usize {
        self.tile.rows * self.query_vectors()
    }

    /// Threads that share a row of V. Not more groups of them than keys of a tile.
    pub(crate) fn value_lanes(&self) -> usize {
        let vectors = self.head_dim_v.div_ceil(WIDTH).next_power_of_two();
        vectors.clamp(self.tile.rows / WIDTH, self.tile.units())
    }

    /// Groups of threads that share a row of V.
    pub(crate) fn key_groups(&self) -> usize {
        self.tile.units() / self.value_lanes()
    }

    /// Vectors of a row of V that a thread accumulates.
    pub(crate) fn groups(&self) -> usize {
        self.head_dim_v.div_ceil(WIDTH * self.value_lanes())
    }

    /// Rows of V that a thread reads at a time.
    pub(crate) fn values_at_once(&self) -> usize {
        let most = (self.tile.reads / self.groups()).max(1).min(self.tile.tile_k / self.key_groups());
        1 << most.ilog2()
    }

    /// Vectors of partial sums: of `Q Kᵀ` by lane, and of four rows of `O` by thread.
    pub(crate) fn partial_len(&self) -> usize {
        (self.tile.lanes * self.tile.lane_pitch()).max(WIDTH * self.groups() * self.tile.units())
    }

    /// Bytes of shared memory.
    pub(crate) fn shared_memory(&self) -> usize {
        let FewRowsTile { rows, .. } = self.tile;
        let vectors = self.queries_len() + self.partial_len() + self.tile.units() + self.tile.folded_len();
        size_of::<f32>() * (WIDTH * vectors + rows)
    }
}
