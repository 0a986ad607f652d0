//! Steps of the encoder and the decoder.

use crate::common::{close, random, targets};
use crate::{BATCH, D_FF, D_MODEL, HEADS, LAYERS, MEMORY, SEQ, padding, part, steps, thirds};
use burn::tensor::{Device, Int, Tensor};
use burn_flash_attention::mods::{MaskFn, ScoreFn};
use burn_flash_attention::{
    FlashAttentionOptions, FlashTransformerDecoder, FlashTransformerDecoderConfig, FlashTransformerDecoderInput,
    FlashTransformerEncoder, FlashTransformerEncoderConfig, FlashTransformerEncoderInput,
};
use flash_attention_reference::mods::{Relative, Strided};

fn encoder(norm_first: bool, device: &Device) -> FlashTransformerEncoder {
    let config = FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS).with_causal(true);
    config.with_norm_first(norm_first).init(device)
}

fn decoder(norm_first: bool, device: &Device) -> FlashTransformerDecoder {
    let config = FlashTransformerDecoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS).with_causal(true);
    config.with_norm_first(norm_first).init(device)
}

/// Options whose tensors have no rows of queries.
fn options() -> Vec<FlashAttentionOptions> {
    let new = FlashAttentionOptions::new;
    vec![
        new(),
        new().with_window_left(3).with_softcap(3.0),
        new().with_score_mod(ScoreFn::of::<Relative>(), []),
        new().with_mask_mod(MaskFn::of::<Strided>(), []),
    ]
}

#[test]
fn steps_of_encoders_are_the_whole_sequence() {
    for target in targets() {
        let device = &target.device;
        let x = random([BATCH, SEQ, D_MODEL], device);
        let bias = random([1, HEADS, SEQ, SEQ], device);
        for (n, options) in options().into_iter().enumerate() {
            let encoder = encoder(n % 2 == 0, device);
            let input = |(start, new): (usize, usize)| {
                let len = start + new;
                let bias = bias.clone().narrow(2, start, new).narrow(3, 0, len);
                let mask = thirds(SEQ, SEQ, device).narrow(1, start, new).narrow(2, 0, len);
                FlashTransformerEncoderInput::new(part(&x, (start, new)))
                    .options(options.clone().with_bias(bias))
                    .mask_attn(mask)
                    .mask_pad(padding(SEQ, device).narrow(1, 0, len))
            };
            let expected = encoder.forward(input((0, SEQ)));
            let mut stepped = encoder.new_autoregressive_cache_with_capacity(2);
            let mut prefixed = encoder.new_autoregressive_cache();
            for at in steps() {
                let len = at.0 + at.1;
                close(&target, "a step", encoder.forward_step(input(at), &mut stepped), part(&expected, at));
                assert_eq!(stepped.max_len(), len);
                let got = encoder.forward_autoregressive_inference(input((0, len)), &mut prefixed);
                close(&target, "a prefix", got, part(&expected, (0, len)));
            }
        }
    }
}

#[test]
fn steps_of_decoders_are_the_whole_sequence() {
    for target in targets() {
        let device = &target.device;
        let (x, memory) = (random([BATCH, SEQ, D_MODEL], device), random([BATCH, MEMORY, D_MODEL], device));
        let bias = random([1, HEADS, SEQ, MEMORY], device);
        for (n, options) in options().into_iter().enumerate() {
            let decoder = decoder(n % 2 == 0, device);
            let input = |(start, new): (usize, usize)| {
                let of_memory = FlashAttentionOptions::new().with_bias(bias.clone().narrow(2, start, new));
                FlashTransformerDecoderInput::new(part(&x, (start, new)), memory.clone())
                    .target_options(options.clone())
                    .target_mask_pad(padding(SEQ, device).narrow(1, 0, start + new))
                    .memory_options(of_memory)
                    .memory_mask_attn(thirds(SEQ, MEMORY, device).narrow(1, start, new))
                    .memory_mask_pad(padding(MEMORY, device))
            };
            let expected = decoder.forward(input((0, SEQ)));
            let mut stepped = decoder.new_autoregressive_cache_with_capacity(2);
            let mut prefixed = decoder.new_autoregressive_cache();
            for at in steps() {
                let len = at.0 + at.1;
                close(&target, "a step", decoder.forward_step(input(at), &mut stepped), part(&expected, at));
                assert_eq!(stepped.max_len(), len);
                let got = decoder.forward_autoregressive_inference(input((0, len)), &mut prefixed);
                close(&target, "a prefix", got, part(&expected, (0, len)));
            }
        }
    }
}

/// Prompts of different lengths through all layers: each sequence alone has the same outputs.
#[test]
fn prompts_may_have_different_lengths() {
    for target in targets() {
        let device = &target.device;
        let (encoder, decoder) = (encoder(true, device), decoder(false, device));
        let (x, memory) = (random([BATCH, SEQ, D_MODEL], device), random([BATCH, MEMORY, D_MODEL], device));
        let encoded = encoder.forward(FlashTransformerEncoderInput::new(x.clone()));
        let decoded = decoder.forward(FlashTransformerDecoderInput::new(x.clone(), memory.clone()));
        let (mut of_encoder, mut of_decoder) = (encoder.new_autoregressive_cache(), decoder.new_autoregressive_cache());
        let mut lens = [0; BATCH];
        for news in [[5, 2], [1, 1], [1, 1], [2, 4]] {
            let new = news.into_iter().max().unwrap();
            let rows = (0..BATCH).map(|b| x.clone().narrow(0, b, 1).narrow(1, lens[b], new));
            let x = Tensor::cat(rows.collect(), 0);
            let of_step = Tensor::<1, Int>::from_data(news.map(|n| n as i32), device);
            let options = FlashAttentionOptions::new().with_seq_lens_q(of_step);
            let input = FlashTransformerEncoderInput::new(x.clone()).options(options.clone());
            let of_step = encoder.forward_step(input, &mut of_encoder);
            let input = FlashTransformerDecoderInput::new(x, memory.clone()).target_options(options);
            let of_step = [(of_step, &encoded), (decoder.forward_step(input, &mut of_decoder), &decoded)];
            for (b, new) in news.into_iter().enumerate() {
                for (got, expected) in &of_step {
                    let of_sequence = |x: &Tensor<3>, start| x.clone().narrow(0, b, 1).narrow(1, start, new);
                    close(&target, &format!("sequence {b}"), of_sequence(got, 0), of_sequence(expected, lens[b]));
                }
                lens[b] += new;
            }
        }
    }
}
