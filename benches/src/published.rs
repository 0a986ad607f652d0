//! Everything that documents show, and how it is measured: the single list for `publish`, `replace`, `pictures` and a test.

use crate::case::{Case, Pass, Variant};
use crate::device::DeviceName;
use crate::implementations::Implementation::{self, Burn, Composed, Ours, OursFast, OursTf32, Products};
use crate::session::Work;
use crate::sets::Set;
use flash_attention_kernels::Kernel;
use std::time::Duration;

/// One measurement step.
pub(crate) struct Step {
    /// Name of its results.
    pub name: &'static str,
    /// Device of the measurement.
    pub device: DeviceName,
    /// What is measured.
    pub what: What,
}

pub(crate) enum What {
    /// Device time.
    Time(Work),
    /// Memory in addition to the inputs.
    Memory(Work),
    /// A model's training, by the program `gpt` or by a script.
    Program(Program),
}

/// A command that is run in a directory of its own, which also holds [`SCRIPTS`]. In its words, `GPT` stands for the program `gpt`, `TEXT`
/// for the text, and `TEXTS` for the text repeated three times.
#[derive(Clone, Copy)]
pub(crate) struct Program {
    pub command: &'static str,
    /// Command that resumes an interrupted one, and the file that indicates one.
    pub resume: Option<(&'static str, &'static str)>,
    /// Number of GPUs that it needs.
    pub gpus: usize,
    /// The command is not started unless this many seconds are left.
    pub seconds: u64,
    /// Files that it writes, their names among the results, and their places in the repository.
    pub writes: &'static [(&'static str, &'static str, &'static str)],
}

/// The scripts, embedded for machines without the repository.
pub(crate) const SCRIPTS: [(&str, &str); 3] = [
    ("gpt_devices.py", include_str!("../gpt_devices.py")),
    ("gpt_peer.py", include_str!("../gpt_peer.py")),
    ("gpt_profile.py", include_str!("../gpt_profile.py")),
];

/// A chart in a document: its file, its results, the end of its name among the report's charts, and whether it may show rows of ours from
/// other than one clean commit until they are measured again.
pub(crate) struct Picture {
    pub document: &'static str,
    pub results: &'static str,
    pub picture: &'static str,
    pub stale: bool,
}

/// All charts in documents that are drawn from results.
pub(crate) const PICTURES: [Picture; 4] = [
    Picture {
        document: "h200.svg",
        results: "h200-cuda",
        picture: "bf16-b-16-s-128-causal-b-s-16384-rate.svg",
        stale: false,
    },
    Picture {
        document: "variants.svg",
        results: "variants-cuda",
        picture: "bf16-4-16-4096-128-causal-variants.svg",
        stale: false,
    },
    Picture {
        document: "decode.svg",
        results: "decode-cuda",
        picture: "bf16-b-32-8-1-s-128-full-rate.svg",
        stale: false,
    },
    Picture { document: "memory.svg", results: "lengths-cuda", picture: "f32-1-8-s-64-causal-peak.svg", stale: false },
];

const FORWARD: &[Pass] = &[Pass::Forward];
const PARTS: &[Pass] = &[Pass::Forward, Pass::Backward];
const WHOLE: &[Pass] = &[Pass::Both, Pass::Autodiff];

fn work(set: Set, keep: fn(&Case) -> bool, implementations: &[Implementation], passes: &[Pass]) -> Work {
    Work {
        cases: set.cases().into_iter().filter(keep).collect(),
        implementations: implementations.to_vec(),
        passes: passes.to_vec(),
        kernel: None,
        peers: None,
        limit: Duration::from_secs(300),
    }
}

fn beside(work: Work, peers: &[&str]) -> Work {
    Work { peers: Some(peers.iter().map(|name| (*name).into()).collect()), ..work }
}

fn all(_: &Case) -> bool {
    true
}

/// The variants that are drawn and listed in tables: one of each kind.
fn shown_variant(case: &Case) -> bool {
    use Variant::{Dropout, Packed, Window, WindowFunction};
    match case.variant {
        Window(2048) | WindowFunction(256 | 2048) => false,
        Dropout | Packed(_) => case.causal,
        _ => true,
    }
}

