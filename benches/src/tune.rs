//! Ways to plan Hopper's forward, timed beside the planned one.

use crate::case::{Filters, Pass, Set};
use crate::data::{Data, Oracle, tolerance};
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Tensors;
use crate::timing::{Work, device_time, once, sync};
use cubecl::client::Client;
use flash_attention_kernels::{AttentionProblem, Forward, Gradients, HopperForward, HopperTile, Kernel, plan_with};

/// What to try.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The set of problems.
    #[arg(long, value_enum, default_value = "h200")]
    set: Set,
    #[command(flatten)]
    filters: Filters,
    /// Ways to try, TEAMS/WARPGROUPS/KEYS/STAGES/TURNS/SECTION/PARTS each (TURNS is 0 or 1, SECTION a number of heads, PARTS
    /// into how many the keys are split; `-` is what is planned), beside the planned one.
    #[arg(long = "try", value_delimiter = ',')]
    ways: Vec<String>,
}

struct Forwards<'a> {
    client: &'a Client,
    problem: AttentionProblem,
    tensors: &'a [Tensors],
    way: HopperForward,
}

impl Work for Forwards<'_> {
    fn call(&mut self, turn: usize) -> Result<(), Error> {
        self.tensors[turn % self.tensors.len()].forward(self.client, &self.problem, self.way)
    }

    fn finish(&self) -> Result<(), Error> {
        sync(self.client)
    }

    fn stream(&self) -> Option<&Client> {
        Some(self.client)
    }
}

fn way(text: &str, planned: HopperForward) -> Result<HopperForward, Error> {
    let wrong = || Error::Other(format!("--try {text}: it must be TEAMS/WARPGROUPS/KEYS/STAGES/TURNS/SECTION/PARTS"));
    let parts: Vec<&str> = text.split('/').collect();
    let [teams, warpgroups, keys, stages, turns, section, parts] = parts[..] else { return Err(wrong()) };
    let number = |text: &str, planned: usize| match text {
        "-" => Ok(planned),
        text => text.parse().map_err(|_| wrong()),
    };
    let HopperForward { tile, section: planned_section, parts: planned_parts } = planned;
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
    Ok(HopperForward { tile, section: number(section, planned_section)?, parts: number(parts, planned_parts)?.max(1) })
}

/// Times them.
pub fn run(options: &Options) -> Result<(), Error> {
    let device = DeviceName::best().open()?;
    let client = device.client();
    for case in options.filters.apply(options.set)? {
        let data = Data::new(case, 0)?;
        let problem = data.problem;
        let tensors = vec![Tensors::new(&client, &data, Pass::Forward)];
        let oracle = Oracle::new(&data);
        let plan = plan_with(&client, &problem, Kernel::Hopper)?;
        let Forward::Hopper(planned) = plan.forward else {
            return Err(Error::Other(format!("{plan}: not the kernel that was asked for")));
        };
        let ways = options.ways.iter().map(|text| way(text, planned)).collect::<Result<Vec<_>, _>>()?;
        for way in [planned].into_iter().chain(ways) {
            let mut work = Forwards { client: &client, problem, tensors: &tensors, way };
            let first = once(&mut work);
            let timed = first.and_then(|first| {
                let error = oracle.error(&tensors[0].results(&client, problem.dtype, &Gradients::default()));
                if error > tolerance(problem.dtype, false) || error.is_nan() {
                    return Err(Error::Other(format!("wrong result: relative error {error:.1e}")));
                }
                Ok((first, error, device_time(&mut work)?.median()))
            });
            let HopperForward { tile: HopperTile { teams, warpgroups, tile_k, stages, turns }, section, parts } = way;
            let name = format!("{teams}/{warpgroups}/{tile_k}/{stages}/{}/{section}/{parts}", turns as u8);
            match timed {
                Ok((first, error, ms)) => {
                    let rate = problem.forward_flops() / ms / 1e9;
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
