//! `cargo bench -p attention-bench`.

fn main() {
    attention_bench::main();
}
