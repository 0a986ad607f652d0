//! Invalid calls: each is a typed error before anything runs, whose message names the argument and its value.

mod common;

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_flash_attention::mods::{Document, MaskFn, ScoreFn};
use burn_flash_attention::{
    AttentionError, BlockMask, FlashAttentionOptions, FlashCrossAttentionConfig, FlashMhaInput,
    FlashMultiHeadAttentionConfig, flash_attention, plan, try_flash_attention, try_flash_attention_varlen,
    try_flash_attention_with_lse,
};
use common::{Target, targets};

fn zeros(shape: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::zeros(shape, (device, DType::F32))
}

fn mask(shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    Tensor::<4>::zeros(shape, device).greater_elem(0.0)
}

/// The error of a call, asserted to be the same from `plan` and from `try_flash_attention`.
fn error_of(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: FlashAttentionOptions) -> AttentionError {
    let planned = plan(&q, &k, &v, &options).unwrap_err();
    let tried = try_flash_attention(q.clone(), k.clone(), v.clone(), &options).unwrap_err();
    let tried_with_lse = try_flash_attention_with_lse(q, k, v, &options).unwrap_err();
    // The errors are compared as text, because NaN is not equal to itself.
    assert_eq!(planned.to_string(), tried.to_string());
    assert_eq!(planned.to_string(), tried_with_lse.to_string());
    tried
}

fn says(error: &AttentionError, words: &[&str]) {
    for word in words {
        assert!(error.to_string().contains(word), "the error {error:?} lacks {word:?}");
    }
}

/// Asserts the variant of an error and words of its message.
macro_rules! refused {
    ($error:expr, $kind:pat, $($word:expr),+) => {{
        let error = $error;
        assert!(matches!(error, $kind), "{error:?}");
        says(&error, &[$($word),+]);
    }};
}

