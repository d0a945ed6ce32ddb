"""merge DUMP -o OUT: full tensors from any layout, judged by numpy, by diff, and by those who read the output."""

import functools
import itertools
import json
import math
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest

import element_types as types
import test_random
from conftest import GOLDEN, LONG, ROOT, assert_shards, finding, kinds, refused, run, tree, without_run
from dump_builder import Dump, read_manifest, read_shards

sys.path.insert(0, str(ROOT / "scripts"))
import gradclip_load  # noqa: E402

COMBINE = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}
WIDTH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
         "F8_E5M2": "float8_e5m2"}


def merge(dump, out, *args, np=1, code=0, **how):
    """The report of a run that has to succeed."""
    result = run(np, "merge", dump, "-o", out, "--format", "json", *args, **how)
    assert result.code == code and result.err == "", result
    assert not out.with_name(out.name + ".partial").exists()
    return result.json()


def merged(tool, dump, *args, **how):
    """(report, {name: stored array or None} of the merged dump, its directory)"""
    out = tool.fresh("merged")
    report = merge(dump, out, *args, **how)
    manifest = read_manifest(out)
    assert manifest["world_size"] == 1 and sorted(p.name for p in out.iterdir()) == ["manifest.json", "rank_00000.h5"]
    return report, read_shards(out)[0], out


