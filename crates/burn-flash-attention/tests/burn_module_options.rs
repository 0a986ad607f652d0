//! Options of modules that burn-nn does not have, compared with burn-nn's modules with an equivalent mask, and with scores composed of
//! Burn's operations.

mod common;

use burn::nn::Linear;
use burn::nn::attention::MultiHeadAttentionConfig;
use burn::nn::transformer::{
    TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::tensor::{Bool, Device, Int, Tensor, activation};
use burn_flash_attention::mods::{CausalDocument, MaskFn, PrefixLm, ScoreFn};
use burn_flash_attention::{
    Alignment, BlockMask, FlashAttentionOptions, FlashCrossAttentionCache, FlashCrossAttentionConfig, FlashMhaCache,
    FlashMhaInput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig, FlashTransformerDecoder,
    FlashTransformerDecoderConfig, FlashTransformerDecoderInput, FlashTransformerEncoder,
    FlashTransformerEncoderConfig, FlashTransformerEncoderInput, flash_attention,
};
use common::{close, random, targets};
use flash_attention_reference::mods::Relative;

const D_MODEL: usize = 24;
const D_FF: usize = 40;
const HEADS: usize = 3;
const BATCH: usize = 2;

/// `[BATCH, seq_q, seq_k]`, true where a pair is hidden.
fn hidden(seq_q: usize, seq_k: usize, device: &Device, hides: impl Fn(usize, usize, usize) -> bool) -> Tensor<3, Bool> {
    let pairs = (0..BATCH * seq_q * seq_k).map(|n| hides(n / seq_k / seq_q, n / seq_k % seq_q, n % seq_k));
    let flags: Vec<bool> = pairs.collect();
    Tensor::<1, Bool>::from_data(flags.as_slice(), device).reshape([BATCH, seq_q, seq_k])
}

/// Options, and the pairs of `[BATCH, seq, seq]` that they hide.
struct Hiding {
    what: &'static str,
    seq: usize,
    /// Whether key 1 may be padding, too: whether every query still sees another key.
    padded: bool,
    options: FlashAttentionOptions,
    hides: Box<dyn Fn(usize, usize, usize) -> bool>,
}

fn hiding_options(device: &Device) -> Vec<Hiding> {
    let new = FlashAttentionOptions::new;
    let ints = |values: &[i32]| Tensor::<1, Int>::from_data(values, device);
    let floats = |values: &[f32], shape: [usize; 4]| Tensor::<1>::from_data(values, device).reshape(shape);

    let prefixes = [2usize, 4];
    let prefix = floats(&prefixes.map(|n| n as f32), [BATCH, 1, 1, 1]);
    // Two documents. The second one begins at the edge of a block.
    let (seq, second) = (150, 128);
    let of_token: Vec<f32> = (0..seq).map(|i| f32::from(u8::from(i >= second))).collect();
    let (of_queries, of_keys) = (floats(&of_token, [1, 1, seq, 1]), floats(&of_token, [1, 1, 1, seq]));
    let documents = new().with_mask_mod(MaskFn::of::<CausalDocument>(), [of_queries, of_keys]);
    let blocks = BlockMask::of(&documents, [1, 1], [seq, seq], [128, 128], device);
    let own = hidden(6, 6, device, |_, i, j| (i + j) % 3 == 1).unsqueeze_dim(1);
    let begins = || ints(&[0, 4, 6, 12]);
    vec![
        Hiding {
            what: "a window",
            seq: 6,
            padded: true,
            options: new().with_causal(true).with_window_left(2),
            hides: Box::new(|_, i, j| j > i || j + 2 < i),
        },
        Hiding {
            what: "a mask",
            seq: 6,
            padded: true,
            options: new().with_mask(own),
            hides: Box::new(|_, i, j| (i + j) % 3 == 1),
        },
        Hiding {
            what: "a mask function",
            seq: 6,
            padded: true,
            options: new().with_mask_mod(MaskFn::of::<PrefixLm>(), [prefix]),
            hides: Box::new(move |batch, i, j| j > i && j >= prefixes[batch]),
        },
        Hiding {
            what: "a block mask",
            seq,
            padded: false,
            options: documents.with_block_mask(blocks),
            hides: Box::new(move |_, i, j| j > i || (i >= second) != (j >= second)),
        },
        Hiding {
            what: "packed documents",
            seq: 6,
            padded: false,
            options: new().with_causal(true).with_cu_seqlens_q(begins()).with_cu_seqlens_k(begins()),
            hides: Box::new(|batch, i, j| j > i || batch == 0 && (i >= 4) != (j >= 4)),
        },
        Hiding {
            what: "lengths of keys",
            seq: 6,
            padded: true,
            options: new().with_seq_lens_k(ints(&[6, 3])),
            hides: Box::new(|batch, _, j| batch == 1 && j >= 3),
        },
    ]
}

#[test]
fn options_that_hide_pairs_equal_burn_nns_masks() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for Hiding { what, seq, padded, options, hides } in hiding_options(&device) {
            let burns = TransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, 2).with_dropout(0.0).init(&device);
            let ours = FlashTransformerEncoder::from(burns.clone());
            let x = random([BATCH, seq, D_MODEL], &device);
            let pad = hidden(1, seq, &device, |_, _, j| padded && j == 1).reshape([BATCH, seq]);
            let mask = hidden(seq, seq, &device, hides);

            let [of_burns, of_ours] = [0; 2].map(|_| x.clone().detach().require_grad());
            let input = TransformerEncoderInput::new(of_burns.clone()).mask_attn(mask.clone()).mask_pad(pad.clone());
            let expected = burns.forward(input);
            let input = FlashTransformerEncoderInput::new(of_ours.clone()).options(options.clone()).mask_pad(pad);
            let got = ours.forward(input);
            close(&target, what, got.clone(), expected.clone());
            let expected = of_burns.grad(&expected.powi_scalar(2).sum().backward()).unwrap();
            close(&target, what, of_ours.grad(&got.powi_scalar(2).sum().backward()).unwrap(), expected);

            let burns = TransformerDecoderConfig::new(D_MODEL, D_FF, HEADS, 1).with_dropout(0.0).init(&device);
            let ours = FlashTransformerDecoder::from(burns.clone());
            let memory = random([BATCH, seq, D_MODEL], &device);
            let input = TransformerDecoderInput::new(x.clone(), memory.clone());
            let expected = burns.forward(input.target_mask_attn(mask.clone()).memory_mask_attn(mask));
            let input = FlashTransformerDecoderInput::new(x, memory);
            let got = ours.forward(input.target_options(options.clone()).memory_options(options));
            close(&target, what, got, expected);
        }
    }
}

