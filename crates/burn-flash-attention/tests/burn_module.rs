//! `FlashMultiHeadAttention` compared with burn-nn's module: records, outputs, gradients.

mod common;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::tensor::{Bool, Device, Tensor};
use burn_flash_attention::{FlashMhaInput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig};
use common::{Target, close, random, targets};

const D_MODEL: usize = 24;
const HEADS: usize = 3;

fn burns(device: &Device) -> MultiHeadAttention {
    MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.0).init(device)
}

/// Compares outputs, gradients of the inputs, and gradients of all parameters.
fn compare(target: &Target, with_pad: bool, with_attn: bool) {
    let device = target.device.clone().autodiff();
    let burns = burns(&device);
    let ours = FlashMultiHeadAttention::from(burns.clone());
    let (query, key, value) =
        (random([2, 5, D_MODEL], &device), random([2, 7, D_MODEL], &device), random([2, 7, D_MODEL], &device));
    let inputs = || [&query, &key, &value].map(|x| x.clone().detach().require_grad());
    let pad = Tensor::<2, Bool>::from_data(
        [[false, false, true, false, false, true, true], [false, false, false, false, false, false, false]],
        &device,
    );
    // The second query of the first batch sees no key.
    let attn = random([2, 5, 7], &device).greater_elem(0.5);
    let all = Tensor::<3>::ones([1, 1, 7], &device).greater_elem(0.0);
    let attn = attn.slice_assign([0..1, 1..2, 0..7], all);

    let [q, k, v] = inputs();
    let mut input = MhaInput::new(q.clone(), k.clone(), v.clone());
    if with_pad {
        input = input.mask_pad(pad.clone());
    }
    if with_attn {
        input = input.mask_attn(attn.clone());
    }
    let expected = burns.forward(input).context;
    let gradients = expected.clone().powi_scalar(2).sum().backward();
    let expected = [
        Some(expected.detach()),
        q.grad(&gradients),
        k.grad(&gradients),
        v.grad(&gradients),
        burns.value.weight.val().grad(&gradients).map(|dw| dw.unsqueeze()),
        burns.query.weight.val().grad(&gradients).map(|dw| dw.unsqueeze()),
    ];

    let [q, k, v] = inputs();
    let mut input = FlashMhaInput::new(q.clone(), k.clone(), v.clone());
    if with_pad {
        input = input.mask_pad(pad);
    }
    if with_attn {
        input = input.mask_attn(attn);
    }
    let context = ours.forward(input).context;
    let gradients = context.clone().powi_scalar(2).sum().backward();
    let got = [
        Some(context.detach()),
        q.grad(&gradients),
        k.grad(&gradients),
        v.grad(&gradients),
        ours.value.weight.val().grad(&gradients).map(|dw| dw.unsqueeze()),
        ours.query.weight.val().grad(&gradients).map(|dw| dw.unsqueeze()),
    ];
    for (got, expected) in got.into_iter().zip(expected) {
        close(target, &format!("padding {with_pad}, mask {with_attn}"), got.unwrap(), expected.unwrap());
    }
}

#[test]
fn same_outputs_and_gradients_as_burn_nn() {
    for target in targets() {
        for (with_pad, with_attn) in [(false, false), (true, false), (false, true), (true, true)] {
            compare(&target, with_pad, with_attn);
        }
    }
}

#[test]
fn records_of_burn_nn_load() {
    for target in targets() {
        let device = &target.device;
        let burns = burns(device);
        let x = random([2, 6, D_MODEL], device);
        let expected = burns.forward(MhaInput::self_attn(x.clone())).context;

        let config = FlashMultiHeadAttentionConfig::new(D_MODEL, HEADS);
        let loaded = config.init(device).load_record(burns.clone().into_record());
        close(&target, "loaded", loaded.forward(FlashMhaInput::self_attn(x.clone())).context, expected.clone());

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("attention");
        burns.save_file(&path).unwrap();
        let loaded = config.init(device).load_file(&path);
        close(&target, "loaded", loaded.forward(FlashMhaInput::self_attn(x.clone())).context, expected.clone());

        // Back to burn-nn's module.
        let burns = self::burns(device).load_record(loaded.into_record());
        close(&target, "back to burn-nn", burns.forward(MhaInput::self_attn(x)).context, expected);
    }
}

#[test]
fn causal_needs_no_mask() {
    for target in targets() {
        let device = &target.device;
        let burns = burns(device);
        let mut ours = FlashMultiHeadAttention::from(burns.clone());
        ours.causal = true;
        let x = random([2, 9, D_MODEL], device);
        let mask = generate_autoregressive_mask(2, 9, device);
        let expected = burns.forward(MhaInput::self_attn(x.clone()).mask_attn(mask)).context;
        close(&target, "causal", ours.forward(FlashMhaInput::self_attn(x)).context, expected);
    }
}

#[test]
fn grouped_heads_are_repeated_heads() {
    for target in targets() {
        let device = &target.device;
        let grouped = FlashMultiHeadAttentionConfig::new(16, 4).with_n_kv_heads(Some(2)).init(device);
        assert_eq!(grouped.key.weight.dims(), [16, 8]);
        let mut full = FlashMultiHeadAttentionConfig::new(16, 4).init(device);
        let repeat = |weight: Tensor<2>| {
            let [rows, cols] = weight.dims();
            let d_k = cols / 2;
            weight.reshape([rows, 2, 1, d_k]).expand([rows, 2, 2, d_k]).reshape([rows, 4 * d_k])
        };
        full.query = grouped.query.clone();
        full.output = grouped.output.clone();
        for (to, from) in [(&mut full.key, &grouped.key), (&mut full.value, &grouped.value)] {
            to.weight = to.weight.clone().map(|_| repeat(from.weight.val()));
            let bias = from.bias.as_ref().unwrap().val();
            to.bias = to.bias.take().map(|to| to.map(|_| repeat(bias.unsqueeze()).squeeze_dim(0)));
        }
        let x = random([2, 5, 16], device);
        close(
            &target,
            "grouped heads",
            grouped.forward(FlashMhaInput::self_attn(x.clone())).context,
            full.forward(FlashMhaInput::self_attn(x)).context,
        );
    }
}

#[test]
fn dropout_matters_only_while_training() {
    for target in targets() {
        let training = target.device.clone().autodiff();
        let burns = |device: &Device| MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.4).init(device);
        let drops = |module: FlashMultiHeadAttention, device: &Device| {
            let x = random([2, 9, D_MODEL], device);
            let run = || module.forward(FlashMhaInput::self_attn(x.clone())).context;
            (run() - run()).abs().max().into_scalar::<f32>() > 0.0
        };
        assert!(drops(burns(&training).into(), &training));
        // Nothing is dropped by a frozen module, or without autodiff.
        assert!(!drops(FlashMultiHeadAttention::from(burns(&training)).freeze(), &training));
        assert!(!drops(burns(&target.device).into(), &target.device));
    }
}

#[test]
fn displays_and_configures() {
    let config = FlashMultiHeadAttentionConfig::new(64, 8).with_n_kv_heads(Some(2)).with_causal(true);
    let text = serde_json::to_string(&config).unwrap();
    let back: FlashMultiHeadAttentionConfig = serde_json::from_str(&text).unwrap();
    assert_eq!((back.d_model, back.n_heads, back.n_kv_heads, back.causal), (64, 8, Some(2), true));
    for target in targets() {
        let text = config.init(&target.device).to_string();
        assert!(text.contains("n_kv_heads: 2") && text.contains("causal: true"), "{text}");
    }
}
