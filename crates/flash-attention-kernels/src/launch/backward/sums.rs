//! Gradients that Hopper's kernels sum next to `dq` or `dk`: which launch computes which sums, and the launches that fold them.

#[cfg(feature = "cuda")]
use super::Backward;
use super::{Gradients, Results};
use crate::error::{AttentionError, Result};
use crate::fragment::Role;
#[cfg(feature = "cuda")]
use crate::launch::Launch;
use crate::portable::dbias::Sums;
use crate::problem::AttentionProblem;
use crate::score::{Factor, Factors};
use crate::tensor::TensorView;
use crate::tiling::{self, BackwardTiles, BiasGradient, Gradient};
#[cfg(feature = "cuda")]
use cubecl::ir::{ElemType, FloatKind};

/// A requested gradient of a tensor that is added to scores or that `score_mod` reads, in four dimensions.
pub(super) struct ScoreGradient {
    /// Name of the gradient's tiles.
    pub option: &'static str,
    pub view: TensorView,
    pub sums: Sums,
    /// The kernel, if the tiles have one.
    pub kernel: Option<BiasGradient>,
    pub factor: Factor,
}

impl Gradients {
    /// Requested gradients of bias, slopes and tensors of `score_mod`.
    pub(super) fn of_pairs(&self, tiles: &BackwardTiles, problem: &AttentionProblem) -> Vec<ScoreGradient> {
        let [score_a, score_b] = &self.dscore_tensors;
        let [kernel_a, kernel_b] = tiles.dscore_tensors;
        let slopes = self.dalibi_slopes.as_ref().map(|view| (view.widened(), Sums::Rows));
        let of = |view: &Option<TensorView>| {
            view.as_ref().map(|view| (view.clone(), tiling::bias_sums(&view.shape, problem)))
        };
        let all = [
            ("tiles.dbias", of(&self.dbias), Some(tiles.dbias), Factor::One),
            ("tiles.dalibi_slopes", slopes, tiles.dalibi_slopes, Factor::Slope),
            ("tiles.dscore_tensors", of(score_a), kernel_a, Factor::A),
            ("tiles.dscore_tensors", of(score_b), kernel_b, Factor::B),
        ];
        let found = all.into_iter().filter_map(|(option, view, kernel, factor)| {
            view.map(|(view, sums)| ScoreGradient { option, view, sums, kernel, factor })
        });
        found.collect()
    }

    /// The results of each launch, with its kernel. One kernel computes `dq`, `dk` and `dv`, if there is one, and if it can compute the
    /// sums that two kernels would.
    pub(super) fn launches(
        &self,
        tiles: &BackwardTiles,
        problem: &AttentionProblem,
        of_scores: &[ScoreGradient],
    ) -> Vec<(Results<'_>, Gradient)> {
        let mut alone = Vec::new();
        let mut carried = Vec::new();
        for of in of_scores {
            match of.kernel {
                Some(BiasGradient::Sums { keys, alone: true }) => alone.push((of, keys)),
                Some(BiasGradient::Sums { keys, alone: false }) => carried.push((of, keys)),
                _ => {}
            }
        }
        let mut launches = self.several(tiles);
        if let Some((mut results, kernel)) = self.fused(tiles) {
            results.sums = carried.iter().fold(results.sums, |sums, (of, _)| sums.with(of.factor));
            if carried.iter().all(|(of, _)| of.takes(true))
                && tiling::hopper::carries(problem, kernel, Role::All, results.sums)
            {
                carried.clear();
                launches = vec![(results, kernel)];
            }
        }
        for (of, keys) in carried {
            let carries = |results: &Results| results.role().accumulates() && results.role().is_transposed() == keys;
            match launches.iter_mut().find(|(results, _)| carries(results)) {
                Some((results, _)) => results.sums = results.sums.with(of.factor),
                None => alone.push((of, keys)),
            }
        }
        for keys in [false, true] {
            let of_side = alone.iter().filter(|(_, of_keys)| *of_keys == keys);
            let sums = of_side.fold(Factors::default(), |sums, (of, _)| sums.with(of.factor));
            if !sums.is_empty() {
                let kernel = if keys { tiles.dkdv } else { tiles.dq };
                launches.push((Results { sums, sums_of_keys: keys, ..Default::default() }, kernel));
            }
        }
        launches
    }
}

impl ScoreGradient {
    /// Whether a kernel can sum over the columns of its rows, which may be `keys`.
    fn takes(&self, keys: bool) -> bool {
        tiling::takes_sums(self.sums, &self.view.shape, keys)
    }

    /// Checks that the kernel can compute the gradient. `tiles` are those of the other gradients.
    pub(super) fn check(&self, tiles: &BackwardTiles, problem: &AttentionProblem) -> Result<()> {
        let refused = |value, why| AttentionError::Unsupported { option: self.option, value, why };
        match self.kernel {
            None => return Err(refused("none".into(), "the requested gradient needs this kernel")),
            Some(kernel @ BiasGradient::Sums { keys, alone }) => {
                let (of, role) = tiling::hopper::of_sums(tiles, keys);
                let sums = Factors::default().with(self.factor);
                let possible = matches!(of, Gradient::Hopper(_)) && self.takes(keys);
                if !possible || !alone && !tiling::hopper::carries(problem, of, role, sums) {
                    let why = "only Hopper's kernels sum gradients, only over a dimension that the tensor is broadcast over, \
                               and those of functions that do more than add only with shared memory for their arguments";
                    return Err(refused(format!("{kernel:?}"), why));
                }
            }
            Some(_) => {}
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl<'a> Backward<'a> {
    /// The sums of a launch, `[number of sums · B, H, S, 1]`, of queries or of `keys`.
    pub(in crate::launch) fn sums(&self, sums: Factors, keys: bool) -> Option<TensorView> {
        let p = self.call.problem;
        let scratch = self.scratch.bias_sums.as_ref().filter(|_| !sums.is_empty())?;
        let length = if keys { p.seq_k } else { p.seq_q };
        Some(TensorView::contiguous(scratch.handle.clone(), [sums.len() * p.batch, p.num_heads_q, length, 1]))
    }

    /// The launches that fold the sums of a launch, in scratch, to the gradients.
    pub(super) fn folds(&self, results: &Results, all: &[ScoreGradient]) -> Result<Vec<Launch<'a>>> {
        let p = self.call.problem;
        let keys = results.role().is_transposed();
        let Some(sums) = self.sums(results.sums, keys) else { return Ok(Vec::new()) };
        let shape = [p.batch, p.num_heads_q, sums.shape[2]];
        let folds = results.sums.all().enumerate().map(|(nth, factor)| {
            let of = all.iter().find(|of| of.factor == factor).expect("a sum belongs to a requested gradient");
            let bytes = nth * size_of::<f32>() * shape.iter().product::<usize>();
            let partial = TensorView::contiguous(sums.handle.clone().offset_start(bytes as u64), shape);
            let f32 = ElemType::Float(FloatKind::F32);
            let dtype = if factor == Factor::One { self.call.dtype() } else { f32 };
            let along = if of.sums == Sums::Columns { 3 } else { 2 };
            self.fold(partial, of.view.clone(), along, dtype)
        });
        folds.collect()
    }
}
