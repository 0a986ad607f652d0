//! A device tensor as the kernels take it: a buffer with a shape and strides.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A strided view of a device buffer. Strides count elements; a stride of 0 repeats a dimension.
///
/// ```no_run
/// use flash_attention_kernels::TensorView;
///
/// # fn f(client: cubecl::client::Client) {
/// // [batch, heads, seq, head_dim], contiguous, in f32.
/// let o = TensorView::contiguous(client.empty(2 * 8 * 1024 * 64 * 4), [2, 8, 1024, 64]);
/// assert_eq!(o.strides, [8 * 1024 * 64, 1024 * 64, 64, 1]);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TensorView<const RANK: usize = 4> {
    /// The buffer. The view begins at the start offset of the handle, if it has one.
    pub handle: Handle,
    /// Sizes.
    pub shape: [usize; RANK],
    /// Distance in elements between neighbours along each dimension.
    pub strides: [usize; RANK],
}

impl<const RANK: usize> TensorView<RANK> {
    /// A view of a buffer laid out in row-major order.
    pub fn contiguous(handle: Handle, shape: [usize; RANK]) -> Self {
        let mut strides = [1; RANK];
        for dim in (1..RANK).rev() {
            strides[dim - 1] = strides[dim] * shape[dim];
        }
        TensorView { handle, shape, strides }
    }

    /// A new tensor of 32-bit elements.
    pub(crate) fn empty_words(client: &Client, shape: [usize; RANK]) -> Self {
        TensorView::contiguous(client.empty(4 * shape.iter().product::<usize>().max(1)), shape)
    }

    /// The same view in four dimensions; the added trailing dimensions have size 1.
    pub(crate) fn widened(&self) -> TensorView {
        TensorView { handle: self.handle.clone(), shape: widened(self.shape), strides: widened(self.strides) }
    }

    /// Number of elements; elements that a stride of 0 repeats count each time.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Whether rows can be read in vectors of `width` elements of `elem_size` bytes: the last dimension is contiguous, its size
    /// is a multiple of `width`, and every row starts at a multiple of `width`.
    pub(crate) fn vectorizes(&self, width: usize, elem_size: usize) -> bool {
        let last = RANK - 1;
        let aligned = self.handle.offset_start.unwrap_or(0).is_multiple_of((width * elem_size) as u64);
        aligned
            && self.strides[last] == 1
            && self.shape[last].is_multiple_of(width)
            && self.strides[..last].iter().zip(&self.shape).all(|(s, n)| *n == 1 || s % width == 0)
    }

    /// The launch argument. Strides count elements, also for kernels that read vectors.
    pub(crate) fn arg(&self) -> TensorArg {
        // SAFETY: `launch` has checked that shape and strides stay within the buffer.
        unsafe { TensorArg::from_raw_parts(self.handle.clone(), self.strides.into(), self.shape.into()) }
    }

    /// The launch argument of a mask or bias: dimensions of size 1 get stride 0, so that every index reads their only element.
    pub(crate) fn broadcast_arg(&self) -> TensorArg {
        let strides = std::array::from_fn(|dim| if self.shape[dim] == 1 { 0 } else { self.strides[dim] });
        TensorView { strides, ..self.clone() }.arg()
    }
}

/// Sizes or strides in four dimensions; the added trailing ones are 1.
pub(crate) fn widened<const RANK: usize>(sizes: [usize; RANK]) -> [usize; 4] {
    std::array::from_fn(|dim| sizes.get(dim).copied().unwrap_or(1))
}

/// A view of any rank, for checks.
pub(crate) trait AnyView {
    /// Shape and strides.
    fn layout(&self) -> (&[usize], &[usize]);

    /// Bytes of the buffer.
    fn bytes(&self) -> u64;

    /// Number of elements from the first to the last one that the view reaches, inclusive; `u64::MAX` if that overflows.
    fn span(&self) -> u64 {
        let (shape, strides) = self.layout();
        if shape.contains(&0) {
            return 0;
        }
        let reaches = shape.iter().zip(strides).map(|(n, s)| (*n as u64 - 1).saturating_mul(*s as u64));
        reaches.fold(1, u64::saturating_add)
    }

    /// Whether two different indices may reach the same element, which an output must not allow.
    fn overlaps_itself(&self) -> bool {
        let (shape, strides) = self.layout();
        if shape.contains(&0) {
            return false;
        }
        let mut dims: Vec<_> = shape.iter().zip(strides).filter(|(n, _)| **n > 1).collect();
        dims.sort_by_key(|(_, stride)| **stride);
        let mut reach = 0u64;
        for (n, stride) in dims {
            if *stride as u64 <= reach {
                return true;
            }
            reach += (*n as u64 - 1) * *stride as u64;
        }
        false
    }
}

impl<const RANK: usize> AnyView for TensorView<RANK> {
    fn layout(&self) -> (&[usize], &[usize]) {
        (&self.shape, &self.strides)
    }

    fn bytes(&self) -> u64 {
        self.handle.size_in_used()
    }
}