/// All steps, the main table first.
pub(crate) fn steps() -> Vec<Step> {
    use DeviceName::{Cuda, Vulkan, Wgpu};
    let training = TRAINING.iter().map(|(name, program)| Step { name, device: Cuda, what: What::Program(*program) });
    let time = |name, device, work| Step { name, device, what: What::Time(work) };
    let middle: fn(&Case) -> bool = |case| case.seq_q == 4096 && case.causal && [64, 128, 256].contains(&case.head_dim);
    let mut steps = vec![
        time(
            "h200-cuda",
            Cuda,
            beside(
                work(Set::H200, all, &[Ours, OursFast, Burn, Composed], PARTS),
                &["cudnn", "flash2", "flash2-deterministic", "flex"],
            ),
        ),
        time("decode-cuda", Cuda, beside(work(Set::Decode, all, &[Ours], FORWARD), &["cudnn", "flash2", "flex"])),
        time("variants-cuda", Cuda, beside(work(Set::Variants, shown_variant, &[Ours, Composed], PARTS), &[])),
        time("lengths-cuda", Cuda, work(Set::Lengths, all, &[Ours, Composed], &[Pass::Autodiff])),
        Step { name: "h200-cuda", device: Cuda, what: What::Memory(work(Set::H200, middle, &[Ours, OursFast], WHOLE)) },
        time("autodiff-cuda", Cuda, work(Set::Autodiff, all, &[Ours, OursFast], WHOLE)),
        time("single-cuda", Cuda, beside(work(Set::Single, all, &[Ours, OursTf32], PARTS), &["memeff"])),
        time("ragged-cuda", Cuda, work(Set::Ragged, all, &[Ours], FORWARD)),
        time(
            "h200-mma-cuda",
            Cuda,
            Work {
                kernel: Some(Kernel::Mma),
                ..beside(
                    work(
                        Set::H200,
                        |case| {
                            case.seq_q >= 4096 && case.heads_q == case.heads_kv && [64, 128].contains(&case.head_dim)
                        },
                        &[Ours],
                        PARTS,
                    ),
                    &["flash2"],
                )
            },
        ),
        time("million-cuda", Cuda, work(Set::Million, all, &[Ours], &[Pass::Both])),
    ];
    steps.extend(training);
    steps.extend([
        time("modest-vulkan", Vulkan, work(Set::Modest, all, &[Ours, Burn, Products], PARTS)),
        time("single-wgpu", Wgpu, work(Set::Single, all, &[Ours], PARTS)),
        // Not shown anywhere: a trial of the command itself on any machine.
        time(TRIAL, Wgpu, work(Set::Tiny, all, &[Ours], FORWARD)),
    ]);
    steps
}

/// Defaults of the programs.
const PROGRAM: Program = Program { command: "", resume: None, gpus: 1, seconds: 60, writes: &[] };

/// GPT-2's smallest model on windows of 1,024 tokens, as arguments of `gpt`.
macro_rules! gpt2 {
    () => {
        "--device cuda --data TEXT --tokenizer gpt2 --layers 12 --heads 12 --width 768 --context 1024 --dtype bf16 --dropout 0 --eval-batches 1"
    };
}

