"""Times PyTorch's attentions on the first CUDA device, by the rules of src/timing.rs.

Reads a question a line as JSON, as src/peers.rs writes it: {"impl", "case", "pass"}, or the name of one of ROOFS. Prints
versions first, then for each question {"answer", "last"}: null where the implementation has no such mathematics, and the last one
where the GPU did not survive it. Exits with 3 where there is no PyTorch or no GPU.
"""

import contextlib
import itertools
import json
import math
import sys
import time
import warnings

import judge

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
WARM_UP_S, SAMPLE_MS, SAMPLES, LEAST, BUDGET_S, SLOW_MS, VERY_SLOW_MS = 0.2, 20, 20, 3, 1.5, 1e3, 5e3
MOST_CALLS, CACHE_BYTES, SETS, SETS_OF_DECODING, SOFTCAP, DROPOUT = 200, 256e6, 8, 512, 20.0, 0.1
# How many scores in f64 are in memory at a time, and how far apart two ways to compute in f64 may be.
SCORES, SAME = 1 << 26, 1e-6
# Those of src/case.rs.
DOCUMENTS, BLOCK, DECODING = [20, 1, 9, 3, 14, 2, 7, 8], 128, 16
# That of src/peers.rs.
COPY_BYTES = 2 << 30
# The words of src/timing.rs.
WITH_LAUNCHES = "with launches"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
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
# Compiled for each problem: shapes that are not known beforehand make it slower.
compiled_flex = torch.compile(flex_attention, dynamic=False)


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


def device_ms(start):
    """Milliseconds between two events of the device, around what `start` starts."""
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    start()
    second.record()
    torch.cuda.synchronize()
    return first.elapsed_time(second)


def warm_up(call):
    """Calls until everything is compiled and the clocks are high: milliseconds of a call, and the number of calls of a sample."""
    last = synchronized_ms(lambda: call(0))
    if last < SLOW_MS:
        last = synchronized_ms(lambda: call(0))
    batch = min(max(int(SAMPLE_MS / last), 1), MOST_CALLS)
    start = time.perf_counter()
    while last < SLOW_MS and time.perf_counter() - start < WARM_UP_S:
        for turn in range(batch):
            call(turn)
        torch.cuda.synchronize()
    return last, batch


def quantiles(start, calls, last):
    """Median and fifths of the device's time of one call, in milliseconds. `start` starts so many; one takes about `last`."""
    samples, begin = [], time.perf_counter()
    least = LEAST if last < VERY_SLOW_MS else 1
    while len(samples) < least or len(samples) < SAMPLES and time.perf_counter() - begin < BUDGET_S:
        samples.append(device_ms(start) / calls)
    samples.sort()
    return [samples[round((len(samples) - 1) * fraction)] for fraction in (0.5, 0.2, 0.8)]


def device_time(call):
    """Median and fifths of the device's time of one call, in milliseconds."""
    last, batch = warm_up(call)
    turns = itertools.count()

    def start():
        for _ in range(batch):
            call(next(turns))

    return quantiles(start, batch, last)


