"""What test_convert.py converts: files of a world of gloo processes, shards by a layout, flat parts as Megatron-LM's."""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

from gradclip_megatron import save_flat_gradients  # noqa: E402

WORLD = 4
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
ODD_NAMES = ("50% a/b", ".hidden", "grüße 模型", "tab\there", "x" * 300)


# What the libraries write ---------------------------------------------------------------------------------------------

def trained_gradients(mesh):
    """FSDP2 over tensor parallelism, as a training step leaves it: uneven rows, columns, and a weight that only FSDP
    cuts, on meshes of its own."""
    model = nn.ModuleDict({f"rows{n}": nn.Linear(2, n, bias=False) for n in (5, 9)})
    model["columns"], model["plain"] = nn.Linear(6, 5, bias=False), nn.Linear(3, 7)
    torch.manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    parallelize_module(model, mesh["tp"], {"rows5": ColwiseParallel(), "rows9": ColwiseParallel(),
                                           "columns": RowwiseParallel(input_layouts=Replicate())})
    for child in model.values():
        fully_shard(child, mesh=mesh["dp_shard"])
    for child in model.values():
        output = child(torch.randn(3, child.in_features))
        (output.to_local() if isinstance(output, DTensor) else output).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def with_local(tensor, local):
    """A DTensor of the same layout. float8 goes by its bytes: DTensor neither scatters nor gathers it."""
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def made_gradients(mesh):
    """What no small training run brings about: every type, other placements, names with odd characters."""
    torch.manual_seed(3)
    found = {}
    for i, dtype in enumerate(DTYPES):
        values = torch.randn(6, 8).to(dtype)
        placements = [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Replicate())][i % 3]
        spread = distribute_tensor(bytes_of(values) if dtype.itemsize == 1 else values, mesh, placements)
        found[str(dtype).removeprefix("torch.")] = with_local(spread, spread.to_local().view(dtype))
    for name in ODD_NAMES:
        found[name] = distribute_tensor(torch.randn(5), mesh, [Shard(0), Replicate()])
    found["one_row"] = distribute_tensor(torch.randn(1, 3), mesh, [Shard(0), Shard(1)])
    found["scalar"] = distribute_tensor(torch.randn(()), mesh, [Replicate(), Replicate()])
    return found


