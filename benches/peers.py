"""Times PyTorch's attentions on the first CUDA device, by the rules of src/timing.rs.

python3 peers.py JSON, where JSON holds `cases` and `passes` as src/peers.rs writes them. Prints a line of JSON for each
result: {"impl", "case" (its index, none for matmul), "pass", "answer"}. Exits with 3 where there is no PyTorch or no GPU.
"""

import contextlib
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
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
except ImportError as error:
    sys.exit(print(f"no PyTorch: {error}", file=sys.stderr) or 3)
if not torch.cuda.is_available():
    sys.exit(print("PyTorch sees no CUDA device", file=sys.stderr) or 3)

# The numbers of src/timing.rs and src/implementations/mod.rs.
WARM_UP_S, SAMPLE_MS, SAMPLES, LEAST, BUDGET_S, SLOW_MS = 0.2, 20, 20, 3, 1.5, 1e3
CACHE_BYTES, SOFTCAP, DROPOUT = 256e6, 20.0, 0.1
# Those of src/data.rs, and how many scores are in memory at a time.
LONG, NEGLIGIBLE, SCORES = 1 << 17, 1e-3, 1 << 26
# Those of src/case.rs.
DOCUMENTS, BLOCK = [20, 1, 9, 3, 14, 2, 7, 8], 128
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"f32": 5e-3, "f16": 5e-3, "bf16": 3e-2}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "flash2-deterministic": SDPBackend.FLASH_ATTENTION,
    "memeff": SDPBackend.EFFICIENT_ATTENTION,
}
torch.manual_seed(0)
# What is asked for is a fixed order, not that memory be cleared before it is written.
torch.utils.deterministic.fill_uninitialized_memory = False
warnings.filterwarnings("ignore")
torch._dynamo.config.cache_size_limit = 1000
# Or no backward could be called twice.
torch._functorch.config.donated_buffer = False
compiled_flex = torch.compile(flex_attention)


@contextlib.contextmanager
def order(deterministic):
    """Sums in a fixed order, for what is called within."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def synchronized_ms(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def device_time(call):
    """Median and fifths of the device's time of one call, in milliseconds."""
    last = synchronized_ms(lambda: call(0))
    if last < SLOW_MS:
        last = synchronized_ms(lambda: call(0))
    batch = min(max(int(SAMPLE_MS / last), 1), 200)
    start = time.perf_counter()
    while last < SLOW_MS and time.perf_counter() - start < WARM_UP_S:
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


