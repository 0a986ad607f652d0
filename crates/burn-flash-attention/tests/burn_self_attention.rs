//! Self-attention with rotary embedding, compared with frequencies of transformers, rotations by matrices, and composed operations.

mod common;

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData, activation};
use burn_flash_attention::{
    AttentionError, FlashAttentionOptions, FlashSelfAttention, FlashSelfAttentionConfig, FlashSelfAttentionInput,
    KvCacheConfig, PagedKvCacheConfig, RotaryEmbeddingConfig, RotaryLayout, RotaryScaling,
};
use common::{Target, close, random, targets};

const BATCH: usize = 2;
const SEQ: usize = 11;
const D_MODEL: usize = 20;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const HEAD_DIM: usize = 16;

/// Llama 3's scaling, as transformers computed `LLAMA3` with.
fn llama3() -> RotaryEmbeddingConfig {
    RotaryEmbeddingConfig::new(64).with_base(500_000.0).with_scaling(RotaryScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
    })
}

fn yarn(truncate: bool) -> RotaryEmbeddingConfig {
    RotaryEmbeddingConfig::new(64).with_scaling(RotaryScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 64,
        attention_factor: None,
        truncate,
    })
}

/// `inv_freq` of transformers 5.24 (`ROPE_INIT_FUNCTIONS`) for `head_dim` 16, in f32.
const LLAMA3: [f64; 8] =
    [1.0, 0.079403013, 0.00470075384, 0.000911583134, 0.000176776681, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06];
const LLAMA3_OF_8_COLUMNS: [f64; 4] = [1.0, 0.00470075384, 0.000176776681, 6.64786967e-06];
const YARN: [f64; 8] =
    [1.0, 0.198583528, 0.0255952496, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05];
const YARN_TRUNCATED: [f64; 3] = [1.0, 0.237170815, 0.049999997];
const YARN_FACTOR: f64 = 1.138629436111989;
const LINEAR: [f64; 8] =
    [0.125, 0.0395284705, 0.0125000002, 0.00395284733, 0.00124999997, 0.000395284733, 0.000125000006, 3.95284733e-05];

#[test]
fn frequencies_are_those_of_transformers() {
    let linear = RotaryEmbeddingConfig::new(64).with_scaling(RotaryScaling::Linear { factor: 8.0 });
    let partial = llama3().with_rotary_dim(Some(8));
    for (config, expected, factor) in [
        (llama3(), &LLAMA3[..], 1.0),
        (partial, &LLAMA3_OF_8_COLUMNS, 1.0),
        (yarn(false), &YARN, YARN_FACTOR),
        (yarn(true), &YARN_TRUNCATED, YARN_FACTOR),
        (linear, &LINEAR, 1.0),
    ] {
        let (frequencies, found) = config.frequencies(HEAD_DIM).unwrap();
        assert_eq!(found, factor, "{config:?}");
        for (found, expected) in frequencies.iter().zip(expected) {
            assert!((found / expected - 1.0).abs() < 1e-6, "{config:?}: {found}, expected {expected}");
        }
        assert!(frequencies.len() >= expected.len());
    }
}

/// Matrices `[1, 1, seq, head_dim, head_dim]` by which rows at these positions are multiplied, made in f64.
fn rotations(config: &RotaryEmbeddingConfig, positions: &[usize], device: &Device) -> Tensor<5> {
    let (frequencies, factor) = config.frequencies(HEAD_DIM).unwrap();
    let half = frequencies.len();
    let mut all = vec![0f32; positions.len() * HEAD_DIM * HEAD_DIM];
    for (matrix, at) in all.chunks_mut(HEAD_DIM * HEAD_DIM).zip(positions) {
        let mut set = |row: usize, column: usize, value: f64| matrix[row * HEAD_DIM + column] = value as f32;
        for column in 2 * half..HEAD_DIM {
            set(column, column, 1.0);
        }
        for (pair, turn) in frequencies.iter().enumerate() {
            let (a, b) = match config.layout {
                RotaryLayout::Interleaved => (2 * pair, 2 * pair + 1),
                _ => (pair, pair + half),
            };
            let (sin, cos) = (*at as f64 * turn).sin_cos();
            set(a, a, factor * cos);
            set(b, b, factor * cos);
            set(b, a, -factor * sin);
            set(a, b, factor * sin);
        }
    }
    let shape = [1, 1, positions.len(), HEAD_DIM, HEAD_DIM];
    Tensor::from_data(TensorData::new(all, shape), (device, DType::F32))
}

