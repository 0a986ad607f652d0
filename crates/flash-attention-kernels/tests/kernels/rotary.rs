//! Rotary position embedding, compared with rotations in f64.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::{Dtype, Rotary, RotaryLayout, TensorView, apply_rotary, check_rotary};
use flash_attention_reference as reference;

/// Random numbers as the device holds them.
fn normal(len: usize, seed: u64, dtype: Dtype) -> Vec<f64> {
    let mut values = reference::normal(len, seed);
    reference::round_to(&mut values, dtype);
    values
}

/// A case: shape of `x`, columns that are rotated, and whether each batch has its own angles.
type Sizes = ([usize; 4], usize, bool);

fn check(client: &Client, (shape, rotary_dim, own): Sizes, layout: Layout, pairs_of: RotaryLayout, inverse: bool) {
    let dtype = chosen_dtype();
    let [batch, heads, seq, head_dim] = shape;
    let pairs = rotary_dim / 2;
    let angles = [if own { batch } else { 1 }, 1, seq, pairs];
    let x = normal(shape.iter().product(), 1, dtype);
    // Cosine and sine of no angle: a factor on rotated vectors is in both.
    let [cos, sin] = [2, 3].map(|seed| normal(angles.iter().product(), seed, Dtype::F32));
    let mut want = x.clone();
    for (n, row) in want.chunks_mut(head_dim).enumerate() {
        let (batch, at) = (n / (heads * seq), n % seq);
        let first = (if own { batch * seq } else { 0 } + at) * pairs;
        for pair in 0..pairs {
            let (a, b) = match pairs_of {
                RotaryLayout::Interleaved => (2 * pair, 2 * pair + 1),
                _ => (pair, pair + pairs),
            };
            let (cos, sin) = (cos[first + pair], sin[first + pair] * if inverse { -1.0 } else { 1.0 });
            (row[a], row[b]) = (row[a] * cos - row[b] * sin, row[b] * cos + row[a] * sin);
        }
    }
    let placed = place(client, dtype, shape, layout, &x);
    let out = Guarded::output(client, dtype, shape, Poison::Nan);
    // Angles have rows behind one another, whatever the layout of `x`.
    let [cos, sin] = [cos, sin].map(|values| place(client, Dtype::F32, angles, Layout::Contiguous, &values));
    let (cos, sin) = (cos.view, sin.view);
    let call = Rotary { x: placed.view, cos, sin, out: out.view.clone(), layout: pairs_of, inverse };
    apply_rotary(client, dtype, &call).unwrap();
    let unit = match dtype {
        Dtype::F32 => 3e-7,
        Dtype::F16 => 2f64.powi(-11),
        Dtype::BF16 => 2f64.powi(-8),
    };
    for (n, (got, want)) in out.read(client, "out").into_iter().zip(want).enumerate() {
        // One rounding, of a sum whose terms may cancel.
        let near = (got - want).abs() <= 1.01 * unit * want.abs() + 2e-6;
        assert!(near, "{shape:?}, {rotary_dim} columns, {layout:?}, {pairs_of:?}: element {n} is {got}, not {want}");
    }
}

#[test]
fn rows_are_rotated_by_their_angles() {
    let Some(client) = client() else { return };
    if !supports(&client, chosen_dtype()) {
        return;
    }
    for sizes in [
        ([2, 3, 5, 64], 64, false),
        ([2, 3, 5, 64], 16, true),
        ([3, 1, 70, 128], 128, true),
        // Rows and pairs that are no whole vectors.
        ([2, 2, 7, 10], 10, true),
        ([2, 2, 7, 12], 6, false),
        ([1, 2, 3, 2], 2, false),
        ([1, 1, 1, 9], 4, true),
    ] {
        for layout in [Layout::Contiguous, Layout::HeadsInner, Layout::Transposed] {
            for pairs_of in [RotaryLayout::HalfSplit, RotaryLayout::Interleaved] {
                for inverse in [false, true] {
                    check(&client, sizes, layout, pairs_of, inverse);
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_rotated_is_refused() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !supports(&client, dtype) {
        return;
    }
    let zeros = |shape| zeros(&client, Dtype::F32, shape);
    let call = Rotary {
        x: zeros([2, 3, 5, 8]),
        cos: zeros([1, 1, 5, 4]),
        sin: zeros([1, 1, 5, 4]),
        out: zeros([2, 3, 5, 8]),
        layout: RotaryLayout::HalfSplit,
        inverse: false,
    };
    apply_rotary(&client, dtype, &call).unwrap();
    let empty = Rotary { x: zeros([2, 0, 5, 8]), out: zeros([2, 0, 5, 8]), ..call.clone() };
    apply_rotary(&client, dtype, &empty).unwrap();
    let refused = |call: Rotary, words: &str| {
        let error = apply_rotary(&client, dtype, &call).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    };
    refused(Rotary { cos: zeros([1, 1, 5, 5]), ..call.clone() }, "cos = a tensor of shape [1, 1, 5, 5]");
    refused(Rotary { cos: zeros([1, 1, 5, 0]), ..call.clone() }, "cos = a tensor of shape [1, 1, 5, 0]");
    refused(Rotary { cos: zeros([3, 1, 5, 4]), ..call.clone() }, "cos has batch 3");
    refused(Rotary { cos: zeros([1, 1, 6, 4]), ..call.clone() }, "cos has dimension 2 6");
    refused(Rotary { cos: zeros([1, 3, 5, 4]), ..call.clone() }, "cos has dimension 1 3");
    refused(Rotary { sin: zeros([1, 1, 5, 3]), ..call.clone() }, "sin has dimension 3 3");
    refused(Rotary { out: zeros([2, 3, 5, 9]), ..call.clone() }, "out has dimension 3 9");
    let twice = TensorView { strides: [0, 40, 8, 1], ..call.out.clone() };
    refused(Rotary { out: twice, ..call.clone() }, "outputs must not overlap themselves");
    let short = TensorView { handle: client.empty(8 * dtype.size()), ..call.x.clone() };
    refused(Rotary { x: short, ..call }, "but its buffer holds 8");
    let error = check_rotary(&client, dtype, [1 << 20, 1 << 10, 1 << 20, 64]).unwrap_err().to_string();
    assert!(error.starts_with("x takes"), "{error}");
}
