//! Comparison of results with the oracle.

use super::{Case, Results};
use cubecl::client::Client;
use cubecl::future::block_on;
use flash_attention_kernels::{Dtype, Kernel, Precision};
use flash_attention_reference::{self as reference, Comparison, Emulation, Judged, Operands};

impl Case {
    /// Runs on the device and compares with the oracle.
    pub fn check(&self, client: &Client) -> Results {
        block_on(self.check_async(client))
    }

    /// [`check`](Self::check), for a browser, which cannot block.
    pub async fn check_async(&self, client: &Client) -> Results {
        let results = self.run_async(client).await.unwrap_or_else(|error| panic!("{:?}: {error}", self.problem));
        self.judge(&results);
        results
    }

    /// Asserts that errors are within the bounds, and that the bounds are tight enough to notice faults.
    pub fn judge(&self, results: &Results) {
        self.judge_within(results, 1.0);
    }

    /// [`judge`](Self::judge) with rounding errors multiplied by `slack` in the bounds.
    pub fn judge_within(&self, results: &Results, slack: f64) {
        let expected = self.expected(results.forward.kernel());
        let [exact, emulated] = [&expected.exact, &expected.emulated].map(|of| &of.output.lse);
        let lse = judge_lse(self.problem.options.precision, &results.lse, exact, emulated, &self.product_rounding());
        lse.unwrap_or_else(|error| panic!("{error}{}", self.name(" in lse")));
        let tells = std::env::var("FLASH_TEST_VERDICTS").is_ok_and(|verdicts| verdicts == "1");
        for comparison in self.comparisons(results, &expected) {
            let verdict = comparison.binds_within(slack).unwrap_or_else(|unfit| panic!("{unfit}{}", self.name("")));
            if tells {
                println!("{verdict:?} of {}", comparison.name);
            }
        }
    }

    /// The oracle's results, and the emulated roundings of a kernel of this family.
    pub fn expected(&self, kernel: Kernel) -> reference::Expected {
        let (dtype, precision) = (self.problem.dtype, self.problem.options.precision);
        let operands = match kernel {
            Kernel::Portable | Kernel::Rows => Operands::F32,
            Kernel::Mma if dtype == Dtype::F32 && precision == Precision::Tf32 => Operands::Tf32,
            Kernel::Mma if dtype == Dtype::F32 => Operands::F32,
            Kernel::Hopper | Kernel::Mma | Kernel::Matrix => Operands::Inputs,
            other => panic!("the tests do not know the roundings of {other:?}"),
        };
        let emulation = Emulation { dtype, operands };
        let dlse = self.dlse.as_deref();
        reference::expected(&self.problem, &self.reference_inputs(), &self.dout, dlse, emulation)
    }

    /// The output and each requested gradient, with the oracle's and the emulated results.
    pub fn comparisons<'a>(&self, results: &'a Results, expected: &'a reference::Expected) -> Vec<Comparison<'a>> {
        let p = &self.problem;
        let [exact, emulated, spread] = [&expected.exact, &expected.emulated, &expected.spread];
        let o = |of: &'a reference::Attention| Some(&of.output.o);
        type Tensor<'a> = fn(&'a reference::Gradients) -> Option<&'a Vec<f64>>;
        let columns = |shape: Option<[usize; 4]>| shape.map_or(1, |shape| shape[3]);
        let gradients: [(&str, &Option<Vec<f64>>, usize, Tensor); 8] = [
            ("dq", &results.dq, p.head_dim, |of| Some(&of.dq)),
            ("dk", &results.dk, p.head_dim, |of| Some(&of.dk)),
            ("dv", &results.dv, p.head_dim_v, |of| Some(&of.dv)),
            ("dbias", &results.dbias, columns(p.bias), |of| of.dbias.as_ref()),
            ("dalibi_slopes", &results.dalibi_slopes, 1, |of| of.dalibi_slopes.as_ref()),
            ("dsinks", &results.dsinks, 1, |of| of.dsinks.as_ref()),
            ("dscore_tensors[0]", &results.dscore_tensors[0], columns(p.score_tensors[0]), |of| {
                of.dscore_tensors[0].as_ref()
            }),
            ("dscore_tensors[1]", &results.dscore_tensors[1], columns(p.score_tensors[1]), |of| {
                of.dscore_tensors[1].as_ref()
            }),
        ];
        let compare = |name, judged, row_len, computed, [exact, emulated, spread]: [Option<&'a Vec<f64>>; 3]| {
            let (exact, emulated) =
                (exact.expect("the oracle has this tensor"), emulated.expect("the emulation has this tensor"));
            let spread = spread.map(|spread| &spread[..]);
            Comparison { name, judged, dtype: p.dtype, row_len, computed, exact, emulated, spread }
        };
        let output = compare("o", Judged::Output, p.head_dim_v, &results.o, [exact, emulated, spread].map(o));
        let gradients = gradients.into_iter().filter_map(|(name, computed, row_len, of)| {
            let of = [exact, emulated, spread].map(|attention| of(&attention.gradients));
            Some(compare(name, Judged::Gradient, row_len, computed.as_ref()?, of))
        });
        std::iter::once(output).chain(gradients).collect()
    }

    /// Tolerance for identities that hold up to rounding: `in_f32`, or in half precision and tf32 eight roundings of a result.
    pub fn tolerance(&self, in_f32: f64) -> f64 {
        match (self.problem.dtype, self.problem.options.precision) {
            (Dtype::F32, Precision::Full) => in_f32,
            (dtype, precision) => 8.0 * tolerance(dtype, precision),
        }
    }

    /// Rounding error of each row's scores in f32: `2 ε softmax_scale ‖q‖ max ‖k‖`, `ε = 2⁻²⁴`. For sharp data it can exceed the tolerance
    /// for lse, which may be small where scores are large.
    fn product_rounding(&self) -> Vec<f64> {
        let p = &self.problem;
        let norms = |values: &[f64], dim: usize| {
            let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
            values.chunks(dim).map(norm).map(|norm| if norm.is_nan() { 0.0 } else { norm }).collect::<Vec<_>>()
        };
        let largest = norms(&self.tensors.k, p.head_dim).into_iter().fold(0.0, f64::max);
        let factor = 2.0 * 2f64.powi(-24) * f64::from(p.softmax_scale()) * largest;
        norms(&self.tensors.q, p.head_dim).into_iter().map(|norm| norm * factor).collect()
    }

    fn name(&self, what: &str) -> String {
        format!("{what} of {:?} with layouts {:?} and tiles {:?}", self.problem, self.layouts, self.tiles)
    }
}

