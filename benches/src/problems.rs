//! Selection of problems on the command line: a set with filters, or shapes of the user's own.

use crate::case::{Case, Variant};
use crate::device::DeviceName;
use crate::error::Error;
use crate::sets::Set;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use flash_attention_kernels::Dtype;
use std::str::FromStr;
use thiserror::Error;

/// Problems to time.
#[derive(clap::Args, Clone, Debug)]
pub struct Problems {
    /// The set of problems.
    #[arg(long, value_enum, default_value = "quick")]
    pub set: Set,
    /// A problem of your own instead of a set, as in 4,32/8,2048,128 or 1,32,1x16384,128; may be repeated.
    #[arg(
        long,
        value_name = "BATCH,HEADS_Q[/HEADS_KV],SEQ_Q[xSEQ_K],HEAD_DIM[/HEAD_DIM_V]",
        conflicts_with_all = ["set", "batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim", "head_dim_v", "variant"],
    )]
    pub shape: Vec<Shape>,
    /// Filters on the set.
    #[command(flatten)]
    pub filters: Filters,
}

impl Problems {
    /// The selected problems, after validation.
    ///
    /// # Errors
    ///
    /// If a filter has a value that does not occur in the set, or a shape is not a valid attention problem.
    pub fn cases(&self, device: DeviceName) -> Result<Vec<Case>, Error> {
        if self.shape.is_empty() {
            return self.filters.apply(self.set);
        }
        let cases = self.filters.of_shapes(&self.shape, device);
        cases.iter().try_for_each(|case| case.problem().map(|_| ()))?;
        Ok(cases)
    }

    /// Default name of the results: the set, or `shapes`, and the device.
    pub fn name(&self, device: DeviceName) -> String {
        let set = if self.shape.is_empty() { self.set.name() } else { "shapes" };
        format!("{set}-{}", device.name())
    }
}

/// A problem's sizes, as given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    batch: usize,
    heads: [usize; 2],
    seqs: [usize; 2],
    dims: [usize; 2],
}

/// An invalid shape.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "{why}; a shape is BATCH,HEADS_Q[/HEADS_KV],SEQ_Q[xSEQ_K],HEAD_DIM[/HEAD_DIM_V], as in 4,32/8,2048,128 or 1,32,1x16384,128"
)]
pub struct NoShape {
    why: String,
}

impl FromStr for Shape {
    type Err = NoShape;

    fn from_str(text: &str) -> Result<Self, NoShape> {
        let wrong = |why: String| NoShape { why };
        let number = |text: &str, name: &str| match text.trim().parse() {
            Ok(0) => Err(wrong(format!("{name} is 0, but must be at least 1"))),
            Ok(number) => Ok(number),
            Err(_) => Err(wrong(format!("{name} is {text:?}, which is not a whole number"))),
        };
        let pair = |text: &str, between: char, names: [&str; 2]| -> Result<[usize; 2], NoShape> {
            let (first, second) = text.split_once(between).unwrap_or((text, text));
            Ok([number(first, names[0])?, number(second, names[1])?])
        };
        let parts: Vec<&str> = text.split(',').collect();
        let &[batch, heads, seqs, dims] = parts.as_slice() else {
            return Err(wrong(format!("it has {} parts, but must have 4", parts.len())));
        };
        let shape = Shape {
            batch: number(batch, "BATCH")?,
            heads: pair(heads, '/', ["HEADS_Q", "HEADS_KV"])?,
            seqs: pair(seqs, 'x', ["SEQ_Q", "SEQ_K"])?,
            dims: pair(dims, '/', ["HEAD_DIM", "HEAD_DIM_V"])?,
        };
        if !shape.heads[0].is_multiple_of(shape.heads[1]) {
            return Err(wrong(format!(
                "HEADS_Q is {}, which is not a multiple of HEADS_KV, {}",
                shape.heads[0], shape.heads[1]
            )));
        }
        Ok(shape)
    }
}

