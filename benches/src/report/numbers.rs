//! Formatting of numbers.

/// Formats with three significant digits.
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

/// [`number`] without trailing zeros, for ticks.
pub fn short(value: f64) -> String {
    let text = number(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

/// Formats as in 16,384.
pub fn thousands(value: u64) -> String {
    if value < 1000 { value.to_string() } else { format!("{},{:03}", thousands(value / 1000), value % 1000) }
}

/// Formats as in 1.5 GiB.
pub fn bytes(value: f64) -> String {
    let unit = (0..4).rev().find(|unit| value >= 1024f64.powi(*unit)).unwrap_or(0);
    let scaled = short(value / 1024f64.powi(unit));
    format!("{scaled} {}", ["B", "KiB", "MiB", "GiB"][unit as usize])
}

/// Formats 16,384 as 16k.
pub fn length(value: usize) -> String {
    if value >= 1024 && value.is_multiple_of(1024) { format!("{}k", value / 1024) } else { value.to_string() }
}
