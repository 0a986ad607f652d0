//! Sampling, generation in batches, and the program's `generate`.
#![cfg(feature = "flex")]

mod common;

use burn::tensor::{DType, Device};
use common::{CHECKPOINTS, Expected, add_tokenizer, copy, model};
use llama::generate::Generation;
use llama::sample::Sampling;
use llama::text::{ChatTemplate, Message, Text};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Command, Output};

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: None };
const LOGITS: [f32; 6] = [1.0, 3.0, -2.0, 2.5, 0.0, f32::NEG_INFINITY];

/// How often each token is drawn.
fn frequencies(sampling: Sampling) -> [f64; 6] {
    let (mut rng, mut counts) = (StdRng::seed_from_u64(7), [0.0; 6]);
    for _ in 0..20_000 {
        counts[sampling.draw(&LOGITS, &mut rng).unwrap() as usize] += 1.0;
    }
    counts.map(|count| count / 20_000.0)
}

/// Probabilities of the tokens in `kept`, in f64.
fn probabilities(temperature: f64, kept: &[usize]) -> [f64; 6] {
    let mut weights = [0.0; 6];
    kept.iter().for_each(|token| weights[*token] = (f64::from(LOGITS[*token]) / temperature).exp());
    let sum: f64 = weights.iter().sum();
    weights.map(|weight| weight / sum)
}

#[test]
fn samples_have_the_probabilities_of_the_softmax() {
    let all = Sampling { temperature: 0.7, ..GREEDY };
    let k = |k| Sampling { top_k: NonZeroUsize::new(k), ..all };
    let p = |p| Sampling { top_p: Some(p), ..all };
    // The two best tokens have 0.94 of the probability, three have 0.99.
    for (sampling, kept) in [
        (all, &[0, 1, 2, 3, 4][..]),
        (k(3), &[0, 1, 3]),
        (k(1), &[1]),
        (k(99), &[0, 1, 2, 3, 4]),
        (p(0.9), &[1, 3]),
        (p(0.96), &[0, 1, 3]),
        (p(0.01), &[1]),
        (p(1.0), &[0, 1, 2, 3, 4]),
        (Sampling { top_p: Some(0.5), ..k(2) }, &[1]),
        (GREEDY, &[1]),
    ] {
        let temperature = if sampling.temperature == 0.0 { 1.0 } else { sampling.temperature };
        let (found, expected) = (frequencies(sampling), probabilities(temperature, kept));
        for token in 0..6 {
            // Four standard deviations of a frequency are at most 0.0142.
            let bound = 4.0 * (expected[token] * (1.0 - expected[token]) / 20_000.0).sqrt();
            let difference = (found[token] - expected[token]).abs();
            assert!(difference <= bound, "{sampling:?}: token {token} has {found:?}, not {expected:?}");
        }
    }
}

#[test]
fn logits_that_are_not_finite_are_refused() {
    let mut rng = StdRng::seed_from_u64(1);
    for logits in [&[f32::NAN, 1.0][..], &[1.0, f32::NAN], &[f32::NEG_INFINITY; 2], &[f32::INFINITY, 0.0], &[]] {
        for temperature in [0.0, 1.0] {
            let error = Sampling { temperature, ..GREEDY }.draw(logits, &mut rng).unwrap_err();
            assert_eq!(error.to_string(), "the device failed: the model's logits are not finite");
        }
    }
}

fn greedy(max_tokens: usize, eos: Vec<u32>) -> Generation {
    Generation { sampling: GREEDY, seed: 1, max_tokens, eos }
}

