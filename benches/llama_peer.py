#!/usr/bin/env python3
"""A Llama's shape in PyTorch and transformers, with random weights in bf16: tokens a second and peak memory of training and decoding.

    python3 benches/llama_peer.py --config examples/llama/shapes/llama-3.2-1b.json --mode train --context 4096 --batch 4
    python3 benches/llama_peer.py --config examples/llama/shapes/llama-3.2-1b.json --mode decode --context 4096 --batch 1,32

Training: forward, backward and fused AdamW of all weights, all in bf16. Cross-entropy is computed for --chunk positions at a time, with its
backward, so that the logits of all positions need not exist at once. --checkpointing recomputes each layer. Implementations: sdpa
(`scaled_dot_product_attention`), compiled (the same by torch.compile), composed (softmax of a matrix of scores).

Decoding: greedy tokens one at a time after a context, over transformers' dynamic cache (sdpa) and over its static cache with a compiled
forward (compiled). The token is read back each step, as where text is generated.
"""

import argparse
import csv
import json
import statistics
import time

import torch
import torch.nn.functional as F
import transformers

DEVICE = torch.device("cuda")


def timed(steps, warmup, step):
    """The median time of a step after the warm-up, in seconds."""
    times = []
    for _ in range(warmup + steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[warmup:])


def load(options, implementation):
    config = transformers.AutoConfig.for_model(**json.load(open(options.config)))
    config._attn_implementation = "eager" if implementation == "composed" else "sdpa"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def train(options, implementation, batch):
    model = load(options, implementation)
    model.config.use_cache = False
    model.train()
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    decoder = torch.compile(model.model) if implementation == "compiled" else model.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(model.config.vocab_size, (batch, options.context), device=DEVICE)
    targets = tokens.roll(-1, 1)

    def loss_of(hidden, targets):
        return F.cross_entropy(F.linear(hidden, model.lm_head.weight).float(), targets, reduction="sum")

    chunk_loss = torch.compile(loss_of) if implementation == "compiled" else loss_of

    def step():
        hidden = decoder(tokens).last_hidden_state
        flat, count = hidden.flatten(0, 1), targets.numel()
        pieces = []
        for begin in range(0, count, options.chunk):
            piece = flat[begin : begin + options.chunk].detach().requires_grad_()
            (chunk_loss(piece, targets.flatten()[begin : begin + options.chunk]) / count).backward()
            pieces.append(piece.grad)
        flat.backward(torch.cat(pieces))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    torch.cuda.reset_peak_memory_stats()
    seconds = timed(options.steps, options.warmup, step)
    return batch * options.context / seconds


def decode(options, implementation, batch):
    model = load(options, implementation).eval()
    total = options.context + options.warmup + options.steps + 1
    static = implementation == "compiled"
    cache = transformers.StaticCache(config=model.config, max_cache_len=total) if static else transformers.DynamicCache()
    forward = torch.compile(model, mode="reduce-overhead", fullgraph=True) if static else model
    with torch.inference_mode():
        for begin in range(0, options.context, 512):
            new = min(512, options.context - begin)
            positions = torch.arange(begin, begin + new, device=DEVICE)
            prompt = torch.zeros(batch, new, dtype=torch.long, device=DEVICE)
            model(prompt, past_key_values=cache, cache_position=positions, logits_to_keep=1)
        state = {"at": options.context, "token": torch.zeros(batch, 1, dtype=torch.long, device=DEVICE)}

        def step():
            positions = torch.tensor([state["at"]], device=DEVICE)
            logits = forward(state["token"], past_key_values=cache, cache_position=positions).logits
            state["token"] = logits[:, -1:].argmax(-1)
            state["token"].tolist()
            state["at"] += 1

        torch.cuda.reset_peak_memory_stats()
        seconds = timed(options.steps, options.warmup, step)
    return batch / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config.json of the model")
    parser.add_argument("--mode", default="train", choices=["train", "decode"])
    parser.add_argument("--implementation", default="sdpa,compiled")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", default="1", help="sequences; several numbers, with commas, are measured in turn")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--csv", help="file that rows are appended to")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for implementation in options.implementation.split(","):
        for batch in map(int, options.batch.split(",")):
            torch.cuda.empty_cache()
            row = {
                "implementation": f"pytorch-{implementation}",
                "mode": options.mode,
                "context": options.context,
                "batch": batch,
                "checkpointing": options.checkpointing,
                "tokens_per_second": "",
                "peak_gib": "",
                "problem": "",
                "version": f"torch {torch.__version__}, transformers {transformers.__version__}",
                "device": torch.cuda.get_device_name(),
            }
            try:
                measure = train if options.mode == "train" else decode
                row["tokens_per_second"] = round(measure(options, implementation, batch), 1)
                row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            except torch.OutOfMemoryError:
                row["problem"] = "out of memory"
            print(json.dumps(row), flush=True)
            if options.csv:
                with open(options.csv, "a", newline="") as file:
                    table = csv.DictWriter(file, row.keys(), lineterminator="\n")
                    if file.tell() == 0:
                        table.writeheader()
                    table.writerow(row)


if __name__ == "__main__":
    main()
