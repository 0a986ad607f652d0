//! The kernels in a browser, through its WebGPU, against the oracle. `.ci/test-in-browser` runs this test.
//!
//! If the browser offers no adapter, the test prints a message and passes. With `REQUIRE_WGPU=1` at compile time it fails.
#![cfg(target_family = "wasm")]

#[path = "kernels/common.rs"]
mod common;

use common::Case;
use cubecl::client::Client;
use cubecl::wgpu::{AutoGraphicsApi, RuntimeOptions, WgpuDevice, try_init_setup_async};
use flash_attention_kernels::{AttentionOptions, Dtype, plan};
use wasm_bindgen_test::{console_log, wasm_bindgen_test, wasm_bindgen_test_configure};

wasm_bindgen_test_configure!(run_in_browser);

/// The client of the browser's adapter. Without an adapter, prints a message and returns `None`.
async fn client() -> Option<Client> {
    let device = WgpuDevice::default();
    match try_init_setup_async::<AutoGraphicsApi>(&device, RuntimeOptions::default()).await {
        Ok(setup) => {
            let info = setup.adapter.get_info();
            console_log!("adapter: {:?}, {:?}", info.backend, info.device_type);
            Some(cubecl::Device::Wgpu(device).client())
        }
        Err(error) => {
            assert!(
                option_env!("REQUIRE_WGPU") != Some("1"),
                "REQUIRE_WGPU=1, but there is no WebGPU adapter: {error}"
            );
            console_log!("skipped: there is no WebGPU adapter: {error}");
            None
        }
    }
}

/// Several tiles, of which the last ones are partial, and several sequences with slopes, sinks and dropout. Outputs and scratch are
/// poisoned and have guards around them.
#[wasm_bindgen_test]
async fn forward_and_backward_match_the_oracle() {
    let Some(client) = client().await else { return };
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let banded = AttentionOptions { window_left: Some(90), softcap: Some(5.0), ..causal };
    let grouped = Case::new([2, 4, 2, 150, 203, 40, 40], Dtype::F32, causal);
    let masked = Case::new([1, 2, 1, 130, 97, 59, 24], Dtype::F32, banded);
    let packed =
        Case::new([1, 2, 1, 130, 97, 32, 32], Dtype::F32, causal).with_cu_seqlens(&[0, 50, 50, 130], &[0, 40, 41, 97]);
    let masked = masked.with_mask([1, 1, 130, 97]).with_bias([1, 2, 1, 97]).with_dlse();
    for case in [grouped, masked, packed.with_sinks().with_alibi_slopes([1, 2]).with_dropout(0.25)] {
        let p = &case.problem;
        console_log!("q {:?}, k {:?}, v {:?}: {}", p.q_shape(), p.k_shape(), p.v_shape(), plan(&client, p).unwrap());
        case.check_async(&client).await;
        console_log!("o, lse and gradients match the oracle");
    }
}