#[test]
fn prompts_of_a_batch_are_continued_as_each_alone() {
    for name in CHECKPOINTS {
        let model = model(name, &Device::flex(), DType::F32);
        let tokens: Vec<u32> = Expected::of(name).tokens(&Device::flex()).into_data().iter().collect();
        let prompts =
            [tokens[..24].to_vec(), tokens[24..30].to_vec(), tokens[30..31].to_vec(), tokens[31..48].to_vec()];
        let mut seen = vec![Vec::new(); 4];
        let together = greedy(16, vec![]).run(&model, &prompts, |row, token| {
            seen[row].push(token);
            Ok(())
        });
        let together = together.unwrap();
        assert_eq!(together, seen);
        for (row, prompt) in prompts.iter().enumerate() {
            let alone = greedy(16, vec![]).run(&model, std::slice::from_ref(prompt), |_, _| Ok(())).unwrap();
            assert_eq!(alone[0], together[row], "{name}, prompt {row}");
            assert_eq!(alone[0].len(), 16);
        }
    }
}

#[test]
fn a_text_ends_at_an_end_token_or_when_it_is_long_enough() {
    let model = model("llama3", &Device::flex(), DType::F32);
    let prompts = [vec![5, 6, 7], vec![9, 10]];
    let long = greedy(12, vec![]).run(&model, &prompts, |_, _| Ok(())).unwrap();
    let end = long[0][4];
    let short = greedy(12, vec![end]).run(&model, &prompts, |_, _| Ok(())).unwrap();
    for (short, long) in short.iter().zip(&long) {
        let until: Vec<u32> = long.iter().copied().take_while(|token| *token != end).collect();
        assert_eq!(*short, until);
    }
    assert!(short[0].len() <= 4);
    assert_eq!(greedy(0, vec![]).run(&model, &prompts, |_, _| Ok(())).unwrap(), vec![Vec::<u32>::new(); 2]);
    let error = greedy(9, vec![]).run(&model, &[vec![3], vec![]], |_, _| Ok(())).unwrap_err();
    assert_eq!(error.to_string(), "--prompt is empty; a prompt must have at least one token");
    let error = greedy(254, vec![]).run(&model, &[vec![3], vec![4, 5, 6]], |_, _| Ok(())).unwrap_err();
    let sentence = "--max-tokens is 254; the model has 256 positions, of which the longest prompt takes 3";
    assert_eq!(error.to_string(), sentence);
    assert_eq!(greedy(253, vec![]).run(&model, &[vec![4, 5, 6]], |_, _| Ok(())).unwrap()[0].len(), 253);
}

#[test]
fn a_seed_gives_the_same_text_again() {
    let model = model("llama3", &Device::flex(), DType::F32);
    let run = |seed| {
        let sampling = Sampling { temperature: 1.5, ..GREEDY };
        let generation = Generation { sampling, seed, max_tokens: 20, eos: vec![] };
        generation.run(&model, &[vec![5], vec![5]], |_, _| Ok(())).unwrap()
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3)[0], run(3)[1]);
    // Seeds count up from one prompt to the next.
    assert_eq!(run(4)[0], run(3)[1]);
}