/// Scale, softcap, slopes, a bias and sinks, with their gradients.
#[test]
fn options_that_change_scores_equal_composed_scores() {
    const SEQ: usize = 7;
    for target in targets() {
        let device = target.device.clone().autodiff();
        let module = FlashMultiHeadAttention::from(
            MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.0).init(&device),
        );
        let x = random([BATCH, SEQ, D_MODEL], &device);
        let learned = || {
            let slopes = Tensor::<1>::from_data([0.5, 0.25, 0.125], &device).require_grad();
            let sinks = Tensor::<1>::from_data([0.3, -0.7, 1.1], &device).require_grad();
            let bias = Tensor::<1, Int>::arange(0..(HEADS * SEQ * SEQ) as i64, &device).float().sin();
            (slopes, sinks, bias.reshape([1, HEADS, SEQ, SEQ]).require_grad())
        };

        let (slopes, sinks, bias) = learned();
        let options = FlashAttentionOptions::new()
            .with_softmax_scale(0.3)
            .with_softcap(2.0)
            .with_alibi_slopes(slopes.clone())
            .with_sinks(sinks.clone())
            .with_bias(bias.clone());
        let got = module.forward(FlashMhaInput::self_attn(x.clone()).options(options)).context;
        let gradients = got.clone().powi_scalar(2).sum().backward();
        let got = (got, slopes.grad(&gradients), sinks.grad(&gradients), bias.grad(&gradients));

        let (slopes, sinks, bias) = learned();
        let heads = |linear: &burn::nn::Linear| {
            linear.forward(x.clone()).reshape([BATCH, SEQ, HEADS, D_MODEL / HEADS]).swap_dims(1, 2)
        };
        let positions = Tensor::<1, Int>::arange(0..SEQ as i64, &device).float();
        let distance = positions.clone().reshape([1, 1, SEQ, 1]) - positions.reshape([1, 1, 1, SEQ]);
        let scores = heads(&module.query).matmul(heads(&module.key).transpose()) * 0.3;
        let scores =
            (scores / 2.0).tanh() * 2.0 + bias.clone() - slopes.clone().reshape([1, HEADS, 1, 1]) * distance.abs();
        let of_sinks = sinks.clone().reshape([1, HEADS, 1, 1]).expand([BATCH, HEADS, SEQ, 1]);
        let weights = activation::softmax(Tensor::cat(vec![scores, of_sinks], 3), 3).narrow(3, 0, SEQ);
        let out = weights.matmul(heads(&module.value)).swap_dims(1, 2).reshape([BATCH, SEQ, D_MODEL]);
        let expected = module.output.forward(out);
        let gradients = expected.clone().powi_scalar(2).sum().backward();

        close(&target, "output", got.0, expected);
        close(&target, "slopes", got.1.unwrap(), slopes.grad(&gradients).unwrap());
        close(&target, "sinks", got.2.unwrap(), sinks.grad(&gradients).unwrap());
        close(&target, "bias", got.3.unwrap(), bias.grad(&gradients).unwrap());
    }
}