def record(call, calls):
    """A CUDA graph of so many calls, and the result of its first one, which is computed when the graph is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # What libraries allocate for a stream is allocated before anything is recorded.
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call(0)
        for turn in range(1, calls):
            call(turn)
    return graph, result


def replayed_time(call, sets, is_right):
    """Like device_time, of calls that a CUDA graph repeats: the host launches the graph and none of its calls."""
    _, batch = warm_up(call)
    calls = -(-batch // sets) * sets
    graph, result = record(call, calls)
    # Only a replay can replace it.
    result.fill_(math.nan)
    graph.replay()
    once = device_ms(graph.replay)
    if not is_right(result):
        raise RuntimeError("the graph's results differ from those of its calls")
    replays = min(max(int(SAMPLE_MS / once), 1), MOST_CALLS)

    def start():
        for _ in range(replays):
            graph.replay()

    return quantiles(start, replays * calls, once)


def time_of_step(call, sets, is_right):
    """replayed_time, or device_time with a note where the calls cannot be recorded."""
    try:
        return {"time_ms": replayed_time(call, sets, is_right)}
    except RuntimeError as error:
        torch.cuda.synchronize()
        return {"time_ms": device_time(call), "note": f"{WITH_LAUNCHES}: {first_line(error)}"}


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def error_of_blocks(found, right, blocks):
    """The largest relative error in the norm of these blocks, whose rows lie one behind the other."""
    errors, start = [], 0
    for begin, end in blocks:
        rows = slice(start, start + end - begin)
        start += end - begin
        difference = (found[rows].detach().double() - right[rows]).square().sum().item()
        errors.append(judge.error_of_block(difference, right[rows].square().sum().item(), right[rows].numel()))
    return judge.worst(errors)


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
        self.sets = min(max(int(CACHE_BYTES / size), 1), SETS_OF_DECODING if self.is_decoding() else SETS)

    def is_decoding(self):
        """Whether a forward is a decoding step, whose time depends on the bytes of its cache: as in src/case.rs."""
        return self.kind == "none" and self.seq_q <= DECODING and self.seq_q < self.seq_k

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

    def places(self):
        """Heads that are compared, as [batch, head], and their blocks of queries and keys."""
        group = self.heads_q // self.heads_kv
        heads, of_queries, of_keys = judge.sampled(group, self.seq_q, self.seq_k, self.causal)
        places = dict.fromkeys([(self.batch - 1, self.heads_q - 1), (0, 0)])
        return list(places)[:heads], of_queries, of_keys

    def right(self, leaves, dout, b, h, queries, keys):
        """Output and gradients of a head in f64 by their formulas: of these queries, and of these keys if there are any."""
        _, k, v, _, p, _, ds = self.rows(leaves, dout, b, h, queries)
        right = {"o": p @ v, "dq": self.scale * ds @ k}
        if self.kind == "bias":
            right["dbias"] = sum(self.rows(leaves, dout, batch, h, queries)[5] for batch in range(self.batch))
        if keys:
            group = self.heads_q // self.heads_kv
            dk, dv = 0, 0
            # Queries before the first of the keys see none of them.
            first = max(keys[0] - (self.seq_k - self.seq_q), 0) if self.causal else 0
            some = max(SCORES // self.seq_k, 1)
            for head in range(h // group * group, (h // group + 1) * group):
                for start in range(first, self.seq_q, some):
                    at = list(range(start, min(start + some, self.seq_q)))
                    q, _, _, d, p, _, ds = self.rows(leaves, dout, b, head, at)
                    dk = dk + self.scale * ds[:, keys].T @ q
                    dv = dv + p[:, keys].T @ d
            right |= {"dk": dk, "dv": dv}
        return right

    def second(self, leaves, dout, b, h):
        """The same of all queries and keys, by autograd through scores, softmax and product, which knows no formula of a
        gradient."""
        group = self.heads_q // self.heads_kv
        k, v = (x[b, h // group].detach().double().requires_grad_() for x in leaves[1:3])
        dk, dv, found = 0, 0, {}
        i, j = torch.arange(self.seq_q, device="cuda").view(-1, 1), torch.arange(self.seq_k, device="cuda").view(1, -1)
        for head in range(h // group * group, (h // group + 1) * group):
            q = leaves[0][b, head].detach().double().requires_grad_()
            scores = q @ k.T * self.scale
            if self.kind == "softcap":
                scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
            if self.kind == "bias":
                scores = scores + leaves[3][0, head].detach().double()
            if self.kind == "alibi":
                scores = scores - self.slopes()[head].double() * (i + self.seq_k - self.seq_q - j).abs()
            scores = scores.masked_fill(~self.visible(b, i, j), -math.inf)
            if self.kind == "sinks":
                sink = leaves[3][head].detach().double().expand(self.seq_q, 1)
                p = torch.softmax(torch.cat([scores, sink], -1), -1)[:, :-1]
            else:
                p = torch.softmax(scores, -1)
            o = p @ v
            dq, more_dk, more_dv = torch.autograd.grad(o, (q, k, v), dout[b, head].detach().double())
            dk, dv = dk + more_dk, dv + more_dv
            if head == h:
                found = {"o": o.detach(), "dq": dq}
        return found | {"dk": dk, "dv": dv}

    def compare(self, leaves, dout, found_of, backward):
        """The largest error of each result against f64 in the blocks of heads that are compared. `found_of` gives what was found
        of a head, by name: of all its rows."""
        places, of_queries, of_keys = self.places()
        if not backward:
            of_keys = []
        queries = [i for begin, end in of_queries for i in range(begin, end)]
        keys = [j for begin, end in of_keys for j in range(begin, end)]
        errors = {}
        for b, h in places:
            right, found = self.right(leaves, dout, b, h, queries, keys), found_of(b, h)
            for name in right.keys() & found.keys():
                blocks, at = (of_keys, keys) if name in ("dk", "dv") else (of_queries, queries)
                errors.setdefault(name, []).append(error_of_blocks(found[name][at], right[name], blocks))
        return {name: judge.worst(errors[name]) for name in ("o", "dq", "dk", "dv", "dbias") if name in errors}

    def errors(self, leaves, dout, o, gradients):
        """The error of each of these results."""

        def found_of(b, h):
            if gradients is None:
                return {"o": o[b, h]}
            h_kv = h // (self.heads_q // self.heads_kv)
            found = {"o": o[b, h], "dq": gradients[0][b, h], "dk": gradients[1][b, h_kv], "dv": gradients[2][b, h_kv]}
            return found | ({"dbias": gradients[3][0, h]} if self.kind == "bias" else {})

        return self.compare(leaves, dout, found_of, gradients is not None)

    def is_confirmed(self, leaves, dout):
        """Whether formulas and autograd agree about these inputs: then what differs from them is wrong."""
        try:
            errors = self.compare(leaves, dout, lambda b, h: self.second(leaves, dout, b, h), True)
        except torch.OutOfMemoryError:
            return False
        return bool(errors) and judge.worst(errors.values()) <= SAME


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
    backward = which != "forward"
    errors = {} if drops else case.errors(*sets[0], forward(0), found if backward else None)
    del found
    error = judge.worst(errors.values())
    # JSON has no NaN.
    answer["errors"] = {name: None if math.isnan(of) else of for name, of in errors.items()}
    answer["error"] = None if math.isnan(error) or drops else error
    if not drops and not error <= judge.BOUNDS[case.dtype]:
        # Nothing is called wrong for one seed, or for one opinion.
        sets.append(case.inputs())
        with order(deterministic):
            again = case.errors(*sets[1], forward(1), both(1) if backward else None)
        judged = [error, judge.worst(again.values())]
        # Nobody has a second opinion of the gradient of a bias.
        others = [judge.worst([of for name, of in these.items() if name != "dbias"]) for these in (errors, again)]
        confirmed = all(not of <= judge.BOUNDS[case.dtype] for of in others) and all(case.is_confirmed(*of) for of in sets)
        said = "relative errors " + " and ".join(f"{of:.1e}" for of in judged) + " with two seeds"
        if judge.verdict(judged, confirmed, judge.BOUNDS[case.dtype]) == "wrong":
            return answer | {"note": f"wrong result: {said}, where formulas and autograd in f64 agree"}
        answer["note"] = f"not confirmed to be wrong: {said}"
        del sets[1]
    sets += [case.inputs() for _ in range(case.sets - 1)]
    if which == "backward":
        saved = [attention(leaves) for leaves, _ in sets]

        def call(turn):
            n = turn % len(sets)
            return torch.autograd.grad(saved[n], sets[n][0], sets[n][1], retain_graph=True)

    with order(deterministic):
        if backward or not case.is_decoding():
            return answer | {"time_ms": device_time(call)}

        def is_right(o):
            return judge.worst(case.errors(*sets[0], o, None).values()) <= max(error, judge.BOUNDS[case.dtype])

        timed = time_of_step(call, len(sets), is_right)
        notes = [note for note in (answer["note"], timed.get("note")) if note]
        return answer | timed | {"note": "; ".join(notes)}


def matmul():
    """The rate of a product of two bf16 matrices of 8192 × 8192, on random numbers: the roofline."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = device_time(lambda turn: a @ b)
    flops = 2 * 8192**3 / times[0] / 1e9
    return {"device": torch.cuda.get_device_name(), "kernel": "8192³", "time_ms": times, "tflops": flops, "note": ""}


