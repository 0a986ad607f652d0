use crate::Finding;
use cubecl::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cube(launch_unchecked)]
fn add_one(values: &mut [u32]) {
    if ABSOLUTE_POS < values.len() {
        let value = values[ABSOLUTE_POS];
        let sum: u32;
        gpu_asm!("add.u32 {sum}, {value}, 1;", value = in(_) value, sum = out(_) sum, options(nomem));
        values[ABSOLUTE_POS] = sum;
    }
}

pub fn look(device: &cubecl::Device) -> Finding {
    let client = device.client();
    let values = client.create_from_slice(&[41u32; 32].map(u32::to_le_bytes).concat());
    let read = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the buffer has 32 elements, and threads beyond them write nothing.
        unsafe {
            let arg = BufferArg::from_raw_parts(values.clone(), 32);
            add_one::launch_unchecked(&client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(32), arg);
        }
        client.read_one(values.clone()).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }));
    match read {
        Ok(Ok(value)) => Finding::new(value != 42, format!("41 + 1 is {value}")),
        Ok(Err(error)) => Finding::Shows(error.to_string()),
        Err(_) => Finding::Shows("the kernel's compilation panicked".to_string()),
    }
}