def read_safetensors(path):
    """({name: (dtype, array of bits)}, metadata) by the format's own words, strictly."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0 and data[8:9] == b"{"
    header = json.loads(data[8:8 + length])
    metadata, tensors, expected = header.pop("__metadata__"), {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        dtype = WIDTH[entry["dtype"]]
        assert begin == expected and end - begin == math.prod(entry["shape"]) * types.BITS[dtype].itemsize
        assert (8 + length + begin) % types.BITS[dtype].itemsize == 0  # aligned for whoever maps the file
        tensors[name] = dtype, np.frombuffer(data[8 + length + begin:8 + length + end],
                                             types.STORED[dtype]).reshape(entry["shape"])
        expected = end
    assert 8 + length + expected == len(data)
    assert all(isinstance(value, str) for value in metadata.values())
    return tensors, metadata


# ----------------------------------------------------------------------------------------------------------------------
# The oracle
# ----------------------------------------------------------------------------------------------------------------------


def rounded(numbers, dtype):
    """float64 numbers as PyTorch converts them: through float32 to the narrower types."""
    with np.errstate(over="ignore"):
        if dtype not in ("float64", "float32"):
            numbers = numbers.astype(np.float32).astype(np.float64)
        return types.narrow(numbers, dtype)


def full_tensor(parameter):
    """What the ranks of a dump_builder parameter hold, put together; None where all are None. Addends are combined over
    one Partial dimension of the mesh after another, the last first."""
    held = {rank: shard for rank, shard in parameter.shards.items() if shard is not None}
    if not held:
        return None
    if parameter.mesh is None:
        distinct = parameter.entry.get("copies") == "distinct" and len(parameter.shards) > 1
        return np.stack([held[rank] for rank in sorted(held)]) if distinct else held[min(held)]
    kind, sizes = [k[0] for k in parameter.kinds()], parameter.mesh.ranks.shape
    partial = "partial" in kind
    positions = np.arange(math.prod(parameter.shape)).reshape(parameter.shape)
    whole = np.zeros(positions.size, np.float64 if partial else types.STORED[parameter.dtype])

    def combined(cut, coordinate=()):
        d = len(coordinate)
        if d == len(sizes):
            stored = held[int(parameter.mesh.ranks[coordinate])].reshape(-1)
            return types.widen(stored, parameter.dtype) if partial else stored
        if kind[d] != "partial":
            return combined(cut, coordinate + (cut.get(d, 0),))
        operation = parameter.kinds()[d][1]
        parts = [combined(cut, coordinate + (i,)) for i in range(sizes[d])]
        result = functools.reduce(COMBINE[operation], parts)
        return result / sizes[d] if operation == "avg" else result

    cut_dimensions = [d for d, k in enumerate(kind) if k not in ("replicate", "partial")]
    for at in itertools.product(*(range(sizes[d]) for d in cut_dimensions)):
        cut = dict(zip(cut_dimensions, at))
        rank = int(parameter.mesh.ranks[tuple(cut.get(d, 0) for d in range(len(sizes)))])
        where = positions[np.ix_(*parameter.indices[rank])] if parameter.shape else positions
        where = where.reshape(-1)[slice(*parameter.entry.get("flat_ranges", {}).get(str(rank), (None, None)))]
        whole[where] = combined(cut)
    whole = whole.reshape(parameter.shape)
    return rounded(whole, written_type(parameter)) if partial else whole


def written_type(parameter):
    partial = any(k[0] == "partial" for k in parameter.kinds())
    return "float32" if partial and parameter.dtype.startswith("float8") else parameter.dtype


def expected_of(dump):
    return {0: {parameter.name: full_tensor(parameter) for parameter in dump.parameters}}


# ----------------------------------------------------------------------------------------------------------------------
# Layouts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [True, False])
def test_a_strided_shard_with_and_without_its_ranges(tool, recorded):
    """The public report: five elements, split factor 2, two ranks. What the recorder says wins over the placements."""
    whole = np.arange(5, dtype=np.float32)
    held = {0: [0, 1, 3, 4], 1: [2]} if recorded else {0: [0, 1, 3], 1: [2, 4]}
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.local("w", (5,), "dp", ["_StridedShard(dim=0, sf=2)"], {r: whole[i] for r, i in held.items()},
               indices={r: [np.array(i)] for r, i in held.items()})
    path = dump.write(tool.fresh("dump"), offsets=recorded)
    _, shards, out = merged(tool, path)
    assert_shards({0: shards}, {0: {"w": whole}})
    assert run(1, "diff", path, out).code == 0 and run(1, "verify", out).code == 0
    if recorded:
        np.testing.assert_array_equal(gradclip_load.Dump(path).numpy("w"), whole)


@pytest.mark.parametrize("seed", range(1000, 1060 if LONG else 1016))
def test_random_jobs(tool, seed):
    dump, storage, _ = test_random.draw(seed)
    path = dump.write(tool.fresh("dump"), **storage)
    before = tree(path)
    budget = [["--memory-budget", "1"], [], ["--threads", "1"]][seed % 3]
    report, shards, out = merged(tool, path, *budget)
    assert_shards({0: shards}, expected_of(dump))
    assert report["findings"] == [] and tree(path) == before
    entries = read_manifest(out)["parameters"]
    for parameter, entry, told in zip(dump.parameters, entries, report["parameters"], strict=True):
        whole = shards[parameter.name]
        assert entry["dtype"] == told["dtype_in_output"] == written_type(parameter)
        assert entry["mesh"] is None and entry["ranks"] == [0] and told["name"] == parameter.name
        assert told["status"] == ("none" if whole is None else "written")
        assert whole is None or list(whole.shape) == entry["shape"]
    assert not dump.parameters or run(1, "diff", path, out, "--ulp", "1").code == 0
    assert set(kinds(run(1, "verify", out, "--format", "json").json())) <= {"nothing-seen", "all-zero"}


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir()))
def test_golden_dumps(tool, case):
    path = GOLDEN / case / "dump"
    merging, _, out = merged(tool, path)
    equal = run(1, "diff", path, out, "--format", "json").json()
    assert set(kinds(equal)) <= {"replicas-differ"} and all(p["status"] == "equal" for p in equal["parameters"])
    totals = [run(1, "norms", d, "--no-scale", "--format", "json").json()["norm"]["total"] for d in (path, out)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-8)  # a combined value is rounded when it is written
    assert set(kinds(run(1, "verify", out, "--format", "json").json())) <= {"ranks-disagree", "tied-differ"}
    sharded, whole = gradclip_load.Dump(path), gradclip_load.Dump(out)
    assert sharded.names() == whole.names()
    for name, told in zip(whole.names(), merging["parameters"], strict=True):
        entry = sharded.entries[name]
        text = str(entry.get("gradient_placements", entry.get("placements")))
        if "Partial" in text or entry.get("copies") == "distinct":
            continue
        if told["status"] == "none":
            with pytest.raises(ValueError, match="None"):
                whole.numpy(name)
            continue
        assert types.same_bits(whole.numpy(name), sharded.numpy(name)), name


PARTIAL = [("Partial(sum)", "Replicate()"), ("Partial(avg)", "Shard(0)"), ("Partial(max)", "Partial(sum)"),
           ("Partial(sum)", "Partial(min)"), ("Partial(product)", "Shard(1)")]


@pytest.mark.parametrize("placements", PARTIAL)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_partial_gradients(tool, placements, dtype):
    random = np.random.default_rng(7)
    dump = Dump(6)
    dump.mesh("m", ["a", "b"], [[0, 1], [2, 3], [4, 5]])
    parameter = dump.sharded("w", types.narrow(random.standard_normal((4, 6)), dtype), "m", list(placements), dtype=dtype)
    for rank in range(6):
        copy = rank // 2 * 2 if "Replicate()" in placements else rank  # copies of one addend
        parameter.shards[rank] = types.narrow(
            np.random.default_rng(copy).standard_normal(parameter.shards[rank].shape) * 3, dtype)
    path = dump.write(tool.fresh("dump"))
    report, shards, out = merged(tool, path)
    assert_shards({0: shards}, expected_of(dump))
    assert report["findings"] == [] and run(1, "diff", path, out, "--ulp", "1").code == 0


def test_combined_values_beyond_the_type(tool):
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.local("w", (3,), "dp", ["Partial()"], {r: np.array([40000, 1, math.inf], np.float16) for r in range(2)})
    report, shards, _ = merged(tool, dump.write(tool.fresh("dump")))
    assert_shards({0: shards}, {0: {"w": np.array([math.inf, 2, math.inf], np.float16)}})
    assert finding(report, "overflow")["value"] == 1  # what was infinite before is none


def test_bits_stay(tool):
    """NaN payloads, signs of zeros and of NaN, subnormals: nothing goes through arithmetic."""
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    for dtype, width in (("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1),
                         ("float8_e5m2", 1)):
        bits = np.random.default_rng(1).integers(0, 2 ** (8 * width), 4001, dtype=f"u{width}", endpoint=False)
        bits[:2] = 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1)  # a NaN with every payload bit, -0
        dump.sharded(dtype, bits.view(types.STORED[dtype]), "dp", ["Shard(0)"], dtype=dtype)
    path = dump.write(tool.fresh("dump"))
    _, shards, _ = merged(tool, path)
    assert_shards({0: shards}, expected_of(dump))


# ----------------------------------------------------------------------------------------------------------------------
# Copies, None, names
# ----------------------------------------------------------------------------------------------------------------------


def test_copies_that_differ(tool):
    dump = Dump(4)
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    copies = {0: [1, 2], 1: [3, 4], 2: [1, 2.5], 3: [3, 4]}
    dump.local("norm.weight", (4,), "m", ["Replicate()", "Shard(0)"],
               {rank: np.array(values, np.float32) for rank, values in copies.items()})
    dump.plain("bias", {r: np.array([-0.0 if r else 0.0], np.float32) for r in range(4)})
    dump.plain("scale", {r: np.float32(r) for r in range(4)})
    path = dump.write(tool.fresh("dump"))
    for np_ in (1, 3):
        report, shards, out = merged(tool, path, np=np_)
        assert_shards({0: shards}, {0: {"norm.weight": np.array([1, 2, 3, 4], np.float32),
                                        "bias": np.zeros(1, np.float32), "scale": np.float32(0)}})
        assert [(f["kind"], f["parameter"], f["ranks"], f["index"], f["value"]) for f in report["findings"]] == [
            ("replicas-differ", "norm.weight", [0, 2], [1], 0.5),
            ("replicas-differ", "scale", [0, 1, 2, 3], [], 3.0)]
    text = run(1, "merge", path, "-o", tool.fresh("out"), "--strict")
    assert text.code == 1 and "replicas-differ norm.weight [1] (ranks 0, 2)" in text.out
    assert run(1, "verify", out).code == 1  # "scale" is a zero


def test_none(tool):
    """All None is None; a copy that is None is replaced by the next; elements that nobody has become 0."""
    dump = Dump(4)
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    whole = np.arange(1, 9, dtype=np.float32)
    dump.sharded("unused", whole, "m", ["Shard(0)", "Replicate()"], none=range(4))
    dump.sharded("copies", whole, "m", ["Replicate()", "Shard(0)"], none=[0])
    dump.sharded("partly", whole, "m", ["Shard(0)", "Shard(0)"], none=[1, 3])
    dump.local("addends", (2,), "m", ["Partial()", "Replicate()"],
               {0: None, 1: None, 2: whole[:2], 3: whole[:2]})
    dump.sharded("short", whole[:2], "m", ["Shard(0)", "Replicate()"])
    dump.sharded("empty here", whole[:1], "m", ["Shard(0)", "Replicate()"], none=[2, 3])
    path = dump.write(tool.fresh("dump"))
    report, shards, out = merged(tool, path)
    assert_shards({0: shards}, {0: {
        "unused": None, "copies": whole, "partly": np.array([1, 2, 0, 0, 5, 6, 0, 0], np.float32),
        "addends": whole[:2], "short": whole[:2], "empty here": whole[:1]}})
    partly = finding(report, "partly-none")
    assert partly["parameter"] == "partly" and partly["value"] == 4 and partly["ranks"] == [1, 3]
    copies = finding(report, "replicas-differ")
    assert copies["parameter"] == "copies" and copies["ranks"] == [0]
    assert [p["status"] for p in report["parameters"]] == ["none"] + ["written"] * 5
    file = tool.fresh("file")
    merge(path, file, "--safetensors")
    tensors, metadata = read_safetensors(file)
    assert "unused" not in tensors and metadata["none"] == "unused"
    assert len(tensors) == 5 and tensors["partly"][1].tolist() == [1, 2, 0, 0, 5, 6, 0, 0]


def test_a_tied_weight_in_one_file(tool):
    """It is written once: what is not written is to be the same, and None only where no entry has values."""
    first = np.random.default_rng(3).standard_normal((8, 2)).astype(np.float32)
    second = first.copy()
    second[5, 1] += 1

    def tied(a, b, none=()):
        dump = Dump(4)
        dump.mesh("s0", ["dp"], [0, 1])
        dump.mesh("s1", ["dp"], [2, 3])
        dump.sharded("embed", a, "s0", ["Shard(0)"], tied="e", none=none)
        dump.sharded("embed", b, "s1", ["Shard(1)"], tied="e")
        return dump.write(tool.fresh("dump"))
    for a, b, none, expected, written in [(first, first, (), [], first), (first, second, (), ["tied-differ"], first),
                                          (first, second, (0, 1), [], second)]:
        path, reports = tied(a, b, none), []
        for processes in (1, 3):
            file = tool.fresh("file")
            reports.append(merge(path, file, "--safetensors", np=processes))
            tensors, metadata = read_safetensors(file)
            np.testing.assert_array_equal(tensors["embed"][1], written)
            assert list(tensors) == ["embed"] and "none" not in metadata
        assert kinds(reports[0]) == kinds(reports[1]) == expected, reports[0]["findings"]
        if expected:
            assert finding(reports[0], "tied-differ")["ranks"] == [2, 3]


def test_names_that_stand_several_times(tool):
    """Tied weights, stages with local names, experts of a rank: every entry stays, and diff pairs them."""
    dump = Dump(4)
    dump.mesh("s0", ["dp"], [0, 1])
    dump.mesh("s1", ["dp"], [2, 3])
    random = np.random.default_rng(3)
    tied, first, second = (random.standard_normal((4, 2)).astype(np.float32) for _ in range(3))
    dump.sharded("embed.weight", tied, "s0", ["Shard(0)"], tied="embed")
    dump.sharded("norm.weight", first, "s0", ["Shard(0)"])
    dump.sharded("embed.weight", tied, "s1", ["Shard(1)"], tied="embed")
    dump.sharded("norm.weight", second, "s1", ["Shard(0)"])
    dump.plain("norm.weight@2", np.float32(7), ranks=[0])
    dump.plain("experts", {r: np.full(2, r, np.float32) for r in range(1, 4)}, copies="distinct", expert=True)
    dump.plain("w", first, ranks=[0], dataset="w%401")
    path = dump.write(tool.fresh("dump"))
    report, shards, out = merged(tool, path)
    experts = np.array([[1, 1], [2, 2], [3, 3]], np.float32)
    manifest = read_manifest(out)
    assert [e["name"] for e in manifest["parameters"]] == [p.name for p in dump.parameters]
    links = [e.get("dataset", e["name"]) for e in manifest["parameters"]]
    assert len(set(links)) == 7 and links[6] == "w%401"
    with h5py.File(out / "rank_00000.h5") as file:
        held = [file["gradients"][link][()] for link in links]
    for found, whole in zip(held, [tied, first, tied, second, np.float32(7), experts, first], strict=True):
        np.testing.assert_array_equal(found, whole)
    assert manifest["parameters"][2]["tied"] == "embed" and manifest["parameters"][5]["expert"] is True
    assert run(1, "diff", path, out).code == 0 and run(1, "verify", out).code == 0
    assert gradclip_load.Dump(out).numpy("norm.weight@3").tolist() == second.tolist()

    file = tool.fresh("file")
    report = merge(path, file, "--safetensors")
    tensors, _ = read_safetensors(file)
    assert list(tensors) == ["embed.weight", "norm.weight", "norm.weight@3", "norm.weight@2", "experts", "w"]
    np.testing.assert_array_equal(tensors["norm.weight@3"][1], second)
    assert [p["status"] for p in report["parameters"]].count("repeated") == 1


def test_scale_inv(tool):
    random = np.random.default_rng(5)
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    codes = random.integers(0, 120, (6, 3)).astype(np.uint8)
    for name, scale_inv in (("one", {0: 0.25, 1: 0.25}), ("two", {0: 0.25, 1: 0.3}), ("without", None)):
        local = {0: codes[:3], 1: codes[3:]}
        dump.local(name, (6, 3), "dp", ["Shard(0)"], local, dtype="float8_e4m3fn", scale_inv=scale_inv)
    path = dump.write(tool.fresh("dump"))
    report, shards, out = merged(tool, path)
    scales = np.repeat(np.array([0.25, 0.3], np.float32), 3)[:, None]
    two = types.widen(codes, "float8_e4m3fn").astype(np.float32) * scales
    assert_shards({0: shards}, {0: {"one": codes, "two": two, "without": codes}})
    assert [p["scale_inv"] for p in report["parameters"]] == [0.25, None, None]
    assert run(1, "diff", path, out).code == 0 and run(1, "verify", out).code == 0
    np.testing.assert_array_equal(gradclip_load.Dump(out).values("one"), gradclip_load.Dump(path).values("one"))

    file = tool.fresh("file")
    merge(path, file, "--safetensors")
    tensors, _ = read_safetensors(file)
    assert {name: dtype for name, (dtype, _) in tensors.items()} == {
        "one": "float32", "two": "float32", "without": "float8_e4m3fn"}  # the format has no place for a scale_inv
    np.testing.assert_array_equal(tensors["one"][1], gradclip_load.Dump(path).values("one"))
    np.testing.assert_array_equal(tensors["two"][1], two)


def test_the_merged_manifest(tool):
    """What the step recorded stays: the next command has the same numbers, pipeline parallelism included."""
    dump = Dump(4, device_mesh="world", moe_mesh="moe", pp_enabled=True, pp_axis_name="stage", ep_axis_name="ep",
                num_label_tokens=8, dp_group_size=2, max_grad_norm=1.0, grad_norm=math.sqrt(55 + 14 / 4) / 4)
    dump.mesh("world", ["stage", "dp"], [[0, 1], [2, 3]])
    dump.mesh("moe", ["ep"], [2, 3])
    dump.mesh("s0", ["dp"], [0, 1])
    dump.more["note"] = {"kept": [1, 2.50]}
    dump.sharded("w", np.arange(6, dtype=np.float64), "s0", ["Shard(0)"])
    dump.sharded("e", np.arange(4, dtype=np.float64), "moe", ["Shard(0)"])
    path = dump.write(tool.fresh("dump"))
    report, _, out = merged(tool, path)
    assert report["not_kept"] == ["meshes", "moe_mesh"]
    assert "the MoE mesh" in run(1, "merge", path, "-o", tool.fresh("out")).out
    before, after = read_manifest(path), read_manifest(out)
    for key in ("step", "state", "training", "note", "producer", "microbatch"):
        assert after[key] == before[key]
    assert after["merge"]["world_size"] == 4 and after["moe_mesh"] is None
    assert after["parameters"][1]["expert"] is True
    report = run(1, "norms", out, "--format", "json").json()
    assert report["scale"]["label_token_divisor"] == 4
    assert report["norm"]["total"] == pytest.approx(math.sqrt(55 + 14) / 4, rel=1e-15)
    # Without the expert's divisor it is not what the step logged, which is no fault of the gradients.
    assert kinds(report) == [] and kinds(run(1, "norms", path, "--format", "json").json()) == []


# ----------------------------------------------------------------------------------------------------------------------
# Processes, memory, formats
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Larger than a round's memory, on a mesh of 3 x 2, every type; with copies that differ."""
    random = np.random.default_rng(11)
    dump = Dump(6)
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3], [4, 5]])
    dump.sharded("large", random.standard_normal((2200, 2300)).astype(np.float32), "m", ["Shard(0)", "Shard(1)"])
    for dtype in types.ALL:
        values = types.narrow(random.standard_normal((3, 700, 101)), dtype)
        dump.sharded(f"{dtype}.weight", values, "m", ["Shard(1)", "Shard(2)"], dtype=dtype)
    dump.sharded("strided", random.standard_normal((300, 400)), "m", ["_StridedShard(dim=0, sf=2)", "Shard(0)"])
    addends = dump.sharded("addends", random.standard_normal((500, 400)).astype(np.float32), "m", ["Partial()", "Shard(0)"])
    for rank, shard in addends.shards.items():
        addends.shards[rank] = shard * np.float32(rank + 1)
    dump.sharded("copies", random.standard_normal(200_000), "m", ["Replicate()", "Shard(0)"])
    dump.parameters[-1].shards[4] = dump.parameters[-1].shards[4] + 1.0
    return dump, dump.write(tmp_path_factory.mktemp("merge") / "large", offsets=True)


