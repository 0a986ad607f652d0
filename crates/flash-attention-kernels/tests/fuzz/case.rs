//! From a line of text to the problem, and to the case with its data.

use crate::common::{Case, Layout, Poison, as_laid_out};
use crate::line::Line;
use flash_attention_kernels::mods::{self, Alibi, MaskFn, ScoreFn, Softcap};
use flash_attention_kernels::{
    Alignment, AttentionOptions, AttentionProblem, BackwardOrder, BlockMask, Dtype, KvStorage, MaskStorage, Precision,
    dropout,
};
use flash_attention_reference::mods::{Bent, Relative, Sloped, Strided};
use flash_attention_reference::{Tensors, normal, round_to};

impl Line {
    /// `[batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v]`.
    pub fn sizes(&self) -> Result<[usize; 7], String> {
        let (hq, d) = (self.number("hq", 1)?, self.number("d", 16)?);
        let sizes = [self.number("b", 1)?, hq, self.number("hk", hq)?, self.number("sq", 1)?, self.number("sk", 1)?];
        let [b, hq, hk, sq, sk] = sizes;
        Ok([b, hq, hk, sq, sk, d, self.number("dv", d)?])
    }

    /// The shape of a tensor that broadcasts to the scores.
    fn shape(&self, key: &str) -> Result<Option<[usize; 4]>, String> {
        let [b, h, _, q, k, ..] = self.sizes()?;
        self.text(key).map(|text| pattern(text, "bhqk", [b, h, q, k]).ok_or(format!("{key}={text}"))).transpose()
    }

    pub fn dtype(&self) -> Result<Dtype, String> {
        self.choice("dtype", &[("f32", Dtype::F32), ("f16", Dtype::F16), ("bf16", Dtype::BF16)])
    }

