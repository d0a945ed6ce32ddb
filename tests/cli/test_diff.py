"""diff A B: two dumps in global coordinates, whatever their layouts. A numpy oracle judges random layouts of the same
global tensors; the fixtures are the cases that a training team brings."""

import json
import math

import numpy as np
import pytest

import element_types as types
from conftest import GOLDEN, LONG, finding, kinds, number, parameter, refused, run, without_run
from dump_builder import Dump
from test_random import draw_mesh, draw_placements

EPSILON = {"float64": 2.0 ** -52, "float32": 2.0 ** -23, "float16": 2.0 ** -10, "bfloat16": 2.0 ** -7,
           "float8_e4m3fn": 0.125, "float8_e5m2": 0.25}


def diff(a, b, *args, np=1, code=None, **how):
    result = run(np, "diff", a, b, "--format", "json", *args, **how)
    assert result.err == "", result
    report = result.json()
    expected = (1 if report["findings"] else 0) if code is None else code
    assert result.code == expected, result
    return report


def everywhere(a, b, *args, counts=(1, 2, 3), **how):
    """diff() on each process count: the same report, bit for bit."""
    first = None
    for np in counts:
        report = diff(a, b, *args, np=np, **how)
        first = first or report
        assert without_run(report) == without_run(first), f"{np} processes"
    return first


def one_rank(tool, tensors, name="dump", **how):
    """A dump of one rank: {name: array}."""
    dump = Dump(1)
    for parameter_name, values in tensors.items():
        dump.plain(parameter_name, values, **how)
    return dump.write(tool.fresh(name))


def model(random, count=4):
    return {f"layers.{i}.weight": random.standard_normal((8, 6)).astype(np.float32) for i in range(count)}


# ----------------------------------------------------------------------------------------------------------------------
# Fixtures
# ----------------------------------------------------------------------------------------------------------------------


def sharded(tool, tensors, world_size=2, experts=(), placements=("Shard(0)",), **training):
    dump = Dump(world_size, **training)
    dump.mesh("dp", ["dp_shard"], list(range(world_size)))
    for name, values in tensors.items():
        dump.sharded(name, values, "dp", list(placements), **({"expert": True} if name in experts else {}))
    return dump.write(tool.fresh("dump"))


def test_what_else_is_not_the_same_is_said_and_no_difference(tool):
    """State, step, ranks and training numbers: why gradients differ, often; no findings of their own."""
    values = {"w": np.arange(8, dtype=np.float32)}
    a = sharded(tool, values, num_label_tokens=100, max_grad_norm=1.0, grad_norm="nan")
    b = sharded(tool, values, world_size=4, num_label_tokens=200, max_grad_norm=1.0, grad_norm="nan",
                dp_group_size=4, pp_axis_name="stage")
    manifest = json.loads((b / "manifest.json").read_text())
    manifest.pop("checksum", None)
    (b / "manifest.json").write_text(json.dumps({**manifest, "state": "after_clip"}))
    state = manifest["state"]
    report = diff(a, b, code=0)
    assert report["notes"] == [{"what": "state", "a": state, "b": "after_clip"},
                               {"what": "world_size", "a": 2, "b": 4},
                               {"what": "pp_axis_name", "a": None, "b": "stage"},
                               {"what": "num_label_tokens", "a": 100, "b": 200},
                               {"what": "dp_group_size", "a": None, "b": 4}]
    text = run(1, "diff", a, b)
    assert text.code == 0 and f"A is {state}, B is after_clip" in text.out, text
    assert ("A / B: world_size 2 / 4, pp_axis_name not recorded / stage, num_label_tokens 100 / 200, "
            "dp_group_size not recorded / 4\n") in text.out
    assert diff(a, a, code=0)["notes"] == []


def test_a_zero_on_the_right_is_said_in_words(tool):
    a, b = np.float32([1, 2, 3, 0]), np.float32([1, 0, 3, 0])
    nothing = finding(diff(one_rank(tool, {"w": a}), one_rank(tool, {"w": 0 * a})), "differs")["message"]
    assert "by up to 3, relatively without bound: B is 0 everywhere" in nothing and "inf" not in nothing
    here = finding(diff(one_rank(tool, {"w": a}), one_rank(tool, {"w": b})), "differs")["message"]
    assert "by up to 2, relatively without bound: some are 0 in B" in here and "inf" not in here


