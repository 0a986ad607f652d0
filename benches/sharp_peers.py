"""Errors of PyTorch's attentions on sharp distributions, from f64: those that docs/reliability.md holds ours against.

python3 sharp_peers.py prints, for each element type, backend and problem, the root mean square and the largest difference of the
output and of the gradients, over four seeds. Queries and keys are normal, times a factor.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
# Batch, heads, queries, keys, head dimension; the factor; whether causal.
PROBLEMS = [
    ((2, 4, 512, 513, 64), 60, False),
    ((1, 4, 256, 256, 128), 20, True),
    ((1, 4, 200, 200, 64), 4, True),
    ((2, 2, 128, 129, 64), 60, False),
]


def reference(q, k, v, dout, causal):
    """Output and gradients in f64."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = scores.softmax(-1) @ leaves[2]
    out.backward(dout.double())
    return [out.detach(), *(x.grad for x in leaves)]


def main():
    for dtype in (torch.float16, torch.bfloat16):
        for (batch, heads, seq_q, seq_k, dim), factor, causal in PROBLEMS:
            for name, backend in BACKENDS.items():
                errors = {what: [] for what in ("o", "dq", "dk", "dv")}
                for seed in range(4):
                    torch.manual_seed(seed)

                    def normal(seq, times=1):
                        return (torch.randn(batch, heads, seq, dim, device="cuda") * times).to(dtype)

                    q, k, v, dout = normal(seq_q, factor), normal(seq_k, factor), normal(seq_k), normal(seq_q)
                    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                    with sdpa_kernel(backend):
                        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
                    out.backward(dout)
                    got = [out, *(x.grad for x in leaves)]
                    for what, found, right in zip(errors, got, reference(q, k, v, dout, causal)):
                        difference = (found.double() - right).abs()
                        errors[what].append((difference.square().mean().sqrt().item(), difference.max().item()))
                told = (
                    f"{what} {sum(rms for rms, _ in of) / len(of):.2e} {max(most for _, most in of):.2e}"
                    for what, of in errors.items()
                )
                print(str(dtype)[6:], name, [batch, heads, seq_q, seq_k, dim], factor, causal, *told, flush=True)


if __name__ == "__main__":
    main()
