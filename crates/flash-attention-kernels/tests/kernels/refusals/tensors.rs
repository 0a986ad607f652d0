//! Tensors that do not match the problem.

use super::call::*;
use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::tiling::Device;
use flash_attention_kernels::{AttentionError, Gradients, HopperGradient, Inputs, TensorView};

/// A fault of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Shape,
    Buffer,
    Far,
    Overlap,
}

/// Puts a fault into a tensor and returns the expected error.
fn spoil<const RANK: usize>(
    client: &Client,
    argument: &'static str,
    size: usize,
    view: &mut TensorView<RANK>,
    fault: Fault,
) -> AttentionError {
    let (last, expected) = (RANK - 1, view.shape[RANK - 1]);
    match fault {
        Fault::Shape => view.shape[last] += 1,
        Fault::Buffer => view.handle = client.empty(size),
        Fault::Far => view.strides = [1 << 33; RANK],
        Fault::Overlap => view.strides = [0; RANK],
    }
    let (shape, strides) = (view.shape.to_vec(), view.strides.to_vec());
    let reach = 1 + shape.iter().zip(&strides).map(|(n, stride)| (n - 1) as u64 * *stride as u64).sum::<u64>();
    let dimension = ["dimension 0", "dimension 1", "dimension 2", "dimension 3"][last];
    let value = view.shape[last];
    match fault {
        Fault::Shape => {
            AttentionError::Dimension { argument, dimension, value, shape, expected_by: "the problem", expected }
        }
        Fault::Buffer => AttentionError::Buffer { argument, shape, strides, reach, len: 1 },
        Fault::Far => AttentionError::AddressSpace { argument, reach, device: Device::of(client).name },
        Fault::Overlap => AttentionError::OutputOverlaps { argument, shape, strides },
    }
}

