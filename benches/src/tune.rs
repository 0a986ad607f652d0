//! Ways to plan Hopper's kernels, timed beside the planned one.

use crate::case::{Filters, Pass, Set};
use crate::data::{Data, Oracle, tolerance};
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Tensors;
use crate::part::Part;
use crate::timing::{Work, device_time, once, sync};
use cubecl::client::Client;
use flash_attention_kernels::{
    AttentionProblem, BackwardOrder, BackwardTiles, BiasGradient, BiasTile, Forward, Gradient, HopperForward,
    HopperGradient, HopperTile, Kernel, Plan, plan_with,
};

/// What to try.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The set of problems.
    #[arg(long, value_enum, default_value = "h200")]
    set: Set,
    #[command(flatten)]
    filters: Filters,
    /// The kernel.
    #[arg(long, value_enum, default_value = "forward")]
    part: Part,
    /// Ways to try, TEAMS/WARPGROUPS/KEYS/STAGES/TURNS/SECTION/PARTS each (TURNS is 0 or 1, SECTION a number of heads, PARTS
    /// into how many the keys are split; KEYS are queries for dkdv and fused; `-` is what is planned), beside the planned
    /// one. For dbias TEAMS are blocks of Q and dO in shared memory at a time, and PARTS tiles of a block.
    #[arg(long = "try", value_delimiter = ',')]
    ways: Vec<String>,
}

/// Tiles, heads of a section, parts of the keys.
#[derive(Clone, Copy, Debug)]
struct Way(HopperTile, usize, usize);

/// One kernel, planned in one way. A gradient comes with delta, which it needs.
struct Launches<'a> {
    client: &'a Client,
    problem: AttentionProblem,
    tensors: &'a Tensors,
    part: Part,
    /// What is planned beside it.
    backward: BackwardTiles,
    way: Way,
}

impl Work for Launches<'_> {
    fn call(&mut self, _: usize) -> Result<(), Error> {
        let Way(tile, section, parts) = self.way;
        if self.part == Part::Forward {
            return self.tensors.forward(self.client, &self.problem, HopperForward { tile, section, parts });
        }
        if self.part == Part::Dbias {
            let HopperTile { teams: row_stages, tile_k, stages, .. } = tile;
            let dbias = BiasGradient::Hopper(BiasTile { tile_k, tiles: parts, stages, row_stages });
            let tiles = BackwardTiles { dbias, ..self.backward };
            return self.tensors.backward(self.client, &self.problem, &self.part.wanted(self.tensors), tiles);
        }
        let gradient = Gradient::Hopper(HopperGradient { tile, section });
        let tiles = match self.part {
            // Its tiles are those of dkdv; dq's are of the kernel that it does without.
            Part::Fused => BackwardTiles { fused: Some(HopperGradient { tile, section }), ..self.backward },
            _ => BackwardTiles { dq: gradient, dkdv: gradient, ..self.backward },
        };
        self.tensors.backward(self.client, &self.problem, &self.part.wanted(self.tensors), tiles)
    }

    fn finish(&self) -> Result<(), Error> {
        sync(self.client)
    }

    fn stream(&self) -> Option<&Client> {
        Some(self.client)
    }
}

/// How the kernel is planned.
fn planned(plan: &Plan, part: Part) -> Result<Way, Error> {
    let gradient = |gradient| match gradient {
        Gradient::Hopper(HopperGradient { tile, section }) => Some(Way(tile, section, 1)),
        Gradient::Mma(_) | Gradient::Matrix(_) | Gradient::Portable(_) => None,
    };
    let way = match (part, plan.forward) {
        (Part::Forward, Forward::Hopper(HopperForward { tile, section, parts })) => Some(Way(tile, section, parts)),
        (Part::Forward, Forward::Mma(_) | Forward::Matrix(_) | Forward::Portable(_)) => None,
        (Part::Dq, _) => gradient(plan.backward.dq),
        (Part::Dkdv, _) => gradient(plan.backward.dkdv),
        (Part::Dbias, _) => match plan.backward.dbias {
            BiasGradient::Hopper(tile) => {
                Some(Way(HopperTile { teams: tile.row_stages, ..tile.tile() }, 1, tile.tiles))
            }
            BiasGradient::Portable(_) => None,
        },
        (Part::Fused, _) => plan.backward.fused.and_then(|fused| gradient(Gradient::Hopper(fused))),
    };
    way.ok_or_else(|| Error::Other(format!("{plan}: not the kernel that was asked for")))
}

