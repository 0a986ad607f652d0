//! Over what a kernel walks: launches what makes the lists of a block mask, and keeps them.

use super::Call;
use super::sequences::Blocks;
use crate::blocks::{HEADER, UNITS, list, order};
use crate::mask::Band;
use crate::problem::{AttentionProblem, BlockMask};
use crate::tensor::TensorView;
use cubecl::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// Over what a kernel walks: blocks of rows, and tiles of columns.
#[derive(Default)]
pub(super) struct Route {
    /// Of several sequences, the blocks that there are.
    pub schedule: Option<TensorView<1>>,
    /// With a block mask, the tiles that each block visits.
    pub lists: Option<TensorView>,
}

/// The [lists](mod@crate::blocks) that calls have made of the states of a block mask. Clones share them, so that of calls with the same
/// states only the first makes lists, whichever layer or step they belong to. States are told apart by their memory, which
/// is kept as long as the lists are and must not be written to meanwhile.
///
/// Where only the device knows the lengths of sequences, every call makes its own.
///
/// ```no_run
/// use flash_attention_kernels::{BlockLists, Inputs, TensorView};
///
/// # fn f(inputs: [Inputs; 2], states: TensorView) -> [Inputs; 2] {
/// // Two layers with the same block mask.
/// let lists = BlockLists::default();
/// inputs.map(|inputs| Inputs { block_mask: Some(states.clone()), block_lists: lists.clone(), ..inputs })
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct BlockLists(Arc<Mutex<Vec<Kept>>>);

/// Lists that are kept, at most: those of forward and backward take three. When there are more, the oldest ones go.
const MOST_KEPT: usize = 24;

#[derive(Debug)]
struct Kept {
    of: Origin,
    lists: TensorView,
}

/// What lists depend on, where nobody but the host knows where sequences end.
#[derive(Clone, Debug)]
struct Origin {
    states: TensorView,
    mask: BlockMask,
    band: Band,
    keys: bool,
    rows: usize,
    columns: usize,
    /// Whether blocks have been put in [`order()`].
    ordered: bool,
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        let of_host = |of: &Self| (of.mask, of.band, of.keys, of.rows, of.columns, of.ordered);
        // Memory that is kept here is no other tensor's.
        let of_states = |TensorView { handle, shape, strides }: &TensorView| {
            (handle.service, handle.clone().binding().claim_key(), *shape, *strides)
        };
        of_host(self) == of_host(other) && of_states(&self.states) == of_states(&other.states)
    }
}

impl BlockLists {
    /// How many are kept.
    ///
    /// ```
    /// assert_eq!(flash_attention_kernels::BlockLists::default().kept(), 0);
    /// ```
    pub fn kept(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Those of this origin: those kept, or else new ones.
    fn of(&self, of: &Origin, make: impl FnOnce() -> TensorView) -> TensorView {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = all.iter().find(|kept| kept.of == *of) {
            return kept.lists.clone();
        }
        let lists = make();
        if all.len() == MOST_KEPT {
            all.remove(0);
        }
        all.push(Kept { of: of.clone(), lists: lists.clone() });
        lists
    }
}

impl Call<'_> {
    /// That of a kernel with blocks of so many rows and tiles of so many columns.
    pub(super) fn route(&self, of: Blocks, rows: usize, columns: usize) -> Route {
        Route { schedule: self.schedule(of, rows), lists: self.lists(of, rows, columns, false) }
    }

    /// The same for a kernel that takes blocks in the order of [`order()`], as those for Hopper do: several sequences have one of their own.
    #[cfg(feature = "cuda")]
    pub(super) fn route_in_order(&self, of: Blocks, rows: usize, columns: usize) -> Route {
        let schedule = self.schedule(of, rows);
        let ordered = schedule.is_none();
        Route { schedule, lists: self.lists(of, rows, columns, ordered) }
    }

    /// The lists of tiles that blocks visit, if there is a block mask.
    pub(super) fn lists(&self, of: Blocks, rows: usize, columns: usize, ordered: bool) -> Option<TensorView> {
        let p = self.problem;
        let (states, mask) = (self.inputs.block_mask.clone()?, p.block_mask?);
        let of = Origin { states, mask, band: p.band(), keys: of != Blocks::Queries, rows, columns, ordered };
        if p.is_ragged() {
            Some(self.make_lists(&of))
        } else {
            Some(self.inputs.block_lists.of(&of, || self.make_lists(&of)))
        }
    }

    fn make_lists(&self, of: &Origin) -> TensorView {
        let p = self.problem;
        let shape = list_shape(p, of);
        let lists = TensorView::contiguous(self.client.empty(4 * shape.iter().product::<usize>()), shape);
        let [batch, heads, blocks, _] = shape;
        let addresses = self.addresses([of.states.span(), lists.span()]);
        let units = CubeDim::new_1d(UNITS as u32);
        // SAFETY: the states have been checked against their buffer, and the lists have room for every tile and for the number of each
        // block.
        unsafe {
            list::launch_unchecked(
                self.client,
                cubes(batch * heads * blocks),
                units,
                addresses,
                of.states.broadcast_arg(),
                lists.arg(),
                self.bounds(p.batch),
                of.band.into_launch(),
                of.mask.block_q as u32,
                of.mask.block_k as u32,
                of.rows as u32,
                of.columns as u32,
                of.keys,
                p.is_ragged(),
            );
            if of.ordered {
                let cubes = cubes(batch * heads * blocks.div_ceil(UNITS));
                order::launch_unchecked(self.client, cubes, units, addresses, lists.arg());
            }
        }
        lists
    }
}

/// So many cubes. More than a device starts along one dimension: those of another; the kernel looks whether there is something for a cube.
fn cubes(number: usize) -> CubeCount {
    let across = number.clamp(1, u16::MAX as usize);
    CubeCount::Static(across as u32, number.div_ceil(across).max(1) as u32, 1)
}

/// The shape of the lists of a kernel: `[batch | 1, num_heads_q | 1, blocks, HEADER + tiles]`.
fn list_shape(p: &AttentionProblem, of: &Origin) -> [usize; 4] {
    let (along, across) = if of.keys { (p.seq_k, p.seq_q) } else { (p.seq_q, p.seq_k) };
    // Sequences of a batch end where its lengths say.
    let batch = if p.is_ragged() { p.batch } else { of.mask.blocks[0] };
    [batch, of.mask.blocks[1], along.div_ceil(of.rows), HEADER + across.div_ceil(of.columns).max(1)]
}
