//! GPT-2's weights in Hugging Face's layout: the model's results compared with a computation in f64.
#![cfg(all(feature = "flex", unix))]

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use gpt::config::Config;
use gpt::data::Batch;
use gpt::device;
use gpt::model::Gpt;
use gpt::tokenizer::Tokenizer;
use gpt::weights::Weights;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Normal};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const WIDTH: usize = 16;
const CONTEXT: usize = 12;
/// More tokens than bytes, and no multiple of a tile of a matrix product.
const VOCABULARY: usize = 300;

/// A GPT-2 in f64, with the names and shapes of the file.
#[derive(Clone)]
struct Reference(Tensors);

/// Shape and values, by name.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

type Rows = Vec<Vec<f64>>;

impl Reference {
    fn random(seed: u64) -> Self {
        let mut shapes = vec![
            ("wte.weight".to_string(), vec![VOCABULARY, WIDTH]),
            ("wpe.weight".to_string(), vec![CONTEXT, WIDTH]),
            ("ln_f.weight".to_string(), vec![WIDTH]),
            ("ln_f.bias".to_string(), vec![WIDTH]),
        ];
        for layer in 0..LAYERS {
            for (name, shape) in [
                ("ln_1.weight", vec![WIDTH]),
                ("ln_1.bias", vec![WIDTH]),
                ("attn.c_attn.weight", vec![WIDTH, 3 * WIDTH]),
                ("attn.c_attn.bias", vec![3 * WIDTH]),
                ("attn.c_proj.weight", vec![WIDTH, WIDTH]),
                ("attn.c_proj.bias", vec![WIDTH]),
                ("ln_2.weight", vec![WIDTH]),
                ("ln_2.bias", vec![WIDTH]),
                ("mlp.c_fc.weight", vec![WIDTH, 4 * WIDTH]),
                ("mlp.c_fc.bias", vec![4 * WIDTH]),
                ("mlp.c_proj.weight", vec![4 * WIDTH, WIDTH]),
                ("mlp.c_proj.bias", vec![WIDTH]),
            ] {
                shapes.push((format!("h.{layer}.{name}"), shape));
            }
        }
        let rng = &mut StdRng::seed_from_u64(seed);
        let tensor = |(name, shape): (String, Vec<usize>)| {
            // Large enough that every part of the model affects the result: scores, the curve of GELU, the norms.
            let (mean, std) = match name.as_str() {
                name if name.contains("ln_") && name.ends_with("weight") => (1.0, 0.3),
                _ if shape.len() == 2 => (0.0, 0.4),
                _ => (0.0, 0.2),
            };
            let normal = Normal::new(mean, std).unwrap();
            // Rounded to f32, so that the file has exactly the values of this model.
            let values = (0..shape.iter().product()).map(|_| f64::from(normal.sample(&mut *rng) as f32)).collect();
            (name, (shape, values))
        };
        Self(shapes.into_iter().map(tensor).collect())
    }

    /// Writes the file with `prefix` before each name, and with the tensors that real files have besides the weights.
    fn save(&self, path: &Path, prefix: &str) {
        let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = self
            .0
            .iter()
            .map(|(name, (shape, values))| {
                let bytes = values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
                (format!("{prefix}{name}"), shape.clone(), bytes)
            })
            .collect();
        for layer in 0..LAYERS {
            let ones = vec![1.0f32; CONTEXT * CONTEXT].into_iter().flat_map(f32::to_le_bytes).collect();
            tensors.push((format!("{prefix}h.{layer}.attn.bias"), vec![1, 1, CONTEXT, CONTEXT], ones));
        }
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn get(&self, name: &str) -> &[f64] {
        &self.0[name].1
    }

    /// `x · weight + bias`, the weight `[inputs, outputs]`.
    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let (weight, bias) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let outputs = bias.len();
        let output = |x: &[f64], output| {
            bias[output] + x.iter().enumerate().map(|(input, x)| x * weight[input * outputs + output]).sum::<f64>()
        };
        x.iter().map(|x| (0..outputs).map(|index| output(x, index)).collect()).collect()
    }

