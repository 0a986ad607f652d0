//! The benchmark as a standalone program, for machines without Rust.

fn main() {
    attention_bench::main();
}
