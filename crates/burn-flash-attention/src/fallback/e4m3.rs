//! Keys and values in e4m3, as [`flash_attention_kernels::e4m3`] defines them.

use super::math::vectorized;
use flash_attention_kernels::e4m3::{TAIL, decode, encode, scale_of};

/// Elements of a word.
const WORD: usize = 4;

/// Writes rows to a page of a head, in words whose bytes are those of the page, from the element `first` on. Elements after them are no
/// longer defined.
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
        let again = |code| encode(decode(code) * (old / scale));
        before.iter_mut().for_each(|word| *word = i32::from_ne_bytes(word.to_ne_bytes().map(again)));
    }
    for (word, new) in rows.iter_mut().zip(new.chunks_exact(WORD)) {
        *word = i32::from_ne_bytes([new[0], new[1], new[2], new[3]].map(|x| encode(x / scale)));
    }
    tail[0] = scale.to_bits() as i32;
}

/// Reads the elements of a page of a head, given as bytes, from `first` on.
pub fn read(page: &[u8], first: usize, to: &mut [f32]) {
    let (rows, tail) = page.split_at(page.len() - TAIL);
    let scale = f32::from_ne_bytes([tail[0], tail[1], tail[2], tail[3]]);
    vectorized(
        #[inline(always)]
        || to.iter_mut().zip(&rows[first..]).for_each(|(to, code)| *to = decoded(*code) * scale),
    );
}

/// [`decode`] without branches.
#[inline(always)]
fn decoded(code: u8) -> f32 {
    let magnitude = i32::from(code & 0x7F);
    let normal = f32::from_bits(((magnitude as u32) << 20) + (120 << 23));
    let value = if magnitude < 8 { magnitude as f32 / 512.0 } else { normal };
    f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_decoded_as_defined() {
        for code in 0..=255 {
            assert_eq!(decoded(code).to_bits(), decode(code).to_bits(), "{code}");
        }
    }
}
