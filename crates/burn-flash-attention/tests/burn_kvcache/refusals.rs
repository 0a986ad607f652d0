//! Invalid calls: each is a typed error before anything runs, and the cache is as before.

use crate::common::*;
use crate::lens_of;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_flash_attention::{
    Alignment, AttentionError, BlockMask, BlockState, FlashAttentionOptions, KvCache, KvCacheConfig,
    try_flash_attention_with_kvcache,
};

fn zeros(shape: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::zeros(shape, (device, DType::F32))
}

/// The error of a call, asserted to be the same from `plan`, and to leave the cache as it was.
fn error_of(cache: &mut KvCache, qkv: [Tensor<4>; 3], options: &FlashAttentionOptions) -> AttentionError {
    let [q, k, v] = qkv;
    let before = (lens_of(cache), cache.max_len(), cache.capacity());
    let planned = cache.plan(&q, &k, &v, options).unwrap_err();
    let error = try_flash_attention_with_kvcache(q, k, v, cache, options).unwrap_err();
    assert_eq!(planned, error);
    assert_eq!(before, (lens_of(cache), cache.max_len(), cache.capacity()));
    error
}

fn says(error: AttentionError, words: &str) {
    assert!(error.to_string().contains(words), "the error {error} lacks {words:?}");
}

/// A cache of two sequences of three positions.
fn filled(device: &Device) -> KvCache {
    let mut cache = KvCacheConfig::new(2, 2, 16, 8).with_head_dim_v(Some(24)).init(device);
    let [q, k, v] = [[2, 4, 3, 16], [2, 2, 3, 16], [2, 2, 3, 24]].map(|shape| zeros(shape, device));
    try_flash_attention_with_kvcache(q, k, v, &mut cache, &FlashAttentionOptions::new()).unwrap();
    cache
}

#[test]
fn shapes_that_do_not_fit_the_cache() {
    for target in targets() {
        let device = &target.device;
        let mut cache = filled(device);
        let (q, k, v) = ([2, 4, 1, 16], [2, 2, 1, 16], [2, 2, 1, 24]);
        for (qkv, words) in [
            ([[3, 4, 1, 16], [3, 2, 1, 16], [3, 2, 1, 24]], "k has batch 3 (shape [3, 2, 1, 16]), but the cache has 2"),
            ([q, [2, 1, 1, 16], v], "k has num_heads_kv 1"),
            ([q, [2, 2, 2, 16], v], "k has seq_k 2 (shape [2, 2, 2, 16]), but q has 1"),
            ([q, [2, 2, 1, 8], v], "k has head_dim 8"),
            ([q, k, [2, 4, 1, 24]], "v has num_heads_kv 4"),
            ([q, k, [2, 2, 1, 16]], "v has head_dim_v 16"),
            ([q, k, [2, 2, 3, 24]], "v has seq_k 3"),
            ([[2, 4, 1, 8], k, v], "k has head_dim 16 (shape [2, 2, 4, 16]), but q has 8"),
            ([[2, 5, 1, 16], k, v], "num_heads_q is 5"),
            ([[1, 4, 1, 16], k, v], "k has batch 2 (shape [2, 2, 4, 16]), but q has 1"),
            (
                [[2, 4, 6, 16], [2, 2, 6, 16], [2, 2, 6, 24]],
                "room for 8 positions and holds up to 3, so that 6 new ones",
            ),
        ] {
            says(error_of(&mut cache, qkv.map(|shape| zeros(shape, device)), &FlashAttentionOptions::new()), words);
        }
    }
}

#[test]
fn element_types_and_devices() {
    for target in targets() {
        let device = &target.device;
        let mut cache = filled(device);
        let shapes = [[2, 4, 1, 16], [2, 2, 1, 16], [2, 2, 1, 24]];
        let halves = shapes.map(|shape| Tensor::<4>::zeros(shape, (device, DType::F16)));
        says(error_of(&mut cache, halves, &FlashAttentionOptions::new()), "the cache is f32, but q is f16");
        let [q, k, _] = shapes.map(|shape| zeros(shape, device));
        let v = Tensor::<4>::zeros(shapes[2], (device, DType::F16));
        says(error_of(&mut cache, [q, k, v], &FlashAttentionOptions::new()), "v is f16, but q is f32");
        #[cfg(feature = "flex")]
        if target.name != "flex" {
            let [q, k, v] = shapes.map(|shape| zeros(shape, &Device::flex()));
            says(error_of(&mut cache, [q, k, v], &FlashAttentionOptions::new()), "the cache is on");
        }
        let config = |heads, head_dim, capacity| KvCacheConfig::new(1, heads, head_dim, capacity);
        for (config, words) in [
            (config(2, 16, 8).with_dtype(Some(FloatDType::F64)), "dtype is f64"),
            (config(2, 300, 8), "head_dim is 300"),
            (config(2, 16, 8).with_head_dim_v(Some(0)), "head_dim_v is 0"),
            (config(0, 16, 8), "num_heads_kv = 0"),
            (config(2, 16, 1 << 30), "seq_k is 1073741824"),
        ] {
            says(config.try_init(device).unwrap_err(), words);
        }
    }
}

