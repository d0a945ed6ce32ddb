"""The recorder against PyTorch: slices, bits, and what a failed recording leaves. Worlds of gloo processes."""

import itertools
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import xxhash  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import gradclip_record  # noqa: E402
from gradclip_record import assemble, finish, record_gradients  # noqa: E402

GOLDEN = sorted((ROOT / "testdata" / "golden").iterdir())
TRAINING = {"max_grad_norm": 1.0, "norm_type": 2.0}


def in_world(size, function, *arguments):
    """Run function(rank, *arguments) in `size` processes; an assertion that fails in one fails the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, (size, port, function, arguments), nprocs=size)


def _process(rank, size, port, function, arguments):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def manifest_of(dump):
    return json.loads((dump / "manifest.json").read_text(encoding="utf-8"))


def values_of(dataset):
    """A dataset's numbers in float64; bfloat16 is the upper half of a float32."""
    raw = dataset[()]
    if dataset.attrs["dtype"] == b"bfloat16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float64)


def whole_gradient(dump, manifest, parameter, scaled=lambda values: values):
    """Put the shards together by their recorded offsets alone; they have to tile the tensor."""
    mesh = manifest["meshes"].get(parameter["mesh"])
    ranks = np.array(mesh["ranks"] if mesh else parameter["ranks"][:1])
    placements = parameter.get("gradient_placements", parameter.get("placements", ["Replicate()"]))
    total, covered, absent = np.zeros(parameter["shape"]), np.zeros(parameter["shape"], int), 0
    for coordinate in np.ndindex(ranks.shape):
        if any(place and spelled == "Replicate()" for place, spelled in zip(coordinate, placements)):
            continue
        with h5py.File(dump / f"rank_{ranks[coordinate]:05d}.h5") as file:
            dataset = file["gradients"].get(parameter["name"])
            if dataset is None:
                assert parameter["name"].encode() in file["none"][()].tolist()
                absent += 1
            elif dataset.size:
                begin = dataset.attrs.get("global_offset", np.zeros(dataset.ndim, int))
                box = tuple(slice(b, b + n) for b, n in zip(begin.tolist(), dataset.shape))
                total[box] += scaled(values_of(dataset))
                covered[box] += 1
    addends = math.prod(n for n, p in zip(ranks.shape, placements) if p.startswith("Partial"))
    assert absent in (0, ranks.size) and (covered == (0 if absent else addends)).all()
    return None if absent else total


