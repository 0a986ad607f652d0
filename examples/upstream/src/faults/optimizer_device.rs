use crate::Finding;
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

pub fn look(device: &Device) -> Finding {
    if catch_unwind(|| Tensor::<1>::zeros([1], &Device::default()).into_data()).is_ok() {
        return Finding::NotApplicable(format!("Burn's default device is there: {:?}", Device::default()));
    }
    let device = &device.clone().autodiff();
    let (layer, mut optimizer) = (LinearConfig::new(2, 2).init(device), AdamWConfig::new().init());
    let loss = layer.forward(Tensor::<2>::ones([1, 2], device)).sum();
    let layer = optimizer.step(0.1, layer.clone(), GradientsParams::from_grads(loss.backward(), &layer));
    let record = optimizer.to_record();
    let loaded = catch_unwind(AssertUnwindSafe(|| {
        let mut optimizer = AdamWConfig::new().init().load_record(record);
        let loss = layer.forward(Tensor::<2>::ones([1, 2], device)).sum();
        optimizer.step(0.1, layer.clone(), GradientsParams::from_grads(loss.backward(), &layer))
    }));
    let end = if loaded.is_err() { "panicked" } else { "came to an end" };
    Finding::new(loaded.is_err(), format!("loading AdamW's record and a step with it, all on the CPU, {end}"))
}