#[test]
fn options_without_a_meaning() {
    for target in targets() {
        let device = &target.device;
        let mut cache = filled(device);
        let lens = || Tensor::<1, Int>::from_data([1, 1], device);
        let new = FlashAttentionOptions::new;
        let blocks = BlockMask::from_blocks([1, 1, 1, 1], 128, 128, device, |_, _, _, _| BlockState::Full);
        let mask = |keys| mask_tensor(&vec![false; keys], [1, 1, 1, keys], device);
        for (options, words) in [
            (new().with_dropout(0.1), "dropout = 0.1 is not supported: dropout is for training"),
            (new().with_dropout(f32::NAN), "dropout = NaN"),
            (new().with_seq_lens_k(lens()), "seq_lens_k = a tensor of shape [2] is not supported: the cache knows"),
            (new().with_cu_seqlens_q(lens()), "cu_seqlens_q = a tensor of shape [2]"),
            (new().with_cu_seqlens_k(lens()), "cu_seqlens_k = a tensor of shape [2]"),
            (new().with_block_mask(blocks), "block_mask = a tensor of shape [1, 1, 1, 1]"),
            (new().with_causal(true).with_alignment(Alignment::TopLeft), "alignment = TopLeft"),
            (new().with_window_left(3).with_alignment(Alignment::TopLeft), "alignment = TopLeft"),
            (new().with_softcap(-1.0), "softcap is -1"),
            (new().with_mask(mask(3)), "mask has shape [1, 1, 1, 3]"),
            (new().with_seq_lens_q(Tensor::<1, Int>::from_data([1, 1, 1], device)), "seq_lens_q has batch 3"),
        ] {
            let [q, k, v] = [[2, 4, 1, 16], [2, 2, 1, 16], [2, 2, 1, 24]].map(|shape| zeros(shape, device));
            says(error_of(&mut cache, [q, k, v], &options), words);
        }
    }
}

#[test]
fn tracked_tensors() {
    for target in targets() {
        let device = &target.device.clone().autodiff();
        let mut cache = filled(device);
        let new = FlashAttentionOptions::new;
        let of_heads = || Tensor::<1>::ones([4], device).require_grad();
        let pairs = || Tensor::<4>::ones([1, 4, 1, 1], device).require_grad();
        let shapes = [[2, 4, 1, 16], [2, 2, 1, 16], [2, 2, 1, 24]];
        for (nth, name) in ["q", "k", "v"].into_iter().enumerate() {
            let mut qkv = shapes.map(|shape| zeros(shape, device));
            // Not a leaf: the output of a tracked layer.
            qkv[nth] = qkv[nth].clone().require_grad() * 2.0;
            says(error_of(&mut cache, qkv, &new()), &format!("{name} is tracked by autodiff"));
        }
        for (options, words) in [
            (new().with_bias(pairs()), "bias is tracked"),
            (new().with_alibi_slopes(of_heads()), "alibi_slopes is tracked"),
            (new().with_sinks(of_heads()), "sinks is tracked"),
            (new().with_temperature(of_heads()), "temperature is tracked"),
        ] {
            says(error_of(&mut cache, shapes.map(|shape| zeros(shape, device)), &options), words);
        }
    }
}

#[test]
fn lengths_that_do_not_fit() {
    for target in targets() {
        let device = &target.device;
        let mut cache = filled(device);
        let three = Tensor::<1, Int>::from_data([1, 1, 1], device);
        says(cache.set_seq_lens(three, 3).unwrap_err(), "seq_lens has batch 3 (shape [3]), but the cache has 2");
        let lens = Tensor::<1, Int>::from_data([1, 1], device);
        says(cache.set_seq_lens(lens, 4).unwrap_err(), "max_len = 4 is not supported");
        assert_eq!(lens_of(&cache), [3, 3]);
    }
}
