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
    /// Output of the program `gpt`, run in its own directory.
    Gpt(Gpt),
}

/// A call of the program `gpt`. In its arguments, `TEXT` stands for the text and `TEXTS` for the text repeated three times.
pub(crate) struct Gpt {
    pub arguments: &'static [&'static str],
    /// Arguments that resume an interrupted call, and the file that indicates one.
    pub resume: Option<(&'static [&'static str], &'static str)>,
    /// The call is not started unless this many seconds are left.
    pub seconds: u64,
    /// Files that it writes, and their names among the results.
    pub writes: &'static [(&'static str, &'static str)],
}

/// A chart in a document: its file, its results, the end of its name among the report's charts, and whether it may show rows of ours from
/// other than one clean commit until they are measured again.
pub(crate) struct Picture {
    pub document: &'static str,
    pub results: &'static str,
    pub picture: &'static str,
    pub stale: bool,
}

/// All charts in documents that are drawn from results.
pub(crate) const PICTURES: [Picture; 3] = [
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
    let time = |name, device, work| Step { name, device, what: What::Time(work) };
    let middle: fn(&Case) -> bool = |case| case.seq_q == 4096 && case.causal && [64, 128, 256].contains(&case.head_dim);
    vec![
        time(
            "h200-cuda",
            Cuda,
            beside(
                work(Set::H200, all, &[Ours, OursFast, Burn, Composed], PARTS),
                &["cudnn", "flash2", "flash2-deterministic", "flex"],
            ),
        ),
        time("decode-cuda", Cuda, beside(work(Set::Decode, all, &[Ours], FORWARD), &["cudnn", "flash2"])),
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
        Step {
            name: "compare-1024",
            device: Cuda,
            what: What::Gpt(Gpt {
                arguments: &["compare", "--device", "cuda", "--data", "TEXTS", "--limit", "60", "--out", "compare"],
                resume: None,
                seconds: 420,
                writes: &[("compare/compare.csv", "compare.csv"), ("compare/compare.svg", "compare.svg")],
            }),
        },
        Step {
            name: "compare-65536",
            device: Cuda,
            what: What::Gpt(Gpt {
                arguments: &[
                    "compare",
                    "--device",
                    "cuda",
                    "--data",
                    "TEXTS",
                    "--limit",
                    "120",
                    "--out",
                    "compare-65536",
                    "--contexts",
                    "65536",
                    "--attention",
                    "flash",
                    "--batch",
                    "1",
                    "--checkpointing",
                    "--warmup",
                    "2",
                    "--steps",
                    "4",
                ],
                resume: None,
                seconds: 60,
                writes: &[("compare-65536/compare.csv", "compare-65536.csv")],
            }),
        },
        Step {
            name: "tinyshakespeare",
            device: Cuda,
            what: What::Gpt(Gpt {
                arguments: &["--device", "cuda", "--data", "TEXT", "--name", "tinyshakespeare", "--sample-tokens", "0"],
                resume: Some((&["--resume", "--name", "tinyshakespeare"], "runs/tinyshakespeare/latest.ckpt")),
                seconds: 240,
                writes: &[
                    ("runs/tinyshakespeare/loss.csv", "tinyshakespeare.csv"),
                    ("runs/tinyshakespeare/loss.svg", "tinyshakespeare.svg"),
                ],
            }),
        },
        time("modest-vulkan", Vulkan, work(Set::Modest, all, &[Ours, Burn, Products], PARTS)),
        time("single-wgpu", Wgpu, work(Set::Single, all, &[Ours], PARTS)),
        // Not shown anywhere: a trial of the command itself on any machine.
        time(TRIAL, Wgpu, work(Set::Tiny, all, &[Ours], FORWARD)),
    ]
}

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
            assert!(names.contains(name), "docs/benchmark.md shows {name}, which nothing measures");
            shown += 1;
        }
        assert!(shown > 5);
        for picture in &PICTURES {
            assert!(root.join("docs").join(picture.document).exists(), "{}", picture.document);
        }
    }

    #[test]
    fn nothing_is_measured_twice() {
        let mut seen = BTreeSet::new();
        for step in steps() {
            let kind = match step.what {
                What::Time(_) => "time",
                What::Memory(_) => "memory",
                What::Gpt(_) => "gpt",
            };
            assert!(seen.insert((step.name, kind)), "{} {kind}", step.name);
            if let What::Time(work) | What::Memory(work) = step.what {
                assert!(!work.cases.is_empty(), "{}", step.name);
                assert!(work.cases.iter().any(|case| !work.calls(case).is_empty()), "{}", step.name);
            }
        }
    }
}