def test_any_number_of_processes(tool, large):
    dump, path = large
    first = None
    for np_, more in ((1, []), (3, ["--memory-budget", "1"]), (1, ["--memory-budget", "1", "--threads", "3"])):
        report, shards, out = merged(tool, path, *more, np=np_)
        file = tool.fresh("file")
        as_file = merge(path, file, "--safetensors", *more, np=np_)
        content = tree(out), file.read_bytes(), without_run(report), without_run(as_file)
        if first is None:
            first = content
            expected = expected_of(dump)
            assert_shards({0: shards}, expected)
            tensors, _ = read_safetensors(file)
            for name, (_, stored) in tensors.items():
                assert types.same_bits(stored, expected[0][name].view(stored.dtype)), name
            assert kinds(report) == ["replicas-differ"] and report["findings"][0]["ranks"] == [0, 4]
        for one, other, what in zip(content, first, ("the dump", "the file", "its report", "the file's report")):
            assert one == other, f"{what}, {np_} processes {more}"
    shutil_free(tool)


def shutil_free(tool):
    """Large outputs do not wait for the end of the session."""
    for path in tool.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_memory_does_not_grow_with_a_tensor(tool):
    """A tensor of 120 MB and none of 40 bytes need about the same."""
    peaks = []
    for rows in (10, 30_000):
        dump = Dump(2)
        dump.mesh("tp", ["tp"], [0, 1])
        dump.sharded("w", np.ones((rows, 1000), np.float32), "tp", ["Shard(1)"])
        report = merge(dump.write(tool.fresh("dump"), checksums=False), tool.fresh("out"), "--memory-budget", "1M")
        peaks.append(report["run"]["memory_peak_bytes"])
    assert peaks[1] - peaks[0] < 40_000_000, peaks


