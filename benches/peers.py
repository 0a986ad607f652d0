"""Times PyTorch's attentions on the first CUDA device, by the rules of src/timing.rs.

python3 peers.py JSON, where JSON holds `cases` and `passes` as src/peers.rs writes them. Prints a line of JSON for each
result: {"impl", "case" (its index, none for matmul), "pass", "answer"}. Exits with 3 where there is no PyTorch or no GPU.
"""

import json
import math
import sys
import time
import warnings

try:
    import torch
    import torch._functorch.config
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
except ImportError as error:
    sys.exit(print(f"no PyTorch: {error}", file=sys.stderr) or 3)
if not torch.cuda.is_available():
    sys.exit(print("PyTorch sees no CUDA device", file=sys.stderr) or 3)

# The numbers of src/timing.rs and src/implementations/mod.rs.
WARM_UP_S, SAMPLE_MS, SAMPLES, LEAST, BUDGET_S = 0.2, 20, 20, 3, 1.5
CACHE_BYTES, SOFTCAP = 256e6, 20.0
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"f32": 5e-3, "f16": 5e-3, "bf16": 3e-2}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "memeff": SDPBackend.EFFICIENT_ATTENTION,
}
torch.manual_seed(0)
warnings.filterwarnings("ignore")
torch._dynamo.config.cache_size_limit = 1000
# Or no backward could be called twice.
torch._functorch.config.donated_buffer = False
compiled_flex = torch.compile(flex_attention)


