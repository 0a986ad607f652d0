//! Threads and streams do not change any bit of a result, and the state that they leave behind is bounded.

use crate::alone::alone;
use crate::common::*;
use cubecl::MemoryScope;
use cubecl::client::Client;
use cubecl::future::block_on;
use flash_attention_kernels::{
    AttentionError, AttentionOptions, BlockLists, Dtype, Inputs, TensorView, forward, forward_with,
};
use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::thread;

const THREADS: usize = 8;
const STREAMS: usize = 4;

/// A client of the same device on stream `number`. The offset keeps it apart from the streams that CubeCL numbers from 0.
fn on_stream(client: &Client, number: usize) -> Client {
    let mut id = client.empty(4).stream;
    id.value = (1 << 40) + number as u64;
    let mut client = client.clone();
    // SAFETY: buffers record the stream that made them, and CubeCL orders work of different streams on the same buffer.
    unsafe { client.set_stream(id) };
    client
}

/// Cases that keep state between calls (work tile counters, tile lists of a block mask) or allocate several kinds of scratch. All runs
/// share one set of tile lists.
fn cases(client: &Client) -> [Case; STREAMS] {
    let window = AttentionOptions { window_left: Some(40), ..causal() };
    let plain = Case::new([1, 4, 2, 200, 300, 16, 16], Dtype::F32, AttentionOptions::default());
    let blocks = plain.with_block_mask([1, 1, 2, 3], [128, 128], vec![2, 0, 1, 1, 2, 0]);
    let states = blocks.blocks_on(client).expect("the case has a block mask");
    [
        Case::new([2, 4, 2, 70, 90, 16, 16], Dtype::F32, causal()).with_bias([1, 4, 1, 90]).with_dlse(),
        Case::new([1, 4, 4, 65, 130, 16, 16], Dtype::F32, window)
            .with_sinks()
            .with_alibi_slopes([1, 4])
            .with_dropout(0.25),
        Case::new([1, 4, 2, 150, 150, 16, 16], Dtype::F32, causal())
            .with_cu_seqlens(&[0, 40, 40, 150], &[0, 60, 90, 150]),
        Case { shared_blocks: Some((states, BlockLists::default())), ..blocks },
    ]
}

