"""norms --by: each view takes the model apart so that the p-th powers of its lines add up to the total's, on any layout and
for any p; and how a view looks as text, JSON and CSV."""

import csv
import math

import numpy as np
import pytest

from conftest import GOLDEN, LONG, close, number, refused, run, without_run
from dump_builder import Dump
from test_random import draw

VIEWS = ["module", "group", "stage", "dtype", "rank"]


def view(tool, path, by, *args, **how):
    report = tool.norms(path, "--by", by, *args, **how)
    assert report["view"]["by"] == by
    return report, report["view"]["lines"]


def check_sum(report, lines, p):
    """Together the lines are the whole: elements, counts, powers of norms, shares."""
    total = number(report["norm"]["total"])
    for key in ("elements", "zeros", "subnormals", "nan", "posinf", "neginf"):
        assert sum(line[key] for line in lines) == report["norm"][key], key
    assert max((number(line["max_abs"]) for line in lines), default=0) == number(report["norm"]["max_abs"])
    norms = [number(line["norm"]) for line in lines]
    shares = [number(line["share"]) for line in lines]
    if not math.isfinite(total):
        assert any(not math.isfinite(norm) for norm in norms)
        assert all(math.isnan(share) for share in shares)
        return
    if total == 0:
        assert not any(norms) and not any(shares)
        return
    if math.isinf(p):
        assert max(norms) == total
        assert shares == [1.0 if norm == total else 0.0 for norm in norms]
        return
    assert math.isclose(math.fsum((norm / total) ** p for norm in norms), 1, rel_tol=1e-12)
    assert math.isclose(math.fsum(shares), 1, rel_tol=1e-12)
    for norm, share in zip(norms, shares):
        assert math.isclose((norm / total) ** p, share, rel_tol=1e-9, abs_tol=1e-300)


@pytest.mark.parametrize("seed", range(1000, 1200 if LONG else 1012))
def test_powers_add_up(tool, seed):
    dump, storage, random = draw(seed)
    path = dump.write(tool.fresh("dump"), **storage)
    p = [1, 2, 3.5, math.inf][seed % 4]
    for by in VIEWS:
        report, lines = view(tool, path, by, "--norm-type", str(p))
        check_sum(report, lines, p)
        many = view(tool, path, by, "--norm-type", str(p), np=3)[0] if by == "rank" or LONG else report
        assert without_run(many) == without_run(report)
    for depth in (1, 2, 9):
        report, lines = view(tool, path, "module", "--norm-type", str(p), "--depth", str(depth))
        assert report["view"]["depth"] == depth
        check_sum(report, lines, p)


@pytest.mark.parametrize("case", ["fsdp_tp", "fsdp_tp_plain", "pp_fsdp", "moe_ep", "tied_pp", "tp2_sequence", "uneven", "ddp"])
@pytest.mark.parametrize("p", [2, math.inf])
def test_recorded_dumps(tool, case, p):
    path = GOLDEN / case / "dump"
    for by in VIEWS:
        report, lines = view(tool, path, by, "--norm-type", str(p))
        check_sum(report, lines, p)
        if by in ("group", "stage", "dtype"):
            entries = report[by + "s"]
            assert [(e["parameters"], e["norm"], e["share"]) for e in entries] == [
                (line["parameters"], line["norm"], line["share"]) for line in lines]


def model():
    """Two stages of two ranks; a tied weight, copies of which one is None, a Partial gradient, experts."""
    dump = Dump(4, device_mesh="world", pp_enabled=True, pp_axis_name="pp")
    dump.mesh("world", ["pp", "dp"], [[0, 1], [2, 3]])
    dump.mesh("s0", ["dp"], [0, 1])
    dump.mesh("s1", ["dp"], [2, 3])
    dump.sharded("embed.weight", np.full(4, 1, np.float32), "s0", ["Shard(0)"], tied="embed")
    dump.plain("layers.0.norm.weight", {0: None, 1: np.full(4, 2, np.float32)})
    dump.local("layers.0.mlp.up.weight", (4,), "s0", ["Partial()"], {0: np.ones(4, np.float32), 1: np.full(4, 2, np.float32)})
    dump.sharded("layers.1.mlp.up.weight", np.full(8, 3, np.float32), "s1", ["Shard(0)"], dtype="bfloat16")
    dump.plain("experts.weight", {2: np.full(2, 4, np.float32), 3: np.full(2, 5, np.float32)}, copies="distinct")
    dump.plain("scale", np.full(3, 6, np.float32), ranks=[2, 3])
    dump.sharded("head.weight", np.full(4, 1, np.float32), "s1", ["Shard(0)"], tied="embed")
    return dump


