//! Tensors on the device: memory layouts, guards around buffers, and poison in outputs.

use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::server::Handle;
use flash_attention_kernels::{Dtype, MaskStorage, MaskView, TensorView};
use half::{bf16, f16};

/// Memory layout of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Row-major.
    #[default]
    Contiguous,
    /// `[batch, seq, heads, dim]` in memory, as after `swap_dims(1, 2)` of a projection.
    HeadsInner,
    /// The last two dimensions transposed in memory.
    Transposed,
    /// Rows padded by this many elements.
    Padded(usize),
    /// All rows are the same row: stride 0 along the sequence.
    RepeatedRows,
    /// All elements are the same element: every stride is 0.
    Scalar,
}

impl Layout {
    fn strides(self, shape: [usize; 4]) -> [usize; 4] {
        let [_, h, s, d] = shape;
        match self {
            Layout::Contiguous => [h * s * d, s * d, d, 1],
            Layout::HeadsInner => [s * h * d, d, h * d, 1],
            Layout::Transposed => [h * s * d, s * d, 1, s],
            Layout::Padded(by) => [h * s * (d + by), s * (d + by), d + by, 1],
            Layout::RepeatedRows => [h * d, d, 0, 1],
            Layout::Scalar => [0; 4],
        }
    }
}

/// Content of output buffers before a kernel runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Poison {
    /// NaN.
    Nan,
    /// 1e30, in f16 the largest power of ten that it holds.
    Huge,
}

impl Poison {
    pub fn value(self, dtype: Dtype) -> f64 {
        match (self, dtype) {
            (Poison::Nan, _) => f64::NAN,
            (Poison::Huge, Dtype::F16) => 1e4,
            (Poison::Huge, _) => 1e30,
        }
    }
}

pub fn to_bytes(values: &[f64], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|x| f16::from_f64(*x).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
    }
}

pub fn from_bytes(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect(),
        Dtype::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect(),
    }
}

/// Number of guard elements on either side of every buffer, a multiple of every device's offset alignment.
const GUARD: usize = 1024;
/// Value of guard elements, exact in every dtype.
const GUARD_VALUE: f64 = 1536.0;

/// A view into a buffer with guards around it.
pub struct Guarded<const RANK: usize = 4> {
    pub view: TensorView<RANK>,
    whole: Handle,
    dtype: Dtype,
    before: usize,
    span: usize,
}

impl<const RANK: usize> Guarded<RANK> {
    /// A buffer of `span` elements filled by `fill`, viewed with this shape and strides.
    pub fn new(
        client: &Client,
        dtype: Dtype,
        shape: [usize; RANK],
        strides: [usize; RANK],
        span: usize,
        fill: impl Fn(usize) -> f64,
    ) -> Self {
        Self::new_at(client, dtype, 0, shape, strides, span, fill)
    }

    /// The same, with the first element `offset` elements after the start of the buffer.
    pub fn new_at(
        client: &Client,
        dtype: Dtype,
        offset: usize,
        shape: [usize; RANK],
        strides: [usize; RANK],
        span: usize,
        fill: impl Fn(usize) -> f64,
    ) -> Self {
        let before = GUARD + offset;
        let values: Vec<f64> = (0..before + span + GUARD)
            .map(|n| if (before..before + span).contains(&n) { fill(n - before) } else { GUARD_VALUE })
            .collect();
        let whole = client.create_from_slice(&to_bytes(&values, dtype));
        let bytes = (before * dtype.size()) as u64;
        // The view's buffer includes the guard after it, so that a write past the end lands in the guard and is noticed.
        let handle = whole.clone().offset_start(bytes);
        Guarded { view: TensorView { handle, shape, strides }, whole, dtype, before, span }
    }

    /// A contiguous, poisoned output.
    pub fn output(client: &Client, dtype: Dtype, shape: [usize; RANK], poison: Poison) -> Self {
        Self::output_at(client, dtype, 0, shape, poison)
    }

    /// The same, with the first element `offset` elements after the start of the buffer.
    pub fn output_at(client: &Client, dtype: Dtype, offset: usize, shape: [usize; RANK], poison: Poison) -> Self {
        let len: usize = shape.iter().product();
        let mut strides = [1; RANK];
        for dim in (1..RANK).rev() {
            strides[dim - 1] = strides[dim] * shape[dim];
        }
        let value = poison.value(dtype);
        Self::new_at(client, dtype, offset, shape, strides, len, |_| value)
    }

