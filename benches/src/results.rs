//! Result files: timings (`NAME.csv`), and beside them calls, errors, memory, tiles and bytes moved.
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
//! Values that were not measured are empty. All rows of one `run` were measured together, on one device.

use crate::case::{bytes_read_once, is_decoding, parse_variant, sizes};
use crate::error::Error;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

/// A kind of row, stored in its own files.
pub trait Record: Serialize + DeserializeOwned {
    /// Suffix of the file name after the name of the results.
    const SUFFIX: &'static str;
    /// Columns, in order.
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

/// Converts the field name `r#impl` to the column name `impl`.
const fn strip(name: &str) -> &str {
    match name.as_bytes() {
        [b'r', b'#', ..] => name.split_at(2).1,
        _ => name,
    }
}

record! {
    /// Device time of one pass of one implementation on one problem.
    Timing, "" {
        /// Identifies rows that were measured together.
        run: String,
        /// Date, as in 2026-11-21.
        date: String,
        /// Commit of the repository, with a `+` if the tree differed from it.
        commit: String,
        /// Name of the device.
        device: String,
        /// `cuda`, `vulkan` (SPIR-V), `wgpu` (WGSL), or `torch` and its version.
        runtime: String,
        /// `ours`, `ours-fast` (with the fastest order of sums in the backward), `burn`, `composed`, `cudnn`, `flash2`,
        /// `flash2-deterministic` (with a fixed order of sums in the backward), `memeff` or `flex`; or, of the device itself, `matmul`
        /// (a product of matrices) or `copy` (of a tensor `[batch, heads_q, seq_q, head_dim]`).
        r#impl: String,
        /// The kernel that ran.
        kernel: String,
        /// `forward`, `backward`, `both`, or `autodiff`: both, through Burn's autodiff.
        pass: String,
        /// `f32`, `f16` or `bf16`.
        dtype: String,
        /// Batches.
        batch: usize,
        /// Number of query heads.
        heads_q: usize,
        /// Number of key/value heads.
        heads_kv: usize,
        /// Number of queries.
        seq_q: usize,
        /// Number of keys.
        seq_k: usize,
        /// Head dimension of queries and keys. If that of values differs, it is part of `variant`.
        head_dim: usize,
        /// Whether later keys are hidden from a query.
        causal: bool,
        /// `none`, or another option: as an option, as a user's `function`, or as a `sparse` block mask.
        variant: String,
        /// Median of the samples, in milliseconds; empty if the call failed or its result was wrong.
        median_ms: Option<f64>,
        /// 20th percentile of the samples.
        p20_ms: Option<f64>,
        /// 80th percentile of the samples.
        p80_ms: Option<f64>,
        /// Operations as counted in papers (causal counts half, the backward 2.5 times the forward), divided by the median.
        tflops: Option<f64>,
        /// Peak of the bytes in use after any allocation, including inputs.
        peak_bytes: Option<u64>,
    }
}

record! {
    /// Costs of a call other than device time, and its outcome.
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
        /// Time of the first call in this process until the device has finished, including compilation and autotuning.
        first_call_ms: Option<f64>,
        /// Host time of a warm launch, from the call to its return, in microseconds.
        host_us: Option<f64>,
        /// Largest error against the oracle over the results of the pass, as in [`Accuracy`].
        error: Option<f64>,
        /// Why there is no time: `out of memory`, `wrong result`, `not supported: …`; or that an error is not confirmed to be wrong, or
        /// that the time of a decoding step is one `with launches`, and why.
        note: String,
    }
}

record! {
    /// Error of each result against the oracle: the largest relative error in the norm over blocks of up to 64 rows. Empty if it was not
    /// computed or not compared. (For commits before 2026-11-24: root mean square of the relative errors of single rows.)
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
        /// Error of the output.
        o: Option<f64>,
        /// Error of the log-sum-exp, relative to 1 + |lse|.
        lse: Option<f64>,
        /// Error of the gradient of the queries.
        dq: Option<f64>,
        /// Error of the gradient of the keys.
        dk: Option<f64>,
        /// Error of the gradient of the values.
        dv: Option<f64>,
        /// Error of the gradient of the bias.
        dbias: Option<f64>,
    }
}

record! {
    /// Memory of one pass of one implementation on one problem, in a separate process.
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
        /// Bytes that the pass reads: `q`, `k`, `v`, mask and bias, and the gradient of the output if there is a backward.
        input_bytes: u64,
        /// Bytes that the pass may hold in addition: output, `lse`, and, if there is a backward, gradients and two f32 for each row, and
        /// `dq` in f32 in half precision through CUDA.
        linear_bytes: u64,
        /// As in [`Timing`].
        peak_bytes: Option<u64>,
        /// Peak of the bytes that the runtime reserved, including free memory.
        reserved_bytes: Option<u64>,
        /// Why it was not measured.
        note: String,
    }
}