/// Rounding error of one result, or of the factors that it is computed from.
fn tolerance(dtype: Dtype, precision: Precision) -> f64 {
    match (dtype, precision) {
        (Dtype::F32, Precision::Full) => 5e-6,
        // The factors of scores are rounded, whereas f16 inputs are exact.
        (Dtype::F32, Precision::Tf32) => 4e-3,
        (Dtype::F16, _) => 1e-3,
        (Dtype::BF16, _) => 8e-3,
        other => panic!("the tests do not know the roundings of {other:?}"),
    }
}

/// Checks lse, which is f32 for every dtype: `|got − want| ≤ max(1e-5 · (1 + |want|), rounding error of the products)`. With products in
/// tf32, twice the largest error of the emulation is added.
fn judge_lse(
    precision: Precision,
    got: &[f64],
    want: &[f64],
    emulated: &[f64],
    products: &[f64],
) -> Result<(), String> {
    assert_eq!(got.len(), want.len(), "length of lse");
    let error = |(x, y): (&f64, &f64)| if x == y { 0.0 } else { (x - y).abs() };
    let rounding = emulated.iter().zip(want).map(error).fold(0.0, f64::max);
    let rounding = if precision == Precision::Tf32 { 2.0 * rounding } else { 0.0 };
    let off = got.iter().zip(want).enumerate().find(|(row, (got, want))| {
        let fine = got == want || got.is_nan() && want.is_nan();
        !(fine || (*got - *want).abs() <= (1e-5 * (1.0 + want.abs())).max(products[*row]) + rounding)
    });
    off.map_or(Ok(()), |(row, (got, want))| Err(format!("row {row} is {got}, the oracle has {want}")))
}

/// Asserts `|got − want| ≤ tolerance · (1 + |want|)` for all elements. Infinities and NaN must be equal.
pub fn close(name: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}: length");
    for (n, (g, w)) in got.iter().zip(want).enumerate() {
        let fine = g == w || (g - w).abs() <= tolerance * (1.0 + w.abs()) || (g.is_nan() && w.is_nan());
        assert!(fine, "{name}: element {n} is {g}, the oracle has {w}");
    }
}

/// Asserts that two results agree in `o`, lse and the gradients of q, k, v and the bias. The tolerance of gradients is multiplied by
/// `times`.
pub fn same(name: &str, case: &Case, a: &Results, b: &Results, times: f64) {
    close(&format!("{name}: o"), &a.o, &b.o, case.tolerance(1e-5));
    // Two different kernels may have run, of which one has rounded products to tf32.
    let of_lse = if case.problem.options.precision == Precision::Tf32 { case.tolerance(1e-4) } else { 1e-4 };
    close(&format!("{name}: lse"), &a.lse, &b.lse, of_lse);
    let of = |results: &Results| [&results.dq, &results.dk, &results.dv, &results.dbias].map(|of| of.clone());
    for ((of_a, of_b), gradient) in of(a).into_iter().zip(of(b)).zip(["dq", "dk", "dv", "dbias"]) {
        assert_eq!(of_a.is_some(), of_b.is_some());
        let tolerance = times * case.tolerance(2e-5);
        close(&format!("{name}: {gradient}"), &of_a.unwrap_or_default(), &of_b.unwrap_or_default(), tolerance);
    }
}
