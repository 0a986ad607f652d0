//! Cross-attention and transformer modules compared with burn-nn's: files, outputs, gradients and decoding, with every option.

mod common;

use burn::module::Module;
use burn::nn::activation::ActivationConfig;
use burn::nn::attention::{
    CrossAttentionCache, CrossAttentionConfig, MhaCache, MhaInput, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::tensor::{Bool, Device, Gradients, Tensor};
use burn_flash_attention::{
    FlashCrossAttention, FlashCrossAttentionCache, FlashCrossAttentionConfig, FlashMhaCache, FlashMhaInput,
    FlashMultiHeadAttention, FlashMultiHeadAttentionConfig, FlashTransformerDecoder, FlashTransformerDecoderConfig,
    FlashTransformerDecoderInput, FlashTransformerEncoder, FlashTransformerEncoderConfig, FlashTransformerEncoderInput,
};
use common::{close, random, targets};

const D_MODEL: usize = 24;
const D_FF: usize = 40;
const HEADS: usize = 3;
const LAYERS: usize = 2;
const BATCH: usize = 2;
const TARGET: usize = 6;
const MEMORY: usize = 7;

/// Padding of two batches: the second one ends before its tensor does.
fn padding(seq: usize, device: &Device) -> Tensor<2, Bool> {
    let hidden = |batch: usize, n: usize| batch == 1 && n + 2 >= seq;
    let flags: Vec<bool> = (0..BATCH * seq).map(|n| hidden(n / seq, n % seq)).collect();
    Tensor::<1, Bool>::from_data(flags.as_slice(), device).reshape([BATCH, seq])
}

/// Options of burn-nn's encoder and decoder.
#[derive(Clone, Debug)]
struct Options {
    norm_first: bool,
    quiet_softmax: bool,
    activation: ActivationConfig,
    layer_norm_eps: f64,
    causal: bool,
    padded: bool,
}

fn options() -> Vec<Options> {
    let plain = Options {
        norm_first: false,
        quiet_softmax: false,
        activation: ActivationConfig::Gelu,
        layer_norm_eps: 1e-5,
        causal: false,
        padded: false,
    };
    vec![
        plain.clone(),
        Options { norm_first: true, ..plain.clone() },
        Options { quiet_softmax: true, padded: true, ..plain.clone() },
        Options { norm_first: true, causal: true, activation: ActivationConfig::Relu, ..plain.clone() },
        Options { causal: true, padded: true, layer_norm_eps: 1e-2, ..plain.clone() },
        Options { norm_first: true, quiet_softmax: true, causal: true, padded: true, ..plain },
    ]
}

macro_rules! configured {
    ($config:ident, $options:expr) => {
        $config::new(D_MODEL, D_FF, HEADS, LAYERS)
            .with_dropout(0.0)
            .with_norm_first($options.norm_first)
            .with_quiet_softmax($options.quiet_softmax)
            .with_activation($options.activation.clone())
            .with_layer_norm_eps($options.layer_norm_eps)
    };
}

/// A module that reads its parameters lazily from a file, and the directory of the file.
struct Moved<M>(M, #[expect(dead_code, reason = "removes the file when dropped")] tempfile::TempDir);

impl<M> std::ops::Deref for Moved<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.0
    }
}

/// Copies parameters to another module through a file.
fn moved<From: Module, To: Module>(from: &From, to: To) -> Moved<To> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model");
    from.clone().save_file(&path).unwrap();
    Moved(to.load_file(&path), directory)
}

fn gradient<const D: usize>(of: &Tensor<D>, gradients: &Gradients) -> Tensor<D> {
    of.grad(gradients).expect("the tensor must have a gradient, because it is tracked")
}

fn encoders(options: &Options, device: &Device) -> (TransformerEncoder, Moved<FlashTransformerEncoder>) {
    let burns = configured!(TransformerEncoderConfig, options).init(device);
    // Causality is a mask here. The option `causal` has its own test.
    let ours = moved(&burns, configured!(FlashTransformerEncoderConfig, options).init(device));
    (burns, ours)
}

