//! Launch of the kernel of rotary position embedding.

use super::arguments::width;
use super::{Argument, addresses, elementwise};
use crate::dtype::Dtype;
use crate::error::AttentionError;
use crate::fragment::WIDTH;
use crate::problem::agree;
use crate::rotary::{AnglesLaunch, RotaryLayout, rotate};
use crate::tensor::{AnyView, TensorView};
use crate::tiling::{self, recent};
use cubecl::client::Client;

/// Rows that [`apply_rotary`] rotates, and where it writes them.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// Queries or keys, `[batch, heads, seq, head_dim]`.
    pub x: TensorView,
    /// Cosines of the angles of each position, `[batch | 1, 1, seq, rotary_dim / 2]`, f32. Columns after `rotary_dim` are copied.
    pub cos: TensorView,
    /// Sines, of the same shape.
    pub sin: TensorView,
    /// Written: of the shape of `x`.
    pub out: TensorView,
    /// Columns that are rotated as a pair.
    pub layout: RotaryLayout,
    /// Whether rows are turned back, which is the derivative.
    pub inverse: bool,
}

/// Checks that a device can rotate rows of this shape, `[batch, heads, seq, head_dim]`. Nothing is launched.
///
/// Errors name the argument at fault.
///
/// ```no_run
/// use flash_attention_kernels::{Dtype, check_rotary};
///
/// # fn f(client: cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// check_rotary(&client, Dtype::BF16, [1, 32, 4096, 128])
/// # }
/// ```
pub fn check_rotary(client: &Client, dtype: Dtype, shape: [usize; 4]) -> Result<(), AttentionError> {
    let device = recent::device(client);
    tiling::check_dtype(&device, dtype)?;
    let len = shape.iter().map(|n| *n as u64).product::<u64>();
    let (bytes, max) = (len * dtype.size() as u64, client.properties().memory.max_page_size);
    if bytes > max {
        return Err(AttentionError::Allocation { tensor: "x", bytes, max: Some(max), device: device.name.clone() });
    }
    elementwise(&device, "rotate", len as usize).map(|_| ())
}

/// Rotates rows of queries or keys by the angles of their positions, in f32 for any element type.
///
/// Errors name the argument at fault; in that case nothing has been launched.
///
/// ```no_run
/// use flash_attention_kernels::{Dtype, Rotary, RotaryLayout, TensorView, apply_rotary};
///
/// # fn f(client: cubecl::client::Client, x: TensorView, cos: TensorView, sin: TensorView) -> Result<(), flash_attention_kernels::AttentionError> {
/// // `x` is `[1, 32, 4096, 128]` in bf16, `cos` and `sin` are `[1, 1, 4096, 64]`.
/// let out = TensorView::contiguous(client.empty(2 * 32 * 4096 * 128), x.shape);
/// apply_rotary(&client, Dtype::BF16, &Rotary { x, cos, sin, out, layout: RotaryLayout::HalfSplit, inverse: false })
/// # }
/// ```
pub fn apply_rotary(client: &Client, dtype: Dtype, call: &Rotary) -> Result<(), AttentionError> {
    let device = recent::device(client);
    tiling::check_dtype(&device, dtype)?;
    let Rotary { x, cos, sin, out, layout, inverse } = call;
    let [batch, _, seq, head_dim] = x.shape;
    let pairs = cos.shape[3];
    if pairs == 0 || 2 * pairs > head_dim {
        return Err(AttentionError::Unsupported {
            option: "cos",
            value: format!("a tensor of shape {:?}", cos.shape),
            why: "its last dimension is half the number of columns that are rotated: at least 1, and at most head_dim / 2",
        });
    }
    if cos.shape[0] != 1 {
        agree("cos", &cos.shape, 0, "batch", "x", batch)?;
    }
    let angles = [cos.shape[0], 1, seq, pairs];
    for argument in [
        Argument::new("x", x, Some(x.shape), dtype.size()),
        Argument::new("cos", cos, Some(angles), 4),
        Argument::new("sin", sin, Some(angles), 4),
    ] {
        argument.check(&device)?;
    }
    Argument::new("out", out, Some(x.shape), dtype.size()).check_output(&device)?;
    if x.is_empty() {
        return Ok(());
    }
    // A vector of angles is as long as one of columns.
    let vectors = [cos, sin].iter().all(|angles| angles.vectorizes(WIDTH, 4));
    let width = if vectors { width([x, out], dtype.size()) } else { 1 };
    let (count, dim) = elementwise(&device, "rotate", x.len() / head_dim * (head_dim - pairs) / width)?;
    let sign = if *inverse { -1.0 } else { 1.0 };
    // SAFETY: views have been checked against their buffers.
    unsafe {
        rotate::launch_unchecked(
            client,
            count,
            dim,
            addresses([x, cos, sin, out].map(|view| view as &dyn AnyView)),
            width,
            x.arg(),
            AnglesLaunch::new(cos.broadcast_arg(), sin.broadcast_arg(), sign),
            out.arg(),
            *layout,
            tiling::element_type(dtype),
        );
    }
    Ok(())
}
