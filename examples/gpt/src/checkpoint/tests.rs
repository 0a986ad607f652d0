//! Kills at every stage of saving, and damaged files of every kind. A checkpoint is the old one, the new one, or refused with one sentence.

use super::{Checkpoint, Header, MAGIC, VERSION};
use crate::config::Config;
use crate::data::fnv1a;
use crate::device::choose;
use crate::error::{CheckpointProblem, Error};
use crate::files::Stage;
use crate::model::Gpt;
use crate::optimizer::AdamW;
use burn::module::Module;
use burn::tensor::Device;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

const KILLS: usize = 20;
const SIGKILL: i32 = 9;

/// Environment variables of the process to kill: the file that it saves, and the stage at which it waits.
const PATH: &str = "GPT_TEST_CHECKPOINT";
const STAGE: &str = "GPT_TEST_STAGE";

fn config() -> Config {
    let suited = Config::suited_to(&choose("flex").unwrap());
    Config { layers: 2, heads: 2, width: 64, context: 32, batch: 1, steps: 10, ..suited }
}

fn device() -> Device {
    choose("flex").unwrap().device.autodiff()
}

/// Saves a model whose weights are drawn with the step as seed.
fn save(path: &Path, step: usize, reached: impl FnMut(Stage)) {
    let config = config();
    let seeded = Config { seed: step as u32, ..config.clone() };
    let model = Gpt::new(&seeded, &device());
    let optimizer = AdamW::new(&config);
    let text_hash = "0123456789abcdef".to_string();
    let header = Header { step, updates: step, best: None, text_hash, loss_scale: None, config };
    Checkpoint::save_in_stages(path, &header, &model, &optimizer, reached).unwrap();
}

/// The step of a complete checkpoint, after checking that its weights belong to that step.
fn step(path: &Path) -> usize {
    let checkpoint = Checkpoint::load(path).unwrap();
    let step = checkpoint.header.step;
    let config = config();
    let (model, optimizer) = checkpoint.restore(Gpt::zeros(&config, &device())).unwrap();
    let expected = Gpt::new(&Config { seed: step as u32, ..config }, &device());
    assert_eq!(weights(&model), weights(&expected));
    assert_eq!(optimizer.updates, step);
    step
}

/// Weights of the first block.
fn weights(model: &Gpt) -> Vec<f32> {
    let blocks = model.valid();
    let mut values = Vec::new();
    blocks.blocks()[0].visit(&mut Values(&mut values));
    values
}

struct Values<'a>(&'a mut Vec<f32>);

impl burn::module::ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<burn::tensor::Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f32>());
    }
}

/// The process to kill: reports when it has reached the stage, and waits there.
#[test]
#[ignore = "a_kill_at_any_stage_leaves_a_whole_checkpoint starts it and kills it"]
fn saves_until_it_is_killed() {
    let (Some(path), Ok(until)) = (env::var_os(PATH), env::var(STAGE)) else {
        panic!("{PATH} and {STAGE} must be set");
    };
    save(path.as_ref(), 2, |stage| {
        if format!("{stage:?}") == until {
            println!("\nreached");
            sleep(Duration::from_secs(600));
        }
    });
}

/// Starts that process and kills it at the stage.
fn kill_at(stage: Stage, path: &Path) {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["checkpoint::tests::saves_until_it_is_killed", "--exact", "--ignored", "--nocapture"])
        .env(PATH, path)
        .env(STAGE, format!("{stage:?}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let reached = lines.any(|line| line.unwrap() == "reached");
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(SIGKILL), "{stage:?}");
    assert!(reached, "the process did not reach {stage:?}");
}

#[test]
fn a_kill_at_any_stage_leaves_a_whole_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("latest.ckpt");
    let mut chunks = 0;
    save(&path, 1, |stage| {
        if let Stage::Written(count) = stage {
            chunks = count;
        }
    });
    let old = fs::read(&path).unwrap();
    assert!(chunks > KILLS, "{chunks} chunks are too few: there must be more than {KILLS}");

    for kill in 0..KILLS {
        let partly = Stage::Written(1 + kill * (chunks - 1) / KILLS);
        for stage in [Stage::Created, partly, Stage::Complete, Stage::Synced] {
            kill_at(stage, &path);
            assert!(fs::read(&path).unwrap() == old, "{stage:?}");
            assert!(path.with_extension("partial").exists(), "a process killed at {stage:?} must leave a partial file");
        }
        kill_at(Stage::Renamed, &path);
        assert!(!path.with_extension("partial").exists());
        assert_eq!(step(&path), 2);
        fs::write(&path, &old).unwrap();
    }
    // Leftovers of a killed process do not prevent the next save.
    kill_at(Stage::Complete, &path);
    assert_eq!(step(&path), 1);
    save(&path, 3, |_| {});
    assert_eq!(step(&path), 3);
    assert!(!path.with_extension("partial").exists());
}

