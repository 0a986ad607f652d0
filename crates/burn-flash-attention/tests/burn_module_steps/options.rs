//! Steps of one attention with every option, and sequences of different lengths.

use crate::common::{close, random, targets};
use crate::{BATCH, D_MODEL, HEADS, MEMORY, SEQ, attention, padding, part, steps, thirds};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_flash_attention::mods::{CausalDocument, MaskFn, ScoreFn};
use burn_flash_attention::{FlashAttentionOptions, FlashMhaCache, FlashMhaInput};
use flash_attention_reference::mods::{Bent, Relative, Strided};

/// Options of a whole sequence of self-attention, and those of a step.
fn options_of_target(device: &Device) -> Vec<(&'static str, FlashAttentionOptions)> {
    let new = FlashAttentionOptions::new;
    let whole = |shape: [usize; 4]| random::<4>(shape, device);
    let of_token: Vec<f32> = (0..SEQ).map(|i| f32::from(u8::from(i >= 4))).collect();
    let of_token = Tensor::<1>::from_data(of_token.as_slice(), device);
    let documents = [of_token.clone().reshape([1, 1, SEQ, 1]), of_token.reshape([1, 1, 1, SEQ])];
    vec![
        ("none", new()),
        ("a window", new().with_window_left(3)),
        ("softcap, scale, slopes and sinks", {
            let slopes = Tensor::<1>::from_data([0.5, 0.25, 0.125, 0.1], device);
            let sinks = Tensor::<1>::from_data([0.3, -0.7, 1.1, 0.0], device);
            new().with_softcap(3.0).with_softmax_scale(0.3).with_alibi_slopes(slopes).with_sinks(sinks)
        }),
        ("a temperature", new().with_temperature(Tensor::<1>::from_data([0.5, 1.0, 2.0, 3.0], device))),
        ("a bias", new().with_bias(whole([1, HEADS, SEQ, SEQ]))),
        ("a bias of queries", new().with_bias(whole([BATCH, 1, SEQ, 1]))),
        ("a mask", new().with_mask(thirds(SEQ, SEQ, device).unsqueeze_dim(1))),
        ("a score function", new().with_score_mod(ScoreFn::of::<Relative>(), [])),
        ("a score function of tensors", {
            new().with_score_mod(ScoreFn::of::<Bent>(), [whole([BATCH, 1, SEQ, 1]), whole([1, HEADS, 1, SEQ])])
        }),
        ("a mask function", new().with_mask_mod(MaskFn::of::<Strided>(), [])),
        ("a mask function of tensors", new().with_mask_mod(MaskFn::of::<CausalDocument>(), documents)),
    ]
}

/// The rows and columns of a tensor of pairs that a step has.
fn of_step(tensor: Tensor<4>, (start, new): (usize, usize)) -> Tensor<4> {
    let [_, _, rows, columns] = tensor.dims();
    let tensor = if rows == 1 { tensor } else { tensor.narrow(2, start, new) };
    if columns == 1 { tensor } else { tensor.narrow(3, 0, start + new) }
}

/// The options that a step has.
fn options_of_step(options: &FlashAttentionOptions, at: (usize, usize)) -> FlashAttentionOptions {
    let mut options = options.clone();
    let hidden = |mask: Tensor<4, Bool>| of_step(mask.float(), at).greater_elem(0.5);
    options.mask = options.mask.map(hidden);
    options.bias = options.bias.map(|bias| of_step(bias, at));
    options.score_tensors = options.score_tensors.into_iter().map(|tensor| of_step(tensor, at)).collect();
    options.mask_tensors = options.mask_tensors.into_iter().map(|tensor| of_step(tensor, at)).collect();
    options
}

#[test]
fn steps_of_self_attention_are_the_whole_sequence() {
    for target in targets() {
        let device = &target.device;
        let attention = attention(device);
        let x = random([BATCH, SEQ, D_MODEL], device);
        for (what, options) in options_of_target(device) {
            for padded in [false, true] {
                let input = |x, options, keys| {
                    let input = FlashMhaInput::self_attn(x).options(options);
                    if padded { input.mask_pad(padding(keys, device)) } else { input }
                };
                let expected = attention.forward(input(x.clone(), options.clone(), SEQ)).context;
                // Memory for one position, which grows. A prefix is given whole.
                let (mut stepped, mut prefixed) = (FlashMhaCache::with_capacity(1), FlashMhaCache::autoregressive());
                for at in steps() {
                    let len = at.0 + at.1;
                    let new = input(part(&x, at), options_of_step(&options, at), len);
                    let got = attention.forward_step(new, &mut stepped).context;
                    close(&target, what, got, part(&expected, at));
                    assert_eq!(stepped.max_len(), len);

                    let prefix = input(part(&x, (0, len)), options_of_step(&options, (0, len)), len);
                    let got = attention.forward_cache(prefix, &mut prefixed).context;
                    close(&target, what, got, part(&expected, (0, len)));
                }
            }
        }
    }
}