fn encoder_inputs(
    x: &Tensor<3>,
    options: &Options,
    device: &Device,
) -> (TransformerEncoderInput, FlashTransformerEncoderInput) {
    let (mut burns, mut ours) = (TransformerEncoderInput::new(x.clone()), FlashTransformerEncoderInput::new(x.clone()));
    let seq = x.dims()[1];
    if options.causal {
        let mask = generate_autoregressive_mask(BATCH, seq, device);
        (burns, ours) = (burns.mask_attn(mask.clone()), ours.mask_attn(mask));
    }
    if options.padded {
        let padding = padding(TARGET, device).narrow(1, 0, seq);
        (burns, ours) = (burns.mask_pad(padding.clone()), ours.mask_pad(padding));
    }
    (burns, ours)
}

#[test]
fn encoders_are_burn_nns() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for options in options() {
            let (burns, ours) = encoders(&options, &device);
            let x = random([BATCH, TARGET, D_MODEL], &device);
            let [of_burns, of_ours] = [0; 2].map(|_| x.clone().detach().require_grad());
            let (input, _) = encoder_inputs(&of_burns, &options, &device);
            let expected = burns.forward(input);
            let (_, input) = encoder_inputs(&of_ours, &options, &device);
            let got = ours.forward(input);
            close(&target, &format!("{options:?}"), got.clone(), expected.clone());

            let weights = random([BATCH, TARGET, D_MODEL], &device);
            let expected = (expected * weights.clone()).sum().backward();
            let got = (got * weights).sum().backward();
            close(&target, "dx", gradient(&of_ours, &got), gradient(&of_burns, &expected));
            for (layer, ours, burns) in (0..LAYERS).map(|n| (n, &ours.layers[n], &burns.layers[n])) {
                for (name, ours, burns) in [
                    ("query", &ours.mha.query, &burns.mha.query),
                    ("key", &ours.mha.key, &burns.mha.key),
                    ("value", &ours.mha.value, &burns.mha.value),
                    ("output", &ours.mha.output, &burns.mha.output),
                    ("inner", &ours.pwff.linear_inner, &burns.pwff.linear_inner),
                ] {
                    let [ours, burns] = [(ours, &got), (burns, &expected)].map(|(of, g)| gradient(&of.weight.val(), g));
                    close(&target, &format!("{name} of layer {layer}, {options:?}"), ours, burns);
                }
                for (name, ours, burns) in
                    [("norm_1", &ours.norm_1, &burns.norm_1), ("norm_2", &ours.norm_2, &burns.norm_2)]
                {
                    let [ours, burns] = [(ours, &got), (burns, &expected)].map(|(of, g)| gradient(&of.gamma.val(), g));
                    close(&target, &format!("{name} of layer {layer}, {options:?}"), ours, burns);
                }
            }
        }
    }
}

#[test]
fn encoders_decode_as_burn_nns() {
    for target in targets() {
        let device = &target.device;
        for options in options().into_iter().filter(|options| options.causal) {
            let (burns, ours) = encoders(&options, device);
            let x = random([BATCH, TARGET, D_MODEL], device);
            let (mut burns_cache, mut cache) = (burns.new_autoregressive_cache(), ours.new_autoregressive_cache());
            // A prompt of three positions, then one position at a time.
            for seq in 3..=TARGET {
                let (input, of_ours) = encoder_inputs(&x.clone().narrow(1, 0, seq), &options, device);
                let expected = burns.forward_autoregressive_inference(input, &mut burns_cache);
                let got = ours.forward_autoregressive_inference(of_ours, &mut cache);
                close(&target, &format!("{seq} positions, {options:?}"), got, expected);
            }
        }
    }
}

fn decoders(options: &Options, device: &Device) -> (TransformerDecoder, Moved<FlashTransformerDecoder>) {
    let burns = configured!(TransformerDecoderConfig, options).init(device);
    let ours = moved(&burns, configured!(FlashTransformerDecoderConfig, options).init(device));
    (burns, ours)
}

