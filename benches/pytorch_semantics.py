"""Checks what docs/coming-from-pytorch.md says of PyTorch. Needs a CUDA device.

python3 benches/pytorch_semantics.py
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch.manual_seed(0)


def random(heads, seq, dim=64, dtype=torch.float32):
    return torch.randn(2, heads, seq, dim, device="cuda", dtype=dtype)


def naive(q, k, v, attends):
    """Attention in f64; `attends` is true where a query sees a key. Gives the output and the log-sum-exp."""
    s = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~attends, -math.inf)
    return s.softmax(-1) @ v.double(), s.logsumexp(-1)


def same(a, b, what):
    error = (a.double() - b.double()).abs().max().item()
    assert error < 1e-2, f"{what}: {error}"
    print(f"{what}: {error:.1e}")


q, k, v = random(4, 3), random(4, 5), random(4, 5)
top_left = torch.ones(3, 5, dtype=torch.bool, device="cuda").tril(0)
same(F.scaled_dot_product_attention(q, k, v, is_causal=True), naive(q, k, v, top_left)[0], "is_causal is aligned top-left")
keep = torch.rand(2, 1, 3, 5, device="cuda") < 0.7
keep[..., 0] = True
same(F.scaled_dot_product_attention(q, k, v, attn_mask=keep), naive(q, k, v, keep)[0], "True attends in a boolean mask")
bias = torch.randn(1, 4, 3, 5, device="cuda")
s = q @ k.transpose(-1, -2) / 8 + bias
same(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), s.softmax(-1) @ v, "a float mask is added after the scale")
kv = random(2, 5)
repeated = kv.repeat_interleave(2, 1)
same(
    F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True),
    F.scaled_dot_product_attention(q, repeated, repeated),
    "grouped heads: h / (heads_q / heads_kv)",
)
dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
assert not torch.equal(dropped, F.scaled_dot_product_attention(q, k, v)), "dropout_p is applied whenever it is above 0"

nothing = torch.zeros(2, 1, 3, 5, dtype=torch.bool, device="cuda")
for backend in [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]:
    half = [x.to(torch.bfloat16) for x in (q, k, v)]
    try:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*half, attn_mask=nothing)
        print(f"a row that sees nothing, {backend.name}: {out.flatten()[:3].tolist()}")
    except RuntimeError as error:
        print(f"a row that sees nothing, {backend.name}: {str(error)[:80]}")

q, k, v = random(4, 128), random(4, 128), random(4, 128)
block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i != 7), 2, 4, 128, 128, device="cuda")
attends = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril(0)
attends[7] = False
flex = torch.compile(flex_attention)
out, lse = flex(q, k, v, block_mask=block_mask, return_lse=True)
right, right_lse = naive(q, k, v, attends)
rows = [i for i in range(128) if i != 7]
same(out[:, :, rows], right[:, :, rows], "a mask_mod's True attends")
same(lse[:, :, rows], right_lse[:, :, rows], "FlexAttention's lse is a natural logarithm")
print(f"a row that sees nothing, FlexAttention: {out[0, 0, 7, :3].tolist()}, lse {lse[0, 0, 7].item()}")
