//! Every option, gradient and entry point, compared with the oracle and with the same mathematics composed of Burn's operations. Runs on
//! Flex without a GPU, and on any device that `FLASH_TEST_DEVICE` names.

mod calls;
#[path = "../common/mod.rs"]
mod common;
mod functions;
mod options;

use burn::tensor::Tensor;
use burn_flash_attention::{FlashAttentionOptions, plan};
use common::*;
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype};

/// Element types that a device computes in.
fn dtypes(target: &Target) -> Vec<Dtype> {
    let supported = |dtype: &Dtype| {
        let q = || Tensor::<4>::zeros([1, 1, 1, 1], (&target.device, burn_dtype(*dtype)));
        target.device.supports_dtype(burn_dtype(*dtype))
            && plan(&q(), &q(), &q(), &FlashAttentionOptions::new()).is_ok()
    };
    [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().filter(supported).collect()
}

/// Causality, windows, alignments, scale and softcap.
fn all_options() -> Vec<AttentionOptions> {
    let none = AttentionOptions::default();
    vec![
        none,
        AttentionOptions { causal: true, ..none },
        AttentionOptions { causal: true, alignment: Alignment::TopLeft, ..none },
        AttentionOptions { window_left: Some(9), ..none },
        AttentionOptions { window_right: Some(3), alignment: Alignment::TopLeft, ..none },
        AttentionOptions { window_left: Some(20), window_right: Some(0), ..none },
        AttentionOptions { causal: true, window_left: Some(70), ..none },
        AttentionOptions { softmax_scale: Some(0.5), softcap: Some(2.0), ..none },
        AttentionOptions { softcap: Some(1.0), causal: true, ..none },
    ]
}
