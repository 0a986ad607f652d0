//! Times other plans of the CUDA kernels and of the portable forward of few rows, next to the default plan.

use crate::case::{DECODING, Pass};
use crate::data::Data;
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Tensors;
use crate::oracle::Oracle;
use crate::part::Part;
use crate::problems::{Filters, Shape, named};
use crate::sets::Set;
use crate::timing::{Work, device_time, once, sync};
use cubecl::client::Client;
use flash_attention_kernels::{
    AttentionProblem, BackwardOrder, BackwardTiles, BiasGradient, BiasTile, FewRowsForward, FewRowsTile, Forward,
    Gradient, HopperForward, HopperGradient, HopperTile, Kernel, MmaForward, MmaTile, MmaTiles, Plan, PortableForward,
    Precision, plan_with,
};
use std::fmt;
use std::num::ParseIntError;

/// Plans to time.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The set of problems.
    #[arg(long, value_enum, default_value = "h200")]
    set: Set,
    /// A problem of your own instead of a set, as in 4,32/8,2048,128 or 1,32,1x16384,128; may be repeated.
    #[arg(long, value_name = "BATCH,HEADS_Q[/HEADS_KV],SEQ_Q[xSEQ_K],HEAD_DIM[/HEAD_DIM_V]", conflicts_with = "set")]
    shape: Vec<Shape>,
    #[command(flatten)]
    filters: Filters,
    /// Device. Default: the best one that this binary was built for
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
    /// What is computed.
    #[arg(long, value_enum, default_value = "forward")]
    part: Part,
    /// Kernel family: hopper or mma, or portable for the forward of few rows.
    #[arg(long, value_parser = named(Kernel::ALL, Kernel::name), default_value = "hopper")]
    kernel: Kernel,
    /// All three gradients (fused) add to dq in any order, not in a fixed one.
    #[arg(long)]
    any_order: bool,
    /// Precision of f32 products: factors are rounded to tf32.
    #[arg(long)]
    tf32: bool,
    /// Plans to time next to the default plan, where `-` is the default plan's value. For hopper, each is
    /// CONSUMER_GROUPS/WARPGROUPS/TILE_K/STAGES/PING_PONG/PRODUCER_WARP/HEAD_GROUP/NUM_SPLITS; PING_PONG and PRODUCER_WARP are 0 or 1, and
    /// HEAD_GROUP is the number of heads in a head group. TILE_K is the number of queries for dkdv and fused, and NUM_SPLITS for
    /// fused that of a group's query heads. For dbias, CONSUMER_GROUPS is
    /// the number of stages of Q and dO, and NUM_SPLITS the number of tiles of a block. For mma:
    /// WARPGROUPS/GROUPS/TILE_K/WARPS_K/STAGES/HEAD_GROUP/NUM_SPLITS/PACK_GQA, where WARPS_K is 1 or 4 and PACK_GQA 0 or 1; these, STAGES and NUM_SPLITS
    /// are for the forward. For portable: ROWS/TILE_K/LANES/READS/NUM_SPLITS.
    #[arg(long = "try", value_delimiter = ',', value_parser = numbers)]
    candidates: Vec<Numbers>,
}

/// A plan on the command line: a number at each position, or `None` for the default plan's.
type Numbers = Vec<Option<usize>>;

fn numbers(text: &str) -> Result<Numbers, ParseIntError> {
    text.split('/').map(|number| if number == "-" { Ok(None) } else { number.parse().map(Some) }).collect()
}

