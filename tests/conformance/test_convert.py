"""gradclip_convert.py on files that the real libraries wrote: what gradclip says of them, against torch and numpy."""

import json
import math
import os
import pickle
import random
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "scripts"), str(HERE)]

import convert_inputs  # noqa: E402  # before torch: sets the number of threads
import h5py  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from conftest import free_port  # noqa: E402
from convert_inputs import LAYOUT, WORLD, bytes_of, save_megatron_job, sharded_files, split, write_layout  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402

import gradclip_convert  # noqa: E402
import gradclip_load  # noqa: E402
from converters.errors import ConvertError  # noqa: E402
from converters.grids import common_world, plan  # noqa: E402
from gradclip_megatron import save_flat_gradients  # noqa: E402


# The inputs -----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One world of processes for all tests: rank_*.pt, dcp/, and whole.pt with the full tensors."""
    folder = tmp_path_factory.mktemp("saved")
    # Forked, as each new process would have to import torch.
    mp.start_processes(convert_inputs.in_one_process, (free_port(), folder), nprocs=WORLD, start_method="fork")
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
    return bytes_of(tensor.reshape(-1)).numpy().tobytes()


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
    # @2: what FSDP has on the other coordinate of tensor parallelism
    assert {name.removesuffix("@2") for name in loaded.names()} == set(expected)
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
    # The numbers in the names tell the ranks, not the order of the arguments.
    convert("from-pt", *reversed(inputs), "--key", "unsummed", "-o", unsummed)
    assert_tensors(gradclip, unsummed, {"addends": torch.full((3, 2), 2.0)}, tmp_path)


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


