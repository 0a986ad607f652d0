//! A case as one line of `key=value`. The line alone reproduces the inputs bit by bit.

use std::fmt;
use std::str::FromStr;

/// The keys in the order in which they are written, each with its default (unless it is "none") and its meaning.
///
/// A pattern is like `b1qk`: the letters of the dimensions batch, heads, queries and keys that are not broadcast, and 1 for the others.
pub const KEYS: [(&str, &str); 51] = [
    ("dtype", "f32"),
    ("precision", "full, or tf32"),
    ("b", "1"),
    ("hq", "1: heads of q"),
    ("hk", "as hq: heads of k and v"),
    ("sq", "1: queries"),
    ("sk", "1: keys"),
    ("d", "16: head_dim"),
    ("dv", "as d: head_dim_v"),
    ("causal", "1"),
    ("align", "bottom, or top"),
    ("continued", "1: functions receive the position of a query among the keys"),
    ("left", "window_left"),
    ("right", "window_right"),
    ("softcap", ""),
    ("scale", "softmax_scale"),
    ("dropout", "probability"),
    ("dropout_seed", "tensor, or number: where the seed is given"),
    ("score_mod", "alibi, bent, relative, sloped or softcap"),
    ("score_a", "pattern of the function's first tensor"),
    ("score_b", "pattern of the function's second tensor"),
    ("mask_mod", "causal, dilated, document, prefix, sliding or strided"),
    ("mask_a", "pattern of the function's first tensor"),
    ("mask_b", "pattern of the function's second tensor"),
    ("mask", "pattern"),
    ("mask_storage", "u32, or u8"),
    ("mask_data", "some, most, one, all or none: hidden keys; one leaves one key visible"),
    ("mask_layout", "contiguous"),
    ("bias", "pattern"),
    ("bias_data", "normal, large or infinite"),
    ("bias_layout", "contiguous"),
    ("slopes", "1, or b: pattern of the batch dimension"),
    ("sinks", "1"),
    ("dlse", "1"),
    ("lens_q", "length of each batch's queries; batches without one have all"),
    ("lens_k", "length of each batch's keys"),
    ("cu_q", "cumulative lengths of packed queries"),
    ("cu_k", "cumulative lengths of packed keys"),
    ("padding", "normal, or nan: values after the lengths"),
    ("blocks", "block mask: pattern of its batch, or packed sequences, and heads, like 1h"),
    ("block_size", "128,128: queries and keys of a block"),
    ("page", "positions of a page: keys and values of the forward are in pages"),
    ("storage", "elements, or e4m3: how pages are stored"),
    ("order", "fixed; turns: additions to dq in order; or fast"),
    ("splits", "1: splits of a group's query heads, where dq, dk and dv have one kernel"),
    ("grads", "qkvbast: requested gradients"),
    ("layouts", "of q, k, v, dout: contiguous, heads, transposed, padded:N, rows, scalar"),
    ("offsets", "of q, k, v, dout, mask, bias, results, in elements"),
    ("sharp", "1: factor of q and k"),
    ("poison", "nan, or huge: initial content of outputs"),
    ("seed", "0: seed of the data"),
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
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair} must be KEY=VALUE"))?;
            let (key, _) = KEYS
                .iter()
                .find(|known| known.0 == key)
                .ok_or_else(|| format!("{key} is not a key of a line; --help lists them"))?;
            if line.text(key).is_some() {
                return Err(format!("{key} is given twice"));
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
        let nth = place(key).unwrap_or_else(|| panic!("{key} is not a key of a line; --help lists them"));
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
        self.text(key).map(|text| text.parse().map_err(|_| format!("{key}={text} cannot be parsed"))).transpose()
    }

    pub fn number(&self, key: &str, default: usize) -> Result<usize, String> {
        Ok(self.parsed(key)?.unwrap_or(default))
    }

    pub fn numbers(&self, key: &str) -> Result<Option<Vec<usize>>, String> {
        let all = |text: &str| {
            text.split(',')
                .map(|n| n.parse().map_err(|_| format!("{key} has {n:?}, which is not a whole number")))
                .collect()
        };
        self.text(key).map(all).transpose()
    }

    /// The choice that the value names. Without the key, the first one.
    pub fn choice<T: Copy>(&self, key: &str, of: &[(&str, T)]) -> Result<T, String> {
        let Some(text) = self.text(key) else { return Ok(of[0].1) };
        of.iter()
            .find(|(name, _)| *name == text)
            .map(|(_, choice)| *choice)
            .ok_or_else(|| format!("{key}={text} is not one of its values"))
    }

    /// The list of `N` values. Without the key, `N` times the default.
    pub fn list<T, const N: usize>(
        &self,
        key: &str,
        default: &str,
        of: fn(&str) -> Option<T>,
    ) -> Result<[T; N], String> {
        let texts: Vec<&str> = self.text(key).map_or(vec![default; N], |text| text.split(',').collect());
        let all: Option<Vec<T>> = texts.into_iter().map(of).collect();
        all.and_then(|all| all.try_into().ok()).ok_or_else(|| format!("{key} must be a list of {N} values"))
    }
}

/// The keys, for `--help`.
pub fn help() -> String {
    let keys = KEYS.iter().map(|(key, about)| format!("  {key:<14}{about}\n"));
    format!("Keys of a line, with their defaults and meanings:\n{}", keys.collect::<String>())
}