    fn norm(&self, name: &str, x: &Rows) -> Rows {
        let (weight, bias) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let row = |x: &Vec<f64>| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let normed = x.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt());
            normed.zip(weight).zip(bias).map(|((x, weight), bias)| x * weight + bias).collect()
        };
        x.iter().map(row).collect()
    }

    /// The logits after each token.
    fn logits(&self, tokens: &[u32]) -> Rows {
        let (wte, wpe) = (self.get("wte.weight"), self.get("wpe.weight"));
        let embedded = |(position, token): (usize, &u32)| {
            let (token, position) = (&wte[*token as usize * WIDTH..][..WIDTH], &wpe[position * WIDTH..][..WIDTH]);
            token.iter().zip(position).map(|(token, position)| token + position).collect()
        };
        let mut x: Rows = tokens.iter().enumerate().map(embedded).collect();
        for layer in 0..LAYERS {
            let name = |part: &str| format!("h.{layer}.{part}");
            let qkv = self.linear(&name("attn.c_attn"), &self.norm(&name("ln_1"), &x));
            add(&mut x, self.linear(&name("attn.c_proj"), &attend(&qkv)));
            let mut up = self.linear(&name("mlp.c_fc"), &self.norm(&name("ln_2"), &x));
            up.iter_mut().flatten().for_each(|x| *x = gelu_new(*x));
            add(&mut x, self.linear(&name("mlp.c_proj"), &up));
        }
        let x = self.norm("ln_f", &x);
        let logit = |x: &[f64], token: &[f64]| x.iter().zip(token).map(|(x, token)| x * token).sum();
        x.iter().map(|x| wte.chunks(WIDTH).map(|token| logit(x, token)).collect()).collect()
    }

    /// The mean cross-entropy `ln sum(exp(logits)) − logit` over windows of tokens and the tokens that follow.
    fn loss(&self, inputs: &[Vec<u32>], targets: &[Vec<u32>]) -> f64 {
        let window = |(inputs, targets): (&Vec<u32>, &Vec<u32>)| {
            let row = |(logits, target): (&Vec<f64>, &u32)| {
                logits.iter().map(|logit| logit.exp()).sum::<f64>().ln() - logits[*target as usize]
            };
            self.logits(inputs).iter().zip(targets).map(row).sum::<f64>()
        };
        inputs.iter().zip(targets).map(window).sum::<f64>() / inputs.iter().map(Vec::len).sum::<usize>() as f64
    }

    /// Greedy continuation of the prompt. A full context continues with its second half.
    fn continued(&self, prompt: &str, count: usize) -> Vec<u32> {
        let mut text: Vec<u32> = prompt.bytes().map(u32::from).collect();
        let mut window = text.clone();
        for _ in 0..count {
            let logits = self.logits(&window).pop().unwrap();
            let likeliest = (0..256).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32;
            text.push(likeliest);
            match window.len() == CONTEXT {
                true => window = text[text.len() - CONTEXT / 2..].to_vec(),
                false => window.push(likeliest),
            }
        }
        text
    }
}

fn add(x: &mut Rows, y: Rows) {
    x.iter_mut().flatten().zip(y.into_iter().flatten()).for_each(|(x, y)| *x += y);
}

fn gelu_new(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// Causal attention of rows that contain queries, keys and values side by side, head by head.
fn attend(qkv: &Rows) -> Rows {
    let head_dim = WIDTH / HEADS;
    let part = |row: usize, part: usize, head: usize| &qkv[row][part * WIDTH + head * head_dim..][..head_dim];
    let head = |row: usize, head: usize| {
        let score = |key: usize| {
            let products = part(row, 0, head).iter().zip(part(key, 1, head)).map(|(q, k)| q * k);
            (products.sum::<f64>() / (head_dim as f64).sqrt()).exp()
        };
        let weights: Vec<f64> = (0..=row).map(score).collect();
        let sum = weights.iter().sum::<f64>();
        let value = |channel: usize| {
            weights.iter().enumerate().map(|(key, weight)| weight * part(key, 2, head)[channel]).sum::<f64>() / sum
        };
        (0..head_dim).map(value).collect::<Vec<_>>()
    };
    (0..qkv.len()).map(|row| (0..HEADS).flat_map(|index| head(row, index)).collect()).collect()
}

/// A temporary directory with a random GPT-2 in a file.
struct Place {
    directory: TempDir,
    reference: Reference,
}

impl Place {
    fn new(prefix: &str) -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap(), reference: Reference::random(7) };
        place.reference.save(&place.file(), prefix);
        place
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("model.safetensors")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt"));
        command.current_dir(&self.directory).args(arguments);
        command
    }

    fn generate(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&["generate", "--weights", "model.safetensors", "--device", "flex"]);
        command.args(arguments);
        command
    }
}