    /// Reads the values and checks the guards.
    pub fn read(&self, client: &Client, name: &str) -> Vec<f64> {
        block_on(self.read_async(client, name))
    }

    /// [`read`](Self::read), for a browser, which cannot block.
    pub async fn read_async(&self, client: &Client, name: &str) -> Vec<f64> {
        let read = client.read_async(vec![self.whole.clone()]).await;
        let all = from_bytes(&read.unwrap().remove(0), self.dtype);
        let all = &all[..self.before + self.span + GUARD];
        let (before, rest) = all.split_at(self.before);
        let (values, after) = rest.split_at(self.span);
        for (place, guard) in [("before", before), ("after", after)] {
            let broken = guard.iter().position(|x| *x != GUARD_VALUE);
            assert!(broken.is_none(), "{name}: the guard {place} the tensor was overwritten at {broken:?}");
        }
        values.to_vec()
    }
}

/// A contiguous tensor of zeros, where values do not matter.
pub fn zeros(client: &Client, dtype: Dtype, shape: [usize; 4]) -> TensorView {
    let len = shape.iter().product::<usize>().max(1);
    TensorView::contiguous(client.create_from_slice(&vec![0; len * dtype.size()]), shape)
}

/// Writes a tensor (row-major `values`) to a guarded buffer with this layout. Gaps are NaN.
pub fn place(client: &Client, dtype: Dtype, shape: [usize; 4], layout: Layout, values: &[f64]) -> Guarded {
    place_at(client, dtype, 0, shape, layout, values)
}

/// The same, with the first element `offset` elements after the start of the buffer.
pub fn place_at(
    client: &Client,
    dtype: Dtype,
    offset: usize,
    shape: [usize; 4],
    layout: Layout,
    values: &[f64],
) -> Guarded {
    let strides = layout.strides(shape);
    let buffer = strided(shape, strides, values, f64::NAN);
    Guarded::new_at(client, dtype, offset, shape, strides, buffer.len(), |n| buffer[n])
}

/// Writes a boolean mask to a buffer as [`place_at`] does. Elements before it and in its gaps are `true`.
pub fn place_mask(
    client: &Client,
    storage: MaskStorage,
    offset: usize,
    shape: [usize; 4],
    layout: Layout,
    hides: &[bool],
) -> MaskView {
    let strides = layout.strides(shape);
    let mut buffer = vec![true; offset];
    buffer.extend(strided(shape, strides, hides, true));
    let (bytes, size) = match storage {
        MaskStorage::U8 => (buffer.iter().map(|hides| u8::from(*hides)).collect::<Vec<_>>(), 1),
        MaskStorage::U32 => (buffer.iter().flat_map(|hides| u32::from(*hides).to_le_bytes()).collect(), 4),
        other => panic!("the tests cannot store a mask as {other:?}"),
    };
    let whole = client.create_from_slice(&bytes);
    let handle = if offset == 0 { whole } else { whole.offset_start((offset * size) as u64) };
    MaskView { tensor: TensorView { handle, shape, strides }, storage }
}

/// Row-major values in memory order by strides, with `gap` in gaps.
fn strided<T: Copy>(shape: [usize; 4], strides: [usize; 4], values: &[T], gap: T) -> Vec<T> {
    let len: usize = shape.iter().product();
    let span = if len == 0 { 0 } else { 1 + (0..4).map(|d| (shape[d] - 1) * strides[d]).sum::<usize>() };
    let mut buffer = vec![gap; span];
    for (n, value) in values.iter().enumerate().take(len) {
        let (mut rest, mut offset) = (n, 0);
        for dim in (0..4).rev() {
            offset += rest % shape[dim] * strides[dim];
            rest /= shape[dim];
        }
        buffer[offset] = *value;
    }
    buffer
}

/// The row-major values that a tensor with this layout has after its buffer is filled from `values`.
pub fn as_laid_out<T: Copy + Default>(shape: [usize; 4], layout: Layout, values: Vec<T>) -> Vec<T> {
    let [_, _, s, d] = shape;
    match layout {
        Layout::RepeatedRows => (0..values.len()).map(|n| values[n / (s * d) * (s * d) + n % d]).collect(),
        Layout::Scalar => vec![values.first().copied().unwrap_or_default(); values.len()],
        _ => values,
    }
}
