//! Draws cases: first a combination of options, for which a device compiles kernels, then sizes, layouts and data.

use crate::line::Line;
use crate::worker::Abilities;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Sequence lengths around the edges of tiles.
const LENGTHS: [usize; 14] = [1, 2, 3, 17, 31, 63, 64, 65, 96, 113, 127, 129, 203, 257];
/// Head dimensions with tiles of their own.
const HOT: [usize; 8] = [16, 32, 64, 80, 96, 128, 192, 256];

/// The seed and the limits of drawn cases.
pub struct Source {
    pub seed: u64,
    pub abilities: Abilities,
    pub precision: Option<String>,
    /// Keys that are not drawn.
    pub without: Vec<String>,
    /// Largest number of multiply-adds of a forward.
    pub most: usize,
    /// The longest sequence.
    pub longest: usize,
}

/// A combination of options, from which cases are drawn.
pub struct Combination<'a> {
    source: &'a Source,
    options: Line,
    random: StdRng,
}

impl Source {
    /// The combination with this number.
    pub fn combination(&self, number: u64) -> Combination<'_> {
        let mut random = StdRng::seed_from_u64(self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(number));
        let options = self.options(&mut random);
        Combination { source: self, options, random }
    }

    fn options(&self, random: &mut StdRng) -> Line {
        let mut line = Line::default();
        let dtype = pick(random, &self.abilities.dtypes);
        line.set("dtype", &dtype);
        if let Some(precision) = self.precision.as_ref().filter(|_| dtype == "f32") {
            line.set("precision", precision);
        }
        // Wide heads are slow on a processor, and slow to compile.
        let few = if self.longest > 520 { HOT.len() } else { 4 };
        let head_dim = |random: &mut StdRng| match random.random_range(0..20) {
            0..9 => pick(random, &HOT[..few]),
            9..16 => random.random_range(1..=72),
            16..18 => pick(random, &HOT),
            _ => random.random_range(1..=256),
        };
        line.set("d", head_dim(random));
        if random.random_bool(0.35) {
            line.set("dv", head_dim(random));
        }
        // One combination in eight has hardly any options, the others have a few.
        let often = if random.random_bool(0.125) { 0.05 } else { random.random_range(0.1..0.4) };
        let takes = |random: &mut StdRng| random.random_bool(often);
        if random.random_bool(0.5) {
            line.set("causal", 1);
        }
        for key in ["left", "right"] {
            if takes(random) {
                line.set(key, 1);
            }
        }
        if random.random_bool(0.25) {
            line.set("align", "top");
        }
        if random.random_bool(0.25) {
            line.set("continued", 1);
        }
        for key in ["softcap", "scale", "sinks", "dlse"] {
            if takes(random) {
                line.set(key, 1);
            }
        }
        if takes(random) {
            line.set("dropout", 1);
            line.set("dropout_seed", pick(random, &["tensor", "number"]));
        }
        if takes(random) {
            line.set("slopes", pick(random, &["1", "b"]));
        }
        if takes(random) {
            let (name, tensors) =
                pick(random, &[("alibi", 1), ("bent", 2), ("relative", 0), ("sloped", 1), ("softcap", 0)]);
            line.set("score_mod", name);
            draw_tensors(random, &mut line, ["score_a", "score_b"], tensors);
        }
        if takes(random) {
            let of = [("causal", 0), ("dilated", 2), ("document", 2), ("prefix", 1), ("sliding", 2), ("strided", 0)];
            let (name, tensors) = pick(random, &of);
            line.set("mask_mod", name);
            draw_tensors(random, &mut line, ["mask_a", "mask_b"], tensors);
        }
        if takes(random) {
            line.set("mask", pattern(random));
            if self.abilities.bytes && random.random_bool(0.5) {
                line.set("mask_storage", "u8");
            }
        }
        if takes(random) {
            line.set("bias", pattern(random));
        }
        match random.random_range(0..10) {
            0 => line.set("lens_q", 0),
            1 => line.set("lens_k", 0),
            2 => {
                line.set("lens_q", 0);
                line.set("lens_k", 0);
            }
            3 | 4 => {
                line.set("cu_q", 0);
                line.set("cu_k", 0);
            }
            _ => {}
        }
        // Packed sequences with a block mask have nothing whose gradient is summed over tiles.
        let summed = ["bias", "slopes", "score_a"].iter().any(|key| line.text(key).is_some());
        if !(summed && line.text("cu_q").is_some()) && takes(random) {
            line.set("blocks", pick(random, &["11", "1h", "b1", "bh"]));
            line.set("block_size", pick(random, &["128,128", "128,128", "256,128", "128,256"]));
        }
        if line.text("cu_q").is_none() && random.random_bool(0.2) {
            line.set("page", pick(random, &["16", "32", "64", "128", "256"]));
            let whole = ["d", "dv"].iter().all(|key| line.number(key, 4).is_ok_and(|dim| dim.is_multiple_of(4)));
            if whole && random.random_bool(0.5) {
                line.set("storage", "e4m3");
            }
        }
        if random.random_bool(0.4) {
            line.set("order", pick(random, &["turns", "fast"]));
            if random.random_bool(0.5) {
                line.set("splits", pick(random, &["2", "3", "4"]));
            }
        }
        if random.random_bool(0.25) {
            let some: String = "qkvbast".chars().filter(|_| random.random_bool(0.5)).collect();
            line.set("grads", if some.is_empty() { "-" } else { &some });
        }
        self.without.iter().for_each(|key| line.unset(key));
        line
    }
}