/// Every available device, with the tolerance of its results.
fn devices() -> Vec<(Device, f64)> {
    let found = ["flex", "wgpu", "cuda"].into_iter().filter_map(|name| Some((name, device::choose(name).ok()?)));
    // On CUDA Burn's products round their factors to tf32.
    found.map(|(name, found)| (found.device, if name == "cuda" { 2e-2 } else { 1e-4 })).collect()
}

fn load(path: &Path, context: usize, device: &Device) -> Gpt {
    let weights = Weights::open(path, Some(HEADS)).unwrap();
    let suited = Config::suited_to(&device::choose("flex").unwrap()).suited_to_weights(weights.shape);
    let config = Config { tokenizer: Tokenizer::Bytes, context, ..suited };
    weights.load(Gpt::zeros(&config, device), context).unwrap()
}

fn windows(rng: &mut StdRng) -> Vec<Vec<u32>> {
    (0..2).map(|_| (0..CONTEXT).map(|_| rng.random_range(0..VOCABULARY as u32)).collect()).collect()
}

fn tensor(windows: &[Vec<u32>], device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = windows.iter().flatten().map(|token| *token as i32).collect();
    Tensor::from_data(TensorData::new(tokens, [windows.len(), windows[0].len()]), device)
}

fn close(what: &str, got: f64, expected: f64, tolerance: f64) {
    assert!((got - expected).abs() <= tolerance * (1.0 + expected.abs()), "{what} is {got}, expected {expected}");
}

#[test]
fn logits_are_gpt2s() {
    let place = Place::new("");
    let inputs = windows(&mut StdRng::seed_from_u64(1));
    let expected: Rows = inputs.iter().flat_map(|window| place.reference.logits(window)).collect();
    for (device, tolerance) in devices() {
        let model = load(&place.file(), CONTEXT, &device);
        let logits = model.forward(tensor(&inputs, &device));
        assert_eq!(logits.dims(), [2, CONTEXT, VOCABULARY]);
        for (got, expected) in logits.into_data().iter::<f64>().zip(expected.iter().flatten()) {
            close("a logit", got, *expected, tolerance);
        }

        // In two parts, the second token by token, the logits are the same.
        let mut cache = model.cache(2, CONTEXT, Default::default()).unwrap();
        for (from, count) in [(0, 5), (5, 1), (6, 1), (7, 1)] {
            let new: Vec<_> = inputs.iter().map(|window| &window[from..from + count]).collect();
            let got = model.next(&new, &mut cache).unwrap();
            assert_eq!((got.dims(), cache.lens()), ([2, VOCABULARY], &[from + count; 2][..]));
            for (row, got) in got.into_data().iter::<f64>().enumerate() {
                let (window, token) = (row / VOCABULARY, row % VOCABULARY);
                close("a logit", got, expected[window * CONTEXT + from + count - 1][token], tolerance);
            }
        }

        // With a shorter context the logits are the same.
        let short = load(&place.file(), 4, &device);
        let logits = short.forward(tensor(&inputs, &device).narrow(1, 0, 4)).into_data();
        for (row, got) in logits.iter::<f64>().enumerate() {
            let (window, token) = (row / (4 * VOCABULARY), row / VOCABULARY % 4);
            close("a logit", got, expected[window * CONTEXT + token][row % VOCABULARY], tolerance);
        }
    }
}

/// The gradients of a model, by the names of its modules.
fn gradients(model: &Gpt, loss: &Tensor<1>) -> BTreeMap<String, Vec<f64>> {
    struct Collect(GradientsParams, Vec<String>, BTreeMap<String, Vec<f64>>);
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.1.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.1.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.0.get::<D>(param.id).unwrap().into_data();
            self.2.insert(self.1.join("."), gradient.iter::<f64>().collect());
        }
    }
    let mut collect = Collect(GradientsParams::from_grads(loss.backward(), model), Vec::new(), BTreeMap::new());
    model.visit(&mut collect);
    collect.2
}

