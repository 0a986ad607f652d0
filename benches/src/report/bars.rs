//! Horizontal bars in groups.

use super::model::Who;
use super::svg::{self, Panel, Range, Scale, Svg, TITLE, WIDTH, escape};
use std::fmt::Write;

const RIGHT: f64 = WIDTH - 66.0;
const ROW: f64 = 21.0;
const HEADING: f64 = 26.0;

/// A bar.
pub struct Bar {
    /// Whose.
    pub who: Who,
    /// Its length.
    pub value: Option<f64>,
    /// Why there is no value, or what is said when the bar is pointed at.
    pub title: String,
    /// Single measurements, where the bar is their median, and what each is.
    pub points: Vec<(f64, String)>,
}

/// One chart of several that share their axis.
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// Bars that belong together, under a heading.
    pub groups: Vec<(String, Vec<Bar>)>,
}

/// Charts beside each other; nothing where no bar has a value.
pub fn draw(class: &'static str, label: &str, scale: Scale, plots: &[Plot]) -> Option<Svg> {
    let bars = || plots.iter().flat_map(|plot| plot.groups.iter().flat_map(|(_, bars)| bars));
    let values = bars().flat_map(|bar| bar.value.into_iter().chain(bar.points.iter().map(|point| point.0)));
    let mut range = scale.range(values)?;
    if scale == Scale::Log {
        // Bars start from a round value.
        range.low = 10f64.powf(range.low.log10().floor());
    }
    let longest = bars().map(|bar| bar.who.label.chars().count()).max().unwrap_or(0);
    let left = 16.0 + 6.8 * longest as f64;
    let panels: Vec<Panel> = plots.iter().map(|plot| panel(plot, label, &range, left)).collect();
    Some(svg::figure(class, &panels, []))
}

fn panel(plot: &Plot, label: &str, range: &Range, left: f64) -> Panel {
    let x_of = |value: f64| left + range.at(value) * (RIGHT - left);
    let (mut body, mut marks) = (svg::title(&plot.title), String::new());
    let mut y = TITLE;
    for (heading, bars) in &plot.groups {
        if !heading.is_empty() {
            let _ = write!(marks, r#"<text class="heading" x="0" y="{:.1}">{}</text>"#, y + 19.0, escape(heading));
            y += HEADING;
        }
        for bar in bars {
            marks += &row(bar, y, left, x_of);
            y += ROW;
        }
    }
    for tick in range.ticks() {
        let x = x_of(tick);
        let _ = write!(body, r#"<path class="grid" d="M{x:.1} {TITLE}V{y:.1}"/>"#);
        let name = range.scale.name(tick);
        let _ = write!(body, r#"<text class="middle" x="{x:.1}" y="{:.1}">{name}</text>"#, y + 15.0);
    }
    let middle = (left + RIGHT) / 2.0;
    let _ = write!(body, r#"<text class="middle" x="{middle}" y="{:.1}">{}</text>"#, y + 32.0, escape(label));
    Panel { body: body + &marks, height: y + 36.0 }
}

fn row(bar: &Bar, y: f64, left: f64, x_of: impl Fn(f64) -> f64) -> String {
    let (class, text, title) = (bar.who.class, y + 14.0, escape(&bar.title));
    let mut row = format!(r#"<text class="end" x="{}" y="{text:.1}">{}</text>"#, left - 8.0, escape(&bar.who.label));
    let Some(value) = bar.value else {
        let _ = write!(row, r#"<text class="none" x="{}" y="{text:.1}">– {title}</text>"#, left + 6.0);
        return row;
    };
    let width = x_of(value) - left;
    let _ = write!(
        row,
        r#"<g class="bar {class} dash{}"><rect x="{left}" y="{:.1}" width="{width:.1}" height="{}" rx="2"><title>{title}</title></rect>"#,
        bar.who.dash % 4,
        y + 3.0,
        ROW - 6.0
    );
    let mut end = x_of(value);
    for (value, name) in &bar.points {
        let (x, name) = (x_of(*value), escape(name));
        end = end.max(x + 4.0);
        let _ = write!(row, r#"<circle cx="{x:.1}" cy="{:.1}" r="2.5"><title>{name}</title></circle>"#, y + ROW / 2.0);
    }
    let _ = write!(row, r#"</g><text class="value" x="{:.1}" y="{text:.1}">{}</text>"#, end + 6.0, svg::number(value));
    row
}