/// What docs/gpt.md shows.
pub(crate) const TRAINING: [(&str, Program); 10] = [
    (
        "compare-1024",
        Program {
            command: "GPT compare --device cuda --data TEXTS --limit 60 --out compare",
            seconds: 420,
            writes: &[
                ("compare/compare.csv", "compare.csv", "examples/gpt/results/compare-cuda.csv"),
                ("compare/compare.svg", "compare.svg", "docs/gpt-compare.svg"),
            ],
            ..PROGRAM
        },
    ),
    (
        "compare-65536",
        Program {
            command: "GPT compare --device cuda --data TEXTS --limit 120 --out compare-65536 --contexts 65536 --attention flash --batch 1 \
                      --checkpointing --warmup 2 --steps 4",
            writes: &[(
                "compare-65536/compare.csv",
                "compare-65536.csv",
                "examples/gpt/results/compare-cuda.csv, below the others",
            )],
            ..PROGRAM
        },
    ),
    (
        "tinyshakespeare",
        Program {
            command: "GPT --device cuda --data TEXT --name tinyshakespeare --sample-tokens 0",
            resume: Some(("GPT --resume --name tinyshakespeare", "runs/tinyshakespeare/latest.ckpt")),
            seconds: 240,
            writes: &[
                (
                    "runs/tinyshakespeare/loss.csv",
                    "tinyshakespeare.csv",
                    "examples/gpt/results/tinyshakespeare-cuda.csv",
                ),
                ("runs/tinyshakespeare/loss.svg", "tinyshakespeare.svg", "docs/tinyshakespeare.svg"),
            ],
            ..PROGRAM
        },
    ),
    (
        "step",
        Program {
            command: "GPT compare --device cuda --data TEXT --out step --contexts 1024 --attention flash --batch 16 --warmup 6 --steps 16",
            seconds: 90,
            writes: &[("step/compare.csv", "step.csv", "examples/gpt/results/step-cuda.csv")],
            ..PROGRAM
        },
    ),
    (
        "step-pytorch",
        Program {
            command: "python3 gpt_peer.py --csv step-pytorch.csv",
            seconds: 120,
            writes: &[("step-pytorch.csv", "step-pytorch.csv", "examples/gpt/results/step-pytorch.csv")],
            ..PROGRAM
        },
    ),
    (
        "kernels",
        Program {
            command: concat!(
                "python3 gpt_profile.py --name ours --csv kernels.csv -- GPT ",
                gpt2!(),
                " --batch 16 --steps 3 --sample-tokens 0"
            ),
            seconds: 180,
            writes: &[("kernels.csv", "kernels.csv", "examples/gpt/results/kernels-cuda.csv")],
            ..PROGRAM
        },
    ),
    (
        "kernels-pytorch",
        Program {
            command: "python3 gpt_profile.py --name pytorch --csv kernels-pytorch.csv -- \
                      python3 gpt_peer.py --mode eager --warmup 2 --steps 2",
            writes: &[("kernels-pytorch.csv", "kernels-pytorch.csv", "examples/gpt/results/kernels-pytorch.csv")],
            ..PROGRAM
        },
    ),
    (
        "devices",
        Program {
            command: concat!(
                "python3 gpt_devices.py --csv devices.csv -- GPT ",
                gpt2!(),
                " --batch 64 --lr 6e-4 --warmup 10 --steps 24 --eval-interval 12"
            ),
            gpus: 2,
            seconds: 180,
            writes: &[("devices.csv", "devices.csv", "examples/gpt/results/devices-cuda.csv")],
            ..PROGRAM
        },
    ),
    (
        "devices-32",
        Program {
            command: concat!(
                "python3 gpt_devices.py --csv devices-32.csv -- GPT ",
                gpt2!(),
                " --batch 32 --lr 6e-4 --warmup 10 --steps 40 --eval-interval 20"
            ),
            gpus: 2,
            seconds: 120,
            writes: &[("devices-32.csv", "devices-32.csv", "examples/gpt/results/devices-cuda.csv, below the others")],
            ..PROGRAM
        },
    ),
    (
        "devices-f32",
        Program {
            command: "python3 gpt_devices.py --csv devices-f32.csv -- GPT --device cuda --data TEXT --layers 4 --heads 4 --width 256 \
                      --context 256 --dropout 0 --batch 16 --steps 100 --eval-interval 50 --eval-batches 1",
            gpus: 2,
            writes: &[(
                "devices-f32.csv",
                "devices-f32.csv",
                "examples/gpt/results/devices-cuda.csv, below the others",
            )],
            ..PROGRAM
        },
    ),
];

/// A step that no document shows, for trials.
pub(crate) const TRIAL: &str = "trial-wgpu";

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn documents_show_nothing_else() {
        let names: BTreeSet<&str> = steps().iter().map(|step| step.name).collect();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let text = std::fs::read_to_string(root.join("docs/benchmark.md")).unwrap();
        let mut shown = 0;
        for marker in text.split("<!-- results:").skip(1) {
            let name = marker.split(' ').next().unwrap();
            assert!(names.contains(name), "docs/benchmark.md shows {name}, but no step measures it");
            shown += 1;
        }
        assert!(shown > 5);
        for picture in &PICTURES {
            assert!(root.join("docs").join(picture.document).exists(), "{}", picture.document);
        }
    }

    #[test]
    fn every_result_of_a_program_has_a_place() {
        let writes: Vec<_> = TRAINING.iter().flat_map(|(_, program)| program.writes).collect();
        assert_eq!(writes.iter().map(|(_, name, _)| name).collect::<BTreeSet<_>>().len(), writes.len());
        let places: BTreeSet<&str> = writes.iter().map(|(_, _, place)| place.split(',').next().unwrap()).collect();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for place in &places {
            assert!(root.join(place).exists(), "{place}");
        }
        for entry in std::fs::read_dir(root.join("examples/gpt/results")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(places.contains(format!("examples/gpt/results/{name}").as_str()), "no step measures {name}");
        }
        for (name, program) in &TRAINING {
            for script in program.command.split_whitespace().filter(|word| word.ends_with(".py")) {
                assert!(SCRIPTS.iter().any(|(known, _)| *known == script), "{name}: {script}");
            }
        }
    }

    #[test]
    fn nothing_is_measured_twice() {
        let mut seen = BTreeSet::new();
        for step in steps() {
            let kind = match step.what {
                What::Time(_) => "time",
                What::Memory(_) => "memory",
                What::Program(_) => "program",
            };
            assert!(seen.insert((step.name, kind)), "{} {kind}", step.name);
            if let What::Time(work) | What::Memory(work) = step.what {
                assert!(!work.cases.is_empty(), "{}", step.name);
                assert!(work.cases.iter().any(|case| !work.calls(case).is_empty()), "{}", step.name);
            }
        }
    }
}