/// The model's name of GPT-2's tensor `name`.
fn in_model(name: &str) -> String {
    let renamed = [
        ("wte", "token_embedding"),
        ("wpe", "position_embedding"),
        ("ln_f", "norm"),
        ("ln_1", "attention_norm"),
        ("ln_2", "mlp_norm"),
        ("attn.c_attn", "attention.qkv"),
        ("attn.c_proj", "attention.projection"),
        ("mlp.c_fc", "mlp.up"),
        ("mlp.c_proj", "mlp.down"),
        ("h.", "blocks."),
    ];
    let is_norm = name.contains("ln_");
    let name = renamed.into_iter().fold(name.to_string(), |name, (theirs, ours)| name.replace(theirs, ours));
    if is_norm { name.replace("weight", "gamma").replace("bias", "beta") } else { name }
}

#[test]
fn the_losss_gradient_is_gpt2s() {
    // The prefix of files saved by `GPT2LMHeadModel`.
    let place = Place::new("transformer.");
    let rng = &mut StdRng::seed_from_u64(2);
    let (inputs, targets) = (windows(rng), windows(rng));
    let expected = place.reference.loss(&inputs, &targets);

    // Central differences along a random direction in each tensor.
    let step = 1e-4;
    let slopes: Vec<_> = place
        .reference
        .0
        .iter()
        .map(|(name, (_, values))| {
            let direction: Vec<f64> = values.iter().map(|_| rng.random_range(-1.0..1.0)).collect();
            let moved = |by: f64| {
                let mut moved = place.reference.clone();
                let values = &mut moved.0.get_mut(name).unwrap().1;
                values.iter_mut().zip(&direction).for_each(|(value, direction)| *value += by * direction);
                moved.loss(&inputs, &targets)
            };
            (in_model(name), (moved(step) - moved(-step)) / (2.0 * step), direction)
        })
        .collect();

    for (device, tolerance) in devices() {
        let device = device.autodiff();
        let model = load(&place.file(), CONTEXT, &device);
        let (tokens, targets) = (tensor(&inputs, &device), tensor(&targets, &device));
        let loss = model.loss(&Batch { tokens, targets, documents: None });
        close("the loss", loss.clone().into_scalar(), expected, tolerance);
        let gradients = gradients(&model, &loss);
        assert_eq!(gradients.len(), slopes.len());
        for (name, slope, direction) in &slopes {
            let got: f64 = gradients[name].iter().zip(direction).map(|(gradient, along)| gradient * along).sum();
            assert!(slope.abs() > 1e-4, "{name} does not affect the loss");
            close(name, got, *slope, 10.0 * tolerance);
        }
    }
}