def test_the_safetensors_package_reads_it(tool):
    """Names, types and bits as the format's own reader and PyTorch see them."""
    import safetensors
    import torch
    from safetensors.torch import load_file

    random = np.random.default_rng(13)
    dump = Dump(2, step=12)
    dump.mesh("dp", ["dp"], [0, 1])
    for dtype in types.ALL:
        dump.sharded(dtype, types.narrow(random.standard_normal((5, 3)), dtype), "dp", ["Shard(0)"], dtype=dtype)
    dump.plain("scalar", np.float32(2.5))
    dump.sharded("empty", np.ones((0, 4), np.float32), "dp", ["Shard(0)"])
    dump.plain('q"uoted\\ ünïcode/%', np.ones(3, np.float64))
    path = dump.write(tool.fresh("dump"))
    file, out = tool.fresh("file").with_suffix(".safetensors"), tool.fresh("out")
    merge(path, file, "--safetensors")
    merge(path, out)
    with safetensors.safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "pt" and metadata["step"] == "12" and metadata["state"] == "before_scale"
    assert "gradclip" in metadata["origin"] and "dump_builder" in metadata["producer"]
    tensors, loaded = load_file(file), gradclip_load.Dump(out)
    assert sorted(tensors) == sorted(loaded.names()) == sorted(p.name for p in dump.parameters)
    for parameter in dump.parameters:
        tensor, whole = tensors[parameter.name], full_tensor(parameter)
        assert str(tensor.dtype) == f"torch.{parameter.dtype}" and tuple(tensor.shape) == whole.shape
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if whole.size else np.empty(0, np.uint8)
        assert bits.tobytes() == whole.tobytes()
        own = loaded.torch(parameter.name)
        assert own.dtype == tensor.dtype and own.shape == tensor.shape
        numbers = own.to(torch.float64)
        assert torch.equal(numbers, tensor.to(torch.float64))
        np.testing.assert_array_equal(loaded.values(parameter.name).astype(np.float64), numbers.numpy())


