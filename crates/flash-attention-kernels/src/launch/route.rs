//! Blocks and tiles that a kernel visits: launches the kernels that list the tiles of a block mask, and caches the lists.

use super::Call;
use crate::blocks::{BlockSizeLaunch, BlockStatesLaunch, UNITS, list, order};
use crate::mask::Band;
use crate::problem::BlockMask;
use crate::tensor::{AnyView, TensorView};
use crate::tiling::{self, ListShape};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// Blocks of rows and tiles of columns that a kernel visits.
#[derive(Default)]
pub(super) struct Route {
    /// The schedule, if there are several sequences.
    pub schedule: Option<TensorView<1>>,
    /// Whether kernels read the lengths of sequences, each of which has one block, and there is no schedule.
    pub lengths: bool,
    /// The lists of visited tiles, if there is a block mask.
    pub lists: Option<TensorView>,
}

impl Route {
    /// The address type that reaches every element.
    pub fn addresses(&self) -> AddressType {
        let of_lists = self.lists.as_ref().map_or(0, |lists| lists.span());
        AddressType::from_len(of_lists.max(self.schedule.as_ref().map_or(0, |schedule| schedule.span())) as usize)
    }
}

/// Cache of the [lists](mod@crate::blocks) made from the states of block masks. Clones share the cache: of all calls with the
/// same states, in whichever layer or step, only the first one makes the lists. States are identified by their memory. The
/// cache keeps that memory alive, and it must not be written to while the lists are cached.
///
/// If only the device knows the lengths of sequences, every call makes its own lists.
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

/// Largest number of cached lists. Forward and backward of a problem need three, so that four problems fit. Beyond that, the
/// oldest lists are removed.
const MOST_KEPT: usize = 12;

#[derive(Debug)]
struct Kept {
    of: Origin,
    lists: TensorView,
}

/// Everything that lists depend on, if the host knows the lengths of sequences.
#[derive(Clone, Debug)]
struct Origin {
    states: TensorView,
    mask: BlockMask,
    band: Band,
    list: ListShape,
    /// Whether the blocks have been ordered by [`order()`].
    ordered: bool,
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        let of_host = |of: &Self| (of.mask, of.band, of.list, of.ordered);
        // Memory that the cache keeps alive cannot belong to another tensor.
        let of_states = |TensorView { handle, shape, strides }: &TensorView| {
            (handle.service, handle.clone().binding().claim_key(), *shape, *strides)
        };
        of_host(self) == of_host(other) && of_states(&self.states) == of_states(&other.states)
    }
}

impl BlockLists {
    /// Number of cached lists.
    ///
    /// ```
    /// assert_eq!(flash_attention_kernels::BlockLists::default().kept(), 0);
    /// ```
    pub fn kept(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The lists of this origin, from the cache or newly made. The lock is not held while lists are made: if two threads make
    /// the same lists, each uses its own, and one of them is cached. Lists that could not be made, for example without memory,
    /// are not cached: they would make every later call fail.
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

impl BlockMask {
    /// Size of a block, as a launch argument.
    pub(super) fn size(self) -> BlockSizeLaunch {
        BlockSizeLaunch::new(self.block_q as u32, self.block_k as u32)
    }
}

impl Call<'_> {
    /// The route of a kernel with these blocks and tiles. `transposed`: its band is transposed if rows are keys.
    pub(super) fn route(&self, list: ListShape, transposed: bool) -> Route {
        Route {
            schedule: self.schedule(list.keys, transposed, list.rows),
            lists: self.lists(list, false),
            lengths: false,
        }
    }

    /// The route of a kernel of tensor cores, whose band is transposed if rows are keys. It takes blocks in the order of
    /// [`order()`], if there is a block mask. Several sequences have their own order in the schedule.
    #[cfg(feature = "cuda")]
    pub(super) fn route_in_order(&self, list: ListShape) -> Route {
        let schedule = self.schedule(list.keys, true, list.rows);
        let lists = self.lists(list, schedule.is_none());
        Route { schedule, lists, lengths: false }
    }

    /// [`route_in_order`](Self::route_in_order) of a forward whose blocks have `list.rows` queries. If that is all queries of a padded
    /// batch, there is no schedule, and no launch that makes one.
    #[cfg(feature = "cuda")]
    pub(super) fn route_of_few(&self, list: ListShape) -> Route {
        let p = self.problem;
        let padded = p.is_varlen() && p.cu_seqlens.is_none() && p.block_mask.is_none();
        if padded && p.seq_q <= list.rows {
            return Route { lengths: true, ..Route::default() };
        }
        self.route_in_order(list)
    }

    /// The lists of visited tiles, if there is a block mask.
    pub(super) fn lists(&self, list: ListShape, ordered: bool) -> Option<TensorView> {
        let p = self.problem;
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
        let [sequences, heads, blocks, _] = shape;
        // The check of the tiles has shown that the device can launch as many.
        let cubes = |number: usize| tiling::grid(self.device, number as u64);
        let lists = TensorView::empty_words(self.client, shape);
        let addresses = self.addresses(&[&lists]);
        let units = CubeDim::new_1d(UNITS as u32);
        // SAFETY: the states have been checked against their buffer. The lists have room for every tile and for the number of
        // each block.
        unsafe {
            list::launch_unchecked(
                self.client,
                cubes(sequences * heads * blocks),
                units,
                addresses,
                BlockStatesLaunch::new(of.states.broadcast_arg(), of.mask.size()),
                lists.arg(),
                self.bounds(),
                of.band.into_launch(),
                of.list.size(),
                p.is_varlen(),
            );
            if of.ordered {
                let cubes = cubes(sequences * heads * blocks.div_ceil(UNITS));
                order::launch_unchecked(self.client, cubes, units, addresses, lists.arg());
            }
        }
        lists
    }
}
