//! The benchmark as a program of its own, for machines that have no Rust.

fn main() {
    attention_bench::main();
}
