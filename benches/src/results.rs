//! The files of results: what was timed (`NAME.csv`), and beside it calls, errors, memory, tiles and bytes
//! moved.
//!
//! ```text
//! NAME.csv         device time, rate and peak memory          [`Timing`]
//! NAME-calls.csv   first call, host time of a launch, error   [`Call`]
//! NAME-errors.csv  error of each result                       [`Accuracy`]
//! NAME-memory.csv  memory beyond the inputs                   [`Memory`]
//! NAME-tiles.csv   time of each tile shape, chosen or not     [`TileTiming`]
//! NAME-bytes.csv   bytes moved, from the profiler             [`Moved`]
//! ```
//!
//! Numbers that were not measured are empty. All rows of one `run` were measured together, on one device.

use crate::case::{DECODING, bytes_read_once, parse_variant};
use crate::error::Error;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

/// A kind of row, kept in files of its own.
pub trait Record: Serialize + DeserializeOwned {
    /// What follows the name of the results in the file's name.
    const SUFFIX: &'static str;
    /// The columns, in order.
    const COLUMNS: &'static [&'static str];
}

macro_rules! record {
    ($(#[$doc:meta])* $name:ident, $suffix:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl Record for $name {
            const SUFFIX: &'static str = $suffix;
            const COLUMNS: &'static [&'static str] = &[$(strip(stringify!($field))),*];
        }
    };
}

/// `r#impl` is the column `impl`.
const fn strip(name: &str) -> &str {
    match name.as_bytes() {
        [b'r', b'#', ..] => name.split_at(2).1,
        _ => name,
    }
}

record! {
    /// Device time of one pass of one implementation on one problem.
    Timing, "" {
        /// What was timed together.
        run: String,
        /// The day, as in 2026-11-21.
        date: String,
        /// The repository's commit, with a `+` where the tree differed from it.
        commit: String,
        /// The device's own name.
        device: String,
        /// `cuda`, `vulkan` (SPIR-V), `wgpu` (WGSL), or `torch` and its version.
        runtime: String,
        /// `ours`, `ours-fast` (sums of the backward in whichever order is fastest), `burn`, `composed`, `cudnn`, `flash2`,
        /// `flash2-deterministic` (sums of the backward in a fixed order), `memeff`, `flex` or `matmul`.
        r#impl: String,
        /// Which of its kernels ran.
        kernel: String,
        /// `forward`, `backward`, `both`, or `autodiff`: both, through Burn's autodiff.
        pass: String,
        /// `f32`, `f16` or `bf16`.
        dtype: String,
        /// Batches.
        batch: usize,
        /// Heads of the queries.
        heads_q: usize,
        /// Heads of keys and values.
        heads_kv: usize,
        /// Queries.
        seq_q: usize,
        /// Keys.
        seq_k: usize,
        /// Dimension of queries and keys; that of values, where it differs, is part of `variant`.
        head_dim: usize,
        /// Whether a query sees no later key.
        causal: bool,
        /// `none`, or what else is asked of the scores: by an option, by a `function` of the user's, or by `sparse` blocks.
        variant: String,
        /// Median of the samples, in milliseconds; empty where the call failed or its result was wrong.
        median_ms: Option<f64>,
        /// A fifth of the samples were faster.
        p20_ms: Option<f64>,
        /// A fifth of the samples were slower.
        p80_ms: Option<f64>,
        /// Operations as the field counts them (causal counts half, the backward 2.5 times the forward's) by the median.
        tflops: Option<f64>,
        /// The largest number of bytes in use after any allocation, inputs included.
        peak_bytes: Option<u64>,
    }
}

record! {
    /// What a call costs beside device time, and what became of it.
    Call, "-calls" {
        /// As in [`Timing`].
        run: String,
        /// As in [`Timing`].
        r#impl: String,
        /// As in [`Timing`].
        kernel: String,
        /// As in [`Timing`].
        pass: String,
        /// As in [`Timing`].
        dtype: String,
        /// As in [`Timing`].
        batch: usize,
        /// As in [`Timing`].
        heads_q: usize,
        /// As in [`Timing`].
        heads_kv: usize,
        /// As in [`Timing`].
        seq_q: usize,
        /// As in [`Timing`].
        seq_k: usize,
        /// As in [`Timing`].
        head_dim: usize,
        /// As in [`Timing`].
        causal: bool,
        /// As in [`Timing`].
        variant: String,
        /// The first call in this process, until the device has finished: compilation and autotuning included.
        first_call_ms: Option<f64>,
        /// Host time of one launch once warm: from the call's entry to its return, in microseconds.
        host_us: Option<f64>,
        /// Largest error against the oracle, over the results of the pass, as in [`Accuracy`].
        error: Option<f64>,
        /// Why there is no time: `out of memory`, `wrong result`, `not supported: …`; or that an error is not confirmed to be wrong.
        note: String,
    }
}