fn way(text: &str, Way(tile, planned_section, planned_parts): Way) -> Result<Way, Error> {
    let wrong = || Error::Other(format!("--try {text}: it must be TEAMS/WARPGROUPS/KEYS/STAGES/TURNS/SECTION/PARTS"));
    let parts: Vec<&str> = text.split('/').collect();
    let [teams, warpgroups, keys, stages, turns, section, parts] = parts[..] else { return Err(wrong()) };
    let number = |text: &str, planned: usize| match text {
        "-" => Ok(planned),
        text => text.parse().map_err(|_| wrong()),
    };
    let tile = HopperTile {
        teams: number(teams, tile.teams)?,
        warpgroups: number(warpgroups, tile.warpgroups)?,
        tile_k: number(keys, tile.tile_k)?,
        stages: number(stages, tile.stages)?,
        turns: number(turns, tile.turns.into())? != 0,
    };
    if !tile.tile_k.is_multiple_of(16) || tile.tile_k > 256 || tile.warpgroups < 2 || tile.teams == 0 {
        return Err(Error::Other(format!("--try {text}: KEYS are multiples of 16 up to 256, WARPGROUPS at least 2")));
    }
    Ok(Way(tile, number(section, planned_section)?, number(parts, planned_parts)?.max(1)))
}

/// Times them.
pub fn run(options: &Options) -> Result<(), Error> {
    let device = DeviceName::best().open()?;
    let client = device.client();
    for case in options.filters.apply(options.set)? {
        let order = if options.part == Part::Fused { BackwardOrder::Fast } else { BackwardOrder::Deterministic };
        let data = Data::new(case, 0)?.with_backward_order(order);
        let problem = data.problem;
        let pass = if options.part == Part::Forward { Pass::Forward } else { Pass::Both };
        let tensors = Tensors::new(&client, &data, pass);
        let oracle = Oracle::new(&data);
        let plan = plan_with(&client, &problem, Kernel::Hopper)?;
        let planned = planned(&plan, options.part)?;
        // Gradients read what it saves.
        tensors.forward(&client, &problem, plan.forward)?;
        let wanted = options.part.wanted(&tensors);
        let ways = options.ways.iter().map(|text| way(text, planned)).collect::<Result<Vec<_>, _>>()?;
        for way in [planned].into_iter().chain(ways) {
            let mut work = Launches {
                client: &client,
                problem,
                tensors: &tensors,
                part: options.part,
                backward: plan.backward,
                way,
            };
            let first = once(&mut work);
            let timed = first.and_then(|first| {
                let error = oracle.errors(&tensors.results(&client, problem.dtype, &wanted)).worst();
                if error > tolerance(problem.dtype, false) || error.is_nan() {
                    return Err(Error::Other(format!("wrong result: relative error {error:.1e}")));
                }
                Ok((first, error, device_time(&mut work)?.median()))
            });
            let Way(HopperTile { teams, warpgroups, tile_k, stages, turns }, section, parts) = way;
            let name = format!("{teams}/{warpgroups}/{tile_k}/{stages}/{}/{section}/{parts}", turns as u8);
            match timed {
                Ok((first, error, ms)) => {
                    let rate = options.part.flops(&problem) / ms / 1e9;
                    println!(
                        "{case:<40} {name:<30} {ms:8.4} ms {rate:7.1} TFLOP/s, first {first:.0} ms, error {error:.1e}"
                    );
                }
                Err(error) => println!("{case:<40} {name:<30} {error}"),
            }
        }
    }
    Ok(())
}
