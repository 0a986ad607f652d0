//! Graphs: launches that are recorded, and repeated as often as the graph is launched. Copies cannot be recorded.

use super::launches::Call;
use super::{Out, Status, failed, give};
use std::ffi::{c_uint, c_ulonglong, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

/// Recorded launches. There is one stream.
static RECORDING: Mutex<Option<Vec<Call>>> = Mutex::new(None);

fn recording() -> MutexGuard<'static, Option<Vec<Call>>> {
    RECORDING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Whether launches are recorded.
pub(super) fn is_recording() -> bool {
    recording().is_some()
}

/// Records a launch, or returns it if launches are not recorded.
pub(super) fn record(call: Call) -> Result<Status, Call> {
    match &mut *recording() {
        Some(calls) => {
            calls.push(call);
            Ok(Status::Success)
        }
        None => Err(call),
    }
}

/// A graph, which is executable as well. Its nodes are its launches.
type Graph = Arc<Vec<Call>>;

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(_stream: *mut c_void, _mode: c_uint) -> Status {
    let mut recording = recording();
    if recording.is_some() {
        return Status::InvalidValue;
    }
    *recording = Some(Vec::new());
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(_stream: *mut c_void, graph: Out<'_, *mut Graph>) -> Status {
    let Some(calls) = recording().take() else { return Status::InvalidValue };
    give(graph, Box::into_raw(Box::new(Arc::new(calls))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(
    graph: Option<&Graph>,
    nodes: *mut *const Call,
    count: Option<&mut usize>,
) -> Status {
    let (Some(graph), Some(count)) = (graph, count) else { return Status::InvalidValue };
    if nodes.is_null() {
        *count = graph.len();
        return Status::Success;
    }
    for (n, call) in graph.iter().take(*count).enumerate() {
        // SAFETY: the caller has memory for `count` nodes.
        unsafe { nodes.add(n).write(call) };
    }
    *count = graph.len().min(*count);
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetType(_node: *const Call, kind: Out<'_, c_uint>) -> Status {
    // CU_GRAPH_NODE_TYPE_KERNEL
    give(kind, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(
    executable: Out<'_, *mut Graph>,
    graph: Option<&Graph>,
    _flags: c_ulonglong,
) -> Status {
    let Some(graph) = graph else { return Status::InvalidValue };
    give(executable, Box::into_raw(Box::new(graph.clone())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(_executable: *mut Graph, _stream: *mut c_void) -> Status {
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(executable: Option<&Graph>, _stream: *mut c_void) -> Status {
    let Some(executable) = executable else { return Status::InvalidValue };
    if let Some(status) = failed() {
        return status;
    }
    // SAFETY: the caller keeps the modules of recorded launches loaded.
    let statuses = executable.iter().map(|call| unsafe { call.run() });
    statuses.into_iter().find(|status| *status != Status::Success).unwrap_or(Status::Success)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut Graph) -> Status {
    // SAFETY: `cuStreamEndCapture` or `cuGraphInstantiateWithFlags` made it from a box, and the caller no longer uses it.
    drop(unsafe { Box::from_raw(graph) });
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(executable: *mut Graph) -> Status {
    // SAFETY: as for a graph.
    unsafe { cuGraphDestroy(executable) }
}