record! {
    /// The error of each result against the oracle: of blocks of up to 64 rows the largest relative error in the norm; empty where
    /// it was not computed or not compared. (Of commits before 2026-11-24: the root mean square of single rows' relative errors.)
    Accuracy, "-errors" {
        /// As in [`Timing`].
        run: String,
        /// As in [`Timing`].
        r#impl: String,
        /// As in [`Timing`].
        kernel: String,
        /// As in [`Timing`].
        pass: String,
        /// As in [`Timing`].
        dtype: String,
        /// As in [`Timing`].
        batch: usize,
        /// As in [`Timing`].
        heads_q: usize,
        /// As in [`Timing`].
        heads_kv: usize,
        /// As in [`Timing`].
        seq_q: usize,
        /// As in [`Timing`].
        seq_k: usize,
        /// As in [`Timing`].
        head_dim: usize,
        /// As in [`Timing`].
        causal: bool,
        /// As in [`Timing`].
        variant: String,
        /// Of the output.
        o: Option<f64>,
        /// Of the log-sum-exp, relative to 1 + |lse|.
        lse: Option<f64>,
        /// Of the queries' gradient.
        dq: Option<f64>,
        /// Of the keys'.
        dk: Option<f64>,
        /// Of the values'.
        dv: Option<f64>,
        /// Of the bias's.
        dbias: Option<f64>,
    }
}

record! {
    /// Memory of one pass of one implementation on one problem, in a process of its own.
    Memory, "-memory" {
        /// As in [`Timing`].
        run: String,
        /// As in [`Timing`].
        date: String,
        /// As in [`Timing`].
        commit: String,
        /// As in [`Timing`].
        device: String,
        /// As in [`Timing`].
        runtime: String,
        /// As in [`Timing`].
        r#impl: String,
        /// As in [`Timing`].
        kernel: String,
        /// As in [`Timing`].
        pass: String,
        /// As in [`Timing`].
        dtype: String,
        /// As in [`Timing`].
        batch: usize,
        /// As in [`Timing`].
        heads_q: usize,
        /// As in [`Timing`].
        heads_kv: usize,
        /// As in [`Timing`].
        seq_q: usize,
        /// As in [`Timing`].
        seq_k: usize,
        /// As in [`Timing`].
        head_dim: usize,
        /// As in [`Timing`].
        causal: bool,
        /// As in [`Timing`].
        variant: String,
        /// What the pass reads: `q`, `k`, `v`, mask and bias, and the output's gradient where there is a backward.
        input_bytes: u64,
        /// What it must hold beside that: output, `lse` and, where there is a backward, gradients and two f32 a row,
        /// and for an order of the backward that is not fixed `dq` in f32.
        linear_bytes: u64,
        /// As in [`Timing`].
        peak_bytes: Option<u64>,
        /// The largest number of bytes that the runtime held, in use or kept for later.
        reserved_bytes: Option<u64>,
        /// Why it was not measured.
        note: String,
    }
}

impl Timing {
    /// Gigabytes a second, where time goes with the bytes of a cache: of a forward of few queries those of `q`, `k`, `v` and `o`, each
    /// number once ([`bytes_read_once`]), by the median.
    pub fn gigabytes_per_second(&self) -> Option<f64> {
        let (variant, head_dim_v) = parse_variant(&self.variant, self.head_dim);
        let size = [("f32", 4), ("f16", 2), ("bf16", 2)].into_iter().find(|(name, _)| *name == self.dtype)?.1;
        let heads = [self.heads_q, self.heads_kv];
        let bytes = bytes_read_once(self.batch, heads, [self.seq_q, self.seq_k], [self.head_dim, head_dim_v], size);
        let decodes = self.seq_q <= DECODING && self.seq_k > self.seq_q && self.pass == "forward" && variant == "none";
        self.median_ms.filter(|_| decodes).map(|ms| bytes as f64 / ms / 1e6)
    }
}

impl Memory {
    /// The most in use beside the inputs.
    pub fn beyond(&self) -> Option<u64> {
        self.peak_bytes.map(|peak| peak.saturating_sub(self.input_bytes))
    }
}

