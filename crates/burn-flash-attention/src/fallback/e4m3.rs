//! Keys and values in e4m3, as [`flash_attention_kernels::e4m3`] defines them. A page is a slice of words of 32 bits.

use super::math::vectorized;
use flash_attention_kernels::e4m3::{TAIL, encode, page_bytes, scale_of};

/// Elements of a word.
const WORD: usize = 4;

/// Words of a page of a head.
pub fn page_words(page_size: usize, head_dim: usize) -> usize {
    page_bytes(page_size, head_dim) / WORD
}

/// The words of a page's rows, and those behind them. The first of these is the scale.
fn parts(page: &[i32]) -> (&[i32], f32) {
    let (rows, tail) = page.split_at(page.len() - TAIL / WORD);
    (rows, f32::from_bits(tail[0] as u32))
}

/// Writes rows to a page, from the element `first` on. Elements after them are no longer defined.
pub fn write(page: &mut [i32], first: usize, new: &[f32]) {
    let (rows, tail) = page.split_at_mut(page.len() - TAIL / WORD);
    let (before, rows) = rows.split_at_mut(first / WORD);
    // As integers, NaN is larger than infinity.
    let largest = new.iter().map(|x| x.to_bits() & 0x7FFF_FFFF).max().unwrap_or(0);
    let needed = scale_of(f32::from_bits(largest));
    let old = f32::from_bits(tail[0] as u32);
    let scale = match first {
        0 => needed,
        _ if old.is_nan() || needed.is_nan() => f32::NAN,
        _ => old.max(needed),
    };
    if first > 0 && scale > old {
        before.iter_mut().for_each(|word| *word = encoded(decoded(*word).map(|x| x * (old / scale))));
    }
    for (word, new) in rows.iter_mut().zip(new.chunks_exact(WORD)) {
        *word = encoded([new[0], new[1], new[2], new[3]].map(|x| x / scale));
    }
    tail[0] = scale.to_bits() as i32;
}

/// Reads the elements of a page from `first` on.
pub fn read(page: &[i32], first: usize, to: &mut [f32]) {
    let (rows, scale) = parts(page);
    let words = &rows[first / WORD..];
    vectorized(
        #[inline(always)]
        || {
            for (to, word) in to.chunks_exact_mut(WORD).zip(words) {
                to.copy_from_slice(&decoded(*word).map(|x| x * scale));
            }
        },
    );
}

fn encoded(values: [f32; WORD]) -> i32 {
    i32::from_le_bytes(values.map(encode))
}

/// [`decode`](flash_attention_kernels::e4m3::decode) of each byte, without branches.
#[inline(always)]
fn decoded(word: i32) -> [f32; WORD] {
    std::array::from_fn(|n| {
        let code = word >> (8 * n);
        let magnitude = code & 0x7F;
        let normal = f32::from_bits(((magnitude as u32) << 20) + (120 << 23));
        let value = if magnitude < 8 { magnitude as f32 / 512.0 } else { normal };
        f32::from_bits(value.to_bits() | (code as u32 & 0x80) << 24)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_attention_kernels::e4m3::decode;

    #[test]
    fn every_code_is_decoded_as_defined() {
        for code in 0..=255u8 {
            assert_eq!(decoded(i32::from_le_bytes([code, 0, 0, 0]))[0].to_bits(), decode(code).to_bits(), "{code}");
            assert_eq!(decoded(i32::from_le_bytes([0, 0, 0, code]))[3].to_bits(), decode(code).to_bits(), "{code}");
        }
    }
}
