use crate::Finding;
use cubecl::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cube(launch_unchecked)]
fn fill(out: &mut [f32]) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = f32::NEG_INFINITY;
    }
}

pub fn look(device: &cubecl::Device) -> Finding {
    let client = device.client();
    let out = client.empty(128);
    let read = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the buffer has 32 elements, and threads beyond them write nothing.
        unsafe {
            let arg = BufferArg::from_raw_parts(out.clone(), 32);
            fill::launch_unchecked(&client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(32), arg);
        }
        client.read_one(out.clone()).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }));
    match read {
        Ok(Ok(value)) => Finding::new(value != f32::NEG_INFINITY, format!("the constant −∞ is {value}")),
        Ok(Err(error)) => Finding::Shows(error.to_string()),
        Err(_) => Finding::Shows("the kernel's compilation panicked".to_string()),
    }
}