record! {
    /// Device time of one tile shape of one kernel.
    TileTiming, "-tiles" {
        /// As in [`Timing`].
        run: String,
        /// As in [`Timing`].
        date: String,
        /// As in [`Timing`].
        commit: String,
        /// As in [`Timing`].
        device: String,
        /// As in [`Timing`].
        runtime: String,
        /// The kernel family and its part, as in `portable forward`, `portable dq`, `portable dkdv`.
        kernel: String,
        /// As in [`Timing`].
        dtype: String,
        /// As in [`Timing`].
        batch: usize,
        /// As in [`Timing`].
        heads_q: usize,
        /// As in [`Timing`].
        seq_q: usize,
        /// As in [`Timing`].
        head_dim: usize,
        /// As in [`Timing`].
        causal: bool,
        /// Queries of a tile.
        tile_q: usize,
        /// Keys of a tile.
        tile_k: usize,
        /// The rest of the shape: units and chunk.
        shape: String,
        /// Median of the samples in milliseconds; empty where it cannot run.
        median_ms: Option<f64>,
        /// As in [`Timing`].
        tflops: Option<f64>,
        /// Bytes of shared memory of a cube.
        shared_bytes: Option<u64>,
        /// Registers of a thread, where known.
        registers: Option<u32>,
        /// Whether `tiling.rs` chooses this shape here.
        chosen: bool,
        /// Why it cannot run.
        note: String,
    }
}

record! {
    /// Bytes that one launch moved, read from the profiler.
    Moved, "-bytes" {
        /// As in [`Timing`].
        run: String,
        /// As in [`Timing`].
        device: String,
        /// As in [`TileTiming`].
        kernel: String,
        /// As in [`Timing`].
        dtype: String,
        /// As in [`Timing`].
        batch: usize,
        /// As in [`Timing`].
        heads_q: usize,
        /// As in [`Timing`].
        seq_q: usize,
        /// As in [`Timing`].
        head_dim: usize,
        /// As in [`Timing`].
        causal: bool,
        /// Queries of a tile.
        tile_q: usize,
        /// Bytes between the device's memory and its L2 cache.
        dram_bytes: u64,
        /// Bytes between L2 and the multiprocessors.
        l2_bytes: u64,
        /// Bytes that the IO model of FlashAttention gives (arXiv:2205.14135, theorem 2, for tiles of `tile_q` rows):
        /// each query block reads all the keys and values that it sees.
        model_bytes: u64,
        /// Registers of a thread.
        registers: Option<u32>,
    }
}

/// Where the results called `name` keep this kind of row.
pub fn path<R: Record>(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}{}.csv", R::SUFFIX))
}

/// Adds rows to a file, which is made if it is not there, and refused if it is not ours.
pub fn append<R: Record>(file: &Path, rows: &[R]) -> Result<(), Error> {
    let fresh = !file.exists();
    if fresh && rows.is_empty() {
        return Ok(());
    }
    if fresh {
        if let Some(directory) = file.parent() {
            fs::create_dir_all(directory).map_err(|source| Error::io(directory, source))?;
        }
    } else {
        check_header::<R>(file)?;
    }
    let out = OpenOptions::new().create(true).append(true).open(file).map_err(|source| Error::io(file, source))?;
    let mut writer = csv::WriterBuilder::new().has_headers(fresh).from_writer(out);
    rows.iter()
        .try_for_each(|row| writer.serialize(row))
        .and_then(|()| Ok(writer.flush()?))
        .map_err(|source| Error::csv(file, source))
}

/// Takes a last line away that was cut short, by whatever ended the process that wrote it.
pub fn repair(file: &Path) -> Result<(), Error> {
    let io = |source| Error::io(file, source);
    let text = fs::read(file).map_err(io)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    if whole < text.len() {
        OpenOptions::new().write(true).open(file).and_then(|file| file.set_len(whole as u64)).map_err(io)?;
    }
    Ok(())
}

/// The same with every file of a name that is there.
pub fn repair_all(directory: &Path, name: &str) -> Result<(), Error> {
    let files = [
        path::<Timing>(directory, name),
        path::<Call>(directory, name),
        path::<Accuracy>(directory, name),
        path::<Memory>(directory, name),
    ];
    files.iter().filter(|file| file.exists()).try_for_each(|file| repair(file))
}

/// All rows of a file.
pub fn read<R: Record>(file: &Path) -> Result<Vec<R>, Error> {
    check_header::<R>(file)?;
    let mut reader = csv::Reader::from_path(file).map_err(|source| Error::csv(file, source))?;
    reader.deserialize().collect::<Result<_, _>>().map_err(|source| Error::csv(file, source))
}

/// All rows of this kind that the results called `name` have, none if there is no such file.
pub fn read_if_there<R: Record>(directory: &Path, name: &str) -> Result<Vec<R>, Error> {
    let file = path::<R>(directory, name);
    if file.exists() { read(&file) } else { Ok(Vec::new()) }
}

fn check_header<R: Record>(file: &Path) -> Result<(), Error> {
    let mut reader = csv::Reader::from_path(file).map_err(|source| Error::csv(file, source))?;
    let header = reader.headers().map_err(|source| Error::csv(file, source))?;
    if header.iter().eq(R::COLUMNS.iter().copied()) {
        Ok(())
    } else {
        Err(Error::NotResults { file: file.to_path_buf(), expected: R::COLUMNS.join(",") })
    }
}
