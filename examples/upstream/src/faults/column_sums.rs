use crate::Finding;
use burn::tensor::{Device, Distribution, Tensor};
use std::time::Instant;

pub fn look(device: &Device) -> Finding {
    let x = Tensor::<2>::random([16384, 768], Distribution::Default, device);
    let milliseconds = |sum: fn(Tensor<2>) -> Tensor<1>| {
        let calls = |count| (0..count).map(|_| sum(x.clone()).sum().into_scalar::<f32>()).sum::<f32>();
        calls(3);
        let begun = Instant::now();
        calls(10);
        begun.elapsed().as_secs_f64() * 100.0
    };
    let at_once = milliseconds(|x| x.sum_dim(0).squeeze_dim(0));
    let in_stages = milliseconds(|x| x.reshape([512, 32, 768]).sum_dim(1).sum_dim(0).reshape([768]));
    let numbers = format!("a sum over 16384 rows of 768 takes {at_once:.2} ms at once, {in_stages:.2} in two stages");
    Finding::new(at_once > 3.0 * in_stages, numbers)
}
