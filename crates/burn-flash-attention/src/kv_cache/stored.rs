//! Keys and values of a cache, in the memory of the cache.

use super::Setting;
use crate::backend::CacheElements;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};
use flash_attention_kernels::{KvStorage, e4m3};

/// Keys or values.
#[derive(Debug)]
pub(super) enum Stored {
    /// `[batch | num_pages, num_heads_kv, capacity | page_size, head_dim]`.
    Elements(Tensor<4>),
    /// Pages in e4m3, one after the other, in words of 32 bits.
    E4m3(Tensor<1, Int>),
}

impl Stored {
    /// Zeros of this shape, `[num_pages, num_heads_kv, page_size, head_dim]` in e4m3.
    pub fn zeros(storage: KvStorage, shape: [usize; 4], setting: &Setting) -> Self {
        match storage {
            KvStorage::E4m3 => {
                let words = bytes(storage, shape, setting.element) / DType::I32.size();
                Stored::E4m3(Tensor::zeros([words], (&setting.device, DType::I32)))
            }
            _ => Stored::Elements(Tensor::zeros(shape, (&setting.device, setting.element))),
        }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        match self {
            Stored::Elements(tensor) => tensor.shape().num_elements() * tensor.dtype().size(),
            Stored::E4m3(words) => words.shape().num_elements() * words.dtype().size(),
        }
    }

    /// This memory of `batch` sequences, each with as much room or more than in `from`, with what `from` holds.
    pub fn with(self, from: &Self, batch: usize) -> Self {
        match (self, from) {
            (Stored::Elements(to), Stored::Elements(from)) => {
                let [batch, heads, capacity, head_dim] = from.dims();
                Stored::Elements(to.slice_assign([0..batch, 0..heads, 0..capacity, 0..head_dim], from.clone()))
            }
            (Stored::E4m3(to), Stored::E4m3(from)) => {
                let ([all], [words]) = (to.dims(), from.dims());
                let batch = batch.max(1);
                let (of_sequence, from) = (words / batch, from.clone().reshape([batch, words / batch]));
                let to = to.reshape([batch, all / batch]).slice_assign([0..batch, 0..of_sequence], from);
                Stored::E4m3(to.reshape([all]))
            }
            _ => unreachable!("a cache goes on as it was created"),
        }
    }

    pub fn into_backend(self) -> CacheElements<Dispatch> {
        match self {
            Stored::Elements(tensor) => CacheElements::Elements(tensor.into_dispatch()),
            Stored::E4m3(words) => CacheElements::E4m3(words.into_dispatch()),
        }
    }

    pub fn from_backend(elements: CacheElements<Dispatch>) -> Self {
        match elements {
            CacheElements::Elements(tensor) => Stored::Elements(Tensor::from_dispatch(tensor)),
            CacheElements::E4m3(words) => Stored::E4m3(Tensor::from_dispatch(words)),
        }
    }
}

/// Bytes of keys or values of this shape, `[num_pages, num_heads_kv, page_size, head_dim]` in e4m3.
pub(super) fn bytes(storage: KvStorage, [blocks, heads, rows, head_dim]: [usize; 4], element: DType) -> usize {
    let of_head = match storage {
        KvStorage::E4m3 => e4m3::page_bytes(rows, head_dim),
        _ => rows * head_dim * element.size(),
    };
    blocks * heads * of_head
}
