//! What caches do apart from attention: clones, and positions that are forgotten.

use crate::common::{close, random, targets};
use crate::{BATCH, D_FF, D_MODEL, HEADS, LAYERS, MEMORY, SEQ, attention, part, steps};
use burn::tensor::Tensor;
use burn_flash_attention::{
    FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig, FlashTransformerDecoderConfig,
    FlashTransformerDecoderInput, FlashTransformerEncoderConfig, FlashTransformerEncoderInput, KvStorage,
};

/// Caches in e4m3 give what others give, but for the rounding of keys and values, which is there: outputs are near and not the same.
#[test]
fn steps_over_caches_in_e4m3() {
    const WIDTH: usize = 32;
    for target in targets() {
        let device = &target.device;
        let [x, memory] = [SEQ, MEMORY].map(|seq| random([BATCH, seq, WIDTH], device));
        let near = |what: &str, found: Vec<Tensor<3>>, exact: Tensor<3>| {
            let found = Tensor::cat(found, 1);
            let rms: f32 = exact.clone().square().mean().sqrt().into_scalar();
            let error: f32 = (found - exact).square().mean().sqrt().into_scalar();
            assert!(error > 0.0 && error < rms / 16.0, "{what} on {}: {error} of {rms}", target.name);
        };
        let attention = FlashMultiHeadAttentionConfig::new(WIDTH, HEADS).with_causal(true).init(device);
        let mut cache = FlashMhaCache::with_capacity(4).with_storage(KvStorage::E4m3);
        let step = |at| attention.forward_step(FlashMhaInput::self_attn(part(&x, at)), &mut cache).context;
        near("attention", steps().map(step).collect(), attention.forward(FlashMhaInput::self_attn(x.clone())).context);

        let encoder = FlashTransformerEncoderConfig::new(WIDTH, D_FF, HEADS, LAYERS).with_causal(true).init(device);
        let mut cache = encoder.new_autoregressive_cache().with_storage(KvStorage::E4m3);
        let step = |at| encoder.forward_step(FlashTransformerEncoderInput::new(part(&x, at)), &mut cache);
        let exact = encoder.forward(FlashTransformerEncoderInput::new(x.clone()));
        near("the encoder", steps().map(step).collect(), exact);

        let decoder = FlashTransformerDecoderConfig::new(WIDTH, D_FF, HEADS, LAYERS).with_causal(true).init(device);
        let mut cache = decoder.new_autoregressive_cache_with_capacity(100).with_storage(KvStorage::E4m3);
        let input = |x| FlashTransformerDecoderInput::new(x, memory.clone());
        let step = |at| decoder.forward_step(input(part(&x, at)), &mut cache);
        near("the decoder", steps().map(step).collect(), decoder.forward(input(x.clone())));
    }
}

/// Two continuations of one prompt.
#[test]
fn clones_do_not_share_memory() {
    for target in targets() {
        let device = &target.device;
        let attention = attention(device);
        let xs = [0; 2].map(|_| random([BATCH, SEQ, D_MODEL], device));
        let prompt = random([BATCH, 4, D_MODEL], device);
        let whole = |x| Tensor::cat(vec![prompt.clone(), x], 1);
        let expected = xs.clone().map(|x| attention.forward(FlashMhaInput::self_attn(whole(x))).context);

        let mut first = FlashMhaCache::with_capacity(32);
        attention.forward_step(FlashMhaInput::self_attn(prompt.clone()), &mut first);
        let mut caches = [first.clone(), first];
        for start in 0..SEQ {
            for ((cache, x), expected) in caches.iter_mut().zip(&xs).zip(&expected) {
                let got = attention.forward_step(FlashMhaInput::self_attn(part(x, (start, 1))), cache).context;
                close(&target, "a continuation", got, part(expected, (4 + start, 1)));
            }
        }
    }
}

/// Proposed tokens that are not accepted, in both interfaces.
#[test]
fn forgotten_positions_are_computed_again() {
    for target in targets() {
        let device = &target.device;
        let (x, memory) = (random([BATCH, SEQ, D_MODEL], device), random([BATCH, MEMORY, D_MODEL], device));
        let wrong = random([BATCH, SEQ, D_MODEL], device);

        let attention = attention(device);
        let expected = attention.forward(FlashMhaInput::self_attn(x.clone())).context;
        let (mut stepped, mut prefixed) = (FlashMhaCache::autoregressive(), FlashMhaCache::autoregressive());
        attention.forward_step(FlashMhaInput::self_attn(part(&x, (0, 5))), &mut stepped);
        attention.forward_step(FlashMhaInput::self_attn(part(&wrong, (5, 4))), &mut stepped);
        attention.forward_cache(FlashMhaInput::self_attn(part(&x, (0, 5))), &mut prefixed);
        attention.forward_cache(FlashMhaInput::self_attn(part(&wrong, (0, 9))), &mut prefixed);
        stepped.truncate(5);
        prefixed.truncate(5);
        assert_eq!((stepped.max_len(), prefixed.max_len()), (5, 5));
        let got = attention.forward_step(FlashMhaInput::self_attn(part(&x, (5, 7))), &mut stepped).context;
        close(&target, "attention", got, part(&expected, (5, 7)));
        let got = attention.forward_cache(FlashMhaInput::self_attn(x.clone()), &mut prefixed).context;
        close(&target, "attention of a prefix", got, expected);

        let config = FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS).with_causal(true);
        let encoder = config.init(device);
        let expected = encoder.forward(FlashTransformerEncoderInput::new(x.clone()));
        let mut cache = encoder.new_autoregressive_cache();
        encoder.forward_step(FlashTransformerEncoderInput::new(part(&x, (0, 5))), &mut cache);
        encoder.forward_step(FlashTransformerEncoderInput::new(part(&wrong, (5, 4))), &mut cache);
        cache.truncate(5);
        let got = encoder.forward_step(FlashTransformerEncoderInput::new(part(&x, (5, 7))), &mut cache);
        close(&target, "the encoder", got, part(&expected, (5, 7)));

        let config = FlashTransformerDecoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS).with_causal(true);
        let decoder = config.init(device);
        let input = |x| FlashTransformerDecoderInput::new(x, memory.clone());
        let expected = decoder.forward(input(x.clone()));
        let mut cache = decoder.new_autoregressive_cache();
        decoder.forward_autoregressive_inference(input(part(&x, (0, 5))), &mut cache);
        decoder.forward_autoregressive_inference(input(part(&wrong, (0, 9))), &mut cache);
        cache.truncate(0);
        let got = decoder.forward_autoregressive_inference(input(x.clone()), &mut cache);
        close(&target, "the decoder", got, expected);
    }
}
