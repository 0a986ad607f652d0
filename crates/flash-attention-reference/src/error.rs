//! Error of a computed tensor against the oracle's.

/// Rows in each block of [`Error::block_rms`].
///
/// ```
/// assert_eq!(flash_attention_reference::error::BLOCK_ROWS, 64);
/// ```
pub const BLOCK_ROWS: usize = 64;

/// Differences between a computed tensor and the oracle's. None is ever NaN: a NaN or infinity on one side only counts as an infinite
/// difference, while NaN on both sides, or the same infinity, counts as no difference.
///
/// ```
/// use flash_attention_reference::Error;
///
/// // A tensor of two rows, against the oracle's.
/// let error = Error::between(&[1.0, 2.0, 3.0, 4.5], &[1.0, 2.0, 3.0, 4.0], 2);
/// assert_eq!((error.max, error.mean), (0.5, 0.125));
/// assert_eq!(error.block_rms, [0.25]);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Error {
    /// Largest absolute difference. 0 if there are no elements.
    pub max: f64,
    /// Mean absolute difference. 0 if there are no elements.
    pub mean: f64,
    /// Root mean square of the differences in each block of 64 rows, counted through batches and heads. The last block may be shorter. A
    /// maximum over the whole tensor would hide errors in rows of small values.
    pub block_rms: Vec<f64>,
}

impl Error {
    /// Compares `computed` with `oracle`, both in rows of `row_len` elements.
    ///
    /// ```
    /// use flash_attention_reference::Error;
    ///
    /// // lse of a row that sees nothing, right and wrong.
    /// assert_eq!(Error::between(&[f64::NEG_INFINITY], &[f64::NEG_INFINITY], 1).max, 0.0);
    /// assert_eq!(Error::between(&[f64::NAN], &[f64::NEG_INFINITY], 1).max, f64::INFINITY);
    /// ```
    ///
    /// # Panics
    ///
    /// If the lengths differ, or are not a multiple of `row_len`.
    pub fn between(computed: &[f64], oracle: &[f64], row_len: usize) -> Self {
        assert_eq!(computed.len(), oracle.len(), "lengths of computed and oracle");
        assert!(row_len > 0 && oracle.len().is_multiple_of(row_len), "rows of {row_len} in {} elements", oracle.len());
        let differences: Vec<f64> = computed.iter().zip(oracle).map(|(&x, &y)| difference(x, y)).collect();
        let rms = |block: &[f64]| mean(block.iter().map(|x| x * x), block.len()).sqrt();
        Error {
            max: differences.iter().copied().fold(0.0, f64::max),
            mean: mean(differences.iter().copied(), differences.len()),
            block_rms: differences.chunks(BLOCK_ROWS * row_len).map(rms).collect(),
        }
    }
}

fn difference(computed: f64, oracle: f64) -> f64 {
    if computed == oracle || computed.is_nan() && oracle.is_nan() {
        return 0.0;
    }
    let difference = (computed - oracle).abs();
    if difference.is_nan() { f64::INFINITY } else { difference }
}

fn mean(values: impl Iterator<Item = f64>, len: usize) -> f64 {
    values.sum::<f64>() / len.max(1) as f64
}
