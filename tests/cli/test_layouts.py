"""Which elements count: replicas, Partial addends, None, tied and plain tensors, Flat, strided shards; and storage layouts."""

import math

import h5py
import numpy as np
import pytest

import element_types as types
import oracle
from conftest import assert_shards, close, finding, kinds, number, parameter, refused, run
from dump_builder import Dump


def numbers(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def check(tool, dump, *args, counts=(1, 3), p=2.0, expect=None, **write):
    """clip on several process counts against the oracle; returns the report."""
    path = dump.write(tool.fresh("dump"), **write)
    report, shards, out = tool.everywhere(path, *args, counts=counts)
    expected = expect or oracle.Expectation(dump)
    assert close(report["norm"]["total"], expected.total(p))
    coefficient = oracle.coefficient_of(number(report["norm"]["total"]), dump.training.get("max_grad_norm"))
    assert report["clip"]["coefficient"] == coefficient
    assert_shards(shards, expected.shards(coefficient))
    assert close(report["clip"]["total_after"], expected.total(p, coefficient))
    for entry, values in expected.counted():
        found = next(e for e in report["parameters"] if e["name"] == entry.name and e["counted"])
        assert close(found["norm"], oracle.norm(values, p)), entry.name
        assert found["elements"] == sum(v.size for v in values), entry.name
    return report


# Placements --------------------------------------------------------------------------------------------------------------

def test_every_spelling_of_the_placements(tool):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("m", ["a", "b"], [[0, 1], [2, 3]])
    spellings = {
        "_StridedShard(dim=0, sf=2)": ["_StridedShard(0, split_factor=2)", "_S(0, 2)"], "Shard(0)": ["Shard(dim=0)", "S(0)"],
        "Replicate()": ["R"], "Partial()": ["P", "P(sum)", "Partial(sum)"], "Partial(avg)": ["P(avg)"]}
    for i, (first, others) in enumerate(spellings.items()):
        for j, spelling in enumerate([first, *others]):
            if first.startswith("P"):
                dump.local(f"p{i}.{j}", (6, 2), "m", [spelling, "R"],
                           {r: numbers(r // 2 + 10 * i, (6, 2)) for r in range(4)})
            else:
                dump.sharded(f"p{i}.{j}", numbers(i, (6, 2)), "m", [spelling, "S(0)"])
    report = check(tool, dump)
    for i, (first, others) in enumerate(spellings.items()):
        norms = [parameter(report, f"p{i}.{j}")["norm"] for j in range(len(others) + 1)]
        assert len(set(norms)) == 1, first
    printed = {entry["placements"][0].replace("Partial(sum)", "Partial()") for entry in report["parameters"]}
    assert printed == {"_StridedShard(dim=0, sf=2)", "Shard(0)", "Replicate()", "Partial()", "Partial(avg)"}


@pytest.mark.parametrize("offsets", [False, True])
def test_uneven_slices_of_all_kinds(tool, offsets):
    dump = Dump(6, max_grad_norm=1.0)
    dump.mesh("m", ["a", "b"], [[5, 1, 3], [2, 0, 4]])  # ranks in no order
    dump.mesh("one", ["a"], [3, 0, 2])
    shapes = [(7, 5), (1, 1), (13,), (2, 3, 4), (0, 4), (6,)]
    for i, shape in enumerate(shapes):
        last = len(shape) - 1
        for j, placements in enumerate([["Shard(0)", "Shard(0)"], ["Shard(0)", f"Shard({last})"],
                                        ["_StridedShard(dim=0, sf=3)", "Shard(0)"], ["Replicate()", f"Shard({last})"],
                                        [f"Shard({last})", "Replicate()"]]):
            dump.sharded(f"p{i}.{j}", numbers(10 * i + j, shape), "m", placements)
        dump.sharded(f"index-list.{i}", numbers(100 + i, shape), "one", ["_StridedShard(dim=0, sf=2)"])
    report = check(tool, dump, offsets=offsets, counts=(1, 4))
    assert set(kinds(report)) <= {"ranks-disagree"}  # the second mesh has only some of the ranks


def test_first_nonfinite_in_global_coordinates(tool):
    """Row-major first in the whole tensor, whichever rank and wherever in its shard."""
    dump = Dump(6)
    dump.mesh("m", ["a", "b"], [[5, 1, 3], [2, 0, 4]])
    dump.mesh("one", ["a"], [3, 0, 2])
    places = {"strided": ["_StridedShard(dim=0, sf=3)", "Shard(0)"], "columns": ["Shard(1)", "Shard(0)"]}
    for name, placements in places.items():
        whole = numbers(1, (12, 6))
        whole[7, 5], whole[7, 2], whole[11, 0] = np.nan, np.inf, np.nan
        dump.sharded(name, whole, "m", placements)
    whole = numbers(2, (9, 2))
    whole[5, 1] = whole[8, 0] = np.nan
    dump.sharded("index-list", whole, "one", ["_StridedShard(dim=0, sf=2)"])
    dump.plain("scalar", np.float32(np.nan), ranks=[4])
    report = tool.norms(dump.write(tool.fresh("dump")), np=3)
    expected = {"strided": [7, 2], "columns": [7, 2], "index-list": [5, 1], "scalar": []}
    for name, index in expected.items():
        assert parameter(report, name)["first_nonfinite"]["index"] == index, name
    assert parameter(report, "scalar")["first_nonfinite"]["rank"] == 4
    assert parameter(report, "index-list")["first_nonfinite"]["rank"] == 3  # indices 0, 1, 5 of 9


def test_flat_shards_of_the_distributed_optimizer(tool):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("m", ["tp", "dp"], [[0, 1], [2, 3]])
    dump.mesh("dp", ["dp"], [0, 1, 2])
    whole = numbers(1, (4, 5))
    dump.sharded("weight", whole, "m", ["Shard(1)", "Flat()"],
                 flat_ranges={0: (0, 7), 1: (7, 12), 2: (0, 0), 3: (0, 8)})  # 3 columns and 2
    whole = numbers(2, (3, 3))
    whole[2, 1] = np.inf
    dump.sharded("bias", whole, "dp", ["Flat()"], flat_ranges={0: (0, 4), 1: (4, 4), 2: (4, 9)})
    report = check(tool, dump)
    assert parameter(report, "bias")["first_nonfinite"] == {"index": [2, 1], "rank": 2}


def test_a_piece_of_a_flattened_scalar_has_a_dimension(tool):
    """So that its clipping product is formed in float32, as of any piece; found by the soak."""
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1])
    for i, value in enumerate(numbers(4, 50)):
        dump.sharded(f"scale{i}", np.float32(value), "dp", ["Flat()"], flat_ranges={0: (0, 1), 1: (1, 1)})
        dump.sharded(f"whole{i}", np.float32(value), "dp", ["Replicate()"])
    check(tool, dump, counts=(1,))


def test_gradient_placements_differ_from_the_parameter_s(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.local("norm", [3], "tp", ["Replicate()"], {0: numbers(1, 3), 1: numbers(2, 3)}, gradient_placements=["Partial()"])
    dump.sharded("embed", numbers(3, (4, 2)), "tp", ["Shard(0)"], gradient_placements=["Replicate()"])
    report = check(tool, dump)
    assert parameter(report, "norm")["placements"] == ["Replicate()"]
    # The reference groups by the parameter's placements: what it sums is not what there is, and its ranks disagree.
    assert [t["ranks"] for t in report["reference"]["totals"]] == [[0], [1]]
    embed = 2 * oracle.norm([dump.parameters[1].shards[0]]) ** 2
    for rank in (0, 1):
        seen = math.sqrt(embed + oracle.norm([dump.parameters[0].shards[rank]]) ** 2)
        assert close(report["reference"]["totals"][rank]["total"], seen)


# Replicate -----------------------------------------------------------------------------------------------------------------

def hsdp(change=None, none=()):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("hsdp", ["dp_replicate", "dp_shard"], [[0, 1], [2, 3]])
    dump.sharded("same", numbers(1, (4, 3)), "hsdp", ["Replicate()", "Shard(0)"])
    weight = dump.sharded("weight", numbers(2, (4, 3)), "hsdp", ["Replicate()", "Shard(0)"], none=none)
    weight.shards = {r: None if s is None else s.copy() for r, s in weight.shards.items()}
    if change:
        change(weight.shards)
    return dump


def test_copies_count_once(tool):
    assert kinds(check(tool, hsdp(), counts=(1, 2, 4))) == []


def test_a_copy_that_differs_is_found_not_averaged(tool):
    def change(shards):
        shards[3][1, 2] += np.float32(0.25)
        shards[3][1, 0] -= np.float32(0.5)
    dump = hsdp(change)
    report = check(tool, dump, counts=(1, 2, 4))
    found = finding(report, "replicas-differ")
    assert found["parameter"] == "weight" and found["ranks"] == [1, 3] and found["index"] == [3, 0]
    shards = dump.parameters[1].shards
    assert found["value"] == np.abs(types.widen(shards[3], "float32") - types.widen(shards[1], "float32")).max()
    path = dump.write(tool.fresh("dump"))
    assert run(1, "norms", path, "--strict").code == 1 and run(4, "norms", path).code == 0
    tool.clip(path, "--strict", code=1)


def test_nan_beside_a_number(tool):
    def change(shards):
        shards[2][0, 1] = np.nan
    report = tool.norms(hsdp(change).write(tool.fresh("dump")), np=2)
    found = finding(report, "replicas-differ")
    assert found["value"] == "nan" and found["index"] == [0, 1] and found["ranks"] == [0, 2]
    assert math.isfinite(number(report["norm"]["total"])), "the copy at coordinate 0 counts"


def test_equal_by_value(tool):
    """±0 are equal, and NaN to NaN whatever the payload."""
    def change(shards):
        for rank, zero, nan in ((0, 0.0, 0x7FC00001), (2, -0.0, 0xFFC00000)):
            shards[rank][0, 0] = zero
            shards[rank].view("u4")[0, 1] = nan
    report = tool.norms(hsdp(change).write(tool.fresh("dump")), np=2)
    assert kinds(report) == ["nonfinite"]


@pytest.mark.parametrize("packed", [False, True])
def test_copies_that_are_none(tool, packed):
    """Coordinate 0's gradient is None and the other's is not: a finding, and the other counts."""
    dump = hsdp(none=[0, 1])
    report = check(tool, dump, counts=(1, 4), packed=packed)
    assert any(f["parameter"] == "weight" for f in report["findings"])
    assert close(parameter(report, "weight")["norm"], oracle.norm([numbers(2, (4, 3))]))
    report = check(tool, hsdp(none=[2, 3]), packed=packed)
    assert any(f["parameter"] == "weight" for f in report["findings"])
    assert kinds(check(tool, hsdp(none=[0, 1, 2, 3]), packed=packed)) == []


def test_plain_copies_differ(tool):
    dump = Dump(3, max_grad_norm=1.0)
    values = {rank: numbers(1, (2, 2)).copy() for rank in range(3)}
    values[2][1, 1] = 7
    dump.plain("weight", values)
    report = check(tool, dump)
    found = finding(report, "replicas-differ")
    assert found["index"] == [1, 1] and 2 in found["ranks"]
    assert found["value"] == abs(7 - float(values[0][1, 1]))


def test_large_copies_differ_beyond_the_first_chunks(tool):
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    whole = numbers(5, (300, 1000))
    other = whole.copy()
    other[123, 456], other[299, 999] = whole[123, 456] + 1, whole[299, 999] - 3
    dump.local("weight", whole.shape, "dp", ["Replicate()"], {0: whole, 1: other})
    path = dump.write(tool.fresh("dump"))
    findings = [finding(tool.norms(path, *more, np=np), "replicas-differ")
                for np, more in ((1, []), (2, []), (1, ["--memory-budget", "1M"]))]
    assert findings[0]["index"] == [123, 456] and findings[0] == findings[1] == findings[2]
    assert close(findings[0]["value"], float(np.float64(whole[299, 999]) - np.float64(other[299, 999])))


# Partial -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("operation, combine", [
    ("sum", np.add), ("avg", lambda a, b: (a + b) / 2), ("max", np.maximum), ("min", np.minimum)])
def test_partial_operations(tool, operation, combine):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [1, 0])
    a, b = numbers(1, (50, 7)), numbers(2, (50, 7))
    dump.local("weight", a.shape, "tp", [f"Partial({operation})"], {0: a, 1: b})
    report = check(tool, dump, counts=(1, 2))
    assert close(report["norm"]["total"], oracle.norm([combine(a.astype(np.float64), b.astype(np.float64))]))


