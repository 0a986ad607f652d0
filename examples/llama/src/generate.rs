//! Generation of texts, all of a batch at once, over a cache of keys and values.

use crate::error::Error;
use crate::sample::Sampling;
use burn::tensor::{Tensor, TensorData};
use burn_flash_attention::{AttentionError, FlashAttentionOptions, FlashDecoder, FlashDecoderCache, RotaryEmbedding};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// What texts are generated.
#[derive(Clone, Debug)]
pub struct Generation {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Seed of the first prompt. Seeds of the others count up from it.
    pub seed: u64,
    /// Largest number of new tokens of a text.
    pub max_tokens: usize,
    /// Tokens that end a text. They are no part of it.
    pub eos: Vec<u32>,
}

impl Generation {
    /// Continues the prompts, which may have different lengths, with a model without autodiff. Calls `emit` with the number of the
    /// prompt and the token as soon as there is one. Returns the new tokens of each prompt.
    ///
    /// # Errors
    ///
    /// [`Error::Flag`] if there is no prompt or an empty one, or texts may become longer than the model's positions; [`Error::Attention`];
    /// [`Error::Execution`] if the device fails; errors of `emit`.
    pub fn run(
        &self,
        model: &FlashDecoder,
        prompts: &[Vec<u32>],
        mut emit: impl FnMut(usize, u32) -> Result<(), Error>,
    ) -> Result<Vec<Vec<u32>>, Error> {
        if prompts.iter().map(Vec::len).min().unwrap_or(0) == 0 {
            let why = "a prompt must have at least one token".to_string();
            return Err(Error::Flag { flag: "prompt", value: "empty".to_string(), why });
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let rotaries = model.layers.iter().filter_map(|layer| layer.attention.rotary.as_ref());
        if let Some(max) =
            rotaries.map(RotaryEmbedding::max_positions).min().filter(|max| longest + self.max_tokens > *max)
        {
            let why = format!("the model has {max} positions, of which the longest prompt takes {longest}");
            return Err(Error::Flag { flag: "max-tokens", value: self.max_tokens.to_string(), why });
        }
        let mut cache = model.new_cache(prompts.len(), longest + self.max_tokens)?;
        let mut rngs: Vec<_> =
            (0..prompts.len() as u64).map(|nth| StdRng::seed_from_u64(self.seed.wrapping_add(nth))).collect();
        let mut texts = vec![Vec::new(); prompts.len()];
        let mut ended = vec![false; prompts.len()];
        let mut logits = prefill(model, prompts, &mut cache)?;
        for step in 1..=self.max_tokens {
            let rows = read(logits)?;
            let mut next = Vec::new();
            for (row, rng) in rngs.iter_mut().enumerate() {
                let token = self.sampling.draw(&rows[row], rng)?;
                next.push(token as i32);
                ended[row] |= self.eos.contains(&token);
                if !ended[row] {
                    texts[row].push(token);
                    emit(row, token)?;
                }
            }
            if step == self.max_tokens || ended.iter().all(|ended| *ended) {
                break;
            }
            // Texts that have ended go on unseen until all have.
            let tokens = Tensor::from_data(TensorData::new(next, [prompts.len(), 1]), &model.embedding.weight.device());
            logits = model.try_forward_step(tokens, &mut cache, &FlashAttentionOptions::new())?;
        }
        Ok(texts)
    }
}

/// Logits after the last token of each prompt, `[batch, 1, vocab_size]`. Those of the other tokens are not computed: the head is the
/// largest product of many models.
fn prefill(
    model: &FlashDecoder,
    prompts: &[Vec<u32>],
    cache: &mut FlashDecoderCache,
) -> Result<Tensor<3>, AttentionError> {
    let device = model.embedding.weight.device();
    let lens: Vec<_> = prompts.iter().map(Vec::len).collect();
    let longest = lens.iter().copied().max().unwrap_or(0);
    let mut options = FlashAttentionOptions::new();
    if lens.iter().any(|len| *len != longest) {
        let lens: Vec<_> = lens.iter().map(|len| *len as i32).collect();
        options = options.with_seq_lens_q(Tensor::from_data(lens.as_slice(), &device));
    }
    let padded = prompts.iter().flat_map(|prompt| {
        let padding = std::iter::repeat_n(0, longest - prompt.len());
        prompt.iter().map(|token| *token as i32).chain(padding)
    });
    let tokens = TensorData::new(padded.collect(), [prompts.len(), longest]);
    let hidden = model.try_hidden_step(Tensor::from_data(tokens, &device), &mut cache.layers, &options)?;
    let last = lens.iter().enumerate().map(|(row, len)| hidden.clone().narrow(0, row, 1).narrow(1, len - 1, 1));
    Ok(model.logits(Tensor::cat(last.collect(), 0)))
}

/// Logits `[batch, 1, vocab_size]` as rows on the host.
fn read(logits: Tensor<3>) -> Result<Vec<Vec<f32>>, Error> {
    let vocab_size = logits.dims()[2];
    let values: Vec<f32> = logits.try_into_data().map_err(Error::execution)?.iter().collect();
    Ok(values.chunks(vocab_size).map(<[f32]>::to_vec).collect())
}
