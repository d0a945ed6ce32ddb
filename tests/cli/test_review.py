"""What a review found, each with the rest of its kind: powers that underflow, copies and addends that are None, outputs
that are in the way of the input, names that no file system takes, copies of different shapes, memory of many addends."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

import oracle
from conftest import LONG, assert_shards, close, finding, kinds, number, parameter, refused, run, tree
from dump_builder import Dump


# A large p is no zero ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("p", [600, 1000])
@pytest.mark.parametrize("value", [0.6, 1.9, 0.6e-30, 0.6e30])
def test_a_large_norm_type_does_not_underflow(tool, value, p, dtype):
    """0.6e-30^600 is below float64; the norm is not."""
    dump = Dump(1, max_grad_norm=value / 2, norm_type=float(p))
    dump.plain("weight", np.full(8, value, dtype))
    dump.plain("smaller", np.full(8, value / 4, dtype))
    report, _, _ = tool.clip(dump.write(tool.fresh("dump")))
    expected = value * 8 ** (1 / p)
    assert close(report["norm"]["total"], expected, 1e-3), report["norm"]
    assert close(parameter(report, "weight")["norm"], expected, 1e-3)
    assert close(parameter(report, "smaller")["norm"], expected / 4, 1e-3)
    assert close(report["reference"]["totals"][0]["total"], expected, 1e-3)
    if value > 1e-6:  # below, the 1e-6 beside the total decides
        assert close(report["clip"]["total_after"], value / 2, 1e-3)


def test_a_norm_type_whose_powers_underflow_is_refused(tool):
    """Above 1000 even the largest element's power can be 0 in float64: said, not computed as 0."""
    for norm_type, code, arguments in ((2.0, 2, ["--norm-type", "1001"]), (2000.0, 3, [])):
        dump = Dump(1, max_grad_norm=1.0, norm_type=norm_type)
        dump.plain("weight", np.full(8, 0.6, np.float32))
        refused(1, code, dump.write(tool.fresh("dump")), *arguments, out=tool.fresh("out"), mentions=["1000"])


# Copies of Partial sums, some of them None -------------------------------------------------------------------------------

A, B = np.float32([1, 3]), np.float32([2, 1])


@pytest.mark.parametrize("locals_, absent", [
    ({0: None, 1: None, 2: A, 3: B}, [0, 1]),  # a whole copy is missing
    ({0: A, 1: None, 2: A, 3: B}, [1]),        # one addend of the copy that counts: rank 3 has it
    ({0: None, 1: B, 2: A, 3: B}, [0]),
    ({0: None, 1: B, 2: A, 3: None}, [0, 3]),  # neither copy is whole, but each addend is somewhere
    ({0: A, 1: B, 2: None, 3: B}, [2]),        # of the copy that does not count
])
def test_addends_that_are_none_on_one_copy(tool, locals_, absent):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("m", ["r", "p"], [[0, 1], [2, 3]])
    dump.local("weight", [2], "m", ["Replicate()", "Partial(sum)"], locals_)
    report, shards, _ = tool.everywhere(dump.write(tool.fresh("dump")), counts=(1, 3))
    assert report["norm"]["total"] == 5.0 and report["norm"]["elements"] == 2
    assert parameter(report, "weight")["norm"] == 5.0 and parameter(report, "weight")["none"] == len(absent)
    found = finding(report, "replicas-differ")
    assert found["parameter"] == "weight" and found["ranks"] == absent and found["value"] is None, found
    coefficient = oracle.coefficient_of(5.0, 1.0)
    assert report["clip"]["coefficient"] == coefficient
    assert close(report["clip"]["total_after"], 5.0 * coefficient, 1e-6)
    assert_shards(shards, oracle.Expectation(dump).shards(coefficient))


# A Partial parameter whose gradient is whole -----------------------------------------------------------------------------

