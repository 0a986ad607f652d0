#!/usr/bin/env python3
"""Writes a small random checkpoint of each family of models, with what transformers computes from it.

    pip install torch transformers safetensors
    python3 make.py DIRECTORY

A checkpoint has a folder: config.json and model.safetensors as `save_pretrained` writes them, and expected.safetensors with
`tokens [2, 24]`, `logits [2, 24, vocab]` in f32, `continuation [2, 12]`, greedy, `margins [2, 12]`, the distances between the
two best logits of each step, `loss`, the mean cross-entropy of each next token, and `grad.NAME`, its gradient by each tensor.
"""

import argparse
import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaMLP

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


def configs():
    """Name and configuration of each checkpoint."""
    yield "llama2", transformers.LlamaConfig(**SIZES | dict(num_key_value_heads=4), num_hidden_layers=2)
    yield "llama3", transformers.LlamaConfig(
        **SIZES, num_hidden_layers=2, tie_word_embeddings=True, rope_theta=500000.0, rope_scaling=LLAMA3
    )
    yield "mistral", transformers.MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=9)
    yield "qwen2", transformers.Qwen2Config(**SIZES | dict(head_dim=8), num_hidden_layers=2, tie_word_embeddings=True)
    yield "qwen3", transformers.Qwen3Config(**SIZES, num_hidden_layers=2, rope_theta=1000000.0)
    yield "gemma2", transformers.Gemma2Config(
        **SIZES, num_hidden_layers=4, sliding_window=9, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=12.0,
    )
    yield "gemma3", transformers.Gemma3TextConfig(
        **SIZES, num_hidden_layers=4, sliding_window=9, query_pre_attn_scalar=24, sliding_window_pattern=2,
    )


    # The attention of gpt-oss. Its mixture of experts is replaced by the MLP of Llama.
    yield "gpt_oss", transformers.GptOssConfig(
        **SIZES | dict(head_dim=8, intermediate_size=32), num_hidden_layers=2, sliding_window=9, num_local_experts=0,
        num_experts_per_tok=0,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=8.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=64,
        ),
    )


class DenseMlp(LlamaMLP):
    """The MLP of Llama where gpt-oss expects router scores beside the output."""

    def forward(self, x):
        return super().forward(x), None


def build(config):
    """A model of a configuration."""
    if config.model_type != "gpt_oss":
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    config.mlp_bias = False
    modeling_gpt_oss.GptOssMLP = DenseMlp
    return transformers.GptOssForCausalLM(config)


def spread(model, seed):
    """Random weights, rounded to bf16, with which logits differ: norms are near their first values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            drawn = drawn / parameter.shape[1] ** 0.5 * (3.0 if "embed" in name else 1.2)
        else:
            drawn = parameter.detach() + 0.2 * drawn
        parameter.data = drawn.bfloat16().float()


def expected(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 24), generator=generator)
    logits = model(input_ids=tokens).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    continuation, margins, so_far = [], [], tokens
    with torch.no_grad():
        for _ in range(12):
            best = model(input_ids=so_far).logits[:, -1].float().topk(2)
            continuation.append(best.indices[:, 0])
            margins.append(best.values[:, 0] - best.values[:, 1])
            so_far = torch.cat([so_far, best.indices[:, :1]], 1)
    return grads | dict(
        tokens=tokens.int(), logits=logits.detach(), loss=loss.detach(), continuation=torch.stack(continuation, 1).int(),
        margins=torch.stack(margins, 1),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    directory = parser.parse_args().directory
    for seed, (name, config) in enumerate(configs()):
        config._attn_implementation = "eager"
        config.dtype = torch.float32
        # Sinks are near their first values, which are random.
        torch.manual_seed(seed)
        model = build(config).eval()
        spread(model, seed)
        folder = directory / name
        saved = expected(model, 100 + seed)
        model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
        save_file({key: value.contiguous() for key, value in saved.items()}, folder / "expected.safetensors")
        for extra in folder.glob("generation_config.json"):
            extra.unlink()
        kept = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
        size = sum(file.stat().st_size for file in folder.iterdir())
        margin = saved["margins"].min()
        print(f"{name}: {size // 1024} KiB, loss {saved['loss']:.3f}, smallest margin {margin:.3f}, logits up to {saved['logits'].abs().max():.1f}")


if __name__ == "__main__":
    main()
