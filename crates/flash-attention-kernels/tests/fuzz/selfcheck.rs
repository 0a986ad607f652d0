//! Self-checks of the fuzzer, without a device.

use crate::common::Results;
use crate::draw::Source;
use crate::line::Line;
use crate::shrink::shrink;
use crate::worker::{Abilities, Outcome, caught};
use flash_attention_kernels::{BackwardTiles, Kernel, TileShape};

/// Drawn lines are valid problems and survive a round trip through text. A planted fault is found, and its case is simplified.
pub fn lines_and_shrinking() {
    let dtypes = ["f32", "f16", "bf16"].map(String::from).to_vec();
    let abilities = Abilities { dtypes, bytes: true, offset: 1 };
    let source = Source { seed: 5, abilities, precision: None, without: Vec::new(), most: 200_000, longest: 520 };
    let drawn: Vec<Line> = (0..100)
        .flat_map(|number| {
            let mut combination = source.combination(number);
            std::iter::repeat_with(move || combination.case()).take(10).collect::<Vec<_>>()
        })
        .collect();
    for line in &drawn {
        let parsed: Line = line.to_string().parse().unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(parsed, *line);
        line.problem().unwrap_or_else(|error| panic!("{line}: {error}"));
    }
    let rich: Line = "dtype=bf16 b=2 hq=4 hk=2 sq=33 sk=40 d=24 dv=16 causal=1 left=20 softcap=15 mask=b11k bias=1hqk slopes=b sinks=1 \
                      dlse=1 lens_k=40,17 layouts=padded:3,heads,transposed,contiguous sharp=4 poison=huge seed=9"
        .parse()
        .expect("the line must parse");
    assert_eq!(by_oracle(&rich, 1.0), Outcome::Ran("portable".into()));
    let Outcome::Failed(why) = by_oracle(&rich, 1.05) else {
        panic!("{line} passes with dv multiplied by 1.05", line = rich)
    };
    let (simplest, why) = shrink(&rich, &why, 300, |line| by_oracle(line, 1.05));
    assert!(why.contains("dv"), "{simplest}: {why}");
    let expected: Line = "dtype=bf16 sq=1 sk=1 d=1".parse().expect("the line must parse");
    let mut without_data = simplest.clone();
    ["seed", "grads"].into_iter().for_each(|key| without_data.unset(key));
    assert_eq!(without_data, expected, "shrunk to {simplest}");
}

/// The outcome for a kernel that returns the oracle's results, with `dv` multiplied by `times`.
fn by_oracle(line: &Line, times: f64) -> Outcome {
    caught(|| {
        let case = line.case().expect("the line must be a valid problem");
        let expected = case.expected(Kernel::Portable).emulated;
        let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
        let of = expected.gradients;
        let [wanted_q, wanted_k, wanted_v, ..] = case.wanted;
        let results = Results {
            o: expected.output.o,
            lse: expected.output.lse,
            dq: wanted_q.then_some(of.dq),
            dk: wanted_k.then_some(of.dk),
            dv: wanted_v.then(|| of.dv.iter().map(|x| x * times).collect()),
            dbias: of.dbias,
            dalibi_slopes: of.dalibi_slopes,
            dsinks: of.dsinks,
            dscore_tensors: of.dscore_tensors,
            forward: tile.into(),
            backward: BackwardTiles::portable(tile, true),
        };
        case.judge(&results);
        Outcome::Ran("portable".into())
    })
}