/// Tile, `head_group` and `num_splits`.
#[derive(Clone, Copy, Debug)]
enum Candidate {
    Hopper(HopperTile, usize, usize),
    Mma(MmaForward),
    FewRows(FewRowsForward),
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Candidate::Hopper(
                HopperTile { consumer_groups, warpgroups, tile_k, stages, ping_pong, producer_warp },
                head_group,
                num_splits,
            ) => {
                let (ping_pong, producer_warp) = (ping_pong as u8, producer_warp as u8);
                write!(
                    f,
                    "{consumer_groups}/{warpgroups}/{tile_k}/{stages}/{ping_pong}/{producer_warp}/{head_group}/{num_splits}"
                )
            }
            Candidate::Mma(MmaForward { tiles: MmaTiles { tile, head_group }, num_splits, pack_gqa }) => {
                let (MmaTile { warpgroups, groups, tile_k, warps_k, stages }, pack_gqa) = (tile, pack_gqa as u8);
                write!(f, "{warpgroups}/{groups}/{tile_k}/{warps_k}/{stages}/{head_group}/{num_splits}/{pack_gqa}")
            }
            Candidate::FewRows(FewRowsForward { tile: FewRowsTile { rows, tile_k, lanes, reads }, num_splits }) => {
                write!(f, "{rows}/{tile_k}/{lanes}/{reads}/{num_splits}")
            }
        }
    }
}

/// One kernel with one plan. A gradient is timed with delta, which it needs.
struct Launches<'a> {
    client: &'a Client,
    problem: AttentionProblem,
    tensors: &'a Tensors,
    part: Part,
    /// Plan of the other kernels.
    backward: BackwardTiles,
    candidate: Candidate,
}

impl Work for Launches<'_> {
    fn call(&mut self, _: usize) -> Result<(), Error> {
        let (tile, head_group, num_splits) = match self.candidate {
            Candidate::Hopper(tile, head_group, num_splits) => (tile, head_group, num_splits),
            Candidate::Mma(plan) if self.part == Part::Forward => {
                return self.tensors.forward(self.client, &self.problem, plan);
            }
            // Only a forward is planned.
            Candidate::FewRows(plan) => return self.tensors.forward(self.client, &self.problem, plan),
            Candidate::Mma(MmaForward { tiles, .. }) => {
                let gradient = Gradient::Mma(tiles);
                let mut tiles = self.backward;
                (tiles.dq, tiles.dkdv, tiles.dv) = (gradient, gradient, tiles.dv.map(|_| gradient));
                return self.tensors.backward(self.client, &self.problem, &self.part.wanted(self.tensors), tiles);
            }
        };
        if self.part == Part::Forward {
            return self.tensors.forward(self.client, &self.problem, HopperForward { tile, head_group, num_splits });
        }
        let mut tiles = self.backward;
        if self.part == Part::Dbias {
            let HopperTile { consumer_groups: row_stages, tile_k, stages, .. } = tile;
            tiles.dbias = BiasGradient::Hopper(BiasTile { tile_k, tiles: num_splits, stages, row_stages });
            return self.tensors.backward(self.client, &self.problem, &self.part.wanted(self.tensors), tiles);
        }
        let gradient = HopperGradient { tile, head_group, num_splits };
        match self.part {
            // The fused kernel has the tiles of dkdv; it replaces the kernel for dq.
            Part::Fused => tiles.fused = Some(gradient),
            _ => (tiles.dq, tiles.dkdv) = (Gradient::Hopper(gradient), Gradient::Hopper(gradient)),
        }
        self.tensors.backward(self.client, &self.problem, &self.part.wanted(self.tensors), tiles)
    }

    fn finish(&self) -> Result<(), Error> {
        sync(self.client)
    }

    fn stream(&self) -> Option<&Client> {
        Some(self.client)
    }
}

