"""Benchmarks of gradclip against its peers: `cp -r` of the dump, and a careful h5py + torch script that does the same work.

    python bench_peers.py dump DIR --gigabytes 4      a synthetic dump of 4 ranks, half float32, half bfloat16
    python bench_peers.py clip DIR OUT                the h5py + torch peer, as a process of its own
    python bench_peers.py run ...                     everything, interleaved; a table of ratios (scripts/bench.sh)
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

RANKS = 4
MAX_NORM = 1.0
#: A LLaMA-like mix of sizes: per layer a few large matrices and small vectors.
LARGE, SMALL = 16 << 20, 4096


def parameters(gigabytes):
    """Name, global element count and dtype of every parameter; sharded over the ranks in equal parts."""
    remaining = int(gigabytes * 1e9)
    number = 0
    while remaining > 0:
        dtype = "float32" if number % 2 == 0 else "bfloat16"
        size = 4 if dtype == "float32" else 2
        elements = max(RANKS * 1024, min(LARGE * (1 if size == 4 else 2), remaining // size // RANKS * RANKS))
        yield f"layers.{number}.weight", elements, dtype
        yield f"layers.{number}.norm", SMALL, dtype
        remaining -= (elements + SMALL) * size
        number += 1


def make_dump(directory, gigabytes):
    import h5py
    import numpy as np

    directory = pathlib.Path(directory)
    directory.mkdir(parents=True)
    entries = [
        {"name": name, "model_part": 0, "shape": [elements], "dtype": dtype, "mesh": "world", "placements": ["Shard(0)"]}
        for name, elements, dtype in parameters(gigabytes)
    ]
    generator = np.random.default_rng(7)
    pattern = (generator.standard_normal(LARGE // 2) * np.exp2(generator.integers(-12, 3, LARGE // 2))).astype(np.float32)
    for rank in range(RANKS):
        with h5py.File(directory / f"rank_{rank:05d}.h5", "w") as file:
            file.attrs["format"] = "gradclip.dump"
            file.attrs["version"] = np.int64(1)
            file.attrs["rank"], file.attrs["world_size"], file.attrs["step"] = np.int64(rank), np.int64(RANKS), np.int64(0)
            group = file.create_group("gradients")
            for number, entry in enumerate(entries):
                local = entry["shape"][0] // RANKS
                values = np.resize(np.roll(pattern, rank * 1000 + number), local)
                if entry["dtype"] == "bfloat16":
                    values = (values.view(np.uint32) >> 16).astype(np.uint16)
                data = group.create_dataset(entry["name"], data=values)
                data.attrs["dtype"] = entry["dtype"]
    manifest = {
        "format": "gradclip.dump", "version": 1, "step": 0, "microbatch": None, "state": "before_scale",
        "world_size": RANKS, "rank_file": "rank_{rank:05d}.h5",
        "meshes": {"world": {"dim_names": ["dp"], "ranks": list(range(RANKS))}},
        "device_mesh": "world", "moe_mesh": None, "parameters": entries,
        "training": {"max_grad_norm": MAX_NORM, "norm_type": 2.0},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def clip_with_torch(directory, out):
    """What a person would write with h5py and torch, without its usual waste: one buffer, touched once, for all tensors."""
    import h5py
    import numpy as np
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    directory, out = pathlib.Path(directory), pathlib.Path(out)
    out.mkdir()
    manifest = json.loads((directory / "manifest.json").read_text())
    largest = max(entry["shape"][0] // RANKS * 4 for entry in manifest["parameters"])
    buffer = np.ones(largest, dtype=np.uint8)

    def tensors(file):
        for name, data in file["gradients"].items():
            storage = buffer[: data.size * data.dtype.itemsize].view(data.dtype)
            data.read_direct(storage)
            tensor = torch.from_numpy(storage)
            yield name, data, storage, tensor.view(torch.bfloat16) if data.attrs["dtype"] == "bfloat16" else tensor

    norms = []
    for rank in range(RANKS):
        with h5py.File(directory / f"rank_{rank:05d}.h5") as file:
            norms += [torch.linalg.vector_norm(tensor, dtype=torch.float32).double() for _, _, _, tensor in tensors(file)]
    total = torch.linalg.vector_norm(torch.stack(norms))
    coefficient = torch.clamp(MAX_NORM / (total + 1e-6), max=1.0)
    for rank in range(RANKS):
        name = f"rank_{rank:05d}.h5"
        with h5py.File(directory / name) as file, h5py.File(out / name, "w") as clipped:
            clipped.attrs.update(file.attrs)
            group = clipped.create_group("gradients")
            for parameter, data, storage, tensor in tensors(file):
                tensor.mul_(coefficient)
                written = group.create_dataset(parameter, data=storage)
                written.attrs.update(data.attrs)
    shutil.copy(directory / "manifest.json", out)
    print(float(total))


def timed(command, out):
    """Wall seconds and peak memory of a command, run after its output directory is gone."""
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status != 0:
        sys.exit(f"{command} ended with status {status}")
    return seconds, usage.ru_maxrss * 1024


def summary(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def run(options):
    directory = pathlib.Path(options.directory or tempfile.mkdtemp(prefix="gradclip_bench_"))
    dump, out = directory / "dump", directory / "out"
    if not dump.exists():
        make_dump(dump, options.gigabytes)
    size = sum(file.stat().st_size for file in dump.iterdir())
    python = [sys.executable, __file__]
    threads = len(os.sched_getaffinity(0))
    commands = {
        "cp -r": ["cp", "-r", dump, out],
        "cp -r and sync of the copy": ["sh", "-c", f"cp -r '{dump}' '{out}' && sync '{out}'/* '{out}'"],
        "gradclip clip": [options.gradclip, "clip", dump, "-o", out, "--quiet"],
        "gradclip clip, budget 5 %": [options.gradclip, "clip", dump, "-o", out, "--quiet", "--memory-budget",
                                      str(size // 20)],
        "gradclip norms": [options.gradclip, "norms", dump, "--quiet"],
        "cat to /dev/null": ["sh", "-c", f"cat '{dump}'/* > /dev/null"],
        "h5py + torch": [*python, "clip", dump, out],
    }
    seconds = {name: [] for name in commands}
    memory = dict.fromkeys(commands, 0)
    for round_number in range(options.rounds + 1):
        for name, command in commands.items():
            took, peak = timed([str(word) for word in command], out)
            if round_number > 0:  # the first round warms the page cache and the machine's memory
                seconds[name].append(took)
                memory[name] = max(memory[name], peak)
    shutil.rmtree(out, ignore_errors=True)

    def ratio(a, b):
        return [x / y for x, y in zip(seconds[a], seconds[b])]

    print(f"machine: {platform.machine()}, {threads} processors; dump: {size / 1e9:.2f} GB, {RANKS} ranks; "
          f"{options.rounds} interleaved rounds, page cache warm; medians (smallest to largest)\n")
    print("| what | seconds | peak memory, MB |\n|---|---|---|")
    for name in commands:
        print(f"| {name} | {summary(seconds[name])} | {memory[name] / 1e6:.0f} |")
    rows = [
        ("`clip` / `cp -r`", ratio("gradclip clip", "cp -r"), "≤ 1.6"),
        ("`clip` / `cp -r` and sync", ratio("gradclip clip", "cp -r and sync of the copy"), ""),
        ("`clip` with a budget of 5 % / `cp -r`", ratio("gradclip clip, budget 5 %", "cp -r"), ""),
        ("`norms` / `cat`", ratio("gradclip norms", "cat to /dev/null"), ""),
        ("h5py + torch / `clip`", ratio("h5py + torch", "gradclip clip"), "≥ 3"),
    ]
    print("\n| ratio | measured | to reach |\n|---|---|---|")
    for name, values, goal in rows:
        print(f"| {name} | {summary(values)} | {goal} |")
    sys.stdout.flush()
    if options.kernels:
        subprocess.run([options.kernels, *options.kernel_arguments.split()], check=True)
    if not options.directory:
        shutil.rmtree(directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    dump = commands.add_parser("dump")
    dump.add_argument("directory")
    dump.add_argument("--gigabytes", type=float, default=4.0)
    clip = commands.add_parser("clip")
    clip.add_argument("directory")
    clip.add_argument("out")
    everything = commands.add_parser("run")
    everything.add_argument("--gradclip", required=True)
    everything.add_argument("--kernels")
    everything.add_argument("--kernel-arguments", default="")
    everything.add_argument("--directory", help="keep the dump here and use it again")
    everything.add_argument("--gigabytes", type=float, default=4.0)
    everything.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.command == "dump":
        make_dump(options.directory, options.gigabytes)
    elif options.command == "clip":
        clip_with_torch(options.directory, options.out)
    else:
        run(options)


if __name__ == "__main__":
    main()
