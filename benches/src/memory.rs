//! Memory of one forward and backward through Burn's autodiff at growing sequence lengths.
//!
//! Burn's pools never shrink by themselves, so what they have reserved after the backward is their peak (in whole
//! pages). Lengths double and each outgrows the one before: the difference between lengths is what counts.

use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_attention::{FlashAttentionOptions, flash_attention};

/// `[1, 8, seq, 64]` in f32, causal.
pub fn run(device: cubecl::Device, tiny: bool) -> Result<(), Box<dyn std::error::Error>> {
    let client = device.client();
    let burn_device = Device::new(device);
    let autodiff = burn_device.clone().autodiff();
    println!("{}: batch 1, 8 heads, head_dim 64, f32, causal; MiB", client.name());
    println!("{:>8} {:>10} {:>14} {:>14} {:>16}", "tokens", "q+k+v", "in use after", "reserved", "scores would be");
    let lengths: &[usize] = if tiny { &[256, 512] } else { &[4096, 8192, 16384, 32768, 65536] };
    for seq in lengths {
        let leaf = || Tensor::<4>::random([1, 8, *seq, 64], Distribution::Normal(0.0, 1.0), &autodiff).require_grad();
        let (q, k, v) = (leaf(), leaf(), leaf());
        let options = FlashAttentionOptions::new().with_causal(true);
        let out = flash_attention(q.clone(), k.clone(), v.clone(), &options);
        let gradients = out.powi_scalar(2).sum().backward();
        let kept = (q.grad(&gradients), k.grad(&gradients), v.grad(&gradients));
        burn_device.sync()?;
        let usage = burn_device.memory_pool_usage().ok_or("this device does not tell its memory")?;
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        println!(
            "{seq:>8} {:>10.1} {:>14.1} {:>14.1} {:>16.1}",
            mib(3 * 8 * *seq as u64 * 64 * 4),
            mib(usage.bytes_in_use),
            mib(usage.bytes_reserved),
            mib(8 * (*seq as u64).pow(2) * 4),
        );
        drop((kept, gradients, q, k, v));
        burn_device.memory_cleanup();
    }
    Ok(())
}