def test_only_some(tool):
    dump = Dump(1)
    for i in range(3):
        dump.plain(f"layers.{i}.weight", np.full(2, i, np.float32))
    path = dump.write(tool.fresh("dump"))
    report, shards, out = merged(tool, path, "--only", r"\.[12]\.")
    assert sorted(shards) == ["layers.1.weight", "layers.2.weight"] and len(report["parameters"]) == 2
    assert run(1, "verify", out).code == 0
    csv = tool.fresh("report").with_suffix(".csv")
    assert run(1, "merge", path, "-o", tool.fresh("out"), "--report", csv).code == 0
    assert csv.read_text().splitlines()[1].startswith("layers.0.weight,layers.0.weight,written,2,float32,float32,,2,8")
    assert run(1, "merge", Dump(2).write(tool.fresh("nothing")), "-o", tool.fresh("out")).code == 0


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def small(tool, **how):
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("w", np.arange(8, dtype=np.float32), "dp", ["Shard(0)"])
    return dump.write(tool.fresh("dump"), **how)


@pytest.mark.parametrize("more", [[], ["--safetensors"]])
def test_outputs(tool, more):
    dump = small(tool)
    out = tool.fresh("out")
    before = tree(dump)
    for place, why in ((dump, "is the input"), (dump / "out", "lies inside"), (dump / "manifest.json", "lies inside"),
                       (tool.folder, "contains")):
        refused(1, 2, dump, "merge", dump, "-o", place, *more, mentions=[why])
    refused(1, 2, dump, "merge", dump, *more, mentions=["--output OUT is missing"])
    if not more:
        refused(1, 2, dump, "merge", dump, "-o", tool.folder / "x.safetensors", mentions=["--safetensors with it"])
    refused(1, 2, dump, "merge", dump, "-o", tool.folder / "no" / "out", *more, mentions=["does not exist"])
    refused(1, 2, dump, "merge", dump, "-o", out, "--only", "nobody", *more, mentions=["--only", "no parameter"])
    refused(1, 2, dump, "merge", dump, "-o", out, "--only", "(", *more, mentions=["--only"])
    assert not out.exists() and tree(dump) == before
    merge(dump, out, *more)
    content = tree(out) if out.is_dir() else out.read_bytes()
    refused(1, 2, dump, "merge", dump, "-o", out, *more, mentions=["exists", "--overwrite"])
    for np_ in (1, 2):
        merge(dump, out, "--overwrite", *more, np=np_)
        assert (tree(out) if out.is_dir() else out.read_bytes()) == content
    # Nothing but its own kind is replaced.
    foreign = tool.fresh("foreign")
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    refused(1, 2, dump, "merge", dump, "-o", foreign, "--overwrite", *more, mentions=["exists and is not a"])
    text = tool.fresh("text")
    text.write_text("years of work")
    refused(1, 2, dump, "merge", dump, "-o", text, "--overwrite", *more, mentions=["exists and is not a"])
    assert (foreign / "thesis.tex").exists() and text.read_text() == "years of work"
    assert sorted(p.name for p in tool.folder.iterdir() if ".partial" in p.name) == []


