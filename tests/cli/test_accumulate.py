"""`accumulate`: microbatches' gradients as the step has them after its reductions, against numpy, bit for bit.

The oracle is written from FSDP2's own steps: each rank adds the microbatches of a window in the reduce type; the group's
average is rounded to it (float16 and float64: divided before and after the sum); then one rounding to the storage type,
stored or added there to what the windows before left."""

import numpy as np
import pytest

import element_types as types
from conftest import Tool, assert_shards, finding, kinds, refused, run, tree
from dump_builder import Dump, parse_placement, read_manifest, read_shards, slice_indices

AVG = "Partial(avg)"
#: name: mesh's dimensions, its ranks, the tensor, the parameter's placements, the gradient's
LAYOUTS = {
    "fsdp": (["dp_shard"], [0, 1, 2], (7, 5), ["Shard(0)"], [AVG]),
    "fsdp of columns": (["dp_shard"], [0, 1], (6, 10), ["Shard(1)"], [AVG]),
    "fsdp with empty shards": (["dp_shard"], [0, 1, 2], (4, 2), ["Shard(0)"], [AVG]),
    "hsdp": (["dp_replicate", "dp_shard"], [[0, 1], [2, 3]], (6, 4), ["Replicate()", "Shard(0)"], [AVG, AVG]),
    "fsdp x tp": (["dp_shard", "tp"], [[0, 1], [2, 3]], (8, 3), ["_StridedShard(dim=0, sf=2)", "Shard(0)"], [AVG, "Shard(0)"]),
    "ddp": (["dp"], [0, 1, 2], (5,), ["Replicate()"], [AVG]),
    "sum": (["tp"], [0, 1], (5,), ["Replicate()"], ["Partial(sum)"]),
    "cp of its own": (["dp_shard", "cp"], [[0, 1], [2, 3]], (6, 2), ["Shard(0)", "Replicate()"], [AVG, AVG]),
    "one rank": (["dp_shard"], [0], (3, 3), ["Shard(0)"], [AVG]),
    "no reduction": (["tp"], [0, 1], (4, 4), ["Shard(1)"], ["Shard(1)"]),
}


def microbatches(layouts, count, dtype, seed=3, none=()):
    """`count` Dumps of all layouts, on 4 ranks. none: (microbatch, parameter, rank)"""
    random, dumps = np.random.default_rng(seed), []
    for k in range(count):
        dump = Dump(4)
        dump.more["microbatch"] = {"index": k, "count": count}
        for name, (dims, ranks, shape, kept, recorded) in layouts.items():
            mesh = dump.mesh(name, dims, ranks)
            shards = {}
            for rank in np.ravel(ranks).tolist():
                local = tuple(map(len, slice_indices(shape, dump.meshes[mesh], recorded, rank)))
                values = random.standard_normal(local) * 2.0 ** random.integers(-3, 4, local)
                shards[rank] = None if (k, name, rank) in none else types.narrow(values, dtype)
            more = {} if kept == recorded else {"gradient_placements": recorded}
            dump.local(name, shape, mesh, kept, shards, dtype=dtype, **more)
        dumps.append(dump)
    return dumps


def written(tool, dumps):
    return [dump.write(tool.fresh("microbatch")) for dump in dumps]


def rounded(values, dtype):
    return types.widen(types.narrow(np.asarray(values, np.float64), dtype), dtype)


def accumulated(dumps, p, rank, reduce):
    """One window on one rank."""
    total = None
    for dump in dumps:
        parameter = dump.parameters[p]
        stored = parameter.shards[rank]
        if stored is None:
            continue
        here = rounded(types.widen(stored, parameter.dtype), reduce)
        total = here if total is None else rounded(total + here, reduce)
    return total


def factors(n):
    """FSDP2's divisors around a sum of float16 or float64."""
    before = 1
    while n % before == 0 and n / before > before:
        before *= 2
    return before, n / before


