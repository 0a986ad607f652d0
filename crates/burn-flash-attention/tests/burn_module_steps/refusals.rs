//! Steps that are refused with a typed error, and leave the cache as it was.

use crate::common::{close, random, targets};
use crate::{BATCH, D_FF, D_MODEL, HEADS, LAYERS, MEMORY, SEQ, attention, part};
use burn::module::Module;
use burn::tensor::{Bool, Int, Tensor};
use burn_flash_attention::{
    AlibiSlopes, Alignment, AttentionError, BlockMask, FlashAttentionOptions, FlashMhaCache, FlashMhaInput,
    FlashTransformerDecoderConfig, FlashTransformerDecoderInput, FlashTransformerEncoderConfig,
    FlashTransformerEncoderInput,
};

/// A module with parameters that require gradients says so, and leaves the cache as it was; `valid` decodes.
#[test]
fn tracked_modules_are_refused() {
    for target in targets() {
        let inner = &target.device;
        let device = inner.clone().autodiff();
        let x = random([BATCH, SEQ, D_MODEL], inner);
        let trained = attention(&device);
        let expected = trained.valid().forward(FlashMhaInput::self_attn(x.clone())).context;
        let (mut cache, mut prefixed) = (FlashMhaCache::autoregressive(), FlashMhaCache::autoregressive());
        for seq in 1..=3 {
            let tracked = |at| FlashMhaInput::self_attn(part(&x, at).autodiff());
            let error = trained.try_forward_step(tracked((seq - 1, 1)), &mut cache).unwrap_err();
            assert!(matches!(error, AttentionError::Tracked { argument: "q" }), "{error}");
            assert!(error.to_string().contains("Module::valid"), "{error}");
            let error = trained.try_forward_cache(tracked((0, seq)), &mut prefixed).unwrap_err();
            assert!(matches!(error, AttentionError::Tracked { argument: "q" }), "{error}");

            let untracked = |at| FlashMhaInput::self_attn(part(&x, at));
            let got = trained.valid().forward_step(untracked((seq - 1, 1)), &mut cache).context;
            close(&target, "a step", got, part(&expected, (seq - 1, 1)));
            let got = trained.valid().forward_cache(untracked((0, seq)), &mut prefixed).context;
            close(&target, "a prefix", got, part(&expected, (0, seq)));
        }

        // The same module on a device with autodiff, frozen.
        let frozen = trained.clone().freeze();
        let got =
            frozen.forward_step(FlashMhaInput::self_attn(x.clone().autodiff()), &mut FlashMhaCache::autoregressive());
        assert!(got.context.device().is_autodiff());
        close(&target, "frozen", got.context.inner(), expected);

        // A tracked bias.
        let bias = Tensor::zeros([1, 1, 1, 4], &device).require_grad();
        let options = FlashAttentionOptions::new().with_bias(bias);
        let input = FlashMhaInput::self_attn(part(&x, (3, 1)).autodiff()).options(options);
        let error = frozen.try_forward_step(input, &mut cache).unwrap_err();
        assert!(matches!(error, AttentionError::Tracked { argument: "bias" }), "{error}");
        assert_eq!(cache.max_len(), 3);
    }
}

/// Attention over a memory has a gradient, also with a cache.
#[test]
fn a_memory_has_a_gradient() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let mut attention = attention(&device);
        attention.causal = false;
        let memory = random([BATCH, MEMORY, D_MODEL], &device).require_grad();
        let input = || FlashMhaInput::new(Tensor::ones([BATCH, 1, D_MODEL], &device), memory.clone(), memory.clone());
        let gradient = |out: Tensor<3>| memory.grad(&out.powi_scalar(2).sum().backward()).unwrap();
        let mut cache = FlashMhaCache::autoregressive_cross_attention();
        let expected = gradient(attention.forward(input()).context);
        close(&target, "dmemory", gradient(attention.forward_step(input(), &mut cache).context), expected);
    }
}

