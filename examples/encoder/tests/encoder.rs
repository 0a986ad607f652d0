//! The classifier, before and after: equal logits and losses, texts that do not see each other, and errors.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use encoder::compare::{Job, Kind};
use encoder::data::{Batch, CLS, Data};
use encoder::packed::Packed;
use encoder::padded::Padded;
use encoder::train::{Classifier, Sizes, Trainer};
use std::fs;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

const SIZES: Sizes = Sizes { d_model: 24, n_heads: 3, n_layers: 2, max_len: 48, classes: 5 };

/// The generator of random numbers is the process's.
static GENERATOR: Mutex<()> = Mutex::new(());

fn models(device: &Device) -> (Padded, Packed) {
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(3);
    let padded = Padded::new(&SIZES, device);
    let packed = Packed::new(&SIZES, device).load_record(padded.clone().into_record());
    (padded, packed)
}

fn farthest(a: Tensor<2>, b: Tensor<2>) -> f32 {
    (a - b).abs().max().into_scalar()
}

#[test]
fn packed_texts_have_the_logits_of_padded_ones() {
    let device = Device::flex();
    let (padded, packed) = models(&device);
    let data = Data::read(None, SIZES.max_len).unwrap();
    let batch = data.batch(9, 1, false);
    assert!(batch.texts.iter().any(|text| text.len() < batch.longest()));
    let expected = padded.logits(&batch, &device);
    assert!(expected.clone().abs().max().into_scalar::<f32>() > 0.1);
    assert!(farthest(packed.logits(&batch, &device), expected) < 1e-5);
}

#[test]
fn the_logits_of_a_text_do_not_depend_on_its_batch() {
    let device = Device::flex();
    let (_, packed) = models(&device);
    let text =
        |first: u16, len: u16| [CLS].into_iter().chain((0..len).map(|n| (first + 3 * n) % 256)).collect::<Vec<_>>();
    let texts = vec![text(7, 20), text(90, 31), text(11, 17)];
    let all = Batch { texts: texts.clone(), classes: vec![0; 3] };
    let together = packed.logits(&all, &device);
    for (nth, text) in texts.into_iter().enumerate() {
        let alone = packed.logits(&Batch { texts: vec![text], classes: vec![0] }, &device);
        assert!(farthest(together.clone().narrow(0, nth, 1), alone) < 1e-5);
    }
}

#[test]
fn both_train_alike() {
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::flex().autodiff();
    let data = Data::read(None, SIZES.max_len).unwrap();
    let job = |kind| Job { kind, sizes: SIZES, batch: 8, steps: 6, warmup: 1, learning_rate: 1e-3 };
    let [padded, packed] = [Kind::Padded, Kind::Packed].map(|kind| job(kind).run(&data, &device));
    assert_eq!(padded.losses.len(), 7);
    for (a, b) in padded.losses.iter().zip(&packed.losses) {
        assert!((a - b).abs() < 2e-4, "{:?} and {:?}", padded.losses, packed.losses);
    }
    assert!(padded.positions_per_token > 1.2 && packed.positions_per_token == 1.0);
}

#[test]
fn a_classifier_learns() {
    let device = Device::flex().autodiff();
    let data = Data::read(None, SIZES.max_len).unwrap();
    let (_, packed) = models(&device);
    let mut trainer = Trainer::new(packed, 3e-3, device);
    let before = trainer.accuracy(&data, 16, 6);
    let mut losses: Vec<f32> = (0..60).map(|step| trainer.step(&data.batch(16, step, false)).into_scalar()).collect();
    let last = losses.split_off(50);
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    assert!(mean(&last) < 0.9 * mean(&losses[..10]), "{losses:?}, then {last:?}");
    let after = trainer.accuracy(&data, 16, 6);
    assert!(after > before + 0.1 && after > 1.5 / 5.0, "{before}, then {after}");
}

fn encoder(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_encoder")).args(arguments).output().unwrap()
}

#[test]
fn errors_are_one_sentence() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().to_str().unwrap();
    fs::create_dir(place.path().join("one")).unwrap();
    fs::write(place.path().join("one/text"), "short").unwrap();
    for (arguments, words) in [
        (&["--device", "abacus"][..], "--device abacus does not exist"),
        (&["--device", "flex", "--n-heads", "5"], "--n-heads is 5; it must divide --d-model 96"),
        (&["--device", "flex", "--steps", "0"], "--steps is 0; it must be at least 1"),
        (&["--device", "flex", "--max-len", "16"], "--max-len is 16; it must be above 16"),
        (&["--device", "flex", "--data", "/absent"], "cannot read /absent"),
        (&["--device", "flex", "--data", folder], "there are 1 classes of texts"),
    ] {
        let output = encoder(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.starts_with(&format!("error: {words}")) && error.lines().count() == 1, "{error}");
    }
    fs::create_dir(place.path().join("two")).unwrap();
    fs::write(place.path().join("two/text"), "short").unwrap();
    let output = encoder(&["--device", "flex", "--data", folder]);
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: the texts of one have 5 bytes"));
}

#[test]
fn the_command_trains_and_compares() {
    let size =
        ["--device", "flex", "--d-model", "16", "--n-heads", "2", "--n-layers", "1", "--batch", "4", "--steps", "3"];
    let output = encoder(&size);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("step     3  loss") && text.contains("accuracy"), "{text}");
    let output = encoder(&[&size[..], &["--compare"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("times the tokens a second"), "{text}");
    assert!(text.contains("| burn-nn, padded | ") && text.contains("| flash attention, packed | "), "{text}");
}