def groups(mesh, recorded, kept):
    """The dimensions of the reduce-scatter and of the all-reduce."""
    partial = [d for d in range(len(recorded)) if recorded[d] != kept[d]]
    copies = [d for d in partial if kept[d] == "Replicate()"]
    if len(copies) < len(partial):
        copies = [d for d in copies if mesh.dim_names[d] != "cp"]
    return [d for d in partial if d not in copies], copies


def reduced(mesh, recorded, kept, at, of_rank, reduce):
    """One window's gradient of the rank at these coordinates."""
    averaged = [mesh.ranks.shape[d] for d in range(len(recorded))
                if recorded[d] != kept[d] and parse_placement(recorded[d])[1] == "avg"]
    around = reduce in ("float16", "float64")
    before, after = factors(int(np.prod(averaged))) if around else (1, 1)

    def over(dimensions, addend, here):
        places = [list(here)]
        for d in dimensions:
            places = [[*place[:d], i, *place[d + 1:]] for place in places for i in range(mesh.ranks.shape[d])]
        present = [value for value in map(addend, places) if value is not None]
        if len(places) == 1 or not present:
            return present[0] if present else None
        total = present[0]
        for value in present[1:]:
            total = total + value
        average = [mesh.ranks.shape[d] for d in dimensions if parse_placement(recorded[d])[1] == "avg"]
        return rounded(total if around else total / np.prod(average), reduce)

    def divided(place):
        value = of_rank[int(mesh.ranks[tuple(place)])]
        return value if value is None or before == 1 else rounded(value / before, reduce)
    scatter, copy = groups(mesh, recorded, kept)
    value = over(copy, lambda place: over(scatter, divided, place), list(at))
    return value if value is None or after == 1 else rounded(value / after, reduce)


def windows(dumps, ends):
    found, window = [], []
    for dump, end in zip(dumps, ends):
        window.append(dump)
        if end:
            found.append(window)
            window = []
    assert not window
    return found


def expected_shards(dumps, reduce, storage, ends=None):
    """ends: by microbatch, whether a window ends there; the last alone by default."""
    ends = ends or [dump is dumps[-1] for dump in dumps]
    shards = {rank: {} for rank in range(dumps[0].world_size)}
    for p, parameter in enumerate(dumps[0].parameters):
        mesh, kept = parameter.mesh, parameter.entry["placements"]
        recorded = parameter.entry.get("gradient_placements", kept)
        add_in = parameter.entry.get("reduce_dtype", reduce)
        keep_in = parameter.entry.get("storage_dtype", storage)
        for rank in map(int, mesh.ranks.flat):
            shards[rank][parameter.name] = None
        for window in windows(dumps, ends):
            of_rank = {int(rank): accumulated(window, p, int(rank), add_in) for rank in mesh.ranks.flat}
            for rank in of_rank:
                value = reduced(mesh, recorded, kept, mesh.coordinate(rank), of_rank, add_in)
                if value is None:
                    continue
                whole = np.full(parameter.shape, np.nan)
                whole[np.ix_(*slice_indices(parameter.shape, mesh, recorded, rank))] = value
                local = types.narrow(whole[np.ix_(*slice_indices(parameter.shape, mesh, kept, rank))], keep_in)
                before = shards[rank][parameter.name]
                if before is not None:
                    local = types.narrow(types.widen(before, keep_in) + types.widen(local, keep_in), keep_in)
                shards[rank][parameter.name] = local
    return shards


def accumulate(tool, paths, *args, np_=1):
    out = tool.fresh("out")
    result = run(np_, "accumulate", *paths, "-o", out, *args)
    assert result.code == 0 and result.err == "", result
    return out


def verified(dump):
    """The kinds of what is wrong with it. Its layouts are of different ranks, which therefore disagree on the total."""
    return kinds(run(1, "verify", dump, "--format", "json").json())