fn shapes(target: &Target, q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> AttentionError {
    let d = &target.device;
    error_of(zeros(q, d), zeros(k, d), zeros(v, d), FlashAttentionOptions::new())
}

fn with(target: &Target, options: FlashAttentionOptions) -> AttentionError {
    let x = zeros([2, 4, 8, 16], &target.device);
    let kv = zeros([2, 2, 6, 16], &target.device);
    error_of(x, kv.clone(), kv, options)
}

#[test]
fn shapes_that_do_not_fit() {
    use AttentionError::*;
    for target in targets() {
        let t = &target;
        let (q, kv) = ([2, 4, 8, 16], [2, 2, 6, 16]);
        // 1–2 batch
        refused!(shapes(t, q, [3, 2, 6, 16], kv), Dimension { .. }, "k has batch 3", "[3, 2, 6, 16]", "q has 2");
        refused!(shapes(t, q, kv, [1, 2, 6, 16]), Dimension { .. }, "v has batch 1", "[1, 2, 6, 16]", "q has 2");
        // 3 heads of k and v
        refused!(shapes(t, q, kv, [2, 4, 6, 16]), Dimension { .. }, "v has num_heads_kv 4", "k has 2");
        // 4 lengths of k and v
        refused!(shapes(t, q, kv, [2, 2, 7, 16]), Dimension { .. }, "v has seq_k 7", "k has 6");
        // 5 head_dim
        refused!(shapes(t, q, [2, 2, 6, 8], kv), Dimension { .. }, "k has head_dim 8", "q has 16");
        // 6–8 grouping
        refused!(shapes(t, [2, 5, 8, 16], kv, kv), HeadsNotGrouped { .. }, "num_heads_q is 5", "num_heads_kv, 2");
        refused!(shapes(t, [2, 1, 8, 16], kv, kv), HeadsNotGrouped { .. }, "num_heads_q is 1", "num_heads_kv, 2");
        let none = [2, 0, 6, 16];
        refused!(shapes(t, q, none, none), HeadsNotGrouped { .. }, "num_heads_q is 4", "num_heads_kv, 0");
        // 9–12 head dimensions
        let d = |d| [1, 1, 4, d];
        refused!(shapes(t, d(0), d(0), d(8)), HeadDim { .. }, "head_dim is 0", "between 1 and 256");
        refused!(shapes(t, d(257), d(257), d(8)), HeadDim { .. }, "head_dim is 257", "between 1 and 256");
        refused!(shapes(t, d(8), d(8), d(0)), HeadDim { .. }, "head_dim_v is 0", "between 1 and 256");
        refused!(shapes(t, d(8), d(8), d(300)), HeadDim { .. }, "head_dim_v is 300", "between 1 and 256");
    }
}

#[test]
fn numbers_that_make_no_sense() {
    use AttentionError::Option;
    for target in targets() {
        let new = FlashAttentionOptions::new;
        // 13–17 scale
        for (scale, value) in [
            (0.0, "softmax_scale is 0"),
            (-0.125, "softmax_scale is -0.125"),
            (f32::NAN, "softmax_scale is NaN"),
            (f32::INFINITY, "softmax_scale is inf"),
            (f32::NEG_INFINITY, "softmax_scale is -inf"),
        ] {
            refused!(with(&target, new().with_softmax_scale(scale)), Option { .. }, value, "a finite number above 0");
        }
        // 18–22 softcap
        for (softcap, value) in [
            (0.0, "softcap is 0"),
            (-30.0, "softcap is -30"),
            (f32::NAN, "softcap is NaN"),
            (f32::INFINITY, "softcap is inf"),
            (f32::NEG_INFINITY, "softcap is -inf"),
        ] {
            refused!(with(&target, new().with_softcap(softcap)), Option { .. }, value, "a finite number above 0");
        }
        // dropout
        for (dropout, value) in [(-0.1, "dropout is -0.1"), (1.0, "dropout is 1"), (f32::NAN, "dropout is NaN")] {
            refused!(with(&target, new().with_dropout(dropout)), Option { .. }, value, "at least 0 and below 1");
        }
    }
}

#[test]
fn other_numbers_of_heads_and_batches() {
    use AttentionError::{Dimension, Dtype, Unsupported};
    for target in targets() {
        let d = &target.device;
        let new = FlashAttentionOptions::new;
        let ones = |n| Tensor::<1>::ones([n], d);
        let slopes = |b, h| Tensor::<2>::ones([b, h], d);
        let lens = |n| Tensor::<1, Int>::ones([n], d);
        let says = "num_heads_q 3";
        refused!(
            with(&target, new().with_alibi_slopes(ones(3))),
            Dimension { .. },
            "alibi_slopes has",
            says,
            "q has 4"
        );
        refused!(with(&target, new().with_alibi_slopes(slopes(2, 3))), Dimension { .. }, "alibi_slopes has", says);
        refused!(with(&target, new().with_alibi_slopes(slopes(3, 4))), Dimension { .. }, "alibi_slopes has batch 3");
        refused!(with(&target, new().with_sinks(ones(3))), Dimension { .. }, "sinks has", says, "q has 4");
        refused!(with(&target, new().with_seq_lens_q(lens(3))), Dimension { .. }, "seq_lens_q has batch 3", "q has 2");
        refused!(with(&target, new().with_seq_lens_k(lens(1))), Dimension { .. }, "seq_lens_k has batch 1", "q has 2");
        refused!(with(&target, new().with_cu_seqlens_k(lens(1))), Unsupported { .. }, "cu_seqlens_q = no tensor");
        let packed = |q, k| new().with_cu_seqlens_q(lens(q)).with_cu_seqlens_k(lens(k));
        refused!(
            with(&target, packed(3, 2)),
            Dimension { .. },
            "cu_seqlens_k has sequences + 1 2",
            "cu_seqlens_q has 3"
        );
        let both = packed(3, 3).with_seq_lens_q(lens(2));
        refused!(with(&target, both), Unsupported { .. }, "seq_lens_q = a tensor");
        if target.name == "flex" {
            let wide = ones(4).cast(DType::F64);
            refused!(with(&target, new().with_sinks(wide)), Dtype { .. }, "sinks is f64");
        }
    }
}

#[test]
fn masks_and_biases_that_do_not_broadcast() {
    use AttentionError::Broadcast;
    for target in targets() {
        let d = &target.device;
        let new = FlashAttentionOptions::new;
        let scores = "[2, 4, 8, 6]";
        // 23–26 mask
        for (dimension, shape) in [[3, 1, 1, 1], [1, 2, 1, 1], [1, 1, 6, 1], [1, 1, 1, 8]].into_iter().enumerate() {
            let words = [format!("mask has shape {shape:?}"), format!("dimension {dimension} is {}", shape[dimension])];
            refused!(with(&target, new().with_mask(mask(shape, d))), Broadcast { .. }, &words[0], &words[1], scores);
        }
        // 27–30 bias
        for (dimension, shape) in [[4, 1, 1, 1], [2, 3, 1, 1], [2, 4, 0, 6], [2, 4, 8, 7]].into_iter().enumerate() {
            let words = [format!("bias has shape {shape:?}"), format!("dimension {dimension} is {}", shape[dimension])];
            refused!(with(&target, new().with_bias(zeros(shape, d))), Broadcast { .. }, &words[0], &words[1], scores);
        }
    }
}

#[test]
fn dtypes_that_are_mixed_or_unknown() {
    use AttentionError::{Dtype, MixedDtypes};
    for target in targets() {
        let d = &target.device;
        let new = FlashAttentionOptions::new;
        let x = || zeros([1, 2, 4, 8], d);
        if d.supports_dtype(DType::F16) {
            let half = || Tensor::<4>::zeros([1, 2, 4, 8], (d, DType::F16));
            // 31–34 mixed
            refused!(error_of(x(), half(), x(), new()), MixedDtypes { .. }, "k is f16", "q is f32");
            refused!(error_of(x(), x(), half(), new()), MixedDtypes { .. }, "v is f16", "q is f32");
            refused!(error_of(half(), x(), x(), new()), MixedDtypes { .. }, "k is f32", "q is f16");
            let bias = Tensor::<4>::zeros([1, 1, 4, 4], (d, DType::F16));
            refused!(error_of(x(), x(), x(), new().with_bias(bias)), MixedDtypes { .. }, "bias is f16", "q is f32");
        }
        // 35 f64
        if d.supports_dtype(DType::F64) {
            // The data is uploaded: software Vulkan reports f64, but its compiler may abort on Burn's kernel that fills a tensor.
            let data = || TensorData::zeros::<f64, _>([1, 2, 4, 8]);
            let double = || Tensor::<4>::from_data(data(), (d, DType::F64));
            refused!(error_of(double(), double(), double(), new()), Dtype { .. }, "q is f64", "f32, f16 and bf16");
        }
    }
}

#[cfg(all(feature = "flex", feature = "wgpu"))]
#[test]
fn devices_that_differ() {
    use AttentionError::Device as OtherDevice;
    let (Some(flex), Some(wgpu)) = (common::target("flex"), common::target("wgpu")) else { return };
    let new = FlashAttentionOptions::new;
    let x = |target: &Target| zeros([1, 2, 4, 8], &target.device);
    let (here, there) = (|| x(&flex), || x(&wgpu));
    // 37–40
    refused!(error_of(here(), there(), here(), new()), OtherDevice { .. }, "k is on", "Wgpu", "q is on", "Flex");
    refused!(error_of(here(), here(), there(), new()), OtherDevice { .. }, "v is on", "Wgpu", "q is on", "Flex");
    let other_mask = mask([1, 1, 4, 4], &wgpu.device);
    refused!(error_of(here(), here(), here(), new().with_mask(other_mask)), OtherDevice { .. }, "mask is on", "Wgpu");
    let other_bias = zeros([1, 1, 4, 4], &wgpu.device);
    refused!(error_of(here(), here(), here(), new().with_bias(other_bias)), OtherDevice { .. }, "bias is on", "Wgpu");
    let (near, far) = (zeros([1, 1, 1, 1], &flex.device), zeros([1, 1, 1, 1], &wgpu.device));
    let bent = ScoreFn::of::<flash_attention_reference::mods::Bent>();
    let error = error_of(here(), here(), here(), new().with_score_mod(bent, [near.clone(), far.clone()]));
    refused!(error, OtherDevice { .. }, "score_tensors[1] is on", "Wgpu", "q is on", "Flex");
    let document = MaskFn::of::<Document>();
    let error = error_of(here(), here(), here(), new().with_mask_mod(document, [far, near]));
    refused!(error, OtherDevice { .. }, "mask_tensors[0] is on", "Wgpu", "q is on", "Flex");
    let states = Tensor::<4, Int>::ones([1, 1, 1, 1], &wgpu.device);
    let error = error_of(here(), here(), here(), new().with_block_mask(BlockMask::new(states, 128, 128)));
    refused!(error, OtherDevice { .. }, "block_mask is on", "Wgpu", "q is on", "Flex");
    let masked = new().with_mask(mask([1, 1, 1, 200], &wgpu.device));
    let error = BlockMask::try_of(&masked, [1, 1], [300, 200], [128, 128], &flex.device).unwrap_err();
    refused!(error, OtherDevice { .. }, "mask is on", "Wgpu", "Flex");
}

#[test]
fn two_ways_of_checkpointing() {
    for target in targets() {
        let plain = zeros([1, 2, 4, 8], &target.device.clone().autodiff());
        let balanced = zeros([1, 2, 4, 8], &target.device.clone().autodiff().gradient_checkpointing());
        // 41
        let error = error_of(plain.clone(), balanced, plain.clone(), FlashAttentionOptions::new());
        refused!(error, AttentionError::Device { .. }, "k is on", "Balanced", "q is on", "Disabled");
        // A constant may have another checkpointing strategy.
        let constant = zeros([1, 2, 4, 8], &target.device);
        assert!(plan(&plain, &constant, &constant, &FlashAttentionOptions::new()).is_ok());
    }
}

#[test]
fn the_plain_form_panics_with_the_same_message_where_it_was_called() {
    for target in targets() {
        let x = zeros([1, 3, 4, 8], &target.device);
        let kv = zeros([1, 2, 4, 8], &target.device);
        let error = try_flash_attention(x.clone(), kv.clone(), kv.clone(), &FlashAttentionOptions::new()).unwrap_err();
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            flash_attention(x, kv.clone(), kv, &FlashAttentionOptions::new())
        }));
        assert_eq!(*panic.unwrap_err().downcast::<String>().unwrap(), error.to_string());
    }
}

