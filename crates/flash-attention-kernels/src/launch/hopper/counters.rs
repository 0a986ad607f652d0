//! The counters that thread blocks take work tiles from.
//!
//! A launch needs one that is 0. Kernels leave theirs at 0, but a launch that was aborted does not. So each launch takes the next of a
//! pool of counters, and when all have been taken, one small launch makes all 0 again: whatever a launch leaves behind is never met by
//! the next ones. Launches on a stream come one after the other, so each stream has a pool of its own.

use crate::launch::Call;
use crate::portable::nothing;
use crate::tensor::TensorView;
use crate::tiling::{self, COUNTER_BYTES, COUNTERS};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_core::device::ServiceId;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Pools that are kept, at most: when more streams come by, the pool that has not been used for longest goes.
const POOLS: usize = 32;

/// The counters of a stream.
struct Pool {
    service: ServiceId,
    handle: Handle,
    /// How many have been taken since all were 0.
    taken: usize,
}

/// All pools, that which was used last at the end.
static POOLS_IN_USE: Mutex<VecDeque<Pool>> = Mutex::new(VecDeque::new());

impl Call<'_> {
    /// A counter of this client's stream that is 0 when the next launch begins.
    pub(super) fn counter(&self) -> Handle {
        let client = self.client;
        // A handle knows the stream that its client works on.
        let (service, stream) = (client.service_id(), client.empty(COUNTER_BYTES).stream);
        let mut pools = POOLS_IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = pools.iter().rposition(|pool| pool.service == service && pool.handle.stream == stream);
        let mut pool = match found.and_then(|found| pools.remove(found)) {
            Some(pool) => pool,
            None => {
                while pools.len() >= POOLS {
                    pools.pop_front();
                }
                Pool { service, handle: client.create_from_slice(&[0; COUNTERS * COUNTER_BYTES]), taken: 0 }
            }
        };
        if pool.taken == COUNTERS {
            self.clear(client, &pool.handle);
            pool.taken = 0;
        }
        let counter = pool.handle.clone().offset_start((pool.taken * COUNTER_BYTES) as u64);
        pool.taken += 1;
        // A new pool for which there was no memory is not kept: it would fail every launch that comes after.
        if found.is_some() || client.check([&pool.handle]).is_ok() {
            pools.push_back(pool);
        }
        counter
    }

    /// Makes all counters of a pool 0.
    fn clear(&self, client: &Client, handle: &Handle) {
        // The bits of 0 are those of 0.0.
        let counters = TensorView::contiguous(handle.clone(), [1, 1, 1, COUNTERS]);
        let units = self.device.units.min(COUNTERS);
        let (x, y, z) = tiling::grid(self.device, COUNTERS.div_ceil(units) as u64);
        // SAFETY: the pool has as many words.
        unsafe {
            let dtype = ElemType::Float(FloatKind::F32);
            let (count, dim) = (CubeCount::Static(x, y, z), CubeDim::new_1d(units as u32));
            nothing::zeros::launch_unchecked(client, count, dim, AddressType::U32, counters.arg(), dtype);
        }
    }
}