#[test]
fn generates_the_likeliest_text_beyond_its_context() {
    let place = Place::new("");
    let run = |arguments: &[&str]| {
        let heads = ["--tokenizer", "bytes", "--heads", "2"];
        let output = place.generate(&heads).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let expected: Vec<u8> = place.reference.continued("flash", 30).into_iter().map(|token| token as u8).collect();
    let greedy = run(&["--prompt", "flash", "--temperature", "0", "--tokens", "30"]);
    assert_eq!(greedy, String::from_utf8_lossy(&expected).into_owned() + "\n");
    // If only the likeliest token is allowed, temperature has no effect.
    for only in [["--top-k", "1"], ["--top-p", "1e-9"]] {
        assert_eq!(run(&[&["--prompt", "flash", "--temperature", "5", "--tokens", "30"], &only[..]].concat()), greedy);
    }
    let drawn = |seed| run(&["--prompt", "flash", "--tokens", "30", "--temperature", "2", "--seed", seed]);
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
    assert!(run(&["--tokens", "3"]).len() >= 4, "generation without a prompt must print tokens");
}

#[test]
fn trains_on_from_weights() {
    let place = Place::new("");
    let text = (0..400).map(|line| format!("{line} is {}.\n", line % 7)).collect::<String>();
    fs::write(place.directory.path().join("text.txt"), text).unwrap();
    let output = place
        .command(&["--device", "flex", "--data", "text.txt", "--weights", "model.safetensors", "--heads", "2"])
        .args(
            "--tokenizer bytes --steps 40 --lr 1e-2 --min-lr 1e-2 --grad-accum 4 --eval-interval 40 --name on"
                .split(' '),
        )
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let losses = fs::read_to_string(place.directory.path().join("runs/on/loss.csv")).unwrap();
    let losses: Vec<f64> =
        losses.lines().filter_map(|line| line.split(',').nth(1).and_then(|loss| loss.parse().ok())).collect();
    assert!(losses[39] < losses[0] - 1.0, "the loss went from {} to {}", losses[0], losses[39]);

    // The run generates and resumes without the file.
    fs::remove_file(place.file()).unwrap();
    let on = |arguments: &[&str]| place.command(arguments).output().unwrap();
    let written = on(&["generate", "--name", "on", "--device", "flex", "--prompt", "1", "--tokens", "5"]);
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    assert!(String::from_utf8(written.stdout).unwrap().starts_with('1'));
    let resumed = on(&["--resume", "--name", "on"]);
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
}

#[test]
fn wrong_weights_are_one_sentence() {
    let place = Place::new("");
    let fails = |reference: &Reference, arguments: &[&str], expected: &str| {
        reference.save(&place.file(), "");
        let mut command = place.generate(&["--tokenizer", "bytes", "--heads", "2"]);
        let output = command.args(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let error = stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or(&stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(error.contains(expected), "the error {error:?} lacks {expected:?}");
    };
    let changed = |change: &dyn Fn(&mut Tensors)| {
        let mut reference = place.reference.clone();
        change(&mut reference.0);
        reference
    };
    let without = |name: &str| {
        changed(&|tensors| {
            tensors.remove(name);
        })
    };
    fails(&without("h.1.mlp.c_fc.bias"), &[], "model.safetensors lacks h.1.mlp.c_fc.bias");
    fails(&without("wte.weight"), &[], "lacks wte.weight; it must hold GPT-2's weights");
    let transposed = changed(&|tensors| tensors.get_mut("h.0.attn.c_attn.weight").unwrap().0.reverse());
    fails(&transposed, &[], "holds h.0.attn.c_attn.weight of shape [48, 16]; it must be [16, 48]");
    let flat = changed(&|tensors| tensors.get_mut("wpe.weight").unwrap().0 = vec![CONTEXT * WIDTH]);
    fails(&flat, &[], "holds wpe.weight of shape [192]; it must have two dimensions");
    let more = changed(&|tensors| {
        tensors.insert("adapter.weight".to_string(), (vec![1], vec![0.0]));
    });
    fails(&more, &[], "holds adapter.weight, which GPT-2 does not have");

    let whole = &place.reference;
    fails(whole, &["--tokenizer", "gpt2"], "cannot be used multiple times");
    fails(whole, &["--temperature", "-1"], "'-1'");
    fails(
        whole,
        &["--temperature=-1"],
        "invalid value '-1' for '--temperature <TEMPERATURE>': it must be a finite number, 0 or above",
    );
    fails(whole, &["--top-k", "0"], "invalid value '0' for '--top-k <K>': 0 is not in 1..");
    fails(whole, &["--top-p", "1.5"], "invalid value '1.5' for '--top-p <P>': it must be above 0 and at most 1");
    fails(whole, &["--name", "run"], "cannot be used with");
    let others = |arguments: &[&str], expected: &str| {
        let output = place.command(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(expected), "the error {stderr:?} lacks {expected:?}");
    };
    let flex = ["--device", "flex", "--weights", "model.safetensors", "--heads", "2"];
    others(&[&flex[..], &["--width", "32"]].concat(), "--width is 32, but the weights' is 16; leave the flag out");
    others(&[&flex[..], &["--context", "13"]].concat(), "--context is 13, but the weights' is 12");
    others(&flex, "the weights have 300 tokens, but the tokenizer has 50257; choose another --tokenizer");
    others(&["generate", "--device", "flex", "--weights", "absent"], "absent does not exist");
    others(&["generate", "--device", "flex"], "there is no run");
    fs::write(place.file(), b"no tensors").unwrap();
    others(&flex, "model.safetensors is not a readable safetensors file");
    place.reference.save(&place.file(), "");
    let describe = |text: &str| fs::write(place.directory.path().join("config.json"), text).unwrap();
    describe(r#"{"n_head": 2, "activation_function": "relu"}"#);
    others(&flex, "config.json has a value of activation_function that is not GPT-2's");
    describe(r#"{"n_head": 4, "activation_function": "gelu_new"}"#);
    others(&flex, "--heads is 2, but the weights' is 4; leave the flag out");
    describe("{");
    others(&flex, "config.json is not readable");
}
