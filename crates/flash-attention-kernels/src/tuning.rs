//! Autotuning of the kernels that [`tiling`] plans. The first time that a problem of some size occurs, CubeCL's tuner times a few
//! candidates on the call's own tensors. The fastest one is remembered on disk.
//!
//! Every candidate sums in a fixed order, unless the options ask for [`BackwardOrder::Fast`]. The order differs between candidates,
//! and so do the last bits of a result. See `docs/tuning.md`.
//!
//! [`BackwardOrder::Fast`]: crate::BackwardOrder::Fast

use crate::error::{AttentionError, Result};
use crate::launch::{Gradients, Inputs, Saved, Scratch, backward_with, forward_with};
use crate::problem::{AttentionOptions, AttentionProblem};
use crate::tensor::TensorView;
use crate::tiling::{self, BackwardTiles, Device, Forward, Gradient, PortableForward};
use cubecl::client::Client;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::environment::{CacheOption, Store, StoreOptions};
use cubecl::future::block_on;
use cubecl::tune::{LocalTuner, PersistentCacheKey, PersistentCacheValue, Tunable, TunableSet, TuneTableName};
use cubecl_core::device::ServiceId;
use serde::Serialize;
use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Largest number of candidates that are timed, including the planned one.
pub const CANDIDATES: usize = 3;

/// Assumed minimum time to compile a candidate. The time measured for the planned one may be shorter, because it may have been
/// compiled before.
const COMPILING: Duration = Duration::from_millis(500);

/// Number of runs of a candidate before it is timed.
const WARM_UPS: usize = 1;

/// Time limits of the two passes. A new size may take 5 s in total; 1 s of it is reserved for errors of the estimate.
static FORWARD: Pass = Pass::new("flash-attention-forward", Duration::from_millis(1500));
static BACKWARD: Pass = Pass::new("flash-attention-backward", Duration::from_millis(2500));

/// [`forward`](crate::forward) with the fastest candidate for problems of this size. Candidates are timed if the fastest is not
/// known yet.
///
/// Timing runs the candidates several times on the tensors of this call. The planned kernel runs without timing if the timing is
/// expected to take more than 1.5 s, if another thread is timing the same problem, and always in a browser, where no call may
/// block.
///
/// Returns the kernel that ran, with its tiles. Errors name the argument at fault; in that case nothing has been launched.
///
/// ```no_run
/// # use flash_attention_kernels::{AttentionError, AttentionProblem, Inputs, TensorView, tuning::forward_tuned};
/// # fn f(
/// #     client: &cubecl::client::Client, problem: &AttentionProblem, inputs: &Inputs, o: &TensorView, lse: &TensorView<3>,
/// # ) -> Result<(), AttentionError> {
/// let ran = forward_tuned(client, problem, inputs, o, lse)?;
/// println!("{} of {} queries", ran.kernel().name(), ran.tile_q());
/// # Ok(())
/// # }
/// ```
pub fn forward_tuned(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    o: &TensorView,
    lse: &TensorView<3>,
) -> Result<Forward, AttentionError> {
    let candidates = tiling::forward_candidates(&Device::of(client), problem, CANDIDATES)?;
    let (inputs, o, lse) = (inputs.clone(), o.clone(), lse.clone());
    FORWARD.fastest(client, problem, candidates, forward_name, move |client, problem, forward| {
        forward_with(client, problem, &inputs, &o, &lse, forward)
    })
}

/// [`backward`](crate::backward) with the fastest candidate for problems of this size. Candidates are timed if the fastest is not
/// known yet.
///
/// The rules of [`forward_tuned`] apply, with a limit of 2.5 s. A result of a call that requests some of the gradients is also used
/// for calls that request others.
///
/// Returns the kernels that ran, with their tiles. Errors name the argument at fault; in that case nothing has been launched.
///
/// ```no_run
/// # use flash_attention_kernels::{AttentionError, AttentionProblem, Gradients, Inputs, Saved, tuning::backward_tuned};
/// # fn f(
/// #     client: &cubecl::client::Client, problem: &AttentionProblem, inputs: &Inputs, saved: &Saved, gradients: &Gradients,
/// # ) -> Result<(), AttentionError> {
/// let ran = backward_tuned(client, problem, inputs, saved, gradients)?;
/// println!("dq by {}", ran.dq.kernel().name());
/// # Ok(())
/// # }
/// ```
pub fn backward_tuned(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    saved: &Saved,
    gradients: &Gradients,
) -> Result<BackwardTiles, AttentionError> {
    let mut candidates = tiling::backward_candidates(&Device::of(client), problem, CANDIDATES)?;
    if gradients.is_empty() {
        candidates.truncate(1);
    }
    let (inputs, saved, gradients) = (inputs.clone(), saved.clone(), gradients.clone());
    let scratch = Scratch::empty(client, problem);
    BACKWARD.fastest(client, problem, candidates, backward_name, move |client, problem, tiles| {
        backward_with(client, problem, &inputs, &saved, &gradients, &scratch, Some(tiles))
    })
}