def in_one_process(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    gradients = {**trained_gradients(mesh), **made_gradients(mesh)}
    whole = {}
    for name, gradient in gradients.items():
        local = gradient.to_local()
        full = with_local(gradient, bytes_of(local) if local.itemsize == 1 else local).full_tensor()
        whole[name] = full.view(gradient.dtype)
    addends = DTensor.from_local(torch.full((3, 2), rank // 2 + 0.5), mesh, [Partial(), Replicate()])
    torch.save({"step": 3, "gradients": {**gradients, "bias": torch.arange(3.0)}, "unsummed": {"addends": addends}},
               folder / f"rank_{rank}.pt")
    dcp.save({"gradients": gradients, "step": 3, "plain": torch.arange(3.0)}, checkpoint_id=folder / "dcp")
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


def bytes_of(tensor):
    """Where PyTorch has no operation on the type itself, one on its bytes does."""
    return tensor.contiguous().view(torch.uint8)


def split(tensor, mesh_shape, dims):
    """Shards of a tensor by mesh coordinate: dimension d of the mesh chunks dims[d] of the tensor, None keeps it."""
    shards = {}
    for coordinate in np.ndindex(*mesh_shape):
        shard = tensor
        for at, count, dim in zip(coordinate, mesh_shape, dims):
            shard = torch.chunk(shard, count, dim)[at] if dim is not None else shard
        shards[coordinate] = shard.contiguous()
    return shards


LAYOUT = {
    "world_size": WORLD,
    "meshes": {"job": {"dim_names": ["dp", "tp"], "ranks": [[0, 1], [2, 3]]},
               "last": {"dim_names": ["tp"], "ranks": [2, 3]}},
    "device_mesh": "job",
    "parameters": [
        {"pattern": r".*\.rows", "mesh": "job", "placements": ["Shard(0)", "Shard(1)"]},
        {"pattern": r".*\.sums", "mesh": "job", "placements": ["Partial(avg)", "Replicate()"]},
        {"pattern": r"head\..*", "mesh": ["last"], "placements": ["Shard(dim=0)"]},
        {"pattern": r"raw\.float8.*", "mesh": "job", "placements": ["Replicate()", "S(1)"], "dtype": "float8_e4m3fn"},
        {"pattern": r"raw\..*", "mesh": "job", "placements": ["R", "S(1)"], "dtype": "bfloat16"},
        {"pattern": ".*", "mesh": None},
    ],
}


def write_layout(path, **changes):
    path.write_text(json.dumps({**LAYOUT, **changes}))
    return path


def sharded_files(dtypes=(torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float64)):
    """({rank: {name: shard}}, {name: whole}) of LAYOUT's job."""
    torch.manual_seed(11)
    whole = {f"{str(dtype)[6:]}.rows": torch.randn(5, 4).to(dtype) for dtype in dtypes}
    whole["50% a/b.rows"] = torch.randn(3, 2)
    ranks = {rank: {"bias": torch.arange(3.0)} for rank in range(WORLD)}
    for name, tensor in whole.items():
        for (i, j), shard in split(bytes_of(tensor) if tensor.itemsize == 1 else tensor, (2, 2), (0, 1)).items():
            ranks[2 * i + j][name] = shard.view(tensor.dtype)
    return ranks, {**whole, "bias": torch.arange(3.0)}


# Megatron-LM ----------------------------------------------------------------------------------------------------------
# It is not on PyPI for CPUs. These have the names and the structure of its DistributedOptimizer (buffers, gbuf_ranges)
# and _ParamAndGradBuffer, as megatron/core/optimizer/distrib_optimizer.py and megatron/core/distributed define them.

class Group:
    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


def flat_range(start, end):
    return SimpleNamespace(start=start, end=end, size=end - start)


def ranges_of_rank(places, begin, size, group):
    """A bucket's param_map on one rank: the four ranges of each parameter that its part of the buffer touches."""
    part = size // group.size()
    low, found = begin + group.rank() * part, {}
    for parameter, (start, end) in places.items():
        first, last = max(start, low), min(end, low + part)
        if first < last:
            origins = {"gbuf_world": 0, "gbuf_world_in_bucket": begin, "gbuf_local": low, "param": start}
            found[parameter] = {name: flat_range(first - origin, last - origin) for name, origin in origins.items()}
    return found


def distributed_optimizer(gradients, group, per_bucket=2):
    """One buffer of {parameter: gradient}: parameters from the last to the first, each from a multiple of 64 on,
    buckets filled up to a multiple of the group's size and 128; between them NaN, which nobody may count."""
    buckets, ranges, begin, parameters = [], [], 0, list(reversed(gradients))
    dtype = next(iter(gradients.values())).dtype
    for chosen in (parameters[i:i + per_bucket] for i in range(0, len(parameters), per_bucket)):
        places, at = {}, begin
        for parameter in chosen:
            at = -(-at // 64) * 64
            places[parameter] = (at, at + parameter.numel())
            at += parameter.numel()
        unit = math.lcm(group.size(), 128)
        data = torch.full((-(-(at - begin) // unit) * unit,), math.nan, dtype=dtype)
        for parameter, (start, end) in places.items():
            data[start - begin:end - begin] = gradients[parameter].reshape(-1)
        buckets.append(SimpleNamespace(grad_data=data, offset=begin))
        ranges.append({"param_map": ranges_of_rank(places, begin, data.numel(), group)})
        begin += data.numel()
    return SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets, data_parallel_group=group)],
                           gbuf_ranges=[{(dtype, dtype): ranges}])


def save_megatron_job(folder, dtype=torch.float32):
    """8 ranks, pipeline 2 x data 2 x tensor 2 (tensor fastest, pipeline slowest), experts by ep 2 x edp 1 x etp 2.
    Returns the files and the full tensors, experts of several ranks stacked."""
    torch.manual_seed(5)
    whole, files = {}, []
    for stage in range(2):
        dense = {f"layers.{stage}.qkv.weight": ((6, 5), 0), f"layers.{stage}.proj.weight": ((5, 4), 1),
                 f"layers.{stage}.norm.weight": ((5,), -1), f"layers.{stage}.wide.weight": ((40, 30), 0)}
        experts = {f"layers.{stage}.experts.0.weight": ((4, 6), 0)}
        for name, (shape, _) in {**dense, **experts}.items():
            whole[name] = torch.randn(*((2,) if name in experts else ()), *shape).to(dtype)
        for data, tensor in np.ndindex(2, 2):
            chunk, gradients = SimpleNamespace(), {}
            for name, (_, axis) in {**dense, **experts}.items():
                full = whole[name][data] if name in experts else whole[name]
                local = torch.chunk(full, 2, axis)[tensor] if axis >= 0 else full
                parameter = nn.Parameter(torch.zeros(local.shape))
                parameter.tensor_model_parallel, parameter.partition_dim = axis >= 0, axis
                parameter.partition_stride, parameter.allreduce = 1, name not in experts
                gradients[name] = parameter, local
            chunk.named_parameters = lambda gradients=gradients: [(f"module.{n}", p) for n, (p, _) in gradients.items()]
            optimizers = [distributed_optimizer({p: g for n, (p, g) in gradients.items() if n in names}, group)
                          for names, group in ((dense, Group(data, 2)), (experts, Group(0, 1)))]
            base, rank = 4 * stage, 4 * stage + 2 * data + tensor
            row = [base + 2 * data, base + 2 * data + 1]
            files.append(folder / f"iter_{rank}.pt")
            save_flat_gradients(
                files[-1], SimpleNamespace(chained_optimizers=optimizers), [chunk], rank=rank, world_size=8,
                groups={"dense": {"data": [base + tensor, base + 2 + tensor], "tensor": row},
                        "expert": {"data": [rank], "tensor": row, "expert": [base + tensor, base + 2 + tensor]}},
                pipeline=[rank % 4, 4 + rank % 4])
    return files, whole