fn decoder_inputs(
    x: &Tensor<3>,
    memory: &Tensor<3>,
    options: &Options,
    device: &Device,
) -> (TransformerDecoderInput, FlashTransformerDecoderInput) {
    let mut burns = TransformerDecoderInput::new(x.clone(), memory.clone());
    let mut ours = FlashTransformerDecoderInput::new(x.clone(), memory.clone());
    let seq = x.dims()[1];
    if options.causal {
        let mask = generate_autoregressive_mask(BATCH, seq, device);
        (burns, ours) = (burns.target_mask_attn(mask.clone()), ours.target_mask_attn(mask));
        // Each position of the target sees one position of the memory more than the one before.
        let flags: Vec<bool> = (0..BATCH * seq * MEMORY).map(|n| n % MEMORY > n / MEMORY % seq).collect();
        let mask = Tensor::<1, Bool>::from_data(flags.as_slice(), device).reshape([BATCH, seq, MEMORY]);
        (burns, ours) = (burns.memory_mask_attn(mask.clone()), ours.memory_mask_attn(mask));
    }
    if options.padded {
        let target = padding(TARGET, device).narrow(1, 0, seq);
        let memory = padding(MEMORY, device);
        burns = burns.target_mask_pad(target.clone()).memory_mask_pad(memory.clone());
        ours = ours.target_mask_pad(target).memory_mask_pad(memory);
    }
    (burns, ours)
}

#[test]
fn decoders_are_burn_nns() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for options in options() {
            let (burns, ours) = decoders(&options, &device);
            let (x, memory) = (random([BATCH, TARGET, D_MODEL], &device), random([BATCH, MEMORY, D_MODEL], &device));
            let [of_burns, of_ours] = [0; 2].map(|_| [&x, &memory].map(|x| x.clone().detach().require_grad()));
            let (input, _) = decoder_inputs(&of_burns[0], &of_burns[1], &options, &device);
            let expected = burns.forward(input);
            let (_, input) = decoder_inputs(&of_ours[0], &of_ours[1], &options, &device);
            let got = ours.forward(input);
            close(&target, &format!("{options:?}"), got.clone(), expected.clone());

            let weights = random([BATCH, TARGET, D_MODEL], &device);
            let expected = (expected * weights.clone()).sum().backward();
            let got = (got * weights).sum().backward();
            for n in 0..2 {
                close(&target, "inputs", gradient(&of_ours[n], &got), gradient(&of_burns[n], &expected));
            }
            for (ours, burns) in ours.layers.iter().zip(&burns.layers) {
                for (ours, burns) in [
                    (&ours.self_attn.query, &burns.self_attn.query),
                    (&ours.cross_attn.key, &burns.cross_attn.key),
                    (&ours.cross_attn.output, &burns.cross_attn.output),
                    (&ours.pwff.linear_outer, &burns.pwff.linear_outer),
                ] {
                    let [ours, burns] = [(ours, &got), (burns, &expected)].map(|(of, g)| gradient(&of.weight.val(), g));
                    close(&target, &format!("parameters, {options:?}"), ours, burns);
                }
            }
        }
    }
}

#[test]
fn decoders_decode_as_burn_nns() {
    for target in targets() {
        let device = &target.device;
        for options in options().into_iter().filter(|options| options.causal) {
            let (burns, ours) = decoders(&options, device);
            let (x, memory) = (random([BATCH, TARGET, D_MODEL], device), random([BATCH, MEMORY, D_MODEL], device));
            let (mut burns_cache, mut cache) = (burns.new_autoregressive_cache(), ours.new_autoregressive_cache());
            for seq in 2..=TARGET {
                let (input, of_ours) = decoder_inputs(&x.clone().narrow(1, 0, seq), &memory, &options, device);
                let expected = burns.forward_autoregressive_inference(input, &mut burns_cache);
                let got = ours.forward_autoregressive_inference(of_ours, &mut cache);
                close(&target, &format!("{seq} positions, {options:?}"), got, expected);
            }
        }
    }
}