impl Shape {
    fn case(self, dtype: Dtype, causal: bool) -> Case {
        let Shape { batch, heads, seqs, dims } = self;
        Case {
            dtype,
            batch,
            heads_q: heads[0],
            heads_kv: heads[1],
            seq_q: seqs[0],
            seq_k: seqs[1],
            head_dim: dims[0],
            head_dim_v: dims[1],
            causal,
            variant: Variant::None,
        }
    }
}

/// Parser for one of these values, by its name.
pub(crate) fn named<T, const N: usize>(all: [T; N], name: fn(T) -> &'static str) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let of = move |text: String| {
        all.into_iter().find(|one| name(*one) == text).expect("the parser accepts only these names")
    };
    PossibleValuesParser::new(all.map(name)).map(of)
}

/// Filters on the axes of a set. An empty filter keeps everything.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Filters {
    /// Element types to keep. For shapes the default is bf16 on CUDA and f32 elsewhere.
    #[arg(long, value_delimiter = ',', value_parser = named([Dtype::F32, Dtype::F16, Dtype::BF16], Dtype::name))]
    dtype: Vec<Dtype>,
    /// Batches to keep.
    #[arg(long, value_delimiter = ',')]
    batch: Vec<usize>,
    /// Query heads to keep.
    #[arg(long, value_delimiter = ',')]
    heads_q: Vec<usize>,
    /// Key/value heads to keep.
    #[arg(long, value_delimiter = ',')]
    heads_kv: Vec<usize>,
    /// Numbers of queries to keep.
    #[arg(long, value_delimiter = ',')]
    seq_q: Vec<usize>,
    /// Numbers of keys to keep.
    #[arg(long, value_delimiter = ',')]
    seq_k: Vec<usize>,
    /// Head dimensions to keep.
    #[arg(long, value_delimiter = ',')]
    head_dim: Vec<usize>,
    /// Head dimensions of the values to keep.
    #[arg(long, value_delimiter = ',')]
    head_dim_v: Vec<usize>,
    /// Causal problems, full ones or both; true without a value. For shapes the default is full.
    #[arg(long, value_delimiter = ',', num_args = 0..=1, default_missing_value = "true")]
    causal: Vec<bool>,
    /// Variants to keep: none, mask, bias, softcap, "window 1024", …
    #[arg(long, value_delimiter = ',')]
    variant: Vec<String>,
}