#[test]
fn invalid_modules() {
    use AttentionError::{Dimension, HeadsNotGrouped, Unsupported};
    for target in targets() {
        let d = &target.device;
        let config = FlashMultiHeadAttentionConfig::new(16, 4);
        // 42–45 configurations
        refused!(config.clone().with_n_kv_heads(Some(3)).try_init(d).unwrap_err(), HeadsNotGrouped { .. }, "is 4", "3");
        refused!(config.clone().with_n_kv_heads(Some(0)).try_init(d).unwrap_err(), HeadsNotGrouped { .. }, "is 4", "0");
        refused!(config.clone().with_dropout(1.0).try_init(d).unwrap_err(), Unsupported { .. }, "dropout = 1");
        let uneven = FlashMultiHeadAttentionConfig::new(18, 4);
        refused!(uneven.try_init(d).unwrap_err(), Unsupported { .. }, "d_model = 18", "multiple of n_heads");
        let none = FlashCrossAttentionConfig::new(16, 12, 0, 1, 8);
        refused!(none.try_init(d).unwrap_err(), Unsupported { .. }, "n_heads = 0", "at least 1");
        // 46–47 rates of dropout
        refused!(config.clone().with_dropout(-0.1).try_init(d).unwrap_err(), Unsupported { .. }, "dropout = -0.1");
        refused!(config.clone().with_dropout(f64::NAN).try_init(d).unwrap_err(), Unsupported { .. }, "dropout = NaN");

        // 48–55 inputs
        let module = config.init(d);
        let x = |batch, seq, dim| Tensor::<3>::zeros([batch, seq, dim], d);
        let error = |input| module.try_forward(input).unwrap_err();
        let input = FlashMhaInput::new;
        let (q, kv) = (|| x(2, 3, 16), || x(2, 5, 16));
        refused!(error(input(x(2, 3, 8), kv(), kv())), Dimension { .. }, "query has d_model 8", "16");
        refused!(error(input(q(), x(2, 5, 8), kv())), Dimension { .. }, "key has d_model 8", "16");
        refused!(error(input(q(), x(1, 5, 16), kv())), Dimension { .. }, "key has batch 1", "query has 2");
        refused!(error(input(q(), kv(), x(2, 6, 16))), Dimension { .. }, "value has seq_k 6", "key has 5");
        let pad = |batch, seq| Tensor::<2>::zeros([batch, seq], d).greater_elem(0.0);
        let attn = |batch, q, k| Tensor::<3>::zeros([batch, q, k], d).greater_elem(0.0);
        let good = || input(q(), kv(), kv());
        refused!(error(good().mask_pad(pad(1, 5))), Dimension { .. }, "mask_pad has batch 1", "query has 2");
        refused!(error(good().mask_pad(pad(2, 3))), Dimension { .. }, "mask_pad has seq_k 3", "key has 5");
        refused!(error(good().mask_attn(attn(2, 5, 5))), Dimension { .. }, "mask_attn has seq_q 5", "query has 3");
        refused!(error(good().mask_attn(attn(2, 3, 3))), Dimension { .. }, "mask_attn has seq_k 3", "key has 5");
    }
}

