//! Options that a module sets for every call.

use crate::checks::unsupported_value;
use crate::options::FlashAttentionOptions;
use burn::tensor::Tensor;
use flash_attention_kernels::{Alignment, AttentionError, BackwardOrder, Precision};

/// The options of a call together with those that its module sets. Where both set one, there is no telling which is meant: an error.
pub(super) fn with_settings(
    call: FlashAttentionOptions,
    module: &FlashAttentionOptions,
) -> Result<FlashAttentionOptions, AttentionError> {
    let number = |value: &f32| value.to_string();
    let positions = |value: &usize| value.to_string();
    let aligned = |alignment| Some(alignment).filter(|alignment| *alignment != Alignment::default());
    let sinks = |sinks: &Tensor<1>| format!("{:?}", sinks.dims());
    let alignment = one("alignment", aligned(module.alignment), aligned(call.alignment), |it| format!("{it:?}"))?;
    Ok(FlashAttentionOptions {
        causal: call.causal || module.causal,
        alignment: alignment.unwrap_or_default(),
        window_left: one("window_left", module.window_left, call.window_left, positions)?,
        window_right: one("window_right", module.window_right, call.window_right, positions)?,
        softcap: one("softcap", module.softcap, call.softcap, number)?,
        softmax_scale: one("softmax_scale", module.softmax_scale, call.softmax_scale, number)?,
        sinks: one("sinks", module.sinks.clone(), call.sinks, sinks)?,
        score_mod: one("score_mod", module.score_mod, call.score_mod, |it| format!("{it:?}"))?,
        mask_mod: one("mask_mod", module.mask_mod, call.mask_mod, |it| format!("{it:?}"))?,
        // Of how a call is computed, the call has the last word.
        backward_order: chosen(module.backward_order, call.backward_order, BackwardOrder::default()),
        precision: chosen(module.precision, call.precision, Precision::default()),
        ..call
    })
}

/// The option of the module or of the call.
fn one<T>(
    option: &'static str,
    module: Option<T>,
    call: Option<T>,
    value: impl Fn(&T) -> String,
) -> Result<Option<T>, AttentionError> {
    match (&module, &call) {
        (Some(_), Some(of_call)) => {
            Err(unsupported_value(option, value(of_call), "the module sets it; leave it out of the options"))
        }
        _ => Ok(module.or(call)),
    }
}

fn chosen<T: PartialEq>(module: T, call: T, default: T) -> T {
    if call == default { module } else { call }
}

/// Checks that a module can keep these options: it has its own dropout, and tensors come with a call, on its device.
pub(super) fn check_settings(option: &'static str, options: &FlashAttentionOptions) -> Result<(), AttentionError> {
    let refused = |value: String, why| Err(unsupported_value(option, value, why));
    if options.dropout != 0.0 || options.dropout_seed.is_some() {
        return refused(format!("a dropout of {}", options.dropout), "the module has its own dropout rate");
    }
    match options.tensor_names().first() {
        None => Ok(()),
        Some(name) => {
            refused(format!("{name}, a tensor"), "a module keeps no tensors of options; give them with a call")
        }
    }
}

/// Options of the layer with this number, of a list with one for each layer, or none.
pub(super) fn of_layer(
    option: &'static str,
    layers: &[FlashAttentionOptions],
    nth: usize,
    n_layers: usize,
) -> Result<FlashAttentionOptions, AttentionError> {
    if layers.is_empty() {
        return Ok(FlashAttentionOptions::new());
    }
    if layers.len() != n_layers {
        let value = format!("{} options for {n_layers} layers", layers.len());
        return Err(unsupported_value(option, value, "each layer has its own, or there are none"));
    }
    Ok(layers[nth].clone())
}
