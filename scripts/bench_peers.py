"""Benchmarks of gradclip against its peers: `cp -r` of the dump, h5diff, and careful h5py scripts that do the same work.

    python bench_peers.py dump DIR --gigabytes 4      a dump of 4 ranks, half float32, half bfloat16, for clip and norms
    python bench_peers.py clip DIR OUT                the h5py + torch peer, as a process of its own
    python bench_peers.py diff A B                    the h5py + numpy peer
    python bench_peers.py run ...                     everything, interleaved; tables of ratios (scripts/bench.sh)

diff and merge work on dumps of `gradclip synth`: float32, dp_shard=4.
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


def diff_with_numpy(directory, other):
    """What `gradclip diff` says of each parameter, block by block so that everything stays in the processor's cache."""
    import h5py
    import numpy as np

    block, epsilon = 1 << 18, np.float32(np.finfo(np.float32).eps)
    buffers = None
    rows = {}
    for rank in range(RANKS):
        name = f"rank_{rank:05d}.h5"
        with h5py.File(pathlib.Path(directory) / name) as file, h5py.File(pathlib.Path(other) / name) as second:
            for parameter, data in file["gradients"].items():
                if buffers is None or buffers[0].size < data.size:
                    buffers = np.empty(data.size, np.float32), np.empty(data.size, np.float32)
                a, b = (buffer[:data.size].reshape(data.shape) for buffer in buffers)
                data.read_direct(a)
                second["gradients"][parameter].read_direct(b)
                row = rows.setdefault(parameter, np.zeros(6))
                for begin in range(0, data.size, block):
                    x, y = a.reshape(-1)[begin:begin + block], b.reshape(-1)[begin:begin + block]
                    difference, size = np.abs(x - y), np.abs(y)
                    row[0] += np.count_nonzero(difference > epsilon * size)
                    row[1] = max(row[1], difference[difference.argmax()])
                    relative = np.divide(difference, size, out=np.zeros_like(size), where=size > 0)
                    row[2] = max(row[2], relative[relative.argmax()])
                    x, y = x.astype(np.float64), y.astype(np.float64)
                    row[3:] += np.dot(x, x), np.dot(y, y), np.dot(x, y)
    print(int(sum(row[0] for row in rows.values())))


def timed(command, out, codes=(0,)):
    """Wall seconds and peak memory of a command, run after its output directory is gone."""
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) not in codes:
        sys.exit(f"{command} ended with status {status}")
    return seconds, usage.ru_maxrss * 1024


