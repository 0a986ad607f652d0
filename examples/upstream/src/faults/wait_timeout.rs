use crate::Finding;
use cubecl::wgpu::wgpu::{BufferDescriptor, BufferUsages, MapMode, PollType};
use cubecl::wgpu::{AutoGraphicsApi, RuntimeOptions, WgpuDevice, init_setup};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

pub fn look(_: &cubecl::Device) -> Finding {
    let setup = init_setup::<AutoGraphicsApi>(&WgpuDevice::default(), RuntimeOptions::default());
    let (device, queue) = (setup.device, setup.queue);
    let buffer = |size, usage| {
        device.create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    // A copy of 16 MiB takes a software device milliseconds, and a GPU tens of microseconds.
    let large = 16 << 20;
    let (from, to) = (buffer(large, BufferUsages::COPY_SRC), buffer(large, BufferUsages::COPY_DST));
    let (panicked, lost, reads) = (AtomicUsize::new(0), AtomicUsize::new(0), 2000);
    let running = AtomicUsize::new(2);
    thread::scope(|scope| {
        for timeout in [0, 20, 200, 2000].map(Duration::from_micros) {
            let (device, panicked, running) = (&device, &panicked, &running);
            scope.spawn(move || {
                while running.load(Relaxed) > 0 {
                    let wait = || device.poll(PollType::Wait { submission_index: None, timeout: Some(timeout) });
                    let panics = catch_unwind(AssertUnwindSafe(wait)).is_err();
                    panicked.fetch_add(usize::from(panics), Relaxed);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..reads / 2 {
                    let staging = buffer(4, BufferUsages::MAP_READ | BufferUsages::COPY_DST);
                    let mut encoder = device.create_command_encoder(&Default::default());
                    encoder.copy_buffer_to_buffer(&from, 0, &to, 0, large);
                    encoder.copy_buffer_to_buffer(&from, 0, &staging, 0, 4);
                    queue.submit([encoder.finish()]);
                    let (sender, receiver) = mpsc::channel();
                    staging.slice(..).map_async(MapMode::Read, move |mapped| drop(sender.send(mapped)));
                    let answer = receiver.recv_timeout(Duration::from_secs(5));
                    lost.fetch_add(usize::from(answer.is_err()), Relaxed);
                }
                running.fetch_sub(1, Relaxed);
            });
        }
    });
    let (panicked, lost) = (panicked.into_inner(), lost.into_inner());
    Finding::new(panicked + lost > 0, format!("{panicked} waits panicked, and {lost} of {reads} reads got no answer"))
}
