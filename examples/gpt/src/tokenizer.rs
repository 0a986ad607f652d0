//! Tokenizers: a token is a byte, or one of GPT-2's pieces of words.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::str;
use tiktoken_rs::{Rank, r50k_base_singleton};

/// Conversion of text to tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Tokenizer {
    /// Each byte is a token.
    Bytes,
    /// GPT-2's byte pair encoding.
    Gpt2,
}

/// GPT-2's `<|endoftext|>`, which separates documents; the last of its vocabulary.
const END_OF_TEXT: Rank = 50256;

impl Tokenizer {
    /// Number of different tokens.
    pub fn vocabulary(self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::Gpt2 => END_OF_TEXT as usize + 1,
        }
    }

    /// Tokens of a text. Special tokens in it are treated as plain text.
    pub fn encode(self, text: &str) -> Vec<u32> {
        match self {
            Tokenizer::Bytes => text.bytes().map(u32::from).collect(),
            Tokenizer::Gpt2 => r50k_base_singleton().encode_ordinary(text),
        }
    }

    /// Token that precedes a text without a prompt.
    pub fn start(self) -> u32 {
        match self {
            Tokenizer::Bytes => u32::from(b'\n'),
            Tokenizer::Gpt2 => END_OF_TEXT,
        }
    }

    /// Whether this token ends a text.
    pub fn ends(self, token: u32) -> bool {
        self == Tokenizer::Gpt2 && token == END_OF_TEXT
    }

    /// Name of a token, for messages.
    pub fn unit(self) -> &'static str {
        match self {
            Tokenizer::Bytes => "byte",
            Tokenizer::Gpt2 => "token",
        }
    }

    /// Bytes of a token, which may be parts of characters; empty if there is no such token.
    fn bytes(self, token: u32) -> Vec<u8> {
        match self {
            Tokenizer::Bytes => u8::try_from(token).into_iter().collect(),
            Tokenizer::Gpt2 => r50k_base_singleton().decode_bytes(&[token]).unwrap_or_default(),
        }
    }
}

/// Decodes tokens to text one by one. Holds back bytes until they form a whole character.
pub struct Decoder {
    tokenizer: Tokenizer,
    pending: Vec<u8>,
}

impl Decoder {
    /// A decoder at the beginning of a text.
    pub fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new() }
    }

    /// Characters that this token completes. Invalid bytes become U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        self.pending.extend(self.tokenizer.bytes(token));
        let rest = self.pending.split_off(self.pending.len() - unfinished(&self.pending));
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending = rest;
        text
    }

    /// The rest of the text.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Number of bytes at the end that begin a character.
fn unfinished(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    str::from_utf8(last).err().filter(|error| error.error_len().is_none()).map_or(0, |_| last.len())
}

#[cfg(test)]
mod tests {
    use super::{Decoder, Tokenizer};

    #[test]
    fn text_comes_back_in_whole_characters() {
        let text = "naïve 日本語 🦀, and <|endoftext|> is text";
        for tokenizer in [Tokenizer::Bytes, Tokenizer::Gpt2] {
            let mut decoder = Decoder::new(tokenizer);
            let tokens = tokenizer.encode(text);
            assert!(tokens.iter().all(|token| (*token as usize) < tokenizer.vocabulary() && !tokenizer.ends(*token)));
            let parts: Vec<_> = tokens.into_iter().map(|token| decoder.push(token)).collect();
            assert!(parts.iter().all(|part| !part.contains('\u{fffd}')), "{parts:?}");
            assert_eq!(parts.concat() + &decoder.finish(), text);
        }
    }

    #[test]
    fn bytes_that_are_no_text_hold_nothing_back() {
        let mut decoder = Decoder::new(Tokenizer::Bytes);
        let parts = [0xff, 0xe6, 0x97, 0x61, 0xe6].map(|byte| decoder.push(byte));
        assert_eq!(parts, ["\u{fffd}", "", "", "\u{fffd}a", ""]);
        assert_eq!(decoder.finish(), "\u{fffd}");
    }

    /// Token numbers as produced by tiktoken and by Hugging Face's tokenizers.
    #[test]
    fn gpt2_tokens_are_gpt2s() {
        assert_eq!(Tokenizer::Gpt2.encode("Hello, I'm a language model,"), [15496, 11, 314, 1101, 257, 3303, 2746, 11]);
        assert_eq!(Tokenizer::Gpt2.encode(""), Vec::<u32>::new());
    }
}