@pytest.mark.parametrize("dtype, reduce, storage", [
    ("bfloat16", "float32", "float32"), ("bfloat16", "float32", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"),
    ("float32", "float32", "float32"), ("float64", "float64", "float64"), ("float16", "float32", "float16"),
    ("float32", "bfloat16", "float32"), ("float16", "float16", "float32"), ("bfloat16", "float64", "float32")])
def test_all_layouts_bit_for_bit(tool, dtype, reduce, storage):
    """One window; and one for each microbatch, whose results are added in the storage type."""
    dumps = microbatches(LAYOUTS, 4, dtype)
    paths, given = written(tool, dumps), ("--reduce-dtype", reduce, "--dtype", storage)
    assert_shards(read_shards(accumulate(tool, paths, *given)), expected_shards(dumps, reduce, storage))
    every = expected_shards(dumps, reduce, storage, [True] * 4)
    assert_shards(read_shards(accumulate(tool, paths, "--sync", "every", *given)), every)


def test_divisions_around_a_sum():
    """FSDP2's factors of float16 and float64, from its description: the power of two near the root, then the rest."""
    assert [factors(n) for n in (1, 2, 3, 4, 6, 8, 16, 12)] == [
        (1, 1), (2, 1), (2, 1.5), (2, 2), (4, 1.5), (4, 2), (4, 4), (4, 3)]


# ----------------------------------------------------------------------------------------------------------------------
# Where windows end
# ----------------------------------------------------------------------------------------------------------------------


def declared(count=4, synchronised=None, schedule=None, accumulation=None, layouts=LAYOUTS, **types_of):
    """bfloat16 microbatches with flags in their manifests. types_of: name: (reduce, storage)"""
    dumps = microbatches(layouts, count, "bfloat16", seed=11)
    for k, dump in enumerate(dumps):
        record = dump.more["microbatch"]
        record.update(first_microbatch=k == 0, optimizer_step=k == count - 1)
        if synchronised and synchronised[k] is not None:
            record["synchronised"] = synchronised[k]
        if schedule and schedule[k] is not None:
            record["schedule_step"] = schedule[k]
        if accumulation:
            dump.more["accumulation"] = accumulation
        for parameter in dump.parameters:
            if parameter.name in types_of:
                parameter.entry["reduce_dtype"], parameter.entry["storage_dtype"] = types_of[parameter.name]
    return dumps


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


def test_the_output_is_a_whole_dump_for_any_number_of_processes(tool):
    dumps = microbatches(LAYOUTS, 3, "bfloat16")
    paths = written(tool, dumps)
    before = [tree(path) for path in paths]
    first = accumulate(tool, paths)
    assert tree(accumulate(tool, paths[::-1], np_=3)) == tree(first)  # in any order
    assert [tree(path) for path in paths] == before
    assert verified(first) == ["ranks-disagree"]
    inspected = run(1, "inspect", first, "--format", "json").json()
    assert inspected["microbatch"] is None and inspected["state"] == "before_scale"
    assert all(p["dtype"] == "float32" and "gradient_placements" not in p for p in inspected["parameters"])
    report, _, _ = tool.clip(first, "--max-norm", "0.5")
    assert report["clip"]["clipped"] and kinds(report) == ["ranks-disagree"]


def test_one_microbatch_is_reduced_too(tool):
    dumps = microbatches(LAYOUTS, 1, "float32")
    out = accumulate(tool, written(tool, dumps))
    assert_shards(read_shards(out), expected_shards(dumps, "float32", "float32"))


def test_none(tool):
    """None adds nothing; None everywhere is None."""
    none = {(0, "fsdp", 1), (2, "ddp", 0), *((k, "hsdp", 3) for k in range(3)),
            *((k, "sum", rank) for k in range(3) for rank in range(2))}
    dumps = microbatches(LAYOUTS, 3, "bfloat16", none=none)
    out = accumulate(tool, written(tool, dumps))
    expected = expected_shards(dumps, "float32", "float32")
    assert expected[0]["sum"] is None and expected[0]["fsdp"] is not None
    assert_shards(read_shards(out), expected)
    assert verified(out) == ["ranks-disagree"]


def test_more_than_a_block(tool):
    layouts = {"tall": (["dp_shard"], [0, 1], (70001, 3), ["Shard(0)"], [AVG]),
               "wide": (["dp_shard"], [0, 1], (40, 9001), ["Shard(1)"], [AVG])}
    dumps = microbatches(layouts, 2, "float32")
    out = accumulate(tool, written(tool, dumps), "--threads", "2")
    assert_shards(read_shards(out), expected_shards(dumps, "float32", "float32"))


def test_stored_in_packs_and_chunks(tool):
    dumps = microbatches(LAYOUTS, 2, "bfloat16")
    paths = [dumps[0].write(tool.fresh("packed"), packed=True),
             dumps[1].write(tool.fresh("chunked"), chunks=True, compression="gzip")]
    assert_shards(read_shards(accumulate(tool, paths)), expected_shards(dumps, "float32", "float32"))


def test_float8(tool):
    dumps = []
    for k, scale in enumerate((0.5, 2.0)):
        dump = Dump(1)
        dump.more["microbatch"] = {"index": k, "count": 2}
        dump.mesh("dp", ["dp_shard"], [0])
        dump.local("w", (3,), "dp", ["Shard(0)"], {0: types.narrow([1.0, -2.0, 448.0], "float8_e4m3fn")},
                   dtype="float8_e4m3fn", gradient_placements=[AVG], scale_inv=scale)
        dumps.append(dump)
    shards = read_shards(accumulate(tool, written(tool, dumps)))
    np.testing.assert_array_equal(shards[0]["w"], np.array([2.5, -5.0, 1120.0], np.float32))


def test_losses_are_normalised_by_tokens_alone(tool):
    """Microbatches with 1 and 3 label tokens: (g1 + g2) / 4. No division by their number; nothing doubles on one rank."""
    paths = []
    for k, g in enumerate((2.0, 6.0)):
        dump = Dump(1, device_mesh="world", pp_enabled=True, num_label_tokens=4, dp_group_size=1)
        dump.more["microbatch"] = {"index": k, "count": 2}
        dump.mesh("world", ["pp", "dp_shard"], [[0]])
        dump.mesh("stage", ["dp_shard"], [0])
        dump.local("w", (2,), "stage", ["Shard(0)"], {0: np.array([g, -g], np.float32)}, gradient_placements=[AVG])
        paths.append(dump.write(tool.fresh("microbatch")))
    out = accumulate(tool, paths)
    assert read_shards(out)[0]["w"].tolist() == [8.0, -8.0]
    _, shards, _ = tool.clip(out, "--no-clip")
    assert shards[0]["w"].tolist() == [2.0, -2.0]


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
        dump = Dump(2, device_mesh="dp", dp_group_size=2)
        dump.more["microbatch"] = {"index": k, "count": len(labels)}
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


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def one(tool, index, count, *, edit=None, placements=("Shard(0)",), recorded=(AVG,), shape=(4,), plain=False):
    dump = Dump(2)
    if index is not None:
        dump.more["microbatch"] = {"index": index, "count": count}
    dump.mesh("dp", ["dp"], [0, 1])
    if plain:
        dump.plain("w", np.ones(4, np.float32))
    else:
        local = {rank: np.ones(shape, np.float32) for rank in range(2)}
        dump.local("w", shape, "dp", list(placements), local, gradient_placements=list(recorded))
    return dump.write(tool.fresh("microbatch"), edit=edit)


def refused_by_accumulate(tool, code, paths, mentions, np_=1, out=None):
    out = out or tool.fresh("out")
    refused(np_, code, paths[0], "accumulate", *paths, "-o", out, mentions=mentions, watched=paths)
    assert not out.with_name(out.name + ".partial").exists()


def test_microbatches_that_do_not_belong_together(tool):
    first, second = one(tool, 0, 2), one(tool, 1, 2)
    for np_ in (1, 3):
        refused_by_accumulate(tool, 3, [first], ["microbatch 0 of 2", "does not end in a reduction"], np_)
    refused_by_accumulate(tool, 3, [first, first], ["microbatch 0, as", "each microbatch once"])
    refused_by_accumulate(tool, 3, [first, one(tool, 1, 3)], ["microbatch 1 of 3", "2 that are given"])
    refused_by_accumulate(tool, 3, [first, one(tool, None, None)], ['no "microbatch"'])
    refused_by_accumulate(tool, 3, [first, one(tool, 1, 2, shape=(6,))], ["parameter 0 'w'", "shape"])
    refused_by_accumulate(tool, 3, [first, one(tool, 1, 2, plain=True)], ["parameter 0 'w'"])

    def other_step(manifest):
        manifest["step"] = None
    refused_by_accumulate(tool, 3, [first, one(tool, 1, 2, edit=other_step)], ["another step"])
    assert run(1, "accumulate", second, first, "-o", tool.fresh("out")).code == 0


@pytest.mark.parametrize("how, mentions", [
    ({"recorded": ["Partial(max)"]}, ["'w'", "Partial(max)", "Partial(avg)"]),
    ({"placements": ["Replicate()"], "recorded": ["Shard(0)"], "shape": (2,)}, ["'w'", "Shard(0)"]),
    ({"plain": True}, ["'w'", "plain tensor on 2 ranks", "give DDP's tensors a mesh"])], ids=["max", "not partial", "plain"])
def test_what_no_reduction_makes(tool, how, mentions):
    if how.get("recorded") == ["Shard(0)"]:
        dump = Dump(2)
        dump.more["microbatch"] = {"index": 0, "count": 1}
        dump.mesh("dp", ["dp"], [0, 1])
        dump.local("w", (4,), "dp", ["Replicate()"], {r: np.ones(2, np.float32) for r in range(2)},
                   gradient_placements=["Shard(0)"])
        path = dump.write(tool.fresh("microbatch"))
    else:
        path = one(tool, 0, 1, **how)
    refused_by_accumulate(tool, 3, [path], mentions)


def test_damage_leaves_nothing(tool):
    path = one(tool, 0, 1)
    (path / "rank_00001.h5").unlink()
    for np_ in (1, 2):
        refused_by_accumulate(tool, 3, [path], ["rank_00001.h5"], np_)


def test_usage(tool):
    first, second = one(tool, 0, 2), one(tool, 1, 2)
    for out in (first, second, second / "below"):
        refused(1, 2, first, "accumulate", first, second, "-o", out, watched=[second])
    refused(1, 2, first, "accumulate", first, second, mentions=["--output OUT is missing"])
    refused(1, 2, first, "accumulate", "-o", tool.fresh("out"), mentions=["DUMP is missing"])
    refused(1, 2, first, "accumulate", first, second, "-o", tool.fresh("out"), "--dtype", "float8_e5m2", mentions=["--dtype"])
    refused(1, 2, first, "accumulate", first, second, "-o", tool.fresh("out"), "--reduce-dtype", "float8_e5m2",
            mentions=["one of float32, bfloat16, float16, float64"])
    refused(1, 2, first, "accumulate", first, second, "-o", tool.fresh("out"), "--sync", "often", mentions=["--sync"])
    refused(1, 2, first, "accumulate", first, second, "-o", tool.fresh("out"), "--report", second / "r.json", watched=[second])
    out = accumulate(tool, [first, second])
    refused(1, 2, first, "accumulate", first, second, "-o", out, mentions=["exists"])
    assert run(1, "accumulate", first, second, "-o", out, "--overwrite").code == 0
