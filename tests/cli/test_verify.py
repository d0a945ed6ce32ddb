"""verify: every kind of fault by itself, several at once, the same findings on any number of processes; and --verify."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest

from conftest import GOLDEN, binary, finding, kinds, launcher, number, parse_report, refused, run, tree, without_run
from dump_builder import Dump, manifest_checksum, read_manifest


def numbers(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def base(**training):
    """Four ranks: a weight in four blocks, a bias with four copies, a half on two shards with two copies each."""
    dump = Dump(4, **{"max_grad_norm": 1.0, **training})
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    dump.sharded("layers.0.weight", numbers(1, (8, 6)), "m", ["Shard(0)", "Shard(1)"])
    dump.plain("layers.0.bias", numbers(2, 5))
    dump.sharded("layers.1.weight", numbers(3, (4, 4)), "m", ["Replicate()", "Shard(0)"])
    return dump


def verify(path, *args, counts=(1, 3), code=1):
    """The report, which is the same from each number of processes."""
    reports = []
    for np_ in counts:
        before = tree(path)
        result = run(np_, "verify", path, "--format", "json", *args)
        assert result.code == code and result.err == "", result
        assert tree(path) == before
        reports.append(result.json())
        assert without_run(reports[-1]) == without_run(reports[0]), f"{np_} processes"
    return reports[0]


def text(path, *args, code=1):
    result = run(1, "verify", path, *args)
    assert result.code == code and result.err == "", result
    return result.out


def rewrite_manifest(path, edit, checksum=True):
    manifest = read_manifest(path)
    edit(manifest)
    if checksum and "checksum" in manifest:
        manifest["checksum"] = manifest_checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def flip(path, offset=None, find=None):
    """One bit of a file; in the middle of `find`."""
    data = bytearray(path.read_bytes())
    at = data.index(find) + len(find) // 2 if find is not None else offset
    data[at] ^= 0x10
    path.write_bytes(data)


# Clean -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("write", [{}, {"packed": True}, {"compression": "gzip", "shuffle": True}, {"checksums": False},
                                   {"offsets": True}], ids=str)
def test_a_clean_dump_has_no_findings(tool, write):
    path = base().write(tool.fresh("dump"), **write)
    report = verify(path, code=0)
    assert report["format"] == "gradclip.report" and report["command"] == "verify" and report["findings"] == []
    assert report["dump"]["world_size"] == 4 and report["dump"]["parameters"] == 3
    assert report["checked"] == {"manifest": True, "complete": True, "files": 4, "shards": 12}
    some = write.get("checksums", True)
    assert report["checksums"] == {"manifest": some, "files": 4 * some, "files_compared": 4 * some, "shards": 12 * some}
    assert "none: clean" in text(path, code=0)
    assert ("nothing vouches for the bits" in text(path, code=0)) == (not some)
    assert text(path, "--quiet", code=0) == ""


# What recorded dumps really have: a training step that did not sum its sequence-parallel norms, and the reference's own
# habit of counting a tied weight once in each stage.
GOLDEN_FINDINGS = {"tp2_sequence": {"ranks-disagree"}, "moe_ep": None, "fsdp_tp_plain": None, "tied_pp": None}


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_recorded_dumps(case):
    path = GOLDEN / case / "dump"
    result = run(1, "verify", path, "--format", "json")
    found = kinds(result.json())
    assert result.code == (1 if found else 0) and result.err == ""
    norms = kinds(run(1, "norms", path, "--format", "json").json())
    assert sorted(found) == sorted(norms)
    assert set(found) <= {"ranks-disagree", "replicas-differ", "tied-differ"}, found


# One fault each ----------------------------------------------------------------------------------------------------------

def test_missing_file(tool):
    path = base().write(tool.fresh("dump"))
    (path / "rank_00002.h5").unlink()
    report = verify(path)
    found = finding(report, "missing")
    assert kinds(report) == ["missing"]
    assert found["ranks"] == [2] and found["parameter"] is None and "rank_00002.h5 does not exist" in found["message"]
    assert report["checked"]["files"] == 3 and report["checked"]["shards"] == 9


def test_missing_dataset(tool):
    def remove(rank, file):
        if rank in (1, 3):
            del file["gradients/layers.0.weight"]
    report = verify(base().write(tool.fresh("dump"), edit_file=remove))
    found = finding(report, "missing")
    assert kinds(report) == ["missing"] and found["parameter"] == "layers.0.weight" and found["ranks"] == [1, 3]


def test_surplus_files_and_datasets(tool):
    def add(rank, file):
        if rank == 1:
            file["gradients"].create_dataset("layers.9.weight", data=np.zeros(3, np.float32))
    path = base().write(tool.fresh("dump"), edit_file=add)
    shutil.copy(path / "rank_00000.h5", path / "rank_00004.h5")
    (path / "rank_00003.h5.tmp").write_bytes(b"x")
    (path / "rank_00003.json").write_text("{}")
    (path / "notes.txt").write_text("mine")
    report = verify(path)
    assert kinds(report) == ["extra"] * 4
    assert [(f["parameter"], f["ranks"]) for f in report["findings"]] == [
        ("/gradients/layers.9.weight", [1]), ("rank_00003.h5.tmp", []), ("rank_00003.json", []), ("rank_00004.h5", [])]


def test_surplus_in_the_packed_layout_and_in_none(tool):
    dump = base()
    dump.parameters[1].shards[2] = None
    path = dump.write(tool.fresh("dump"), packed=True, checksums=False)
    rewrite_manifest(path, lambda m: m["parameters"][1].update(ranks=[0, 1, 3]))
    report = verify(path)
    assert [(f["kind"], f["parameter"], f["ranks"]) for f in report["findings"]] == [
        ("extra", "/none, layers.0.bias", [2]), ("ranks-disagree", None, [0, 1, 2, 3])]  # rank 2 has no bias
    rewrite_manifest(path, lambda m: m["parameters"][1].update(ranks=[0, 3]))
    found = [f["parameter"] for f in verify(path)["findings"] if f["kind"] == "extra"]
    assert found == ["/none, layers.0.bias", "/packed/index, layers.0.bias"]


def test_in_none_and_there(tool):
    def add(rank, file):
        if rank == 0:
            file.create_dataset("none", data=np.array([b"layers.0.bias"]))
    found = finding(verify(base().write(tool.fresh("dump"), edit_file=add)), "extra")
    assert found["parameter"] == "layers.0.bias" and found["ranks"] == [0]


def test_shape(tool):
    dump = base()
    dump.parameters[0].shards[3] = numbers(4, (3, 3))
    report = verify(dump.write(tool.fresh("dump")))
    found = finding(report, "shape")
    assert kinds(report) == ["shape"] and found["parameter"] == "layers.0.weight" and found["ranks"] == [3]
    assert "[3, 3]" in found["message"] and "[4, 3]" in found["message"]


def test_dtype(tool):
    dump = base()
    dump.parameters[0].shards[3] = dump.parameters[0].shards[3].astype(np.float64)

    def edit(rank, file):
        if rank == 3:
            file["gradients/layers.0.weight"].attrs["dtype"] = np.bytes_("float64")
    report = verify(dump.write(tool.fresh("dump"), edit_file=edit))
    found = finding(report, "dtype")
    assert kinds(report) == ["dtype"] and found["ranks"] == [3] and "float64" in found["message"]


def test_placement_of_a_block(tool):
    def edit(rank, file):
        if rank == 3:
            file["gradients/layers.0.weight"].attrs["global_offset"] = np.array([4, 0], "<i8")
    report = verify(base().write(tool.fresh("dump"), offsets=True, edit_file=edit))
    found = finding(report, "placement")
    assert kinds(report) == ["placement"] and found["ranks"] == [3] and "[4, 3]" in found["message"]


def test_slices_that_are_not_the_tensor(tool):
    dump = Dump(2)
    dump.mesh("m", ["dp"], [0, 1])
    dump.sharded("weight", numbers(1, (8, 2)), "m", ["Flat()"], flat_ranges={0: (0, 8), 1: (9, 16)})
    report = verify(dump.write(tool.fresh("dump")))
    found = finding(report, "placement")
    assert kinds(report) == ["placement"] and "15 elements" in found["message"] and "16" in found["message"]


def flat_slices(tool, ranges):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("m", ["dp", "fsdp"], [[0, 1], [2, 3]])
    dump.sharded("weight", numbers(1, (8, 2)), "m", ["Replicate()", "Flat()"],
                 flat_ranges={rank: ranges[rank % 2] for rank in range(4)})
    return dump.write(tool.fresh("dump"))


def rows_slices(tool, ranges, placement="Shard(0)"):
    """What the ranks say of themselves is not what their placements say."""
    whole = numbers(1, (8, 2))
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("m", ["dp"], [0, 1])
    dump.local("weight", whole.shape, "m", [placement], {r: whole[slice(*ranges[r])] for r in range(2)})

    def say(rank, file):
        rows = [[0, *ranges[rank]], [1, 0, 2]]
        file["gradients/weight"].attrs["global_ranges"] = np.array(rows, "<i8")
    return dump.write(tool.fresh("dump"), edit_file=say)


def strided_slices(tool, begins):
    """11 rows as PyTorch versions differ on: the recorded offset decides."""
    whole = numbers(1, (11, 2))
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    lengths = [3, 3, 3, 2]
    shards = {r: whole[begins[r]:begins[r] + lengths[r]] for r in range(4)}
    dump.local("weight", whole.shape, "m", ["_StridedShard(dim=0, sf=2)", "Shard(0)"], shards)

    def say(rank, file):
        file["gradients/weight"].attrs["global_offset"] = np.array([begins[rank], 0], "<i8")
    return dump.write(tool.fresh("dump"), edit_file=say)


@pytest.mark.parametrize("make, right, wrong, source", [
    (flat_slices, [(0, 5), (5, 16)], [(0, 8), (0, 8)], "flat_ranges"),
    (rows_slices, [(3, 8), (0, 3)], [(0, 4), (0, 4)], "global_ranges"),
    (rows_slices, [(0, 7), (7, 8)], [(1, 5), (4, 8)], "global_ranges"),
    (strided_slices, [0, 6, 3, 9], [0, 6, 0, 9], "global_offset")])
def test_slices_that_hold_elements_twice(tool, make, right, wrong, source):
    """As many elements as the tensor has, and not each of them once: its norm would be another one."""
    def measured(path):
        for command, *more in ["norms"], ["clip", "-o", tool.fresh("out")]:
            yield run(3, command, path, *more, "--strict", "--format", "json")
    path = make(tool, right)
    assert kinds(verify(path, code=0)) == []
    assert [result.code for result in measured(path)] == [0, 0]
    path = make(tool, wrong)
    report = verify(path)
    assert kinds(report) == ["placement"] and source in finding(report, "placement")["message"], report
    for result in measured(path):
        assert result.code == 1 and finding(result.json(), "placement")["parameter"] == "weight", result


def test_copies_of_different_sizes(tool):
    def edit(rank, file):
        if rank == 2:
            del file["gradients/layers.1.weight"]
            data = file["gradients"].create_dataset("layers.1.weight", data=numbers(5, (1, 4)))
            data.attrs["dtype"] = np.bytes_("float32")
            data.attrs["global_ranges"] = np.array([[0, 0, 1], [1, 0, 4]], "<i8")
    report = verify(base().write(tool.fresh("dump"), edit_file=edit))
    found = finding(report, "placement")
    assert kinds(report) == ["placement"] and found["parameter"] == "layers.1.weight" and found["ranks"] == [2]


@pytest.mark.parametrize("storage", [{}, {"compression": "gzip"}], ids=["plain", "deflate"])
def test_checksum_of_a_dataset(tool, storage):
    dump = base()
    path = dump.write(tool.fresh("dump"))
    data = dump.parameters[0].shards[1].tobytes()
    flip(path / "rank_00001.h5", find=data)
    report = verify(path)
    whole, of_dataset = report["findings"]
    assert kinds(report) == ["checksum"] * 2 and whole["ranks"] == of_dataset["ranks"] == [1]
    assert whole["parameter"] is None and "1 of its 3 gradients" in whole["message"]
    assert of_dataset["parameter"] == "layers.0.weight"


def test_checksum_beside_the_gradients(tool):
    path = base().write(tool.fresh("dump"))
    with h5py.File(path / "rank_00001.h5", "r+") as file:
        file.attrs["note"] = 1
    found = finding(verify(path), "checksum")
    assert "3 gradients have their recorded checksums" in found["message"] and "bytes" in found["message"]


def test_checksum_of_a_dataset_without_whole_files(tool):
    dump = base()
    path = dump.write(tool.fresh("dump"))
    rewrite_manifest(path, lambda m: m.pop("files"))
    flip(path / "rank_00001.h5", find=dump.parameters[2].shards[1].tobytes())
    report = verify(path)
    assert kinds(report) == ["checksum", "replicas-differ", "ranks-disagree"]
    assert finding(report, "checksum")["parameter"] == "layers.1.weight"


def test_checksum_of_the_manifest(tool):
    path = base().write(tool.fresh("dump"))
    rewrite_manifest(path, lambda m: m.update(step=100.0), checksum=False)
    (path / "rank_00002.h5").unlink()
    report = verify(path)
    assert kinds(report) == ["missing", "checksum"] and "manifest.json, checksum" in report["findings"][1]["message"]


def test_damaged_chunk(tool):
    path = base().write(tool.fresh("dump"), compression="gzip", fletcher32=True, checksums=False)
    with h5py.File(path / "rank_00003.h5") as file:
        chunk = file["gradients/layers.0.weight"].id.get_chunk_info(0)
    flip(path / "rank_00003.h5", offset=chunk.byte_offset + chunk.size // 2)
    report = verify(path)
    found = finding(report, "unreadable")
    assert kinds(report) == ["unreadable"] and found["parameter"] == "layers.0.weight" and found["ranks"] == [3]


def test_unfinished_dumps(tool):
    path = base().write(tool.fresh("dump"))
    (path / "manifest.json").rename(path / "manifest.json.tmp")
    report = verify(path)
    assert kinds(report) == ["unfinished"] and "4 rank files" in report["findings"][0]["message"]
    assert report["checked"] == {"manifest": False, "complete": False, "files": 0, "shards": 0} and report["dump"]["step"] is None
    (path / "rank_00001.json").write_text("{}")
    assert "assemble" in finding(verify(path), "unfinished")["message"]
    assert "unfinished (1)" in text(path)


@pytest.mark.parametrize("left", [0, 100, 2000])
def test_truncated_file(tool, left):
    path = base().write(tool.fresh("dump"), checksums=False)
    os.truncate(path / "rank_00001.h5", left)
    report = verify(path)
    assert kinds(report) == ["unfinished" if left else "unreadable"]
    assert "lock" not in report["findings"][0]["message"].replace("sblock", "")
    assert report["findings"][0]["ranks"] == [1] and "rank_00001.h5" in report["findings"][0]["message"]
    assert report["checked"]["files"] == 3


def test_foreign_and_linked_files(tool):
    path = base().write(tool.fresh("dump"))
    elsewhere = tool.fresh("elsewhere")
    shutil.move(path / "rank_00001.h5", elsewhere)
    (path / "rank_00001.h5").symlink_to(elsewhere)
    shutil.copy(path / "rank_00000.h5", path / "rank_00003.h5")
    report = verify(path)
    assert [(f["kind"], f["ranks"]) for f in report["findings"]] == [
        ("unreadable", [1]), ("unreadable", [3]), ("checksum", [3])]
    assert "'rank' is 0" in report["findings"][1]["message"]


def test_nonfinite(tool):
    dump = base()
    dump.parameters[0].shards[2][1, 2] = np.nan
    report = verify(dump.write(tool.fresh("dump")))
    found = finding(report, "nonfinite")
    assert kinds(report) == ["nonfinite"] and found["ranks"] == [2] and found["index"] == [5, 2]


def test_copies_that_differ(tool):
    dump = base()
    copies = {rank: np.array([1, 2, 3, 4, 5], np.float32) for rank in range(4)}
    copies[1][3] = copies[3][3] = 6
    dump.plain("layers.2.bias", copies)
    found = finding(verify(dump.write(tool.fresh("dump"))), "replicas-differ")
    assert found["ranks"] == [0, 1, 3] and found["index"] == [3] and number(found["value"]) == 2
    assert "equal to one another: ranks 0, 2 | ranks 1, 3" in found["message"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("what", ["sum", "mean", "times", "zeros"])
def test_a_missing_all_reduce(tool, what, dtype):
    local = [numbers(10 + i, 3000) for i in range(3)]
    copies = {0: local[0], 1: local[1], 2: local[0] + local[1]}
    if what == "mean":
        copies[2] = copies[2] / 2
    if what == "times":
        copies = {0: local[0], 1: local[0], 2: 3 * local[0]}
    if what == "zeros":
        copies = {0: local[0], 1: local[0], 2: 0 * local[0]}
    dump = Dump(3)
    dump.plain("weight", copies, dtype=dtype)
    found = finding(verify(dump.write(tool.fresh("dump"))), "replicas-differ")
    words = {"sum": "rank 2 holds the sum of the other copies", "mean": "rank 2 holds the mean of the other copies",
             "times": "rank 2 holds 3 times what rank 0 holds", "zeros": "rank 2 holds nothing but zeros"}
    assert words[what] in found["message"]


def test_unrelated_copies_get_no_explanation(tool):
    dump = Dump(3)
    dump.plain("weight", {rank: numbers(rank, 300) for rank in range(3)})
    assert "holds" not in finding(verify(dump.write(tool.fresh("dump"))), "replicas-differ")["message"]


def test_a_none_copy(tool):
    dump = base()
    dump.parameters[1].shards[2] = None
    found = finding(verify(dump.write(tool.fresh("dump"))), "replicas-differ")
    assert found["ranks"] == [2] and found["value"] is None and "None" in found["message"]


@pytest.mark.parametrize("other", ["Partial()", "Shard(0)"])
def test_tied_weights_of_addends(tool, other):
    """Sums are compared: addends of one sum need not be those of the other."""
    whole = numbers(1, (8, 6))

    def tied(last):
        dump = Dump(4, max_grad_norm=1.0)
        dump.mesh("s0", ["dp"], [0, 1])
        dump.mesh("s1", ["dp"], [2, 3])
        part = numbers(2, (8, 6))
        dump.local("embed", whole.shape, "s0", ["Partial()"], {0: part, 1: whole - part}, tied="e")
        if other == "Shard(0)":
            dump.sharded("embed", last, "s1", ["Shard(0)"], tied="e")
        else:
            dump.local("embed", whole.shape, "s1", ["Partial()"], {2: last / 4, 3: 3 * last / 4}, tied="e")
        return dump.write(tool.fresh("dump"))
    # Nobody tells the reference that the two ends are a pipeline's, so its ranks disagree by a rounding.
    assert set(kinds(verify(tied(whole)))) <= {"ranks-disagree"}
    assert "tied-differ" in kinds(verify(tied(whole * np.float32(1.001))))


def test_tied_weights_that_differ(tool):
    dump = Dump(2)
    dump.plain("embed", numbers(1, (4, 2)), ranks=[0], tied="w")
    dump.plain("head", numbers(2, (4, 2)), ranks=[1], tied="w")
    report = verify(dump.write(tool.fresh("dump")))
    assert "tied-differ" in kinds(report) and finding(report, "tied-differ")["parameter"] == "head"


def test_ranks_that_disagree(tool):
    dump = Dump(2)
    dump.plain("expert", {0: numbers(1, 4), 1: numbers(2, 4)}, copies="distinct")
    report = verify(dump.write(tool.fresh("dump")))
    assert kinds(report) == ["ranks-disagree"] and report["findings"][0]["ranks"] == [0, 1]


def test_plain_tensors_without_copies(tool):
    dump = base()
    dump.plain("norm", numbers(7, 4), copies=None)
    report = verify(dump.write(tool.fresh("dump")))
    assert kinds(report) == ["undeclared-plain-tensor"] and report["findings"][0]["parameter"] == "norm"


def test_gradients_of_nothing_but_zeros(tool):
    dump = base()
    dump.sharded("frozen", np.zeros((4, 4), np.float32), "m", ["Shard(0)", "Shard(1)"])
    dump.local("cancelled", (2,), "m", ["Partial()", "Replicate()"],
               {r: np.float32([1, 2]) * (1 if r < 2 else -1) for r in range(4)})
    report = verify(dump.write(tool.fresh("dump")))
    assert [(f["kind"], f["parameter"], number(f["value"])) for f in report["findings"]
            if f["kind"] != "ranks-disagree"] == [("all-zero", "frozen", 16), ("all-zero", "cancelled", 2)]


def test_nothing_seen(tool):
    dump = Dump(2)
    dump.plain("weight", {0: None, 1: None}, shape=(2,))
    assert kinds(verify(dump.write(tool.fresh("dump")))) == ["nothing-seen"]


def test_missing_addend_of_a_maximum(tool):
    dump = base()
    dump.local("peak", (2,), "m", ["Partial(max)", "Replicate()"],
               {0: np.float32([1, 2]), 1: np.float32([1, 2]), 2: None, 3: None})
    report = verify(dump.write(tool.fresh("dump")))
    found = finding(report, "missing")
    assert found["parameter"] == "peak" and found["ranks"] == [2, 3]


# The manifest ------------------------------------------------------------------------------------------------------------

def test_every_problem_of_a_manifest(tool):
    path = base().write(tool.fresh("dump"))

    def spoil(manifest):
        manifest["parameters"][0]["placements"] = ["Shard(7)", "Shard(1)"]
        manifest["parameters"][1]["dtype"] = "float3"
        manifest["parameters"][2]["mesh"] = "nowhere"
        manifest["training"]["norm_type"] = "two"
    rewrite_manifest(path, spoil)
    report = verify(path)
    messages = "\n".join(f["message"] for f in report["findings"])
    assert set(kinds(report)) <= {"manifest", "placement"} and len(report["findings"]) == 4
    for word in ("parameters[0]", "parameters[1]", "nowhere", "norm_type"):
        assert word in messages


def test_a_bad_entry_hides_nothing_else(tool):
    """One wrong parameter, mesh and file entry: each is named once, and the files and values are checked without them."""
    dump = base()
    dump.mesh("other", ["dp"], [0, 1])
    dump.sharded("layers.2.weight", numbers(4, (4, 4)), "other", ["Shard(0)"])
    dump.plain("layers.2.bias", numbers(5, 4))
    dump.plain("layers.3.bias", np.zeros(3, np.float32))
    path = dump.write(tool.fresh("dump"))

    def spoil(manifest):
        by_name = {p["name"]: p for p in manifest["parameters"]}
        by_name["layers.0.weight"]["dtype"] = "float3"
        by_name["layers.2.bias"]["ranks"] = [0, 0]
        manifest["meshes"]["other"]["ranks"] = [0, 0]
        manifest["files"]["rank_00001.h5"]["xxh3_64"] = "no digits"
        manifest["producer"] = 7
    rewrite_manifest(path, spoil)
    with h5py.File(path / "rank_00003.h5", "r+") as file:
        del file["gradients/layers.1.weight"]
    (path / "rank_00002.h5").unlink()
    report = verify(path)
    manifest = [f["message"] for f in report["findings"] if f["kind"] == "manifest"]
    assert len(manifest) == 5, manifest
    for place in ("parameters[0]", "parameters[4]", "meshes.other", "files.rank_00001.h5", "producer"):
        assert any(place in message for message in manifest), place
    missing = [(f["parameter"], f["ranks"]) for f in report["findings"] if f["kind"] == "missing"]
    assert missing == [(None, [2]), ("layers.1.weight", [3])]
    assert set(kinds(report)) == {"manifest", "missing", "checksum"}  # what was left out is nowhere surplus
    assert report["checked"]["complete"] is False and report["checked"]["files"] == 3
    assert report["dump"]["parameters"] == 3  # layers.0.bias, layers.1.weight, layers.3.bias
    assert "were left out" in text(path)


def test_a_file_without_permission_is_one_fault_among_others(stranger):
    folder, how = stranger
    path = base().write(folder / "dump")
    (path / "rank_00001.h5").chmod(0)
    (path / "rank_00002.h5").unlink()
    result = run(2, "verify", path, "--format", "json", **how)
    assert result.code == 1, result
    report = result.json()
    assert finding(report, "unreadable")["ranks"] == [1] and finding(report, "missing")["ranks"] == [2]
    assert "Permission denied" in finding(report, "unreadable")["message"] and report["checked"]["files"] == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}', '{"format": "gradclip.dump", "version": 2}'])
def test_broken_manifest(tool, content):
    path = base().write(tool.fresh("dump"))
    (path / "manifest.json").write_text(content)
    assert kinds(verify(path)) == ["manifest"]


def test_training_numbers_that_cannot_be(tool):
    path = base(max_grad_norm=-1.0).write(tool.fresh("dump"))
    report = verify(path)
    assert kinds(report) == ["manifest"] and report["checked"]["files"] == 4


def test_no_dump_at_all(tool):
    empty = tool.fresh("empty")
    empty.mkdir()
    (empty / "notes.txt").write_text("x")
    for path in (empty, empty / "nowhere", empty / "notes.txt"):
        refused(1, 3, path, "verify", path)


# Several at once ---------------------------------------------------------------------------------------------------------

def test_several_faults_at_once(tool):
    """A file is gone, one is damaged, a dataset is missing, a NaN and copies that differ on the ranks that are left."""
    dump = Dump(6)
    dump.mesh("m", ["dp"], list(range(6)))
    dump.sharded("weight", numbers(1, (12, 2)), "m", ["Shard(0)"])
    dump.plain("bias", {r: numbers(2, 3) + (r == 4) for r in range(6)})
    dump.plain("scale", {r: numbers(3, 3) for r in range(6)})
    dump.parameters[0].shards[5][0, 1] = np.inf

    def edit(rank, file):
        if rank == 3:
            del file["gradients/scale"]
    path = dump.write(tool.fresh("dump"), edit_file=edit)
    (path / "rank_00001.h5").unlink()
    data = bytearray((path / "rank_00002.h5").read_bytes())
    data[:8] = b"damaged!"
    (path / "rank_00002.h5").write_bytes(data)
    report = verify(path, counts=(1, 2, 3, 8))
    assert [(f["kind"], f["parameter"], f["ranks"]) for f in report["findings"]] == [
        ("missing", None, [1]), ("missing", "scale", [3]), ("unreadable", None, [2]), ("checksum", None, [2]),
        ("nonfinite", "weight", [5]), ("replicas-differ", "bias", [0, 4])]
    assert report["findings"][4]["index"] == [10, 1]
    assert "equal to one another: ranks 0, 3, 5 | rank 4" in report["findings"][5]["message"]
    out = text(path, "--color", "never")
    headings = [line for line in out.splitlines() if line.endswith(")") and line.split(" (")[0] in set(kinds(report))]
    assert headings == ["missing (2)", "unreadable (1)", "checksum (1)", "nonfinite (1)", "replicas-differ (1)"]


def test_names_cannot_write_to_the_terminal(tool):
    dump = Dump(1)
    dump.plain("evil\x1b[31m", np.zeros(3, np.float32))

    def add(rank, file):
        file["gradients"].create_dataset("more\x1b[2J", data=np.zeros(2, np.float32))
    path = dump.write(tool.fresh("dump"), edit_file=add)
    out = text(path)
    assert "\x1b" not in out and "evil" in out and "more" in out


def test_report_files(tool):
    path = base().write(tool.fresh("dump"))
    (path / "rank_00002.h5").unlink()
    file, table = tool.fresh("report").with_suffix(".json"), tool.fresh("report").with_suffix(".csv")
    assert run(2, "verify", path, "--report", file, "--quiet").code == 1
    assert kinds(parse_report(file.read_text())) == ["missing"]
    assert run(1, "verify", path, "--report", table).code == 1
    assert table.read_text().splitlines()[0] == "kind,parameter,ranks,index,value,message"
    assert table.read_text().splitlines()[1].startswith("missing,,2,,,")


# --verify ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("np_", [1, 3])
def test_verify_before_clip_and_norms(tool, np_):
    dump = base()
    path = dump.write(tool.fresh("dump"))
    plain = tool.norms(path, np=np_)
    assert without_run(tool.norms(path, "--verify", np=np_)) == without_run(plain)
    tool.clip(path, "--verify", np=np_)
    flip(path / "rank_00003.h5", find=dump.parameters[0].shards[3].tobytes())
    refused(np_, 3, path, "--verify", out=tool.fresh("out"), mentions=["rank_00003.h5", "checksum"])
    refused(np_, 3, path, "norms", path, "--verify", mentions=["rank_00003.h5", "checksum"])
    bare = base().write(tool.fresh("bare"), checksums=False)
    refused(np_, 3, bare, "norms", bare, "--verify", mentions=["no checksum"])