@pytest.mark.parametrize("numerics", ["exact", "automodel-cpu"])
def test_partial_parameter_with_a_replicated_gradient(tool, numerics):
    """Its full tensor is what each rank holds; nothing is added up."""
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.local("weight", [2], "tp", ["Partial(sum)"], dict.fromkeys((0, 1), np.float32([3, 4])),
               gradient_placements=["Replicate()"])
    report, _, _ = tool.everywhere(dump.write(tool.fresh("dump")), "--numerics", numerics, counts=(1, 2))
    assert report["norm"]["total"] == 5.0 and report["norm"]["elements"] == 2
    assert report["reference"]["arithmetic"] == numerics
    assert [(t["total"], t["ranks"]) for t in report["reference"]["totals"]] == [(5.0, [0, 1])]
    assert kinds(report) == []


# NaN in an addend, replaced ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("numerics", ["exact", "automodel-cpu"])
@pytest.mark.parametrize("first, second, combined, rank", [
    ([np.nan, 3], [2, 1], [2, 4], 0),
    ([2, 1], [np.nan, 3], [2, 4], 1),
    ([np.inf, 3], [2, 1], [2, 4], 0),
    ([np.inf, 3], [-np.inf, 1], [0, 4], 0),
])
def test_zero_policy_replaces_addends_before_they_are_combined(tool, first, second, combined, rank, numerics):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.local("weight", [2], "tp", ["Partial(sum)"], {0: np.float32(first), 1: np.float32(second)})
    report, shards, _ = tool.everywhere(dump.write(tool.fresh("dump")), "--nonfinite", "zero", "--numerics", numerics,
                                        counts=(1, 3))
    total = math.hypot(*combined)
    assert close(report["norm"]["total"], total) and close(parameter(report, "weight")["norm"], total)
    assert [report["norm"][k] for k in ("nan", "posinf", "neginf")] == [0, 0, 0]
    assert report["norm"]["zeros"] == combined.count(0)
    assert kinds(report) == ["nonfinite"]
    found = finding(report, "nonfinite")
    assert found["parameter"] == "weight" and found["index"] == [0] and found["ranks"] == [rank], found
    assert number(found["value"]) >= 1
    totals = report["reference"]["totals"]
    assert [t["ranks"] for t in totals] == [[0, 1]] and close(totals[0]["total"], total, 1e-7)
    assert close(report["clip"]["total_after"], 1.0, 1e-5)
    assert_shards(shards, oracle.Expectation(dump, zero=True).shards(report["clip"]["coefficient"]))


# Outputs that are in the way of the input --------------------------------------------------------------------------------

def small(path, **more):
    dump = Dump(2, max_grad_norm=1.0, **more)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("weight", np.float32([3, 4]), "dp", ["Shard(0)"])
    return dump.write(path)


@pytest.mark.parametrize("np_", [1, 4])
@pytest.mark.parametrize("where", ["itself", "inside", "by a link", "by a link of its parent"])
def test_the_unfinished_output_may_not_be_the_input(tool, tmp_path, where, np_):
    """OUT.partial is where OUT is written, and a leftover with gradclip's marker is emptied: not if it is the input."""
    partial = tmp_path / "d.partial"
    if where == "inside":
        partial.mkdir()
        path = small(partial / "step")
    else:
        path = small(partial)
    (partial / ".gradclip-partial").touch()
    given, out = path, tmp_path / "d"
    if where == "by a link":
        given = tmp_path / "link"
        given.symlink_to(path)
    elif where == "by a link of its parent":
        (tmp_path / "here").symlink_to(tmp_path)
        out = tmp_path / "here" / "d"
    before = tree(tmp_path)
    for more in ([], ["--overwrite"]):
        result = run(np_, "clip", given, "-o", out, *more)
        assert result.code == 2 and len(result.error_lines) == 1 and result.out == "", result
        assert tree(tmp_path) == before and not os.path.lexists(tmp_path / "d"), result


