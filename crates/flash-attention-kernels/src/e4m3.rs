//! Keys and values in 8 bits: e4m3 (P. Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433), with a scale for each page
//! and head.
//!
//! ```text
//! page of a head    page_size rows of head_dim bytes | scale, f32 | 12 bytes that are not used
//! element           scale · e4m3                  scale = 2^n, −100 ≤ n ≤ 7
//! ```
//!
//! The scale of a page is the smallest one with which its elements are at most 448, the largest e4m3. It grows when a larger element is
//! appended, and the bytes of the page are then written again. As scales are powers of two, this changes exponents only, and rounds what
//! becomes subnormal. A page that is written from its first row on starts with a new scale. Elements above 448 · 2^7 count as that. If an
//! element is not finite, the scale of its page is NaN, and so are all elements of the page.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::dtype::Dtype;
use crate::tensor::TensorView;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};

/// Bytes after the rows of a page of a head. The first four are the scale.
pub const TAIL: usize = 16;

/// Exponents of the smallest and the largest scale.
const EXPONENTS: (i32, i32) = (-100, 7);

/// How keys and values in pages are stored.
///
/// ```
/// use flash_attention_kernels::KvStorage;
///
/// let text = serde_json::to_string(&KvStorage::E4m3)?;
/// assert_eq!(text, "\"e4m3\"");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum KvStorage {
    /// In the element type of the queries.
    #[default]
    Elements,
    /// In 8 bits, e4m3, with [a scale for each page and head](mod@crate::e4m3). Dimensions of heads are multiples of 4.
    E4m3,
}

impl KvStorage {
    /// Bytes of an element of keys and values of a call whose queries are of this type.
    ///
    /// ```
    /// use flash_attention_kernels::{Dtype, KvStorage};
    ///
    /// assert_eq!([KvStorage::Elements, KvStorage::E4m3].map(|storage| storage.size(Dtype::BF16)), [2, 1]);
    /// ```
    pub fn size(self, dtype: Dtype) -> usize {
        match self {
            KvStorage::Elements => dtype.size(),
            KvStorage::E4m3 => 1,
        }
    }
}

/// Bytes of a page of a head: its rows, and its scale.
///
/// ```
/// assert_eq!(flash_attention_kernels::e4m3::page_bytes(64, 128), 64 * 128 + 16);
/// ```
pub const fn page_bytes(page_size: usize, head_dim: usize) -> usize {
    page_size * head_dim + TAIL
}

impl TensorView {
    /// A view of a pool of pages in e4m3, `[num_pages, num_heads_kv, page_size, head_dim]`, whose elements are bytes. The buffer has
    /// `num_pages · num_heads_kv` times [`page_bytes`].
    ///
    /// ```no_run
    /// use flash_attention_kernels::{TensorView, e4m3::page_bytes};
    ///
    /// # fn f(client: cubecl::client::Client) {
    /// // 100 pages of 64 positions of 8 heads of 128 elements.
    /// let pool = client.empty(100 * 8 * page_bytes(64, 128));
    /// assert_eq!(TensorView::e4m3_pages(pool, [100, 8, 64, 128]).strides[1], 64 * 128 + 16);
    /// # }
    /// ```
    pub fn e4m3_pages(handle: Handle, shape: [usize; 4]) -> Self {
        let [_, heads, page_size, head_dim] = shape;
        let page = page_bytes(page_size, head_dim);
        TensorView { handle, shape, strides: [heads * page, page, head_dim, 1] }
    }
}

// -- on the host

