//! Tracking of written bytes of an allocation.

use std::sync::atomic::{AtomicU64, Ordering};

/// One bit for each byte.
#[derive(Debug, Default)]
pub struct Written(Box<[AtomicU64]>);

impl Written {
    /// Creates the bits for this many bytes, none of them written.
    pub fn new(bytes: usize) -> Written {
        // Zero pages that are never written take no memory of the host.
        let words = Box::into_raw(vec![0u64; bytes.div_ceil(64)].into_boxed_slice());
        // SAFETY: both have the same layout.
        Written(unsafe { Box::from_raw(words as *mut [AtomicU64]) })
    }

    /// The words that contain these bytes' bits, and masks of the bits.
    #[inline(always)]
    fn words(at: usize, size: usize) -> impl Iterator<Item = (usize, u64)> {
        let end = at + size;
        (at / 64..end.div_ceil(64)).map(move |word| {
            let (first, last) = (at.max(64 * word) - 64 * word, end.min(64 * word + 64) - 64 * word);
            (word, !0 >> (64 - (last - first)) << first)
        })
    }

    /// Marks bytes as written.
    #[inline(always)]
    pub fn mark(&self, at: usize, size: usize) {
        for (word, bits) in Self::words(at, size) {
            if self.0[word].load(Ordering::Relaxed) & bits != bits {
                self.0[word].fetch_or(bits, Ordering::Relaxed);
            }
        }
    }

    /// The first of these bytes that was not written.
    #[inline(always)]
    pub fn missing(&self, at: usize, size: usize) -> Option<usize> {
        Self::words(at, size).find_map(|(word, bits)| {
            let missing = bits & !self.0[word].load(Ordering::Relaxed);
            (missing != 0).then(|| 64 * word + missing.trailing_zeros() as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_told_apart() {
        let written = Written::new(200);
        assert_eq!(written.missing(0, 1), Some(0));
        written.mark(3, 130);
        assert_eq!(written.missing(3, 130), None);
        assert_eq!(written.missing(2, 4), Some(2));
        assert_eq!(written.missing(60, 80), Some(133));
        written.mark(133, 67);
        assert_eq!(written.missing(64, 136), None);
    }
}
