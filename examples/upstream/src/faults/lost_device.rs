use crate::Finding;
use burn::tensor::{Device, Tensor};
use cubecl::wgpu::{AutoGraphicsApi, RuntimeOptions, WgpuDevice, init_device, init_setup, wgpu::PollType};
use std::panic::{AssertUnwindSafe, catch_unwind};

pub fn look(_device: &Device) -> Finding {
    let setup = init_setup::<AutoGraphicsApi>(&WgpuDevice::default(), RuntimeOptions::default());
    let below = setup.device.clone();
    let device = Device::new(cubecl::Device::Wgpu(init_device(setup, RuntimeOptions::default())));
    let ones = Tensor::<1>::ones([4], &device);
    // As when a driver resets.
    below.destroy();
    below.poll(PollType::wait_indefinitely()).ok();
    match ones.try_into_data() {
        Err(error) => Finding::DoesNotShow(format!("try_into_data fails: {error}")),
        Ok(data) => {
            let looked = catch_unwind(AssertUnwindSafe(|| data.iter::<f32>().sum::<f32>()));
            let then = looked.map_or("panics".to_string(), |sum| format!("gives numbers whose sum is {sum}"));
            Finding::Shows(format!("try_into_data succeeds on a lost device, and looking at the data {then}"))
        }
    }
}
