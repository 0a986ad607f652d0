//! Runs PTX programs and returns their faults.
#![allow(dead_code)]

use software_cuda::machine::written::Written;
use software_cuda::machine::{Launch, Ranges, Settings};
use software_cuda::{Error, Kind, Module};
use std::sync::Arc;

pub const HEAD: &str = ".version 8.7\n.target sm_90a\n.address_size 64\n";

/// Parameters of a kernel: addresses and tensor maps.
#[derive(Default)]
#[repr(align(128))]
pub struct Parameters(pub Vec<u8>);

/// Runs `body` with pointers to these buffers. Accesses outside of them are faults.
pub fn run(body: &str, blocks: u32, threads: u32, buffers: &mut [&mut [u32]], seed: u64) -> Result<(), Error> {
    let names: Vec<_> = (0..buffers.len()).map(|nth| format!(".param .u64 p{nth}")).collect();
    let text = format!(
        "{HEAD}.extern .shared .align 1024 .b8 memory[];\n.visible .entry main({}) {{\n{body}\nret;\n}}",
        names.join(", ")
    );
    let addresses = buffers.iter().flat_map(|buffer| (buffer.as_ptr() as u64).to_le_bytes()).collect();
    let pieces = buffers.iter().map(|buffer| {
        let range = buffer.as_ptr_range();
        (range.start as u64, range.end as u64, None)
    });
    launch(&text, blocks, threads, addresses, pieces.collect(), seed)
}

pub fn launch(
    text: &str,
    blocks: u32,
    threads: u32,
    parameters: Vec<u8>,
    pieces: Vec<(u64, u64, Option<Arc<Written>>)>,
    seed: u64,
) -> Result<(), Error> {
    let module = Module::new(text)?;
    let launch = Launch {
        program: &module.kernels["main"],
        grid: [blocks, 1, 1],
        threads: [threads, 1, 1],
        dynamic_shared: 64 << 10,
        parameters: &parameters,
        memory: &Ranges::new(pieces),
        settings: Settings { threads: 2, seed, checks: true },
    };
    launch.run()
}

/// Loads the first parameter, the thread's global index `%i`, and `%at`, its byte offset `4 * %i`.
pub const START: &str = ".reg .b32 %i, %a<8>; .reg .b64 %at, %p<4>, %q<4>; .reg .pred %c<4>; .reg .f32 %f<8>;
    mov.u32 %a0, %ctaid.x; mov.u32 %a1, %ntid.x; mov.u32 %a2, %tid.x; mad.lo.s32 %i, %a0, %a1, %a2; mul.wide.u32 %at, %i, 4;
    ld.param.u64 %p0, [p0];\n";

/// Kind, line and message of the fault that a launch must have ended with.
pub fn fault(result: Result<(), Error>) -> (Kind, u32, String) {
    match result {
        Err(Error::Fault { kind, place, what }) => (kind, place.line, what),
        other => panic!("expected a fault, got {other:?}"),
    }
}