/// Rows `[batch, heads, seq, head_dim]` multiplied by a matrix of each position.
fn rotated(x: Tensor<4>, rotations: &Tensor<5>) -> Tensor<4> {
    let [batch, heads, seq, head_dim] = x.dims();
    // No product of matrices, which some devices round.
    let columns = x.reshape([batch, heads, seq, head_dim, 1]);
    (columns * rotations.clone()).sum_dim(3).reshape([batch, heads, seq, head_dim])
}

/// Embeddings of each kind.
fn embeddings() -> [RotaryEmbeddingConfig; 5] {
    let interleaved = yarn(true).with_layout(RotaryLayout::Interleaved);
    [
        RotaryEmbeddingConfig::new(64),
        llama3().with_rotary_dim(Some(10)),
        yarn(false),
        interleaved.clone(),
        interleaved.with_rotary_dim(Some(6)),
    ]
}

#[test]
fn rows_are_rotated_by_their_positions() {
    for target in targets() {
        let device = &target.device;
        for config in embeddings() {
            let rotary = config.init(HEAD_DIM, device);
            let x = random([BATCH, HEADS, SEQ, HEAD_DIM], device);
            let what = format!("{config:?}");
            let positions: Vec<usize> = (5..5 + SEQ).collect();
            let expected = rotated(x.clone(), &rotations(&config, &positions, device));
            close(&target, &what, rotary.apply(x.clone(), &rotary.angles(5, SEQ).unwrap()), expected);

            // Other positions in each batch.
            let batches: [Vec<usize>; BATCH] = [(0..SEQ).map(|i| i * i % 64).collect(), (20..20 + SEQ).collect()];
            let flat: Vec<i32> = batches.iter().flatten().map(|at| *at as i32).collect();
            let at = Tensor::<1, Int>::from_data(flat.as_slice(), device).reshape([BATCH, SEQ]);
            let found = rotary.apply(x.clone(), &rotary.angles_at(at));
            for (batch, positions) in batches.iter().enumerate() {
                let of_batch = |x: &Tensor<4>| x.clone().narrow(0, batch, 1);
                let expected = rotated(of_batch(&x), &rotations(&config, positions, device));
                close(&target, &what, of_batch(&found), expected);
            }
        }
    }
}

/// Modules that differ in everything.
fn modules() -> Vec<FlashSelfAttentionConfig> {
    let new = || {
        FlashSelfAttentionConfig::new(D_MODEL, HEADS)
            .with_num_heads_kv(Some(HEADS_KV))
            .with_head_dim(Some(HEAD_DIM))
            .with_rotary(Some(llama3()))
    };
    vec![
        new(),
        new().with_qk_norm(Some(1e-6)).with_window_left(Some(3)).with_rotary(Some(yarn(false))),
        new().with_softcap(Some(2.0)).with_softmax_scale(Some(0.3)).with_qkv_bias(true).with_sinks(true),
        new().with_causal(false).with_output_bias(true).with_rotary(None).with_num_heads_kv(None),
    ]
}

/// Gives parameters that begin as zeros or ones other values.
fn trained(config: &FlashSelfAttentionConfig, device: &Device) -> FlashSelfAttention {
    let mut module = config.init(device);
    let near = |tensor: Tensor<1>| {
        let shape = tensor.dims();
        (tensor + random(shape, device) * 0.3).detach().require_grad()
    };
    module.sinks = module.sinks.map(|sinks| sinks.map(near));
    for norm in [&mut module.query_norm, &mut module.key_norm].into_iter().flatten() {
        norm.gamma = norm.gamma.clone().map(near);
    }
    module
}

