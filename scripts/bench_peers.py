"""Benchmarks of gradclip against its peers: `cp -r` of the dump, h5diff, and careful h5py scripts that do the same work.

    python bench_peers.py dump DIR --gigabytes 4      a dump of 4 ranks, half float32, half bfloat16, for clip and norms
    python bench_peers.py clip DIR OUT                the h5py + torch peer, as a process of its own
    python bench_peers.py diff A B                    the h5py + numpy peer
    python bench_peers.py pack DIR OUT                a dump in the packed layout
    python bench_peers.py run ...                     everything, interleaved; tables of ratios (scripts/bench.sh)

diff, merge and what follows work on dumps of `gradclip synth`: float32, sharded over the ranks.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from bench_rounds import Bench, Command, Ratio

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


def make_packed(dump, directory):
    """The same gradients in the packed layout."""
    import h5py
    import numpy as np

    directory.mkdir()
    for path in dump.glob("rank_*.h5"):
        with h5py.File(path) as file, h5py.File(directory / path.name, "w") as made:
            made.attrs.update(file.attrs)
            index, pieces, offset = {}, [], 0
            for name, data in file["gradients"].items():
                values = data[()].reshape(-1)
                index[name] = {"dtype": "float32", "offset": offset, "shape": list(data.shape)}
                pieces.append(np.pad(values, (0, -values.size % 16)))  # each begins at a multiple of 64 bytes
                offset += pieces[-1].size
            packed = made.create_group("packed")
            packed.create_dataset("float32", data=np.concatenate(pieces)).attrs["dtype"] = "float32"
            packed["index"] = json.dumps(index)
    manifest = json.loads((dump / "manifest.json").read_text())
    for key in ("files", "checksum"):  # of the other layout
        manifest.pop(key, None)
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


def size_of(dump):
    return sum(file.stat().st_size for file in dump.iterdir())


def copies(dump, out, cold=()):
    return {
        "cp -r": Command(["cp", "-r", dump, out], cold),
        "cp -r and sync of the copy": Command(["sh", "-c", f"cp -r '{dump}' '{out}' && sync '{out}'/* '{out}'"], cold),
    }


def cat(*dumps):
    return Command(["sh", "-c", f"cat {' '.join(f'{chr(39)}{dump}{chr(39)}/*' for dump in dumps)} > /dev/null"])


def run_clip(options, bench, directory, out):
    dump = directory / "dump"
    if not dump.exists():  # in a process of its own: a child's peak memory is at least its parent's size when it starts
        subprocess.run([sys.executable, __file__, "dump", dump, "--gigabytes", str(options.gigabytes)], check=True)
    clip = [options.gradclip, "clip", dump, "-o", out, "--quiet"]
    what = f"{size_of(dump) / 1e9:.2f} GB, half float32, half bfloat16, {RANKS} ranks"
    bench.measure(f"clip and norms: {what}, page cache warm", {
        **copies(dump, out),
        "gradclip clip": Command(clip),
        "gradclip clip, budget 5 %": Command([*clip, "--memory-budget", size_of(dump) // 20]),
        "gradclip norms": Command([options.gradclip, "norms", dump, "--quiet"]),
        "cat to /dev/null": cat(dump),
        "h5py + torch": Command([sys.executable, __file__, "clip", dump, out]),
    }, [
        Ratio("`clip` / `cp -r`", "gradclip clip", "cp -r", "≤ 1.25"),
        Ratio("`clip` / `cp -r` and sync", "gradclip clip", "cp -r and sync of the copy"),
        Ratio("`clip` with a budget of 5 % / `cp -r`", "gradclip clip, budget 5 %", "cp -r", "≤ 1.8"),
        Ratio("`norms` / `cat`", "gradclip norms", "cat to /dev/null", "≤ 1.15"),
        Ratio("h5py + torch / `clip`", "h5py + torch", "gradclip clip", "≥ 4"),
    ])
    bench.measure(f"clip: {what}, the dump not in the page cache", {
        **copies(dump, out, cold=(dump,)),
        "gradclip clip": Command(clip, cold=(dump,)),
    }, [Ratio("`clip` / `cp -r` and sync, both cold", "gradclip clip", "cp -r and sync of the copy", "≤ 1.15")])


def model_of(name, layers, *shapes):
    """A description of layers with parameters of these shapes."""
    parameters = [{"name": f"layers.{{layer}}.p{i}", "shape": list(shape)} for i, shape in enumerate(shapes)]
    return {"format": "gradclip.model", "version": 1, "name": name, "layers": layers, "parameters": parameters}


def synthesize(options, dump, seed, model, ranks=RANKS):
    if dump.exists():
        return dump
    description = dump.with_name("model.json")
    description.write_text(json.dumps(model))
    subprocess.run([options.gradclip, "synth", "-o", dump, "--quiet", "--model", description, "--dtype", "float32", "--seed",
                    str(seed), "--mesh", f"dp_shard={ranks}"], check=True)
    return dump


def matrices(options):
    """Matrices of 4096 x 4096 and a small vector to each, as many as fit."""
    return model_of("matrices", max(1, round(options.gigabytes * 1e9 / (4096 * 4096 * 4))), (4096, 4096), (4096,))


def run_diff(options, bench, directory, out):
    a, same, other = (synthesize(options, directory / name, seed, matrices(options))
                      for name, seed in (("a", 1), ("same", 1), ("other", 2)))
    for b, what in ((same, "every element equal"), (other, "every element different")):
        ours = [options.gradclip, "diff", a, b]
        peer = [sys.executable, __file__, "diff", a, b]
        report = json.loads(subprocess.run([*ours, "--format", "json"], stdout=subprocess.PIPE, check=False).stdout)
        counted = int(subprocess.run(peer, stdout=subprocess.PIPE, check=True).stdout)
        if sum(each["different"] for each in report["parameters"]) != counted:
            sys.exit(f"gradclip and numpy do not count the same differences of {a} and {b}")
        # h5diff knows shards and not parameters: file by file, with the same rule. With -r it would list elements.
        h5diff = f"for f in rank_*.h5; do h5diff -q -p 1.1920929e-07 \"$f\" '{b}'/\"$f\"; done; true"
        bench.measure(f"diff: 2 x {size_of(a) / 1e9:.2f} GB of float32, {RANKS} ranks, {what}, page cache warm", {
            "gradclip diff": Command([*ours, "--quiet"]),
            "cat of both to /dev/null": cat(a, b),
            "h5diff -q": Command(["sh", "-c", f"cd '{a}' && {h5diff}"]),
            "h5py + numpy": Command(peer),
        }, [
            Ratio("h5diff -q / `diff`", "h5diff -q", "gradclip diff", "≥ 20"),
            Ratio("h5diff -q / `cat` of both", "h5diff -q", "cat of both to /dev/null"),
            Ratio("`diff` / `cat` of both", "gradclip diff", "cat of both to /dev/null"),
            Ratio("h5py + numpy / `diff`", "h5py + numpy", "gradclip diff", "≥ 5"),
        ], codes=(0, 1))


def run_merge(options, bench, directory, out):
    dump = synthesize(options, directory / "a", 1, matrices(options))
    bench.measure(f"merge: {size_of(dump) / 1e9:.2f} GB of float32, {RANKS} ranks, page cache warm", {
        **copies(dump, out),
        "gradclip merge": Command([options.gradclip, "merge", dump, "-o", out, "--quiet"]),
    }, [
        Ratio("`merge` / `cp -r`", "gradclip merge", "cp -r", "≤ 1.5"),
        Ratio("`merge` / `cp -r` and sync", "gradclip merge", "cp -r and sync of the copy"),
    ])


def run_small(options, bench, directory, out):
    """The same bytes in many parameters and in few."""
    ranks, count = 8, options.parameters
    many = synthesize(options, directory / "many", 3, model_of("many", count // 2, (ranks, 512), (ranks * 512,)), ranks)
    elements = 512 * count // 20
    few = synthesize(options, directory / "few", 3, model_of("few", 10, (ranks, elements), (ranks * elements,)), ranks)
    packed = directory / "packed"
    if not packed.exists():
        subprocess.run([sys.executable, __file__, "pack", many, packed], check=True)
    commands = {}
    for name, dump in (("few", few), ("many", many), ("many, packed", packed)):
        commands[f"norms, {name}"] = Command([options.gradclip, "norms", dump, "--quiet"])
        commands[f"clip, {name}"] = Command([options.gradclip, "clip", dump, "-o", out, "--quiet"])
    what = f"small parameters: {size_of(few) / 1e9:.2f} GB on {ranks} ranks in {count:,} parameters, and in 20"
    bench.measure(what, commands, [
        Ratio(f"`{command}`: {name} / few", f"{command}, {name}", f"{command}, few", "≤ 2")
        for command in ("norms", "clip") for name in ("many", "many, packed")])


def run_processes(options, bench, directory, out):
    dump = synthesize(options, directory / "a", 1, matrices(options))
    mpirun = ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    norms = [options.gradclip, "norms", dump, "--quiet", "--threads"]
    bench.measure(f"processes: norms of {size_of(dump) / 1e9:.2f} GB, page cache warm", {
        "1 process x 2 threads": Command([*norms, "2"]),
        "2 processes x 1 thread": Command([*mpirun, *norms, "1"]),
        "inspect on 2 processes: the launch alone": Command([*mpirun, options.gradclip, "inspect", dump, "--quiet"]),
    }, [Ratio("1 x 2 / 2 x 1", "1 process x 2 threads", "2 processes x 1 thread", "≥ 0.9")])


def run_start(options, bench, directory, out):
    dump = synthesize(options, directory / "tiny", 4, model_of("tiny", 2, (64, 64), (64,)))
    bench.measure("start-up: a dump of 4 parameters", {
        "gradclip inspect": Command([options.gradclip, "inspect", dump, "--quiet"]),
        "h5dump -H": Command(["h5dump", "-H", dump / "rank_00000.h5"]),
    }, [Ratio("`inspect` / `h5dump -H`", "gradclip inspect", "h5dump -H", "≤ 3")])


PARTS = {"clip": run_clip, "diff": run_diff, "merge": run_merge, "small": run_small, "processes": run_processes,
         "start": run_start}


def run(options):
    directory = pathlib.Path(options.directory or tempfile.mkdtemp(prefix="gradclip_bench_")).absolute()
    directory.mkdir(exist_ok=True)
    options.gradclip = os.path.abspath(options.gradclip)
    out = directory / "out"
    bench = Bench(options.rounds, out)
    for part, measured in PARTS.items():
        if part in options.parts:
            measured(options, bench, directory, out)
            if options.json:
                bench.write(options.json)
    if options.kernels and "kernels" in options.parts:
        subprocess.run([options.kernels, *options.kernel_arguments.split()], check=True)
        torch_peer = pathlib.Path(__file__).with_name("bench_torch.py")
        subprocess.run([sys.executable, torch_peer, "--bench", options.kernels], check=True)
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
    pack = commands.add_parser("pack")
    pack.add_argument("directory", type=pathlib.Path)
    pack.add_argument("out", type=pathlib.Path)
    everything = commands.add_parser("run")
    everything.add_argument("--gradclip", required=True)
    everything.add_argument("--kernels")
    everything.add_argument("--kernel-arguments", default="")
    everything.add_argument("--directory", help="keep the dumps here and use them again")
    everything.add_argument("--gigabytes", type=float, default=4.0, help="of each dump")
    everything.add_argument("--rounds", type=int, default=5)
    everything.add_argument("--parts", default=",".join([*PARTS, "kernels"]), type=lambda text: text.split(","))
    everything.add_argument("--parameters", type=int, default=20_000, help="small ones, for the part of that name")
    everything.add_argument("--json", help="where every measured number goes, too")
    everything.add_argument("--quick", action="store_true", help="0.1 GB, one round, no kernels: does it run at all")
    options = parser.parse_args()
    if options.command == "dump":
        make_dump(options.directory, options.gigabytes)
    elif options.command == "clip":
        clip_with_torch(options.directory, options.out)
    elif options.command == "pack":
        make_packed(options.directory, options.out)
    elif options.command == "diff":
        diff_with_numpy(options.directory, options.other)
    else:
        if options.quick:
            options.gigabytes, options.rounds, options.parameters = 0.1, 1, 200
            options.parts = [part for part in options.parts if part != "kernels"]
        run(options)


if __name__ == "__main__":
    main()
