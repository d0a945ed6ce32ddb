"""gradclip_convert.py on files that the real libraries wrote: what gradclip says of the dumps, against torch and numpy."""

import io
import json
import math
import os
import pickle
import sys
import threading
import zipfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from conftest import free_port  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

import gradclip_convert  # noqa: E402
import gradclip_load  # noqa: E402

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


def made_gradients(mesh):
    """What no small training run brings about: every type, other placements, names with odd characters."""
    torch.manual_seed(3)
    found = {}
    for i, dtype in enumerate(DTYPES):
        found[f"as_{dtype}".replace("torch.", "")] = distribute_tensor(
            torch.randn(6, 8).to(dtype).view(torch.uint8 if dtype.itemsize == 1 else dtype), mesh,
            [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Replicate())][i % 3])
        if dtype.itemsize == 1:  # DTensor cannot scatter them
            local = found.pop(f"as_{dtype}".replace("torch.", ""))
            found[f"as_{dtype}".replace("torch.", "")] = DTensor.from_local(
                local.to_local().view(dtype), mesh, local.placements, shape=local.shape, stride=local.stride())
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
        bits = gradient.to_local().dtype.itemsize == 1
        local = gradient.to_local().view(torch.uint8) if bits else gradient.to_local()
        full = DTensor.from_local(local, gradient.device_mesh, gradient.placements, shape=gradient.shape,
                                  stride=gradient.stride()).full_tensor()
        whole[name] = full.view(gradient.dtype) if bits else full
    addends = DTensor.from_local(torch.full((3, 2), rank // 2 + 0.5), mesh, [Partial(), Replicate()])
    torch.save({"step": 3, "gradients": {**gradients, "bias": torch.arange(3.0)}, "unsummed": {"addends": addends}},
               folder / f"rank_{rank}.pt")
    dcp.save({"gradients": gradients, "step": 3, "plain": torch.arange(3.0)}, checkpoint_id=folder / "dcp")
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One world of processes for all tests: rank_*.pt, dcp/, and whole.pt with the full tensors."""
    folder = tmp_path_factory.mktemp("saved")
    # Forked, as each new process would have to import torch.
    mp.start_processes(in_one_process, (free_port(), folder), nprocs=WORLD, start_method="fork")
    return folder


# What gradclip says of it ---------------------------------------------------------------------------------------------

def convert(*words):
    code = gradclip_convert.main(list(map(str, words)))
    assert code == 0


def refused(capsys, code, *words, mentions=()):
    """A conversion that has to be refused: the code, one message, and nothing left beside OUT."""
    out = Path(str(words[-1]))
    before = sorted(out.parent.iterdir())
    assert gradclip_convert.main(list(map(str, words))) == code
    message = capsys.readouterr().err
    assert message.startswith("gradclip_convert: error: ") and message.count("\n") == 1, message
    assert all(character.isprintable() for character in message.rstrip("\n")), repr(message)
    for word in mentions:
        assert word in message, message
    assert sorted(out.parent.iterdir()) == before
    return message


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else tensor.reshape(1).numpy().tobytes()


def norm_of(tensors):
    return math.sqrt(math.fsum(float((tensor.double() ** 2).sum()) for tensor in tensors.values()))


def assert_whole(gradclip, dump, expected, reports):
    """verify is content, and the tensors are as expected."""
    assert gradclip("verify", dump, reports=reports)["findings"] == []
    assert_tensors(gradclip, dump, expected, reports)


def assert_tensors(gradclip, dump, expected, reports):
    """norms has the total, and merge the tensors bit for bit."""
    report = gradclip("norms", dump, reports=reports)
    assert math.isclose(report["norm"]["total"], norm_of(expected), rel_tol=1e-12)
    assert report["norm"]["elements"] == sum(tensor.numel() for tensor in expected.values())
    merged = dump.with_name(dump.name + ".merged")
    gradclip("merge", dump, "-o", merged, reports=reports)
    loaded = gradclip_load.Dump(merged)
    assert {name.removesuffix("@2") for name in loaded.names()} == set(expected)  # @2: FSDP's on the other tp coordinate
    for name, tensor in expected.items():
        found = loaded.torch(name)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
        assert bits(found) == bits(tensor), name


def test_from_dcp(saved, tmp_path, gradclip, capsys):
    whole = torch.load(saved / "whole.pt")
    out = tmp_path / "dump"
    convert("from-dcp", saved / "dcp", "-o", out, "--prefix", "gradients.", "--step", 3, "--max-grad-norm", 1)
    assert_whole(gradclip, out, whole, tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["training"] == {"max_grad_norm": 1.0} and manifest["world_size"] == WORLD
    convert("from-dcp", saved / "dcp", "-o", tmp_path / "all")
    assert "left out: step" in capsys.readouterr().err
    assert "plain" in gradclip_load.Dump(tmp_path / "all").names()


def test_from_pt(saved, tmp_path, gradclip):
    out, unsummed, inputs = tmp_path / "dump", tmp_path / "unsummed", sorted(saved.glob("rank_*.pt"))
    convert("from-pt", *inputs, "--key", "gradients", "-o", out, "--norm-type", "2")
    assert_whole(gradclip, out, {**torch.load(saved / "whole.pt"), "bias": torch.arange(3.0)}, tmp_path)
    entries = {entry["name"]: entry for entry in json.loads((out / "manifest.json").read_text())["parameters"]}
    assert entries["rows9.weight"]["placements"] == ["_StridedShard(dim=0, sf=2)", "Shard(0)"]
    convert("from-pt", *reversed(inputs), "--key", "unsummed", "-o", unsummed)  # the numbers in the names tell the ranks
    assert_tensors(gradclip, unsummed, {"addends": torch.full((3, 2), 2.0)}, tmp_path)


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
        for (i, j), shard in split(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor, (2, 2), (0, 1)).items():
            ranks[2 * i + j][name] = shard.view(tensor.dtype)
    return ranks, {**whole, "bias": torch.arange(3.0)}


def test_from_safetensors(tmp_path, gradclip):
    ranks, whole = sharded_files()
    for rank, tensors in ranks.items():
        save_file(tensors, tmp_path / f"shard-{rank}.safetensors")
    inputs = sorted(tmp_path.glob("shard-*"))
    layout = write_layout(tmp_path / "layout.json")
    convert("from-safetensors", *inputs, "--layout", layout, "-o", tmp_path / "dump", "--grad-norm", "nan")
    assert_whole(gradclip, tmp_path / "dump", whole, tmp_path)
    assert json.loads((tmp_path / "dump/manifest.json").read_text())["training"] == {"grad_norm": "nan"}

    # Addends, and a parameter that only the last ranks have.
    for rank in range(WORLD):
        ranks[rank]["a.sums"] = torch.full((2, 3), 1.0 + rank // 2)
        if rank >= 2:
            ranks[rank]["head.weight"] = torch.tensor([[3.0, 4.0]]) + rank
        save_file(ranks[rank], tmp_path / f"shard-{rank}.safetensors")
    whole.update({"a.sums": torch.full((2, 3), 1.5), "head.weight": torch.tensor([[5.0, 6.0], [6.0, 7.0]])})
    convert("from-safetensors", *inputs, "--layout", layout, "-o", tmp_path / "more")
    assert_tensors(gradclip, tmp_path / "more", whole, tmp_path)


def test_whole_tensors_in_several_safetensors_files(tmp_path, gradclip):
    parts = [{"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16()}, {"c": torch.tensor(2.5)}]
    for i, part in enumerate(parts):
        save_file(part, tmp_path / f"model-{i + 1:05d}-of-00002.safetensors")
    convert("from-safetensors", *sorted(tmp_path.glob("model-*")), "-o", tmp_path / "dump")
    assert_whole(gradclip, tmp_path / "dump", {**parts[0], **parts[1]}, tmp_path)


def test_from_npz(tmp_path, gradclip):
    arrays = {"a": np.arange(6.0).reshape(2, 3), "50% a/b": np.float32([[1, 2]]), "big": np.arange(3.0).astype(">f4"),
              "half": np.float16([1.5]), "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "s": np.float32(2.5)}
    np.savez(tmp_path / "one.npz", **arrays)
    convert("from-npz", tmp_path / "one.npz", "-o", tmp_path / "dump")
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
    assert_whole(gradclip, tmp_path / "dump", {name: torch.tensor(array) for name, array in native.items()}, tmp_path)


def test_from_npz_by_ranks_with_raw_bits(tmp_path, gradclip):
    whole = {"raw.bfloat16": torch.randn(3, 4).bfloat16(), "raw.float8": torch.randn(3, 4).to(torch.float8_e4m3fn),
             "bias": torch.arange(3.0)}
    for rank in range(WORLD):
        shards = {name: split(tensor.view({2: torch.int16, 1: torch.uint8}[tensor.itemsize]), (2, 2), (None, 1))
                  for name, tensor in whole.items() if name != "bias"}
        shards = {name: shard[rank // 2, rank % 2].numpy() for name, shard in shards.items()}
        shards["raw.bfloat16"] = shards["raw.bfloat16"].view("u2" if rank % 2 else "V2")  # V2: ml_dtypes, as savez has it
        (np.savez if rank % 2 else np.savez_compressed)(tmp_path / f"{rank}.npz", **shards, bias=np.arange(3, dtype="f4"))
    layout = write_layout(tmp_path / "layout.json", training={"max_grad_norm": 0.5})
    convert("from-npz", *tmp_path.glob("*.npz"), "--layout", layout, "-o", tmp_path / "dump")
    assert_whole(gradclip, tmp_path / "dump", whole, tmp_path)
    assert json.loads((tmp_path / "dump/manifest.json").read_text())["training"] == {"max_grad_norm": 0.5}


def test_a_layout_puts_a_checkpoint_on_the_jobs_meshes(saved, tmp_path, gradclip):
    """Uneven strided shards are put together from chunks of another cut, and copies are written for each rank."""
    whole = {name: tensor for name, tensor in torch.load(saved / "whole.pt").items() if name.startswith(("rows", "plain"))}
    placements = {r"rows.*": ["_StridedShard(dim=0, sf=2)", "Shard(0)"], r"plain\.weight": ["Shard(1)", "Replicate()"]}
    rules = [{"pattern": pattern, "mesh": "job", "placements": found} for pattern, found in placements.items()]
    layout = write_layout(tmp_path / "layout.json", parameters=[*rules, {"pattern": ".*"}])
    convert("from-dcp", saved / "dcp", "--prefix", "gradients.", "--skip", "^(?!rows|plain)", "--layout", layout,
            "-o", tmp_path / "dump")
    assert_whole(gradclip, tmp_path / "dump", whole, tmp_path)
    loaded = gradclip_load.Dump(tmp_path / "dump")
    assert loaded.entries["rows9.weight"]["placements"] == placements["rows.*"]
    for name in whole:
        assert bits(loaded.torch(name)) == bits(whole[name])