/// The scale of elements of at most this magnitude; NaN if it is not finite.
///
/// ```
/// use flash_attention_kernels::e4m3::scale_of;
///
/// assert_eq!([448.0, 449.0, 3.5, 1e9].map(scale_of), [1.0, 2.0, 1.0 / 128.0, 128.0]);
/// assert!(scale_of(f32::NAN).is_nan());
/// ```
pub fn scale_of(largest: f32) -> f32 {
    if !largest.is_finite() {
        return f32::NAN;
    }
    let bits = largest.to_bits() & 0x7FFF_FFFF;
    // 448 is 1.75 · 2^8.
    let exponent = (bits >> 23) as i32 - (127 + 8) + i32::from(bits & 0x7F_FFFF > 0x60_0000);
    let exponent = exponent.clamp(EXPONENTS.0, EXPONENTS.1);
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The nearest e4m3, ties to even. Larger numbers become 448.
///
/// ```
/// use flash_attention_kernels::e4m3::{decode, encode};
///
/// assert_eq!([0.3, -17.0, 1e6].map(|x| decode(encode(x))), [0.3125, -16.0, 448.0]);
/// ```
pub fn encode(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24 & 0x80) as u8;
    let magnitude = value.abs().min(448.0);
    let code = if magnitude < SMALLEST_NORMAL {
        (magnitude * SUBNORMALS + ROUNDS).to_bits() & 0xF
    } else {
        let bits = magnitude.to_bits();
        ((bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
    };
    sign | code as u8
}

/// The number that a byte stands for.
///
/// ```
/// assert_eq!([0x38, 0xB8, 0x01, 0x7E].map(flash_attention_kernels::e4m3::decode), [1.0, -1.0, 1.0 / 512.0, 448.0]);
/// ```
pub fn decode(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7F);
    let value =
        if magnitude < 8 { magnitude as f32 / SUBNORMALS } else { f32::from_bits((magnitude << 20) + (120 << 23)) };
    if code & 0x80 == 0 { value } else { -value }
}

/// The smallest normal number, 2^-6.
const SMALLEST_NORMAL: f32 = 0.015625;

/// Subnormal numbers are multiples of the inverse of this.
const SUBNORMALS: f32 = 512.0;

/// 2^23: the sum with a small number has that number, rounded to an integer, in its low bits.
const ROUNDS: f32 = 8388608.0;

// -- on the device

/// [`scale_of()`] of the magnitude with these bits.
#[cube]
pub fn scale_of_bits(bits: u32) -> f32 {
    let exponent = (bits >> 23) as i32 - 135i32 + select(bits & 0x7F_FFFFu32 > 0x60_0000u32, 1i32, 0i32);
    let exponent = min(max(exponent, comptime!(EXPONENTS.0).runtime()), comptime!(EXPONENTS.1).runtime());
    // WGSL has no literal of a NaN.
    f32::reinterpret(select(bits < 0x7F80_0000u32, ((exponent + 127i32) as u32) << 23, 0x7FC0_0000u32))
}

/// The inverse of a scale, which is exact. It is not defined for NaN.
#[cube]
pub fn inverse(scale: f32) -> f32 {
    f32::reinterpret(0x7F00_0000u32 - u32::reinterpret(scale))
}

/// [`encode()`] of four numbers as the bytes of a word, the first one lowest.
#[cube]
pub fn encode_word(values: Vector<f32, Const<4>>) -> u32 {
    let mut word = 0u32.runtime();
    #[unroll]
    for n in 0..4usize {
        let bits = u32::reinterpret(values.extract(n));
        let magnitude = min(f32::reinterpret(bits & 0x7FFF_FFFFu32), 448.0f32);
        let small = u32::reinterpret(magnitude * SUBNORMALS + ROUNDS) & 0xFu32;
        let bits_of = u32::reinterpret(magnitude);
        let normal = ((bits_of + 0x7_FFFFu32 + ((bits_of >> 20) & 1u32)) >> 20) - 960u32;
        let code = select(magnitude < SMALLEST_NORMAL, small, normal);
        word |= (((bits >> 24) & 0x80u32) | code) << comptime!(8 * n as u32);
    }
    word
}

/// [`decode()`] of the bytes of a word, times `scale`.
#[cube]
pub fn decode_word(word: u32, scale: f32) -> Vector<f32, Const<4>> {
    let mut values = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for n in 0..4usize {
        let code = word >> comptime!(8 * n as u32);
        let magnitude = code & 0x7Fu32;
        let normal = f32::reinterpret((magnitude << 20) + 0x3C00_0000u32);
        let value = select(magnitude < 8u32, f32::cast_from(magnitude) * comptime!(1.0 / SUBNORMALS), normal);
        values.insert(n, select(code & 0x80u32 == 0u32, value, -value) * scale);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code of 448.
    const LARGEST: u32 = 0x7E;

    #[test]
    fn every_code_is_encoded_as_itself() {
        for code in 0..=255u8 {
            if u32::from(code & 0x7F) <= LARGEST {
                assert_eq!(encode(decode(code)), code);
            }
        }
    }

    #[test]
    fn numbers_between_two_codes_are_rounded_to_the_nearest_and_to_even() {
        for code in 0..LARGEST as u8 {
            let (low, high) = (decode(code), decode(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(encode(middle), code + code % 2, "{middle}");
            assert_eq!(encode(-middle.next_down()), code | 0x80);
            assert_eq!(encode(middle.next_up()), code + 1);
        }
    }

    #[test]
    fn a_scale_is_the_smallest_that_represents_the_largest_element() {
        for exponent in -90..7 {
            let scale = 2f32.powi(exponent);
            assert_eq!(scale_of(448.0 * scale), scale);
            assert_eq!(scale_of((448.0 * scale).next_up()), 2.0 * scale);
        }
        assert_eq!((scale_of(0.0), scale_of(f32::MAX)), (2f32.powi(-100), 128.0));
        assert!(scale_of(f32::INFINITY).is_nan());
    }
}