def test_partial_beside_shard_and_replicate(tool):
    """Addends of a slice on four ranks of a 2 × 2 × 2 mesh, large enough for several chunks, in float64."""
    dump = Dump(8, max_grad_norm=1.0)
    dump.mesh("m", ["r", "p", "s"], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    dump.mesh("pp", ["p", "q"], [[0, 2], [4, 6]])
    locals_ = {r: numbers(r % 4, (70_000,)) * np.float32(10.0) ** (r % 4) for r in range(8)}
    dump.local("weight", [140_000], "m", ["Replicate()", "Partial()", "Shard(0)"], locals_)
    dump.local("twice", [3], "pp", ["Partial(sum)", "Partial(sum)"], {r: numbers(50 + r, 3) for r in (0, 2, 4, 6)})
    dump.local("half", [9], "pp", ["Partial(avg)", "Replicate()"],
               {r: types.narrow(numbers(60 + r // 4, 9), "bfloat16") for r in (0, 2, 4, 6)}, dtype="bfloat16")
    report = check(tool, dump, counts=(1, 3))
    assert kinds(report) == ["ranks-disagree"]  # the second mesh has only some of the ranks
    assert parameter(report, "weight")["elements"] == 140_000


def test_partial_addends_that_cancel_or_overflow(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.local("cancel", [2], "tp", ["Partial()"], {0: np.float32([5, 1]), 1: np.float32([-5, 2])})
    dump.local("large", [2], "tp", ["Partial()"], {r: np.float32([3e38, 0]) for r in (0, 1)})  # beyond float32
    dump.local("small", [1], "tp", ["Partial()"], {r: types.narrow([1e-40], "bfloat16") for r in (0, 1)}, dtype="bfloat16")
    report = check(tool, dump, counts=(1, 2))
    assert parameter(report, "cancel")["norm"] == 3.0 and parameter(report, "cancel")["zeros"] == 1
    assert math.isfinite(report["norm"]["total"])


def test_partial_of_opposite_infinities_is_nan(tool):
    dump = Dump(2)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.local("weight", [2], "tp", ["Partial()"], {0: np.float32([1, np.inf]), 1: np.float32([1, -np.inf])})
    report = tool.norms(dump.write(tool.fresh("dump")), np=2)
    assert report["norm"]["total"] == "nan" and report["norm"]["nan"] == 1
    assert parameter(report, "weight")["first_nonfinite"]["index"] == [1]


def test_addends_that_are_none(tool):
    dump = Dump(3, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1, 2])
    dump.local("sum", [2], "tp", ["Partial(sum)"], {0: np.float32([1, 3]), 1: None, 2: np.float32([2, 1])})
    dump.local("avg", [2], "tp", ["Partial(avg)"], {0: None, 1: np.float32([9, 12]), 2: None})
    dump.local("none", [2], "tp", ["Partial(avg)"], dict.fromkeys(range(3)))
    report = check(tool, dump, counts=(1, 2))
    assert parameter(report, "avg")["norm"] == 5.0 and parameter(report, "none")["norm"] == 0.0
    for operation in ("max", "min"):
        dump = Dump(2, max_grad_norm=1.0)
        dump.mesh("tp", ["tp"], [0, 1])
        dump.local("weight", [2], "tp", [f"Partial({operation})"], {0: np.float32([1, 3]), 1: None})
        path = dump.write(tool.fresh("dump"))
        for np_ in (1, 2):
            refused(np_, 3, path, out=tool.fresh("out"), mentions=["weight", "1"])


def test_partial_product_is_not_scaled_or_clipped(tool):
    dump = Dump(2)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.local("weight", [2], "tp", ["Partial(product)"], {0: np.float32([1, 2]), 1: np.float32([3, 2])})
    path = dump.write(tool.fresh("dump"))
    refused(1, 3, path, "--max-norm", "1", out=tool.fresh("out"), mentions=["weight", "product"])
    assert tool.norms(path)["norm"]["total"] == 5.0


def test_copies_of_partial_sums_are_compared(tool):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("m", ["r", "p"], [[0, 1], [2, 3]])
    dump.local("weight", [2], "m", ["Replicate()", "Partial()"],
               {0: np.float32([1, 3]), 1: np.float32([2, 1]), 2: np.float32([1, 3]), 3: np.float32([2, 2])})
    report = check(tool, dump, counts=(1, 4))
    assert report["norm"]["total"] == 5.0 and finding(report, "replicas-differ")["parameter"] == "weight"


# Plain and tied ------------------------------------------------------------------------------------------------------------

def test_undeclared_plain_tensors(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.plain("norm.weight", np.float32([3, 4]), copies=None)
    dump.plain("model.layers.3.mlp.experts.gate_up_linear.weight12", {0: np.float32([5]), 1: np.float32([7])}, copies=None)
    dump.plain("special", {0: np.float32([1]), 1: np.float32([2])}, copies=None, expert=True)
    report = check(tool, dump)
    found = [f for f in report["findings"] if f["kind"] == "undeclared-plain-tensor"]
    assert {f["parameter"] for f in found} >= {"norm.weight"} or len(found) == 1, report["findings"]
    assert close(report["norm"]["total"], math.sqrt(25 + 25 + 49 + 1 + 4))


def test_tied_weights(tool):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("first", ["dp"], [0, 1])
    dump.mesh("last", ["dp"], [2, 3])
    whole = numbers(1, (5, 3))
    dump.sharded("embed", whole, "first", ["Shard(0)"], tied="e")
    dump.sharded("head", whole, "last", ["Shard(0)"], tied="e", model_part=1)
    report = check(tool, dump)
    assert kinds(report) == [] and [p["counted"] for p in report["parameters"]] == [True, False]
    dump.parameters[1].shards[3] = dump.parameters[1].shards[3] + np.float32(1)
    report = check(tool, dump)
    found = finding(report, "tied-differ")
    assert 3 in found["ranks"] and found["index"] == [3, 0]


def test_same_name_on_disjoint_ranks_and_twice_on_one(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.plain("weight", np.float32([1]), ranks=[0])
    dump.plain("weight", np.float32([2]), ranks=[1])
    dump.plain("lm_head", np.float32([3]), ranks=[0])
    dump.plain("lm_head", np.float32([4]), ranks=[0], dataset="lm_head%401", model_part=1)
    path = dump.write(tool.fresh("dump"))
    report, _, out = tool.everywhere(path, counts=(1, 2))
    assert close(report["norm"]["total"], math.sqrt(1 + 4 + 9 + 16))
    with h5py.File(out / "rank_00000.h5") as file:
        assert sorted(file["gradients"]) == ["lm_head", "lm_head%401", "weight"]


def test_pipeline_stages_and_groups_in_the_report(tool):
    dump = Dump(4, max_grad_norm=1.0, device_mesh="world", pp_enabled=True)
    dump.mesh("world", ["pp", "dp"], [[0, 1], [2, 3]])
    dump.mesh("stage0", ["dp"], [0, 1])
    dump.mesh("stage1", ["dp"], [2, 3])
    dump.sharded("a", np.full(4, 3, np.float32), "stage0", ["Shard(0)"])
    dump.sharded("b", np.full(4, 4, np.float32), "stage1", ["Shard(0)"])
    dump.sharded("c", np.full(4, 1, np.float32), "stage1", ["Replicate()"])
    report = check(tool, dump)
    assert [(s["stage"], s["parameters"]) for s in report["stages"]] == [(0, 1), (1, 2)]
    assert [close(s["norm"], n) for s, n in zip(report["stages"], (6, math.sqrt(68)))] == [True, True]
    assert [(g["mesh"], g["placements"]) for g in report["groups"]] == [
        ("stage0", ["Shard(0)"]), ("stage1", ["Shard(0)"]), ("stage1", ["Replicate()"])]
    # With pp every rank combines the stages: one total, the right one.
    assert len(report["reference"]["totals"]) == 1 and close(report["reference"]["totals"][0]["total"], math.sqrt(104))
    apart = tool.norms(dump.write(tool.fresh("dump")), "--no-pp")
    assert [t["ranks"] for t in apart["reference"]["totals"]] == [[0, 1], [2, 3]]
    assert finding(apart, "ranks-disagree")


# Nothing ---------------------------------------------------------------------------------------------------------------------

def test_an_empty_dump(tool):
    for world_size, np in ((1, 1), (2, 3)):
        report, _, _ = tool.clip(Dump(world_size, max_grad_norm=1.0).write(tool.fresh("dump")), np=np)
        assert report["norm"]["total"] == 0 and report["norm"]["elements"] == 0 and kinds(report) == ["nothing-seen"]
        assert report["parameters"] == []


def test_only_none_and_empty(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("none", np.ones((3, 2), np.float32), "dp", ["Shard(0)"], none=[0, 1])
    dump.sharded("empty", np.ones((0, 2), np.float32), "dp", ["Shard(0)"])
    report = check(tool, dump)
    assert report["norm"]["total"] == 0 and "nothing-seen" in kinds(report)
    assert report["clip"]["coefficient"] == 1.0


# Storage ---------------------------------------------------------------------------------------------------------------------

def storage_dump(seed=1):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1])
    for i, dtype in enumerate(types.ALL):
        dump.sharded(f"layers.{i}/odd%.name", types.narrow(numbers(seed + i, (37, 11)), dtype), "dp", ["Shard(0)"],
                     dtype=dtype)
    dump.plain(".leading", np.float32(2.5))
    dump.sharded("large", numbers(9, (70_000,)), "dp", ["Shard(0)"])
    dump.sharded("gone", np.zeros(3, np.float32), "dp", ["Shard(0)"], none=[1])
    return dump


def test_packed_layout_is_read_and_kept(tool):
    dump = storage_dump()
    plain_report = check(tool, dump, counts=(1,))
    path = dump.write(tool.fresh("dump"), packed=True)
    report, shards, out = tool.everywhere(path, counts=(1, 3))
    assert report["norm"] == plain_report["norm"] and report["parameters"] == plain_report["parameters"]
    assert_shards(shards, oracle.Expectation(dump).shards(report["clip"]["coefficient"]))
    with h5py.File(path / "rank_00000.h5") as before, h5py.File(out / "rank_00000.h5") as after:
        assert "gradients" not in after and sorted(after["packed"]) == sorted(before["packed"])
        for name in types.ALL:
            assert after[f"packed/{name}"].shape == before[f"packed/{name}"].shape
            assert after[f"packed/{name}"].dtype == before[f"packed/{name}"].dtype


@pytest.mark.parametrize("storage", [
    {"compression": "gzip", "chunks": True}, {"compression": "gzip", "shuffle": True, "fletcher32": True, "chunks": True},
    {"chunks": True}, {"fletcher32": True, "chunks": True}], ids=lambda s: "+".join(s))
def test_filtered_datasets_are_read_and_kept(tool, storage):
    dump = storage_dump(3)
    path = dump.write(tool.fresh("dump"), **storage)
    report, shards, out = tool.everywhere(path, counts=(1, 2) if len(storage) > 2 else (1,))
    expected = oracle.Expectation(dump)
    assert close(report["norm"]["total"], expected.total())
    assert_shards(shards, expected.shards(report["clip"]["coefficient"]))
    with h5py.File(path / "rank_00001.h5") as before, h5py.File(out / "rank_00001.h5") as after:
        for a, b in zip(before["gradients"].values(), after["gradients"].values()):
            assert a.name == b.name and a.chunks == b.chunks and a.compression == b.compression
            assert a.shuffle == b.shuffle and a.fletcher32 == b.fletcher32


def test_packed_and_compressed(tool):
    dump = storage_dump(5)
    path = dump.write(tool.fresh("dump"), packed=True, compression="gzip", chunks=True)
    report, shards, _ = tool.clip(path)
    assert_shards(shards, oracle.Expectation(dump).shards(report["clip"]["coefficient"]))


def test_without_checksums_or_attributes_that_a_reader_does_not_need(tool):
    dump = storage_dump(7)

    def edit_file(rank, file):
        for dataset in file["gradients"].values():
            if dataset.dtype.kind == "f":
                del dataset.attrs["dtype"]
    path = dump.write(tool.fresh("dump"), checksums=False, edit_file=edit_file)
    report, shards, _ = tool.clip(path)
    assert_shards(shards, oracle.Expectation(dump).shards(report["clip"]["coefficient"]))


def test_big_endian_and_integer_types_are_refused_by_name(tool):
    for kind in (">f4", "<i4"):
        dump = Dump(1, max_grad_norm=1.0)
        dump.plain("weight", np.float32([1, 2]))

        def edit_file(rank, file, kind=kind):
            del file["gradients/weight"]
            file["gradients"].create_dataset("weight", data=np.array([1, 2], kind))
        refused(1, 3, dump.write(tool.fresh("dump"), edit_file=edit_file), out=tool.fresh("out"), mentions=["weight"])
