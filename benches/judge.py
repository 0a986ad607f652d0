"""Whether a result is right: src/judge.rs for PyTorch's results. Pure functions, without PyTorch.

tests/judge.json holds the two together.
"""

import math

# Rows of a block, blocks of a head, and what is zero but for rounding, of inputs that are standard normal.
ROWS, BLOCKS, ZERO = 64, 4, 1e-9
# Of f32 that of its products in tf32, which a peer may take.
BOUNDS = {"f32": 2**-8, "f16": 2**-8, "bf16": 2**-6}
# Scores of the heads that share keys: up to so many two heads are compared, and up to so many gradients of keys anywhere.
SCORES_OF_TWO_HEADS, SCORES = 1 << 28, 1 << 32


def blocks(length, most=BLOCKS):
    """Up to `most` blocks, spread evenly over a sequence: the first row of each, and the one behind its last."""
    count = min(-(-length // ROWS), most)
    rows = min(length, ROWS)
    if count < 2:
        return [(0, rows)] * count
    starts = [n * (length - rows) // (count - 1) for n in range(count)]
    return [(start, start + rows) for start in starts]


def sampled(group, seq_q, seq_k, causal):
    """How many heads are compared (the first and the last, or the last alone), and which blocks of queries and keys, with
    `group` query heads to a head of keys and values."""
    scores = group * seq_q * seq_k
    heads = 2 if scores <= SCORES_OF_TWO_HEADS else 1
    if scores <= SCORES:
        return heads, blocks(seq_q), blocks(seq_k)
    # Where causal, the last keys are seen by few queries. Other keys are seen by too many to sum over.
    return heads, blocks(seq_q, 2), blocks(seq_k)[-1:] if causal else []


def error_of_block(difference, size, count):
    """The relative error in the norm of a block of `count` numbers, from sums of squares: of what was found less what is
    right, and of what is right. Where the latter is zero, what was found is all there is to measure."""
    if size <= ZERO**2 * count:
        return math.sqrt(difference / max(count, 1))
    return math.sqrt(difference / size)


def worst(errors):
    """The largest, NaN if one of them is, and 0 of none."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=0.0)


def verdict(errors, confirmed, bound):
    """`right`, `wrong` or `unconfirmed`, of somebody else's result: `errors` has the largest error for each seed that was
    tried, `confirmed` tells whether a second implementation was right for all of them."""
    if errors and errors[0] <= bound:
        return "right"
    if len(errors) > 1 and confirmed and not any(error <= bound for error in errors):
        return "wrong"
    return "unconfirmed"