/// `causal` equals burn-nn's causal mask, for whole sequences and step by step.
#[test]
fn causality_needs_no_mask() {
    for target in targets() {
        let device = &target.device;
        let (x, memory) = (random([BATCH, TARGET, D_MODEL], device), random([BATCH, MEMORY, D_MODEL], device));
        let options = Options { causal: true, ..options()[0].clone() };

        let (burns, _kept) = encoders(&options, device);
        let config = configured!(FlashTransformerEncoderConfig, options).with_causal(true);
        let ours = moved(&burns, config.init(device));
        let (input, _) = encoder_inputs(&x, &options, device);
        let expected = burns.forward(input);
        close(&target, "encoder", ours.forward(FlashTransformerEncoderInput::new(x.clone())), expected.clone());
        let mut cache = ours.new_autoregressive_cache();
        for seq in 1..=TARGET {
            let prefix = FlashTransformerEncoderInput::new(x.clone().narrow(1, 0, seq));
            let got = ours.forward_autoregressive_inference(prefix, &mut cache);
            close(&target, "steps", got, expected.clone().narrow(1, 0, seq));
        }

        let (burns, _kept) = decoders(&options, device);
        let config = configured!(FlashTransformerDecoderConfig, options).with_causal(true);
        let ours = moved(&burns, config.init(device));
        let mask = generate_autoregressive_mask(BATCH, TARGET, device);
        let input = TransformerDecoderInput::new(x.clone(), memory.clone()).target_mask_attn(mask);
        let got = ours.forward(FlashTransformerDecoderInput::new(x, memory));
        close(&target, "decoder", got, burns.forward(input));
    }
}

/// Dropout of 0.1, the default of burn-nn's configurations. Models trained with it load and run. In training it drops residuals, attention
/// weights, or both.
#[test]
fn dropout_in_training_drops_residuals_weights_or_both() {
    for target in targets() {
        let burns = TransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS).init(&target.device);
        let x = random([BATCH, TARGET, D_MODEL], &target.device);
        let expected = burns.forward(TransformerEncoderInput::new(x.clone()));
        let config = FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS);
        let loaded = moved(&burns, config.init(&target.device));
        close(&target, "loaded", loaded.forward(FlashTransformerEncoderInput::new(x.clone())), expected.clone());
        let converted = FlashTransformerEncoder::from(burns);
        close(&target, "converted", converted.forward(FlashTransformerEncoderInput::new(x)), expected);

        let device = target.device.clone().autodiff();
        let x = FlashTransformerEncoderInput::new(random([BATCH, TARGET, D_MODEL], &device));
        for (residuals, weights, drops) in
            [(0.1, None, true), (0.1, Some(0.0), true), (0.0, Some(0.1), true), (0.0, None, false)]
        {
            let config = config.clone().with_dropout(residuals).with_attention_dropout(weights);
            let training = config.init(&device);
            let twice = [0; 2].map(|_| training.forward(x.clone()).into_data());
            assert_eq!(twice[0] != twice[1], drops, "residuals {residuals}, weights {weights:?}");
            let frozen = training.freeze();
            assert_eq!(frozen.forward(x.clone()).into_data(), frozen.forward(x.clone()).into_data());
        }
    }
}

#[test]
fn quiet_softmax_is_burn_nns() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let burns =
            MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.0).with_quiet_softmax(true).init(&device);
        let ours = FlashMultiHeadAttention::from(burns.clone());
        let config = FlashMultiHeadAttentionConfig::new(D_MODEL, HEADS).with_quiet_softmax(true);
        let loaded = moved(&burns, config.init(&device));
        // The first batch sees no key.
        let hidden = Tensor::<2, Bool>::from_data([[true; MEMORY], [false; MEMORY]], &device);
        let (x, memory) = (random([BATCH, TARGET, D_MODEL], &device), random([BATCH, MEMORY, D_MODEL], &device));
        let inputs = || [&x, &memory].map(|x| x.clone().detach().require_grad());
        let [q, m] = inputs();
        let expected = burns.forward(MhaInput::new(q.clone(), m.clone(), m.clone()).mask_pad(hidden.clone())).context;
        let gradients = expected.clone().powi_scalar(2).sum().backward();
        for ours in [&ours, &*loaded] {
            let [of_q, of_m] = inputs();
            let input = FlashMhaInput::new(of_q.clone(), of_m.clone(), of_m.clone()).mask_pad(hidden.clone());
            let got = ours.forward(input).context;
            close(&target, "output", got.clone(), expected.clone());
            let of_ours = got.powi_scalar(2).sum().backward();
            close(&target, "dq", gradient(&of_q, &of_ours), gradient(&q, &gradients));
            close(&target, "dkv", gradient(&of_m, &of_ours), gradient(&m, &gradients));
        }
    }
}