def summary(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def size_of(dump):
    return sum(file.stat().st_size for file in dump.iterdir())


def measure(what, commands, ratios, rounds, out, codes=(0,)):
    """Runs the commands in turn, `rounds` times after one that warms up, and prints two tables."""
    seconds = {name: [] for name in commands}
    memory = dict.fromkeys(commands, 0)
    for round_number in range(rounds + 1):
        for name, command in commands.items():
            took, peak = timed([str(word) for word in command], out, codes)
            if round_number > 0:  # the first round warms the page cache and the machine's memory
                seconds[name].append(took)
                memory[name] = max(memory[name], peak)
    shutil.rmtree(out, ignore_errors=True)
    count = f"{rounds} interleaved round{'s' if rounds > 1 else ''}"
    print(f"\n{what}; {count}, page cache warm; medians (smallest to largest)\n")
    print("| what | seconds | peak memory, MB |\n|---|---|---|")
    for name in commands:
        print(f"| {name} | {summary(seconds[name])} | {memory[name] / 1e6:.0f} |")
    print("\n| ratio | measured | to reach |\n|---|---|---|")
    for name, (a, b, goal) in ratios.items():
        print(f"| {name} | {summary([x / y for x, y in zip(seconds[a], seconds[b])])} | {goal} |")
    sys.stdout.flush()


def copies(dump, out):
    return {
        "cp -r": ["cp", "-r", dump, out],
        "cp -r and sync of the copy": ["sh", "-c", f"cp -r '{dump}' '{out}' && sync '{out}'/* '{out}'"],
    }


def run_clip(options, directory, out):
    dump = directory / "dump"
    if not dump.exists():  # in a process of its own: a child's peak memory is at least its parent's size when it starts
        subprocess.run([sys.executable, __file__, "dump", dump, "--gigabytes", str(options.gigabytes)], check=True)
    commands = {
        **copies(dump, out),
        "gradclip clip": [options.gradclip, "clip", dump, "-o", out, "--quiet"],
        "gradclip clip, budget 5 %": [options.gradclip, "clip", dump, "-o", out, "--quiet", "--memory-budget",
                                      str(size_of(dump) // 20)],
        "gradclip norms": [options.gradclip, "norms", dump, "--quiet"],
        "cat to /dev/null": ["sh", "-c", f"cat '{dump}'/* > /dev/null"],
        "h5py + torch": [sys.executable, __file__, "clip", dump, out],
    }
    measure(f"clip and norms: {size_of(dump) / 1e9:.2f} GB, half float32, half bfloat16, {RANKS} ranks", commands, {
        "`clip` / `cp -r`": ("gradclip clip", "cp -r", "≤ 1.6"),
        "`clip` / `cp -r` and sync": ("gradclip clip", "cp -r and sync of the copy", ""),
        "`clip` with a budget of 5 % / `cp -r`": ("gradclip clip, budget 5 %", "cp -r", ""),
        "`norms` / `cat`": ("gradclip norms", "cat to /dev/null", "≤ 1.15"),
        "h5py + torch / `clip`": ("h5py + torch", "gradclip clip", "≥ 3"),
    }, options.rounds, out)


def synthesize(options, dump, seed):
    """Matrices of 4096 x 4096 and a small vector to each, as many as fit."""
    side, model = 4096, dump.with_name("model.json")
    layers = max(1, round(options.gigabytes * 1e9 / (side * side * 4)))
    shapes = [{"name": "layers.{layer}.weight", "shape": [side, side]}, {"name": "layers.{layer}.norm", "shape": [side]}]
    model.write_text(json.dumps({"format": "gradclip.model", "version": 1, "name": "matrices", "layers": layers,
                                 "parameters": shapes}))
    if not dump.exists():
        subprocess.run([options.gradclip, "synth", "-o", dump, "--quiet", "--model", model, "--dtype", "float32", "--seed",
                        str(seed), "--mesh", f"dp_shard={RANKS}"], check=True)
    return dump


def run_diff(options, directory, out):
    a, same, other = (synthesize(options, directory / name, seed) for name, seed in (("a", 1), ("same", 1), ("other", 2)))
    for b, what in ((same, "every element equal"), (other, "every element different")):
        ours = [options.gradclip, "diff", a, b]
        peer = [sys.executable, __file__, "diff", a, b]
        report = json.loads(subprocess.run([*ours, "--format", "json"], stdout=subprocess.PIPE, check=False).stdout)
        counted = int(subprocess.run(peer, stdout=subprocess.PIPE, check=True).stdout)
        if sum(each["different"] for each in report["parameters"]) != counted:
            sys.exit(f"gradclip and numpy do not count the same differences of {a} and {b}")
        # h5diff knows shards and not parameters: file by file, with the same rule. With -r it would list elements.
        h5diff = f"for f in rank_*.h5; do h5diff -q -p 1.1920929e-07 \"$f\" '{b}'/\"$f\"; done; true"
        measure(f"diff: 2 x {size_of(a) / 1e9:.2f} GB of float32, {RANKS} ranks, {what}", {
            "gradclip diff": [*ours, "--quiet"],
            "h5diff -q": ["sh", "-c", f"cd '{a}' && {h5diff}"],
            "h5py + numpy": peer,
        }, {
            "h5diff -q / `diff`": ("h5diff -q", "gradclip diff", "≥ 20"),
            "h5py + numpy / `diff`": ("h5py + numpy", "gradclip diff", "≥ 5"),
        }, options.rounds, out, codes=(0, 1))


def run_merge(options, directory, out):
    dump = synthesize(options, directory / "a", 1)
    measure(f"merge: {size_of(dump) / 1e9:.2f} GB of float32, {RANKS} ranks", {
        **copies(dump, out),
        "gradclip merge": [options.gradclip, "merge", dump, "-o", out, "--quiet"],
    }, {
        "`merge` / `cp -r`": ("gradclip merge", "cp -r", "≤ 1.5"),
        "`merge` / `cp -r` and sync": ("gradclip merge", "cp -r and sync of the copy", ""),
    }, options.rounds, out)


def run(options):
    directory = pathlib.Path(options.directory or tempfile.mkdtemp(prefix="gradclip_bench_")).absolute()
    directory.mkdir(exist_ok=True)
    options.gradclip = os.path.abspath(options.gradclip)
    print(f"machine: {platform.machine()}, {len(os.sched_getaffinity(0))} processors, "
          f"load {os.getloadavg()[0]:.1f} at the start")
    for part, measured in (("clip", run_clip), ("diff", run_diff), ("merge", run_merge)):
        if part in options.parts:
            measured(options, directory, directory / "out")
    if options.kernels and "kernels" in options.parts:
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
    diff = commands.add_parser("diff")
    diff.add_argument("directory")
    diff.add_argument("other")
    everything = commands.add_parser("run")
    everything.add_argument("--gradclip", required=True)
    everything.add_argument("--kernels")
    everything.add_argument("--kernel-arguments", default="")
    everything.add_argument("--directory", help="keep the dumps here and use them again")
    everything.add_argument("--gigabytes", type=float, default=4.0, help="of each dump")
    everything.add_argument("--rounds", type=int, default=5)
    everything.add_argument("--parts", default="clip,diff,merge,kernels", type=lambda text: text.split(","))
    everything.add_argument("--quick", action="store_true", help="0.1 GB, one round, no kernels: does it run at all")
    options = parser.parse_args()
    if options.command == "dump":
        make_dump(options.directory, options.gigabytes)
    elif options.command == "clip":
        clip_with_torch(options.directory, options.out)
    elif options.command == "diff":
        diff_with_numpy(options.directory, options.other)
    else:
        if options.quick:
            options.gigabytes, options.rounds = 0.1, 1
            options.parts = [part for part in options.parts if part != "kernels"]
        run(options)


if __name__ == "__main__":
    main()