def test_the_unfinished_output_may_not_be_a_link_to_the_input(tool, tmp_path):
    path = small(tmp_path / "step")
    (path / ".gradclip-partial").touch()
    (tmp_path / "d.partial").symlink_to(path)
    before = tree(path)
    result = run(1, "clip", path, "-o", tmp_path / "d")
    assert result.code in (2, 5) and len(result.error_lines) == 1, result
    assert tree(path) == before and not os.path.lexists(tmp_path / "d")


# Names that no file system takes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    "x" * 300,
    "x" * 250,              # fits, but not with .partial behind it
    "x" * 300 + "/out",
    "x/" * 2500 + "out",    # beyond PATH_MAX
    "loop",
    "loop/out",
    "there/loop",
], ids=["long", "long with .partial", "long parent", "long path", "loop", "below a loop", "one of two loops"])
@pytest.mark.parametrize("more", [[], ["--overwrite"]], ids=["new", "overwrite"])
def test_an_output_that_cannot_exist(tool, tmp_path, name, more):
    path = small(tmp_path / "dump")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "loop").symlink_to("../back")
    (tmp_path / "back").symlink_to("there/loop")
    before = sorted(map(str, tmp_path.rglob("*"))), tree(path)
    result = run(1, "clip", path, "-o", f"{tmp_path}/{name}", *more)
    assert result.code in (2, 5), result
    assert len(result.error_lines) == 1 and result.err.count("\n") == 1 and result.out == "", result
    assert (sorted(map(str, tmp_path.rglob("*"))), tree(path)) == before, "something was left behind"


# Copies and addends of different shapes ----------------------------------------------------------------------------------

@pytest.mark.parametrize("np_", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "Replicate()", "Partial(sum)", "Partial(max)"])
def test_copies_and_addends_of_different_shapes(tool, kind, np_):
    """Ranges of its own win over the placements, but the ranks of one slice have to agree."""
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1])
    locals_ = {0: np.ones(8, np.float32), 1: np.ones(4, np.float32)}
    if kind == "plain":
        dump.plain("blocks.7.w", locals_, shape=[8])
    else:
        dump.local("blocks.7.w", [8], "tp", [kind], locals_)

    def edit_file(rank, file):
        if rank == 1:
            file["gradients/blocks.7.w"].attrs["global_ranges"] = np.array([[0, 0, 4]], "<i8")
    path = dump.write(tool.fresh("dump"), edit_file=edit_file)
    words = ["blocks.7.w", "4 recorded elements", "8 elements"]
    refused(np_, 3, path, out=tool.fresh("out"), mentions=words)
    refused(np_, 3, path, "norms", path, mentions=words)


# A product of addends ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments", [[], ["--total-norm", "5"], ["--numerics", "automodel-cpu"], ["--no-scale"]],
                         ids=lambda a: " ".join(a) or "defaults")
