//! Charts with horizontal bars.

use super::chart::{self, Area, Axis, Chart, Drawn, FOOT, HEAD, INK, SOFT, Scale, TEXT, bold, colour, plain, width};
use super::model::Who;
use super::numbers::number;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Height of a row.
const ROW: u32 = 21;

/// A bar.
pub struct Bar {
    /// Whose bar it is.
    pub who: Who,
    /// Its length, or the reason why it has none.
    pub value: Result<f64, String>,
    /// Single measurements whose median is the bar, with descriptions.
    pub points: Vec<(f64, String)>,
}

/// A row of a chart.
pub enum Row {
    /// What the bars below have in common.
    Heading(String),
    Bar(Bar),
}

/// One of several charts that share an axis.
pub struct Plot {
    /// Title.
    pub title: String,
    pub rows: Vec<Row>,
}

impl Plot {
    fn bars(&self) -> impl Iterator<Item = &Bar> {
        self.rows.iter().filter_map(|row| if let Row::Bar(bar) = row { Some(bar) } else { None })
    }

    fn texts(&self) -> impl Iterator<Item = String> {
        let of = |(value, of): &(f64, String)| format!("{} for {of}", number(*value));
        self.bars().filter_map(move |bar| chart::text(&self.title, &bar.who, bar.points.iter().map(of)))
    }

    /// Axis of rows from the top, the same number in each chart, with the names of bars.
    fn rows_axis(&self, rows: usize) -> Axis {
        let name = |(n, row): (usize, &Row)| match row {
            Row::Heading(_) => None,
            Row::Bar(bar) => Some((n as f64 + 0.5, bar.who.label.clone())),
        };
        let names = self.rows.iter().enumerate().filter_map(name).collect();
        Axis { label: "", scale: Scale::Linear, range: rows as f64..0.0, names }
    }
}

/// Charts next to each other; `None` if no bar has a value.
pub fn chart(class: &'static str, label: &'static str, scale: Scale, plots: Vec<Plot>) -> Option<Chart> {
    let bars = || plots.iter().flat_map(Plot::bars);
    let values = bars().flat_map(|bar| bar.value.iter().copied().chain(bar.points.iter().map(|point| point.0)));
    let mut x_axis = Axis::holding(values, label, scale)?;
    if scale == Scale::Log {
        // Bars start at a round value, which has a tick.
        x_axis.range.start = 0.99 * 10f64.powf(x_axis.range.start.log10().floor());
    }
    let left = 16 + bars().map(|bar| width(&bar.who.label, TEXT)).max().unwrap_or(0);
    let rows = plots.iter().map(|plot| plot.rows.len()).max().unwrap_or(0);
    let (panels, height) = (plots.len(), HEAD + ROW * rows as u32 + FOOT);
    let values = plots.iter().flat_map(Plot::texts).collect();
    let draw = Box::new(move |n: usize, area: &Area| draw(&plots[n], left, [&x_axis, &plots[n].rows_axis(rows)], area));
    Some(Chart { class, values, legend: Vec::new(), panels, height, draw })
}

fn draw(plot: &Plot, left: u32, axes: [&Axis; 2], area: &Area) -> Drawn {
    // The value is printed next to the bar.
    let chart = chart::panel(area, &plot.title, [left, 56], axes)?;
    let (plotted, low) = (chart.plotting_area(), axes[0].range.start);
    let say = |at: (f64, f64), shift: i32, text: &str, style: TextStyle<'static>| {
        let text = Text::new(text.to_string(), (shift, 0), style.pos(Pos::new(HPos::Left, VPos::Center)));
        plotted.draw(&(EmptyElement::at(at) + text))
    };
    for (n, row) in plot.rows.iter().enumerate() {
        let y = n as f64 + 0.5;
        match row {
            Row::Heading(text) => say((low, y), -(left as i32), text, bold(TEXT))?,
            Row::Bar(Bar { value: Err(reason), .. }) => say((low, y), 6, &format!("– {reason}"), plain(SOFT))?,
            Row::Bar(Bar { who, value: Ok(value), points }) => {
                // Other kernels of an implementation are paler.
                let fill = colour(who.class).mix([0.8, 0.5, 0.35, 0.25][who.dash % 4]).filled();
                plotted.draw(&Rectangle::new([(low, y - 0.35), (*value, y + 0.35)], fill))?;
                for (value, _) in points {
                    plotted.draw(&Circle::new((*value, y), 3, INK.mix(0.7)))?;
                }
                let end = points.iter().map(|point| point.0).fold(*value, f64::max);
                say((end, y), 8, &number(*value), plain(INK))?;
            }
        }
    }
    Ok(())
}
