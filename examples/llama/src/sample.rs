//! Sampling of a token from logits, on the host.

use crate::error::Error;
use rand::Rng;
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use std::cmp::Ordering;

/// How the next token is chosen.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Sampling {
    /// Temperature: below 1, likely tokens become more likely; 0 takes the most likely one.
    #[arg(long, default_value_t = 0.8, value_parser = number(0.0, f64::INFINITY, "at least 0"))]
    pub temperature: f64,
    /// Sample from the K most likely tokens only.
    #[arg(long, value_name = "K")]
    pub top_k: Option<std::num::NonZeroUsize>,
    /// Sample from the fewest tokens that together have this probability (arXiv:1904.09751, section 3.1).
    #[arg(long, value_name = "P", value_parser = number(f64::MIN_POSITIVE, 1.0, "above 0 and at most 1"))]
    pub top_p: Option<f64>,
}

/// Parser of a number in a range, for clap.
fn number(least: f64, most: f64, what: &'static str) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync {
    move |text| match text.parse::<f64>() {
        Ok(value) if value.is_finite() && (least..=most).contains(&value) => Ok(value),
        _ => Err(format!("it must be {what}")),
    }
}

impl Sampling {
    /// Draws a token, given the logits of all tokens. Of equal logits, that of the first token counts as higher.
    ///
    /// # Errors
    ///
    /// [`Error::Execution`] if no logit is finite or one is NaN.
    pub fn draw(&self, logits: &[f32], rng: &mut impl Rng) -> Result<u32, Error> {
        let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        let best = tokens.iter().copied().min_by(order).filter(|best| logits[*best as usize].is_finite());
        let Some(best) = best.filter(|_| !logits.iter().any(|logit| logit.is_nan())) else {
            return Err(Error::execution("the model's logits are not finite"));
        };
        if self.temperature == 0.0 {
            return Ok(best);
        }
        if let Some(k) = self.top_k.map(|k| k.get()).filter(|k| *k < tokens.len()) {
            tokens.select_nth_unstable_by(k - 1, order);
            tokens.truncate(k);
        }
        let highest = f64::from(logits[best as usize]);
        let weight = |token: &u32| ((f64::from(logits[*token as usize]) - highest) / self.temperature).exp();
        if let Some(top_p) = self.top_p {
            tokens.sort_unstable_by(order);
            let enough = top_p * tokens.iter().map(weight).sum::<f64>();
            let mut sum = 0.0;
            let taken = tokens.iter().take_while(|token| {
                let before = sum;
                sum += weight(token);
                before.total_cmp(&enough) == Ordering::Less
            });
            let count = taken.count();
            tokens.truncate(count);
        }
        // The best token has weight 1, so that there is one.
        let chosen = WeightedIndex::new(tokens.iter().map(weight)).map_err(Error::execution)?;
        Ok(tokens[chosen.sample(rng)])
    }
}