def positions(length, spread):
    """Those of src/data.rs."""
    others = [length * (2 * n + 1) // (2 * spread) for n in range(spread)]
    return sorted({i for i in [0, 1, 63, 64, 127, 128, *others, length - 2, length - 1] if 0 <= i < length})


def error_of_rows(found, right):
    """That of src/data.rs: the root-mean-square of the rows' relative errors, tiny rows measured by the typical size."""
    sizes = right.square().sum(-1)
    typical = sizes.mean()
    sizes = torch.where(sizes < NEGLIGIBLE**2 * typical, typical, sizes)
    differences = (found.double() - right).square().sum(-1)
    return torch.where(sizes == 0, differences, differences / sizes).mean().sqrt().item()


def random_blocks(down, across, percent):
    """Which blocks are seen: as src/case.rs draws them."""
    state, rows = 1, []
    for _ in range(down):
        row = []
        for _ in range(across):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            row.append((state >> 33) % 100 < percent)
        rows.append(row if any(row) else [True] + row[1:])
    return rows


class Case:
    """One problem, with inputs that take turns."""

    def __init__(self, fields):
        self.__dict__.update(fields)
        variant = self.variant
        name, number = next(iter(variant.items())) if isinstance(variant, dict) else (variant, None)
        # A function of ours is an option, too: FlexAttention has functions for both.
        self.kind = name.removesuffix("-function")
        self.window = number if self.kind == "window" else None
        tokens = self.batch * self.seq_q
        if self.kind == "packed":
            lens = [tokens // number] * number
        elif self.kind == "documents":
            ends = [sum(DOCUMENTS[:n]) * tokens // 64 + (0 if n % 8 == 0 else 5 * n) for n in range(9)]
            lens = [end - begin for begin, end in zip(ends, ends[1:])]
        if self.kind in ("packed", "documents"):
            self.document = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).cuda()
        if self.kind == "sparse":
            down, across = -(-self.seq_q // BLOCK), -(-self.seq_k // BLOCK)
            self.blocks = torch.tensor(random_blocks(down, across, number)).cuda()
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
        elif self.kind == "sinks":
            leaves.append(torch.randn(self.heads_q, device="cuda").requires_grad_())
        return leaves, dout

    def slopes(self):
        """ALiBi's, for heads that are a power of two."""
        return 2.0 ** (-8.0 * torch.arange(1, self.heads_q + 1, device="cuda") / self.heads_q)

    def visible(self, b, i, j):
        """Whether query i of batch b sees key j; all three are tensors or numbers."""
        shift = self.seq_k - self.seq_q
        seen = (j <= i + shift) if self.causal else (j >= 0)
        if self.window:
            seen = seen & (j > i + shift - self.window)
        if self.kind in ("packed", "documents"):
            seen = seen & (self.document[i] == self.document[j])
        if self.kind == "sparse":
            seen = seen & self.blocks[i // BLOCK, j // BLOCK]
        if self.kind == "mask":
            seen = seen & ((b % 2 == 1) | (j < self.seq_k - self.seq_k // 8))
        return seen

    def sdpa(self, name):
        """The call of scaled_dot_product_attention, or None where it has no such mathematics."""
        flexible = ("softcap", "window", "alibi", "sinks", "packed", "documents", "lengths", "sparse")
        if self.kind in flexible or (self.causal and self.seq_q != self.seq_k):
            return None
        if self.kind in ("mask", "bias") and (self.causal or name.startswith("flash2")):
            return None
        dropout = DROPOUT if self.kind == "dropout" else 0.0
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
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=self.causal, enable_gqa=grouped)

        return call

    def full_blocks(self):
        """The block mask of a sparse problem: its blocks are full, and none is partial."""
        full = self.blocks.sum(-1, dtype=torch.int32)[None, None]
        # Those of a row that are seen come first.
        order = self.blocks.int().argsort(dim=-1, descending=True, stable=True).int()[None, None]
        partial = torch.zeros_like(full), torch.zeros_like(order)
        lengths = (self.seq_q, self.seq_k)
        return BlockMask.from_kv_blocks(*partial, full, order, BLOCK_SIZE=(BLOCK, BLOCK), seq_lengths=lengths)

    def flex(self):
        """The call of flex_attention, or None where it has no such mathematics."""
        if self.kind in ("dropout", "lengths"):
            return None
        block_mask = None
        if self.kind == "sparse":
            block_mask = self.full_blocks()
        elif self.causal or self.kind in ("mask", "packed", "documents"):
            batches = self.batch if self.kind == "mask" else None
            block_mask = create_block_mask(
                lambda b, h, i, j: self.visible(b, i, j), batches, None, self.seq_q, self.seq_k, "cuda"
            )
        grouped = self.heads_q != self.heads_kv
        slopes, shift = self.slopes(), self.seq_k - self.seq_q

        def call(leaves):
            score_mod = None
            if self.kind == "softcap":
                score_mod = lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)
            elif self.kind == "bias":
                bias = leaves[3]
                score_mod = lambda score, b, h, i, j: score + bias[0, h, i, j]
            elif self.kind == "alibi":
                score_mod = lambda score, b, h, i, j: score - slopes[h] * abs(i + shift - j)
            elif self.kind == "sinks":
                # It has none of its own: its log-sum-exp tells by what a sink would shrink each row.
                o, lse = compiled_flex(*leaves[:3], block_mask=block_mask, enable_gqa=grouped, return_lse=True)
                return o * torch.sigmoid(lse - leaves[3].view(1, -1, 1)).unsqueeze(-1).to(o.dtype)
            return compiled_flex(*leaves[:3], score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)

        return call

    def sampled(self):
        """Queries and keys: those of src/data.rs."""
        if max(self.seq_q, self.seq_k) <= LONG:
            return positions(self.seq_q, 128), positions(self.seq_k, 128)
        keys = [max(self.seq_k - (16 * n - 15), 0) for n in range(8, 0, -1)] if self.causal else []
        return positions(self.seq_q, 16), keys

    def rows(self, leaves, dout, b, h, queries):
        """In f64: probabilities and the gradients of scores, before and after bias and softcap, of these queries."""
        h_kv = h // (self.heads_q // self.heads_kv)
        q, k, v = leaves[0][b, h, queries], leaves[1][b, h_kv], leaves[2][b, h_kv]
        q, k, v, dout = (x.detach().double() for x in (q, k, v, dout[b, h, queries]))
        scores = q @ k.T * self.scale
        slope = 1.0
        if self.kind == "softcap":
            scores = torch.tanh(scores / SOFTCAP)
            slope = 1 - scores**2
            scores = SOFTCAP * scores
        if self.kind == "bias":
            scores = scores + leaves[3][0, h, queries].detach().double()
        i, j = torch.as_tensor(queries, device="cuda"), torch.arange(self.seq_k, device="cuda")
        scores = scores.masked_fill(~self.visible(b, i.view(-1, 1), j.view(1, -1)), -math.inf)
        if self.kind == "alibi":
            distances = (i.view(-1, 1) + self.seq_k - self.seq_q - j.view(1, -1)).abs()
            scores = scores - self.slopes()[h].double() * distances
        p = torch.softmax(scores, -1)
        if self.kind == "sinks":
            p = p * torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - leaves[3][h].detach().double())
        dp = dout @ v.T
        dt = p * (dp - (p * dp).sum(-1, keepdim=True))
        return q, k, v, dout, p, dt, dt * slope

    def errors(self, leaves, dout, o, gradients):
        """The error of each result against f64, at some queries and keys of the last head of the last batch."""
        b, h, h_kv = self.batch - 1, self.heads_q - 1, self.heads_kv - 1
        queries, keys = self.sampled()
        _, k, v, _, p, _, ds = self.rows(leaves, dout, b, h, queries)
        errors = {"o": error_of_rows(o[b, h, queries], p @ v)}
        if gradients is None:
            return errors
        errors["dq"] = error_of_rows(gradients[0][b, h, queries], self.scale * ds @ k)
        if self.kind == "bias":
            dbias = sum(self.rows(leaves, dout, batch, h, queries)[5] for batch in range(self.batch))
            errors["dbias"] = error_of_rows(gradients[3][0, h, queries], dbias)
        if keys:
            dk, dv = 0, 0
            # Queries before the first of the keys see none of them.
            first = max(keys[0] - (self.seq_k - self.seq_q), 0) if self.causal else 0
            some = max(SCORES // self.seq_k, 1)
            for head in range(h + 1 - self.heads_q // self.heads_kv, h + 1):
                for start in range(first, self.seq_q, some):
                    at = list(range(start, min(start + some, self.seq_q)))
                    q, _, _, d, p, _, ds = self.rows(leaves, dout, b, head, at)
                    dk = dk + self.scale * ds[:, keys].T @ q
                    dv = dv + p[:, keys].T @ d
            errors["dk"] = error_of_rows(gradients[1][b, h_kv, keys], dk)
            errors["dv"] = error_of_rows(gradients[2][b, h_kv, keys], dv)
        return errors


def one(case, attention, which, deterministic):
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
    with order(deterministic):
        answer["first_call_ms"] = synchronized_ms(lambda: call(0))
        torch.cuda.reset_peak_memory_stats()
        found = call(0)
        torch.cuda.synchronize()
        answer["peak_bytes"] = torch.cuda.max_memory_allocated()
    # What dropout drops is its own affair: there is nothing to compare with.
    drops = case.kind == "dropout"
    errors = {} if drops else case.errors(*sets[0], forward(0), None if which == "forward" else found)
    del found
    # NaN is larger than any error, and JSON has none.
    error = max(errors.values(), key=lambda error: math.inf if math.isnan(error) else error, default=math.nan)
    answer["errors"] = {name: None if math.isnan(of) else of for name, of in errors.items()}
    answer["error"] = None if math.isnan(error) else error
    if not drops and not error <= TOLERANCES[case.dtype]:
        return answer | {"note": f"wrong result: relative error {error:.1e}"}
    sets += [case.inputs() for _ in range(case.sets - 1)]
    if which == "backward":
        saved = [attention(leaves) for leaves, _ in sets]

        def call(turn):
            n = turn % len(sets)
            return torch.autograd.grad(saved[n], sets[n][0], sets[n][1], retain_graph=True)

    with order(deterministic):
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
        names = ["memeff", "flex"] if case.dtype == "f32" else [*BACKENDS, "flex"]
        for name in [name for name in names if not job["only"] or name in job["only"]]:
            deterministic = name == "flash2-deterministic"
            # No forward depends on it.
            for which in [which for which in passes if which == "backward" or not deterministic]:
                try:
                    attention = case.flex() if name == "flex" else case.sdpa(name)
                    if attention is None:
                        continue
                    answer = one(case, attention, which, deterministic)
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
