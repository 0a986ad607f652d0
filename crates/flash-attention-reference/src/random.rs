//! Random inputs for tests.

use rand::{SeedableRng, rngs::StdRng};
use rand_distr::{Distribution, StandardNormal};

/// `len` independent values of the standard normal distribution. The same seed gives the same values.
///
/// ```
/// use flash_attention_reference::normal;
///
/// assert_eq!(normal(4, 7), normal(4, 7));
/// assert_ne!(normal(4, 7), normal(4, 8));
/// ```
pub fn normal(len: usize, seed: u64) -> Vec<f64> {
    StandardNormal.sample_iter(StdRng::seed_from_u64(seed)).take(len).collect()
}
