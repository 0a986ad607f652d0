//! Generation of text.

use crate::config::{AttentionKind, Dtype};
use crate::error::Error;
use crate::flags::{count, non_negative, probability};
use crate::model::Gpt;
use crate::tokenizer::{Decoder, Tokenizer};
use burn_flash_attention::KvStorage;
use rand::Rng;
use rand::rngs::StdRng;
use rand_distr::Distribution;
use rand_distr::weighted::WeightedIndex;
use std::fmt::{Display, Formatter, Result as FmtResult};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Continues a text, or several at once.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The text to continue. Given several times, all texts are generated in one batch and printed at the end.
    #[arg(long, default_value = "")]
    pub prompt: Vec<String>,
    /// Number of texts for each prompt, all generated in one batch. Their seeds count up from --seed.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = count())]
    pub batch: usize,
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
    /// Number of tokens to generate for each text, if it does not end before.
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
    /// How flash attention caches keys and values: elements, in --dtype, or e4m3, in 8 bits.
    #[arg(long, default_value = "elements", value_parser = storage)]
    pub cache: KvStorage,
}

fn storage(name: &str) -> Result<KvStorage, &'static str> {
    match name {
        "elements" => Ok(KvStorage::Elements),
        "e4m3" => Ok(KvStorage::E4m3),
        _ => Err("it must be elements or e4m3"),
    }
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
        if self.temperature == 0.0 {
            let likelier = |best: usize, token| if logits[token] > logits[best] { token } else { best };
            return (0..logits.len()).reduce(likelier).unwrap_or(0) as u32;
        }
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        tokens.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
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

/// Generates texts with a model.
pub struct Writer<'a> {
    /// The model, without autodiff.
    pub model: &'a Gpt,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The model's context length in tokens.
    pub context: usize,
    /// How keys and values are cached.
    pub storage: KvStorage,
}

impl Writer<'_> {
    /// Continues each prompt by up to `count` tokens, drawn with the generator beside it, all prompts in one batch. Passes each text to `show`
    /// as it is generated, with the number of its prompt.
    ///
    /// The keys and values of all tokens read are cached, so that a new token costs one position. Positions are learned, so when the
    /// context of a text is full, the model reads the later half of it again as if it were the beginning. The cache then begins anew for
    /// all texts, and those with room read the same tokens as before: no text depends on the others.
    ///
    /// # Errors
    ///
    /// If the device failed, or if attention is not flash attention and the prompts have different lengths.
    pub fn write(
        &self,
        prompts: Vec<(&str, StdRng)>,
        count: usize,
        sampling: &Sampling,
        mut show: impl FnMut(usize, &str),
    ) -> Result<Written, Error> {
        let begun = Instant::now();
        let new = |(prompt, rng)| Continuation::new(prompt, rng, self.tokenizer, self.context);
        let mut texts: Vec<_> = prompts.into_iter().map(new).collect();
        let mut cache = self.model.cache(texts.len(), self.context, self.storage)?;
        let mut written = Written::default();
        for step in 0..count {
            if cache.is_full() {
                cache.clear();
                texts.iter_mut().for_each(|text| text.begin_anew(self.context));
            }
            let unread: Vec<_> = texts.iter().map(Continuation::unread).collect();
            let logits = self.model.next(&unread, &mut cache)?;
            let [_, vocabulary] = logits.dims();
            let logits = logits.try_into_data().map_err(|error| Error::device(&error))?;
            let logits: Vec<f32> = logits.iter().collect();
            for (index, (text, logits)) in texts.iter_mut().zip(logits.chunks(vocabulary)).enumerate() {
                // The weights may have more tokens than the tokenizer.
                if let Some(shown) = text.push(&logits[..self.tokenizer.vocabulary()], sampling) {
                    written.tokens += 1;
                    show(index, &shown);
                }
            }
            if step == 0 {
                (written.first_tokens, written.first) = (written.tokens, begun.elapsed());
            }
            if texts.iter().all(|text| text.has_ended) {
                break;
            }
        }
        written.decoding = begun.elapsed().saturating_sub(written.first);
        written.cache_bytes = cache.bytes();
        texts.into_iter().enumerate().for_each(|(index, text)| show(index, &text.decoder.finish()));
        Ok(written)
    }
}