/// The fastest kernels found so far: the result of [`tuned`].
///
/// ```
/// use flash_attention_kernels::tuning::Tuned;
///
/// let nothing_timed = Tuned::default();
/// assert!(nothing_timed.forward.is_none() && nothing_timed.backward.is_none());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Tuned {
    /// The forward. `None` if none has been timed: the kernel of [`plan`](crate::plan()) runs then.
    pub forward: Option<Forward>,
    /// The backward, in the same way.
    pub backward: Option<BackwardTiles>,
}

/// The fastest kernels found for problems of this size on this client's device, by this process or an earlier one. It times
/// nothing.
///
/// Returns an error if no kernel can compute the problem.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, tuning::tuned};
///
/// # fn f(client: &cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// let shape = [4, 16, 4096, 128];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// match tuned(client, &problem)?.forward {
///     Some(forward) => println!("blocks of {} queries were the fastest", forward.tile_q()),
///     None => println!("not timed yet"),
/// }
/// # Ok(())
/// # }
/// ```
pub fn tuned(client: &Client, problem: &AttentionProblem) -> Result<Tuned, AttentionError> {
    problem.validate()?;
    let device = Device::of(client);
    tiling::check_dtype(&device, problem.dtype)?;
    let forwards = tiling::forward_candidates(&device, problem, CANDIDATES)?;
    let backwards = tiling::backward_candidates(&device, problem, CANDIDATES)?;
    let forward = FORWARD.found(client, &key(problem, &forwards, forward_name));
    let backward = BACKWARD.found(client, &key(problem, &backwards, backward_name));
    Ok(Tuned {
        forward: forward.and_then(|rank| forwards.get(rank).copied()),
        backward: backward.and_then(|rank| backwards.get(rank).copied()),
    })
}

/// Deletes all results of timing: on disk those for hardware like this client's, and in this process those for all hardware. Later
/// calls are timed again.
///
/// ```no_run
/// # fn f(client: &cubecl::client::Client) {
/// flash_attention_kernels::tuning::forget(client);
/// # }
/// ```
pub fn forget(client: &Client) {
    for pass in [&FORWARD, &BACKWARD] {
        pass.tuner.clear();
        pass.too_long().clear();
        if let Some(mut table) = pass.table(client) {
            table.purge();
        }
    }
}

/// A pass that is tuned separately: forward or backward.
struct Pass {
    name: &'static str,
    /// Time limit for timing a problem.
    limit: Duration,
    tuner: LocalTuner<String, ServiceId>,
    /// Problems whose timing would exceed the limit.
    too_long: LazyLock<Mutex<HashSet<(ServiceId, String)>>>,
}

type Table = Store<PersistentCacheKey<String>, PersistentCacheValue>;

type Candidates = TunableSet<String, Call, (), Rank>;

impl Pass {
    const fn new(name: &'static str, limit: Duration) -> Self {
        Pass { name, limit, tuner: LocalTuner::new(name), too_long: LazyLock::new(Default::default) }
    }

