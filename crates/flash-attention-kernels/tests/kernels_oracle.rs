//! The portable kernels against the f64 oracle, straight on CubeCL.

mod common;

use common::*;
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype};

#[test]
fn plain() {
    let Some(client) = client() else { return };
    println!("{:?}", flash_attention_kernels::tiling::Device::of(&client));
    let t = std::time::Instant::now();
    let case = Case::new([1, 2, 1, 65, 70, 40, 24], Dtype::F32, AttentionOptions::default());
    println!("{:?}", t.elapsed());
    case.check(&client);
    println!("{:?}", t.elapsed());
    let options = AttentionOptions { causal: true, alignment: Alignment::TopLeft, ..Default::default() };
    Case::new([1, 2, 1, 130, 150, 33, 24], Dtype::F32, options).check(&client);
    println!("{:?}", t.elapsed());
}
