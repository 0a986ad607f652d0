//! Linking and loading of modules.

use super::memory::memory;
use super::{Out, SHARED, Status, give};
use crate::Module;
use crate::machine::program::Program;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// State of a link: the PTX text, terminated by a zero.
pub struct Link {
    text: Vec<u8>,
    /// Buffer for errors, and its size.
    log: Option<(*mut u8, usize)>,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkCreate_v2(
    count: c_uint,
    options: *const c_uint,
    values: *const *mut c_void,
    link: Out<'_, *mut Link>,
) -> Status {
    const ERROR_LOG_BUFFER: c_uint = 5;
    const ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
    let value = |option: c_uint| {
        // SAFETY: the caller has `count` options, and `nth` is less.
        let nth = (0..count as usize).find(|nth| unsafe { *options.add(*nth) } == option)?;
        // SAFETY: there are as many values as options.
        Some(unsafe { *values.add(nth) })
    };
    let log = value(ERROR_LOG_BUFFER).zip(value(ERROR_LOG_BUFFER_SIZE_BYTES));
    let log = log.map(|(buffer, size)| (buffer.cast(), size as usize));
    give(link, Box::into_raw(Box::new(Link { text: Vec::new(), log })))
}

/// Writes PTX to the directory `SOFTWARE_CUDA_PTX`, if it is set, under the name of its first kernel.
fn keep(text: &str) {
    let Ok(directory) = std::env::var("SOFTWARE_CUDA_PTX") else { return };
    let name = text
        .split_once(".entry")
        .and_then(|(_, rest)| rest.split(|c: char| c == '(' || c.is_whitespace()).find(|word| !word.is_empty()));
    let file = format!("{directory}/{}.ptx", name.unwrap_or("module"));
    if let Err(error) = std::fs::write(&file, text) {
        eprintln!("software-cuda: {file}: {error}");
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkAddData_v2(
    link: *mut Link,
    _kind: c_uint,
    data: *const c_void,
    size: usize,
    _name: *const c_char,
    _count: c_uint,
    _options: *const c_uint,
    _values: *const *mut c_void,
) -> Status {
    // SAFETY: `cuLinkCreate_v2` made the link, and no other call uses it meanwhile. The caller has `size` bytes of data.
    let (link, text) = unsafe { (&mut *link, std::slice::from_raw_parts(data.cast::<u8>(), size)) };
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let result = match std::str::from_utf8(text) {
        Ok(text) => {
            keep(text);
            Module::new(text).map(|_| ()).map_err(|error| error.to_string())
        }
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = result {
        eprintln!("software-cuda: {error}");
        if let Some((log, size)) = link.log.filter(|(_, size)| *size > 0) {
            let length = error.len().min(size - 1);
            // SAFETY: the log that the link was created with holds `size` characters: the error and a zero.
            unsafe {
                std::ptr::copy_nonoverlapping(error.as_ptr(), log, length);
                log.add(length).write(0);
            }
        }
        return Status::InvalidPtx;
    }
    link.text = text.to_vec();
    link.text.push(0);
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkComplete(link: *mut Link, data: Out<'_, *mut c_void>, size: Out<'_, usize>) -> Status {
    // SAFETY: `cuLinkCreate_v2` made it, and no other call uses it meanwhile.
    let link = unsafe { &mut *link };
    give(data, link.text.as_mut_ptr().cast());
    give(size, link.text.len())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkDestroy(link: *mut Link) -> Status {
    // SAFETY: `cuLinkCreate_v2` made it from a box, and the caller no longer uses it.
    drop(unsafe { Box::from_raw(link) });
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: Out<'_, *mut Module>, image: *const c_void) -> Status {
    // SAFETY: the caller passes PTX, which is text that ends with a zero.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    match Module::new(&text) {
        Ok(loaded) => {
            let mut memory = memory();
            memory.globals.extend(loaded.pieces());
            memory.ranges = None;
            give(module, Box::into_raw(Box::new(loaded)))
        }
        Err(error) => {
            eprintln!("software-cuda: {error}");
            Status::InvalidPtx
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: Out<'_, *mut Module>,
    image: *const c_void,
    _count: c_uint,
    _options: *const c_uint,
    _values: *const *mut c_void,
) -> Status {
    // SAFETY: the contract is the same, except for the options, which are not read.
    unsafe { cuModuleLoadData(module, image) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut Module) -> Status {
    // SAFETY: `cuModuleLoadData` made it from a box, and the caller no longer uses it or its functions.
    let module = unsafe { Box::from_raw(module) };
    let mut memory = memory();
    for piece in module.pieces() {
        memory.globals.retain(|other| *other != piece);
    }
    memory.ranges = None;
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: Out<'_, *const Program>,
    module: *mut Module,
    name: *const c_char,
) -> Status {
    // SAFETY: `cuModuleLoadData` made the module, which does not change any more. The name ends with a zero.
    let (module, name) = unsafe { (&*module, CStr::from_ptr(name)) };
    match module.kernels.get(name.to_string_lossy().as_ref()) {
        Some(program) => give(function, program),
        None => Status::NotFound,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(_function: *const Program, attribute: c_int, value: c_int) -> Status {
    const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
    if attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES && value as usize > SHARED {
        return Status::InvalidValue;
    }
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(
    value: Out<'_, c_int>,
    attribute: c_int,
    function: *const Program,
) -> Status {
    // SAFETY: `cuModuleGetFunction` returned it, and its module is still loaded.
    let program = unsafe { &*function };
    let of = match attribute {
        0 => 1024,                          // MAX_THREADS_PER_BLOCK
        1 => program.shared_bytes as c_int, // SHARED_SIZE_BYTES
        3 => program.local_bytes as c_int,  // LOCAL_SIZE_BYTES
        8 => SHARED as c_int,               // MAX_DYNAMIC_SHARED_SIZE_BYTES
        _ => 0,
    };
    give(value, of)
}
