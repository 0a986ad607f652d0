"""Times the host's part of small calls of PyTorch on the first CUDA device, by the rules of src/host.rs.

Its argument is {"batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim", "head_dim_v", "dtype", "causal", "calls"} as JSON. Prints for each
row [name, microseconds until a call returns, microseconds for each of many calls], as a line of JSON.
"""

import json
import statistics
import sys
import time

try:
    import torch
except ImportError as error:
    sys.exit(print(f"no PyTorch: {error}", file=sys.stderr) or 3)
if not torch.cuda.is_available():
    sys.exit(print("PyTorch sees no CUDA device", file=sys.stderr) or 3)

of = json.loads(sys.argv[1])
dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[of["dtype"]]
# As many calls between two waits as in src/host.rs.
TURNS = 4


def times(call):
    for _ in range(TURNS):
        call()
    torch.cuda.synchronize()
    alone = []
    for turn in range(of["calls"]):
        if turn % TURNS == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        alone.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(of["calls"]):
        call()
    torch.cuda.synchronize()
    return statistics.median(alone), (time.perf_counter() - start) * 1e6 / of["calls"]


def tensors(tracked):
    q = (of["batch"], of["heads_q"], of["seq_q"], of["head_dim"])
    k = (of["batch"], of["heads_kv"], of["seq_k"], of["head_dim"])
    v = (*k[:3], of["head_dim_v"])
    return [torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=tracked) for shape in (q, k, v)]


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=of["causal"], enable_gqa=of["heads_q"] != of["heads_kv"]
    )


plain, tracked = tensors(False), tensors(True)
dout = torch.randn_like(attention(*plain))


def both():
    torch.autograd.grad(attention(*tracked), tracked, dout)


for name, call in (
    ("PyTorch: forward", lambda: attention(*plain)),
    ("PyTorch: forward, tracked", lambda: attention(*tracked)),
    ("PyTorch: forward and backward", both),
    ("PyTorch: q + q", lambda: plain[0] + plain[0]),
    ("PyTorch: q + q, tracked", lambda: tracked[0] + tracked[0]),
):
    print(json.dumps([name, *times(call)]), flush=True)