    fn options(&self) -> Result<AttentionOptions, String> {
        let orders = [
            ("fixed", BackwardOrder::Deterministic),
            ("turns", BackwardOrder::Deterministic),
            ("fast", BackwardOrder::Fast),
        ];
        let by_number = self.choice("dropout_seed", &[("tensor", false), ("number", true)])?;
        let dropout = self.parsed("dropout")?.unwrap_or(0.0);
        Ok(AttentionOptions {
            softmax_scale: self.parsed("scale")?,
            causal: self.number("causal", 0)? > 0,
            alignment: self.choice("align", &[("bottom", Alignment::BottomRight), ("top", Alignment::TopLeft)])?,
            continued: self.number("continued", 0)? > 0,
            window_left: self.parsed("left")?,
            window_right: self.parsed("right")?,
            softcap: self.parsed("softcap")?,
            dropout,
            dropout_seed: (by_number && dropout > 0.0).then_some(self.seed()?.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
            score_mod: self.choice("score_mod", &score_mods())?,
            mask_mod: self.choice("mask_mod", &mask_mods())?,
            backward_order: self.choice("order", &orders)?,
            precision: self.choice("precision", &[("full", Precision::Full), ("tf32", Precision::Tf32)])?,
        })
    }

    /// The problem that the line states.
    ///
    /// # Errors
    ///
    /// If a value does not parse, or `AttentionProblem::validate` refuses the problem.
    pub fn problem(&self) -> Result<AttentionProblem, String> {
        let [b, hq, hk, sq, sk, d, dv] = self.sizes()?;
        let shapes = [[b, hq, sq, d], [b, hk, sk, d], [b, hk, sk, dv]];
        let [q, k, v] = &shapes;
        let mut problem = AttentionProblem::new(q, k, v, self.dtype()?, self.options()?).map_err(|e| e.to_string())?;
        problem.mask = self.shape("mask")?;
        problem.bias = self.shape("bias")?;
        problem.alibi_slopes = self.choice("slopes", &[("", None), ("1", Some([1, hq])), ("b", Some([b, hq]))])?;
        problem.sinks = self.number("sinks", 0)? > 0;
        problem.score_tensors = [self.shape("score_a")?, self.shape("score_b")?];
        problem.mask_tensors = [self.shape("mask_a")?, self.shape("mask_b")?];
        (problem.seq_lens_q, problem.seq_lens_k) = (self.text("lens_q").is_some(), self.text("lens_k").is_some());
        if let (Some(q), Some(k)) = (self.numbers("cu_q")?, self.numbers("cu_k")?) {
            if q.len() != k.len() {
                return Err("cu_q and cu_k must have the same length".into());
            }
            problem.cu_seqlens = Some(q.len() - 1);
        }
        if let Some(text) = self.text("blocks") {
            let [batch, heads, ..] =
                pattern(text, "bh", [problem.cu_seqlens.unwrap_or(b), hq, 0, 0]).ok_or(format!("blocks={text}"))?;
            let size = self.numbers("block_size")?.unwrap_or(vec![128; 2]);
            let &[block_q, block_k] = &size[..] else {
                return Err("block_size must be two numbers, like 128,128".into());
            };
            if block_q == 0 || block_k == 0 {
                return Err("block_size must be at least 1,1".into());
            }
            let blocks = [batch, heads, sq.div_ceil(block_q), sk.div_ceil(block_k)];
            problem.block_mask = Some(BlockMask { blocks, block_q, block_k });
        }
        problem.validate().map_err(|error| error.to_string())?;
        let mut paged = Ok(problem);
        if let Some(page_size) = self.parsed::<usize>("page")? {
            // The pages that are needed, and one that is not.
            paged = problem.with_page_table(&[b, sk.div_ceil(page_size.max(1)) + 1], 1, page_size);
        }
        let storage = self.storage()?;
        paged.and_then(|paged| paged.with_kv_storage(storage)).map_err(|error| error.to_string())?;
        Ok(problem)
    }

    /// How the pages of the forward are stored.
    fn storage(&self) -> Result<KvStorage, String> {
        self.choice("storage", &[("elements", KvStorage::Elements), ("e4m3", KvStorage::E4m3)])
    }

    fn seed(&self) -> Result<u64, String> {
        Ok(self.parsed("seed")?.unwrap_or(0))
    }

    /// Sequence lengths for `batch` batches of `seq` queries or keys; `None` if the line has none.
    fn lens(&self, key: &str, batch: usize, seq: usize) -> Result<Option<Vec<usize>>, String> {
        let lens = self.numbers(key)?;
        Ok(lens.map(|lens| (0..batch).map(|b| lens.get(b).copied().unwrap_or(seq)).collect()))
    }

    /// Cumulative sequence lengths, each at most `total`.
    fn cu_seqlens(&self, key: &str, total: usize) -> Result<Option<Vec<usize>>, String> {
        let mut least = 0;
        let ends = self.numbers(key)?;
        Ok(ends.map(|ends| {
            let ascending = ends.into_iter().map(|end| {
                least = end.clamp(least, total.max(least));
                least
            });
            ascending.collect()
        }))
    }

    /// The case with its data.
    ///
    /// # Errors
    ///
    /// See [`problem`](Self::problem).
    pub fn case(&self) -> Result<Case, String> {
        let p = self.problem()?;
        let seed = self.seed()?;
        let drawn = |len: usize, nth: u64| normal(len, seed.wrapping_mul(32).wrapping_add(nth));
        let rounded = |mut values: Vec<f64>, factor: f64, dtype: Dtype| {
            values.iter_mut().for_each(|value| *value *= factor);
            round_to(&mut values, dtype);
            values
        };
        let len = |shape: [usize; 4]| shape.iter().product::<usize>();
        let sharp = self.number("sharp", 1)? as f64;
        let layouts: [Layout; 4] = self.list("layouts", "contiguous", layout)?;
        let extra_layouts = [self.text("mask_layout"), self.text("bias_layout")].map(|text| layout(text.unwrap_or("")));
        let [mask_layout, bias_layout] = extra_layouts;
        let (mask_layout, bias_layout) = (mask_layout.ok_or("mask_layout")?, bias_layout.ok_or("bias_layout")?);
        let shapes = [p.q_shape(), p.k_shape(), p.v_shape(), p.o_shape()];
        let mut tensors = [0, 1, 2, 3].map(|nth| {
            let factor = if nth < 2 { sharp } else { 1.0 };
            as_laid_out(shapes[nth], layouts[nth], rounded(drawn(len(shapes[nth]), nth as u64), factor, p.dtype))
        });
        let lens = [self.lens("lens_q", p.batch, p.seq_q)?, self.lens("lens_k", p.batch, p.seq_k)?];
        if self.choice("padding", &[("normal", false), ("nan", true)])? {
            for (nth, lens) in [(0, &lens[0]), (1, &lens[1]), (2, &lens[1]), (3, &lens[0])] {
                if let Some(lens) = lens {
                    pad(&mut tensors[nth], shapes[nth], layouts[nth], lens);
                }
            }
        }
        let [q, k, v, dout] = tensors;
        let mask = p.mask.map(|shape| self.mask(shape, &drawn(len(shape), 4), mask_layout)).transpose()?;
        let bias = p.bias.map(|shape| {
            let values = self.bias(drawn(len(shape), 5), p.dtype)?;
            Ok::<_, String>(as_laid_out(shape, bias_layout, values))
        });
        let tenths = |nth: u64, len: usize| rounded(drawn(len, nth), 0.1, Dtype::F32);
        let [score_a, score_b] = p.score_tensors.map(|shape| shape.map(len));
        let [mask_a, mask_b] = p.mask_tensors.map(|shape| shape.map(len));
        let whole = |nth: u64, len: usize| drawn(len, nth).iter().map(|x| (x.abs() * 1.5).floor().min(2.0)).collect();
        let (total_q, total_k) = (p.batch * p.seq_q, p.batch * p.seq_k);
        let (cu_seqlens_q, cu_seqlens_k) = (self.cu_seqlens("cu_q", total_q)?, self.cu_seqlens("cu_k", total_k)?);
        let words = p.options.dropout_seed.unwrap_or(seed.wrapping_mul(0xD129_0EB7_25C3_AE35));
        let offsets: [usize; 7] = self.list("offsets", "0", |text| text.parse().ok())?;
        let grads = self.text("grads").unwrap_or("qkvbast");
        let [seq_lens_q, seq_lens_k] = lens;
        let tensors = Tensors {
            q,
            k,
            v,
            mask,
            bias: bias.transpose()?,
            alibi_slopes: p.alibi_slopes.map(|[batch, heads]| tenths(7, batch * heads)),
            sinks: p.sinks.then(|| rounded(drawn(p.num_heads_q, 8), 4.0, Dtype::F32)),
            dropout: None,
            seq_lens_q,
            seq_lens_k,
            cu_seqlens_q,
            cu_seqlens_k,
            score_tensors: [score_a.map(|len| tenths(9, len)), score_b.map(|len| tenths(10, len))],
            mask_tensors: [mask_a.map(|len| whole(11, len)), mask_b.map(|len| whole(12, len))],
            block_mask: p.block_mask.map(|mask| drawn(len(mask.blocks), 13).iter().map(|x| block_state(*x)).collect()),
        };
        let case = Case {
            tensors,
            dout,
            dlse: (self.number("dlse", 0)? > 0).then(|| rounded(drawn(p.rows(), 6), 1.0, Dtype::F32)),
            mask_storage: self.choice("mask_storage", &[("u32", MaskStorage::U32), ("u8", MaskStorage::U8)])?,
            seed: dropout::seed(words),
            layouts,
            extra_layouts: [mask_layout, bias_layout],
            offsets,
            poison: self.choice("poison", &[("nan", Poison::Nan), ("huge", Poison::Huge)])?,
            wanted: ["q", "k", "v", "b", "a", "s", "t"].map(|letter| grads.contains(letter)),
            fused: self.text("order").is_some_and(|order| order != "fixed"),
            splits: self.number("splits", 1)?,
            page_size: self.parsed("page")?,
            tuned: false,
            problem: p,
            ..Case::new([0, 0, 0, 0, 0, 1, 1], Dtype::F32, AttentionOptions::default())
        };
        Ok(if self.storage()? == KvStorage::E4m3 { case.with_e4m3() } else { case })
    }

    fn mask(&self, shape: [usize; 4], drawn: &[f64], layout: Layout) -> Result<Vec<bool>, String> {
        let data = [("some", 0), ("most", 1), ("one", 2), ("all", 3), ("none", 4)];
        let keys = shape[3];
        let hides = match self.choice("mask_data", &data)? {
            0 => drawn.iter().map(|x| *x > 0.43).collect(),
            1 => drawn.iter().map(|x| *x > -1.5).collect(),
            // One key of each row is visible.
            2 => {
                let left = drawn.chunks(keys.max(1)).map(|row| (row[0].abs() * 1e4) as usize % keys.max(1));
                left.flat_map(|left| (0..keys).map(move |j| j != left)).collect()
            }
            all => vec![all == 3; drawn.len()],
        };
        Ok(as_laid_out(shape, layout, hides))
    }

    fn bias(&self, mut values: Vec<f64>, dtype: Dtype) -> Result<Vec<f64>, String> {
        let large = if dtype == Dtype::F16 { 6e4 } else { 1e5 };
        let of: fn(f64, f64) -> f64 = match self.choice("bias_data", &[("normal", 0), ("large", 1), ("infinite", 2)])? {
            0 => |x, _| x,
            1 => |x, large| (x * large / 3.0).clamp(-large, large),
            _ => |x, _| if x < -0.7 { f64::NEG_INFINITY } else { x },
        };
        values.iter_mut().for_each(|x| *x = of(*x, large));
        round_to(&mut values, dtype);
        Ok(values)
    }
}

/// Puts NaN after the lengths of queries or keys. Tensors whose elements share memory are not changed.
fn pad(values: &mut [f64], [_, h, s, d]: [usize; 4], layout: Layout, lens: &[usize]) {
    if matches!(layout, Layout::RepeatedRows | Layout::Scalar) {
        return;
    }
    for (row, values) in values.chunks_mut(d).enumerate() {
        if row % s >= lens[row / (s * h)] {
            values.fill(f64::NAN);
        }
    }
}

/// State of a block for a normal random number: empty, partial and full are about equally likely.
fn block_state(x: f64) -> u32 {
    if x < -0.43 { 0 } else { 1 + u32::from(x > 0.43) + u32::from(x > 1.0) }
}

/// The shape of a pattern: the size of each dimension whose letter is in its place, and 1 for the others.
fn pattern(text: &str, letters: &str, sizes: [usize; 4]) -> Option<[usize; 4]> {
    let mut shape = [1; 4];
    if text.len() != letters.len() {
        return None;
    }
    for (n, (is, letter)) in text.chars().zip(letters.chars()).enumerate() {
        match is {
            '1' => {}
            is if is == letter => shape[n] = sizes[n],
            _ => return None,
        }
    }
    Some(shape)
}

fn layout(text: &str) -> Option<Layout> {
    Some(match text {
        "" | "contiguous" => Layout::Contiguous,
        "heads" => Layout::HeadsInner,
        "transposed" => Layout::Transposed,
        "rows" => Layout::RepeatedRows,
        "scalar" => Layout::Scalar,
        padded => Layout::Padded(padded.strip_prefix("padded:")?.parse().ok()?),
    })
}

fn score_mods() -> [(&'static str, Option<ScoreFn>); 6] {
    [
        ("", None),
        ("alibi", Some(ScoreFn::of::<Alibi>())),
        ("bent", Some(ScoreFn::of::<Bent>())),
        ("relative", Some(ScoreFn::of::<Relative>())),
        ("sloped", Some(ScoreFn::of::<Sloped>())),
        ("softcap", Some(ScoreFn::of::<Softcap<5>>())),
    ]
}

fn mask_mods() -> [(&'static str, Option<MaskFn>); 7] {
    [
        ("", None),
        ("causal", Some(MaskFn::of::<mods::Causal>())),
        ("dilated", Some(MaskFn::of::<mods::Dilated>())),
        ("document", Some(MaskFn::of::<mods::Document>())),
        ("prefix", Some(MaskFn::of::<mods::PrefixLm>())),
        ("sliding", Some(MaskFn::of::<mods::SlidingGlobal>())),
        ("strided", Some(MaskFn::of::<Strided>())),
    ]
}