#[test]
fn a_chat_is_rendered_by_the_template() {
    let directory = copy("llama3");
    add_tokenizer(directory.path());
    let template = ChatTemplate::of_folder(directory.path()).unwrap();
    let message = |role: &str, content: &str| Message { role: role.to_string(), content: content.to_string() };
    let rendered = template.render(&[message("system", " w7"), message("user", "w5 w6 ")]).unwrap();
    assert_eq!(rendered.split_whitespace().collect::<Vec<_>>(), ["<s>", "w9", "w7", "w5", "w6", "w4"]);
    let text = Text::of_folder(directory.path()).unwrap();
    assert_eq!(text.encode(&rendered, false).unwrap(), [1, 9, 7, 5, 6, 4]);
    assert_eq!(text.encode("w5", true).unwrap(), [1, 5]);

    // What templates of published models are written with.
    let idioms = "{%- set ns = namespace(last=-1) %}{%- for message in messages[::-1] %}
        {%- if message.role == 'user' and ns.last < 0 %}{%- set ns.last = (messages|length - 1) - loop.index0 %}{% endif -%}
        {%- endfor %}{%- if tools is not defined and messages[0]['content'] is string -%}
        {{- '<|' + messages[0]['role'] + '|>' + messages[0].content | trim + '\\n' -}}{% endif -%}
        {{- messages[-1].content.split('</think>')[-1].lstrip('\\n') ~ ns.last -}}
        {%- for message in messages %}{% if loop.first %}{% continue %}{% endif -%}
        {%- if message.content.startswith('<') %}[{{ loop.index }}]{% endif %}{% endfor %}";
    std::fs::write(directory.path().join("chat_template.jinja"), idioms.replace("\\\\", "\\")).unwrap();
    let messages = [message("system", " w7"), message("user", "<think>a</think>\nb")];
    let rendered = ChatTemplate::of_folder(directory.path()).unwrap().render(&messages).unwrap();
    assert_eq!(rendered, "<|system|>w7\nb1[2]");

    std::fs::write(directory.path().join("chat_template.jinja"), "{{ raise_exception('no chats') }}").unwrap();
    let error = ChatTemplate::of_folder(directory.path()).unwrap().render(&[]).unwrap_err().to_string();
    assert!(
        error.contains("chat_template.jinja is not a readable chat template: ") && error.contains("no chats"),
        "{error}"
    );
    std::fs::remove_file(directory.path().join("chat_template.jinja")).unwrap();
    std::fs::write(directory.path().join("tokenizer_config.json"), "{}").unwrap();
    let error = ChatTemplate::of_folder(directory.path()).err().unwrap().to_string();
    assert!(error.ends_with("it has no chat_template"), "{error}");
}

fn llama(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llama"));
    command.args(arguments.split('|')).arg("--model").arg(folder).args(["--device", "flex"]).output().unwrap()
}

#[test]
fn the_program_generates() {
    let directory = copy("llama3");
    add_tokenizer(directory.path());
    let model = model("llama3", &Device::flex(), DType::F32);
    let expected = |prompt: &[u32]| {
        let tokens = greedy(8, vec![2]).run(&model, &[prompt.to_vec()], |_, _| Ok(())).unwrap().remove(0);
        Text::of_folder(directory.path()).unwrap().decode(&tokens).unwrap()
    };
    let said = |arguments: &str| {
        let output = llama(directory.path(), &format!("generate|--temperature|0|--max-tokens|8{arguments}"));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && error.contains("tokens/s"), "{error}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(said("|--prompt|w5 w6").trim(), expected(&[1, 5, 6]).trim());
    let chat = said("|--prompt|w5|--chat|--system|w7");
    assert_eq!(chat.trim(), expected(&[1, 9, 7, 5, 4]).trim());
    let several = said("|--prompt|w5 w6|--prompt|w80");
    let lines: Vec<_> = several.lines().collect();
    assert_eq!(lines, ["== 1", &expected(&[1, 5, 6]), "== 2", &expected(&[1, 80])]);

    // A character of two tokens is printed when both are there.
    let two = |word: u32| {
        let [a, b] =
            greedy(2, vec![]).run(&model, &[vec![1, word]], |_, _| Ok(())).unwrap().remove(0).try_into().unwrap();
        (a != b && a > 2 && b > 2 && ![a, b].contains(&word)).then_some((word, a, b))
    };
    let (word, a, b) = (3..96).find_map(two).unwrap();
    let path = directory.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    tokenizer["decoder"] =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    for (token, byte) in [(a, "Ã"), (b, "©")] {
        assert!(vocab.remove(&format!("w{token}")).is_some());
        vocab.insert(byte.to_string(), token.into());
    }
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let output = llama(directory.path(), &format!("generate|--temperature|0|--max-tokens|2|--prompt|w{word}"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "é");

    let output = llama(directory.path(), "generate|--prompt|w5|--dtype|f64");
    assert_eq!(output.status.code(), Some(2));
    std::fs::remove_file(directory.path().join("tokenizer.json")).unwrap();
    let output = llama(directory.path(), "generate|--prompt|w5");
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.starts_with("error: ") && error.contains("tokenizer.json: ") && error.lines().count() == 1,
        "{error}"
    );
}