/// The name of a tensor, and a function that puts a fault into this tensor of a call.
type Tensor = (&'static str, fn(&mut Call, Fault) -> AttentionError);

macro_rules! tensors {
    ($($argument:literal: $call:ident => $view:expr;)*) => {{
        let tensors: &[Tensor] = &[$(($argument, |$call, fault| {
            let (client, size) = ($call.client.clone(), $call.size_of($argument));
            spoil(&client, $argument, size, $view, fault)
        })),*];
        tensors
    }};
}

/// Every tensor of every entry point with another shape than the problem's, in a buffer that is too small, or with elements further apart
/// than the device addresses. Outputs also with overlapping elements.
#[test]
fn tensors_that_do_not_fit() {
    let Some(client) = client() else { return };
    const FUSED: HopperGradient = HopperGradient { tile: HOPPER, head_group: 1, num_splits: 1 };
    let inputs = tensors! {
        "q": call => &mut call.inputs.q;
        "k": call => &mut call.inputs.k;
        "v": call => &mut call.inputs.v;
        "mask": call => &mut call.inputs.mask.as_mut().unwrap().tensor;
        "bias": call => call.inputs.bias.as_mut().unwrap();
        "alibi_slopes": call => call.inputs.alibi_slopes.as_mut().unwrap();
        "sinks": call => call.inputs.sinks.as_mut().unwrap();
        "dropout_seed": call => call.inputs.dropout_seed.as_mut().unwrap();
        "seq_lens_q": call => call.inputs.seq_lens_q.as_mut().unwrap();
        "seq_lens_k": call => call.inputs.seq_lens_k.as_mut().unwrap();
        "score_tensors[0]": call => call.inputs.score_tensors[0].as_mut().unwrap();
        "score_tensors[1]": call => call.inputs.score_tensors[1].as_mut().unwrap();
        "mask_tensors[0]": call => call.inputs.mask_tensors[0].as_mut().unwrap();
        "mask_tensors[1]": call => call.inputs.mask_tensors[1].as_mut().unwrap();
        "block_mask": call => call.inputs.block_mask.as_mut().unwrap();
    };
    let ends = tensors! {
        "cu_seqlens_q": call => call.inputs.cu_seqlens_q.as_mut().unwrap();
        "cu_seqlens_k": call => call.inputs.cu_seqlens_k.as_mut().unwrap();
    };
    let results = tensors! {
        "o": call => &mut call.saved.o;
        "lse": call => &mut call.saved.lse;
    };
    let read = tensors! {
        "o": call => &mut call.saved.o;
        "lse": call => &mut call.saved.lse;
        "dout": call => &mut call.saved.dout;
        "dlse": call => call.saved.dlse.as_mut().unwrap();
    };
    let gradients = tensors! {
        "dq": call => call.gradients.dq.as_mut().unwrap();
        "dk": call => call.gradients.dk.as_mut().unwrap();
        "dv": call => call.gradients.dv.as_mut().unwrap();
        "dbias": call => call.gradients.dbias.as_mut().unwrap();
        "dalibi_slopes": call => call.gradients.dalibi_slopes.as_mut().unwrap();
        "dsinks": call => call.gradients.dsinks.as_mut().unwrap();
        "dscore_tensors[0]": call => call.gradients.dscore_tensors[0].as_mut().unwrap();
        "dscore_tensors[1]": call => call.gradients.dscore_tensors[1].as_mut().unwrap();
    };
    let scratch = tensors! {
        "stats": call => &mut call.scratch.stats;
        "bias_sums": call => call.scratch.bias_sums.as_mut().unwrap();
        "dq_accum": call => { call.backward.fused = Some(FUSED); call.scratch.dq_accum.as_mut().unwrap() };
        "dq_turns": call => { call.backward.fused = Some(FUSED); call.scratch.dq_turns.as_mut().unwrap() };
    };
    let of_states = tensors! {
        "mask": call => &mut call.inputs.mask.as_mut().unwrap().tensor;
        "mask_tensors[0]": call => call.inputs.mask_tensors[0].as_mut().unwrap();
        "mask_tensors[1]": call => call.inputs.mask_tensors[1].as_mut().unwrap();
    };
    let states = tensors! { "states": call => &mut call.states; };
    let seed = tensors! { "dropout_seed": call => &mut call.seed; };
    let kept = tensors! { "kept": call => &mut call.kept; };

    let [full, packed] = [full(), packed()].map(|problem| Call::new(&client, problem));
    let [attention, calls] = [[Entry::Forward, Entry::Backward], [Entry::ForwardWith, Entry::BackwardWith]];
    let of_forward = [Entry::Forward, Entry::ForwardWith];
    let of_backward = [Entry::Backward, Entry::BackwardWith];
    let wide = lanes::wide_addresses(&client);
    let groups: [(&Call, &[Entry], bool, &[Tensor]); 11] = [
        (&full, &attention, false, inputs),
        (&full, &calls, false, inputs),
        (&packed, &attention, false, ends),
        (&full, &of_forward, true, results),
        (&full, &of_backward, false, read),
        (&full, &of_backward, true, gradients),
        (&full, &[Entry::BackwardWith], true, scratch),
        (&full, &[Entry::States], false, of_states),
        (&full, &[Entry::States], true, states),
        (&full, &[Entry::Kept], false, seed),
        (&full, &[Entry::Kept], true, kept),
    ];
    for (call, entries, written, tensors) in groups {
        for &(name, spoil) in tensors {
            for fault in [Fault::Shape, Fault::Buffer, Fault::Far, Fault::Overlap] {
                if fault == Fault::Far && wide || fault == Fault::Overlap && !written {
                    continue;
                }
                for &entry in entries {
                    let mut call = call.clone();
                    let expected = spoil(&mut call, fault);
                    call.refused(entry, &format!("{name}, {fault:?}"), |error| *error == expected);
                }
            }
        }
    }
}

/// Copies one optional tensor from the second inputs to the first, where it may be `None`.
type Move = fn(&mut Inputs, &Inputs);

/// Tensors that the problem does not have, and tensors of the problem that are missing.
#[test]
fn tensors_that_the_problem_does_not_state() {
    let Some(client) = client() else { return };
    let [plain, full, packed] = [plain(), full(), packed()].map(|problem| Call::new(&client, problem));
    macro_rules! moves {
        ($($name:literal $from:ident ($($path:tt)+);)*) => {
            [$(($name, &$from, |to, from| to $($path)+ = from $($path)+.clone())),*]
        };
    }
    let moves: [(&str, &Call, Move); 14] = moves! {
        "mask" full (.mask);
        "bias" full (.bias);
        "alibi_slopes" full (.alibi_slopes);
        "sinks" full (.sinks);
        "dropout_seed" full (.dropout_seed);
        "seq_lens_q" full (.seq_lens_q);
        "seq_lens_k" full (.seq_lens_k);
        "cu_seqlens_q" packed (.cu_seqlens_q);
        "cu_seqlens_k" packed (.cu_seqlens_k);
        "score_tensors[0]" full (.score_tensors[0]);
        "score_tensors[1]" full (.score_tensors[1]);
        "mask_tensors[0]" full (.mask_tensors[0]);
        "mask_tensors[1]" full (.mask_tensors[1]);
        "block_mask" full (.block_mask);
    };
    for (name, from, place) in moves {
        let [mut more, mut less] = [plain.clone(), from.clone()];
        place(&mut more.inputs, &from.inputs);
        place(&mut less.inputs, &plain.inputs);
        for (call, given) in [(more, "a tensor"), (less, "no tensor")] {
            for entry in [Entry::Forward, Entry::Backward] {
                call.refused(entry, name, |error| {
                    matches!(error, AttentionError::Unsupported { option, value, .. } if *option == name && value == given)
                });
            }
        }
    }
    // Gradients of tensors that the problem does not have.
    let Gradients { dbias, dalibi_slopes, dsinks, dscore_tensors: [a, b], .. } = full.gradients;
    for (name, gradients) in [
        ("dbias", Gradients { dbias, ..Default::default() }),
        ("dalibi_slopes", Gradients { dalibi_slopes, ..Default::default() }),
        ("dsinks", Gradients { dsinks, ..Default::default() }),
        ("dscore_tensors[0]", Gradients { dscore_tensors: [a, None], ..Default::default() }),
        ("dscore_tensors[1]", Gradients { dscore_tensors: [None, b], ..Default::default() }),
    ] {
        let mut call = plain.clone();
        call.gradients = gradients;
        call.refused(
            Entry::Backward,
            name,
            |error| matches!(error, AttentionError::Dimension { argument, expected: 0, .. } if *argument == name),
        );
    }
}
