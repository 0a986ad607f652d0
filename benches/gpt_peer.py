#!/usr/bin/env python3
"""The GPT of examples/gpt in PyTorch: tokens a second, eager and compiled, with its own attention (SDPA).

    python3 benches/gpt_peer.py --layers 12 --heads 12 --width 768 --context 1024 --batch 16 --mode eager,compiled

Master weights are f32, matrix products and attention bf16 by autocast, AdamW is fused: as nanoGPT trains. Text is random.
With --mode eager --steps 2 it is short enough to run under ncu, see gpt_profile.py.
"""

import argparse
import csv
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, context, width = x.shape
        split = (batch, context, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocabulary, layers, heads, width, context):
        super().__init__()
        # As nanoGPT: a multiple of 64 is several times faster.
        self.tokens = nn.Embedding((vocabulary + 63) // 64 * 64, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(options, mode):
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = Gpt(options.vocabulary, options.layers, options.heads, options.width, options.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if mode == "compiled" else model
    shape = (options.batch, options.context)
    times = []
    for _ in range(options.warmup + options.steps):
        tokens = torch.randint(options.vocabulary, shape, device=device)
        targets = torch.randint(options.vocabulary, shape, device=device)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    step = statistics.median(times[options.warmup:])
    return {
        "implementation": f"pytorch-{mode}",
        "version": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "step_ms": 1e3 * step,
        "tokens_per_second": options.batch * options.context / step,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": loss.item(),
    }


def main():
    parser = argparse.ArgumentParser()
    for name, value in dict(layers=12, heads=12, width=768, context=1024, batch=16, vocabulary=50257).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mode", default="eager,compiled")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--csv", help="file for the rows")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    for mode in options.mode.split(","):
        torch.cuda.reset_peak_memory_stats()
        rows.append(measure(options, mode))
        print(json.dumps(rows[-1]), flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)


if __name__ == "__main__":
    main()