/// The module's attention composed of Burn's operations, with rotations by matrices.
fn composed(config: &FlashSelfAttentionConfig, module: &FlashSelfAttention, x: Tensor<3>) -> Tensor<3> {
    let device = x.device();
    let [batch, seq, _] = x.dims();
    let positions: Vec<usize> = (0..seq).collect();
    let rotations = config.rotary.as_ref().map(|rotary| rotations(rotary, &positions, &device));
    let heads = |linear: &burn::nn::Linear, heads: usize| {
        linear.forward(x.clone()).reshape([batch, seq, heads, HEAD_DIM]).swap_dims(1, 2)
    };
    let placed = |x: Tensor<4>, norm: &Option<burn::nn::RmsNorm>| {
        let x = match norm {
            None => x,
            Some(norm) => {
                let rms = (x.clone().powi_scalar(2).mean_dim(3) + norm.epsilon).sqrt();
                x / rms * norm.gamma.val().reshape([1, 1, 1, HEAD_DIM])
            }
        };
        match &rotations {
            None => x,
            Some(rotations) => rotated(x, rotations),
        }
    };
    let group = module.num_heads_q / module.num_heads_kv;
    let of_group = |x: Tensor<4>| {
        let grouped = x.reshape([batch, module.num_heads_kv, 1, seq * HEAD_DIM]).repeat_dim(2, group);
        grouped.reshape([batch, module.num_heads_q, seq, HEAD_DIM])
    };
    let q = placed(heads(&module.query, module.num_heads_q), &module.query_norm);
    let k = of_group(placed(heads(&module.key, module.num_heads_kv), &module.key_norm));
    let v = of_group(heads(&module.value, module.num_heads_kv));
    let scale = config.softmax_scale.unwrap_or((HEAD_DIM as f32).powf(-0.5));
    let mut scores = q.matmul(k.transpose()) * scale;
    if let Some(softcap) = config.softcap {
        scores = (scores / softcap).tanh() * softcap;
    }
    let hidden = (0..seq * seq).map(|n| {
        let (i, j) = (n / seq, n % seq);
        config.causal && j > i || config.window_left.is_some_and(|window| j + window < i)
    });
    let hidden: Vec<bool> = hidden.collect();
    let hidden = Tensor::<1, burn::tensor::Bool>::from_data(hidden.as_slice(), &device).reshape([1, 1, seq, seq]);
    let scores = scores.mask_fill(hidden.expand([batch, module.num_heads_q, seq, seq]), f32::NEG_INFINITY);
    let weights = match &module.sinks {
        None => activation::softmax(scores, 3),
        Some(sinks) => {
            let sinks = sinks.val().reshape([1, module.num_heads_q, 1, 1]);
            let sinks = sinks.expand([batch, module.num_heads_q, seq, 1]);
            activation::softmax(Tensor::cat(vec![scores, sinks], 3), 3).narrow(3, 0, seq)
        }
    };
    let out = weights.matmul(v).swap_dims(1, 2).reshape([batch, seq, module.num_heads_q * HEAD_DIM]);
    module.output.forward(out)
}

#[test]
fn modules_equal_composed_operations_with_their_gradients() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for config in modules() {
            let module = trained(&config, &device);
            let x = random([BATCH, SEQ, D_MODEL], &device);
            let of = |forward: &dyn Fn(Tensor<3>) -> Tensor<3>| {
                let x = x.clone().detach().require_grad();
                let out = forward(x.clone());
                let gradients = out.clone().powi_scalar(2).sum().backward();
                let mut all = vec![x.grad(&gradients).unwrap().reshape([-1])];
                for linear in [&module.query, &module.key, &module.value, &module.output] {
                    all.push(linear.weight.grad(&gradients).unwrap().reshape([-1]));
                    all.extend(linear.bias.iter().map(|bias| bias.grad(&gradients).unwrap()));
                }
                let norms = [&module.query_norm, &module.key_norm].into_iter().flatten();
                all.extend(norms.map(|norm| norm.gamma.grad(&gradients).unwrap()));
                all.extend(module.sinks.iter().map(|sinks| sinks.grad(&gradients).unwrap()));
                (out, all)
            };
            let (found, found_gradients) = of(&|x| module.forward(x));
            let (expected, gradients) = of(&|x| composed(&config, &module, x));
            close(&target, &format!("{config}"), found, expected);
            assert_eq!(found_gradients.len(), gradients.len());
            for (nth, (found, expected)) in found_gradients.into_iter().zip(gradients).enumerate() {
                close(&target, &format!("gradient {nth} of {config}"), found, expected);
            }
        }
    }
}

