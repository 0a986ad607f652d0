//! What all charts share: numbers as text, scales, and panels put together with a legend.

use super::model::{Who, distinct};
use std::fmt::Write;

/// Width of a panel.
pub const WIDTH: f64 = 470.0;
/// Height of a panel's title.
pub const TITLE: f64 = 28.0;
/// Two panels stand beside each other, so far apart.
const GAP: f64 = 24.0;
/// Height of a line of the legend.
const LEGEND: f64 = 24.0;

/// Text inside an element or a quoted attribute.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Three significant digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => thousands(value.round() as u64),
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.9995 => format!("{value:.2}"),
        0.0 => "0".into(),
        size => format!("{value:.*}", (2.0 - size.log10().floor()).min(9.0) as usize),
    }
}

/// As [`number`], without zeros at the end: for ticks.
fn short(value: f64) -> String {
    let text = number(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

/// 16,384.
pub fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// 1.5 GiB.
pub fn bytes(value: f64) -> String {
    let unit = (0..4).rev().find(|unit| value >= 1024f64.powi(*unit)).unwrap_or(0);
    let scaled = short(value / 1024f64.powi(unit));
    format!("{scaled} {}", ["B", "KiB", "MiB", "GiB"][unit as usize])
}

/// 16k for 16,384.
pub fn length(value: usize) -> String {
    if value >= 1024 && value.is_multiple_of(1024) { format!("{}k", value / 1024) } else { value.to_string() }
}

/// How values lie on an axis, and how its ticks are named.
#[derive(Clone, Copy, PartialEq)]
pub enum Scale {
    /// From zero.
    Linear,
    /// From zero, with one for 100%.
    Percent,
    /// By factors of ten.
    Log,
    /// By factors of two, named as bytes.
    Bytes,
}

impl Scale {
    /// A tick's name.
    pub fn name(self, tick: f64) -> String {
        match self {
            Scale::Linear | Scale::Log => short(tick),
            Scale::Percent => format!("{}%", short(tick * 100.0)),
            Scale::Bytes => bytes(tick),
        }
    }

    /// An axis that holds all values; nothing where there are none.
    pub fn range(self, values: impl Iterator<Item = f64>) -> Option<Range> {
        let (low, high) = values
            .filter(|value| value.is_finite())
            .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        match self {
            _ if low > high || high <= 0.0 => None,
            Scale::Linear | Scale::Percent => Some(Range { scale: self, low: 0.0, high: high * 1.06 }),
            Scale::Log | Scale::Bytes => Some(Range { scale: self, low: low.max(1e-9) / 1.3, high: high * 1.3 }),
        }
    }
}

/// The values that an axis spans.
#[derive(Clone, Copy)]
pub struct Range {
    /// The axis.
    pub scale: Scale,
    /// Its least value.
    pub low: f64,
    /// Its greatest.
    pub high: f64,
}

impl Range {
    /// Where a value lies, from zero to one.
    pub fn at(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear | Scale::Percent => value / self.high,
            Scale::Log | Scale::Bytes => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    /// Round values, about five.
    pub fn ticks(&self) -> Vec<f64> {
        let inside = |values: Vec<f64>| values.into_iter().filter(|v| (self.low..=self.high).contains(v)).collect();
        match self.scale {
            Scale::Linear | Scale::Percent => {
                let power = 10f64.powf((self.high / 4.0).log10().floor());
                let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|n| n * power).into_iter().find(|s| self.high / s <= 5.5);
                let step = step.unwrap_or(self.high);
                inside((0..6).map(|n| n as f64 * step).collect())
            }
            Scale::Log => {
                let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
                let of = |digits: &[f64]| -> Vec<f64> {
                    inside(decades.clone().flat_map(|d| digits.iter().map(move |n| n * 10f64.powi(d))).collect())
                };
                [&[1.0, 2.0, 5.0][..], &[1.0, 3.0], &[1.0]]
                    .map(of)
                    .into_iter()
                    .find(|t| t.len() < 8)
                    .unwrap_or(of(&[1.0]))
            }
            Scale::Bytes => {
                let (low, high) = (self.low.log2().floor() as i32, self.high.log2().ceil() as i32);
                let step = ((high - low) as usize).div_ceil(8).max(1);
                inside((low..=high).step_by(step).map(|power| 2f64.powi(power)).collect())
            }
        }
    }
}

/// One chart of a figure, [`WIDTH`] wide.
pub struct Panel {
    /// Its elements.
    pub body: String,
    /// Its height.
    pub height: f64,
}

/// A panel's title.
pub fn title(text: &str) -> String {
    format!(r#"<text class="title" x="0" y="14">{}</text>"#, escape(text))
}

/// A finished chart.
pub struct Svg {
    /// Its class in the style sheet.
    pub class: &'static str,
    size: [f64; 2],
    body: String,
}

impl Svg {
    /// Part of a page.
    pub fn inline(&self) -> String {
        let Svg { class, size: [width, height], body } = self;
        let wide = if *width > WIDTH { " wide" } else { "" };
        format!(
            r#"<svg class="chart {class}{wide}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{body}</svg>"#
        )
    }

    /// A file of its own, with its title and background, since whoever shows it may have another.
    pub fn alone(&self, title: &str, below: &str, style: &str) -> String {
        let [width, height] = [self.size[0] + 48.0, self.size[1] + 84.0];
        let (body, title, below) = (&self.body, escape(title), escape(below));
        format!(
            r#"<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"><style>
{style}</style><rect class="paper" width="100%" height="100%"/><text class="title" x="24" y="32">{title}</text><text x="24" y="50">{below}</text><g transform="translate(24,60)">{body}</g></svg>
"#
        )
    }
}

/// Puts panels together, under one legend of everything that they show.
pub fn figure(class: &'static str, panels: &[Panel], legend: impl IntoIterator<Item = Who>) -> Svg {
    let width = if panels.len() > 1 { 2.0 * WIDTH + GAP } else { WIDTH };
    let mut body = String::new();
    let (mut x, mut y) = (0.0, 0.0);
    let legend = distinct(legend);
    for who in &legend {
        let advance = 44.0 + 7.0 * who.label.chars().count() as f64;
        if x + advance > width {
            (x, y) = (0.0, y + LEGEND);
        }
        let _ = write!(
            body,
            r#"<g class="legend {} dash{}" transform="translate({x},{y})"><path d="M0 8h22"/><circle cx="11" cy="8" r="3.5"/><text x="28" y="12">{}</text></g>"#,
            who.class,
            who.dash % 4,
            escape(&who.label)
        );
        x += advance;
    }
    if !legend.is_empty() {
        y += LEGEND + 6.0;
    }
    for row in panels.chunks(2) {
        for (panel, x) in row.iter().zip([0.0, WIDTH + GAP]) {
            let _ = write!(body, r#"<g transform="translate({x},{y})">{}</g>"#, panel.body);
        }
        y += row.iter().map(|panel| panel.height).fold(0.0, f64::max) + GAP;
    }
    Svg { class, size: [width, y - GAP], body }
}
