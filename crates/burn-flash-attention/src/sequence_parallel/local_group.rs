//! Ranks that are threads of one process, each with its own device, or several with the same one.

use super::{CollectiveError, Collectives};
use burn::tensor::Tensor;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The ranks of a group of threads, to be moved one to each thread.
///
/// The ranks meet for each call. The last one to arrive moves the tensors of all, so that all transfers are queued in one order: an
/// [all-to-all](Tensor::all_to_all) of Burn (NCCL on CUDA, where each rank has a GPU of its own), and `to_device` around the ring. A rank that is
/// dropped, or a call that waits for longer than `timeout`, makes this and all later calls of the group fail on every rank. The timeout should allow for the
/// time that ranks differ by, such as the compilation of kernels.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::sequence_parallel::{CollectiveError, local_group};
/// use std::time::Duration;
///
/// let mut ranks = local_group(2, Duration::from_secs(60));
/// drop(ranks.remove(1));
/// let error = ranks[0].ring_shift(vec![Tensor::<4>::zeros([1, 1, 1, 1], &Device::flex())]).unwrap_err();
/// assert_eq!(error, CollectiveError::Left { rank: 1 });
/// # }
/// ```
pub fn local_group(world_size: usize, timeout: Duration) -> Vec<Arc<dyn Collectives>> {
    let meeting = Arc::new(Meeting::new(world_size, timeout));
    let rank = |rank| Arc::new(LocalRank { rank, meeting: meeting.clone() }) as Arc<dyn Collectives>;
    (0..world_size).map(rank).collect()
}

/// A rank of a group of threads.
#[derive(Debug)]
struct LocalRank {
    rank: usize,
    meeting: Arc<Meeting>,
}

impl Collectives for LocalRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.meeting.world_size
    }

    fn all_to_all(&self, tensors: Vec<Tensor<4>>, dim: usize) -> Result<Vec<Tensor<4>>, CollectiveError> {
        self.meeting.call(self.rank, Operation::AllToAll { dim }, tensors)
    }

    fn ring_shift(&self, tensors: Vec<Tensor<4>>) -> Result<Vec<Tensor<4>>, CollectiveError> {
        self.meeting.call(self.rank, Operation::RingShift, tensors)
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        self.meeting.fail(&mut self.meeting.lock(), CollectiveError::Left { rank: self.rank });
    }
}

/// What all ranks call together.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    AllToAll { dim: usize },
    RingShift,
}

impl Operation {
    /// Moves the tensors of all ranks.
    fn run(self, ranks: Vec<Vec<Tensor<4>>>) -> Vec<Vec<Tensor<4>>> {
        match self {
            Operation::AllToAll { dim } => {
                let moved = transposed(ranks).into_iter().map(|members| Tensor::all_to_all(members, dim, dim));
                transposed(moved.collect())
            }
            Operation::RingShift => {
                let devices: Vec<_> = ranks.iter().map(|tensors| tensors.first().map(Tensor::device)).collect();
                let mut shifted = ranks;
                shifted.rotate_right(1);
                let received = shifted.into_iter().zip(devices).map(|(tensors, device)| match device {
                    Some(device) => tensors.into_iter().map(|tensor| tensor.to_device(&device)).collect(),
                    None => tensors,
                });
                received.collect()
            }
        }
    }
}

/// The `n`th elements of all lists, for each `n`.
fn transposed(lists: Vec<Vec<Tensor<4>>>) -> Vec<Vec<Tensor<4>>> {
    let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
    let mut nth = move || lists.iter_mut().map(Iterator::next).collect::<Option<Vec<_>>>();
    std::iter::from_fn(move || nth().filter(|members| !members.is_empty())).collect()
}

/// A call of a rank that has arrived.
#[derive(Debug)]
struct Call {
    operation: Operation,
    tensors: Vec<Tensor<4>>,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operation {
            Operation::AllToAll { dim } => write!(f, "all_to_all along dimension {dim} of")?,
            Operation::RingShift => write!(f, "ring_shift of")?,
        }
        self.tensors.iter().try_for_each(|tensor| write!(f, " {:?} {}", tensor.dims(), tensor.dtype().name()))
    }
}

/// Where the ranks meet.
#[derive(Debug)]
struct Meeting {
    world_size: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

/// A rank takes its results before it calls again, so the calls of two meetings never mix.
#[derive(Debug)]
struct State {
    calls: Vec<Option<Call>>,
    results: Vec<Option<Vec<Tensor<4>>>>,
    /// Why no call can complete any more.
    failure: Option<CollectiveError>,
}

impl Meeting {
    fn new(world_size: usize, timeout: Duration) -> Self {
        let none = || (0..world_size).map(|_| None).collect();
        let state = State { calls: none(), results: (0..world_size).map(|_| None).collect(), failure: None };
        Meeting { world_size, timeout, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The state, also after a panic of a rank that held it: that rank leaves the group.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the first failure and wakes all ranks.
    fn fail(&self, state: &mut State, failure: CollectiveError) {
        state.failure.get_or_insert(failure);
        state.calls.fill_with(|| None);
        self.changed.notify_all();
    }

    /// Joins a call, and returns this rank's results of it.
    fn call(
        &self,
        rank: usize,
        operation: Operation,
        tensors: Vec<Tensor<4>>,
    ) -> Result<Vec<Tensor<4>>, CollectiveError> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let call = Call { operation, tensors };
        let told = call.to_string();
        state.calls[rank] = Some(call);
        if state.calls.iter().all(Option::is_some) {
            let calls: Vec<Call> = state.calls.iter_mut().filter_map(Option::take).collect();
            match mismatch(&calls) {
                Some(failure) => self.fail(&mut state, failure),
                None => {
                    let results = operation.run(calls.into_iter().map(|call| call.tensors).collect());
                    state.results = results.into_iter().map(Some).collect();
                    self.changed.notify_all();
                }
            }
        }
        let waiting = |state: &mut State| state.results[rank].is_none() && state.failure.is_none();
        let (mut state, _) =
            self.changed.wait_timeout_while(state, self.timeout, waiting).unwrap_or_else(PoisonError::into_inner);
        if let Some(result) = state.results[rank].take() {
            return Ok(result);
        }
        let missing = (0..self.world_size).filter(|rank| state.calls[*rank].is_none()).collect();
        let timeout = CollectiveError::Timeout { rank, operation: told, missing, timeout: self.timeout };
        let failure = state.failure.clone().unwrap_or(timeout);
        self.fail(&mut state, failure.clone());
        Err(failure)
    }
}

/// The first rank whose call is not that of rank 0.
fn mismatch(calls: &[Call]) -> Option<CollectiveError> {
    let mut all = calls.iter().map(Call::to_string);
    let expected = all.next()?;
    let (nth, found) = all.enumerate().find(|(_, found)| *found != expected)?;
    Some(CollectiveError::Mismatch { rank: nth + 1, found, expected })
}