/// A file that starts like a checkpoint and has a valid checksum.
fn with_checksum(body: &[u8]) -> Vec<u8> {
    [MAGIC.as_slice(), &VERSION.to_le_bytes(), &fnv1a(body).to_le_bytes(), body].concat()
}

/// Begin of a body's header, begin of its tensors, and its end.
fn borders(body: &[u8]) -> [usize; 3] {
    let length = u64::from_le_bytes(*body.first_chunk().unwrap());
    [8, 8 + length as usize, body.len()]
}

/// Loads and restores a checkpoint, as `--resume` does.
fn resume(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    fs::write(path, bytes).unwrap();
    Checkpoint::load(path)?.restore(Gpt::zeros(&config(), &device())).map(|_| ())
}

/// Error of a damaged file: a checkpoint error in one line that names the file.
fn refused(path: &Path, bytes: &[u8], what: &str) -> CheckpointProblem {
    let Err(error) = resume(path, bytes) else { panic!("{what} is accepted") };
    let text = error.to_string();
    assert!(text.starts_with(&format!("the checkpoint {} ", path.display())) && !text.contains('\n'), "{what}: {text}");
    let Error::Checkpoint { problem, .. } = error else { panic!("{what}: {text}") };
    problem
}

#[test]
fn a_truncated_checkpoint_is_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("latest.ckpt");
    save(&path, 1, |_| {});
    let whole = fs::read(&path).unwrap();
    let start = MAGIC.len() + 4 + 8;
    let body = &whole[start..];

    // Near every border between parts, at the ends, and at random positions.
    let near = borders(body).into_iter().flat_map(|at| at - 8..at + 17);
    let rng = &mut StdRng::seed_from_u64(5);
    let anywhere: Vec<_> = (0..100).map(|_| rng.random_range(0..body.len())).collect();
    let lengths: BTreeSet<_> = near.chain(anywhere).filter(|length| *length < body.len()).collect();
    assert!(lengths.len() > 100);

    for length in 0..start {
        let problem = refused(&path, &whole[..length], &format!("a file of {length} bytes"));
        assert_eq!(matches!(problem, CheckpointProblem::Foreign), length < MAGIC.len(), "{length}: {problem}");
    }
    for length in lengths {
        let problem = refused(&path, &whole[..start + length], &format!("a body of {length} bytes"));
        assert!(problem.to_string().contains("its checksum does not match"), "{problem}");
        // As if the file had been written completely with this end.
        let problem =
            refused(&path, &with_checksum(&body[..length]), &format!("a body that ends after {length} bytes"));
        assert!(matches!(problem, CheckpointProblem::Corrupt(_)), "{problem}");
    }
    resume(&path, &whole).unwrap();
}

/// The checksum detects every change. With a valid checksum, the code that parses the parts must not panic.
#[test]
fn a_changed_checkpoint_is_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("latest.ckpt");
    save(&path, 1, |_| {});
    let whole = fs::read(&path).unwrap();
    let start = MAGIC.len() + 4 + 8;
    let (body, rng) = (&whole[start..], &mut StdRng::seed_from_u64(6));
    for _ in 0..50 {
        let mut changed = whole.clone();
        changed[rng.random_range(start..whole.len())] ^= 1 << rng.random_range(0..8);
        let problem = refused(&path, &changed, "a changed bit");
        assert!(problem.to_string().contains("its checksum does not match"), "{problem}");
    }
    let [header, tensors, end] = borders(body);
    for (begin, end) in [(0, header), (header, tensors), (tensors, end)] {
        // Names and shapes of tensors are at the beginning.
        for at in (begin..end.min(begin + 400)).step_by(7).chain([end - 1]) {
            let mut changed = body.to_vec();
            changed[at] ^= 0x80;
            match resume(&path, &with_checksum(&changed)) {
                Err(Error::Checkpoint { .. }) | Ok(()) => {}
                Err(error) => panic!("byte {at} gives another error: {error}"),
            }
        }
        let mut random = body.to_vec();
        rng.fill(&mut random[begin..end]);
        refused(&path, &with_checksum(&random), &format!("random bytes from {begin} to {end}"));
    }
}
