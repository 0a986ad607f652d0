//! Generation: the cache against the whole context, and batches of texts against each text by itself.
#![cfg(all(feature = "flex", unix))]

mod common;

use burn::tensor::{Device, Int, Tensor, TensorData};
use common::{Place, fails, succeeds};
use gpt::config::{AttentionKind, Config};
use gpt::device;
use gpt::model::Gpt;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const CONTEXT: usize = 24;

fn config() -> Config {
    let found = device::choose("flex").unwrap();
    let config = Config { layers: 2, heads: 2, width: 32, context: CONTEXT, ..Config::suited_to(&found) };
    config.checked(None).unwrap()
}

/// The CPU, and the WebGPU device if there is one.
fn devices() -> Vec<Device> {
    ["flex", "wgpu"].into_iter().filter_map(|name| Some(device::choose(name).ok()?.device)).collect()
}

fn texts<const N: usize>(seed: u64) -> [Vec<u32>; N] {
    let rng = &mut StdRng::seed_from_u64(seed);
    std::array::from_fn(|_| (0..CONTEXT).map(|_| rng.random_range(0..256)).collect())
}

/// Reads the texts in parts, `parts[step][text]` tokens at a time, and compares the logits after each part with those of the model that reads
/// the text up to there at once.
fn parts_are_the_whole<const N: usize>(config: &Config, parts: &[[usize; N]]) {
    let texts = texts::<N>(3);
    for device in devices() {
        let model = Gpt::new(config, &device);
        let mut cache = model.cache(N, CONTEXT, Default::default()).unwrap();
        // Twice: a cache that was cleared is as a new one.
        for _ in 0..2 {
            let mut read = [0; N];
            for part in parts {
                let new: [_; N] = std::array::from_fn(|text| &texts[text][read[text]..read[text] + part[text]]);
                let got = model.next(&new, &mut cache).unwrap();
                assert_eq!(got.dims(), [N, 256]);
                read.iter_mut().zip(part).for_each(|(read, part)| *read += part);
                assert_eq!(cache.lens(), read);
                for (index, (text, len)) in texts.iter().zip(read).enumerate() {
                    let tokens: Vec<i32> = text[..len].iter().map(|token| *token as i32).collect();
                    let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [1, len]), &device);
                    let expected = model.forward(tokens).narrow(1, len - 1, 1).reshape([1, 256]);
                    let difference: f32 = (got.clone().narrow(0, index, 1) - expected).abs().max().into_scalar();
                    assert!(
                        difference <= 1e-5,
                        "{:?}, text {index} of {N} after {len} tokens: logits differ by {difference}",
                        config.attention
                    );
                }
            }
            cache.clear();
        }
    }
}

#[test]
fn a_cache_of_one_sequence_gives_the_logits_of_the_whole_context() {
    let config = config();
    // A prompt, single tokens, and several at once after them, up to the end of the context.
    let parts = [[7], [1], [1], [1], [5], [1], [8]];
    for attention in [AttentionKind::Flash, AttentionKind::Burn, AttentionKind::Composed] {
        parts_are_the_whole(&Config { attention, ..config.clone() }, &parts);
    }
    let parts = [[1]; CONTEXT];
    parts_are_the_whole(&config, &parts);
}

#[test]
fn a_cache_of_sequences_with_their_own_lengths_gives_the_logits_of_each() {
    let config = config();
    let parts = [[7, 1, 12], [1, 1, 1], [1, 1, 1], [2, 5, 1], [1, 1, 1]];
    parts_are_the_whole(&config, &parts);
    let all = Config { alibi: true, sinks: true, window: 5, ..config.clone() };
    parts_are_the_whole(&all, &parts);
    for attention in [AttentionKind::Burn, AttentionKind::Composed] {
        parts_are_the_whole(&Config { attention, ..config.clone() }, &[[9, 9], [1, 1], [3, 3], [1, 1]]);
    }
}

#[test]
fn a_cache_is_as_large_as_the_context_and_no_larger() {
    let config = config();
    let model = Gpt::new(&config, &device::choose("flex").unwrap().device);
    let mut cache = model.cache(3, CONTEXT, Default::default()).unwrap();
    // Keys and values of f32.
    let bytes = 2 * config.layers * 3 * CONTEXT * config.width * 4;
    assert_eq!(cache.bytes(), bytes);
    let [one, two, three] = texts(5);
    model.next(&[&one, &two[..4], &three[..2]], &mut cache).unwrap();
    assert!(cache.is_full());
    assert_eq!(cache.bytes(), bytes);
    let error = model.next(&[&one[..1]; 3], &mut cache).unwrap_err();
    assert_eq!(
        error.to_string(),
        "attention cannot run: the cache has room for 24 positions and holds up to 24, so that 1 new ones do not fit"
    );
    // An error leaves the cache as it was.
    assert_eq!(cache.lens(), [CONTEXT, 4, 2]);
}

/// The context of this run is 16 tokens, so that each text begins anew several times, at different steps.
#[test]
fn texts_of_a_batch_are_those_that_are_generated_alone() {
    let place = Place::new();
    let learned = ["--steps", "60", "--eval-interval", "30"];
    succeeds(place.small("run", &learned));
    let generate = |arguments: &[&str]| {
        let mut command = place.command(&["generate", "--name", "run", "--device", "flex", "--tokens", "50"]);
        command.args(arguments);
        command
    };
    let prompts = ["12 and ", "", "a prompt that is longer than the context", "7"];
    let alone = |prompt: &str, seed: usize, more: &[&str]| {
        let seed = seed.to_string();
        succeeds(generate(&[&["--prompt", prompt, "--seed", &seed], more].concat()))
    };
    for more in [&["--temperature", "0"][..], &["--temperature", "1"]] {
        let arguments: Vec<_> = prompts.iter().flat_map(|prompt| ["--prompt", *prompt]).collect();
        let expected = |(index, prompt): (usize, &&str)| {
            format!("--- text {} of 4, seed {} ---\n{}", index + 1, 9 + index, alone(prompt, 9 + index, more))
        };
        let expected: String = prompts.iter().enumerate().map(expected).collect();
        assert_eq!(succeeds(generate(&[&arguments[..], &["--seed", "9"], more].concat())), expected);
    }

    // Any attention continues a prompt several times.
    let twice = |kind: &str| succeeds(generate(&["--prompt", "3 and", "--batch", "2", "--attention", kind]));
    let texts = twice("flash");
    assert_eq!(texts.matches("\n3 and").count(), 2, "{texts}");
    assert_eq!([twice("burn"), twice("composed")], [texts.clone(), texts]);
    for kind in ["burn", "composed"] {
        let expected = format!("--attention is {kind}; prompts of different lengths at once need flash");
        fails(generate(&["--prompt", "3", "--prompt", "34", "--attention", kind]), &expected);
    }
    fails(generate(&["--batch", "0"]), "invalid value '0' for '--batch <N>'");
}

#[test]
fn generation_reports_its_measurements() {
    let place = Place::new();
    succeeds(place.small("run", &["--steps", "2", "--eval-interval", "2"]));
    for (batch, tokens, shown) in [("1", "20", "20 tokens, the first after "), ("3", "5", "15 tokens, the first ")] {
        let mut command = place.command(&["generate", "--device", "flex", "--batch", batch, "--tokens", tokens]);
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let line = stderr.lines().last().unwrap();
        assert!(line.starts_with(shown) && line.contains(" tokens/s, cache 0.0"), "{stderr}");
    }
}