/// The bits of every number of a result.
fn bits(results: &Results) -> Vec<Vec<u64>> {
    let Results { o, lse, dq, dk, dv, dbias, dalibi_slopes, dsinks, dscore_tensors: [da, db], .. } = results;
    let optional = [dq, dk, dv, dbias, dalibi_slopes, dsinks, da, db].map(|of| of.as_deref().unwrap_or_default());
    [&o[..], &lse[..]].into_iter().chain(optional).map(|of| of.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Runs cases on their clients' streams from this thread. All are launched before the first is waited for.
fn run_together(cases: &[(&Case, Client)]) -> Vec<Vec<Vec<u64>>> {
    type Run<'a> = Pin<Box<dyn Future<Output = Result<Results, AttentionError>> + 'a>>;
    let mut runs: Vec<Run> = cases.iter().map(|(case, client)| Box::pin(case.run_async(client)) as Run).collect();
    let mut found: Vec<Option<Vec<Vec<u64>>>> = vec![None; runs.len()];
    block_on(poll_fn(|context| {
        for (run, found) in runs.iter_mut().zip(&mut found).filter(|(_, found)| found.is_none()) {
            if let Poll::Ready(results) = run.as_mut().poll(context) {
                *found = Some(bits(&results.unwrap()));
            }
        }
        if found.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    }));
    found.into_iter().map(Option::unwrap).collect()
}

#[test]
fn eight_threads_with_four_streams_each_give_the_same_bits() {
    let Some(client) = client() else { return };
    let cases = cases(&client);
    let alone = cases.each_ref().map(|case| bits(&case.run(&client).unwrap()));
    // The comparison must notice inputs that differ in one number.
    let mut other = cases[0].clone();
    other.tensors.q[5] = -other.tensors.q[5];
    assert_ne!(bits(&other.run(&client).unwrap()), alone[0]);
    let rounds = if thorough() { 20 } else { 1 };
    let streams: Vec<Vec<u64>> = thread::scope(|scope| {
        let (client, cases, alone) = (&client, &cases, &alone);
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    let clients: Vec<_> = (0..STREAMS).map(|n| on_stream(client, STREAMS * thread + n)).collect();
                    for round in 0..rounds {
                        // The streams of a thread run different cases, in another order in each thread and round.
                        let nth = |n: usize| (n + thread + round) % STREAMS;
                        let runs: Vec<_> = (0..STREAMS).map(|n| (&cases[nth(n)], clients[n].clone())).collect();
                        for (n, found) in run_together(&runs).into_iter().enumerate() {
                            let case = &cases[nth(n)].problem;
                            assert!(found == alone[nth(n)], "stream {n} of thread {thread}, round {round}: {case:?}");
                        }
                    }
                    clients.iter().map(|client| client.empty(4).stream.value).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("every thread must get the same bits")).collect()
    });
    let distinct: HashSet<_> = streams.iter().flatten().collect();
    assert_eq!(distinct.len(), THREADS * STREAMS, "each thread must have streams of its own");
}

/// A chain of calls, each on another stream and thread than the one before, gives the same bits as on one stream.
#[test]
fn a_stream_reads_results_of_another_stream() {
    let Some(client) = client() else { return };
    let case = Case::new([1, 4, 4, 64, 64, 16, 16], Dtype::F32, causal());
    let p = &case.problem;
    let [q, k, v] = case.qkv(&client);
    let plan = case.plan(&client).unwrap();
    let next = |client: &Client, q: TensorView| {
        let o = TensorView::contiguous(client.empty(q.len() * p.dtype.size()), p.o_shape());
        let lse = TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
        let inputs = Inputs::new(q, k.clone(), v.clone());
        forward_with(client, p, &inputs, &o, &lse, plan.forward).unwrap();
        o
    };
    let links = if thorough() { 64 } else { 16 };
    let on_one = (0..links).fold(q.clone(), |q, _| next(&client, q));
    let on_many = (0..links).fold(q, |q, link| {
        let client = on_stream(&client, 1000 + link);
        thread::scope(|scope| scope.spawn(|| next(&client, q)).join().unwrap())
    });
    let [one, many] = [on_one, on_many].map(|o| client.read_one_unchecked(o.handle).to_vec());
    assert!(one == many, "a stream read a buffer before another stream had written it");
}

/// Each stream may keep its work tile counters, but at most 32 streams do.
#[test]
fn short_lived_streams_leave_bounded_state() {
    let Some(client) = client() else { return };
    // Other tests of the process would allocate memory, too.
    if !alone("streams::short_lived_streams_leave_bounded_state", &[]) {
        return;
    }
    let case = Case::new([1, 4, 4, 64, 64, 16, 16], Dtype::F32, causal());
    let p = &case.problem;
    let empty = |client: &Client, shape: [usize; 4]| {
        TensorView::contiguous(client.empty(shape.iter().product::<usize>() * p.dtype.size()), shape)
    };
    let in_use_after = |streams: std::ops::Range<usize>| {
        for stream in streams {
            let client = on_stream(&client, stream);
            let [q, k, v] = case.qkv(&client);
            let (o, lse) =
                (empty(&client, p.o_shape()), TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape()));
            forward(&client, p, &Inputs::new(q, k, v), &o, &lse).unwrap();
            client.read_one_unchecked(o.handle);
        }
        // The cleanup frees buffers that were dropped.
        client.memory_cleanup().unwrap();
        client.memory_report(MemoryScope::Device).usage().bytes_in_use
    };
    let after_few = in_use_after(0..48);
    let after_many = in_use_after(48..144);
    println!("{after_few} bytes in use after 48 streams, {after_many} after 144");
    assert!(after_many <= after_few, "{after_few} bytes in use after 48 streams, {after_many} after 144");
    // Counters of 32 streams, 256 of four bytes each.
    assert!(after_few <= 32 * 4096 * 4, "{after_few} bytes are kept, more than the counters of 32 streams");
}