@pytest.mark.parametrize("np_, more", [(1, []), (1, ["--safetensors"]), (2, [])])
def test_bad_input(tool, np_, more):
    def damaged(damage, mentions, **how):
        dump, out = small(tool, **how), tool.fresh("out")
        damage(dump)
        refused(np_, 3, dump, "merge", dump, "-o", out, *more, mentions=mentions)
        assert not out.exists() and not out.with_name(out.name + ".partial").exists()

    def offsets(rank, file):
        rows = np.array([[0, 0, 3], [0, 3, 4]] if rank == 0 else [[0, 3, 7]], "<i8")
        file["gradients/w"].attrs["global_ranges"] = rows

    damaged(lambda dump: (dump / "rank_00001.h5").unlink(), ["rank_00001.h5"])
    damaged(lambda dump: None, ["'w'", "expected shards that hold each element once"], edit_file=offsets)
    if np_ > 1:
        return
    damaged(lambda dump: (dump / "rank_00001.h5").write_bytes(b"no HDF5"), ["rank_00001.h5"])
    refused(np_, 3, tool.folder / "no", "merge", tool.folder / "no", "-o", tool.fresh("out"), *more,
            mentions=["does not exist"])


def test_what_a_safetensors_file_cannot_hold(tool):
    dump = Dump(1)
    dump.plain("__metadata__", np.ones(2, np.float32))
    path, out = dump.write(tool.fresh("dump")), tool.fresh("out")
    refused(1, 3, path, "merge", path, "-o", out, "--safetensors", mentions=["__metadata__", "keeps for itself"])
    assert not out.exists()
    merged(tool, path)


