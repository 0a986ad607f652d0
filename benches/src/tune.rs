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
    /// Ways to try, KEYS/STAGES/TURNS/LAZY/SECTION each (flags 0 or 1, heads of a section; `-` for what is planned),
    /// beside the planned one.
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
    let wrong = || Error::Other(format!("--try {text}: it must be KEYS/STAGES/TURNS/LAZY/SECTION"));
    let parts: Vec<&str> = text.split('/').collect();
    let [keys, stages, turns, lazy, section] = parts[..] else { return Err(wrong()) };
    let number = |text: &str, planned: usize| match text {
        "-" => Ok(planned),
        text => text.parse().map_err(|_| wrong()),
    };
    let HopperTile { tile_k, stages: planned_stages, turns: planned_turns, lazy: planned_lazy } = planned.tile;
    let tile = HopperTile {
        tile_k: number(keys, tile_k)?,
        stages: number(stages, planned_stages)?,
        turns: number(turns, planned_turns.into())? != 0,
        lazy: number(lazy, planned_lazy.into())? != 0,
    };
    Ok(HopperForward { tile, section: number(section, planned.section)? })
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
            let HopperForward { tile: HopperTile { tile_k, stages, turns, lazy }, section } = way;
            let name = format!("{tile_k}/{stages}/{}/{}/{section}", turns as u8, lazy as u8);
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
