"""`accumulate`: where windows end, which types are taken, what the replay carries, and --check."""

import numpy as np
import pytest

import element_types as types
from accumulation import AVG, LAYOUTS, accumulate, declared, expected_shards, microbatches, one, written
from conftest import Tool, assert_shards, finding, kinds, refused, run, tree
from dump_builder import Dump, read_manifest, read_shards, slice_indices

# ----------------------------------------------------------------------------------------------------------------------
# Where windows end
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, args, ends", [
    ({"accumulation": {"sync": "every"}}, (), [1, 1, 1, 1]),
    ({"accumulation": {"sync": "every"}}, ("--sync", "deferred"), [0, 0, 0, 1]),
    ({"synchronised": [False, True, False, True]}, (), [0, 1, 0, 1]),
    ({"synchronised": [None, True, None, None], "accumulation": {"sync": "deferred"}}, (), [0, 1, 0, 1]),
    ({"synchronised": [True, None, False, True], "accumulation": {"sync": "every"}}, (), [1, 1, 0, 1]),
    ({"synchronised": [False] * 4}, ("--sync", "every"), [1, 1, 1, 1]),
    ({"schedule": [0, 0, 1, 1], "accumulation": {"sync": "schedule"}}, (), [0, 1, 0, 1]),
    ({"schedule": [3, 4, 4, 4]}, ("--sync", "schedule"), [1, 0, 0, 1]),
    ({"schedule": [None, 1, 1, None]}, ("--sync", "schedule"), [1, 0, 1, 1])],
    ids=["every", "deferred wins", "recorded", "recorded in part", "recorded over every", "given over recorded",
         "schedule", "schedule given", "schedule in part"])
def test_windows(tool, how, args, ends):
    layouts = {name: LAYOUTS[name] for name in ("fsdp", "hsdp", "ddp")}
    dumps = declared(layouts=layouts, **how)
    out = accumulate(tool, written(tool, dumps), "--dtype", "bfloat16", *args)
    assert_shards(read_shards(out), expected_shards(dumps, "float32", "bfloat16", ends))
    record = read_manifest(out)["accumulate"]
    assert record["windows"] == sum(ends) and [each["ends_window"] for each in record["flags"]] == list(map(bool, ends))
    assert [each["first_microbatch"] for each in record["flags"]] == [True, False, False, False]
    assert "accumulation" not in read_manifest(out)


