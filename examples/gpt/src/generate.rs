//! Generation of text.

use crate::config::{AttentionKind, Dtype};
use crate::error::Error;
use crate::flags::{count, non_negative, probability};
use crate::model::{Cache, Gpt};
use crate::tokenizer::{Decoder, Tokenizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::Rng;
use rand::rngs::StdRng;
use rand_distr::Distribution;
use rand_distr::weighted::WeightedIndex;
use std::path::PathBuf;

/// Continues a text.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The text to continue.
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// GPT-2's weights, a safetensors file in Hugging Face's layout [default: the best model of a run].
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    pub weights: Option<PathBuf>,
    /// The run whose best model generates [default: the latest run].
    #[arg(long)]
    pub name: Option<String>,
    /// Tokenizer [default: gpt2].
    #[arg(long, requires = "weights")]
    pub tokenizer: Option<Tokenizer>,
    /// Number of attention heads, if heads do not have 64 channels and no config.json next to the weights gives it.
    #[arg(long, requires = "weights", value_parser = count())]
    pub heads: Option<usize>,
    /// Number of tokens to generate, if the text does not end before.
    #[arg(long, default_value_t = 200)]
    pub tokens: usize,
    #[command(flatten)]
    pub sampling: Sampling,
    /// Random seed; the same seed gives the same text.
    #[arg(long, default_value_t = 1337)]
    pub seed: u64,
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Implementation of attention.
    #[arg(long, default_value = "flash")]
    pub attention: AttentionKind,
    /// Element type of matrix products and attention.
    #[arg(long, default_value = "f32")]
    pub dtype: Dtype,
}

/// Sampling of the next token from the model's prediction.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Sampling {
    /// Temperature: below 1, likely tokens become more likely; 0 always takes the most likely one.
    #[arg(long, default_value_t = 0.8, value_parser = non_negative)]
    pub temperature: f64,
    /// Sample from the K most likely tokens only.
    #[arg(long, value_name = "K", value_parser = count())]
    pub top_k: Option<usize>,
    /// Sample only from the most likely tokens that together have this probability (Holtzman et al., arXiv:1904.09751, section 3.1).
    #[arg(long, value_name = "P", value_parser = probability)]
    pub top_p: Option<f64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: None, top_p: None }
    }
}

impl Sampling {
    /// Samples a token, given the logits of all tokens.
    pub fn draw(&self, logits: &[f32], rng: &mut impl Rng) -> u32 {
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        tokens.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        if self.temperature == 0.0 {
            return tokens[0] as u32;
        }
        tokens.truncate(self.top_k.unwrap_or(usize::MAX));
        let highest = f64::from(logits[tokens[0]]);
        let weight = |token: &usize| ((f64::from(logits[*token]) - highest) / self.temperature).exp();
        let mut weights: Vec<f64> = tokens.iter().map(weight).collect();
        if let Some(top_p) = self.top_p {
            let enough = top_p * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            let few = |weight: &&f64| {
                sum += **weight;
                sum - **weight < enough
            };
            weights.truncate(weights.iter().take_while(few).count());
        }
        let index = WeightedIndex::new(&weights).map_or(0, |index| index.sample(rng));
        tokens[index] as u32
    }
}

/// Generates text with a model.
pub struct Writer<'a> {
    /// The model, without autodiff.
    pub model: &'a Gpt,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The model's context length in tokens.
    pub context: usize,
    /// The model's device.
    pub device: &'a Device,
}

impl Writer<'_> {
    /// Continues `prompt` by up to `count` tokens and passes the text to `show` as it is generated. Returns the number of tokens generated.
    ///
    /// The keys and values of all tokens read are cached, so that a new token costs one position. Positions are learned, so when the
    /// context is full, the model reads the later half of it again as if it were the beginning.
    ///
    /// # Errors
    ///
    /// If the device failed.
    pub fn write(
        &self,
        prompt: &str,
        count: usize,
        sampling: &Sampling,
        rng: &mut StdRng,
        mut show: impl FnMut(&str),
    ) -> Result<usize, Error> {
        let mut text = self.tokenizer.encode(prompt);
        if text.is_empty() {
            text.push(self.tokenizer.start());
        }
        let mut decoder = Decoder::new(self.tokenizer);
        let mut cache = Cache::default();
        for written in 0..count {
            let new = if cache.len() == self.context || cache.is_empty() {
                cache = Cache::default();
                let room = if written == 0 { self.context } else { self.context.div_ceil(2) };
                &text[text.len().saturating_sub(room)..]
            } else {
                &text[text.len() - 1..]
            };
            let data = TensorData::new(new.iter().map(|token| *token as i32).collect(), [1, new.len()]);
            let logits = self.model.next(Tensor::<2, Int>::from_data(data, self.device), &mut cache);
            let logits = logits.try_into_data().map_err(|error| Error::device(&error))?;
            // The weights may have more tokens than the tokenizer.
            let logits: Vec<f32> = logits.iter::<f32>().take(self.tokenizer.vocabulary()).collect();
            let token = sampling.draw(&logits, rng);
            if self.tokenizer.ends(token) {
                show(&decoder.finish());
                return Ok(written);
            }
            text.push(token);
            show(&decoder.push(token));
        }
        show(&decoder.finish());
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::Sampling;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    /// How often each of four tokens is drawn in 10,000 draws.
    fn drawn(sampling: Sampling) -> [usize; 4] {
        let logits = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
        let rng = &mut StdRng::seed_from_u64(3);
        let mut counts = [0; 4];
        (0..10_000).for_each(|_| counts[sampling.draw(&logits, rng) as usize] += 1);
        counts
    }

    fn close(counts: [usize; 4], expected: [f64; 4]) {
        for (count, expected) in counts.into_iter().zip(expected) {
            assert!((count as f64 - 10_000.0 * expected).abs() < 200.0, "{counts:?}");
            assert!(expected > 0.0 || count == 0, "{counts:?}");
        }
    }

    #[test]
    fn tokens_come_as_often_as_they_should() {
        let plain = Sampling { temperature: 1.0, top_k: None, top_p: None };
        close(drawn(plain), [0.1, 0.4, 0.2, 0.3]);
        close(drawn(Sampling { temperature: 0.0, ..plain }), [0.0, 1.0, 0.0, 0.0]);
        // Probabilities squared and normalized again.
        close(drawn(Sampling { temperature: 0.5, ..plain }), [1.0 / 30.0, 16.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0]);
        close(drawn(Sampling { top_k: Some(2), ..plain }), [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        // The two most likely tokens have 0.7, which is less than requested.
        close(drawn(Sampling { top_p: Some(0.75), ..plain }), [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
        close(drawn(Sampling { top_p: Some(1.0), ..plain }), [0.1, 0.4, 0.2, 0.3]);
        close(drawn(Sampling { top_k: Some(3), top_p: Some(0.4), ..plain }), [0.0, 1.0, 0.0, 0.0]);
    }
}