# The recorded dumps in testdata ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_golden_dump_is_whole_and_gives_the_exact_norm(case):
    manifest, expected = manifest_of(case / "dump"), json.loads((case / "expected.json").read_text())
    training, squares, seen = manifest["training"], [], set()
    for parameter in manifest["parameters"]:
        if parameter.get("tied") in seen:
            continue
        seen |= {parameter["tied"]} if "tied" in parameter else set()
        divisors = []
        if training.get("pp_enabled"):
            divisors.append(training["num_label_tokens"] / training["dp_group_size"])
        if "ep" in manifest["meshes"].get(parameter["mesh"], {"dim_names": []})["dim_names"]:
            divisors.append(training["dp_group_size"] / len(manifest["meshes"][manifest["moe_mesh"]]["ranks"]))

        def scaled(values):
            for divisor in divisors:
                values = (values.astype(np.float32) / np.float32(divisor)).astype(np.float64)
            return values
        gradient = whole_gradient(case / "dump", manifest, parameter, scaled)
        squares += [] if gradient is None else (gradient ** 2).ravel().tolist()
    assert math.sqrt(math.fsum(squares)).hex() == expected["exact_norm"]["hex"]
    assert float(training["grad_norm"]).hex() == expected["grad_norm"]["by_rank"][0]
    assert 0 < float.fromhex(expected["coefficient"]) < 1


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_golden_checksums(case):
    text = (case / "dump" / "manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    said = manifest.pop("checksum")
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert text.replace("\n", "").replace(f'"checksum":"{said}",', "") == compact
    assert said == xxhash.xxh3_64_hexdigest(compact.encode())
    for name, recorded in manifest["files"].items():
        raw = (case / "dump" / name).read_bytes()
        assert recorded == {"bytes": len(raw), "xxh3_64": xxhash.xxh3_64_hexdigest(raw)}
        with h5py.File(case / "dump" / name) as file:
            for dataset in file["gradients"].values():
                assert xxhash.xxh3_64_intdigest(dataset[()].tobytes()) == dataset.attrs["xxh3_64"]
                assert dataset.size == 0 or dataset.id.get_offset() + dataset.nbytes <= len(raw)


@pytest.mark.skipif(not shutil.which("h5dump"), reason="needs hdf5-tools")
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_the_systems_hdf5_opens_every_file(case):
    for file in (case / "dump").glob("*.h5"):
        header = subprocess.run(["h5dump", "-H", file], check=True, capture_output=True, text=True).stdout
        assert 'GROUP "gradients"' in header


def test_golden_manifests_say_how_weights_relate():
    pipeline, plain, tied, moe = (manifest_of(ROOT / "testdata/golden" / case / "dump")
                                  for case in ("pp_fsdp", "fsdp_tp_plain", "tied_pp", "moe_ep"))
    names = [parameter["name"] for parameter in pipeline["parameters"]]
    assert names[0] == "embed_tokens.weight" and names[-1] == "lm_head.weight" and len(set(names)) == len(names)
    assert pipeline["device_mesh"] == "pp-dp_shard" and pipeline["meshes"]["dp_shard#1"]["ranks"] == [2, 3]
    norms = [parameter for parameter in plain["parameters"] if parameter["name"] == "norm.weight"]
    assert {(p["mesh"], p["tied"]) for p in norms} == {(f"dp_shard#{i}", "stage 0: norm.weight") for i in (0, 1)}
    assert [p["ranks"] for p in tied["parameters"] if p.get("tied") == "embedding"] == [[0], [1]]
    expert = next(p for p in moe["parameters"] if "experts.down_projs" in p["name"])
    assert expert["mesh"] == moe["moe_mesh"] == "ep_shard-ep" and expert["placements"] == ["Shard(1)", "Shard(0)"]
    assert not any("tied" in p or "expert" in p for p in moe["parameters"])


# Slices ---------------------------------------------------------------------------------------------------------------

def fake(shape, mesh_shape, coordinate, placements):
    mesh = SimpleNamespace(shape=mesh_shape, get_coordinate=lambda: coordinate)
    return SimpleNamespace(shape=shape, ndim=len(shape), placements=placements, device_mesh=mesh)


def test_offsets_of_plain_shards_are_pytorchs():
    choose = random.Random(1)
    for _ in range(500):
        mesh_shape = tuple(choose.choice((1, 2, 3, 4)) for _ in range(choose.randint(1, 3)))
        shape = tuple(choose.randint(1, 11) for _ in range(choose.randint(1, 3)))
        kinds = [Replicate(), *(Shard(d) for d in range(len(shape)))]
        placements = tuple(choose.choice(kinds) for _ in mesh_shape)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            local, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
            if all(local):
                ranges = gradclip_record._global_ranges(fake(shape, mesh_shape, coordinate, placements), local, "x")
                assert ranges == [[(o, o + n)] for o, n in zip(offset, local)]


def test_strided_shards_are_where_fsdp_puts_them():
    """Tensor parallelism's chunk first, then FSDP's chunk of it, though PyTorch says otherwise for 9 rows on 4 x 2."""
    for rows, data, tensor in itertools.product(range(1, 30), (2, 3, 4), (2, 3)):
        placements = (_StridedShard(0, split_factor=tensor), Shard(0))
        for i, j in itertools.product(range(data), range(tensor)):
            column = torch.chunk(torch.arange(rows), tensor)[j:j + 1]
            held = torch.chunk(column[0], data)[i:i + 1] if column else ()
            if len(held):
                shard = fake((rows,), (data, tensor), (i, j), placements)
                ranges = gradclip_record._global_ranges(shard, held[0].shape, "x")
                assert ranges == [[(int(held[0][0]), int(held[0][-1]) + 1)]]
    three = fake((24,), (2, 2, 2), (1, 0, 1), (Shard(0), _StridedShard(0, split_factor=2), Shard(0)))
    assert gradclip_record._global_ranges(three, (3,), "x") == [[(18, 21)]]
    with pytest.raises(ValueError, match="does not follow"):
        gradclip_record._global_ranges(three, (4,), "x")


def uneven_model(rank, dump):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = nn.ModuleDict({f"rows{n}": nn.Linear(2, n, bias=False) for n in (3, 5, 6, 9)})
    model["columns"] = nn.Linear(6, 5, bias=False)
    torch.manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    parallelize_module(model, mesh["tp"], {
        **{f"rows{n}": ColwiseParallel() for n in (3, 5, 6, 9)}, "columns": RowwiseParallel(input_layouts=Replicate())})
    for child in model.values():
        fully_shard(child, mesh=mesh["dp_shard"])
    for child in model.values():
        output = child(torch.randn(3, child.in_features))
        (output.to_local() if isinstance(output, DTensor) else output).square().sum().backward()
    assert record_gradients(dump, model, step=1, device_mesh=mesh, training=TRAINING).ok
    for name, parameter in model.named_parameters():
        whole, local = parameter.grad.full_tensor().numpy(), parameter.grad.to_local()
        assert tuple(map(int, local.shape)) == compute_local_shape_and_global_offset(
            parameter.shape, mesh, parameter.grad.placements)[0]
        with h5py.File(dump / f"rank_{rank:05d}.h5") as file:
            dataset = file["gradients"][name]
            assert dataset.shape == tuple(local.shape) and ("global_offset" in dataset.attrs) == (dataset.size > 0)
            if dataset.size:
                offset = dataset.attrs["global_offset"]
                box = tuple(slice(o, o + n) for o, n in zip(offset, dataset.shape))
                assert whole[box].tobytes() == dataset[()].tobytes() == local.contiguous().numpy().tobytes()
                assert tuple(offset) == compute_local_shape_and_global_offset(
                    parameter.shape, mesh, parameter.grad.placements)[1]
    dist.barrier()
    if rank == 0:
        manifest = manifest_of(dump)
        for name, whole in ((p["name"], p) for p in manifest["parameters"]):
            assert whole_gradient(dump, manifest, whole) is not None, name
        assert manifest["parameters"][0]["placements"] == ["_StridedShard(dim=0, sf=2)", "Shard(0)"]


def test_uneven_fsdp_with_tensor_parallelism(tmp_path):
    in_world(4, uneven_model, tmp_path / "dump")


# Every kind of parameter ----------------------------------------------------------------------------------------------

def with_gradient(value, gradient=None, requires_grad=True):
    parameter = nn.Parameter(value, requires_grad=requires_grad)
    if gradient is not None:
        parameter.grad_dtype = None
        parameter.grad = gradient
    return parameter


def every_kind(rank):
    """A model whose gradients are set by hand, for what no small training run brings about."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    part, other = nn.Module(), nn.Module()
    rows = torch.arange(12.0).reshape(6, 2)

    def add(name, value, gradient=None, **how):
        part.register_parameter(name, with_gradient(value, gradient, **how))
    one_row = distribute_tensor(rows[:1], mesh, [Shard(0)])
    add("tiny", one_row, one_row.clone())
    copies = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    add("addends", copies, DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial("avg")]))
    striped = DTensor.from_local(rows[[0, 1, 3, 4]] if rank == 0 else rows[[2, 5]], mesh,
                                 [_StridedShard(0, split_factor=2)], shape=rows.shape, stride=rows.stride())
    add("striped", striped, striped.clone())
    waiting = distribute_tensor(rows, mesh, [Shard(0)])
    waiting = waiting.redistribute(mesh, [Replicate()], async_op=True)
    add("waiting", distribute_tensor(rows, mesh, [Replicate()]), waiting)
    assert type(part.waiting.grad._local_tensor).__name__ == "AsyncCollectiveTensor"
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        values = torch.tensor([[1.1640625, -0.0], [math.inf, math.nan]]).to(dtype)
        add(f"as_{dtype}".replace("torch.", ""), torch.zeros_like(values), values)
    add("scalar", torch.zeros(()), torch.tensor(3.0))
    add("wide", torch.zeros(2, dtype=torch.bfloat16), torch.ones(2) if rank == 0 else None)
    add("frozen", torch.zeros(2), requires_grad=False)
    add("absent", torch.zeros(2))
    add("transposed", torch.zeros(2, 3), torch.arange(6.0).reshape(3, 2).t())
    add("50% a/b", torch.zeros(1), torch.full((1,), rank + 0.5))
    other.register_parameter("scalar", with_gradient(torch.zeros(1), torch.ones(1)))
    other.register_parameter("shared", part.transposed)
    inner = part
    for name in ("_orig_mod", "mlp", "experts", "down_linear"):
        inner.add_module(name, nn.Module())
        inner = getattr(inner, name)
    inner.register_parameter("weight0", with_gradient(torch.zeros(2), torch.ones(2) * rank))
    return [part, other]


def record_every_kind(rank, folder):
    parts = every_kind(rank)
    how = {"step": 3, "training": {**TRAINING, "norm_type": math.inf}, "labels": torch.tensor([[1, -100]]),
           "copies": {"50% a/b": "distinct"}, "tied": {"as_bfloat16": "weight"}}
    assert record_gradients(folder / "gathered", parts, **how).ok
    assert record_gradients(folder / "again", parts, **how).ok
    recording = record_gradients(folder / "fragments", parts, **how, communicate=False)
    assert recording.ok
    recording.log(torch.tensor(2.5))


def test_every_kind_of_parameter_and_both_ways_to_the_manifest(tmp_path):
    in_world(2, record_every_kind, tmp_path)
    gathered, fragments = tmp_path / "gathered", tmp_path / "fragments"
    manifest = manifest_of(gathered)
    entries = {(p["model_part"], p["name"]): p for p in manifest["parameters"]}
    assert manifest["training"]["norm_type"] == "inf" and (0, "frozen") not in entries
    assert entries[0, "addends"]["gradient_placements"] == ["Partial(avg)"] and entries[0, "wide"]["dtype"] == "float32"
    assert entries[1, "scalar"]["dataset"] == "scalar%401" and entries[1, "shared"]["tied"] == "transposed"
    assert entries[0, "transposed"]["tied"] == "transposed" and entries[0, "as_bfloat16"]["tied"] == "weight"
    assert entries[0, "50% a/b"]["copies"] == "distinct" and entries[0, "as_float32"]["copies"] == "replicated"
    assert entries[0, "mlp.experts.down_linear.weight0"]["copies"] == "distinct"
    with h5py.File(gathered / "rank_00000.h5") as zero, h5py.File(gathered / "rank_00001.h5") as one:
        assert one["none"][()].tolist() == [b"wide", b"absent"] and zero["none"][()].tolist() == [b"absent"]
        assert zero["labels/0"][()].tolist() == [[1, -100]]
        assert zero["gradients/tiny"].attrs["global_offset"].tolist() == [0, 0]
        assert one["gradients/tiny"].shape == (0, 2) and "global_offset" not in one["gradients/tiny"].attrs
        assert one["gradients/addends"][()].tolist() == [2, 2, 2]
        assert zero["gradients/striped"].attrs["global_ranges"].tolist() == [[0, 0, 2], [0, 3, 5], [1, 0, 2]]
        assert one["gradients/striped"].attrs["global_ranges"].tolist() == [[0, 2, 3], [0, 5, 6], [1, 0, 2]]
        assert one["gradients/waiting"][()].tolist() == torch.arange(12.0).reshape(6, 2).tolist()
        assert one["gradients/scalar"][()] == 3 and one["gradients/scalar%401"][()].tolist() == [1]
        assert one["gradients"]["50%25 a%2Fb"][()].tolist() == [1.5]
        assert zero["gradients/transposed"][()].tolist() == [[0, 2, 4], [1, 3, 5]]
        bits = {"float64": (np.uint64, 0x3FF2A00000000000), "float32": (np.uint32, 0x3F950000),
                "float16": (np.uint16, 0x3CA8), "bfloat16": (np.uint16, 0x3F95)}
        for name, (unsigned, value) in bits.items():
            dataset = zero["gradients"][f"as_{name}"]
            assert dataset.attrs["dtype"] == name.encode() and dataset[()].view(unsigned)[0, 0] == value
        assert zero["gradients/as_bfloat16"][()].ravel().tolist()[:3] == [0x3F95, 0x8000, 0x7F80]

    with pytest.raises(FileNotFoundError):
        manifest_of(fragments)
    shutil.copytree(fragments, tmp_path / "half")
    (tmp_path / "half" / "rank_00001.json").unlink()
    with pytest.raises(ValueError, match="expected all 2"):
        assemble(tmp_path / "half")
    shutil.copytree(fragments, tmp_path / "changed")
    with open(tmp_path / "changed" / "rank_00001.h5", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(ValueError, match="rank_00001.h5 is not the file"):
        assemble(tmp_path / "changed")
    subprocess.run([sys.executable, ROOT / "scripts/gradclip_record.py", "assemble", fragments], check=True)
    finish(gathered, grad_norm=2.5)
    names = ["manifest.json", "rank_00000.h5", "rank_00001.h5"]
    assert names == sorted(os.listdir(gathered)) == sorted(os.listdir(fragments))
    for name in names:
        assert (gathered / name).read_bytes() == (fragments / name).read_bytes()
    for name in names[1:]:
        assert (gathered / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    if shutil.which("h5dump"):
        for file in gathered.glob("*.h5"):
            subprocess.run(["h5dump", "-H", file], check=True, stdout=subprocess.DEVNULL)


# Failures -------------------------------------------------------------------------------------------------------------

def small_model(value=1.0):
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def test_unknown_training_keys_are_refused(tmp_path, caplog):
    assert not record_gradients(tmp_path / "dump", small_model(), step=1, training={"max_norm": 1.0}).ok
    assert "unknown training keys 'max_norm'; known are max_grad_norm, norm_type" in caplog.text
    assert not (tmp_path / "dump" / "manifest.json").exists()
    recording = record_gradients(tmp_path / "other", small_model(), step=1, training={"max_grad_norm": 1.0})
    finish(tmp_path / "other", grad_nrom=2.0)
    assert recording.ok and "'grad_nrom'" in caplog.text and "grad_nrom" not in manifest_of(tmp_path / "other")["training"]


@pytest.mark.parametrize("script", ["gradclip_record.py", "gradclip_microbatches.py"])
def test_assemble_says_in_one_line_what_is_wrong(tmp_path, script):
    (tmp_path / "gradients").mkdir()
    for content in (None, "no JSON", '{"rank": 0}'):
        if content:
            for folder in (tmp_path, tmp_path / "gradients"):
                (folder / "rank_00000.json").write_text(content)
        done = subprocess.run([sys.executable, ROOT / "scripts" / script, "assemble", tmp_path], capture_output=True, text=True,
                              check=False)
        assert done.returncode == 1 and done.stderr.startswith(f"gradclip: cannot assemble {tmp_path}: "), done
        assert done.stderr.count("\n") == 1 and not (tmp_path / "manifest.json").exists()


def one_rank_fails(rank, folder):
    model, write = small_model(), gradclip_record._write_gradient
    for failing, overwrite in itertools.product((0, 1), (False, True)):
        dump = folder / f"{failing}{overwrite}"
        if overwrite:  # a whole dump of an earlier step must not vouch for the new files
            assert record_gradients(dump, model, step=1, training=TRAINING).ok
            dist.barrier()
            assert (dump / "manifest.json").exists()
            dist.barrier()
        gradclip_record._write_gradient = write if rank != failing else None
        recording = record_gradients(dump, small_model(2.0), step=2, training=TRAINING, overwrite=overwrite)
        gradclip_record._write_gradient = write
        assert recording.ok == (rank == 1 and failing == 0)
        recording.log(1.0)
        total = torch.ones(1)
        dist.all_reduce(total)  # training goes on
        assert total == 2 and not (dump / "manifest.json").exists() and not list(dump.glob("*.tmp"))
    dump = folder / "fragments"
    gradclip_record._write_gradient = write if rank != 1 else None
    assert record_gradients(dump, model, step=1, communicate=False).ok == (rank == 0)
    dist.barrier()
    assert [file.name for file in dump.glob("*.json")] == ["rank_00000.json"]
    with pytest.raises(ValueError, match="expected all 2"):
        assemble(dump)


def test_a_failing_rank_leaves_no_manifest_and_training_goes_on(tmp_path):
    in_world(2, one_rank_fails, tmp_path)


@pytest.mark.parametrize("how", [{"state": "later"}, {"copies": {"weight": "many"}}, {"labels": torch.tensor([1])},
                                 {"training": {"x": object()}}, {"training": 3}, {"step": None}])
def test_what_cannot_be_recorded_is_logged(tmp_path, caplog, how):
    recording = record_gradients(tmp_path / "dump", small_model(), **{"step": 1, **how})
    assert not recording.ok and not (tmp_path / "dump" / "manifest.json").exists()
    assert any(record.exc_info for record in caplog.records)
    recording.log(1.0)


def test_a_path_or_model_of_the_wrong_kind_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert not record_gradients(tmp_path / "file" / "dump", small_model(), step=1).ok
    assert not record_gradients(None, None, step=1).ok
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    assert not record_gradients(tmp_path / "sparse", sparse, step=1).ok and "sparse" in caplog.text


def test_a_dump_is_replaced_only_when_asked(tmp_path, caplog):
    dump = tmp_path / "dump"
    assert record_gradients(dump, small_model(), step=1).ok
    before = (dump / "manifest.json").read_bytes()
    assert not record_gradients(dump, small_model(), step=2).ok and "already holds a dump" in caplog.text
    assert (dump / "manifest.json").read_bytes() == before
    assert record_gradients(dump, small_model(), step=2, overwrite=True).ok and manifest_of(dump)["step"] == 2


def test_without_xxhash_there_are_no_checksums(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(gradclip_record, "xxhash", None)
    assert record_gradients(tmp_path / "dump", small_model(), step=1).ok and "no checksums" in caplog.text
    manifest = manifest_of(tmp_path / "dump")
    assert "checksum" not in manifest and list(manifest["files"]["rank_00000.h5"]) == ["bytes"]


def test_no_gradient_at_all_is_remarked(tmp_path, caplog):
    assert record_gradients(tmp_path / "dump", nn.Linear(2, 2), step=1).ok and "after the backward pass" in caplog.text


def test_link_names():
    assert gradclip_record._link_name(".a%/b.c") == "%2Ea%25%2Fb.c"
    assert gradclip_record.WRAPPERS.sub("", "_orig_mod.layers.0._checkpoint_wrapped_module.w_orig_mod.weight") \
        == "layers.0.w_orig_mod.weight"
