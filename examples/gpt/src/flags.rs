//! Flags given on the command line, as opposed to those that were not given. The others get defaults that depend on the device, the weights
//! or the run.

use clap::builder::RangedU64ValueParser;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};
use std::marker::PhantomData;

/// The given flags of `T`, a struct with a value for each flag. No flag is required.
///
/// ```
/// use clap::{Args, Command, FromArgMatches};
/// use gpt::flags::Given;
///
/// #[derive(Args)]
/// struct Size {
///     #[arg(long)]
///     layers: usize,
///     #[arg(long)]
///     heads: usize,
/// }
///
/// let matches = Given::<Size>::augment_args(Command::new("gpt")).get_matches_from(["gpt", "--heads", "3"]);
/// let given = Given::<Size>::from_arg_matches(&matches).unwrap();
/// let size = given.over(Size { layers: 6, heads: 6 });
/// assert_eq!((size.layers, size.heads), (6, 3));
/// assert!(given.has("heads") && !given.has("layers"));
/// ```
#[derive(Clone, Debug)]
pub struct Given<T>(ArgMatches, PhantomData<T>);

impl<T: clap::Args> Given<T> {
    /// Whether the flag of this field was given.
    pub fn has(&self, field: &str) -> bool {
        self.0.value_source(field) == Some(ValueSource::CommandLine)
    }

    /// Replaces those of the values whose flags were given.
    pub fn over(&self, mut values: T) -> T {
        values.update_from_arg_matches(&self.0).expect("each value was parsed already, and none is required");
        values
    }
}

impl<T: clap::Args> clap::Args for Given<T> {
    fn augment_args(command: Command) -> Command {
        T::augment_args_for_update(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        T::augment_args_for_update(command)
    }
}

impl<T: clap::Args> FromArgMatches for Given<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(matches.clone(), PhantomData))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0 = matches.clone();
        Ok(())
    }
}

/// A number of at least 1.
pub fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// A number of at least 0 and below 1.
///
/// # Errors
///
/// For any other text. The message completes clap's, which begins with the flag's name.
pub fn fraction(text: &str) -> Result<f64, String> {
    number(text, |value| (0.0..1.0).contains(&value), "it must be from 0 to below 1")
}

/// A finite number, 0 or above.
///
/// # Errors
///
/// For any other text.
pub fn non_negative(text: &str) -> Result<f64, String> {
    number(text, |value| value >= 0.0, "it must be a finite number, 0 or above")
}

/// A finite number above 0.
///
/// # Errors
///
/// For any other text.
pub fn positive(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0, "it must be a finite number above 0")
}

/// A probability above 0.
///
/// # Errors
///
/// For any other text.
pub fn probability(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value <= 1.0, "it must be above 0 and at most 1")
}

fn number(text: &str, holds: fn(f64) -> bool, rule: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if value.is_finite() && holds(value) { Ok(value) } else { Err(rule.to_string()) }
}
