//! Pools of pages in [e4m3](mod@crate::e4m3): their layout, and views of them as words.

use crate::e4m3::page_bytes;
use crate::error::{AttentionError, Result};
use crate::tensor::{AnyView, TensorView};

/// Bytes of a word.
const WORD: usize = 4;

/// Checks that a pool whose shape has been checked is laid out as [`TensorView::e4m3_pages`] says, and that its buffer holds all pages.
pub(super) fn check_pool(argument: &'static str, pool: &TensorView) -> Result<()> {
    if pool.is_empty() {
        return Ok(());
    }
    let TensorView { handle, shape, strides } = pool;
    let columns = shape[3];
    if !columns.is_multiple_of(WORD) {
        return Err(AttentionError::Unsupported {
            option: argument,
            value: format!("rows of {columns} elements"),
            why: "in e4m3, dimensions of heads are multiples of 4",
        });
    }
    let expected = TensorView::e4m3_pages(handle.clone(), *shape).strides;
    if *strides != expected {
        let (shape, strides, expected) = (shape.to_vec(), strides.to_vec(), expected.to_vec());
        return Err(AttentionError::Strides { argument, shape, strides, expected });
    }
    let start = handle.offset_start.unwrap_or(0);
    if !start.is_multiple_of(WORD as u64) {
        return Err(AttentionError::Unsupported {
            option: argument,
            value: format!("a view that begins at byte {start}"),
            why: "pages in e4m3 begin at a multiple of 4 bytes",
        });
    }
    let (reach, len) = ((shape[0] * expected[0]) as u64, pool.bytes());
    if reach > len {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        return Err(AttentionError::Buffer { argument, shape, strides, reach, len });
    }
    Ok(())
}

/// Words of a pool whose layout has been checked: `[num_pages, num_heads_kv, 1, words of a page]`.
pub(super) fn words(pool: &TensorView) -> TensorView {
    let [num_pages, heads, page_size, columns] = pool.shape;
    TensorView::contiguous(pool.handle.clone(), [num_pages, heads, 1, page_bytes(page_size, columns) / WORD])
}