def test_whole_tensors_in_several_safetensors_files(tmp_path, gradclip, capsys):
    parts = [{"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16()}, {"c": torch.tensor(2.5)}]
    for i, part in enumerate(parts):
        save_file(part, tmp_path / f"model-{i + 1:05d}-of-00002.safetensors")
    inputs = sorted(tmp_path.glob("model-*"))
    refused(capsys, 3, "from-safetensors", *inputs, inputs[0], "-o", tmp_path / "dump", mentions=["--layout"])
    convert("from-safetensors", *inputs, "-o", tmp_path / "dump")
    assert_whole(gradclip, tmp_path / "dump", {**parts[0], **parts[1]}, tmp_path)


def test_from_npz(tmp_path, gradclip):
    square = np.arange(6.0).reshape(2, 3)
    arrays = {"a": square, "columns": np.asfortranarray(square), "50% a/b": np.float32([[1, 2]]),
              "big": np.arange(3.0).astype(">f4"), "half": np.float16([1.5]), "s": np.float32(2.5)}
    np.savez(tmp_path / "one.npz", **arrays)
    convert("from-npz", tmp_path / "one.npz", "-o", tmp_path / "dump")
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
    assert_whole(gradclip, tmp_path / "dump", {name: torch.tensor(array) for name, array in native.items()}, tmp_path)


def test_from_npz_by_ranks_with_raw_bits(tmp_path, gradclip):
    whole = {"raw.bfloat16": torch.randn(3, 4).bfloat16(), "raw.float8": torch.randn(3, 4).to(torch.float8_e4m3fn),
             "bias": torch.arange(3.0)}
    for rank in range(WORLD):
        shards = {name: split(whole[name].view(integers), (2, 2), (None, 1))[rank // 2, rank % 2].numpy()
                  for name, integers in (("raw.bfloat16", torch.int16), ("raw.float8", torch.uint8))}
        shards["raw.bfloat16"] = shards["raw.bfloat16"].view("u2" if rank % 2 else "V2")  # V2: as ml_dtypes' are saved
        save = np.savez if rank % 2 else np.savez_compressed
        save(tmp_path / f"{rank}.npz", **shards, bias=np.arange(3, dtype="f4"))
    layout = write_layout(tmp_path / "layout.json", training={"max_grad_norm": 0.5})
    convert("from-npz", *tmp_path.glob("*.npz"), "--layout", layout, "-o", tmp_path / "dump")
    assert_whole(gradclip, tmp_path / "dump", whole, tmp_path)
    assert json.loads((tmp_path / "dump/manifest.json").read_text())["training"] == {"max_grad_norm": 0.5}


def test_a_layout_puts_a_checkpoint_on_the_jobs_meshes(saved, tmp_path, gradclip):
    """Uneven strided shards are put together from chunks of another cut, and copies are written for each rank."""
    whole = torch.load(saved / "whole.pt")
    whole = {name: whole[name] for name in whole if name.startswith(("rows", "plain"))}
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


def blocks_of(shape, mesh_shape, placements):
    """{box: number of ranks that hold it} by PyTorch's own rule for plain shards."""
    found = {}
    for coordinate in np.ndindex(*mesh_shape):
        local, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
        if all(local):
            box = tuple((begin, begin + size) for begin, size in zip(offset, local))
            found[box] = found.get(box, 0) + 1
    return found


def test_blocks_of_any_job_find_a_mesh():
    """Whatever Shard and Replicate made of a job's tensors, there are meshes on which its blocks are each rank's shard."""
    choose = random.Random(5)
    for _ in range(300):
        mesh_shape = tuple(choose.choice((1, 2, 3, 4)) for _ in range(choose.randint(1, 2)))
        shapes = {f"w{i}": tuple(choose.randint(1, 9) for _ in range(choose.randint(1, 3))) for i in range(4)}
        blocks = {name: blocks_of(shape, mesh_shape, [choose.choice([Replicate(), *map(Shard, range(len(shape)))])
                                                      for _ in mesh_shape]) for name, shape in shapes.items()}
        pieces = {name: [tuple(end - begin for begin, end in sorted({box[d] for box in boxes}))
                         for d in range(len(shapes[name]))] for name, boxes in blocks.items()}
        world = common_world(pieces)
        for name, shape in shapes.items():
            mesh, placements = plan(shape, pieces[name], world)
            mesh_sizes = mesh.shape if mesh else ()
            made = blocks_of(shape, mesh_sizes, placements) if mesh else {tuple((0, n) for n in shape): 1}
            assert made.keys() == blocks[name].keys() and math.prod(mesh_sizes) == world
            assert len(set(made.values())) == 1, "each block on the same number of ranks"


def test_blocks_that_no_placement_makes():
    with pytest.raises(ConvertError, match="describe the shards with --layout"):
        common_world({"w": [(1, 3, 1)]})
    with pytest.raises(ConvertError, match="w.*the same ranks"):
        common_world({"v": [(2, 2, 2, 2, 2)], "w": [(4, 1, 3)]})


def test_nones_directories_and_copies(tmp_path, gradclip, capsys):
    """A rank's files in a directory; a gradient that is None on one rank; tensors of each rank's own."""
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        torch.save({"here": torch.arange(3.0), "none": torch.ones(2) if rank else None}, tmp_path / f"rank{rank}/a.pt")
        torch.save({"experts.w": torch.full((2,), 1.0 + rank)}, tmp_path / f"rank{rank}/b.pt")
    inputs = [tmp_path / "rank0", tmp_path / "rank1"]
    layout = write_layout(tmp_path / "layout.json", world_size=2, meshes={}, device_mesh=None, parameters=[
        {"pattern": "experts.*", "copies": "distinct", "expert": True}, {"pattern": ".*"}, {"pattern": "unused"}])
    convert("from-pt", *inputs, "--layout", layout, "-o", tmp_path / "dump")
    assert "'unused'" in capsys.readouterr().err
    report = gradclip("norms", tmp_path / "dump", reports=tmp_path)
    assert math.isclose(report["norm"]["total"], math.sqrt(5 + 2 + (1 + 1 + 4 + 4)), rel_tol=1e-12)
    with h5py.File(tmp_path / "dump/rank_00000.h5") as file:
        assert file["none"][()].tolist() == [b"none"]


def test_meshes_of_a_job_of_dtensors_can_be_told(saved, tmp_path, gradclip):
    """A layout file without rules: tensors say themselves what they are, the file which meshes the step was given."""
    layout = write_layout(tmp_path / "layout.json", parameters=[], training={"norm_type": 2.0})
    convert("from-pt", *saved.glob("rank_*.pt"), "--key", "gradients", "--layout", layout, "-o", tmp_path / "dump")
    assert_whole(gradclip, tmp_path / "dump", {**torch.load(saved / "whole.pt"), "bias": torch.arange(3.0)}, tmp_path)
    manifest = json.loads((tmp_path / "dump/manifest.json").read_text())
    assert manifest["device_mesh"] == "dp-tp" and manifest["training"] == {"norm_type": 2.0}


# Megatron-LM ----------------------------------------------------------------------------------------------------------

def test_from_megatron(tmp_path, gradclip):
    for dtype in (torch.float32, torch.bfloat16):
        files, whole = save_megatron_job(tmp_path, dtype)
        out = tmp_path / f"dump-{str(dtype)[6:]}"
        convert("from-megatron", *files, "-o", out)
        assert_whole(gradclip, out, whole, tmp_path)
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["state"] == "before_clip" and manifest["device_mesh"] == "pp-tp-dp"
    entries = {entry["name"]: entry for entry in manifest["parameters"]}
    assert entries["layers.1.qkv.weight"]["placements"] == ["Shard(0)", "Flat()"]
    assert entries["layers.1.experts.0.weight"]["expert"] and len(entries["layers.1.experts.0.weight"]["shape"]) == 3


def edited(path, folder, change):
    content = torch.load(path)
    change(content)
    torch.save(content, folder / path.name)
    return folder / path.name


def test_a_megatron_file_that_contradicts_the_others(tmp_path, capsys):
    files, _ = save_megatron_job(tmp_path)
    (tmp_path / "edited").mkdir()

    def shift(content):
        index, ranges = next(iter(content["buffers"][0][0]["param_map"].items()))
        ranges.update(param=(ranges["param"][0] + 1, ranges["param"][1] + 1))
    changes = {"on no rank|are twice": shift,
               "inside the buffer": lambda c: c["buffers"][0][0].update(grad_data=torch.ones(1)),
               "each rank once": lambda c: c.update(rank=1), "as many as INPUTs": lambda c: c.update(world_size=9),
               "save_flat_gradients": lambda c: c.pop("format"),
               "not put together": lambda c: c["parameters"].append(3),
               "as rank 0 has it": lambda c: c["parameters"][0].update(shape=[9, 9]),
               "a list of ranks": lambda c: c["groups"]["dense"].update(data=[0, 99]),
               "groups": lambda c: c["groups"].update(dense={"data": [1, 1], "tensor": [2, 3]})}
    for words, change in changes.items():
        broken = edited(files[3], tmp_path / "edited", change)
        message = refused(capsys, 3, "from-megatron", *files[:3], broken, *files[4:], "-o", tmp_path / "out")
        assert any(word in message for word in words.split("|")), (words, message)
    refused(capsys, 3, "from-megatron", *files[:-1], "-o", tmp_path / "out", mentions=["as many as INPUTs, 7"])


# What is refused ------------------------------------------------------------------------------------------------------

class Runs:
    """A pickle that would run a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_is_never_run(saved, tmp_path, capsys):
    marker, evil = tmp_path / "ran", tmp_path / "evil"
    torch.save({"w": torch.ones(2), "x": Runs(marker)}, tmp_path / "evil.pt")
    refused(capsys, 3, "from-pt", tmp_path / "evil.pt", "-o", tmp_path / "out", mentions=["evil.pt", "posix.system"])
    refused(capsys, 3, "from-megatron", tmp_path / "evil.pt", "-o", tmp_path / "out", mentions=["posix.system"])
    evil.mkdir()
    for protocol in (2, 4):
        (evil / ".metadata").write_bytes(pickle.dumps(Runs(marker), protocol=protocol))
        refused(capsys, 3, "from-dcp", evil, "-o", tmp_path / "out", mentions=["posix.system"])
    (evil / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(cbuiltins\neval\nS'x'\ntR.")
    refused(capsys, 3, "from-dcp", evil, "-o", tmp_path / "out", mentions=["builtins.eval"])
    np.savez(tmp_path / "evil.npz", w=np.array([Runs(marker)], dtype=object))
    refused(capsys, 3, "from-npz", tmp_path / "evil.npz", "-o", tmp_path / "out", mentions=["pickled objects"])
    assert not marker.exists()


def test_truncated_files(saved, tmp_path, capsys):
    ranks, _ = sharded_files()
    save_file(ranks[0], tmp_path / "x.safetensors")
    np.savez(tmp_path / "x.npz", a=np.arange(1000.0))
    (tmp_path / "x.pt").write_bytes((saved / "rank_0.pt").read_bytes())
    for command, name in (("from-safetensors", "x.safetensors"), ("from-npz", "x.npz"), ("from-pt", "x.pt"),
                          ("from-megatron", "x.pt")):
        raw = (tmp_path / name).read_bytes()
        for size in (0, 5, len(raw) // 2, len(raw) - 1):
            (tmp_path / name).write_bytes(raw[:size])
            refused(capsys, 3, command, tmp_path / name, "-o", tmp_path / "out", mentions=[name, "truncated"])
        (tmp_path / name).write_bytes(raw)
    with zipfile.ZipFile(tmp_path / "x.npz") as whole:  # damaged inside: found when it is read, and nothing is left
        offset = whole.getinfo("a.npy").header_offset
    raw = bytearray((tmp_path / "x.npz").read_bytes())
    raw[offset + 4000] ^= 1
    (tmp_path / "x.npz").write_bytes(raw)
    refused(capsys, 3, "from-npz", tmp_path / "x.npz", "-o", tmp_path / "out", mentions=["x.npz: a", "CRC"])


def copied_checkpoint(saved, folder, change=lambda metadata: None):
    """A copy of the checkpoint, its metadata changed."""
    folder.mkdir()
    for file in (saved / "dcp").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_a_checkpoint_that_contradicts_itself(saved, tmp_path, capsys):
    def chunks(metadata):
        return metadata.state_dict_metadata["gradients.columns.weight"].chunks

    def move_file(metadata):
        next(iter(metadata.storage_data.values())).relative_path = "../outside"

    def stored_elsewhere(metadata):
        del metadata.storage_data[next(index for index in metadata.storage_data if "columns" in index.fqn)]
    changes = {
        "overlap": lambda m: setattr(chunks(m)[0], "sizes", torch.Size([3, 4])),
        "in all": lambda m: chunks(m).pop(),
        "outside the tensor": lambda m: setattr(chunks(m)[0], "sizes", torch.Size([9, 9])),
        "other dimensions": lambda m: setattr(chunks(m)[0], "sizes", torch.Size([3])),
        "no bytes|inside the checkpoint": move_file, "no bytes": stored_elsewhere,
        "something else": lambda m: m.__dict__.clear(),
    }
    for i, (words, change) in enumerate(changes.items()):
        folder = copied_checkpoint(saved, tmp_path / f"dcp{i}", change)
        message = refused(capsys, 3, "from-dcp", folder, "--prefix", "gradients.", "-o", tmp_path / "out")
        assert any(word in message for word in words.split("|")), (words, message)

    folder = copied_checkpoint(saved, tmp_path / "short")
    data = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = data.read_bytes()
    data.write_bytes(raw[:len(raw) // 2])
    refused(capsys, 3, "from-dcp", folder, "--prefix", "gradients.", "-o", tmp_path / "out", mentions=["truncated"])
    data.write_bytes(bytes(len(raw)))
    refused(capsys, 3, "from-dcp", folder, "--prefix", "gradients.", "-o", tmp_path / "out", mentions=[data.name])
    data.unlink()
    refused(capsys, 3, "from-dcp", folder, "--prefix", "gradients.", "-o", tmp_path / "out", mentions=["is not there"])
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:200])
    refused(capsys, 3, "from-dcp", folder, "--prefix", "gradients.", "-o", tmp_path / "out", mentions=["not readable"])
    (folder / ".metadata").unlink()
    refused(capsys, 3, "from-dcp", folder, "--prefix", "gradients.", "-o", tmp_path / "out", mentions=["no .metadata"])


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_shapes_types_and_names_that_do_not_fit(saved, tmp_path, capsys):
    ranks, _ = sharded_files()
    layout, out = write_layout(tmp_path / "layout.json"), tmp_path / "out"
    inputs = [tmp_path / f"shard-{rank}.safetensors" for rank in range(WORLD)]

    def check(code, change, *mentions, layout=layout, given=inputs):
        for rank in range(WORLD):
            tensors = dict(ranks[rank])
            if rank == 2:
                change(tensors)
            save_file(tensors, inputs[rank])
        refused(capsys, code, "from-safetensors", *given, "--layout", layout, "-o", out, mentions=mentions)

    def nothing(tensors):
        pass

    def rules(*found):
        return write_layout(tmp_path / "other.json", parameters=list(found))
    check(3, lambda t: t.update({"float32.rows": torch.ones(1, 2)}), "float32.rows", "of [4, 4]", "one of them")
    check(3, lambda t: t.update({"float32.rows": torch.ones(2, 3)}), "shard-2.safetensors: float32.rows", "[2, 3]")
    check(3, lambda t: t.update({"float32.rows": torch.ones(4)}), "shard-2", "1 dimensions")
    check(3, lambda t: t.update({"float32.rows": torch.ones(2, 2).double()}), "float64", "float32, as on")
    check(3, lambda t: t.update({"bias": torch.ones(3, dtype=torch.int32)}), "I32")
    check(3, lambda t: t.pop("float32.rows"), "float32.rows", "rank 2 does not have it")
    check(3, lambda t: t.update({"bias": torch.ones(2)}), "shard-2", "--layout")
    check(3, nothing, "no pattern", "bias", layout=rules(LAYOUT["parameters"][0]))
    check(3, nothing, "world_size 4, but 3 INPUTs", given=inputs[:3])
    check(3, nothing, "number 2", given=[*inputs[:2], inputs[3]])
    check(3, nothing, "a dimension that the tensor has",
          layout=rules({"pattern": ".*", "mesh": "job", "placements": ["S(5)", "R"]}))

    def pt(content, *mentions):
        torch.save(content, tmp_path / "x.pt")
        refused(capsys, 3, "from-pt", tmp_path / "x.pt", "-o", out, mentions=mentions)
    pt([torch.ones(1)], "a list")
    pt({"g": {"w": torch.ones(1)}}, "x.pt: g", "--key")
    pt({"w": torch.ones(1, dtype=torch.int64)}, "int64", "--skip")
    pt({"w": None}, "None wherever")
    pt({3: torch.ones(1)}, "a name that is a int")
    pt({"": torch.ones(1)}, "a name of 0 bytes")
    pt({"a\0\x1b[31m": torch.ones(1)}, "\\x1b[31m")
    pt({"x" * 5000: torch.ones(1)}, "5000 bytes")
    pt({"w": torch.ones(2).to_sparse()}, "sparse")
    pt({}, "not one tensor")
    one = saved / "rank_0.pt"
    refused(capsys, 3, "from-pt", one, "--key", "other", "-o", out, mentions=["no 'other'", "gradients"])
    refused(capsys, 3, "from-pt", one, "--key", "gradients", "-o", out, mentions=["rank 1 does not have"])
    names = [tmp_path / name for name in "bacd"]  # no numbers in the names: the order of the arguments stands
    for rank, name in enumerate(names):
        name.write_bytes((saved / f"rank_{rank}.pt").read_bytes())
    refused(capsys, 3, "from-pt", *sorted(names), "--key", "gradients", "-o", out, mentions=["order of the ranks"])


@pytest.mark.parametrize("changes, words", [
    ({"world_size": 0}, "an integer from 1"), ({"world_size": True}, "an integer from 1"), ({"meshes": 3}, "an object"),
    ({"meshes": {"job": {"dim_names": ["a"], "ranks": [0, 0]}}}, "at most once"),
    ({"meshes": {"job": {"dim_names": ["a"], "ranks": [0, 4]}}}, "0 to 3"),
    ({"meshes": {"job": {"dim_names": ["a"], "ranks": [[0], [1, 2]]}}}, "equal length"),
    ({"meshes": {"job": {"dim_names": ["a"], "ranks": [[0, 1]]}}}, "2 different names"),
    ({"extra": 1}, "the key 'extra'"),
    ({"device_mesh": "none"}, "one of the meshes job, last"), ({"parameters": [{"mesh": "job"}]}, "a \"pattern\""),
    ({"parameters": [{"pattern": "("}]}, "a regular expression"),
    ({"parameters": [{"pattern": "a", "mesh": "job", "placements": ["R"]}]}, "2, one for each"),
    ({"parameters": [{"pattern": "a", "mesh": "job", "placements": ["R", "Flat()"]}]}, "Flat()"),
    ({"parameters": [{"pattern": "a", "placements": ["R"]}]}, "without a mesh"),
    ({"parameters": [{"pattern": "a", "copies": "many"}]}, "\"distinct\""),
])
def test_a_wrong_layout(tmp_path, capsys, changes, words):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    refused(capsys, 3, "from-safetensors", tmp_path / "a.safetensors", "--layout",
            write_layout(tmp_path / "layout.json", **changes), "-o", tmp_path / "out", mentions=["layout.json", words])


def test_out_is_whole_or_as_it_was(tmp_path, capsys, gradclip, monkeypatch):
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    np.savez(tmp_path / "b.npz", a=np.ones(3), b=np.ones(2))
    out = tmp_path / "out"
    convert("from-npz", tmp_path / "a.npz", "-o", out)
    again = (tmp_path / "again")
    convert("from-npz", tmp_path / "a.npz", "-o", again)
    for file in out.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    refused(capsys, 2, "from-npz", tmp_path / "b.npz", "-o", out, mentions=["--overwrite"])
    raw = bytearray((tmp_path / "b.npz").read_bytes())
    raw[raw.rindex(b"NUMPY") + 130] ^= 1
    (tmp_path / "broken.npz").write_bytes(raw)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    refused(capsys, 3, "from-npz", tmp_path / "broken.npz", "--overwrite", "-o", out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    convert("from-npz", tmp_path / "b.npz", "--overwrite", "-o", out)
    assert gradclip_load.Dump(out).names() == ["a", "b"]

    (tmp_path / "folder").mkdir()
    refused(capsys, 2, "from-npz", tmp_path / "b.npz", "--overwrite", "-o", tmp_path / "folder", mentions=["no dump"])
    refused(capsys, 2, "from-npz", tmp_path / "b.npz", "--overwrite", "-o", tmp_path / "b.npz", mentions=["the input"])
    refused(capsys, 2, "from-npz", tmp_path / "b.npz", "-o", tmp_path, mentions=["around it"])
    refused(capsys, 3, "from-npz", tmp_path / "none.npz", "-o", tmp_path / "new", mentions=["no such file"])
    monkeypatch.setattr(gradclip_convert.gradclip_record, "_write_text", raises(OSError(28, "No space left on device")))
    refused(capsys, 5, "from-npz", tmp_path / "a.npz", "-o", tmp_path / "new", mentions=["No space"])
    for words in ("--step -1", "--norm-type 0", "--max-grad-norm nan", "--skip (", "--state x"):
        with pytest.raises(SystemExit) as ended:
            gradclip_convert.main(["from-npz", str(tmp_path / "a.npz"), "-o", str(tmp_path / "new"), *words.split()])
        assert ended.value.code == 2


def raises(error):
    def function(*_):
        raise error
    return function


# Memory ---------------------------------------------------------------------------------------------------------------

class PeakOfOwnMemory(threading.Thread):
    """The most memory that this process had, in bytes, without pages of mapped files: those are the system's."""

    def __init__(self):
        super().__init__(daemon=True)
        self.begin = self.peak = self.now()
        self.done = threading.Event()

    @staticmethod
    def now():
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    def run(self):
        while not self.done.wait(0.001):
            self.peak = max(self.peak, self.now())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.join()


@pytest.mark.parametrize("command", ["from-pt", "from-safetensors", "from-npz", "from-dcp", "from-megatron"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_tensor_at_a_time_is_in_memory(tmp_path, command):
    size, count = 8 << 20, 12
    tensors = {f"layer{i}": torch.full((1024, size // 4096), float(i)) for i in range(count)}
    file = tmp_path / "input"
    if command == "from-dcp":
        dcp.save(tensors, checkpoint_id=file, no_dist=True)
    elif command == "from-npz":
        file = file.with_suffix(".npz")
        np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif command == "from-safetensors":
        save_file(tensors, file)
    elif command == "from-pt":
        torch.save(tensors, file)
    else:
        parameters = {name: nn.Parameter(torch.empty(tensor.shape, device="meta")) for name, tensor in tensors.items()}
        optimizer = convert_inputs.distributed_optimizer(
            {parameters[name]: tensor for name, tensor in tensors.items()}, convert_inputs.Group(0, 1), count)
        save_flat_gradients(file, optimizer, [SimpleNamespace(named_parameters=parameters.items)], rank=0, world_size=1,
                            groups={"dense": {"data": [0], "tensor": [0]}})
        del optimizer
    del tensors
    with PeakOfOwnMemory() as memory:
        convert(command, file, "-o", tmp_path / "dump")
    assert memory.peak - memory.begin < 4 * size, f"{(memory.peak - memory.begin) / size:.1f} tensors of {count}"
    with h5py.File(tmp_path / "dump/rank_00000.h5") as written:
        assert sorted(written["gradients"]) == sorted(f"layer{i}" for i in range(count))