/// Options that count from the last position give the same results when decoding step by step.
#[test]
fn decoding_with_options_equals_the_whole_sequence() {
    const SEQ: usize = 6;
    for target in targets() {
        let device = &target.device;
        let options = FlashAttentionOptions::new()
            .with_causal(true)
            .with_window_left(2)
            .with_softcap(3.0)
            .with_alibi_slopes(Tensor::<1>::from_data([0.5, 0.25, 0.125], device))
            .with_sinks(Tensor::<1>::from_data([0.3, -0.7, 1.1], device));
        let x = random([BATCH, SEQ, D_MODEL], device);

        let attention = MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.0).init(device);
        let attention = FlashMultiHeadAttention::from(attention);
        let whole = attention.forward(FlashMhaInput::self_attn(x.clone()).options(options.clone())).context;
        let encoder = TransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, 2).with_dropout(0.0).init(device);
        let encoder = FlashTransformerEncoder::from(encoder);
        let encoded = encoder.forward(FlashTransformerEncoderInput::new(x.clone()).options(options.clone()));

        // Options that count from the last position do not apply to a memory of fixed length.
        let memory = random([BATCH, SEQ + 1, D_MODEL], device);
        let mut fixed = options.clone();
        (fixed.causal, fixed.window_left, fixed.alibi_slopes) = (false, None, None);
        let over_memory = |x| FlashMhaInput::new(x, memory.clone(), memory.clone()).options(fixed.clone());
        let crossed = attention.forward(over_memory(x.clone())).context;

        let (mut cache, mut layers) = (FlashMhaCache::autoregressive(), encoder.new_autoregressive_cache());
        let mut cross = FlashMhaCache::autoregressive_cross_attention();
        for seq in 2..=SEQ {
            let prefix = || x.clone().narrow(1, 0, seq);
            let input = FlashMhaInput::self_attn(prefix()).options(options.clone());
            let got = attention.forward_cache(input, &mut cache).context;
            close(&target, "attention", got, whole.clone().narrow(1, 0, seq));
            let got = attention.forward_cache(over_memory(prefix()), &mut cross).context;
            close(&target, "cross-attention", got, crossed.clone().narrow(1, 0, seq));
            let input = FlashTransformerEncoderInput::new(prefix()).options(options.clone());
            let got = encoder.forward_autoregressive_inference(input, &mut layers);
            close(&target, "encoder", got, encoded.clone().narrow(1, 0, seq));
        }
    }
}