    /// Runs the fastest of the candidates, and returns it. `name` names one, given the planned one.
    fn fastest<T: Copy + Send + Sync + 'static>(
        &'static self,
        client: &Client,
        problem: &AttentionProblem,
        candidates: Vec<T>,
        name: fn(T, T) -> String,
        launch: impl Fn(&Client, &AttentionProblem, T) -> Result<()> + Send + Sync + 'static,
    ) -> Result<T> {
        let alone = problem.rows() == 0 || problem.seq_k == 0;
        let (of_call, problem, all) = (client.clone(), *problem, candidates.clone());
        let call = Call {
            id: client.service_id(),
            key: key(&problem, &candidates, name),
            candidates: if alone { 1 } else { candidates.len() },
            launch: Arc::new(move |rank| launch(&of_call, &problem, all[rank])),
            deadline: None,
        };
        Ok(candidates[self.run(client, call)?])
    }

    /// Runs the fastest candidate, after timing the candidates if needed. Returns its index.
    fn run(&'static self, client: &Client, call: Call) -> Result<usize> {
        let run = |rank: usize| (call.launch)(rank).map(|()| rank);
        if call.candidates == 1 || cfg!(target_family = "wasm") {
            return run(0);
        }
        if let Some(rank) = self.settled(call.id, &call.key) {
            return run(rank);
        }
        if self.too_long().contains(&(call.id, call.key.clone())) {
            return run(0);
        }
        // Running the candidate first reports invalid arguments as an error. The tuner would panic.
        if let Some(rank) = self.remembered(client, &call.key) {
            run(rank)?;
            return Ok(self.tune(client, call));
        }
        if block_on(client.sync()).is_err() {
            // The error is reported when a result is read.
            return run(0);
        }
        let started = Instant::now();
        let time = || {
            let started = Instant::now();
            run(0)?;
            Ok(block_on(client.sync()).ok().map(|()| started.elapsed()))
        };
        let Some(first) = time()? else { return Ok(0) };
        // The first run includes compilation, which takes about as long for the other candidates. The second run shows the time of
        // a sample.
        let rest = if first > self.limit {
            Duration::MAX
        } else {
            let Some(again) = time()? else { return Ok(0) };
            let (_, samples) = CubeClRuntimeConfig::get().autotune.bench.samples();
            let compiling = first.saturating_sub(again).max(COMPILING) * (call.candidates as u32 - 1);
            compiling + again * (call.candidates * (WARM_UPS + samples)) as u32
        };
        if started.elapsed().saturating_add(rest) > self.limit {
            self.too_long().insert((call.id, call.key));
            return Ok(0);
        }
        Ok(self.tune(client, Call { deadline: Some(started + self.limit), ..call }))
    }

    /// Runs the fastest candidate of a call whose arguments are known to be valid. Returns its index.
    fn tune(&'static self, client: &Client, call: Call) -> usize {
        let (id, key) = (call.id, call.key.clone());
        self.tuner.execute(&id, client, self.candidates(id), call);
        // If another thread is timing the problem, the planned candidate has run.
        self.settled(id, &key).unwrap_or(0)
    }

    /// Index of the fastest candidate, if this process knows it.
    fn settled(&'static self, id: ServiceId, key: &String) -> Option<usize> {
        self.tuner.fastest_identity(&id, &self.candidates(id), key).map(|rank| rank.0)
    }

    /// Index of the fastest candidate that an earlier process has found.
    fn remembered(&'static self, client: &Client, key: &str) -> Option<usize> {
        let checksum = self.candidates(client.service_id()).compute_checksum();
        let found = self.table(client)?.remove(&PersistentCacheKey { key: key.to_string(), checksum })?;
        Some(found.fastest_index)
    }

    /// Index of the fastest candidate, if it is known.
    fn found(&'static self, client: &Client, key: &String) -> Option<usize> {
        self.settled(client.service_id(), key).or_else(|| self.remembered(client, key))
    }

    /// The table in which CubeCL's tuner stores results, unless its cache is disabled.
    fn table(&self, client: &Client) -> Option<Table> {
        let hardware = client.hardware_identity().to_string();
        let name = TuneTableName { hardware: &hardware, tuner: self.name };
        let options = || StoreOptions::new().storage(name.namespace()).cache(CacheOption::Lazy);
        (!CubeClRuntimeConfig::get().autotune.disable_cache).then(|| Store::new(options()))
    }

    /// The candidates by index. Each call maps an index to a kernel for its problem.
    fn candidates(&'static self, id: ServiceId) -> Arc<Candidates> {
        self.tuner.init(&id, move || {
            let none = TunableSet::new_cloning_inputs(|call: &Call| call.key.clone());
            (0..CANDIDATES).fold(none, |set, rank| {
                set.with(Tunable::identified(Rank(rank), move |call: Call| match rank {
                    _ if rank >= call.candidates => Err("there are fewer candidates".to_string()),
                    // The planned candidate is run even after the deadline.
                    1.. if call.is_late() && self.settled(call.id, &call.key).is_none() => {
                        Err("it is late".to_string())
                    }
                    _ => (call.launch)(rank).map_err(|error| error.to_string()),
                }))
            })
        })
    }

    fn too_long(&self) -> MutexGuard<'_, HashSet<(ServiceId, String)>> {
        self.too_long.lock().expect("nothing panics while it is held")
    }
}