/// The second layer refuses a step that the first one, which is frozen, has taken.
#[test]
fn a_refusal_of_a_later_layer_leaves_all_layers_as_they_were() {
    for target in targets() {
        let (inner, device) = (&target.device, target.device.clone().autodiff());
        let (x, memory) = (random([BATCH, SEQ, D_MODEL], inner), random([BATCH, MEMORY, D_MODEL], inner));

        let config = FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS).with_causal(true);
        let tracked = config.init(&device);
        let mut frozen = config.init(&device).freeze();
        let valid = tracked.valid();
        frozen.layers[1] = tracked.layers[1].clone();
        let expected = valid.forward(FlashTransformerEncoderInput::new(x.clone()));
        let mut cache = valid.new_autoregressive_cache();
        let input = |at| FlashTransformerEncoderInput::new(part(&x, at));
        for at in [(0, 5), (5, 1), (6, 2)] {
            let wrong = FlashTransformerEncoderInput::new(part(&x, (at.0, 3)).autodiff());
            let error = frozen.try_forward_step(wrong, &mut cache).unwrap_err();
            assert!(matches!(error, AttentionError::Tracked { argument: "q" }), "{error}");
            assert_eq!(cache.max_len(), at.0);
            close(&target, "the encoder", valid.forward_step(input(at), &mut cache), part(&expected, at));
        }
        let lens = Tensor::<1, Int>::from_data([1, 2], inner);
        let ragged = input((8, 2)).options(FlashAttentionOptions::new().with_seq_lens_q(lens));
        valid.forward_step(ragged, &mut cache);
        // Lengths that only the device knows are restored, too.
        let wrong = FlashTransformerEncoderInput::new(part(&x, (8, 3)).autodiff());
        assert!(frozen.try_forward_step(wrong, &mut cache).is_err());
        let rows = vec![x.clone().narrow(0, 0, 1).narrow(1, 9, 1), x.clone().narrow(0, 1, 1).narrow(1, 10, 1)];
        let got = valid.forward_step(FlashTransformerEncoderInput::new(Tensor::cat(rows, 0)), &mut cache);
        let rows = vec![expected.clone().narrow(0, 0, 1).narrow(1, 9, 1), expected.narrow(0, 1, 1).narrow(1, 10, 1)];
        close(&target, "different lengths", got, Tensor::cat(rows, 0));

        let config = FlashTransformerDecoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS).with_causal(true);
        let tracked = config.init(&device);
        let mut frozen = config.init(&device).freeze();
        let valid = tracked.valid();
        frozen.layers[1] = tracked.layers[1].clone();
        let expected = valid.forward(FlashTransformerDecoderInput::new(x.clone(), memory.clone()));
        let mut cache = valid.new_autoregressive_cache();
        for at in [(0, 5), (5, 1), (6, 2)] {
            // The memory of a call that was refused at first is not kept.
            let other = random([BATCH, MEMORY, D_MODEL], inner);
            let wrong = FlashTransformerDecoderInput::new(part(&x, (at.0, 3)).autodiff(), other.autodiff());
            let error = frozen.try_forward_step(wrong, &mut cache).unwrap_err();
            assert!(matches!(error, AttentionError::Tracked { argument: "q" }), "{error}");
            let input = FlashTransformerDecoderInput::new(part(&x, at), memory.clone());
            close(&target, "the decoder", valid.forward_step(input, &mut cache), part(&expected, at));
        }
    }
}

