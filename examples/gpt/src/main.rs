//! `cargo run --release -p gpt` trains a GPT with flash attention and shows that it learns.

fn main() -> std::process::ExitCode {
    gpt::main()
}