def test_a_constant_ratio_is_one_finding(tool):
    tensors = model(np.random.default_rng(1))
    a = sharded(tool, tensors)
    b = sharded(tool, {name: 8 * values for name, values in tensors.items()}, world_size=8)
    report = everywhere(a, b, code=1)
    ratio = finding(report, "constant-ratio")
    assert kinds(report) == ["constant-ratio"]
    assert ratio["value"] == 8 and ratio["parameter"] is None
    assert "constant ratio 8" in ratio["message"] and "in all 4 parameters" in ratio["message"]
    assert "the number of ranks of B" in ratio["message"]
    assert [each["status"] for each in report["parameters"]] == ["differs"] * 4
    assert "constant ratio 8" in run(1, "diff", a, b).out


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor, text", [(2.0, "2"), (0.5, "1/2"), (1 / 52, "1/52"), (1 / 3, "1/3"), (-1.0, "-1")])
def test_ratios_survive_rounding(tool, dtype, factor, text):
    random = np.random.default_rng(2)
    values = types.narrow(random.standard_normal(4000) * 0.1, dtype)
    scaled = types.narrow(types.widen(values, dtype) * factor, dtype)
    a, b = (Dump(1) for _ in range(2))
    a.plain("w", values, dtype=dtype)
    b.plain("w", scaled, dtype=dtype)
    b.training["num_label_tokens"] = 52
    report = diff(a.write(tool.fresh("a")), b.write(tool.fresh("b")), code=1)
    ratio = finding(report, "constant-ratio")
    assert kinds(report) == ["constant-ratio"] and ratio["parameter"] == "w"
    assert f"constant ratio {text}:" in ratio["message"]
    if text == "1/52":
        assert "52 is the label tokens of B" in ratio["message"]