/// burn-nn's mask of pairs in place of causality.
#[test]
fn masks_of_pairs_have_the_rows_of_new_positions() {
    for target in targets() {
        let device = &target.device;
        let mut attention = attention(device);
        attention.causal = false;
        let x = random([BATCH, SEQ, D_MODEL], device);
        let causal = burn::nn::attention::generate_autoregressive_mask(BATCH, SEQ, device);
        let expected = attention.forward(FlashMhaInput::self_attn(x.clone()).mask_attn(causal.clone())).context;
        let mut cache = FlashMhaCache::autoregressive();
        for (start, new) in steps() {
            let mask = causal.clone().narrow(1, start, new).narrow(2, 0, start + new);
            let input = FlashMhaInput::self_attn(part(&x, (start, new))).mask_attn(mask);
            let got = attention.forward_step(input, &mut cache).context;
            close(&target, "a mask of pairs", got, part(&expected, (start, new)));
        }
    }
}

#[test]
fn steps_of_cross_attention_are_the_whole_sequence() {
    for target in targets() {
        let device = &target.device;
        let mut attention = attention(device);
        attention.causal = false;
        let (x, memory) = (random([BATCH, SEQ, D_MODEL], device), random([BATCH, MEMORY, D_MODEL], device));
        let (bias, mask) = (random([1, HEADS, SEQ, MEMORY], device), thirds(SEQ, MEMORY, device));
        let input = |(start, new): (usize, usize)| {
            let options = FlashAttentionOptions::new().with_softcap(3.0);
            FlashMhaInput::new(part(&x, (start, new)), memory.clone(), memory.clone())
                .options(options.with_bias(bias.clone().narrow(2, start, new)))
                .mask_attn(mask.clone().narrow(1, start, new))
                .mask_pad(padding(MEMORY, device))
        };
        let expected = attention.forward(input((0, SEQ))).context;
        let [mut stepped, mut prefixed] = [0; 2].map(|_| FlashMhaCache::autoregressive_cross_attention());
        for at in steps() {
            let got = attention.forward_step(input(at), &mut stepped).context;
            close(&target, "a step", got, part(&expected, at));
            let got = attention.forward_cache(input((0, at.0 + at.1)), &mut prefixed).context;
            close(&target, "a prefix", got, part(&expected, (0, at.0 + at.1)));
        }
        assert_eq!(stepped.max_len(), MEMORY);
    }
}

/// Prompts of different lengths, then positions of both sequences, then of one: each sequence alone has the same outputs.
#[test]
fn sequences_may_have_different_lengths() {
    for target in targets() {
        let device = &target.device;
        let attention = attention(device);
        let x = random([BATCH, SEQ, D_MODEL], device);
        let relative = FlashAttentionOptions::new().with_score_mod(ScoreFn::of::<Relative>(), []);
        for options in [FlashAttentionOptions::new(), FlashAttentionOptions::new().with_window_left(4), relative] {
            let whole = attention.forward(FlashMhaInput::self_attn(x.clone()).options(options.clone())).context;
            let mut cache = FlashMhaCache::autoregressive();
            let mut lens = [0; BATCH];
            for news in [[5, 2], [1, 1], [3, 3], [1, 0], [0, 2], [1, 1]] {
                let new = news.into_iter().max().unwrap();
                // The rest of a shorter sequence is padding that is not a number.
                let rows = (0..BATCH).map(|b| {
                    let of_sequence = x.clone().narrow(0, b, 1).narrow(1, lens[b], news[b].max(1));
                    let padding = Tensor::full([1, new, D_MODEL], f32::NAN, device);
                    if news[b] == 0 {
                        return padding;
                    }
                    padding.slice_assign([0..1, 0..news[b], 0..D_MODEL], of_sequence)
                });
                let input = FlashMhaInput::self_attn(Tensor::cat(rows.collect(), 0));
                let of_step = Tensor::<1, Int>::from_data(news.map(|n| n as i32), device);
                let options = options.clone().with_seq_lens_q(of_step);
                let got = attention.forward_step(input.options(options), &mut cache).context;
                for b in (0..BATCH).filter(|&b| news[b] > 0) {
                    let of_sequence = |x: &Tensor<3>, start| x.clone().narrow(0, b, 1).narrow(1, start, news[b]);
                    close(&target, &format!("sequence {b}"), of_sequence(&got, 0), of_sequence(&whole, lens[b]));
                    lens[b] += news[b];
                }
            }
        }
    }
}