/// The default plan of the kernel.
fn planned(plan: &Plan, part: Part) -> Result<Candidate, Error> {
    let gradient = |gradient| match gradient {
        Gradient::Hopper(HopperGradient { tile, head_group, num_splits }) => {
            Some(Candidate::Hopper(tile, head_group, num_splits))
        }
        Gradient::Mma(tiles) => Some(Candidate::Mma(tiles.into())),
        _ => None,
    };
    let candidate = match (part, plan.forward) {
        (Part::Forward, Forward::Hopper(HopperForward { tile, head_group, num_splits })) => {
            Some(Candidate::Hopper(tile, head_group, num_splits))
        }
        (Part::Forward, Forward::Mma(plan)) => Some(Candidate::Mma(plan)),
        (Part::Forward, Forward::Portable(PortableForward::FewRows(plan))) => Some(Candidate::FewRows(plan)),
        (Part::Forward, _) => None,
        (Part::Dq, _) => gradient(plan.backward.dq),
        (Part::Dkdv, _) => gradient(plan.backward.dkdv),
        (Part::Dbias, _) => match plan.backward.dbias {
            BiasGradient::Hopper(tile) => {
                Some(Candidate::Hopper(HopperTile { consumer_groups: tile.row_stages, ..tile.tile() }, 1, tile.tiles))
            }
            _ => None,
        },
        (Part::Fused, _) => plan.backward.fused.and_then(|fused| gradient(Gradient::Hopper(fused))),
    };
    candidate.ok_or_else(|| {
        Error::Other(format!(
            "no kernel with tiles to change is planned: {plan}; choose another --kernel, --part or --set"
        ))
    })
}

fn candidate(numbers: &[Option<usize>], part: Part, planned: Candidate) -> Result<Candidate, Error> {
    let wrong = |rule: &str| {
        let number = |number: &Option<usize>| number.map_or("-".to_string(), |number| number.to_string());
        Error::Other(format!("--try is {}; {rule}", numbers.iter().map(number).collect::<Vec<_>>().join("/")))
    };
    match planned {
        Candidate::Hopper(tile, planned_head_group, planned_splits) => {
            let [consumer_groups, warpgroups, keys, stages, ping_pong, producer_warp, head_group, num_splits] =
                *numbers
            else {
                return Err(wrong(
                    "it must be CONSUMER_GROUPS/WARPGROUPS/TILE_K/STAGES/PING_PONG/PRODUCER_WARP/HEAD_GROUP/NUM_SPLITS",
                ));
            };
            let tile = HopperTile {
                consumer_groups: consumer_groups.unwrap_or(tile.consumer_groups),
                warpgroups: warpgroups.unwrap_or(tile.warpgroups),
                tile_k: keys.unwrap_or(tile.tile_k),
                stages: stages.unwrap_or(tile.stages),
                ping_pong: ping_pong.map_or(tile.ping_pong, |ping_pong| ping_pong != 0),
                producer_warp: producer_warp.map_or(tile.producer_warp, |producer_warp| producer_warp != 0),
            };
            if !tile.tile_k.is_multiple_of(16) || tile.tile_k > 256 || tile.warpgroups < 2 || tile.consumer_groups == 0
            {
                return Err(wrong(
                    "TILE_K must be a multiple of 16 up to 256, WARPGROUPS at least 2, and CONSUMER_GROUPS at least 1",
                ));
            }
            if tile.producer_warp && part != Part::Forward {
                return Err(wrong("PRODUCER_WARP must be 0 for gradients"));
            }
            let num_splits = num_splits.unwrap_or(planned_splits).max(1);
            Ok(Candidate::Hopper(tile, head_group.unwrap_or(planned_head_group), num_splits))
        }
        Candidate::Mma(planned) => {
            let [warpgroups, groups, keys, warps_k, stages, head_group, num_splits, pack_gqa] = *numbers else {
                return Err(wrong("it must be WARPGROUPS/GROUPS/TILE_K/WARPS_K/STAGES/HEAD_GROUP/NUM_SPLITS/PACK_GQA"));
            };
            let MmaTiles { tile, head_group: planned_head_group } = planned.tiles;
            let tile = MmaTile {
                warpgroups: warpgroups.unwrap_or(tile.warpgroups),
                groups: groups.unwrap_or(tile.groups),
                tile_k: keys.unwrap_or(tile.tile_k),
                warps_k: warps_k.unwrap_or(tile.warps_k),
                stages: stages.unwrap_or(tile.stages),
            };
            Ok(Candidate::Mma(MmaForward {
                tiles: MmaTiles { tile, head_group: head_group.unwrap_or(planned_head_group) },
                num_splits: num_splits.unwrap_or(planned.num_splits).max(1),
                pack_gqa: pack_gqa.map_or(planned.pack_gqa, |pack_gqa| pack_gqa != 0),
            }))
        }
        Candidate::FewRows(FewRowsForward { tile, num_splits: planned_splits }) => {
            let [rows, keys, lanes, reads, num_splits] = *numbers else {
                return Err(wrong("it must be ROWS/TILE_K/LANES/READS/NUM_SPLITS"));
            };
            let tile = FewRowsTile {
                rows: rows.unwrap_or(tile.rows),
                tile_k: keys.unwrap_or(tile.tile_k),
                lanes: lanes.unwrap_or(tile.lanes),
                reads: reads.unwrap_or(tile.reads),
            };
            Ok(Candidate::FewRows(FewRowsForward { tile, num_splits: num_splits.unwrap_or(planned_splits).max(1) }))
        }
    }
}

