//! A text classifier whose encoder is burn-nn's ([`padded`]), moved to flash attention on packed sequences ([`packed`]). [`data`] makes batches of
//! texts, [`train`] trains either, and [`compare`] measures both.

pub mod compare;
pub mod data;
pub mod packed;
pub mod padded;
pub mod train;