#[test]
fn unsupported_options_are_refused_by_name() {
    let new = FlashAttentionOptions::new;
    for target in targets() {
        let device = &target.device;
        let module = FlashMultiHeadAttention::from(MultiHeadAttentionConfig::new(D_MODEL, HEADS).init(device));
        let mut quiet = module.clone();
        quiet.quiet_softmax = true;
        let input = |options| FlashMhaInput::self_attn(Tensor::zeros([BATCH, 6, D_MODEL], device)).options(options);
        let refused = |module: &FlashMultiHeadAttention, options, beginning: &str| {
            let message = module.try_forward(input(options)).unwrap_err().to_string();
            assert!(message.starts_with(beginning), "{message}");
        };
        refused(&module, new().with_dropout(0.25), "dropout = 0.25 beside the module's 0.1 is not supported");
        refused(&quiet, new().with_sinks(Tensor::zeros([HEADS], device)), "sinks = [3] is not supported");
        let mask = Tensor::<4, Bool>::empty([1, 1, 5, 6], device);
        refused(&module, new().with_mask(mask), "mask has shape [1, 1, 5, 6], which does not broadcast");
        let slopes = Tensor::<1>::zeros([HEADS + 1], device);
        refused(&module, new().with_alibi_slopes(slopes), "alibi_slopes has");

        // With a cache, these options have no meaning, or not one that a whole prefix could express.
        let ints = || Tensor::<1, Int>::from_data([0, 6, 12], device);
        let lens = || Tensor::<1, Int>::from_data([6, 6], device);
        let blocks = BlockMask::new(Tensor::zeros([1, 1, 1, 1], device), 128, 128);
        for (option, options) in [
            ("alignment", new().with_alignment(Alignment::TopLeft)),
            ("seq_lens_q", new().with_seq_lens_q(lens())),
            ("seq_lens_k", new().with_seq_lens_k(lens())),
            ("cu_seqlens_q", new().with_cu_seqlens_q(ints()).with_cu_seqlens_k(ints())),
            ("block_mask", new().with_block_mask(blocks)),
        ] {
            let mut cache = FlashMhaCache::autoregressive();
            let message = module.try_forward_cache(input(options), &mut cache).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{option} = set is not supported")), "{message}");
        }

        // In a memory of fixed length, these options would take each query as the last position.
        let mut causal = module.clone();
        causal.causal = true;
        let slopes = Tensor::<1>::zeros([HEADS], device);
        let prefix = Tensor::<4>::zeros([1, 1, 1, 1], device);
        for (option, module, options) in [
            ("causal", &causal, new()),
            ("causal", &module, new().with_causal(true)),
            ("window_left", &module, new().with_window_left(2)),
            ("window_right", &module, new().with_window_right(2)),
            ("alibi_slopes", &module, new().with_alibi_slopes(slopes)),
            ("score_mod", &module, new().with_score_mod(ScoreFn::of::<Relative>(), [])),
            ("mask_mod", &module, new().with_mask_mod(MaskFn::of::<PrefixLm>(), [prefix])),
        ] {
            let mut cache = FlashMhaCache::autoregressive_cross_attention();
            let message = module.try_forward_cache(input(options.clone()), &mut cache).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{option} = set is not supported")), "{message}");
            assert!(module.try_forward_cache(input(options), &mut FlashMhaCache::autoregressive()).is_ok());
        }
        let decoder = TransformerDecoderConfig::new(D_MODEL, D_FF, HEADS, 1).init(device);
        let decoder = FlashTransformerDecoder::from(decoder);
        let zeros = |seq| Tensor::<3>::zeros([BATCH, seq, D_MODEL], device);
        let input = FlashTransformerDecoderInput::new(zeros(2), zeros(5)).memory_options(new().with_window_left(2));
        let error = decoder.try_forward_autoregressive_inference(input, &mut decoder.new_autoregressive_cache());
        assert!(error.unwrap_err().to_string().starts_with("window_left = set is not supported"));
    }
}

#[test]
fn temperatures_divide_the_scores_of_their_heads() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let tracked = |shape| random::<4>(shape, &device).require_grad();
        let (q, k, v) = (tracked([BATCH, HEADS, 5, 8]), tracked([BATCH, HEADS, 7, 8]), tracked([BATCH, HEADS, 7, 6]));
        let temperature = Tensor::<1>::from_data([0.5, 1.0, 3.0], &device).require_grad();
        let (bias, dout) = (random([1, HEADS, 1, 7], &device), random([BATCH, HEADS, 5, 6], &device));
        let options = FlashAttentionOptions::new().with_softcap(5.0).with_bias(bias.clone());
        let ours = flash_attention(q.clone(), k.clone(), v.clone(), &options.with_temperature(temperature.clone()));

        let scores = q.clone().matmul(k.clone().transpose()) / 8f32.sqrt();
        let divided = (scores / 5.0).tanh() * 5.0 / temperature.clone().reshape([1, HEADS as i32, 1, 1]);
        let composed = activation::softmax(divided + bias, 3).matmul(v.clone());
        close(&target, "the output", ours.clone().inner(), composed.clone().inner());

        let gradients = [ours, composed].map(|out| (out * dout.clone()).sum().backward());
        for (what, tensor) in [("dq", &q), ("dk", &k), ("dv", &v)] {
            let [ours, composed] = gradients.each_ref().map(|gradients| tensor.grad(gradients).unwrap());
            close(&target, what, ours, composed);
        }
        let [ours, composed] = gradients.each_ref().map(|gradients| temperature.grad(gradients).unwrap());
        close(&target, "the gradient of the temperature", ours, composed);
    }
}