#[test]
fn caches_of_one_attention_are_burn_nns() {
    for target in targets() {
        let device = &target.device;
        let burns = MultiHeadAttentionConfig::new(D_MODEL, HEADS).with_dropout(0.0).init(device);
        let ours = FlashMultiHeadAttention::from(burns.clone());
        let (x, memory) = (random([BATCH, TARGET, D_MODEL], device), random([BATCH, MEMORY, D_MODEL], device));
        let (mut burns_self, mut ours_self) = (MhaCache::autoregressive(), FlashMhaCache::autoregressive());
        let (mut burns_cross, mut ours_cross) =
            (MhaCache::autoregressive_cross_attention(), FlashMhaCache::autoregressive_cross_attention());
        for seq in 2..=TARGET {
            let prefix = || x.clone().narrow(1, 0, seq);
            let mask = || generate_autoregressive_mask(BATCH, seq, device);
            let expected =
                burns.forward_cache(MhaInput::self_attn(prefix()).mask_attn(mask()), &mut burns_self).context;
            let got = ours.forward_cache(FlashMhaInput::self_attn(prefix()).mask_attn(mask()), &mut ours_self).context;
            close(&target, "self", got, expected);
            let memory = || memory.clone();
            let input = MhaInput::new(prefix(), memory(), memory()).mask_pad(padding(MEMORY, device));
            let expected = burns.forward_cache(input, &mut burns_cross).context;
            let input = FlashMhaInput::new(prefix(), memory(), memory()).mask_pad(padding(MEMORY, device));
            close(&target, "cross", ours.forward_cache(input, &mut ours_cross).context, expected);
        }
    }
}

#[test]
fn cross_attention_is_burn_nns() {
    const D_CONTEXT: usize = 10;
    for target in targets() {
        let device = target.device.clone().autodiff();
        for (heads_kv, quiet, padded) in [(4, false, false), (2, false, true), (1, true, true)] {
            let burns = CrossAttentionConfig::new(D_MODEL, D_CONTEXT, 4, heads_kv, 5)
                .with_dropout(0.0)
                .with_quiet_softmax(quiet)
                .init(&device);
            let config = FlashCrossAttentionConfig::new(D_MODEL, D_CONTEXT, 4, heads_kv, 5)
                .with_dropout(0.0)
                .with_quiet_softmax(quiet);
            let ours: Moved<FlashCrossAttention> = moved(&burns, config.init(&device));
            let (x, context) = (random([BATCH, TARGET, D_MODEL], &device), random([BATCH, MEMORY, D_CONTEXT], &device));
            let mask = padded.then(|| padding(MEMORY, &device));
            let [of_burns, of_ours] = [0; 2].map(|_| [&x, &context].map(|x| x.clone().detach().require_grad()));
            let expected = burns.forward(of_burns[0].clone(), of_burns[1].clone(), mask.clone());
            let got = ours.forward(of_ours[0].clone(), of_ours[1].clone(), mask.clone());
            close(&target, "output", got.clone(), expected.clone());
            let expected = expected.powi_scalar(2).sum().backward();
            let got = got.powi_scalar(2).sum().backward();
            for n in 0..2 {
                close(&target, "gradients", gradient(&of_ours[n], &got), gradient(&of_burns[n], &expected));
            }

            // One context, several queries.
            let (mut burns_cache, mut cache) = (CrossAttentionCache::new(), FlashCrossAttentionCache::new());
            for _ in 0..2 {
                let x = random([BATCH, 1, D_MODEL], &device);
                let expected = burns.forward_cache(x.clone(), context.clone(), mask.clone(), &mut burns_cache);
                close(&target, "cached", ours.forward_cache(x, context.clone(), mask.clone(), &mut cache), expected);
            }
        }
    }
}