@pytest.mark.parametrize("dtype, other", [("float32", -1e-5), ("bfloat16", -1e-3), ("float32", 1e-40), ("float64", 1e-310)])
def test_what_a_ratio_does_not_explain_is_named(tool, dtype, other):
    """One small element of many that is another one, or that all but vanished: too little for the sums to tell."""
    random = np.random.default_rng(2)
    values = types.narrow(random.standard_normal((40, 100)), dtype)
    scaled = types.widen(values, dtype) * 8
    a_at, b_at = types.narrow(np.array([1e-5 if other < 0 else 1.0, other]), dtype)
    wide = types.widen(np.array([a_at, b_at], values.dtype), dtype)
    values[3, 5] = a_at
    scaled = types.narrow(scaled, dtype)
    scaled[3, 5] = b_at
    a, b = Dump(2), Dump(1)
    a.mesh("m", ["dp"], [0, 1])
    a.sharded("w", values, "m", ["Shard(0)"], dtype=dtype)
    b.plain("w", scaled, dtype=dtype)
    paths = a.write(tool.fresh("a")), b.write(tool.fresh("b"))
    ratio = finding(everywhere(*paths, code=1), "constant-ratio")
    expected = f"; 1 of 4000 elements does not follow it, the furthest [3, 5]: {wide[0]:.6g} in A, {wide[1]:.6g} in B"
    assert ratio["message"].startswith("constant ratio 8: ") and ratio["message"].endswith(expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"])
def test_unrelated_tensors_have_no_ratio(tool, dtype):
    """However coarse their type is."""
    random = np.random.default_rng(1)
    dumps = []
    for _ in range(2):
        dump = Dump(1)
        dump.plain("w", types.narrow(random.choice((-1, 1), 4096) * random.uniform(1, 4, 4096), dtype), dtype=dtype)
        dumps.append(dump.write(tool.fresh("dump")))
    assert kinds(diff(*dumps, code=1)) == ["differs"]


@pytest.mark.parametrize("dtype, ranks", [("float8_e4m3fn", 8), ("bfloat16", 128)])
def test_copies_that_were_averaged_of_nothing(tool, dtype, ranks):
    """Their mean is near 0, as that of any noise is."""
    random = np.random.default_rng(2)
    a, b = Dump(ranks, device_mesh="m"), Dump(1)
    a.mesh("m", ["dp"], list(range(ranks)))
    copies = {rank: types.narrow(random.standard_normal(1024), dtype) for rank in range(ranks)}
    a.local("w", (1024,), "m", ["Replicate()"], copies, dtype=dtype)
    b.plain("w", (0.4 * random.standard_normal(1024)).astype(np.float32))
    report = diff(a.write(tool.fresh("a"), checksums=False), b.write(tool.fresh("b")), code=1)
    assert "never" not in finding(report, "replicas-differ")["message"]


def test_experts_alone_twice_as_large(tool):
    tensors = model(np.random.default_rng(3))
    experts = {f"layers.{i}.mlp.experts.weight": np.full((4, 4), i + 1.5, np.float32) for i in range(3)}
    a = sharded(tool, {**tensors, **experts}, experts=experts)
    b = sharded(tool, {**tensors, **{name: 2 * values for name, values in experts.items()}}, experts=experts)
    report = everywhere(a, b, code=1)
    ratio = finding(report, "constant-ratio")
    assert kinds(report) == ["constant-ratio"] and ratio["value"] == 2
    assert "in all 3 expert parameters and no other" in ratio["message"]
    assert [each["status"] for each in report["parameters"]] == ["equal"] * 4 + ["differs"] * 3
    assert report["first_difference"]["name"] == "layers.0.mlp.experts.weight"


@pytest.mark.parametrize("operation, word", [(np.sum, "sum"), (np.mean, "mean")])
def test_copies_that_are_addends_in_truth(tool, operation, word):
    addends = np.array([[0.1200, 0.0400], [0.0197, -0.0077]], np.float32)
    a = Dump(2)
    a.mesh("tp", ["tp"], [0, 1])
    a.local("norm.weight", (2,), "tp", ["Replicate()"], {0: addends[0], 1: addends[1]})
    b = one_rank(tool, {"norm.weight": operation(addends, axis=0).astype(np.float32)})
    for first, second, here, there in ((a.write(tool.fresh("a")), b, "A", "B"), (b, a.write(tool.fresh("a")), "B", "A")):
        report = everywhere(first, second, code=1)
        copies = finding(report, "replicas-differ")
        assert copies["parameter"] == "norm.weight" and copies["ranks"] == [0, 1] and copies["index"] == [0]
        assert number(copies["value"]) == float(np.float64(addends[0, 0]) - np.float64(addends[1, 0]))
        assert f"in {here} copies that should be equal differ" in copies["message"]
        assert f"the {word} of the 2 copies is what {there} has" in copies["message"]


def test_copies_that_differ_are_a_finding_even_where_the_counted_ones_are_equal(tool):
    values = np.arange(6, dtype=np.float32)
    other = values.copy()
    other[4] = 7
    a = Dump(3)
    a.mesh("dp", ["dp_replicate"], [0, 1, 2])
    a.local("w", (6,), "dp", ["Replicate()"], {0: values, 1: other, 2: values})
    report = everywhere(a.write(tool.fresh("a")), one_rank(tool, {"w": values}), code=1)
    copies = finding(report, "replicas-differ")
    assert copies["ranks"] == [0, 1] and copies["index"] == [4] and copies["value"] == 3
    assert "the sum" not in copies["message"] and report["first_difference"] is None
    assert report["parameters"][0]["status"] == "equal"


def test_tiny_values_differ(tool):
    a, b = one_rank(tool, {"w": np.float32([1e-20])}), one_rank(tool, {"w": np.float32([2e-20])})
    report = diff(a, b, "--rtol", "1e-6", code=1)
    assert report["rule"] == {"rtol": 1e-6, "atol": 0, "ulp": None, "equal_nan": False}
    assert report["parameters"][0]["different"] == 1
    assert diff(a, b, "--rtol", "1e-6", "--atol", "1e-19", code=0)["parameters"][0]["status"] == "equal"


def test_256_parameters_that_differ_are_exit_1(tool):
    random = np.random.default_rng(4)
    a = {f"p{i}": random.standard_normal(3).astype(np.float32) for i in range(256)}
    b = {name: random.standard_normal(3).astype(np.float32) for name in a}
    report = diff(one_rank(tool, a), one_rank(tool, b), code=1)
    assert kinds(report) == ["differs"] * 256


@pytest.mark.parametrize("ranges", [True, False])
def test_strided_shards(tool, ranges):
    values = np.arange(5, dtype=np.float32) + 1
    held = {0: [0, 1, 3, 4], 1: [2]} if ranges else {0: [0, 1, 3], 1: [2, 4]}
    dump = Dump(2)
    dump.mesh("dp", ["dp_shard"], [0, 1])
    dump.local("w", (5,), "dp", ["_StridedShard(dim=0, sf=2)"], {rank: values[held[rank]] for rank in held})

    def record(rank, file):
        if ranges:
            runs = [[0, 0, 2], [0, 3, 5]] if rank == 0 else [[0, 2, 3]]
            file["gradients/w"].attrs["global_ranges"] = np.array(runs, "<i8")
    strided = dump.write(tool.fresh("strided"), edit_file=record)
    assert everywhere(strided, one_rank(tool, {"w": values}), code=0)["parameters"][0]["elements"] == 5
    wrong = values.copy()
    wrong[4] = 0
    report = everywhere(one_rank(tool, {"w": wrong}), strided, code=1)
    assert report["first_difference"] == {"name": "w", "status": "differs", "index": [4]}


def test_each_parameter_is_judged_by_itself(tool):
    a = {"large": np.float32([1e-30, 1.0]), "small": np.float32([1.0, 2.0])}
    b = {"large": np.float32([3e-30, 1.0]), "small": np.float32([1.0, 2.0 + 2.0 ** -20])}
    report = everywhere(one_rank(tool, a), one_rank(tool, b), code=1)
    assert [each["status"] for each in report["parameters"]] == ["differs", "differs"]
    large, small = report["parameters"]
    assert large["max_rel"]["value"] == pytest.approx(2 / 3) and small["max_abs"] == {"value": 2.0 ** -20, "index": [1]}
    assert {each["parameter"] for each in report["findings"]} == {"large", "small"}


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


def test_equal(tool):
    tensors = model(np.random.default_rng(5))
    a, b = sharded(tool, tensors, 3), sharded(tool, tensors, 2)
    report = everywhere(a, b, code=0)
    assert report["command"] == "diff" and report["first_difference"] is None and report["findings"] == []
    assert report["dump"]["world_size"] == 3 and report["other"]["world_size"] == 2
    for each in report["parameters"]:
        assert each["status"] == "equal" and each["relative_l2"] == 0 and each["cosine"] == 1 and each["norm_ratio"] == 1
        assert each["max_abs"] is None
    assert run(1, "diff", a, b).out.splitlines()[0] == "equal: 4 parameters"
    assert "same directory" in run(1, "diff", a, a).out


def test_nan_and_infinity(tool):
    inf, nan = np.inf, np.nan
    a, b = np.float32([nan, nan, 1, inf, -inf, inf, 0.0, 5]), np.float32([nan, 1, nan, inf, inf, 1, -0.0, 5])
    one, other = one_rank(tool, {"w": a}), one_rank(tool, {"w": b})
    each = diff(one, other, code=1)["parameters"][0]
    assert each["different"] == 5 and each["nan_different"] == 3
    assert each["max_abs"] == {"value": "nan", "index": [0]} and each["relative_l2"] == 0
    each = diff(one, other, "--equal-nan", code=1)["parameters"][0]
    assert each["different"] == 4 and each["nan_different"] == 2
    assert each["max_abs"] == {"value": "nan", "index": [1]} and each["first_different"] == [1]
    only_inf = diff(one_rank(tool, {"w": a[3:]}), one_rank(tool, {"w": b[3:]}), code=1)["parameters"][0]
    assert only_inf["max_abs"] == {"value": "inf", "index": [1]} and only_inf["different"] == 2


def test_none(tool):
    values = np.float32([1, 2, 3, 4])

    def dump(none):
        made = Dump(2)
        made.mesh("dp", ["dp_shard"], [0, 1])
        made.sharded("w", values, "dp", ["Shard(0)"], none=none)
        return made.write(tool.fresh("none"))
    assert everywhere(dump((0, 1)), dump((0, 1)), code=0)["parameters"][0]["status"] == "equal"
    each = everywhere(dump((1,)), dump(()), code=1)["parameters"][0]
    assert each["none_different"] == 2 and each["different"] == 2 and each["first_different"] == [2]
    report = everywhere(dump(()), dump((0, 1)), code=1)
    assert "None on one side" in finding(report, "differs")["message"]
    assert everywhere(dump((1,)), dump((1,)), code=0)["findings"] == []


def test_a_none_copy_is_made_up_for_by_the_next(tool):
    values = np.float32([1, 2, 3])
    a = Dump(2)
    a.mesh("dp", ["dp_replicate"], [0, 1])
    a.local("w", (3,), "dp", ["Replicate()"], {0: None, 1: values})
    report = everywhere(a.write(tool.fresh("a")), one_rank(tool, {"w": values}), code=1)
    assert kinds(report) == ["replicas-differ"] and report["parameters"][0]["status"] == "equal"
    assert "None in some copies" in finding(report, "replicas-differ")["message"]


def recorded_slices(tool, none=(), **more):
    """An uneven _StridedShard whose ranks recorded other slices than the placements give here."""
    dump = Dump(4)
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    whole = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    rows = {0: (0, 2), 1: (2, 3), 2: (3, 4), 3: (4, 5)}
    dump.local("w", (5, 2), "m", ["_StridedShard(0, sf=2)", "Shard(0)"],
               {rank: None if rank in none else whole[begin:end] for rank, (begin, end) in rows.items()})
    dump.more.update(more)

    def offset(rank, file):
        if rank not in none:
            file["gradients/w"].attrs["global_offset"] = np.array([rows[rank][0], 0], "<i8")
    return dump.write(tool.fresh("recorded"), checksums=False, edit_file=offset), whole


def test_none_among_recorded_slices_is_said(tool):
    path, whole = recorded_slices(tool)
    assert diff(path, one_rank(tool, {"w": whole}))["findings"] == []
    for none, named in (((1,), "rank 1"), ((0, 2), "ranks 0, 2")):
        path, _ = recorded_slices(tool, none)
        mentions = [f"'w': the gradient is None on {named}: no slice was recorded there", "record zeros there"]
        refused(1, 3, tool.fresh("out"), "diff", path, one_rank(tool, {"w": whole}), mentions=mentions)
        refused(2, 3, tool.fresh("out"), "merge", path, "-o", tool.fresh("out"), mentions=mentions)


def test_accumulate_says_what_to_do_with_recorded_slices(tool):
    paths = [recorded_slices(tool, microbatch={"index": index, "count": 2})[0] for index in range(2)]
    out = tool.fresh("out")
    refused(1, 3, out, "accumulate", *paths, "-o", out,
            mentions=["the slice that was recorded with it is not the one that its placements give", "gradclip merge"])
    merged = [tool.fresh("merged") for _ in paths]
    for path, one in zip(paths, merged):
        assert run(1, "merge", path, "-o", one).code == 0
    assert run(1, "accumulate", *merged, "-o", out).code == 0
    assert diff(out, one_rank(tool, {"w": 2 * recorded_slices(tool)[1]}))["findings"] == []


@pytest.mark.parametrize("operation, combine", [("sum", np.sum), ("avg", np.mean), ("max", np.max), ("min", np.min),
                                                ("product", np.prod)])
def test_partial_gradients_are_combined(tool, operation, combine):
    addends = np.random.default_rng(6).standard_normal((3, 5, 2)).astype(np.float32)
    a = Dump(3)
    a.mesh("tp", ["tp"], [2, 0, 1])
    a.local("w", (5, 2), "tp", [f"Partial({operation})"], {2: addends[0], 0: addends[1], 1: addends[2]})
    b = one_rank(tool, {"w": combine(addends.astype(np.float64), axis=0).astype(np.float32)})
    assert everywhere(a.write(tool.fresh("a")), b, code=0)["parameters"][0]["status"] == "equal"


def test_float8_with_its_scale(tool):
    stored = types.narrow(np.arange(1.0, 9.0), "float8_e4m3fn")
    a = Dump(2)
    a.mesh("dp", ["dp_shard"], [0, 1])
    a.sharded("w", stored, "dp", ["Shard(0)"], dtype="float8_e4m3fn", scale_inv={0: 0.5, 1: 0.25})
    values = np.float32([0.5, 1, 1.5, 2, 1.25, 1.5, 1.75, 2])
    path = a.write(tool.fresh("a"))
    assert everywhere(path, one_rank(tool, {"w": values}), "--rtol", "0", code=0)["parameters"][0]["elements"] == 8
    each = diff(path, one_rank(tool, {"w": values * np.float32(1.0625)}), code=0)["parameters"][0]
    assert each["rtol"] == 0.125 and each["dtype"] == "float8_e4m3fn" and each["dtype_in_other"] == "float32"


def test_the_rule_takes_the_epsilon_of_the_narrower_type(tool):
    values = np.random.default_rng(7).standard_normal(1000)
    wide = one_rank(tool, {"w": values.astype(np.float32)})
    narrow = one_rank(tool, {"w": types.narrow(values.astype(np.float32), "bfloat16")}, dtype="bfloat16")
    each = diff(wide, narrow, code=0)["parameters"][0]
    assert each["rtol"] == 2.0 ** -7 and each["status"] == "equal" and each["max_abs"]["value"] > 0
    assert diff(wide, narrow, "--rtol", "1e-3", code=1)["parameters"][0]["status"] == "differs"


def test_ulps(tool):
    values = np.float32([1.0, -1.0, 1e-45, 3.0, 0.0])
    apart = values.copy()
    apart[0] = np.nextafter(np.nextafter(values[0], np.float32(2)), np.float32(2))
    apart[2] = -1e-45
    a, b = one_rank(tool, {"w": values}), one_rank(tool, {"w": apart})
    assert diff(a, b, "--ulp", "2", code=0)["rule"]["ulp"] == 2
    assert diff(a, b, "--ulp", "1", code=1)["parameters"][0]["different"] == 2
    stronger = run(1, "diff", a, b, "--ulp", "2", "--format", "json", env={"GRADCLIP_RTOL": "1"})
    assert stronger.code == 0 and stronger.json()["rule"]["ulp"] == 2
    stronger = run(1, "diff", a, b, "--rtol", "4", "--format", "json", env={"GRADCLIP_ULP": "1"})
    assert stronger.code == 0 and stronger.json()["rule"]["rtol"] == 4 and stronger.json()["rule"]["ulp"] is None


def test_scalars_empty_and_uneven(tool):
    a, b = Dump(3), Dump(1)
    a.mesh("dp", ["dp_shard"], [0, 1, 2])
    tensors = {"scalar": np.float32(2.5), "empty": np.zeros((0, 3), np.float32), "two": np.float32([1, 2]),
               "five": np.arange(10, dtype=np.float32).reshape(5, 2)}
    for name, values in tensors.items():
        a.sharded(name, values, "dp", ["Shard(0)" if np.ndim(values) else "Replicate()"])
        b.plain(name, values)
    paths = a.write(tool.fresh("a")), b.write(tool.fresh("b"))
    assert [each["elements"] for each in everywhere(*paths, code=0)["parameters"]] == [1, 0, 2, 10]
    c = one_rank(tool, {**tensors, "scalar": np.float32(3)})
    report = everywhere(paths[0], c, code=1)
    assert report["parameters"][0]["max_abs"] == {"value": 0.5, "index": []}
    assert report["first_difference"]["index"] == []


def test_distinct_plain_tensors_meet_their_concatenation(tool):
    a, b = Dump(2), Dump(2)
    halves = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    a.plain("experts", {0: halves[0], 1: halves[1]}, copies="distinct")
    b.mesh("ep", ["ep"], [0, 1])
    whole = halves.reshape(6, 2).copy()
    b.sharded("experts", whole, "ep", ["Shard(1)"])
    path = a.write(tool.fresh("a"))
    assert everywhere(path, b.write(tool.fresh("b")), code=0)["parameters"][0]["shape"] == [6, 2]
    c = Dump(2)
    c.plain("experts", {0: halves[0], 1: -halves[1]}, copies="distinct")
    report = everywhere(path, c.write(tool.fresh("c")), code=1)
    assert report["parameters"][0]["shape"] == [2, 3, 2] and report["first_difference"]["index"] == [1, 0, 0]


def test_entries_of_one_name(tool):
    """A norm on two meshes is two entries, tied; the other layout has one."""
    values = np.float32([1, 2, 3, 4])
    a = Dump(4)
    a.mesh("left", ["dp"], [0, 1])
    a.mesh("right", ["dp"], [2, 3])
    a.sharded("norm", values, "left", ["Shard(0)"], tied="norm")
    a.sharded("norm", values + np.float32([0, 0, 0, 1]), "right", ["Shard(0)"], tied="norm")
    path, other = a.write(tool.fresh("a")), one_rank(tool, {"norm": values})
    for pair in ((path, other), (other, path)):
        report = everywhere(*pair, code=1)
        assert [each["status"] for each in report["parameters"]] == ["equal", "differs"]


def test_max_elements(tool):
    a = np.zeros(300, np.float32)
    b = a.copy()
    b[[7, 100, 200, 299]] = [1, -4, np.nan, 4]
    paths = one_rank(tool, {"w": a}), one_rank(tool, {"w": b})
    report = everywhere(*paths, "--max-elements", "3", code=1)
    assert report["parameters"][0]["worst"] == [{"index": [200], "a": 0, "b": "nan"}, {"index": [100], "a": 0, "b": -4},
                                                {"index": [299], "a": 0, "b": 4}]
    assert "[100]  a = 0, b = -4" in run(1, "diff", *paths, "--max-elements", "3").out
    assert diff(*paths, code=1)["parameters"][0]["worst"] == []


def test_a_large_parameter_in_blocks(tool):
    """More than one block of one parameter, cut in unlike ways, one element wrong at the end of a chunk."""
    shape = (700, 1000)
    values = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    wrong = values.copy().reshape(-1)
    wrong[[65535, 699999]] += 1
    a, b = Dump(4), Dump(3)
    a.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    a.sharded("w", values, "m", ["_StridedShard(dim=0, sf=2)", "Shard(0)"])
    b.mesh("tp", ["tp"], [0, 1, 2])
    b.sharded("w", wrong.reshape(shape), "tp", ["Shard(1)"])
    report = everywhere(a.write(tool.fresh("a")), b.write(tool.fresh("b")), code=1)
    each = report["parameters"][0]
    assert each["different"] == 2 and each["first_different"] == [65, 535]
    apart = np.abs(values.reshape(-1).astype(np.float64) - wrong)
    assert each["max_abs"]["value"] == apart.max()
    assert each["relative_l2"] == pytest.approx(math.sqrt((apart ** 2).sum() / (wrong.astype(np.float64) ** 2).sum()), rel=1e-13)


# ----------------------------------------------------------------------------------------------------------------------
# Names
# ----------------------------------------------------------------------------------------------------------------------


def test_missing_extra_and_shapes(tool):
    a = one_rank(tool, {"only.a": np.float32([1]), "same": np.float32([1]), "shape": np.zeros((2, 3), np.float32)})
    b = one_rank(tool, {"same": np.float32([1]), "shape": np.zeros((3, 2), np.float32), "only.b": np.float32([1])})
    report = everywhere(a, b, code=1)
    assert [(each["name"], each["status"]) for each in report["parameters"]] == [
        ("only.a", "missing"), ("same", "equal"), ("shape", "differs"), ("only.b", "extra")]
    assert kinds(report) == ["missing", "shape", "extra"]
    assert report["first_difference"] == {"name": "only.a", "status": "missing", "index": None}
    assert report["parameters"][0]["elements"] is None and report["parameters"][2]["max_abs"] is None
    text = run(1, "diff", a, b).out
    assert text.startswith("differs: 1 of 4 parameters, 1 missing, 1 extra, first in model order only.a\n")


def test_name_map_and_only(tool):
    values = np.float32([1, 2])
    a = one_rank(tool, {"module.layers.0.w": values, "module.layers.1.w": values})
    b = one_rank(tool, {"model.decoder.0.w": values, "model.decoder.1.w": 3 * values})
    names = tool.fresh("map")
    names.write_text("# NeMo to Megatron\n\n^module\\.layers\\.(\\d+) -> model.decoder.\\1\n")
    report = everywhere(a, b, "--map", names, code=1)
    assert [each["status"] for each in report["parameters"]] == ["equal", "differs"]
    assert report["parameters"][1]["name_in_other"] == "model.decoder.1.w"
    report = everywhere(a, b, "--map", names, "--only", r"layers\.0", code=0)
    assert [each["name"] for each in report["parameters"]] == ["module.layers.0.w"]
    refused(1, 2, a, "diff", a, b, "--only", "nothing like it", mentions=["--only", "matches no parameter"])
    assert kinds(diff(a, b, code=1)) == ["nothing-seen", "missing", "missing", "extra", "extra"]


def test_hostile_names_are_escaped(tool):
    name = "evil\x1b[31m\nname"
    a, b = one_rank(tool, {name: np.float32([1])}), one_rank(tool, {name: np.float32([2])})
    result = run(1, "diff", a, b, "--max-elements", "1")
    assert result.code == 1 and "\x1b" not in result.out and "evil\\x1b[31m\\x0aname" in result.out
    assert diff(a, b, code=1)["parameters"][0]["name"] == name
    report = tool.fresh("report").with_suffix(".csv")
    run(1, "diff", a, b, "--report", report)
    assert report.read_bytes().startswith(b"name,name_in_other,status,")


@pytest.mark.parametrize("arguments, words", [
    (["--rtol=-1"], ["--rtol", "'-1'"]),
    (["--rtol", "nan"], ["--rtol", "nan"]),
    (["--atol=-1e-9"], ["--atol"]),
    (["--atol", "nan"], ["--atol", "nan"]),
    (["--ulp=-1"], ["--ulp"]),
    (["--ulp", "1.5"], ["--ulp"]),
    (["--ulp", "1", "--rtol", "1e-6"], ["--rtol and --ulp", "both are given"]),
    (["--atol", "0", "--ulp", "0"], ["--atol and --ulp", "both are given"]),
    (["--max-elements", "100000"], ["--max-elements"]),
    (["--only", "a(b"], ["--only", "a(b"]),
    (["--map", "nowhere"], ["nowhere"]),
])
def test_usage(tool, arguments, words):
    dump = one_rank(tool, {"w": np.float32([1])})
    refused(1, 2, dump, "diff", dump, dump, *arguments, mentions=words)


@pytest.mark.parametrize("text, words", [
    ("no arrow", ["line 1", "no arrow"]), ("# fine\na(b -> c", ["line 2", "a(b"]), ("a -> \\7", ["line 1"]),
    ("-> x", ["line 1"]), ("(.*) -> same", ["'same'", "'v'", "'w'"])])
def test_bad_maps(tool, text, words):
    dump = one_rank(tool, {"w": np.float32([1]), "v": np.float32([1])})
    names = tool.fresh("map")
    names.write_text(text)
    refused(2, 2, dump, "diff", dump, dump, "--map", names, mentions=words)


def test_unknown_dumps_and_words(tool):
    dump = one_rank(tool, {"w": np.float32([1])})
    refused(1, 3, dump, "diff", dump, tool.folder / "nowhere", mentions=["nowhere"])
    refused(3, 3, dump, "diff", tool.folder / "nowhere", dump, mentions=["nowhere"])
    refused(1, 2, dump, "diff", dump, mentions=["second dump"])
    refused(1, 2, dump, "diff", mentions=["DUMP is missing"])
    refused(1, 2, dump, "diff", dump, dump, dump)
    refused(1, 2, dump, "diff", dump, dump, "--max-norm", "1")
    refused(1, 2, dump, "norms", dump, "--rtol", "1")
    refused(1, 2, dump, "diff", dump, dump, "--report", dump / "report.json", mentions=["inside"])


def test_ranges_that_leave_elements_out(tool):
    dump = Dump(2)
    dump.mesh("dp", ["dp_shard"], [0, 1])
    dump.local("w", (5,), "dp", ["_StridedShard(dim=0, sf=2)"], {0: np.zeros(4, np.float32), 1: np.zeros(1, np.float32)})

    def record(rank, file):
        runs = [[0, 0, 2], [0, 3, 5]] if rank == 0 else [[0, 1, 2]]
        file["gradients/w"].attrs["global_ranges"] = np.array(runs, "<i8")
    path = dump.write(tool.fresh("gap"), edit_file=record)
    refused(2, 3, path, "diff", path, one_rank(tool, {"w": np.zeros(5, np.float32)}), mentions=["'w'", "same elements"])


# ----------------------------------------------------------------------------------------------------------------------
# Random layouts of the same global tensors
# ----------------------------------------------------------------------------------------------------------------------


def random_layout(random, tensors, **how):
    dump = Dump(int(random.integers(1, 7)))
    meshes = [draw_mesh(random, dump) for _ in range(2)]
    for name, (values, dtype) in tensors.items():
        mesh = str(random.choice(meshes))
        placements = ["Replicate()" if placement.startswith("Partial") else placement
                      for placement in draw_placements(random, dump, mesh, values.ndim)]
        if random.random() < 0.2:
            dump.plain(name, values, dtype=dtype)
        else:
            dump.sharded(name, values, mesh, placements, dtype=dtype)
    return dump, how


@pytest.mark.parametrize("seed", range(60 if LONG else 12))
def test_random_layouts_against_numpy(tool, seed):
    random = np.random.default_rng(seed)
    a, b = {}, {}
    for i in range(int(random.integers(1, 7))):
        shape = tuple(int(n) for n in random.choice([1, 2, 3, 5, 8, 13, 40], random.integers(0, 4)))
        dtype = str(random.choice(types.ALL))
        values = types.narrow(np.abs(random.standard_normal(shape)) + 0.5, dtype)
        changed = np.where(random.random(shape) < 0.2, 1 + random.random(shape), 1.0)
        a[f"p{i}"] = values, dtype
        b[f"p{i}"] = types.narrow(types.widen(values, dtype) * changed, dtype), dtype
    paths = []
    for tensors in (a, b):
        dump, how = random_layout(random, tensors, **[{}, {"packed": True}, {"offsets": True}][random.integers(3)])
        paths.append(dump.write(tool.fresh("dump"), **how))
    report = everywhere(*paths, counts=(1, 2) if seed % 2 else (1, 3))
    for name, (values, dtype) in a.items():
        x, y = types.widen(values, dtype), types.widen(b[name][0], dtype)
        each, apart = parameter(report, name), np.abs(x - y)
        assert each["elements"] == x.size and each["different"] == np.sum(apart > EPSILON[dtype] * np.abs(y))
        if each["max_abs"] is None:
            assert not apart.any()
        else:
            at = np.unravel_index(np.argmax(apart), apart.shape) if apart.ndim else ()
            assert each["max_abs"] == {"value": apart.max(), "index": [int(n) for n in at]}
            assert each["max_rel"]["value"] == (apart / np.abs(y)).max()
        assert each["relative_l2"] == pytest.approx(math.sqrt(np.sum(apart ** 2) / np.sum(y ** 2)), rel=1e-12)
        cosine = np.sum(x * y) / math.sqrt(np.sum(x * x) * np.sum(y * y))
        assert each["cosine"] == pytest.approx(cosine, rel=1e-12)
        assert each["norm_ratio"] == pytest.approx(math.sqrt(np.sum(x * x) / np.sum(y * y)), rel=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Golden dumps of one model
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a, b", [("tp2", "single"), ("fsdp4", "hsdp"), ("fsdp_tp", "ddp"), ("fsdp_tp", "fsdp_tp_plain"),
                                  ("tp2", "tp2_sequence")])
def test_golden_layouts_of_one_batch(a, b):
    """Layouts add up in unlike orders: more than an epsilon of an element, and no more than a few of a parameter."""
    paths = GOLDEN / a / "dump", GOLDEN / b / "dump"
    assert diff(*paths)["findings"] != []
    report = everywhere(*paths, "--rtol", "1e-4", "--atol", "1e-6", code=0)
    assert all(each["status"] == "equal" and each["relative_l2"] < 2e-6 for each in report["parameters"])


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir()))
def test_golden_dumps_against_themselves(case):
    path = GOLDEN / case / "dump"
    report = diff(path, path)
    assert all(each["status"] == "equal" for each in report["parameters"])
    assert kinds(report) == [] or kinds(report)[0] == "replicas-differ"