def synchronized_ms(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def device_time(call):
    """Median and fifths of the device's time of one call, in milliseconds."""
    for _ in range(2):
        last = synchronized_ms(lambda: call(0))
    batch = min(max(int(SAMPLE_MS / last), 1), 200)
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_S:
        for turn in range(batch):
            call(turn)
        torch.cuda.synchronize()
    samples, turn, start = [], 0, time.perf_counter()
    while len(samples) < LEAST or len(samples) < SAMPLES and time.perf_counter() - start < BUDGET_S:
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(batch):
            call(turn)
            turn += 1
        second.record()
        torch.cuda.synchronize()
        samples.append(first.elapsed_time(second) / batch)
    samples.sort()
    return [samples[round((len(samples) - 1) * fraction)] for fraction in (0.5, 0.2, 0.8)]


def positions(length):
    """Those of src/data.rs."""
    spread = [length * (2 * n + 1) // 96 for n in range(48)]
    return sorted({i for i in [0, 1, 63, 64, 127, 128, *spread, length - 2, length - 1] if 0 <= i < length})


class Case:
    """One problem, with inputs that take turns."""

    def __init__(self, fields):
        self.__dict__.update(fields)
        variant = self.variant
        self.window = variant["window"] if isinstance(variant, dict) else None
        self.kind = "window" if self.window else variant
        self.scale = 1 / math.sqrt(self.head_dim)
        rows_q, rows_k = self.batch * self.heads_q * self.seq_q, self.batch * self.heads_kv * self.seq_k
        size = (rows_q + rows_k) * (self.head_dim + self.head_dim_v) * DTYPES[self.dtype].itemsize
        self.sets = min(max(int(CACHE_BYTES / size), 1), 8)

    def inputs(self):
        def normal(*shape):
            return torch.randn(*shape, device="cuda", dtype=DTYPES[self.dtype])

        q = normal(self.batch, self.heads_q, self.seq_q, self.head_dim)
        k = normal(self.batch, self.heads_kv, self.seq_k, self.head_dim)
        v = normal(self.batch, self.heads_kv, self.seq_k, self.head_dim_v)
        dout = normal(self.batch, self.heads_q, self.seq_q, self.head_dim_v)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        if self.kind == "bias":
            leaves.append(normal(1, self.heads_q, self.seq_q, self.seq_k).requires_grad_())
        return leaves, dout

    def visible(self, b, i, j):
        """Whether query i of batch b sees key j; all three are tensors or numbers."""
        shift = self.seq_k - self.seq_q
        seen = (j <= i + shift) if self.causal else (j >= 0)
        if self.window:
            seen = seen & (j > i + shift - self.window)
        if self.kind == "mask":
            seen = seen & ((b % 2 == 1) | (j < self.seq_k - self.seq_k // 8))
        return seen

    def sdpa(self, name):
        """The call of scaled_dot_product_attention, or None where it has no such mathematics."""
        if self.kind in ("softcap", "window") or (self.causal and self.seq_q != self.seq_k):
            return None
        if self.kind != "none" and (self.causal or name == "flash2"):
            return None
        grouped = self.heads_q != self.heads_kv
        hidden = None
        if self.kind == "mask":
            b, j = torch.arange(self.batch, device="cuda"), torch.arange(self.seq_k, device="cuda")
            hidden = self.visible(b.view(-1, 1, 1, 1), 0, j.view(1, 1, 1, -1))

        def call(leaves):
            q, k, v = leaves[:3]
            mask = leaves[3] if self.kind == "bias" else hidden
            if mask is not None:
                mask = mask.expand(self.batch, self.heads_q, self.seq_q, self.seq_k)
            with sdpa_kernel(BACKENDS[name]):
                return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=grouped)

        return call

    def flex(self):
        block_mask = None
        if self.causal or self.kind == "mask":
            batches = self.batch if self.kind == "mask" else None
            block_mask = create_block_mask(
                lambda b, h, i, j: self.visible(b, i, j), batches, None, self.seq_q, self.seq_k, "cuda"
            )
        grouped = self.heads_q != self.heads_kv

        def call(leaves):
            score_mod = None
            if self.kind == "softcap":
                score_mod = lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)
            elif self.kind == "bias":
                bias = leaves[3]
                score_mod = lambda score, b, h, i, j: score + bias[0, h, i, j]
            return compiled_flex(*leaves[:3], score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)

        return call

    def error(self, leaves, dout, o, gradients):
        """Largest relative root-mean-square error at some queries and keys of the last head of the last batch, against f64."""
        b, h, h_kv = self.batch - 1, self.heads_q - 1, self.heads_kv - 1
        group = self.heads_q // self.heads_kv
        q = leaves[0][b, -group:].detach().double().requires_grad_()
        k, v = (x[b, h_kv].detach().double().requires_grad_() for x in leaves[1:3])
        scores = q @ k.T * self.scale
        if self.kind == "softcap":
            scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
        if self.kind == "bias":
            scores = scores + leaves[3][0, -group:].detach().double()
        i, j = torch.arange(self.seq_q, device="cuda"), torch.arange(self.seq_k, device="cuda")
        scores = scores.masked_fill(~self.visible(b, i.view(-1, 1), j.view(1, -1)), -math.inf)
        right = torch.softmax(scores, -1) @ v
        queries, keys = positions(self.seq_q), positions(self.seq_k)
        # Rows count alike: early ones of causal attention are many times as long as late ones.
        rows = (o[b, -1, queries].double() - right[-1, queries]).norm(dim=-1) / right[-1, queries].norm(dim=-1)
        error = (rows**2).mean().sqrt().item()
        pairs = []
        if gradients is not None:
            of = torch.autograd.grad(right, (q, k, v), dout[b, -group:].double())
            pairs.append((gradients[0][b, -1, queries], of[0][-1, queries]))
            pairs += [(found[b, h_kv, keys], of[keys]) for found, of in zip(gradients[1:], of[1:])]
        return max([error] + [((found.double() - of).norm() / of.norm()).item() for found, of in pairs])


def one(case, attention, which):
    """Times one pass."""
    answer = {"device": torch.cuda.get_device_name(), "kernel": "", "note": ""}
    sets = [case.inputs()]

    def forward(turn):
        with torch.no_grad():
            return attention(sets[turn % len(sets)][0])

    def both(turn):
        leaves, dout = sets[turn % len(sets)]
        return torch.autograd.grad(attention(leaves), leaves, dout)

    call = forward if which == "forward" else both
    torch.cuda.reset_peak_memory_stats()
    answer["first_call_ms"] = synchronized_ms(lambda: call(0))
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    answer["peak_bytes"] = torch.cuda.max_memory_allocated()
    error = case.error(*sets[0], forward(0), None if which == "forward" else both(0))
    answer["error"] = error
    if not error <= TOLERANCES[case.dtype]:
        return answer | {"note": f"wrong result: relative error {error:.1e}"}
    sets += [case.inputs() for _ in range(case.sets - 1)]
    if which == "backward":
        saved = [attention(leaves) for leaves, _ in sets]

        def call(turn):
            n = turn % len(sets)
            return torch.autograd.grad(saved[n], sets[n][0], sets[n][1], retain_graph=True)

    return answer | {"time_ms": device_time(call)}


def say(name, index, which, answer):
    print(json.dumps({"impl": name, "case": index, "pass": which, "answer": answer}), flush=True)


def matmul():
    """The rate of a product of two bf16 matrices of 8192 × 8192, on random numbers: the roofline."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = device_time(lambda turn: a @ b)
    flops = 2 * 8192**3 / times[0] / 1e9
    return {"device": torch.cuda.get_device_name(), "kernel": "8192³", "time_ms": times, "tflops": flops, "note": ""}


def main():
    job = json.loads(sys.argv[1])
    passes = [which for which in job["passes"] if which in ("forward", "backward", "both")]
    print(json.dumps({"version": torch.__version__, "cudnn": torch.backends.cudnn.version()}), flush=True)
    say("matmul", None, "forward", matmul())
    for index, case in enumerate(map(Case, job["cases"])):
        names = ["memeff", "flex"] if case.dtype == "f32" else ["cudnn", "flash2", "memeff", "flex"]
        for name in names:
            for which in passes:
                try:
                    attention = case.flex() if name == "flex" else case.sdpa(name)
                    if attention is None:
                        continue
                    answer = one(case, attention, which)
                except torch.OutOfMemoryError:
                    answer = {"note": "out of memory"}
                except Exception as error:
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    answer = {"note": "not supported: " + lines[0][:120]}
                answer.setdefault("device", torch.cuda.get_device_name())
                answer.setdefault("kernel", "")
                say(name, index, which, answer)
                torch.cuda.empty_cache()


main()