#[test]
fn options_with_tensors_do_not_serialize() {
    for target in targets() {
        let d = &target.device;
        let new = FlashAttentionOptions::new;
        // 56–58
        let error = serde_json::to_string(&new().with_mask(mask([1, 1, 2, 3], d))).unwrap_err().to_string();
        assert!(error.contains("mask is a tensor of shape [1, 1, 2, 3]"), "{error}");
        let error = serde_json::to_string(&new().with_bias(zeros([1, 1, 2, 3], d))).unwrap_err().to_string();
        assert!(error.contains("bias is a tensor of shape [1, 1, 2, 3]"), "{error}");
        let error = serde_json::from_str::<FlashAttentionOptions>(r#"{"casual": true}"#).unwrap_err().to_string();
        assert!(error.contains("casual"), "{error}");
    }
}

#[test]
fn invalid_tensors_of_functions() {
    use AttentionError::{Broadcast, Unsupported};
    use flash_attention_reference::mods::Bent;
    for target in targets() {
        let d = &target.device;
        let (bent, document) = (ScoreFn::of::<Bent>(), MaskFn::of::<Document>());
        let scored = |tensors: Vec<Tensor<4>>| FlashAttentionOptions::new().with_score_mod(bent, tensors);
        let masked = |tensors: Vec<Tensor<4>>| FlashAttentionOptions::new().with_mask_mod(document, tensors);
        let good = || zeros([1, 4, 1, 6], d);
        // More tensors than a function reads.
        let error = with(&target, scored(vec![good(), good(), good()]));
        refused!(error, Unsupported { .. }, "score_tensors = 3 tensors", "at most two tensors");
        let error = with(&target, masked(vec![good(), good(), good()]));
        refused!(error, Unsupported { .. }, "mask_tensors = 3 tensors", "at most two tensors");
        // Shapes.
        let scores = "[2, 4, 8, 6]";
        for (dimension, shape) in [[3, 1, 1, 1], [1, 2, 1, 1], [1, 1, 6, 1], [1, 1, 1, 8]].into_iter().enumerate() {
            let has = |argument| format!("{argument} has shape {shape:?}");
            let is = format!("dimension {dimension} is {}", shape[dimension]);
            let bad = || zeros(shape, d);
            let error = with(&target, scored(vec![bad()]));
            refused!(error, Broadcast { .. }, &has("score_tensors[0]"), &is, scores);
            let error = with(&target, scored(vec![good(), bad()]));
            refused!(error, Broadcast { .. }, &has("score_tensors[1]"), &is, scores);
            let error = with(&target, masked(vec![good(), bad()]));
            refused!(error, Broadcast { .. }, &has("mask_tensors[1]"), &is, scores);
        }
        // Dtypes.
        if d.supports_dtype(DType::F16) {
            let half = || Tensor::<4>::zeros([1, 1, 1, 1], (d, DType::F16));
            let error = with(&target, scored(vec![good(), half()]));
            refused!(error, Unsupported { .. }, "score_tensors[1] = a tensor of f16", "read f32");
            let error = with(&target, masked(vec![half()]));
            refused!(error, Unsupported { .. }, "mask_tensors[0] = a tensor of f16", "read f32");
        }
        // Tensors without a function that reads them.
        let mut options = FlashAttentionOptions::new();
        options.score_tensors = vec![good()];
        refused!(with(&target, options), Unsupported { .. }, "score_tensors[0] = a tensor", "score_mod");
        let mut options = FlashAttentionOptions::new();
        options.mask_tensors = vec![good()];
        refused!(with(&target, options), Unsupported { .. }, "mask_tensors[0] = a tensor", "mask_mod");
        // Functions and their tensors do not serialize.
        let error = serde_json::to_string(&scored(vec![])).unwrap_err().to_string();
        assert!(error.contains("score_mod is") && error.contains("Bent"), "{error}");
        let error = serde_json::to_string(&masked(vec![good()])).unwrap_err().to_string();
        assert!(error.contains("mask_mod is") && error.contains("Document"), "{error}");
        let mut options = FlashAttentionOptions::new();
        options.score_tensors = vec![good()];
        let error = serde_json::to_string(&options).unwrap_err().to_string();
        assert!(error.contains("score_tensors[0] is a tensor of shape [1, 4, 1, 6]"), "{error}");
        assert!(error.contains("with with_score_mod"), "{error}");
    }
}

#[test]
fn block_masks_that_do_not_fit() {
    use AttentionError::{Blocks, Broadcast, Option, Unsupported};
    for target in targets() {
        let d = &target.device;
        let new = FlashAttentionOptions::new;
        let states = |shape: [usize; 4]| Tensor::<4, Int>::ones(shape, d);
        let of = |shape, block_q, block_k| new().with_block_mask(BlockMask::new(states(shape), block_q, block_k));
        // Shapes: 8 queries and 6 keys are one block.
        for (dimension, shape) in [[3, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 0]].into_iter().enumerate() {
            let words = [format!("has shape {shape:?}"), format!("dimension {dimension} is {}", shape[dimension])];
            let error = with(&target, of(shape, 128, 128));
            refused!(error, Blocks { .. }, "block_mask", &words[0], &words[1], "[2, 4, 1, 1]");
        }
        // Sizes.
        let multiple = "a multiple of 128";
        refused!(with(&target, of([1, 1, 1, 1], 64, 128)), Option { .. }, "block_q is 64", multiple);
        refused!(with(&target, of([1, 1, 1, 1], 128, 0)), Option { .. }, "block_k is 0", multiple);
        refused!(with(&target, of([1, 1, 1, 1], 128, 192)), Option { .. }, "block_k is 192", multiple);
        // Packed sequences, through either entry point: as many states as sequences, and nothing that is summed over tiles.
        let ends = || Tensor::<1, Int>::from_data([0, 8, 16], d);
        let packed = |options: FlashAttentionOptions| options.with_cu_seqlens_q(ends()).with_cu_seqlens_k(ends());
        let error = with(&target, packed(of([3, 1, 1, 1], 128, 128)));
        refused!(error, Blocks { .. }, "block_mask", "dimension 0 is 3", "[2, 4, 1, 1]");
        let biased = of([2, 1, 1, 1], 128, 128).with_bias(zeros([1, 1, 1, 1], d));
        refused!(with(&target, packed(biased)), Unsupported { .. }, "bias = a tensor [1, 1, 1, 1]", "packed sequences");
        let x = || Tensor::<3>::zeros([16, 4, 8], d);
        let sloped = of([2, 4, 1, 1], 128, 128).with_alibi_slopes(Tensor::<1>::zeros([4], d));
        let error = try_flash_attention_varlen(x(), x(), x(), ends(), ends(), &sloped).unwrap_err();
        refused!(error, Unsupported { .. }, "alibi_slopes = a tensor [1, 4, 1, 1]", "packed sequences");
        // A block mask does not serialize.
        let error = serde_json::to_string(&of([1, 1, 2, 3], 128, 128)).unwrap_err().to_string();
        assert!(error.contains("block_mask is a tensor of shape [1, 1, 2, 3]"), "{error}");

        // Options from which `BlockMask::of` cannot compute a block mask.
        let of = |options: &FlashAttentionOptions, heads| {
            BlockMask::try_of(options, heads, [300, 200], [128, 128], d).unwrap_err()
        };
        let error = BlockMask::try_of(&new(), [1, 1], [300, 200], [128, 0], d).unwrap_err();
        refused!(error, Option { .. }, "block_k is 0", multiple);
        let masked = new().with_mask(mask([2, 1, 1, 200], d));
        let scores = "[1, 1, 300, 200]";
        refused!(of(&masked, [1, 1]), Broadcast { .. }, "mask has shape [2, 1, 1, 200]", "dimension 0 is 2", scores);
        let document = |a, b| new().with_mask_mod(MaskFn::of::<Document>(), [zeros(a, d), zeros(b, d)]);
        let error = of(&document([1, 1, 300, 1], [1, 1, 1, 300]), [1, 1]);
        refused!(error, Broadcast { .. }, "mask_tensors[1] has shape [1, 1, 1, 300]", "dimension 3 is 300", scores);
        let error = of(&document([1, 2, 300, 1], [1, 1, 1, 200]), [1, 1]);
        refused!(error, Broadcast { .. }, "mask_tensors[0] has shape [1, 2, 300, 1]", "dimension 1 is 2", scores);
        let half_packed = new().with_cu_seqlens_q(ends());
        refused!(of(&half_packed, [1, 1]), Unsupported { .. }, "cu_seqlens_k = no tensor", "together");
        let mut alone = new();
        alone.mask_tensors = vec![zeros([1, 1, 1, 1], d)];
        refused!(of(&alone, [1, 1]), Unsupported { .. }, "mask_tensors[0] = a tensor", "mask_mod");
        if d.supports_dtype(DType::F16) {
            let half = Tensor::<4>::zeros([1, 1, 1, 1], (d, DType::F16));
            let options = new().with_mask_mod(MaskFn::of::<Document>(), [half]);
            refused!(of(&options, [1, 1]), Unsupported { .. }, "mask_tensors[0] = a tensor of f16", "read f32");
        }
    }
}

/// Burn accepts optimizations only before its first operation.
#[cfg(all(feature = "wgpu", feature = "fusion"))]
#[test]
fn install_after_the_first_operation_fails() {
    for target in targets().into_iter().filter(|target| target.name != "flex") {
        zeros([1, 1, 1, 1], &target.device).into_data();
        let error = burn_flash_attention::install().unwrap_err();
        assert_eq!(error, burn_flash_attention::InstallError::FusionRunning);
        assert!(error.to_string().contains("before the first operation"), "{error}");
    }
}

#[test]
fn temperatures_that_do_not_fit() {
    use AttentionError::{Dimension, Unsupported};
    use flash_attention_reference::mods::Bent;
    for target in targets() {
        let temperature = |heads: usize| Tensor::<1>::ones([heads], &target.device);
        let options = |heads| FlashAttentionOptions::new().with_temperature(temperature(heads));
        refused!(with(&target, options(3)), Dimension { .. }, "temperature has num_heads_q 3", "q has 4");
        let both = options(4).with_score_mod(ScoreFn::of::<Bent>(), []);
        refused!(with(&target, both), Unsupported { .. }, "temperature = a tensor of shape [4]", "Bent", "mods::Then");
        let error = serde_json::to_string(&options(4)).unwrap_err().to_string();
        assert!(error.contains("temperature is a tensor of shape [4]"), "{error}");
        assert!(error.contains("with_temperature"), "{error}");
    }
}