impl Combination<'_> {
    /// A case of this combination: sizes, layouts, data, and the numbers among the options.
    pub fn case(&mut self) -> Line {
        let (source, random) = (self.source, &mut self.random);
        let mut line = self.options.clone();
        let [d, dv] = [line.number("d", 1), line.number("dv", 0)]
            .map(|dim| dim.expect("head dimensions are drawn with the options"));
        let dims = d + if dv == 0 { d } else { dv };
        let [mut b, mut hk, mut group] =
            [pick(random, &[1, 1, 1, 2, 2, 3]), pick(random, &[1, 1, 2, 3]), pick(random, &[1, 1, 2, 3, 4, 8])];
        let mut lengths = [length(random, source.longest), length(random, source.longest)];
        if random.random_bool(0.3) {
            lengths[1] = lengths[0];
        }
        // One case in 25 has a size of 0.
        match random.random_range(0..100) {
            0 => b = 0,
            1 => (hk, group) = (0, 1),
            2 => lengths[0] = 0,
            3 => lengths[1] = 0,
            _ => {}
        }
        while b * hk * group * lengths[0] * lengths[1] * dims > source.most {
            match (group, hk, b) {
                (2.., ..) => group /= 2,
                (_, 2.., _) => hk -= 1,
                (_, _, 2..) => b -= 1,
                _ => lengths = lengths.map(|length| length.div_ceil(2)),
            }
        }
        let [sq, sk] = lengths;
        let hq = hk * group;
        for (key, size) in [("b", b), ("hq", hq), ("hk", hk), ("sq", sq), ("sk", sk)] {
            line.set(key, size);
        }
        for key in ["left", "right"] {
            let some = random.random_range(0..=sk);
            replace(&mut line, key, || pick(random, &[0, 1, 3, 17, 64, some]));
        }
        replace(&mut line, "softcap", || pick(random, &["0.5", "2", "7", "15"]));
        replace(&mut line, "scale", || pick(random, &["0.02", "0.2", "1", "1.7"]));
        // If the cap is much larger than the scores, `tanh` has an error of 2⁻²⁴ times the cap, which the emulation does not have.
        if line.text("softcap").or(line.text("score_mod")).is_some() {
            replace(&mut line, "scale", || "0.2");
        }
        replace(&mut line, "dropout", || pick(random, &["0.1", "0.25", "0.5", "0.9"]));
        let (mut of_q, mut of_k) = (lens(random, b, sq), lens(random, b, sk));
        replace(&mut line, "lens_q", || std::mem::take(&mut of_q));
        replace(&mut line, "lens_k", || std::mem::take(&mut of_k));
        let sequences = random.random_range(0..=5);
        let (cu_q, mut cu_k) = (ends(random, sequences, b * sq), ends(random, sequences, b * sk));
        if sq == sk && random.random_bool(0.4) {
            cu_k = cu_q.clone();
        }
        replace(&mut line, "cu_q", || cu_q);
        replace(&mut line, "cu_k", || cu_k);
        // Rows without keys see their sink, whose gradient depends on `dout`.
        let padded = line.text("lens_q").or(line.text("lens_k")).is_some() && line.text("sinks").is_none();
        if padded && random.random_bool(0.3) {
            line.set("padding", "nan");
        }
        if line.text("mask").is_some() {
            line.set("mask_data", pick(random, &["some", "some", "some", "most", "one", "all", "none"]));
        }
        if line.text("bias").is_some() {
            // The derivative of a softcap is recovered from `ln p + lse − bias`, which loses digits if the bias is large.
            let data = ["normal", "normal", "normal", "infinite", "large"];
            line.set("bias_data", pick(random, if line.text("softcap").is_some() { &data[..4] } else { &data }));
        }
        if random.random_bool(0.5) {
            // Repeated elements have equal rounding errors, whose sum grows with the number of pairs, not with its root as the bound
            // assumes. So at most one tensor repeats elements, and no factor of `dP` does if gradients are summed over pairs.
            let summed = ["slopes", "score_a", "bias"].iter().any(|key| line.text(key).is_some());
            let repeating = random.random_range(0..if summed { 2 } else { 4 });
            let layouts = [0, 1, 2, 3].map(|nth| layout(random, nth == repeating));
            line.set("layouts", layouts.join(","));
        }
        for (option, key) in [("mask", "mask_layout"), ("bias", "bias_layout")] {
            if line.text(option).is_some() && random.random_bool(0.4) {
                line.set(key, layout(random, true));
            }
        }
        if random.random_bool(0.35) {
            let offsets = [(); 7].map(|()| source.abilities.offset * pick(random, &[0, 0, 1, 1, 2, 3, 4, 5, 8]));
            line.set("offsets", offsets.map(|offset| offset.to_string()).join(","));
        }
        if random.random_bool(0.25) {
            line.set("sharp", pick(random, &[4, 20, 60]));
        }
        if random.random_bool(0.5) {
            line.set("poison", "huge");
        }
        line.set("seed", random.random_range(1..100_000));
        source.without.iter().for_each(|key| line.unset(key));
        line
    }
}

