//! SVG charts, drawn by plotters: panels next to each other, below a heading and a legend.

use super::model::Who;
use super::numbers::{bytes, short};
use crate::error::Error;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use std::error::Error as StdError;
use std::ops::Range;

/// Drawing area of a panel.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// Result of drawing.
pub type Drawn = Result<(), Box<dyn StdError>>;
/// Draws one panel of a chart.
pub type Draw = Box<dyn Fn(usize, &Area) -> Drawn>;

pub const INK: RGBColor = RGBColor(27, 36, 48);
pub const SOFT: RGBColor = RGBColor(91, 102, 117);
pub const RULE: RGBColor = RGBColor(223, 227, 232);

/// Font sizes.
pub const TITLE: u32 = 14;
pub const TEXT: u32 = 12;
/// Distance between lines of text.
const LINE: u32 = 20;
/// Width of a panel.
const WIDTH: u32 = 494;
const MARGIN: u32 = 20;

/// A chart of one quantity.
pub struct Chart {
    /// View of the page in which it is shown.
    pub class: &'static str,
    /// Its single measurements, as text.
    pub values: Vec<String>,
    /// Entries of the legend.
    pub legend: Vec<Who>,
    /// Number of panels.
    pub panels: usize,
    /// Height of a panel.
    pub height: u32,
    pub draw: Draw,
}

impl Chart {
    /// The chart below its heading, on a white background, because the page around it may have another one.
    pub fn svg(&self, heading: &[String]) -> Result<String, Error> {
        self.drawn(heading).map_err(|error| Error::Other(format!("a chart cannot be drawn: {error}")))
    }

    fn drawn(&self, heading: &[String]) -> Result<String, Box<dyn StdError>> {
        let (rows, columns) = (self.panels.div_ceil(2), self.panels.min(2));
        let size = |line: usize| if line == 0 { TITLE } else { TEXT };
        let longest = heading.iter().enumerate().map(|(line, text)| width(text, size(line))).max().unwrap_or(0);
        let inner = longest.max(columns as u32 * WIDTH);
        let (mut x, mut y) = (0, heading.len() as u32 * LINE + 4);
        let mut places = Vec::new();
        for who in &self.legend {
            let advance = 48 + width(&who.label, TEXT);
            if x + advance > inner {
                (x, y) = (0, y + LINE);
            }
            places.push((x as i32, y as i32));
            x += advance;
        }
        let top = if self.legend.is_empty() { y } else { y + LINE + 4 };
        let height = top + rows as u32 * self.height;

        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (inner + 2 * MARGIN, height + 2 * MARGIN)).into_drawing_area();
            root.fill(&WHITE)?;
            let area = root.margin(MARGIN, MARGIN, MARGIN, MARGIN);
            for (line, text) in heading.iter().enumerate() {
                let style = if line == 0 { bold(TITLE) } else { plain(SOFT) };
                area.draw_text(text, &style, (0, line as i32 * LINE as i32))?;
            }
            for (who, (x, y)) in self.legend.iter().zip(places) {
                area.draw(&stroke(vec![(x, y + 7), (x + 22, y + 7)], who))?;
                area.draw(&Circle::new((x + 11, y + 7), 4, colour(who.class).filled()))?;
                area.draw_text(&who.label, &plain(INK), (x + 28, y + 2))?;
            }
            let (_, below) = area.split_vertically(top);
            for (n, area) in below.split_evenly((rows, columns)).iter().enumerate().take(self.panels) {
                (self.draw)(n, area)?;
            }
            root.present()?;
        }
        Ok(svg)
    }
}

/// Draws a chart with its axes, below the panel's title and between margins of these widths. An axis with names has no grid.
pub fn panel<'a, 'b>(
    area: &Area<'b>,
    title: &str,
    [left, right]: [u32; 2],
    [x, y]: [&Axis; 2],
) -> Result<ChartContext<'a, SVGBackend<'b>, Cartesian2d<Axis, Axis>>, Box<dyn StdError>> {
    area.draw_text(title, &bold(TITLE), (0, 6))?;
    let mut builder = ChartBuilder::on(area);
    builder.margin_top(HEAD).margin_right(right).x_label_area_size(FOOT).y_label_area_size(left);
    let mut chart = builder.build_cartesian_2d(x.clone(), y.clone())?;
    let mut mesh = chart.configure_mesh();
    mesh.axis_style(SOFT).bold_line_style(RULE).light_line_style(TRANSPARENT).label_style(plain(SOFT));
    mesh.set_all_tick_mark_size(4).x_labels(6).y_labels(7).x_desc(x.label).y_desc(y.label);
    if !x.names.is_empty() {
        mesh.disable_x_mesh();
    }
    if !y.names.is_empty() {
        mesh.disable_y_mesh();
    }
    mesh.draw()?;
    Ok(chart)
}