#[test]
fn options_without_a_meaning_are_refused_by_name() {
    let new = FlashAttentionOptions::new;
    for target in targets() {
        let device = &target.device;
        let attention = attention(device);
        let zeros = |seq| Tensor::<3>::zeros([BATCH, seq, D_MODEL], device);
        let mut cache = FlashMhaCache::autoregressive();
        attention.forward_step(FlashMhaInput::self_attn(zeros(4)), &mut cache);
        let refused = |input: FlashMhaInput, cache: &mut FlashMhaCache, beginning: &str| {
            let error = attention.try_forward_step(input, cache).unwrap_err().to_string();
            assert!(error.starts_with(beginning), "{error}");
            assert_eq!(cache.max_len(), 4);
        };
        let ints = |values: &[i32]| Tensor::<1, Int>::from_data(values, device);
        let blocks = BlockMask::new(Tensor::zeros([1, 1, 1, 1], device), 128, 128);
        for (option, options) in [
            ("alignment = set", new().with_alignment(Alignment::TopLeft)),
            ("seq_lens_k = set", new().with_seq_lens_k(ints(&[1, 1]))),
            ("cu_seqlens_q = set", new().with_cu_seqlens_q(ints(&[0, 1, 2])).with_cu_seqlens_k(ints(&[0, 5, 10]))),
            ("block_mask = set", new().with_block_mask(blocks)),
            ("dropout = 0.5", new().with_dropout(0.5)),
            // Tensors without the rows of the step, or the keys so far.
            ("bias has shape [1, 1, 3, 5]", new().with_bias(Tensor::zeros([1, 1, 3, 5], device))),
            ("bias has shape [1, 1, 1, 4]", new().with_bias(Tensor::zeros([1, 1, 1, 4], device))),
            ("mask has shape [1, 1, 1, 4]", new().with_mask(Tensor::<4, Bool>::empty([1, 1, 1, 4], device))),
            ("alibi_slopes has", new().with_alibi_slopes(AlibiSlopes::geometric(HEADS + 1, device))),
        ] {
            refused(FlashMhaInput::self_attn(zeros(1)).options(options), &mut cache, option);
        }
        let mask = Tensor::<2, Bool>::empty([BATCH, 4], device);
        refused(FlashMhaInput::self_attn(zeros(1)).mask_pad(mask), &mut cache, "mask_pad has seq_k 4");
        refused(FlashMhaInput::new(zeros(1), zeros(2), zeros(2)), &mut cache, "key has seq_k 2");
        let other = Tensor::<3>::zeros([BATCH + 1, 1, D_MODEL], device);
        refused(FlashMhaInput::self_attn(other), &mut cache, "k has batch 3");
        attention.forward_step(FlashMhaInput::self_attn(zeros(1)), &mut cache);

        // A memory of another length.
        let mut free = attention.clone();
        free.causal = false;
        let mut cache = FlashMhaCache::autoregressive_cross_attention();
        free.forward_step(FlashMhaInput::new(zeros(1), zeros(4), zeros(4)), &mut cache);
        let error = free.try_forward_step(FlashMhaInput::new(zeros(1), zeros(5), zeros(5)), &mut cache).unwrap_err();
        assert!(error.to_string().starts_with("key has seq_k 5"), "{error}");
    }
}

/// burn-nn's contract returns the outputs of all positions, which steps do not keep.
#[test]
fn one_cache_has_one_interface() {
    for target in targets() {
        let device = &target.device;
        let attention = attention(device);
        let input = |seq| FlashMhaInput::self_attn(Tensor::zeros([BATCH, seq, D_MODEL], device));
        let mut cache = FlashMhaCache::autoregressive();
        attention.forward_step(input(2), &mut cache);
        let error = attention.try_forward_cache(input(3), &mut cache).unwrap_err().to_string();
        assert!(error.starts_with("cache = 2 positions, 0 of them with outputs is not supported"), "{error}");
        attention.forward_step(input(1), &mut cache);

        let mut cache = FlashMhaCache::autoregressive();
        attention.forward_cache(input(3), &mut cache);
        for seq in [2, 3] {
            let error = attention.try_forward_cache(input(seq), &mut cache).unwrap_err().to_string();
            assert!(error.starts_with(&format!("prefix = {seq} positions is not supported")), "{error}");
        }
        attention.forward_cache(input(4), &mut cache);

        let config = FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, LAYERS);
        let (encoder, other) =
            (config.init(device), FlashTransformerEncoderConfig::new(D_MODEL, D_FF, HEADS, 1).init(device));
        let input = FlashTransformerEncoderInput::new(Tensor::zeros([BATCH, 2, D_MODEL], device));
        let error = encoder.try_forward_step(input, &mut other.new_autoregressive_cache()).unwrap_err().to_string();
        assert!(error.starts_with("cache = 1 layers is not supported"), "{error}");
    }
}