def test_a_leftover_is_replaced(tool):
    dump, out = small(tool), tool.fresh("out")
    leftover = out.with_name(out.name + ".partial")
    leftover.mkdir()
    (leftover / "thesis.tex").write_text("years of work")
    refused(1, 2, dump, "merge", dump, "-o", out, "--safetensors", mentions=["was not made by gradclip"])
    (leftover / ".gradclip-partial").touch()
    merge(dump, out, "--safetensors")
    assert out.is_file() and not leftover.exists()


# ----------------------------------------------------------------------------------------------------------------------
# gradclip_load.py
# ----------------------------------------------------------------------------------------------------------------------


def loader(*args):
    return subprocess.run([sys.executable, ROOT / "scripts" / "gradclip_load.py", *map(str, args)], capture_output=True,
                          text=True, timeout=60, check=False)


def test_the_loader(tool):
    dump = Dump(4)
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    random = np.random.default_rng(2)
    for dtype in types.ALL:
        dump.sharded(dtype, types.narrow(random.standard_normal((5, 3)), dtype), "m", ["Shard(1)", "Shard(0)"], dtype=dtype)
    dump.sharded("copies/%", random.standard_normal(7).astype(np.float32), "m", ["Replicate()", "S(0)"])
    dump.sharded("strided", np.arange(11.0), "m", ["_StridedShard(dim=0, sf=2)", "Shard(0)"])
    dump.plain("scalar", np.float32(2.5))
    dump.sharded("addends", np.ones(4, np.float32), "m", ["Partial()", "Shard(0)"])
    dump.plain("distinct", {0: np.ones(2), 1: np.zeros(2)}, copies="distinct")
    plain, packed = dump.write(tool.fresh("dump"), offsets=True), dump.write(tool.fresh("dump"), packed=True)
    _, shards, out = merged(tool, plain)
    for path in (plain, packed, out):
        loaded = gradclip_load.Dump(path)
        assert loaded.names() == [p.name for p in dump.parameters]
        for parameter in dump.parameters:
            name = parameter.name
            directly = name not in ("addends", "distinct") and (name != "strided" or path == plain)
            if not directly and path != out:
                with pytest.raises(ValueError, match="gradclip merge"):
                    loaded.numpy(name)
                continue
            assert types.same_bits(loaded.numpy(name), shards[name]), name
            assert loaded.info(name) == (shards[name].shape, parameter.dtype)
            np.testing.assert_array_equal(loaded.values(name), types.widen(shards[name], parameter.dtype))
    for path in (plain, out):
        listed = loader(path, "--list")
        assert listed.returncode == 0 and "bfloat16\t5x3\tbfloat16" in listed.stdout.splitlines()
    one = loader(out, "--parameter", "copies/%", "-o", tool.folder / "one.npy")
    assert one.returncode == 0, one
    np.testing.assert_array_equal(np.load(tool.folder / "one.npy"), shards["copies/%"])
    assert "2.5" in loader(out, "--parameter", "scalar").stdout
    for arguments in ((out, "--parameter", "nobody"), (tool.folder / "no", "--list")):
        wrong = loader(*arguments)
        assert wrong.returncode == 3 and wrong.stderr.startswith("gradclip_load: ") and "Traceback" not in wrong.stderr
