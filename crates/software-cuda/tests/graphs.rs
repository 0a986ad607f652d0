//! Launches that are recorded in a graph, through the driver's own functions.

mod common;

use common::{HEAD, START};
use software_cuda::driver::Status;
use std::ffi::{CString, c_uint, c_void};
use std::ptr::{null, null_mut};

type Handle = *mut c_void;

unsafe extern "C" {
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Status;
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const i8) -> Status;
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> Status;
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> Status;
    fn cuMemcpyDtoH_v2(to: Handle, from: u64, bytes: usize) -> Status;
    fn cuStreamSynchronize(stream: Handle) -> Status;
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) -> Status;
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Status;
    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) -> Status;
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64) -> Status;
    fn cuGraphLaunch(executable: Handle, stream: Handle) -> Status;
    fn cuGraphDestroy(graph: Handle) -> Status;
    fn cuGraphExecDestroy(executable: Handle) -> Status;
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: Handle,
        parameters: *mut Handle,
        extra: *mut Handle,
    ) -> Status;
}

#[test]
fn recorded_launches_run_when_the_graph_does() {
    let body = "ld.param.u32 %a3, [p1]; add.s64 %q0, %p0, %at; ld.global.u32 %a4, [%q0]; add.u32 %a4, %a4, %a3;
         st.global.u32 [%q0], %a4;";
    let text = format!("{HEAD}.visible .entry main(.param .u64 p0, .param .u32 p1) {{\n{START} {body}\nret;\n}}");
    let text = CString::new(text).unwrap();
    let ok = |status: Status| assert_eq!(status, Status::Success);
    let (mut module, mut function, mut address) = (null_mut(), null_mut(), 0u64);
    // SAFETY: all pointers are valid for the types of `cuda.h`, and handles are used until they are destroyed.
    unsafe {
        ok(cuModuleLoadData(&mut module, text.as_ptr().cast()));
        ok(cuModuleGetFunction(&mut function, module, c"main".as_ptr()));
        ok(cuMemAlloc_v2(&mut address, 128));
        ok(cuMemcpyHtoD_v2(address, [0u32; 32].as_ptr().cast(), 128));
        let add = |mut number: u32| {
            let mut parameters = [(&raw const address).cast_mut().cast(), (&raw mut number).cast::<c_void>()];
            cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, null_mut(), parameters.as_mut_ptr(), null_mut())
        };
        let read = || {
            let mut numbers = [0u32; 32];
            ok(cuMemcpyDtoH_v2(numbers.as_mut_ptr().cast(), address, 128));
            numbers
        };

        let (mut graph, mut executable, mut count, mut other) = (null_mut(), null_mut(), 0, 0);
        ok(cuStreamBeginCapture_v2(null_mut(), 0));
        assert_eq!(cuStreamBeginCapture_v2(null_mut(), 0), Status::InvalidValue);
        ok(add(1));
        ok(add(10));
        // What a recording cannot contain is refused.
        assert_eq!(cuMemAlloc_v2(&mut other, 128), Status::CaptureUnsupported);
        assert_eq!(cuStreamSynchronize(null_mut()), Status::CaptureUnsupported);
        assert_eq!(cuMemcpyHtoD_v2(address, [1u32; 32].as_ptr().cast(), 128), Status::CaptureUnsupported);
        ok(cuStreamEndCapture(null_mut(), &mut graph));
        assert_eq!(cuStreamEndCapture(null_mut(), &mut other as *mut u64 as *mut Handle), Status::InvalidValue);
        assert_eq!(read(), [0; 32], "recorded launches must not run");

        ok(cuGraphGetNodes(graph, null::<Handle>().cast_mut(), &mut count));
        assert_eq!(count, 2);
        ok(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok(cuGraphDestroy(graph));
        for times in 1..3 {
            ok(cuGraphLaunch(executable, null_mut()));
            assert_eq!(read(), [11 * times; 32]);
        }
        ok(cuGraphExecDestroy(executable));
        // Launches run again.
        ok(add(100));
        assert_eq!(read(), [122; 32]);
    }
}