EXPECTED = {  # sums of squares
    ("module",): {"embed": 4, "layers.0.norm": 16, "layers.0.mlp.up": 36, "layers.1.mlp.up": 72, "experts": 82, "": 108, "head": 0},
    ("module", "--depth", "1"): {"embed": 4, "layers": 124, "experts": 82, "": 108, "head": 0},
    ("module", "--depth", "2"): {"embed": 4, "layers.0": 52, "layers.1": 72, "experts": 82, "": 108, "head": 0},
    ("stage",): {"0": 56, "1": 262},
    ("dtype",): {"float32": 246, "bfloat16": 72},
    ("rank",): {"0": 2 + 36, "1": 2 + 16, "2": 36 + 32 + 108, "3": 36 + 50},
}


@pytest.mark.parametrize("args", EXPECTED, ids=" ".join)
def test_each_line_by_hand(tool, args):
    path = model().write(tool.fresh("dump"))
    for np_ in (1, 3):
        report, lines = view(tool, path, *args, np=np_)
        assert {line["name"]: round(number(line["norm"]) ** 2, 6) for line in lines} == EXPECTED[args]
        check_sum(report, lines, 2)
    if args == ("rank",):
        assert [line["parameters"] for line in lines] == [3, 3, 4, 4]


def test_order_and_top(tool):
    path = model().write(tool.fresh("dump"))

    def shown(*args):
        out = run(1, "norms", path, "--by", "module", *args).out.splitlines()
        table = out[3:out.index("", 3)]
        return [line.split()[0] for line in table[1:]]
    assert shown() == ["embed", "layers.0.norm", "layers.0.mlp.up", "layers.1.mlp.up", "experts", "(root)", "head", "total"]
    assert shown("--top", "2") == ["(root)", "experts", "...", "total"]
    assert shown("--sort", "name")[0] == "(root)" and shown("--sort", "name")[1] == "embed"
    assert shown("--sort", "max", "--top", "1") == ["(root)", "...", "total"]
    assert "... 1 of 7 modules shown" in run(1, "norms", path, "--by", "module", "--top", "1").out


def test_csv_of_a_view(tool):
    path = model().write(tool.fresh("dump"))
    for by in VIEWS:
        table = tool.fresh("report").with_suffix(".csv")
        result = run(2, "norms", path, "--by", by, "--report", table, "--format", "json")
        assert result.code == 0, result
        with open(table, newline="") as file:
            rows = list(csv.DictReader(file))
        lines = result.json()["view"]["lines"]
        assert [row[by] for row in rows] == [line["name"] for line in lines]
        for row, line in zip(rows, lines):
            assert float(row["norm"]) == number(line["norm"]) and int(row["elements"]) == line["elements"]


def test_the_first_nonfinite_value_stands_on_top(tool):
    dump = model()
    dump.parameters[3].shards[3] = np.array([0x4040, 0x7FC0, 0x7F80, 0x4040], np.uint16)
    path = dump.write(tool.fresh("dump"))
    for by in ["parameter", *VIEWS]:
        lines = run(1, "norms", path, "--by", by, "--sort", "nan").out.splitlines()
        assert lines[3] == "first NaN or infinity in model order: layers.1.mlp.up.weight [5] on rank 3 (1 NaN, 1 +inf)"
    report, lines = view(tool, path, "rank")
    check_sum(report, lines, 2)
    assert [line["nan"] for line in lines] == [0, 0, 0, 1]
    assert "first NaN" not in run(1, "norms", model().write(tool.fresh("dump"))).out


def test_what_a_view_cannot_be(tool):
    path = model().write(tool.fresh("dump"))
    refused(1, 2, path, "norms", path, "--by", "layer", mentions=["module", "rank"])
    refused(1, 2, path, "norms", path, "--by", "rank", "--depth", "1", mentions=["--depth", "module"])
    assert tool.norms(path, env={"GRADCLIP_DEPTH": "1"}).get("view") is None