/// An encoder and a decoder whose layers have different options and share keys and values among heads, compared with their layers one by one,
/// whose calls have the options, and whose heads have keys and values of their own.
#[test]
fn layers_have_their_own_options_and_grouped_heads() {
    const SEQ: usize = 9;
    let of_layers = || {
        vec![
            FlashAttentionOptions::new().with_causal(true).with_window_left(2),
            FlashAttentionOptions::new().with_softcap(0.5).with_softmax_scale(0.7),
        ]
    };
    for target in targets() {
        let device = &target.device;
        let config = FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, 2).with_n_kv_heads(Some(1));
        let text = serde_json::to_string(&config.with_layer_options(of_layers())).unwrap();
        let encoder = serde_json::from_str::<FlashTransformerEncoderConfig>(&text).unwrap().init(device);
        assert_eq!(encoder.layers[0].mha.key.weight.dims(), [D_MODEL, D_MODEL / HEADS]);
        let x = random([BATCH, SEQ, D_MODEL], device);
        let mut alone = encoder.clone();
        alone.layers.iter_mut().for_each(|layer| layer.mha = ungrouped(&layer.mha));
        let expected = alone.layers.iter().zip(of_layers()).fold(x.clone(), |x, (layer, options)| {
            let alone = FlashTransformerEncoder { layers: vec![layer.clone()], ..alone.clone() };
            alone.forward(FlashTransformerEncoderInput::new(x).options(options))
        });
        close(&target, "encoder", encoder.forward(FlashTransformerEncoderInput::new(x.clone())), expected);

        let of_memory = || vec![FlashAttentionOptions::new().with_softcap(0.4), FlashAttentionOptions::new()];
        let decoder = FlashTransformerDecoderConfig::new(D_MODEL, D_FF, HEADS, 2)
            .with_n_kv_heads(Some(1))
            .with_target_layer_options(of_layers())
            .with_memory_layer_options(of_memory())
            .init(device);
        let memory = random([BATCH, 5, D_MODEL], device);
        let mut alone = decoder.clone();
        for layer in &mut alone.layers {
            (layer.self_attn, layer.cross_attn) = (ungrouped(&layer.self_attn), ungrouped(&layer.cross_attn));
        }
        let expected = alone.layers.iter().zip(of_layers().into_iter().zip(of_memory())).fold(
            x.clone(),
            |x, (layer, (of_target, of_memory))| {
                let alone = FlashTransformerDecoder { layers: vec![layer.clone()], ..alone.clone() };
                let input = FlashTransformerDecoderInput::new(x, memory.clone());
                alone.forward(input.target_options(of_target).memory_options(of_memory))
            },
        );
        close(&target, "decoder", decoder.forward(FlashTransformerDecoderInput::new(x, memory)), expected);
    }
}

/// The same attention with keys and values for each head, and no options of its own.
fn ungrouped(grouped: &FlashMultiHeadAttention) -> FlashMultiHeadAttention {
    let device = grouped.query.weight.device();
    let repeated = |linear: &Linear| {
        let mut linear = linear.clone();
        linear.weight = linear.weight.map(|weight| weight.detach().repeat_dim(1, HEADS));
        linear.bias = linear.bias.map(|bias| bias.map(|bias| bias.detach().repeat_dim(0, HEADS)));
        linear
    };
    FlashMultiHeadAttention {
        query: grouped.query.clone(),
        key: repeated(&grouped.key),
        value: repeated(&grouped.value),
        output: grouped.output.clone(),
        ..FlashMultiHeadAttentionConfig::new(D_MODEL, HEADS).init(&device)
    }
}

