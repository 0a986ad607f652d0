//! Over what a kernel walks: launches what makes the lists of a block mask, and keeps them.

use super::Call;
use super::sequences::Blocks;
use crate::blocks::{BlockStatesLaunch, UNITS, list, order};
use crate::mask::Band;
use crate::problem::BlockMask;
use crate::tensor::TensorView;
use crate::tiling::{self, ListShape};
use cubecl::client::Client;
use cubecl::ir::AddressType;
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

impl Route {
    /// The address type that reaches all of it.
    pub fn addresses(&self) -> AddressType {
        let of_lists = self.lists.as_ref().map_or(0, |lists| lists.span());
        AddressType::from_len(of_lists.max(self.schedule.as_ref().map_or(0, |schedule| schedule.span())) as usize)
    }
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

/// Lists that are kept, at most: those of forward and backward take three, so that four problems have theirs. When there are more, the
/// oldest ones go.
const MOST_KEPT: usize = 12;

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
    list: ListShape,
    /// Whether blocks have been put in [`order()`].
    ordered: bool,
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        let of_host = |of: &Self| (of.mask, of.band, of.list, of.ordered);
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

    /// Those of this origin: those kept, or else new ones, which are made while nothing is locked. Of two threads that make the same,
    /// each works with its own, and one's are kept. Lists that could not be made, as without memory, are not kept: they would fail every
    /// call that comes after.
    fn of(&self, client: &Client, of: &Origin, make: impl FnOnce() -> TensorView) -> TensorView {
        let found = |all: &[Kept]| all.iter().find(|kept| kept.of == *of).map(|kept| kept.lists.clone());
        let all = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lists) = found(&all()) {
            return lists;
        }
        let lists = make();
        if client.check([&lists.handle]).is_err() {
            return lists;
        }
        let mut all = all();
        if found(&all).is_none() {
            if all.len() == MOST_KEPT {
                all.remove(0);
            }
            all.push(Kept { of: of.clone(), lists: lists.clone() });
        }
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
        let list = ListShape { keys: of != Blocks::Queries, rows, columns };
        let (states, mask, shape) = (self.inputs.block_mask.clone()?, p.block_mask?, list.shape(p)?);
        let of = Origin { states, mask, band: p.band(), list, ordered };
        Some(if p.is_varlen() {
            self.make_lists(&of, shape)
        } else {
            self.inputs.block_lists.of(self.client, &of, || self.make_lists(&of, shape))
        })
    }

    fn make_lists(&self, of: &Origin, shape: [usize; 4]) -> TensorView {
        let p = self.problem;
        let [batch, heads, blocks, _] = shape;
        // The check of tiles has seen that there are no more than the device starts.
        let cubes = |number: usize| {
            let (x, y, z) = tiling::grid(self.device, number as u64);
            CubeCount::Static(x, y, z)
        };
        let lists = TensorView::contiguous(self.client.empty(4 * shape.iter().product::<usize>()), shape);
        let addresses = self.addresses([lists.span()]);
        let units = CubeDim::new_1d(UNITS as u32);
        // SAFETY: the states have been checked against their buffer, and the lists have room for every tile and for the number of each
        // block.
        unsafe {
            list::launch_unchecked(
                self.client,
                cubes(batch * heads * blocks),
                units,
                addresses,
                BlockStatesLaunch::new(of.states.broadcast_arg(), of.mask.block_q as u32, of.mask.block_k as u32),
                lists.arg(),
                self.bounds(p.batch),
                of.band.into_launch(),
                of.list.size(),
                p.is_varlen(),
            );
            if of.ordered {
                let cubes = cubes(batch * heads * blocks.div_ceil(UNITS));
                order::launch_unchecked(self.client, cubes, units, addresses, lists.arg());
            }
        }
        lists
    }
}
