#!/usr/bin/env python3
"""What recording costs a training step: seconds without it, with the final gradients, with every microbatch.

    python scripts/bench_recording.py [--megabytes 64] [--microbatches 4] [--rounds 5] [--ranks 2]

A model of linear layers on the CPU, sharded by FSDP2 over gloo where there are several ranks. The variants run in turn,
round after round, and a ratio is formed within its round. Each has seconds by the clock and of the processor (rank 0's
process), which other jobs on the machine do not lengthen. "bytes" is the time to write what a recording wrote, as plain
files with fsync, all ranks at once: less than that recording cannot cost. Recordings go to --folder (default: a
temporary one), whose disk is measured too.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "examples")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from example import free_port  # noqa: E402
from gradclip_microbatches import record_microbatches  # noqa: E402
from gradclip_record import record_gradients  # noqa: E402

WIDTH, ROWS = 512, 512


def measure(rank, port, options, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    layers = max(1, int(options.megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp_shard",))
    if options.ranks > 1:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    data, seconds = torch.randn(ROWS, WIDTH), {}

    def step(loop=None):
        for k in range(options.microbatches):
            if options.ranks > 1:
                model.set_requires_gradient_sync(k + 1 == options.microbatches)
                model.set_is_last_backward(k + 1 == options.microbatches)
            if loop is None:
                model(data).square().mean().backward()
            else:
                with loop.microbatch():
                    model(data).square().mean().backward()

    def microbatches(target):
        with record_microbatches(target, model, step=1, device_mesh=mesh) as loop:
            step(loop)
        assert loop.ok

    def final(target):
        step()
        assert record_gradients(target, model, step=1, device_mesh=mesh).ok

    variants = {"step": lambda _: step(), "final": final, "microbatches": microbatches}
    step()
    for turn in range(options.rounds):
        for name, run in variants.items():
            model.zero_grad()
            target = folder / f"{name}{turn}"
            dist.barrier()
            begin = now()
            run(target)
            dist.barrier()
            seconds.setdefault(name, []).append(now() - begin)
            if name != "step":
                seconds.setdefault(f"{name} bytes", []).append(plain_write(target, rank))
        dist.barrier()
        if rank == 0:
            for target in folder.iterdir():
                shutil.rmtree(target)
        dist.barrier()
    if rank == 0:
        tell(options, layers * WIDTH * WIDTH * 4, seconds)
    dist.destroy_process_group()


def now():
    return np.array([time.perf_counter(), time.process_time()])


def plain_write(target, rank):
    """Seconds to write this rank's files again, as nothing but bytes."""
    contents = [file.read_bytes() for file in target.rglob(f"rank_{rank:05d}.h5")]
    dist.barrier()
    begin = now()
    for k, content in enumerate(contents):
        with open(target / f"plain_{rank}_{k}", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    return now() - begin


def tell(options, size, seconds):
    def spread(values):
        return "  ".join(f"{statistics.median(column):8.2f} ({min(column):.2f} to {max(column):.2f})".ljust(28)
                         for column in np.array(values).T).rstrip()
    print(f"{size / 1e6:.0f} MB of float32 gradients, {options.ranks} ranks, {options.microbatches} microbatches, "
          f"{options.rounds} rounds\n")
    print(f"{'':28}by the clock (least to most)  processor")
    for name, values in seconds.items():
        print(f"{name:28}{spread(values)}")
    for name in ("final", "microbatches"):
        whole = [a / b for a, b in zip(seconds[name], seconds["step"])]
        extra = [(a - b) / c for a, b, c in zip(seconds[name], seconds["step"], seconds[f"{name} bytes"])]
        print(f"{name + ' / step':28}{spread(whole)}")
        print(f"{'  what is added / bytes':28}{spread(extra)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=64.0, help="of gradients in one microbatch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        mp.spawn(measure, (free_port(), options, folder), nprocs=options.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