/// A call that any of its candidates can perform.
#[derive(Clone)]
struct Call {
    id: ServiceId,
    key: String,
    candidates: usize,
    launch: Arc<dyn Fn(usize) -> Result<()> + Send + Sync>,
    deadline: Option<Instant>,
}

impl Call {
    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() > deadline)
    }
}

/// Index of a candidate.
#[derive(Clone, Copy)]
struct Rank(usize);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "candidate {}", self.0)
    }
}

/// Key of the problems that share one result: sizes are rounded up to powers of two. The key contains the names of the candidates,
/// so that results become invalid if the tables of tiles change.
fn key<T: Copy>(problem: &AttentionProblem, candidates: &[T], name: fn(T, T) -> String) -> String {
    let up = usize::next_power_of_two;
    let window = |window: Option<usize>| window.map(|window| up(window.min(problem.seq_k)));
    let heads = up(problem.num_heads_kv);
    let rounded = AttentionProblem {
        batch: up(problem.batch),
        num_heads_q: heads * problem.group_size(),
        num_heads_kv: heads,
        seq_q: up(problem.seq_q),
        seq_k: up(problem.seq_k),
        mask: problem.mask.map(|shape| shape.map(up)),
        bias: problem.bias.map(|shape| shape.map(up)),
        alibi_slopes: problem.alibi_slopes.map(|_| [1, 1]),
        score_tensors: problem.score_tensors.map(|shape| shape.map(|shape| shape.map(up))),
        mask_tensors: problem.mask_tensors.map(|shape| shape.map(|shape| shape.map(up))),
        cu_seqlens: problem.cu_seqlens.map(up),
        options: AttentionOptions {
            softmax_scale: None,
            softcap: problem.options.softcap.map(|_| 1.0),
            dropout: if problem.options.dropout > 0.0 { 0.5 } else { 0.0 },
            dropout_seed: None,
            window_left: window(problem.options.window_left),
            window_right: window(problem.options.window_right),
            ..problem.options
        },
        ..*problem
    };
    let names: Vec<String> = candidates.iter().map(|candidate| name(*candidate, candidates[0])).collect();
    format!("{rounded:?} by {}", names.join(", "))
}

/// Name of a candidate, without values that depend on the exact sizes.
fn forward_name(forward: Forward, planned: Forward) -> String {
    match (forward, planned) {
        (Forward::Hopper(forward), Forward::Hopper(planned)) => {
            format!("{:?} num_splits {:?}", forward.tile, forward.num_splits.cmp(&planned.num_splits))
        }
        (Forward::Mma(forward), _) => format!("{:?}", forward.tile),
        (
            Forward::Portable(PortableForward::FewRows(forward)),
            Forward::Portable(PortableForward::FewRows(planned)),
        ) => format!("{:?} num_splits {:?}", forward.tile, forward.num_splits.cmp(&planned.num_splits)),
        (forward, _) => format!("{forward:?}"),
    }
}

fn backward_name(tiles: BackwardTiles, _: BackwardTiles) -> String {
    let name = |gradient| match gradient {
        Gradient::Hopper(gradient) => format!("{:?}", gradient.tile),
        Gradient::Mma(gradient) => format!("{:?}", gradient.tile),
        gradient => format!("{gradient:?}"),
    };
    let BackwardTiles { dq, dkdv, dv, fused, dbias, dalibi_slopes: _, dscore_tensors: _ } = tiles;
    let fused = fused.map(Gradient::Hopper).map(name);
    format!("{} {} {:?} {fused:?} {dbias:?}", name(dq), name(dkdv), dv.map(name))
}