def copy():
    """The time of a copy within the device's memory: the roofline of decoding. A call takes much longer than its launch."""
    source = torch.randn(COPY_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    times = device_time(lambda turn: target.copy_(source))
    note = "" if torch.equal(source, target) else "wrong result"
    answer = {"device": torch.cuda.get_device_name(), "kernel": f"{COPY_BYTES >> 30} GiB", "note": note}
    return answer if note else answer | {"time_ms": times}


# What is measured of the device itself, by name.
ROOFS = {"matmul": matmul, "copy": copy}


def say(answer, last=False):
    print(json.dumps({"answer": answer, "last": last}), flush=True)


def answer_to(case, name, which):
    """Times one pass of one implementation, or says why not; nothing, where it has no such mathematics."""
    answer = {"device": torch.cuda.get_device_name(), "kernel": ""}
    try:
        attention = case.flex() if name == "flex" else case.sdpa(name)
        return attention and answer | one(case, attention, which, name == "flash2-deterministic")
    except torch.OutOfMemoryError:
        return answer | {"note": "out of memory"}
    except Exception as error:
        return answer | {"note": "not supported: " + first_line(error)}


def survives():
    """Whether the GPU still computes: after some errors it does not, for as long as the process lives."""
    try:
        torch.cuda.synchronize()
        return torch.ones(2, device="cuda").sum().item() == 2
    except Exception:
        return False


def main():
    print(json.dumps({"version": torch.__version__, "cudnn": torch.backends.cudnn.version()}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, str):
            say(ROOFS[question]())
            torch.cuda.empty_cache()
            continue
        torch.manual_seed(0)
        # What was compiled for problems before must not count.
        torch._dynamo.reset()
        answer = answer_to(Case(question["case"]), question["impl"], question["pass"])
        last = not survives()
        say(answer, last)
        if last:
            sys.exit(4)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
