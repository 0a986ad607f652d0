//! Appending to a key/value cache, as [`flash_attention_kernels::cache`] does.

use super::words;
use crate::backend::CacheTensors;
use crate::tensors::{Extras, OptionalInt};
use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{Flex, FlexTensor, Layout};
use half::{bf16, f16};

/// Writes keys and values of new positions to the cache, in place, and returns it with the new lengths. The extras get those as lengths of
/// the keys. `len`: the length of every sequence, if the cache has no lengths.
pub fn append(
    [k, v]: [FlexTensor; 2],
    cache: CacheTensors<Flex>,
    extras: Extras<Flex>,
    len: usize,
) -> (CacheTensors<Flex>, Extras<Flex>) {
    let shape = k.layout().shape().clone();
    let (batch, new, capacity) = (shape[0], shape[2], cache.k.layout().shape()[2]);
    let read = |lens: Option<FlexTensor>| lens.map(|lens| words(&lens.to_contiguous()));
    let (seq_lens, new_lens) = (read(cache.seq_lens.into_option()), read(extras.seq_lens_q.clone().into_option()));
    let varies = seq_lens.is_some() || new_lens.is_some();
    let places: Vec<Place> = (0..batch)
        .map(|b| {
            let begin = seq_lens.as_ref().map_or(len, |lens| lens[b] as usize).min(capacity);
            let count = new_lens.as_ref().map_or(new, |lens| lens[b] as usize).min(new);
            Place { begin, count: count.min(capacity - begin) }
        })
        .collect();
    let (k, v) = (written(cache.k, k, &places), written(cache.v, v, &places));
    let seq_lens = varies.then(|| {
        let after: Vec<i32> = places.iter().map(|place| (place.begin + place.count) as i32).collect();
        FlexTensor::new(Bytes::from_elems(after), Layout::contiguous(Shape::new([batch])), DType::I32)
    });
    let seq_lens = OptionalInt::from_option(seq_lens);
    let extras = Extras { seq_lens_k: seq_lens.clone(), ..extras };
    (CacheTensors { k, v, seq_lens }, extras)
}

/// Where new positions of a sequence go.
struct Place {
    begin: usize,
    count: usize,
}

/// A cache of keys or values with those of new positions.
fn written(cache: FlexTensor, new: FlexTensor, places: &[Place]) -> FlexTensor {
    /// Copies rows of this element type.
    macro_rules! copied {
        ($element:ty) => {{
            let mut cache = cache;
            let new = new.to_contiguous();
            let ([_, heads, rows, dim], capacity) = (new.layout().shape().dims(), cache.layout().shape()[2]);
            let first = new.layout().start_offset();
            let from = &new.storage::<$element>()[first..];
            // The memory belongs to the cache alone, so that nothing is copied to make it so.
            let to = cache.storage_mut::<$element>();
            for (b, place) in places.iter().enumerate() {
                for head in b * heads..(b + 1) * heads {
                    let (from_row, to_row) = (head * rows * dim, (head * capacity + place.begin) * dim);
                    let len = place.count * dim;
                    to[to_row..to_row + len].copy_from_slice(&from[from_row..from_row + len]);
                }
            }
            cache
        }};
    }
    match cache.dtype() {
        DType::F16 => copied!(f16),
        DType::BF16 => copied!(bf16),
        _ => copied!(f32),
    }
}
