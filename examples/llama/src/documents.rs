//! Documents packed into rows of one length, which do not see each other.

use crate::error::Error;
use crate::loss::Targets;
use crate::text::Text;
use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flash_attention::FlashAttentionOptions;
use serde::Deserialize;
use std::fs;
use std::path::Path;

/// A line of a JSONL file.
#[derive(Deserialize)]
struct Line {
    text: String,
}

/// Reads a file: JSONL, each line an object with a `text`, or else one document. Returns the tokens of each document, with `eos` at the
/// end.
///
/// # Errors
///
/// [`Error::Io`], and [`Error::Damaged`] with the number of the line.
pub fn read(path: &Path, text: &Text, eos: Option<u32>) -> Result<Vec<Vec<u32>>, Error> {
    let content = fs::read_to_string(path).map_err(Error::io(path))?;
    let is_jsonl = path.extension().is_some_and(|extension| extension == "jsonl");
    let document = |(nth, line): (usize, &str)| match serde_json::from_str::<Line>(line) {
        Ok(line) => Ok(line.text),
        Err(error) => Err(Error::damaged(path, "JSONL file")(format!("line {}: {error}", nth + 1))),
    };
    let documents = match is_jsonl {
        true => content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(document).collect(),
        false => Ok(vec![content]),
    };
    let encode = |document: String| Ok(text.encode(&document, true)?.into_iter().chain(eos).collect());
    documents?.into_iter().map(encode).collect()
}

/// A row of documents, one behind the other, filled up with padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Tokens of the documents.
    pub tokens: Vec<u32>,
    /// Where each document begins.
    pub starts: Vec<usize>,
}

/// Packs documents into rows of at most `context` tokens: 2 or more. What does not fit a row goes on in the next one, where it begins
/// with the last token of the row, so that each token but the first of a document is predicted once.
pub fn pack(documents: &[Vec<u32>], context: usize) -> Vec<Row> {
    let mut rows = vec![Row::default()];
    for document in documents {
        let mut rest = document.as_slice();
        while rest.len() > 1 {
            let mut room = context - rows[rows.len() - 1].tokens.len();
            if room < 2 {
                rows.push(Row::default());
                room = context;
            }
            let last = rows.len() - 1;
            let row = &mut rows[last];
            let count = rest.len().min(room);
            row.starts.push(row.tokens.len());
            row.tokens.extend(&rest[..count]);
            rest = &rest[count - 1..];
        }
    }
    rows.retain(|row| !row.tokens.is_empty());
    rows
}

/// Rows on a device.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[batch, context]`
    pub tokens: Tensor<2, Int>,
    /// The next tokens, except the first one of each document.
    pub targets: Targets,
    /// `[sequences + 1]`: where documents begin, and the end of the last one.
    pub cu_seqlens: Tensor<1, Int>,
}

impl Batch {
    /// Options with which documents do not see each other.
    pub fn options(&self) -> FlashAttentionOptions {
        let ends = self.cu_seqlens.clone();
        FlashAttentionOptions::new().with_cu_seqlens_q(ends.clone()).with_cu_seqlens_k(ends)
    }
}

/// Makes batches of rows of this length.
#[derive(Clone, Copy, Debug)]
pub struct RowBatcher {
    /// Length of a row.
    pub context: usize,
}

impl Batcher<Row, Batch> for RowBatcher {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        let (context, size) = (self.context, rows.len() * self.context);
        let (mut tokens, mut next, mut weights) = (vec![0; size], vec![0; size], vec![0f32; size]);
        let mut ends = Vec::new();
        for (nth, row) in rows.iter().enumerate() {
            let first = nth * context;
            ends.extend(row.starts.iter().map(|start| (first + start) as i32));
            // Padding is a sequence of its own.
            ends.extend((row.tokens.len() < context).then_some((first + row.tokens.len()) as i32));
            for (at, token) in row.tokens.iter().enumerate() {
                tokens[first + at] = *token as i32;
                if at > 0 && !row.starts.contains(&at) {
                    next[first + at - 1] = *token as i32;
                    weights[first + at - 1] = 1.0;
                }
            }
        }
        ends.push(size as i32);
        let count = weights.iter().map(|weight| f64::from(*weight)).sum();
        let shape = [rows.len(), context];
        let integers = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, shape), device);
        Batch {
            tokens: integers(tokens),
            targets: Targets {
                tokens: integers(next),
                weights: Tensor::from_data(TensorData::new(weights, shape), (device, DType::F32)),
                count,
            },
            cu_seqlens: Tensor::from_data(ends.as_slice(), device),
        }
    }
}
