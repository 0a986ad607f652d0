#!/usr/bin/env python3
"""Where a step's time on the GPU goes, by kernel: runs a program under ncu and sums one step of training or of decoding.

    python3 benches/gpt_profile.py --name ours -- target/release/gpt --device cuda … --steps 12
    python3 benches/gpt_profile.py --name pytorch -- python3 benches/gpt_peer.py --mode eager --warmup 2 --steps 2
    python3 benches/gpt_profile.py --name decoding --decoding -- target/release/gpt generate … --tokens 12

A step is what lies between two forward passes: from the first of --layers forward kernels of attention to the next step's
first. The last whole step counts. Durations are ncu's gpu__time_duration with the GPU's own clocks and caches; kernels run
one at a time, so their sum is what a step takes on a GPU that never waits.
"""

import argparse
import csv
import io
import re
import subprocess
import sys

GROUPS = [
    ("attention forward", r"flash_fwd|fmha.*fwd|sdpa.*fprop|\bforward"),
    ("attention backward", r"flash_bwd|fmha.*bwd|sdpa.*bprop|\bgradient|\bdelta|\bround_sums|dot_do_o|convert_dq"),
    ("matrix products", r"gemm|matmul|cutlass|nvjet|cublas|splitKreduce"),
    ("reductions", r"reduce|norm|softmax|sum"),
]


def kernels(command, ncu, skip):
    """Name and nanoseconds of every kernel, in order."""
    metric = "gpu__time_duration.sum"
    run = [ncu, "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw", "--metrics", metric]
    run += ["--target-processes", "all", "--print-units", "base", "--launch-skip", str(skip)]
    done = subprocess.run(run + command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        sys.exit(f"ncu gave no table:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    return [(row["Kernel Name"], float(row[metric].replace(",", ""))) for row in rows if row["ID"]]


def last_step(found, layers, decoding):
    forward, backward = (re.compile(GROUPS[index][1], re.I) for index in (0, 1))
    starts = [at for at, (name, _) in enumerate(found) if forward.search(name)][::layers]
    spans = [found[start:end] for start, end in zip(starts, starts[1:])]
    # Of a training, an evaluation has no backward pass.
    steps = [span for span in spans if decoding or any(backward.search(name) for name, _ in span)]
    if not steps:
        names = sorted({name for name, _ in found})
        sys.exit("no whole step; kernels seen:\n" + "\n".join(names))
    return steps[-1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--name", required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--decoding", action="store_true", help="steps have no backward pass")
    parser.add_argument("--skip", type=int, default=0, help="kernels to leave out, before the steps")
    parser.add_argument("--csv", help="a file for the rows: name, kernel, group, launches, milliseconds")
    parser.add_argument("--launches", help="a file for every launch of the step in its order, with its milliseconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    step = last_step(kernels(options.command[1:], options.ncu, options.skip), options.layers, options.decoding)

    by_kernel = {}
    for name, nanoseconds in step:
        launches, total = by_kernel.get(name, (0, 0.0))
        by_kernel[name] = (launches + 1, total + nanoseconds)
    by_group = {}
    rows = []
    for name, (launches, total) in sorted(by_kernel.items(), key=lambda item: -item[1][1]):
        group = next((group for group, pattern in GROUPS if re.search(pattern, name, re.I)), "elementwise and other")
        count, sum_ = by_group.get(group, (0, 0.0))
        by_group[group] = (count + launches, sum_ + total)
        rows.append((options.name, name, group, launches, f"{total / 1e6:.4f}"))
    total = sum(nanoseconds for _, nanoseconds in step)
    print(f"{options.name}: {len(step)} kernels, {total / 1e6:.2f} ms")
    for group, (launches, sum_) in sorted(by_group.items(), key=lambda item: -item[1][1]):
        print(f"  {group:<24} {launches:>5} {sum_ / 1e6:>9.3f} ms")
    for _, name, group, launches, milliseconds in rows[:40]:
        print(f"    {milliseconds:>9} ms {launches:>4}  {group[:12]:<12} {name[:150]}")
    if options.launches:
        with open(options.launches, "w") as file:
            file.writelines(f"{nanoseconds / 1e6:.4f} {name}\n" for name, nanoseconds in step)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["implementation", "kernel", "group", "launches", "milliseconds"])
            table.writerows(rows)


if __name__ == "__main__":
    main()