def test_a_product_is_not_clipped_and_nothing_is_written(tool, arguments):
    """before_clip: nothing is scaled, so that only clipping itself is in the way."""
    dump = Dump(2, state="before_clip", max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.plain("fine", np.float32([0]))
    dump.local("weight", [2], "tp", ["Partial(product)"], {0: np.float32([1, 2]), 1: np.float32([3, 2])})
    path = dump.write(tool.fresh("dump"))
    refused(1, 3, path, *arguments, out=tool.fresh("out"), mentions=["weight", "product"])
    # What a killed run left is not even emptied: the refusal comes before the output is prepared.
    out = tool.fresh("out")
    leftover = Path(f"{out}.partial")
    leftover.mkdir()
    (leftover / ".gradclip-partial").touch()
    (leftover / "rank_00000.h5").write_text("of a killed run")
    before = tree(leftover)
    result = run(1, "clip", path, "-o", out, *arguments)
    assert result.code == 3 and len(result.error_lines) == 1, result
    assert tree(leftover) == before and not out.exists()
    assert tool.norms(path)["norm"]["total"] == 5.0


# Memory of many addends --------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not LONG, reason="GRADCLIP_LONG is not set")
def test_memory_of_many_addends(tool):
    """48 ranks of 4 MiB are one array here and 192 MiB in the page cache; an exchange holds a part of the budget."""
    dump = Dump(48, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], list(range(48)))
    addend = np.tile(np.float32([0, 1, 2, 3]), 1 << 18)
    dump.local("weight", addend.shape, "tp", ["Partial(sum)"], dict.fromkeys(range(48), addend))
    path = dump.write(tool.fresh("dump"), checksums=False)
    out, written = tool.fresh("out"), tool.fresh("report").with_suffix(".json")
    total = 48 * 512 * math.sqrt(14)
    report = tool.norms(path, "--memory-budget", "64M")
    assert close(report["norm"]["total"], total, 1e-13)
    assert report["run"]["memory_budget_bytes"] == 64_000_000
    assert report["run"]["memory_peak_bytes"] <= 264_000_000
    result = run(1, "clip", path, "-o", out, "--memory-budget", "64M", "--format", "json", "--report", written)
    assert result.code == 0, result
    report = result.json()
    assert close(report["norm"]["total"], total, 1e-13) and close(report["clip"]["total_after"], 1.0, 1e-5)
    assert report["run"]["memory_peak_bytes"] <= 264_000_000


# NaN in a copy that does not count -----------------------------------------------------------------------------------------

def one_bad_copy(value, at=(2, 5)):
    """Four copies by replication, hybrid sharding and as plain tensors; rank 3's has another value in some elements."""
    whole = np.arange(1, 17, dtype=np.float32)

    def copies(good):
        bad = good.copy()
        bad[list(at)] = value
        return {0: good, 1: good, 2: good, 3: bad}
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1, 2, 3])
    dump.mesh("hsdp", ["dp_replicate", "dp_shard"], [[0, 1], [2, 3]])
    dump.local("ddp", [16], "dp", ["Replicate()"], copies(whole))
    halves = copies(whole[8:])
    dump.local("hsdp", [16], "hsdp", ["Replicate()", "Shard(0)"], {0: whole[:8], 1: halves[1], 2: whole[:8], 3: halves[3]})
    dump.plain("plain", copies(whole))
    return dump


def findings_of(report, kind):
    return [each for each in report["findings"] if each["kind"] == kind]


@pytest.mark.parametrize("value, nans", [(np.nan, 2), (np.inf, 0), (-np.inf, 0)])
def test_what_is_not_finite_in_a_copy_that_does_not_count(tool, value, nans):
    path = one_bad_copy(value).write(tool.fresh("dump"))
    for processes, command in ((1, "norms"), (1, "verify"), (2, "norms"), (3, "verify")):
        report = run(processes, command, path, "--format", "json").json()
        found = findings_of(report, "nonfinite")
        assert [(f["parameter"], f["ranks"], f["index"], f["value"]) for f in found] == [
            ("ddp", [3], [2], 2), ("hsdp", [3], [10], 2), ("plain", [3], [2], 2)], found
        assert all(f"{nans} NaN and {2 - nans} infinities" in f["message"] for f in found)
        assert kinds(report)[:3] == ["nonfinite"] * 3  # the worst there is
        differ = findings_of(report, "replicas-differ")
        assert len(differ) == 3 and "nan" not in str([f["message"] for f in differ])
        if nans:
            assert all("NaN on rank 3 where rank" in f["message"] and f["value"] == "nan" for f in differ)
        if command == "norms":
            assert report["norm"]["nan"] == report["norm"]["posinf"] == 0 and math.isfinite(report["norm"]["total"])
    text = run(1, "norms", path).out
    assert "non-finite    none that counts, but see the findings" in text and "nonfinite ddp [2] (rank 3)" in text, text
    assert run(1, "norms", path, "--nonfinite", "error").code == 0  # it is about the total, which is finite

    baseline = tool.folder / "baseline.json"
    for update in ((), ("--update",)):
        result = run(1, "check", path, "--baseline", baseline, "--format", "json", *update)
        assert result.code == 1 and kinds(result.json())[:3] == ["nonfinite"] * 3 and not baseline.exists()
    assert run(1, "check", path, "--baseline", baseline, "--update", "--allow-nonfinite").code == 0
    assert run(1, "check", path, "--baseline", baseline, "--allow-nonfinite").code == 0
    assert run(1, "check", path, "--baseline", baseline).code == 1


