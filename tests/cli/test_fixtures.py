"""The table of public bug reports: what is right, and the wrong answers that were seen elsewhere."""

import math

import numpy as np
import pytest

import oracle
from conftest import assert_shards, close, finding, kinds, number, parameter
from dump_builder import Dump


def check(tool, dump, total, *, counts=(1, 2), args=(), relative=4e-15, **how):
    """The total, the coefficient, what was written and its norm: against the given total and the oracle."""
    path = dump.write(tool.fresh("dump"))
    report, shards, out = tool.everywhere(path, *args, counts=counts)
    expected = oracle.Expectation(dump, **how)
    p, max_norm = dump.training.get("norm_type", 2.0), dump.training.get("max_grad_norm")
    assert close(report["norm"]["total"], total, relative)
    assert close(report["norm"]["total"], expected.total(float(p)))
    coefficient = oracle.coefficient_of(number(report["norm"]["total"]), max_norm)
    assert report["clip"]["coefficient"] == coefficient
    assert report["clip"]["max_norm"] == max_norm
    assert report["clip"]["clipped"] is (coefficient is not None and coefficient < 1)
    assert_shards(shards, expected.shards(coefficient))
    assert close(report["clip"]["total_after"], expected.total(float(p), coefficient))
    return report, shards


def test_experts_local_to_a_rank(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp_shard"], [0, 1])
    dump.sharded("dense.weight", np.ones(16, np.float32), "dp", ["Shard(0)"])
    dump.plain("expert.weight", {0: np.full(16, 10, np.float32), 1: np.full(16, 0.1, np.float32)}, copies="distinct")
    tenth = float(np.float32(0.1))
    report, _ = check(tool, dump, math.sqrt(16 + 1600 + 16 * tenth ** 2))
    assert close(report["norm"]["total"], 40.2014925, 1e-9)
    totals = report["reference"]["totals"]
    assert [t["ranks"] for t in totals] == [[0], [1]]
    assert close(totals[0]["total"], math.sqrt(1616)) and close(totals[0]["total"], 40.199502, 1e-7)
    assert close(totals[1]["total"], math.sqrt(16 + 16 * tenth ** 2)) and close(totals[1]["total"], 4.019950, 1e-6)
    assert finding(report, "ranks-disagree")["ranks"] == [0, 1]
    assert report["norm"]["elements"] == 48


def test_partial_is_added_before_it_is_measured(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("tp", ["tp"], [0, 1])
    dump.local("weight", [2], "tp", ["Partial(sum)"], {0: np.float32([1, 3]), 1: np.float32([2, 1])})
    report, _ = check(tool, dump, 5.0)
    assert [t["total"] for t in report["reference"]["totals"]] == [5.0]
    assert report["norm"]["elements"] == 2


def test_tied_weight_counts_once(tool):
    dump = Dump(2, max_grad_norm=1.0, pp_enabled=True, pp_axis_name="pp", device_mesh="world")
    dump.mesh("world", ["pp"], [0, 1])
    for stage in (0, 1):
        dump.plain("embed.weight", np.full(8, 10, np.float32), ranks=[stage], tied="embedding")
    report, _ = check(tool, dump, 28.284271247, relative=1e-10)
    assert [p["counted"] for p in report["parameters"]] == [True, False]
    assert [p["share"] for p in report["parameters"]] == [1, 0]
    assert [close(t["total"], 40.0) for t in report["reference"]["totals"]] == [True]
    assert "tied-differ" not in kinds(report)


def test_float16_300_does_not_overflow(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("weight", np.float16([300]), "dp", ["Shard(0)"])
    report, shards = check(tool, dump, 300.0)
    assert abs(float(shards[0]["weight"][0]) - 1) <= 2 ** -11 and shards[1]["weight"].shape == (0,)


@pytest.mark.parametrize("count, value, total", [(128, 1e19, 1.1313708e20), (100, 1e20, 1e21)])
def test_float32_squares_beyond_its_range(tool, count, value, total):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("weight", np.full(count, value, np.float32), "dp", ["Shard(0)"])
    report, shards = check(tool, dump, total, relative=1e-7)
    assert all((s["weight"] > 0).all() for s in shards.values()) and kinds(report) == []


@pytest.mark.parametrize("p, total, counts", [(2, 2.0, (1, 2, 4)), (1, 4.0, (1, 3)), ("inf", 1.0, (1, 4))])
def test_uneven_empty_and_absent(tool, p, total, counts):
    dump = Dump(4, max_grad_norm=1.0, norm_type=p)  # rank 3 holds no tensor at all
    dump.mesh("dp", ["dp"], [0, 1, 2])
    dump.sharded("weight", np.ones(4, np.float32), "dp", ["Shard(0)"])
    report, shards = check(tool, dump, total, counts=counts)
    assert [len(shards[r].get("weight", "x" * 9)) for r in range(4)] == [2, 2, 0, 9]
    assert number(report["norm"]["type"]) == float(p)


def test_a_rank_without_tensors_is_no_obstacle_to_pipelining(tool):
    dump = Dump(4, device_mesh="world", max_grad_norm=1.0, pp_enabled=True)
    dump.mesh("world", ["pp", "dp"], [[0, 1], [2, 3]])
    dump.mesh("stage0", ["dp"], [0, 1])
    dump.sharded("weight", np.ones(4, np.float32), "stage0", ["Shard(0)"])
    report, _ = check(tool, dump, 2.0, counts=(1, 4))
    assert all(t["total"] == 2.0 for t in report["reference"]["totals"])


def test_label_tokens_and_expert_ratio(tool):
    dump = Dump(8, device_mesh="world", moe_mesh="moe", pp_enabled=True, num_label_tokens=8, dp_group_size=4,
                ep_axis_name="ep")
    dump.mesh("world", ["pp", "dp_shard"], [[0, 1, 2, 3], [4, 5, 6, 7]])
    dump.mesh("stage0", ["dp_shard"], [0, 1, 2, 3])
    dump.mesh("moe", ["ep_shard", "ep"], [[0, 1], [2, 3]])
    dump.sharded("dense.weight", np.full(8, 8, np.float32), "stage0", ["Shard(0)"])
    dump.sharded("experts.weight", np.full((4, 4), 8, np.float32), "moe", ["Shard(1)", "Shard(0)"])
    dump.plain("layers.0.mlp.experts.down_linear.weight3", np.full(2, 8, np.float32), ranks=[4], copies="distinct")
    report, shards = check(tool, dump, math.sqrt(8 * 16 + 16 * 4 + 2 * 4), tokens=2.0, expert=2.0, ep_axis="ep",
                           counts=(1, 3))
    assert set(shards[0]["dense.weight"].flat) == {4.0} and set(shards[3]["experts.weight"].flat) == {2.0}
    assert set(shards[4]["layers.0.mlp.experts.down_linear.weight3"].flat) == {2.0}
    assert (report["scale"]["label_token_divisor"], report["scale"]["expert_divisor"]) == (2.0, 2.0)
    assert [p["expert"] for p in report["parameters"]] == [False, True, True]
    assert report["clip"]["coefficient"] is None and report["clip"]["clipped"] is False


def test_weight_and_bias_of_tens(tool):
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain("weight", np.full((10, 10), 10, np.float32))
    dump.plain("bias", np.full(10, 10, np.float32))
    report, _ = check(tool, dump, 104.880885, relative=1e-8)
    assert close(report["clip"]["total_after"], 1.0, 1e-6)
    assert close(parameter(report, "bias")["share"], 1 / 11)


def test_6e31_and_4(tool):
    dump = Dump(1, max_grad_norm=0.3)
    dump.plain("weight", np.float32([[6e31, 4]]))
    report, shards = check(tool, dump, float(np.float32(6e31)), counts=(1, 3))
    assert math.isfinite(report["norm"]["total"]) and report["norm"]["total"] > 1e31
    assert report["clip"]["total_after"] <= 0.3 * (1 + 2 ** -23)
    assert np.isfinite(shards[0]["weight"]).all()


def test_empty_shard_on_rank_1(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("weight", np.float32([[3, 4]]), "dp", ["Shard(0)"])
    _, shards = check(tool, dump, 5.0, counts=(1, 2, 4))
    assert np.allclose(shards[0]["weight"], [[0.6, 0.8]], rtol=1e-6) and shards[1]["weight"].shape == (0, 2)