/// Cross-attention with options of the module and of the call, compared with composed operations.
#[test]
fn cross_attention_takes_options() {
    const SEQ: usize = 4;
    const CONTEXT: usize = 6;
    for target in targets() {
        let device = target.device.clone().autodiff();
        let config = FlashCrossAttentionConfig::new(D_MODEL, 16, 4, 2, 8).with_dropout(0.0);
        let module = config.with_options(FlashAttentionOptions::new().with_softcap(0.5)).init(&device);
        let (query, context) = (random([BATCH, SEQ, D_MODEL], &device), random([BATCH, CONTEXT, 16], &device));
        let bias = random([1, 4, SEQ, CONTEXT], &device);
        let padding = Tensor::<1, Bool>::from_data([false, false, true, false, false, true], &device);
        let padding = padding.reshape([1, CONTEXT]).expand([BATCH, CONTEXT]);
        let found = |bias: Tensor<4>| {
            let options = FlashAttentionOptions::new().with_bias(bias).with_softmax_scale(0.6);
            module.forward_with(query.clone(), context.clone(), Some(padding.clone()), &options, None)
        };
        let composed = |bias: Tensor<4>| {
            let heads = |x: &Tensor<3>, linear: &Linear, heads: usize| {
                let [batch, seq, _] = x.dims();
                linear.forward(x.clone()).reshape([batch, seq, heads, 8]).swap_dims(1, 2)
            };
            let of_group = |x: Tensor<4>| {
                let grouped = x.reshape([BATCH, 2, 1, CONTEXT * 8]).repeat_dim(2, 2);
                grouped.reshape([BATCH, 4, CONTEXT, 8])
            };
            let q = heads(&query, &module.query, 4);
            let k = of_group(heads(&context, &module.key, 2));
            let v = of_group(heads(&context, &module.value, 2));
            let scores = (q.matmul(k.transpose()) * (0.6 / 0.5)).tanh() * 0.5 + bias;
            let hidden = padding.clone().reshape([BATCH, 1, 1, CONTEXT]).expand([BATCH, 4, SEQ, CONTEXT]);
            let weights = activation::softmax(scores.mask_fill(hidden, f32::NEG_INFINITY), 3);
            module.output.forward(weights.matmul(v).swap_dims(1, 2).reshape([BATCH, SEQ, 32]))
        };
        let [ours, burns] = [0; 2].map(|_| bias.clone().detach().require_grad());
        let (out, expected) = (found(ours.clone()), composed(burns.clone()));
        close(&target, "cross-attention", out.clone(), expected.clone());
        let gradient = ours.grad(&out.powi_scalar(2).sum().backward()).unwrap();
        let expected = burns.grad(&expected.powi_scalar(2).sum().backward()).unwrap();
        close(&target, "the bias's gradient", gradient, expected);

        // Options that count queries have no meaning over a context that is kept.
        let causal = FlashAttentionOptions::new().with_causal(true);
        let mut cache = FlashCrossAttentionCache::new();
        let error = module.try_forward_with(query.clone(), context.clone(), None, &causal, Some(&mut cache));
        assert!(error.unwrap_err().to_string().starts_with("causal = set"));
    }
}

#[test]
fn options_of_modules_are_checked() {
    let device = targets().remove(0).device;
    let window = || FlashAttentionOptions::new().with_window_left(2);
    let module = FlashMultiHeadAttentionConfig::new(D_MODEL, HEADS).with_options(window()).init(&device);
    let input = FlashMhaInput::self_attn(random([BATCH, 4, D_MODEL], &device));
    let error = module.try_forward(input.clone().options(window())).unwrap_err().to_string();
    assert!(error.starts_with("window_left = 2 is not supported: the module sets it"), "{error}");
    let mut cache = FlashMhaCache::autoregressive_cross_attention();
    let error = module.try_forward_step(input, &mut cache).unwrap_err().to_string();
    assert!(error.starts_with("window_left = set"), "{error}");

    let sinks = FlashAttentionOptions::new().with_sinks(Tensor::zeros([HEADS], &device));
    let dropout = FlashAttentionOptions::new().with_dropout(0.5);
    for (options, words) in [(sinks, "options = sinks, a tensor"), (dropout, "options = a dropout of 0.5")] {
        let config = FlashMultiHeadAttentionConfig::new(D_MODEL, HEADS).with_options(options.clone());
        let error = config.try_init(&device).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
        let config = FlashCrossAttentionConfig::new(D_MODEL, 16, 4, 2, 8).with_options(options);
        let error = config.try_init(&device).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
    let config = FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, 2).with_layer_options(vec![window()]);
    let error = config.try_init(&device).unwrap_err().to_string();
    assert!(error.starts_with("layer_options = 1 options for 2 layers"), "{error}");
}
