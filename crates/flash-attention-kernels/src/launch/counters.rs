//! Counters from which thread blocks take work tiles, or by which the last split of a block knows that it is the last.
//!
//! A launch needs counters that are 0. A kernel leaves its counters at 0, but an aborted launch does not. Each launch therefore
//! takes the next counters of a pool. When all have been taken, one small launch sets all of them to 0 again, so that a later launch
//! never meets a value that an aborted one has left. Launches on a stream run one after the other; each stream has its own pool.

use super::Call;
use crate::portable::nothing;
use crate::tensor::TensorView;
use crate::tiling::{self, COUNTER_BYTES, COUNTERS};
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_core::device::ServiceId;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Largest number of pools. With more streams, the pool that has been unused for the longest time is dropped.
const POOLS: usize = 32;

/// The counters of a stream.
struct Pool {
    service: ServiceId,
    handle: Handle,
    /// Number of counters taken since all were 0.
    taken: usize,
}

/// All pools, the most recently used last.
static POOLS_IN_USE: Mutex<VecDeque<Pool>> = Mutex::new(VecDeque::new());

impl Call<'_> {
    /// A counter of this client's stream that is 0 when the next launch begins.
    pub(super) fn counter(&self) -> Handle {
        self.counters(1)
    }

    /// Like [`counter`](Self::counter), `count` counters, at most [`COUNTERS`].
    pub(super) fn counters(&self, count: usize) -> Handle {
        let client = self.client;
        // A handle records the stream of its client.
        let (service, stream) = (client.service_id(), self.buffer.get_or_init(|| client.empty(COUNTER_BYTES)).stream);
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
        if pool.taken + count > COUNTERS {
            self.clear(&pool.handle);
            pool.taken = 0;
        }
        let counters = pool.handle.clone().offset_start((pool.taken * COUNTER_BYTES) as u64);
        pool.taken += count;
        // A new pool whose allocation failed is not kept: it would make every later launch fail.
        if found.is_some() || client.check([&pool.handle]).is_ok() {
            pools.push_back(pool);
        }
        counters
    }

    /// Sets all counters of a pool to 0.
    fn clear(&self, handle: &Handle) {
        // The integer 0 and the f32 0.0 have the same bits.
        let counters = TensorView::contiguous(handle.clone(), [1, 1, 1, COUNTERS]);
        let units = self.device.units.min(COUNTERS);
        let count = tiling::grid(self.device, COUNTERS.div_ceil(units) as u64);
        // SAFETY: the pool has `COUNTERS` words.
        unsafe {
            let (dim, dtype) = (CubeDim::new_1d(units as u32), ElemType::Float(FloatKind::F32));
            nothing::zeros::launch_unchecked(self.client, count, dim, AddressType::U32, counters.arg(), dtype);
        }
    }
}