/// Prompts of different lengths, then tokens one and two at a time.
#[test]
fn steps_over_caches_equal_the_whole_sequence() {
    for target in targets() {
        let device = &target.device;
        for config in modules().into_iter().filter(|config| config.causal) {
            let module = trained(&config, &device.clone().autodiff()).valid();
            let x = random([BATCH, SEQ, D_MODEL], device);
            let whole = module.forward(x.clone());
            let rows = |x: &Tensor<3>, batch: usize, at: usize, n| x.clone().narrow(0, batch, 1).narrow(1, at, n);
            let steps: [[usize; BATCH]; 4] = [[5, 3], [1, 1], [2, 1], [1, 2]];

            let mut cache = KvCacheConfig::new(BATCH, HEADS_KV, HEAD_DIM, 16).init(device);
            let mut paged = PagedKvCacheConfig::new(8, HEADS_KV, HEAD_DIM).with_page_size(16).init(device);
            let sequences = [(); BATCH].map(|()| paged.add());
            let mut lens = [0; BATCH];
            for new in steps {
                let most = new.into_iter().max().unwrap();
                // Rows past those of a sequence are padding.
                let padded = (0..BATCH).map(|batch| rows(&x, batch, lens[batch].min(SEQ - most), most));
                assert!(lens.iter().all(|len| len + most <= SEQ));
                let input = FlashSelfAttentionInput::new(Tensor::cat(padded.collect(), 0));
                let of_each = Tensor::<1, Int>::from_data(new.map(|n| n as i32), device);
                let options = FlashAttentionOptions::new().with_seq_lens_q(of_each);
                let found = module.forward_step(input.clone().options(options), &mut cache);
                let batch: Vec<_> = sequences.iter().copied().zip(new).collect();
                let in_pages = module.forward_step(input, &mut paged.batch(&batch).unwrap());
                for batch in 0..BATCH {
                    let expected = rows(&whole, batch, lens[batch], new[batch]);
                    for found in [&found, &in_pages] {
                        close(&target, &format!("{config}"), rows(found, batch, 0, new[batch]), expected.clone());
                    }
                    lens[batch] += new[batch];
                }
            }
        }
    }
}

/// Positions of packed sequences go on from one to the next; only distances matter.
#[test]
fn packed_sequences_equal_each_alone() {
    for target in targets() {
        let device = &target.device;
        for config in modules() {
            let module = config.init(device);
            let x = random([1, SEQ, D_MODEL], device);
            let begins = Tensor::<1, Int>::from_data([0, 4, SEQ as i32], device);
            let options = FlashAttentionOptions::new().with_cu_seqlens_q(begins.clone()).with_cu_seqlens_k(begins);
            let packed = module.forward(FlashSelfAttentionInput::new(x.clone()).options(options));
            for (first, len) in [(0, 4), (4, SEQ - 4)] {
                let alone = module.forward(x.clone().narrow(1, first, len));
                close(&target, &format!("{config}"), packed.clone().narrow(1, first, len), alone);
            }
        }
    }
}

/// Of rows that are a view, from a gradient that is one element, with and without recomputation.
#[test]
fn gradients_of_rotated_rows_are_turned_back() {
    for target in targets() {
        for device in [target.device.clone().autodiff(), target.device.clone().autodiff().gradient_checkpointing()] {
            for config in embeddings() {
                let rotary = config.init(HEAD_DIM, &device);
                let positions: Vec<usize> = (3..3 + SEQ).collect();
                let matrices = rotations(&config, &positions, &device);
                let x = random([BATCH, SEQ, HEADS, HEAD_DIM], &device);
                let weights = random([BATCH, HEADS, SEQ, HEAD_DIM], &device);
                let gradient = |rotate: &dyn Fn(Tensor<4>) -> Tensor<4>, squared: bool| {
                    let x = x.clone().detach().require_grad();
                    let out = rotate(x.clone().swap_dims(1, 2));
                    // The square needs the rotated rows once more.
                    let out = if squared { out.powi_scalar(2) * weights.clone() } else { out };
                    x.grad(&out.sum().backward()).unwrap()
                };
                for squared in [false, true] {
                    let found = gradient(&|x| rotary.apply(x, &rotary.angles(3, SEQ).unwrap()), squared);
                    let expected = gradient(&|x| rotated(x, &matrices), squared);
                    close(&target, &format!("{config:?}"), found, expected);
                }
            }
        }
    }
}

#[test]
fn rotation_computes_in_f32() {
    let Some(Target { device, .. }) = targets().into_iter().find(|target| target.name == "flex") else { return };
    let config = RotaryEmbeddingConfig::new(1 << 17).with_base(500_000.0);
    let rotary = config.init(HEAD_DIM, &device);
    let x = random([1, 1, 1, HEAD_DIM], &device).cast(DType::BF16);
    let at = (1 << 17) - 1;
    let exact = rotated(x.clone().cast(DType::F32), &rotations(&config, &[at], &device)).cast(DType::BF16);
    let found = rotary.apply(x, &rotary.angles(at, 1).unwrap());
    assert_eq!(found.dtype(), DType::BF16);
    let error = (found.cast(DType::F32) - exact.clone().cast(DType::F32)).abs().max().into_scalar::<f32>();
    // A bf16 unit of numbers below 4.
    assert!(error <= 2f32.powi(-7) * 2.0, "{error}, {exact}");
}