/// Times the plans.
pub fn run(options: &Options) -> Result<(), Error> {
    let name = options.device.unwrap_or_else(DeviceName::best);
    let client = name.open()?.client();
    let (mut timed_any, mut nothing_planned) = (false, None);
    let cases = if options.shape.is_empty() {
        options.filters.apply(options.set)?
    } else {
        options.filters.of_shapes(&options.shape, name)
    };
    for case in cases {
        let order = if options.any_order { BackwardOrder::Fast } else { BackwardOrder::Deterministic };
        let precision = if options.tf32 { Precision::Tf32 } else { Precision::Full };
        let data = Data::new(case, 0)?.with_backward_order(order).with_precision(precision);
        let problem = data.problem_of_kernels()?;
        let plan = plan_with(&client, &problem, options.kernel)?;
        let planned = match planned(&plan, options.part) {
            Ok(planned) => planned,
            // Other problems of the set may have such a kernel.
            Err(error) => {
                println!("{case:<40} {error}");
                nothing_planned = Some(error);
                continue;
            }
        };
        timed_any = true;
        let pass = if options.part == Part::Forward { Pass::Forward } else { Pass::Both };
        let tensors = Tensors::new(&client, &data, pass)?;
        let oracle = Oracle::new(&data, options.part != Part::Forward);
        // Gradients read the saved results of the forward.
        tensors.forward(&client, &problem, plan.forward)?;
        let wanted = options.part.wanted(&tensors);
        let candidates = options
            .candidates
            .iter()
            .map(|numbers| candidate(numbers, options.part, planned))
            .collect::<Result<Vec<_>, _>>()?;
        for candidate in [planned].into_iter().chain(candidates) {
            let mut work = Launches {
                client: &client,
                problem,
                tensors: &tensors,
                part: options.part,
                backward: plan.backward,
                candidate,
            };
            let first = once(&mut work);
            let timed = first.and_then(|first| {
                let errors = oracle.errors(&tensors.results(&client, problem.dtype, &wanted));
                let error = errors.worst();
                if !errors.are_right(problem.dtype, options.tf32) {
                    return Err(Error::Other(format!("wrong result: relative error {error:.1e}")));
                }
                Ok((first, error, device_time(&mut work)?.median()))
            });
            let name = candidate.to_string();
            match timed {
                Ok((first, error, ms)) => {
                    let rate = if options.part == Part::Forward && case.seq_q <= DECODING {
                        format!("{:7.0} GB/s", case.bytes() as f64 / ms / 1e6)
                    } else {
                        format!("{:7.1} TFLOP/s", options.part.flops(&problem) / ms / 1e9)
                    };
                    println!("{case:<40} {name:<30} {ms:8.4} ms {rate}, first {first:.0} ms, error {error:.1e}");
                }
                Err(error) => println!("{case:<40} {name:<30} {error}"),
            }
        }
    }
    match nothing_planned {
        Some(error) if !timed_any => Err(error),
        _ => Ok(()),
    }
}
