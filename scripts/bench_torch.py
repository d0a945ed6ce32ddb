"""The passes over gradients in memory against PyTorch's, on the same bytes: ratios of medians, on 1 and 2 threads.

    python bench_torch.py [--bench build/release/apps/gradclip-bench/gradclip-bench] [--mebibytes 256] [--rounds 7]

- gradclip: the statistics pass and the scaling pass of gradclip-bench, one after the other.
- foreach: torch.nn.utils.clip_grad_norm_(foreach=True).
- the reference's operations: the largest magnitude of all gradients, then of each the sum of (|g| / largest)^2, then
  g * coefficient, in torch, each result written to memory that was there before.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
TENSOR_BYTES = 4 << 20
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def median_of(rounds, work):
    work()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def gradients(dtype, total):
    count = TENSOR_BYTES // dtype.itemsize
    tensors = [torch.nn.Parameter(torch.zeros(count, dtype=dtype)) for _ in range(total // TENSOR_BYTES)]
    for tensor in tensors:
        tensor.grad = torch.randn(count, dtype=dtype)
    return tensors


def reference_operations(grads, magnitudes, terms):
    largest = torch.stack([torch.abs(g, out=magnitudes).max() for g in grads]).max()
    total = torch.zeros((), dtype=torch.float64)
    for g in grads:
        torch.abs(g, out=magnitudes)
        torch.div(magnitudes, largest, out=terms)
        torch.pow(terms, 2.0, out=terms)
        total += terms.sum()
    coefficient = torch.clamp(1e9 / (largest * total.sqrt() + 1e-6), max=1.0).to(grads[0].dtype)
    for g in grads:
        g.mul_(coefficient)


def ours(program, mebibytes):
    """Seconds of one pass by name, type and threads."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "bench.json"
        subprocess.run([program, f"--array_mib={mebibytes}", f"--benchmark_out={out}", "--benchmark_out_format=json",
                        "--benchmark_filter=^(statistics|scale) (float32|bfloat16)/"], check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["benchmarks"]
    found = {}
    for row in rows:
        if row.get("aggregate_name") == "median":
            # Not its time, which Google Benchmark divides by the threads.
            found[row["run_name"].split("/")[0], row["threads"]] = (mebibytes << 20) / row["bytes_per_second"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bench", default=str(ROOT / "build/release/apps/gradclip-bench/gradclip-bench"))
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    passes = ours(options.bench, options.mebibytes)
    print("| type, threads | gradclip | foreach | / gradclip | the reference's operations | / gradclip |\n|---|---|---|---|---|---|")
    for name, dtype in TYPES.items():
        parameters = gradients(dtype, options.mebibytes << 20)
        grads = [parameter.grad for parameter in parameters]
        magnitudes, terms = torch.empty_like(grads[0]), torch.empty_like(grads[0])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            mine = passes[f"statistics {name}", threads] + passes[f"scale {name}", threads]
            foreach = median_of(options.rounds,
                                lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True))
            reference = median_of(options.rounds, lambda: reference_operations(grads, magnitudes, terms))
            print(f"| {name}, {threads} | {1e3 * mine:.1f} ms | {1e3 * foreach:.1f} ms | {foreach / mine:.2f} | "
                  f"{1e3 * reference:.1f} ms | {reference / mine:.2f} |", flush=True)


if __name__ == "__main__":
    main()