/// Height above and below a chart in its panel.
pub const HEAD: u32 = 46;
pub const FOOT: u32 = 44;

/// The measurements of a line or bar as text, if there are any.
pub fn text(title: &str, who: &Who, points: impl Iterator<Item = String>) -> Option<String> {
    let points: Vec<String> = points.collect();
    (!points.is_empty()).then(|| format!("{title}, {}: {}", who.label, points.join("; ")))
}

/// Bold text.
pub fn bold(size: u32) -> TextStyle<'static> {
    font(size, FontStyle::Bold, INK)
}

/// Text of the normal size.
pub fn plain(colour: RGBColor) -> TextStyle<'static> {
    font(TEXT, FontStyle::Normal, colour)
}

fn font(size: u32, style: FontStyle, colour: RGBColor) -> TextStyle<'static> {
    // The backend divides by this factor again.
    FontDesc::new(FontFamily::SansSerif, 1.24 * f64::from(size), style).color(&colour)
}

/// Approximate width of a text. The backend knows no fonts, and readers have different ones, so a wide font is assumed.
pub fn width(text: &str, size: u32) -> u32 {
    text.chars().count() as u32 * size * 6 / 10
}

/// Colour of an implementation.
pub fn colour(class: &str) -> RGBColor {
    match class {
        "ours" => RGBColor(209, 73, 11),
        "ours-fast" => RGBColor(143, 29, 63),
        "ours-tf32" => RGBColor(240, 138, 75),
        "burn" => RGBColor(184, 131, 0),
        "composed" => RGBColor(128, 137, 149),
        "cudnn" | "l2" => RGBColor(26, 143, 95),
        "flash2" | "dram" => RGBColor(23, 105, 196),
        "flash2-deterministic" => RGBColor(12, 61, 120),
        "memeff" => RGBColor(58, 165, 216),
        "flex" => RGBColor(180, 71, 155),
        "model" | "copy" => INK,
        _ => RGBColor(107, 95, 201),
    }
}

/// A line in its colour; dashed if it is not the first of its implementation.
pub fn stroke<DB: DrawingBackend, C: Clone + 'static>(points: Vec<C>, who: &Who) -> DynElement<'static, DB, C> {
    let style = colour(who.class).stroke_width(2);
    match [(0, 0), (6, 4), (2, 3), (10, 4)][who.dash % 4] {
        (0, _) => PathElement::new(points, style).into_dyn(),
        (dash, gap) => DashedPathElement::new(points, dash, gap, style).into_dyn(),
    }
}

/// Scale of an axis, and format of its ticks.
#[derive(Clone, Copy, PartialEq)]
pub enum Scale {
    /// Linear, from zero.
    Linear,
    /// Logarithmic.
    Log,
    /// Logarithmic to base two, formatted as bytes.
    Bytes,
}

/// An axis.
#[derive(Clone)]
pub struct Axis {
    pub label: &'static str,
    pub scale: Scale,
    pub range: Range<f64>,
    /// Ticks with their names, if ticks are not at round values.
    pub names: Vec<(f64, String)>,
}

impl Axis {
    /// An axis that contains all values; `None` if there are none.
    pub fn holding(values: impl Iterator<Item = f64>, label: &'static str, scale: Scale) -> Option<Self> {
        let (low, high) = values
            .filter(|value| value.is_finite())
            .fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let range = match scale {
            Scale::Linear => 0.0..high * 1.06,
            Scale::Log | Scale::Bytes => low.max(1e-9) / 1.3..high * 1.3,
        };
        (low <= high && high > 0.0).then_some(Axis { label, scale, range, names: Vec::new() })
    }

    fn linear(&self) -> Option<RangedCoordf64> {
        (self.scale == Scale::Linear).then(|| self.range.clone().into())
    }

    fn logarithmic(&self) -> LogCoord<f64> {
        let wide = self.scale == Scale::Log && self.range.end > 1000.0 * self.range.start;
        self.range.clone().log_scale().base(if wide { 10.0 } else { 2.0 }).into()
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        match self.linear() {
            Some(axis) => axis.map(value, limit),
            None => self.logarithmic().map(&value.max(self.range.start), limit),
        }
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match self.linear() {
            _ if !self.names.is_empty() => self.names.iter().map(|(at, _)| *at).collect(),
            Some(axis) => axis.key_points(hint),
            None => self.logarithmic().key_points(hint),
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        match (self.names.iter().find(|(at, _)| at == value), self.scale) {
            (Some((_, name)), _) => name.clone(),
            (None, Scale::Linear | Scale::Log) => short(*value),
            (None, Scale::Bytes) => bytes(*value),
        }
    }
}
