//! A case as one line of `key=value`: all that decides it, so that the line alone gives the same inputs, bit by bit.

use std::fmt;
use std::str::FromStr;

/// The keys, in the order in which they are written. What is absent has its default, given here where it is not "none".
///
/// Patterns of dimensions are like `b1qk`: of batch, heads, queries and keys those that are not broadcast.
pub const KEYS: [(&str, &str); 47] = [
    ("dtype", "f32"),
    ("precision", "full, or tf32"),
    ("b", "1"),
    ("hq", "1: heads of queries"),
    ("hk", "as hq: heads of keys and values"),
    ("sq", "1: queries"),
    ("sk", "1: keys"),
    ("d", "16: head_dim"),
    ("dv", "as d: head_dim_v"),
    ("causal", "1"),
    ("align", "bottom, or top"),
    ("left", "window_left"),
    ("right", "window_right"),
    ("softcap", ""),
    ("scale", "softmax_scale"),
    ("dropout", "its probability"),
    ("dropout_seed", "tensor, or number: where the seed is"),
    ("score_mod", "alibi, bent, relative, sloped or softcap"),
    ("score_a", "pattern of its first tensor"),
    ("score_b", "pattern of its second one"),
    ("mask_mod", "causal, dilated, document, prefix, sliding or strided"),
    ("mask_a", "pattern of its first tensor"),
    ("mask_b", "pattern of its second one"),
    ("mask", "pattern"),
    ("mask_storage", "u32, or u8"),
    ("mask_data", "some, most, one, all or none: how many keys it hides"),
    ("mask_layout", "contiguous"),
    ("bias", "pattern"),
    ("bias_data", "normal, large or infinite"),
    ("bias_layout", "contiguous"),
    ("slopes", "1, or b: pattern of the batches"),
    ("sinks", "1"),
    ("dlse", "1"),
    ("lens_q", "lengths, one a batch; of others all"),
    ("lens_k", "likewise"),
    ("cu_q", "where sequences begin and end; at most as many as there are queries"),
    ("cu_k", "likewise"),
    ("padding", "normal, or nan: what is behind the lengths"),
    ("blocks", "pattern of batch and heads of a block mask, like 1h"),
    ("block_size", "128,128: of queries and keys"),
    ("order", "fixed, or fast"),
    ("grads", "qkvbast: which gradients are asked for"),
    ("layouts", "of q, k, v, dout: contiguous, heads, transposed, padded:N, rows, scalar"),
    ("offsets", "of q, k, v, dout, mask, bias, results: elements in front of them"),
    ("sharp", "1: what q and k are multiplied by"),
    ("poison", "nan, or huge: what is in outputs"),
    ("seed", "0: of the data"),
];

/// A case as text, its keys in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Line(Vec<(&'static str, String)>);

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.0.iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&pairs.join(" "))
    }
}

impl FromStr for Line {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut line = Line::default();
        for pair in text.split_whitespace() {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair} is no key=value"))?;
            let (key, _) = KEYS.iter().find(|known| known.0 == key).ok_or_else(|| format!("{key} is no key"))?;
            if line.text(key).is_some() {
                return Err(format!("{key} stands there twice"));
            }
            line.set(key, value);
        }
        Ok(line)
    }
}

impl Line {
    pub fn text(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|pair| pair.0 == key).map(|pair| &*pair.1)
    }

    pub fn set(&mut self, key: &str, value: impl fmt::Display) {
        let place = |key: &str| KEYS.iter().position(|known| known.0 == key);
        let nth = place(key).unwrap_or_else(|| panic!("{key} is no key"));
        self.unset(key);
        let at = self.0.iter().position(|pair| place(pair.0) > Some(nth)).unwrap_or(self.0.len());
        self.0.insert(at, (KEYS[nth].0, value.to_string()));
    }

    pub fn unset(&mut self, key: &str) {
        self.0.retain(|pair| pair.0 != key);
    }

    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|pair| pair.0)
    }

    pub fn parsed<T: FromStr>(&self, key: &str) -> Result<Option<T>, String> {
        self.text(key).map(|text| text.parse().map_err(|_| format!("{key}={text} does not parse"))).transpose()
    }

    pub fn number(&self, key: &str, default: usize) -> Result<usize, String> {
        Ok(self.parsed(key)?.unwrap_or(default))
    }

    pub fn numbers(&self, key: &str) -> Result<Option<Vec<usize>>, String> {
        let all = |text: &str| text.split(',').map(|n| n.parse().map_err(|_| format!("{key}: {n}"))).collect();
        self.text(key).map(all).transpose()
    }

    /// The choice whose name the value is, or the first one.
    pub fn choice<T: Copy>(&self, key: &str, of: &[(&str, T)]) -> Result<T, String> {
        let Some(text) = self.text(key) else { return Ok(of[0].1) };
        of.iter().find(|(name, _)| *name == text).map(|(_, choice)| *choice).ok_or_else(|| format!("{key}={text}"))
    }

    /// A list of so many, where it is there, and else all of them this.
    pub fn list<T, const N: usize>(
        &self,
        key: &str,
        default: &str,
        of: fn(&str) -> Option<T>,
    ) -> Result<[T; N], String> {
        let texts: Vec<&str> = self.text(key).map_or(vec![default; N], |text| text.split(',').collect());
        let all: Option<Vec<T>> = texts.into_iter().map(of).collect();
        all.and_then(|all| all.try_into().ok()).ok_or_else(|| format!("{key} is of {N}"))
    }
}

/// The keys, for whoever asks.
pub fn help() -> String {
    let keys = KEYS.iter().map(|(key, about)| format!("  {key:<14}{about}\n"));
    format!(
        "Keys of a line, with what they stand for and what is taken where they are absent:\n{}",
        keys.collect::<String>()
    )
}
