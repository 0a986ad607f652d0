//! Cache of the tokens that a model has read, so that a new token costs one position.

use crate::config::AttentionKind;
use crate::error::Error;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_attention::{AttentionError, KvCache};

/// Keys and values of the tokens that a model has read, of one sequence or of several with lengths of their own.
pub struct Cache {
    pub(crate) blocks: Vec<BlockCache>,
    kind: AttentionKind,
    /// Number of tokens read of each sequence.
    lens: Vec<usize>,
    /// As [`KvCache::max_len`] counts: it grows by the largest number of new tokens.
    max_len: usize,
    capacity: usize,
}

/// Keys and values of one block of the model.
pub(crate) enum BlockCache {
    /// Of flash attention: allocated once, written in place.
    Preallocated(Box<KvCache>),
    /// Of attention that has no cache of its own: all keys and values, `[batch, heads, tokens, head_dim]`, which each call copies into longer
    /// tensors.
    Concatenated(Option<Box<[Tensor<4>; 2]>>),
}

impl Cache {
    pub(crate) fn new(blocks: Vec<BlockCache>, kind: AttentionKind, batch: usize, capacity: usize) -> Self {
        Self { blocks, kind, lens: vec![0; batch], max_len: 0, capacity }
    }

    /// Number of tokens read of each sequence.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Whether the longest sequence has no room for another token.
    pub fn is_full(&self) -> bool {
        self.max_len >= self.capacity
    }

    /// Forgets all tokens. Preallocated memory stays.
    pub fn clear(&mut self) {
        self.lens.fill(0);
        self.max_len = 0;
        self.blocks.iter_mut().for_each(|block| match block {
            BlockCache::Preallocated(cache) => cache.clear(),
            BlockCache::Concatenated(tensors) => *tensors = None,
        });
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        let of_tensor = |tensor: &Tensor<4>| tensor.shape().num_elements() * tensor.dtype().size();
        let of_block = |block: &BlockCache| match block {
            BlockCache::Preallocated(cache) => cache.bytes(),
            BlockCache::Concatenated(tensors) => tensors.iter().flat_map(|tensors| tensors.iter()).map(of_tensor).sum(),
        };
        self.blocks.iter().map(of_block).sum()
    }

    /// Counts new tokens of each sequence as read, and pads them to one length. The blocks must add their keys and values.
    pub(crate) fn append(&mut self, new: &[&[u32]], device: &Device) -> Result<NewTokens, Error> {
        let batch = self.lens.len();
        assert_eq!(new.len(), batch, "the cache is for {batch} sequences");
        assert!(new.iter().all(|tokens| !tokens.is_empty()), "every sequence must have a new token");
        let longest = new.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
        if self.max_len + longest > self.capacity {
            let full = AttentionError::CacheFull { capacity: self.capacity, len: self.max_len, new: longest };
            return Err(full.into());
        }
        let varies = new.iter().any(|tokens| tokens.len() != longest);
        if varies && self.kind != AttentionKind::Flash {
            return Err(Error::Config {
                flag: "attention",
                value: self.kind.name().to_string(),
                rule: "prompts of different lengths at once need flash",
            });
        }

        // Padding is token 0 at position 0.
        let padded = |row: usize, value: &dyn Fn(usize) -> usize| {
            (0..longest).map(|at| if at < new[row].len() { value(at) as i32 } else { 0 }).collect::<Vec<_>>()
        };
        let tokens = (0..batch).flat_map(|row| padded(row, &|at| new[row][at] as usize)).collect();
        let positions = (0..batch).flat_map(|row| padded(row, &|at| self.lens[row] + at)).collect();
        let tensor = |rows| Tensor::from_data(TensorData::new::<i32, _>(rows, [batch, longest]), device);
        let (tokens, positions) = (tensor(tokens), tensor(positions));
        let seq_lens = varies.then(|| {
            let lens = new.iter().map(|tokens| tokens.len() as i32).collect();
            Tensor::from_data(TensorData::new::<i32, _>(lens, [batch]), device)
        });
        self.lens.iter_mut().zip(new).for_each(|(len, tokens)| *len += tokens.len());
        self.max_len += longest;
        Ok(NewTokens { tokens, positions, seq_lens })
    }
}

/// New tokens of each sequence, padded to the longest.
pub(crate) struct NewTokens {
    /// `[batch, new]`.
    pub tokens: Tensor<2, Int>,
    /// `[batch, new]`.
    pub positions: Tensor<2, Int>,
    /// `[batch]`, if the numbers of new tokens differ.
    pub seq_lens: Option<Tensor<1, Int>>,
}

impl NewTokens {
    /// `x [batch, new, width]` → the rows of the last token of each sequence, `[batch, 1, width]`.
    pub fn last(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, new, width] = x.dims();
        let Some(seq_lens) = &self.seq_lens else { return x.narrow(1, new - 1, 1) };
        let first_rows = Tensor::arange(0..batch as i64, &x.device()) * new as i64;
        let rows = first_rows + seq_lens.clone() - 1;
        x.reshape([batch * new, width]).select(0, rows).reshape([batch, 1, width])
    }
}
