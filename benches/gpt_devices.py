#!/usr/bin/env python3
"""Training speed of examples/gpt on one GPU and on several, and the largest difference of their losses.

    python3 benches/gpt_devices.py --csv devices.csv -- gpt --device cuda --data FILE … --steps 24 --eval-interval 12 --batch 64

The command after -- is run twice: as given, and with --devices 0,1. The speed is the last one that gpt prints: that of the steps after
the last evaluation but one. Both runs have the same seed and the same batches, so their losses differ only by rounding.
"""

import argparse
import csv
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

SIZES = ["dtype", "layers", "heads", "width", "vocabulary", "context", "batch"]


def train(command, directory):
    """Sizes of the model, training losses of all steps, and tokens per second."""
    run = [*command, "--name", "run", "--sample-tokens", "0"]
    done = subprocess.run(run, cwd=directory, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    speeds = re.findall(r"(\d+) tokens/s", done.stdout)
    if done.returncode or not speeds:
        sys.exit(f"{' '.join(run)} ended with {done.returncode} and {len(speeds)} speeds")
    folder = pathlib.Path(directory, "runs", "run")
    config = tomllib.loads((folder / "config.toml").read_text())
    with open(folder / "loss.csv", newline="") as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return config, losses, float(speeds[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="0,1", help="numbers of the GPUs")
    parser.add_argument("--csv", required=True, help="file for the rows")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:]
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]

    rows, reference = [], None
    for devices in ("", options.devices):
        with tempfile.TemporaryDirectory() as directory:
            more = ["--devices", devices] if devices else []
            config, losses, speed = train([*command, *more], directory)
        count = len(devices.split(","))
        difference = max(abs(a - b) for a, b in zip(reference, losses, strict=True)) if reference else ""
        reference = reference or losses
        rows.append([gpu, *(config[size] for size in SIZES), count, config["steps"], f"{speed:.0f}", difference])
        print(f"{count} of {gpu}: {speed:.0f} tokens/s, largest difference of losses {difference}", flush=True)
    with open(options.csv, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["device", *SIZES, "devices", "steps", "tokens_per_second", "largest_loss_difference"])
        table.writerows(rows)


if __name__ == "__main__":
    main()