/// Replaces the key's value, if the line has the key.
fn replace<T: std::fmt::Display>(line: &mut Line, key: &str, value: impl FnOnce() -> T) {
    if line.text(key).is_some() {
        line.set(key, value());
    }
}

fn pick<T: Clone>(random: &mut StdRng, of: &[T]) -> T {
    of.choose(random).expect("there is at least one choice").clone()
}

fn length(random: &mut StdRng, longest: usize) -> usize {
    match random.random_range(0..10) {
        0..8 => pick(random, &LENGTHS).min(longest),
        8 => random.random_range(1..=130.min(longest)),
        _ => random.random_range(1..=longest),
    }
}

/// A random pattern: the letters of dimensions that are not broadcast, and 1 for the others.
fn pattern(random: &mut StdRng) -> String {
    "bhqk".chars().map(|letter| if random.random_bool(0.5) { letter } else { '1' }).collect()
}

/// Draws patterns for the tensors that the function reads.
fn draw_tensors(random: &mut StdRng, line: &mut Line, keys: [&str; 2], tensors: usize) {
    for key in &keys[..tensors] {
        line.set(key, pattern(random));
    }
}

/// A random layout. Layouts that repeat elements are the last ones of the list.
fn layout(random: &mut StdRng, repeats: bool) -> String {
    let padded = format!("padded:{}", random.random_range(1..10));
    let all = ["contiguous", "contiguous", "heads", "heads", "transposed", &padded, &padded, "rows", "scalar"];
    pick(random, if repeats { &all } else { &all[..7] }).to_string()
}

/// Random lengths: for each batch 0, 1, all, more than all, or any.
fn lens(random: &mut StdRng, batch: usize, seq: usize) -> String {
    let all = (0..batch).map(|_| {
        let some = random.random_range(0..=seq);
        pick(random, &[0, 1.min(seq), seq, seq + 5, some, some, some])
    });
    let all: Vec<String> = all.map(|len| len.to_string()).collect();
    // An empty list has no text.
    if all.is_empty() { "0".into() } else { all.join(",") }
}

/// Random cumulative lengths of this many sequences, most often from 0 to `total`.
fn ends(random: &mut StdRng, sequences: usize, total: usize) -> String {
    let mut ends: Vec<usize> = (0..=sequences).map(|_| random.random_range(0..=total)).collect();
    ends.sort_unstable();
    if random.random_bool(0.7) {
        ends[0] = 0;
        ends[sequences] = total;
    }
    ends.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}