/// A text that is generated.
struct Continuation {
    tokens: Vec<u32>,
    /// First token of the context.
    first: usize,
    /// First token that the model has not read.
    unread: usize,
    tokenizer: Tokenizer,
    decoder: Decoder,
    rng: StdRng,
    has_ended: bool,
}

impl Continuation {
    fn new(prompt: &str, rng: StdRng, tokenizer: Tokenizer, context: usize) -> Self {
        let mut tokens = tokenizer.encode(prompt);
        if tokens.is_empty() {
            tokens.push(tokenizer.start());
        }
        let first = tokens.len().saturating_sub(context);
        let decoder = Decoder::new(tokenizer);
        Self { tokens, first, unread: first, tokenizer, decoder, rng, has_ended: false }
    }

    fn unread(&self) -> &[u32] {
        &self.tokens[self.unread..]
    }

    /// Has the context read again, or the later half of it if it is full.
    fn begin_anew(&mut self, context: usize) {
        if self.tokens.len() - self.first > context {
            self.first = self.tokens.len() - context.div_ceil(2);
        }
        self.unread = self.first;
    }

    /// Draws the next token, given the logits after the last one. Returns the characters that it completes, or `None` if the text has ended.
    fn push(&mut self, logits: &[f32], sampling: &Sampling) -> Option<String> {
        self.unread = self.tokens.len();
        // A text that has ended repeats its last token unseen, while the rest of the batch goes on.
        let token = if self.has_ended { self.tokens[self.unread - 1] } else { sampling.draw(logits, &mut self.rng) };
        self.tokens.push(token);
        self.has_ended |= self.tokenizer.ends(token);
        (!self.has_ended).then(|| self.decoder.push(token))
    }
}

/// Measurements of a generation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// Number of tokens generated, of all texts.
    pub tokens: usize,
    /// Number of them that the reading of the prompts gave.
    pub first_tokens: usize,
    /// Time until the first token of every text.
    pub first: Duration,
    /// Time for the tokens after the first ones.
    pub decoding: Duration,
    /// Bytes of the keys and values.
    pub cache_bytes: usize,
}

impl Display for Written {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        let decoded = self.tokens - self.first_tokens;
        write!(f, "{} tokens", self.tokens)?;
        if self.first_tokens > 0 {
            write!(f, ", the first after {:.3} s", self.first.as_secs_f64())?;
        }
        if decoded > 0 {
            write!(f, ", then {:.1} tokens/s", decoded as f64 / self.decoding.as_secs_f64())?;
        }
        write!(f, ", cache {:.2} MiB", self.cache_bytes as f64 / f64::from(1 << 20))
    }
}

#[cfg(test)]
mod tests {
    use super::{Continuation, Sampling};
    use crate::tokenizer::Tokenizer;
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

    #[test]
    fn a_text_that_has_ended_repeats_its_end_unseen() {
        let likeliest = |token: u32| {
            let mut logits = vec![0.0; Tokenizer::Gpt2.vocabulary()];
            logits[token as usize] = 1.0;
            logits
        };
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let mut text = Continuation::new("Hello", StdRng::seed_from_u64(1), Tokenizer::Gpt2, 3);
        let (comma, end) = (11, Tokenizer::Gpt2.start());
        assert_eq!(text.unread(), [15496]);
        let shown: Vec<_> = [comma, end, comma, comma].map(|token| text.push(&likeliest(token), &greedy)).into();
        assert_eq!(shown, [Some(",".to_string()), None, None, None]);
        assert_eq!((text.has_ended, text.unread()), (true, &[end][..]));
        // Five tokens do not fit the context of three: its later half, two tokens, is read again.
        text.begin_anew(3);
        assert_eq!(text.unread(), [end, end]);
    }
}