def test_what_counts_is_placed_once(tool):
    """Where the copy that counts has it, too, there is one finding; another element of another copy is one more."""
    good, other = np.float32([1, np.nan, 3, 4]), np.float32([1, np.nan, 3, np.inf])
    dump = Dump(2, max_grad_norm=1.0)
    dump.plain("same", {0: good, 1: good})
    dump.plain("more", {0: good, 1: other})
    path = dump.write(tool.fresh("dump"))
    report = run(1, "norms", path, "--format", "json").json()
    assert [(f["parameter"], f["ranks"], f["index"], f["value"]) for f in findings_of(report, "nonfinite")] == [
        ("same", [0], [1], 1), ("more", [0], [1], 1), ("more", [1], [3], 1)]
    text = run(1, "norms", path).out
    assert ", 2 of them above" in text and "nonfinite more [3] (rank 1)" in text, text


def test_totals_of_which_one_is_nan(tool):
    whole = np.arange(1, 9, dtype=np.float32)
    dump = Dump(4, max_grad_norm=1.0)
    dump.plain("weight", {0: whole, 1: whole, 2: whole, 3: whole * np.float32(np.nan)})
    message = finding(run(1, "norms", dump.write(tool.fresh("dump")), "--format", "json").json(), "ranks-disagree")["message"]
    assert f"by 2 different totals, {np.linalg.norm(whole.astype(np.float64)):.9g}, and NaN on rank 3" in message
    dump.parameters[0].shards[1] = whole * np.float32(2)
    message = finding(run(1, "norms", dump.write(tool.fresh("dump")), "--format", "json").json(), "ranks-disagree")["message"]
    norm = np.linalg.norm(whole.astype(np.float64))
    assert f"by 3 different totals, from {norm:.9g} to {2 * norm:.9g}, and NaN on rank 3" in message


# Copies that went astray are no reduction that never ran -------------------------------------------------------------------

def test_one_element_of_one_copy_is_no_missing_average(tool):
    whole = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    astray = whole.copy()
    astray[7] += np.float32(1e-5)
    halves = np.random.default_rng(4).standard_normal((2, 4096)).astype(np.float32)
    halves[:, :2048] = whole[:2048]  # what all copies agree on says nothing
    reduced = {"sum": halves.sum(axis=0, dtype=np.float64), "mean": halves.mean(axis=0, dtype=np.float64)}

    def written(copies):
        dump = Dump(2, max_grad_norm=1.0)
        dump.plain("weight", copies)
        return dump.write(tool.fresh("dump"))
    for a, b, hint in (({0: whole, 1: astray}, whole, None), ({0: astray, 1: whole}, whole, None),
                       ({0: halves[0], 1: halves[1]}, reduced["mean"].astype(np.float32), "never averaged"),
                       ({0: halves[0], 1: halves[1]}, np.concatenate([whole[:2048], reduced["sum"][2048:]]).astype(np.float32),
                        "never reduced")):
        report = run(1, "diff", written(a), written(b), "--format", "json").json()
        message = finding(report, "replicas-differ")["message"]
        assert hint in message if hint else "never" not in message, message