#[test]
fn what_cannot_be_done_is_refused() {
    let device = &targets()[0].device;
    let config = || FlashSelfAttentionConfig::new(D_MODEL, HEADS).with_head_dim(Some(HEAD_DIM));
    let rotary = RotaryEmbeddingConfig::new(16);
    let scaled = |scaling| config().with_rotary(Some(rotary.clone().with_scaling(scaling)));
    let reversed = RotaryScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 4.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
    };
    let slow = RotaryScaling::Yarn {
        factor: 4.0,
        beta_fast: 1.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 64,
        attention_factor: None,
        truncate: true,
    };
    for (config, told) in [
        (config().with_num_heads_kv(Some(3)), "num_heads_q is 4, which is not a multiple of num_heads_kv, 3"),
        (config().with_num_heads_kv(Some(0)), "num_heads_q is 4, which is not a multiple of num_heads_kv, 0"),
        (config().with_head_dim(Some(0)), "head_dim = 0 is not supported: it must be at least 1"),
        (
            FlashSelfAttentionConfig::new(D_MODEL, 0).with_head_dim(Some(8)).with_num_heads_kv(Some(2)),
            "num_heads_q = 0 is not supported: it must be at least 1",
        ),
        (config().with_dropout(1.0), "dropout = 1 is not supported"),
        (config().with_qk_norm(Some(0.0)), "qk_norm is 0; it must be finite and above 0"),
        (config().with_softcap(Some(-1.0)), "softcap is -1; it must be finite and above 0"),
        (config().with_softmax_scale(Some(f32::NAN)), "softmax_scale is NaN; it must be finite and above 0"),
        (config().with_rotary(Some(rotary.clone().with_rotary_dim(Some(5)))), "rotary_dim = 5 of 16 columns"),
        (config().with_rotary(Some(rotary.clone().with_base(1.0))), "base is 1; it must be above 1"),
        (scaled(RotaryScaling::Linear { factor: 0.5 }), "factor is 0.5; it must be at least 1"),
        (scaled(reversed), "high_freq_factor is 4; it must be above low_freq_factor"),
        (scaled(slow), "beta_fast is 1; it must be above beta_slow"),
    ] {
        let error = config.try_init(device).unwrap_err().to_string();
        assert!(error.starts_with(told), "{error}");
    }

    let module = config().with_softcap(Some(2.0)).with_window_left(Some(3)).with_sinks(true).init(device);
    let x = || Tensor::<3>::zeros([BATCH, SEQ, D_MODEL], device);
    let new = FlashAttentionOptions::new;
    let angles = rotary.init(HEAD_DIM, device).angles(0, SEQ).unwrap();
    for (input, told) in [
        (Tensor::zeros([BATCH, SEQ, 7], device).into(), "x has d_model 7"),
        (FlashSelfAttentionInput::new(x()).options(new().with_softcap(1.0)), "softcap = 1 is not supported"),
        (FlashSelfAttentionInput::new(x()).options(new().with_window_left(1)), "window_left = 1 is not supported"),
        (FlashSelfAttentionInput::new(x()).options(new().with_sinks(Tensor::zeros([HEADS], device))), "sinks = [4]"),
        (FlashSelfAttentionInput::new(x()).options(new().with_dropout(0.5)), "dropout = 0.5 beside"),
        (FlashSelfAttentionInput::new(x()).angles(angles), "angles = set is not supported: the module has no rotary"),
    ] {
        let error = module.try_forward(input).unwrap_err().to_string();
        assert!(error.starts_with(told), "{error}");
    }

    // Positions past the last one, also of a sequence in a cache whose length is known to the device alone.
    let module = config().with_rotary(Some(rotary)).init(device);
    let mut cache = KvCacheConfig::new(BATCH, HEADS, HEAD_DIM, 32).init(device);
    let lens = Tensor::<1, Int>::from_data([9, 4], device);
    module.forward_step(FlashSelfAttentionInput::new(x()).options(new().with_seq_lens_q(lens)), &mut cache);
    let error = module.try_forward_step(x(), &mut cache).unwrap_err();
    assert_eq!(error, AttentionError::SequenceTooLong { argument: "positions", value: 22, max: 16 });
    assert_eq!(cache.max_len(), SEQ);

    let module = module.train();
    let tracked = Tensor::<3>::zeros([BATCH, 1, D_MODEL], &device.clone().autodiff()).require_grad();
    assert!(matches!(module.try_forward_step(tracked, &mut cache), Err(AttentionError::Tracked { .. })));
}