/// Implementation of a row that timed a product of matrices.
pub const MATMUL: &str = "matmul";
/// Implementation of a row that timed a copy within the device's memory.
pub const COPY: &str = "copy";

impl Timing {
    /// Bandwidth of a decoding step in gigabytes per second: the bytes of `q`, `k`, `v` and `o`, each number once ([`bytes_read_once`]),
    /// divided by the median. For a copy, the bytes that it reads and writes. `None` for other passes.
    pub fn gigabytes_per_second(&self) -> Option<f64> {
        let size = [("f32", 4), ("f16", 2), ("bf16", 2)].into_iter().find(|(name, _)| *name == self.dtype)?.1;
        let bytes = if self.r#impl == COPY {
            2 * self.batch * self.heads_q * self.seq_q * self.head_dim * size
        } else if self.is_decoding() {
            let (variant, head_dim_v) = parse_variant(&self.variant, self.head_dim);
            let (heads, seqs) = ([self.heads_q, self.heads_kv], [self.seq_q, self.seq_k]);
            bytes_read_once(self.batch, heads, seqs, [self.head_dim, head_dim_v], sizes(size, variant))
        } else {
            return None;
        };
        self.median_ms.map(|ms| bytes as f64 / ms / 1e6)
    }

    /// Whether the row times a [decoding step](is_decoding).
    pub fn is_decoding(&self) -> bool {
        let (variant, _) = parse_variant(&self.variant, self.head_dim);
        self.pass == "forward" && is_decoding(self.seq_q, self.seq_k, variant)
    }

    /// Whether the row times the device itself and not attention.
    pub fn is_roof(&self) -> bool {
        [MATMUL, COPY].contains(&self.r#impl.as_str())
    }
}

impl Memory {
    /// Peak of the bytes in use, without the inputs.
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
        /// Kernel family and part, as in `portable forward`, `portable dq`, `portable dkdv`.
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
        /// Queries in a tile.
        tile_q: usize,
        /// Keys in a tile.
        tile_k: usize,
        /// The rest of the shape: threads and chunk.
        shape: String,
        /// Median of the samples in milliseconds; empty if the shape cannot run.
        median_ms: Option<f64>,
        /// As in [`Timing`].
        tflops: Option<f64>,
        /// Bytes of shared memory of a thread block.
        shared_bytes: Option<u64>,
        /// Registers of a thread, if known.
        registers: Option<u32>,
        /// Whether `tiling.rs` chooses this shape here.
        chosen: bool,
        /// Why the shape cannot run.
        note: String,
    }
}

record! {
    /// Bytes moved by one launch, measured by the profiler.
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
        /// Queries in a tile.
        tile_q: usize,
        /// Bytes between device memory and the L2 cache.
        dram_bytes: u64,
        /// Bytes between the L2 cache and the multiprocessors.
        l2_bytes: u64,
        /// Bytes by the IO model of FlashAttention (arXiv:2205.14135, theorem 2, for tiles of `tile_q` rows): each block of queries reads
        /// all keys and values that it sees.
        model_bytes: u64,
        /// Registers of a thread.
        registers: Option<u32>,
    }
}

/// File of this kind of row in the results called `name`.
pub fn path<R: Record>(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}{}.csv", R::SUFFIX))
}

/// Appends rows to a file. Creates the file if it does not exist, and refuses a file with other columns.
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

/// Removes an incomplete last line, which an interrupted process may have left.
pub fn repair(file: &Path) -> Result<(), Error> {
    let io = |source| Error::io(file, source);
    let text = fs::read(file).map_err(io)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    if whole < text.len() {
        OpenOptions::new().write(true).open(file).and_then(|file| file.set_len(whole as u64)).map_err(io)?;
    }
    Ok(())
}

/// [`repair`] for every existing file of a name.
pub fn repair_all(directory: &Path, name: &str) -> Result<(), Error> {
    let files = [
        path::<Timing>(directory, name),
        path::<Call>(directory, name),
        path::<Accuracy>(directory, name),
        path::<Memory>(directory, name),
    ];
    files.iter().filter(|file| file.exists()).try_for_each(|file| repair(file))
}

/// Reads all rows of a file.
pub fn read<R: Record>(file: &Path) -> Result<Vec<R>, Error> {
    check_header::<R>(file)?;
    let mut reader = csv::Reader::from_path(file).map_err(|source| Error::csv(file, source))?;
    reader.deserialize().collect::<Result<_, _>>().map_err(|source| Error::csv(file, source))
}

/// Reads all rows of this kind in the results called `name`; none if there is no file.
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