impl Filters {
    /// The problems of the set that every filter keeps.
    pub fn apply(&self, set: Set) -> Result<Vec<Case>, Error> {
        type Axis = (&'static str, Vec<String>, fn(&Case) -> String);
        fn texts<T: ToString>(values: &[T]) -> Vec<String> {
            values.iter().map(T::to_string).collect()
        }
        let axes: [Axis; 10] = [
            ("dtype", self.dtype.iter().map(|dtype| dtype.name().into()).collect(), |c| c.dtype.name().into()),
            ("batch", texts(&self.batch), |c| c.batch.to_string()),
            ("heads-q", texts(&self.heads_q), |c| c.heads_q.to_string()),
            ("heads-kv", texts(&self.heads_kv), |c| c.heads_kv.to_string()),
            ("seq-q", texts(&self.seq_q), |c| c.seq_q.to_string()),
            ("seq-k", texts(&self.seq_k), |c| c.seq_k.to_string()),
            ("head-dim", texts(&self.head_dim), |c| c.head_dim.to_string()),
            ("head-dim-v", texts(&self.head_dim_v), |c| c.head_dim_v.to_string()),
            ("causal", texts(&self.causal), |c| c.causal.to_string()),
            ("variant", self.variant.clone(), |c| c.variant.to_string()),
        ];
        let mut cases = set.cases();
        for (axis, wanted, value) in axes {
            let mut known: Vec<String> = Vec::new();
            for value in cases.iter().map(value) {
                if !known.contains(&value) {
                    known.push(value);
                }
            }
            if let Some(unknown) = wanted.iter().find(|value| !known.contains(value)) {
                let (value, known) = (unknown.clone(), known.join(", "));
                return Err(Error::Filter { axis, value, set: set.name(), known });
            }
            cases.retain(|case| wanted.is_empty() || wanted.contains(&value(case)));
        }
        Ok(cases)
    }

    /// The shapes in each dtype, causal or full as requested.
    pub fn of_shapes(&self, shapes: &[Shape], device: DeviceName) -> Vec<Case> {
        let (mut dtypes, mut causals) = (self.dtype.clone(), self.causal.clone());
        if dtypes.is_empty() {
            dtypes.push(if device == DeviceName::Cuda { Dtype::BF16 } else { Dtype::F32 });
        }
        if causals.is_empty() {
            causals.push(false);
        }
        let of_dtype = |shape: Shape, dtype| causals.iter().map(move |causal| shape.case(dtype, *causal));
        let of_shape = |shape: &Shape| dtypes.iter().flat_map(|dtype| of_dtype(*shape, *dtype)).collect::<Vec<_>>();
        shapes.iter().flat_map(of_shape).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        problems: Problems,
    }

    fn parse(line: &[&str]) -> Result<Problems, clap::Error> {
        Line::try_parse_from([&["bench"], line].concat()).map(|line| line.problems)
    }

    fn names(line: &[&str], device: DeviceName) -> Vec<String> {
        parse(line).unwrap().cases(device).unwrap().iter().map(Case::to_string).collect()
    }

    #[test]
    fn shapes_are_problems_of_the_user_s_own() {
        let line = ["--shape", "4,32/8,2048,128", "--causal", "--shape", "1,32,1x16384,128/64"];
        assert_eq!(
            names(&line, DeviceName::Cuda),
            ["bf16 [4, 32/8, 2048, 128] causal", "bf16 [1, 32, 1→16384, 128] causal, none, head_dim_v 64"]
        );
        let line = ["--shape", "1,2,64,32", "--causal", "false,true", "--dtype", "f32,f16"];
        assert_eq!(
            names(&line, DeviceName::Wgpu),
            ["f32 [1, 2, 64, 32]", "f32 [1, 2, 64, 32] causal", "f16 [1, 2, 64, 32]", "f16 [1, 2, 64, 32] causal"]
        );
        assert_eq!(names(&["--shape", "1,2,64,32"], DeviceName::Wgpu), ["f32 [1, 2, 64, 32]"]);
        assert_eq!(parse(&["--shape", "1,2,64,32"]).unwrap().name(DeviceName::Wgpu), "shapes-wgpu");
    }

    #[test]
    fn what_is_no_shape_is_refused_with_the_form() {
        for (text, why) in [
            ("4,32,2048", "it has 3 parts, but must have 4"),
            ("4,32/8,2048,128,1", "it has 5 parts, but must have 4"),
            ("4,32/5,2048,128", "HEADS_Q is 32, which is not a multiple of HEADS_KV, 5"),
            ("4,32,2k,128", "SEQ_Q is \"2k\", which is not a whole number"),
            ("4,32,1x,128", "SEQ_K is \"\", which is not a whole number"),
            ("0,32,64,128", "BATCH is 0, but must be at least 1"),
            ("1,32,64,-1", "HEAD_DIM is \"-1\", which is not a whole number"),
        ] {
            let error = parse(&["--shape", text]).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("as in 4,32/8,2048,128"), "{error}");
        }
        // Options of sets cannot be combined with shapes.
        for other in [["--set", "tiny"], ["--head-dim", "64"], ["--variant", "none"]] {
            assert!(parse(&["--shape", "1,2,64,32", other[0], other[1]]).is_err(), "{other:?}");
        }
        for (filter, value, known) in [("--dtype", "f64", "f32, f16, bf16"), ("--causal", "maybe", "true, false")] {
            let error = parse(&["--shape", "1,2,64,32", filter, value]).unwrap_err().to_string();
            assert!(error.contains(filter) && error.contains(value) && error.contains(known), "{error}");
        }
        // Limits of attention itself.
        assert!(parse(&["--shape", "1,2,64,300"]).unwrap().cases(DeviceName::Wgpu).is_err());
    }
}
