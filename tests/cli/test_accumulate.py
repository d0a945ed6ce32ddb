"""`accumulate`: microbatches' gradients as the step has them after its reductions, against numpy, bit for bit."""

import numpy as np
import pytest

import element_types as types
from accumulation import AVG, LAYOUTS, accumulate, expected_shards, factors, microbatches, one, verified, written
from conftest import assert_shards, kinds, refused, run, tree
from dump_builder import Dump, read_shards


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
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


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