def test_types_of_a_parameter(tool):
    """An own type beats the step's, the command line beats both."""
    recorded = {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16", "storage_dtype": "float32"}
    own = {"fsdp": ("float32", "float16"), "ddp": ("float64", "float64")}
    dumps = declared(accumulation=recorded, **own)
    out = accumulate(tool, written(tool, dumps))
    assert_shards(read_shards(out), expected_shards(dumps, "bfloat16", "float32"))
    parameters = {each["name"]: each for each in read_manifest(out)["parameters"]}
    assert [parameters[name]["dtype"] for name in ("fsdp", "hsdp", "ddp")] == ["float16", "float32", "float64"]
    assert not any("reduce_dtype" in each or "storage_dtype" in each for each in parameters.values())
    given = accumulate(tool, written(tool, dumps), "--reduce-dtype", "float32", "--dtype", "bfloat16")
    for dump in dumps:
        for parameter in dump.parameters:
            parameter.entry.update(reduce_dtype="float32", storage_dtype="bfloat16")
    assert_shards(read_shards(given), expected_shards(dumps, "float32", "bfloat16"))


@pytest.mark.parametrize("how, args, mentions", [
    ({"synchronised": [False, True, False, False]}, (), ["last microbatch", "never ends", "--sync"]),
    ({"schedule": [0, 1, 0, 1]}, ("--sync", "schedule"), ["schedule step 0 after 1", "cut off"]),
    ({"schedule": [0, 0, 2, 2], "accumulation": {"sync": "schedule"}}, (), ["schedule step 2 after 0"])],
    ids=["never", "order", "missing"])
def test_a_window_without_an_end(tool, how, args, mentions):
    paths = written(tool, declared(layouts={"ddp": LAYOUTS["ddp"]}, **how))
    refused(1, 3, paths[0], "accumulate", *paths, "-o", tool.fresh("out"), *args, mentions=mentions, watched=paths)


@pytest.mark.parametrize("key, value, mentions", [
    ("microbatch", {"index": 0, "count": 1, "first_microbatch": 1}, ["microbatch.first_microbatch"]),
    ("microbatch", {"index": 0, "count": 1, "schedule_step": -1}, ["microbatch.schedule_step"]),
    ("accumulation", {"sync": "never"}, ["accumulation.sync", '"deferred", "every" or "schedule"']),
    ("accumulation", {"reduce_dtype": "float8_e5m2"}, ["accumulation.reduce_dtype", "bfloat16"]),
    ("accumulation", [], ["accumulation"])])
def test_keys_are_checked(tool, key, value, mentions):
    def edit(manifest):
        manifest[key] = value
    path = one(tool, 0, 1, edit=edit)
    refused(1, 3, path, "accumulate", path, "-o", tool.fresh("out"), mentions=mentions)


# ----------------------------------------------------------------------------------------------------------------------
# What the replay carries: flags, scales, labels
# ----------------------------------------------------------------------------------------------------------------------


def test_flags_are_shown_and_wrong_ones_named(tool):
    layouts = {"ddp": LAYOUTS["ddp"]}
    dumps = declared(3, synchronised=[False, None, True], layouts=layouts)
    right = run(1, "accumulate", *written(tool, dumps), "-o", tool.fresh("out"), "--format", "json").json()
    assert [list(each.values()) for each in right["microbatches"]] == [
        [0, True, False, False, None, False], [1, False, False, None, None, False], [2, False, True, True, None, True]]
    assert right["findings"] == [] and right["accumulated"]["windows"] == "1" and right["command"] == "accumulate"
    assert right["accumulated"]["reduce dtype"] == "float32" and right["run"]["processes"] == 1
    for k, dump in enumerate(dumps):
        dump.more["microbatch"].update(first_microbatch=k < 2, optimizer_step=k == 0)
    paths = written(tool, dumps)
    wrong = run(1, "accumulate", *paths, "-o", tool.fresh("out"), "--format", "json", "--strict")
    assert wrong.code == 1 and kinds(wrong.json()) == ["fp8-cache", "sync-window"], wrong
    text = run(1, "accumulate", *paths, "-o", tool.fresh("out"))
    assert text.code == 0 and "microbatch 0, 1, not for the first alone" in text.out, text
    assert [line.split() for line in text.out.splitlines() if line.strip().startswith("1 ")] == [
        ["1", "on", "off", "-", "-", "no"]]


def test_a_scale_of_the_first_microbatch_is_reused(tool):
    """FP8 weights that are cached: `scale_inv` stands where it was made."""
    dumps = []
    for k, scale in enumerate((0.5, None, 4.0, None)):
        dump = Dump(1)
        dump.more["microbatch"] = {"index": k, "count": 4, "first_microbatch": k == 0}
        dump.mesh("dp", ["dp_shard"], [0])
        dump.local("w", (2,), "dp", ["Shard(0)"], {0: types.narrow([1.0, -2.0], "float8_e4m3fn")}, dtype="float8_e4m3fn",
                   gradient_placements=[AVG], **({} if scale is None else {"scale_inv": scale}))
        dumps.append(dump)
    shards = read_shards(accumulate(tool, written(tool, dumps)))
    assert shards[0]["w"].tolist() == [9.0, -18.0]  # 0.5, 0.5, 4, 4


def labelled(tool, labels, rank_without=None):
    """Two ranks of two sequences each; labels: by microbatch, the row of every rank."""
    paths = []
    for k, rows in enumerate(labels):
        dump = Dump(2, device_mesh="world", pp_enabled=True, dp_group_size=2)
        dump.more["microbatch"] = {"index": k, "count": len(labels)}
        dump.mesh("world", ["pp", "dp_shard"], [[0, 1]])
        dump.mesh("dp", ["dp_shard"], [0, 1])
        local = {rank: np.full((2, 2), 3.0 * (k + 1), np.float32) for rank in range(2)}
        dump.local("w", (2, 2), "dp", ["Shard(0)"], local, gradient_placements=[AVG])
        dump.labels = {rank: [rows[rank]] for rank in range(2) if (k, rank) != rank_without}
        paths.append(dump.write(tool.fresh("microbatch")))
    return paths


def test_labels_are_kept(tool):
    """1 and 3 label tokens: OUT knows both microbatches, and the gradient is (g1 + g2) / 4 times the group's size."""
    labels = [[[[-100, -100, -100]], [[-100, 7, -100]]], [[[1, 2, -100]], [[5, -100, -100]]]]
    paths = labelled(tool, labels)
    out = accumulate(tool, paths)
    assert tree(accumulate(tool, paths, np_=3)) == tree(out)
    tokens = run(1, "tokens", out, "--format", "json").json()
    assert [each["label_tokens"] for each in tokens["microbatches"]] == [1, 3] and tokens["findings"] == []
    assert tokens["labels"]["label_tokens"] == 4 and tokens["labels"]["tail_padding"] == 3 + 1 + 1 + 2
    report, shards, _ = tool.clip(out, "--no-clip", "--num-label-tokens", "auto")
    assert report["scale"]["label_token_divisor"] == 4 / 2
    assert shards[0]["w"].tolist() == [[(3.0 + 6.0) / 4 * 2] * 2]


def test_labels_of_some_microbatches_only(tool):
    paths = labelled(tool, [[[[1, 2]], [[3, 4]]], [[[5, 6]], [[7, 8]]]], rank_without=(1, 1))
    result = run(1, "accumulate", *paths, "-o", tool.fresh("out"), "--format", "json")
    assert finding(result.json(), "labels-incomplete")["ranks"] == [1]
    assert finding(result.json(), "labels-missing")["ranks"] == [1]  # as `tokens` says of OUT
    tokens = run(1, "tokens", result.json()["output"]["path"], "--format", "json").json()
    assert kinds(tokens) == ["labels-missing"] and tokens["labels"]["coordinates_counted"] == 1


# ----------------------------------------------------------------------------------------------------------------------
# --check: against what training had
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Microbatches, and the same step's gradients as training might have recorded them: whole, on one rank."""
    tool = Tool(tmp_path_factory.mktemp("checked"))
    layouts = {name: LAYOUTS[name] for name in ("fsdp", "hsdp")}
    dumps = microbatches(layouts, 3, "bfloat16", seed=5)
    final = expected_shards(dumps, "float32", "float32")
    training = Dump(1)
    for parameter in dumps[0].parameters:
        whole = np.zeros(parameter.shape, np.float32)
        kept = parameter.entry["placements"]
        for rank in map(int, parameter.mesh.ranks.flat):
            whole[np.ix_(*slice_indices(parameter.shape, parameter.mesh, kept, rank))] = final[rank][parameter.name]
        training.plain(parameter.name, whole)
    return tool, written(tool, dumps), training


def test_check_of_another_layout(checked):
    tool, paths, training = checked
    recorded = training.write(tool.fresh("training"))
    before, scratch = tree(recorded), tool.fresh("tmp")
    scratch.mkdir()
    same = run(1, "accumulate", *paths, "--check", recorded, "--ulp", "0", "--format", "json", env={"TMPDIR": scratch})
    report = same.json()
    assert same.code == 0 and report["findings"] == [] and report["output"] is None, same
    assert [each["status"] for each in report["parameters"]] == ["equal", "equal"]
    assert report["rule"]["ulp"] == 0 and report["other"]["path"] == str(recorded)
    assert list(scratch.iterdir()) == [] and tree(recorded) == before
    training.parameters[1].shards[0][2, 3] *= np.float32(1.01)
    other = training.write(tool.fresh("training"))
    out = tool.fresh("out")
    for np_ in (1, 3):
        differs = run(np_, "accumulate", *paths, "--check", other, "-o", out, "--overwrite")
        assert differs.code == 1 and "differs: 1 of 2 parameters, first in model order hsdp [2, 3]" in differs.out, differs
    assert read_shards(out)[0]["fsdp"].dtype == np.float32
    assert run(1, "accumulate", *paths, "--check", other, "--rtol", "0.02", env={"TMPDIR": scratch}).code == 0
    assert list(scratch.iterdir()) == []


def test_check_usage(checked):
    tool, paths, training = checked
    recorded = training.write(tool.fresh("training"))
    refused(1, 2, paths[0], "accumulate", *paths, "-o", tool.fresh("out"), "--rtol", "1", mentions=["--rtol", "--check"])
    refused(1, 2, paths[0], "accumulate", *paths, "--check", recorded, "-o", recorded, "--overwrite", watched=[recorded])
    refused(1, 3, paths[0], "accumulate", *paths, "--check", tool.fresh("nothing"), mentions=["does not exist"])