def test_a_sum_is_looked_for_before_a_mean(tool):
    """Of copies a, 2a, 3a, 6a the third is the mean of the others, and the last their sum."""
    whole = np.arange(1, 65, dtype=np.float32)
    dump = Dump(4, max_grad_norm=1.0)
    dump.plain("weight", {rank: whole * np.float32(times) for rank, times in enumerate((1, 2, 3, 6))})
    report = run(1, "verify", dump.write(tool.fresh("dump")), "--format", "json").json()
    assert "rank 3 holds the sum of the other copies" in finding(report, "replicas-differ")["message"]


# A logged norm that nothing explains ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, off", [("float32", 2e-3), ("bfloat16", 2e-2)])
def test_a_logged_norm_that_no_total_explains(tool, dtype, off):
    whole = np.arange(1, 9, dtype=np.float32)  # exact in both
    norm = float(np.linalg.norm(whole.astype(np.float64)))

    def report_of(logged, *args, state="before_scale", **training):
        dump = Dump(2, state=state, max_grad_norm=1.0, grad_norm=logged, norm_type=2.0, **training)
        dump.plain("weight", whole, dtype=dtype)
        result = run(1, "norms", dump.write(tool.fresh("dump")), "--format", "json", *args)
        assert result.code == 0, result
        return result.json()
    for logged in (norm, norm * (1 + off / 10), norm * (1 - off / 10)):
        assert report_of(logged)["findings"] == []
    for logged in (123.0, 0.0, norm * (1 + off), norm * (1 - off), "nan", "inf"):
        found = finding(report_of(logged), "recorded-differs")
        assert found["parameter"] is None and found["ranks"] == [] and number(found["value"]) == pytest.approx(
            float(logged), nan_ok=True)
        assert ("every recorded gradient is finite" in found["message"]) is isinstance(logged, str), found
    # What was measured is not what was logged.
    for arguments in (["--norm-type", "1"], ["--no-scale"], ["--num-label-tokens", "7"]):
        assert report_of(123.0, *arguments)["findings"] == [], arguments
    other = report_of(norm, "--norm-type", "1")["reference"]["recorded"]
    assert other == {"grad_norm": norm, "norm_type": 2.0, "distance": None, "distance_to_nearest_reference": None}
    assert report_of(123.0, "--norm-type", "2")["findings"] != []
    dump = Dump(2, max_grad_norm=1.0, grad_norm=123.0)
    dump.plain("weight", whole * np.float32(np.nan))
    assert set(kinds(run(1, "norms", dump.write(tool.fresh("dump")), "--format", "json").json())) == {"nonfinite"}


def test_clip_and_check_have_it_and_a_clipped_dump_has_not(tool):
    dump = Dump(1, max_grad_norm=1.0, grad_norm=123.0)
    dump.plain("weight", np.arange(1, 9, dtype=np.float32))
    path, out = dump.write(tool.fresh("dump")), tool.fresh("out")
    result = run(1, "clip", path, "-o", out, "--format", "json")
    assert kinds(result.json()) == ["recorded-differs"] and run(1, "norms", path, "--strict").code == 1
    assert run(1, "norms", out, "--format", "json").json()["findings"] == []
    baseline = tool.folder / "baseline.json"
    assert run(1, "check", path, "--baseline", baseline, "--update").code == 0
    assert run(1, "check", path, "--baseline", baseline).code == 0
    dump.training["grad_norm"] = 124.0
    assert run(1, "check", dump.write(tool.fresh("dump")), "--baseline", baseline).code == 1


# Seconds that nobody measured ----------------------------------------------------------------------------------------------

def test_seconds_that_were_not_measured_are_null(tool):
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain("weight", np.ones(8, np.float32))
    path = dump.write(tool.fresh("dump"))
    for command in (["diff", path, path], ["merge", path, "-o", tool.fresh("out")]):
        seconds = run(1, *command, "--format", "json").json()["run"]["seconds"]
        assert [seconds[part] for part in ("read", "compute", "write")] == [None] * 3 and seconds["total"] > 0
    seconds = run(1, "norms", path, "--format", "json").json()["run"]["seconds"]
    assert all(isinstance(each, float) for each in seconds.values())
