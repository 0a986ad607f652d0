//! The parameters of a decoder under the names of Hugging Face.

use burn::module::Param;
use burn::nn::norm::Normalization;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::Tensor;
use burn_flash_attention::{FlashDecoder, FlashDecoderLayer};

/// A parameter of a decoder, and how a checkpoint holds it.
pub enum Slot<'a> {
    /// Weights of a linear layer, which a checkpoint holds transposed.
    Linear(&'a mut Param<Tensor<2>>),
    /// Embedding.
    Table(&'a mut Param<Tensor<2>>),
    /// Weights of a norm, which some families hold without their 1.
    Norm(&'a mut Param<Tensor<1>>),
    /// Biases and sinks.
    Vector(&'a mut Param<Tensor<1>>),
}

impl Slot<'_> {
    /// The shape of the parameter in a checkpoint. Does not initialize the parameter.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Slot::Linear(weight) => weight.lazy_shape().dims::<2>().into_iter().rev().collect(),
            Slot::Table(weight) => weight.lazy_shape().dims::<2>().to_vec(),
            Slot::Norm(vector) | Slot::Vector(vector) => vector.lazy_shape().dims::<1>().to_vec(),
        }
    }
}

/// The parameters of a decoder with their names.
pub fn slots(model: &mut FlashDecoder) -> Vec<(String, Slot<'_>)> {
    let mut all = vec![("model.embed_tokens.weight".to_string(), Slot::Table(&mut model.embedding.weight))];
    all.extend(model.head.iter_mut().map(|head| ("lm_head.weight".to_string(), Slot::Linear(&mut head.weight))));
    all.extend(norm("model.norm".to_string(), &mut model.norm));
    for (nth, layer) in model.layers.iter_mut().enumerate() {
        of_layer(layer, &|part| format!("model.layers.{nth}.{part}"), &mut all);
    }
    all
}

/// The parameters of a layer. With norms of outputs, that of attention has the name which the one before the MLP has without.
fn of_layer<'a>(layer: &'a mut FlashDecoderLayer, name: &dyn Fn(&str) -> String, all: &mut Vec<(String, Slot<'a>)>) {
    let before_mlp = match layer.mlp_output_norm {
        Some(_) => "pre_feedforward_layernorm",
        None => "post_attention_layernorm",
    };
    all.extend(norm(name("input_layernorm"), &mut layer.attention_norm));
    all.extend(norm(name(before_mlp), &mut layer.mlp_norm));
    for (part, output) in [
        ("post_attention_layernorm", &mut layer.attention_output_norm),
        ("post_feedforward_layernorm", &mut layer.mlp_output_norm),
    ] {
        all.extend(output.iter_mut().filter_map(|output| norm(name(part), output)));
    }
    let (attention, mlp) = (&mut layer.attention, &mut layer.mlp);
    for (part, linear) in [
        ("self_attn.q_proj", Some(&mut attention.query)),
        ("self_attn.k_proj", Some(&mut attention.key)),
        ("self_attn.v_proj", Some(&mut attention.value)),
        ("self_attn.o_proj", Some(&mut attention.output)),
        ("mlp.gate_proj", mlp.gate.as_mut()),
        ("mlp.up_proj", Some(&mut mlp.up)),
        ("mlp.down_proj", Some(&mut mlp.down)),
    ] {
        let Some(Linear { weight, bias }) = linear else { continue };
        all.push((name(&format!("{part}.weight")), Slot::Linear(weight)));
        all.extend(bias.iter_mut().map(|bias| (name(&format!("{part}.bias")), Slot::Vector(bias))));
    }
    for (part, heads) in
        [("self_attn.q_norm.weight", &mut attention.query_norm), ("self_attn.k_norm.weight", &mut attention.key_norm)]
    {
        all.extend(heads.iter_mut().map(|RmsNorm { gamma, .. }| (name(part), Slot::Norm(gamma))));
    }
    all.extend(attention.sinks.iter_mut().map(|sinks| (name("self_attn.sinks"), Slot::Vector(sinks))));
}

/// The weights of a norm. The configurations of this program make RMS norms only.
fn norm(name: String, norm: &mut Normalization) -> Option<(String, Slot<'_>)> {
    match norm {
        Normalization::Rms(norm) => Some((format!("{name}.weight"), Slot::Norm(&mut norm.gamma))),
        _ => None,
    }
}
