use crate::Finding;
use cubecl::prelude::*;

#[derive(CubeType)]
struct Counter {
    count: u32,
}

#[cube]
impl Counter {
    /// What the count was before.
    fn increase(&mut self) -> u32 {
        let before = self.count;
        self.count += 1;
        before
    }
}

#[cube(launch_unchecked)]
fn count(out: &mut [u32]) {
    if ABSOLUTE_POS == 0 {
        let mut counter = Counter { count: out[0] };
        out[0] = counter.increase();
    }
}

pub fn look(device: &cubecl::Device) -> Finding {
    let client = device.client();
    let out = client.create_from_slice(&5u32.to_le_bytes());
    // SAFETY: the buffer has the one element that the kernel reads and writes.
    unsafe {
        let arg = BufferArg::from_raw_parts(out.clone(), 1);
        count::launch_unchecked(&client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(32), arg);
    }
    let bytes = client.read_one_unchecked(out);
    let before = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    Finding::new(before != 5, format!("a count of 5 was {before} before it was increased"))
}
