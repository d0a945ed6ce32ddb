"""norms --sweep: how often and how hard max norms would have clipped several steps, against the oracle's coefficient."""

import csv
import math
import statistics

import numpy as np
import pytest

from conftest import close, finding, number, refused, run, without_run
from dump_builder import Dump
from oracle import Expectation, coefficient_of

MAX_NORMS = [0.0, 0.5, 1.0, 2.0, 5.0, math.inf]
LIST = "0,0.5,1,2,5,inf"


def step(number_, size, *, value=None, **more):
    dump = Dump(2, step=number_, **more)
    dump.mesh("dp", ["dp"], [0, 1])
    values = np.random.default_rng(number_).standard_normal(200).astype(np.float32)
    dump.sharded("layers.0.weight", values * np.float32(size / np.linalg.norm(values)), "dp", ["Shard(0)"])
    if value is not None:
        dump.plain("layers.0.bias", np.array([1, value], np.float32))
    return dump


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Given out of order; one whose total is NaN, one infinite."""
    folder = tmp_path_factory.mktemp("steps")
    dumps = [step(30, 3.0), step(10, 0.25, max_grad_norm=1.0), step(20, 40.0), step(50, 1.0, value=math.nan),
             step(40, 1.0, value=math.inf), step(60, 0.9)]
    return [(dump, dump.write(folder / f"step{dump.step}")) for dump in dumps]


def expected(totals, max_norms):
    lines = []
    finite = [total for total in totals if math.isfinite(total)]
    for max_norm in max_norms:
        coefficients = [coefficient_of(total, max_norm) for total in finite]
        lines.append({"max_norm": max_norm, "clipped": sum(c < 1 for c in coefficients), "steps": len(finite),
                      "min": min(coefficients), "median": statistics.median(coefficients),
                      "mean": sum(coefficients) / len(finite)})
    return lines


def check(report, totals, max_norms):
    assert len(report["sweep"]) == len(max_norms)
    for line, right in zip(report["sweep"], expected(totals, max_norms)):
        assert number(line["max_norm"]) == right["max_norm"]
        assert (line["clipped"], line["steps"]) == (right["clipped"], right["steps"])
        for key in ("min", "median", "mean"):
            assert close(line["coefficient"][key], right[key]), (line, right)


def test_against_the_oracle(tool, steps):
    paths = [path for _, path in steps]
    report = tool.norms(*paths, "--sweep", LIST)
    order = sorted(steps, key=lambda pair: pair[0].step)
    assert [(s["path"], s["step"], s["type"]) for s in report["steps"]] == [(str(p), d.step, 2) for d, p in order]
    totals = [Expectation(dump).total() for dump, _ in order]
    assert all(close(s["total"], total) for s, total in zip(report["steps"], totals))
    assert report["nonfinite_steps"] == 2
    check(report, totals, MAX_NORMS)
    assert "dump" not in report and "parameters" not in report and report["command"] == "norms"
    assert [f["kind"] for f in report["findings"]] == ["nonfinite"] * 2
    assert [s["findings"] for s in report["steps"]] == [0, 0, 0, 1, 1, 0]
    assert str(order[3][1]) in report["findings"][0]["message"]
    assert without_run(tool.norms(*paths, "--sweep", LIST, np=3)) == without_run(report)


def test_totals_are_those_of_norms(tool, steps):
    path = steps[0][1]
    for args in ([], ["--norm-type", "inf"], ["--norm-type", "1"]):
        alone = tool.norms(path, *args)
        swept = tool.norms(path, "--sweep", "1", *args)
        assert swept["steps"] == [{"path": str(path), "step": 30, "type": alone["norm"]["type"],
                                   "total": alone["norm"]["total"], "findings": 0}]
    for numerics in ("automodel-cpu", "automodel"):
        seen = tool.norms(path, "--numerics", numerics, "--max-norm", "0.7")["reference"]["totals"]
        swept = tool.norms(path, "--numerics", numerics, "--sweep", "0.7")
        assert swept["sweep"][0]["coefficient"]["min"] == min(total["coefficient"] for total in seen)


def test_ranges(tool, steps):
    paths = [path for _, path in steps[:2]]

    def max_norms(spec):
        return [number(line["max_norm"]) for line in tool.norms(*paths, "--sweep", spec)["sweep"]]
    assert np.allclose(max_norms("0.1:10"), np.geomspace(0.1, 10, 9), rtol=1e-14)
    assert np.allclose(max_norms("1e-3:5:7"), np.geomspace(1e-3, 5, 7), rtol=1e-14)
    assert max_norms("0.5:0.6") == [0.5, 0.6]
    assert max_norms("3") == [3.0]
    assert max_norms("2,1,0x1p-2") == [2.0, 1.0, 0.25]


@pytest.mark.parametrize("spec", ["", "x", "1:", ":1", "0:1", "2:1", "1:1", "1:2:1", "1:2:1001", "1:2:3:4", "1,,2", "-1", "nan",
                                  "1,-2", "1:inf", "1e-300:1e300:x"])
def test_specifications_that_are_refused(tool, steps, spec):
    refused(1, 2, steps[0][1], "norms", steps[0][1], f"--sweep={spec}" if spec else "--sweep=", mentions=["sweep"])


def test_what_does_not_go_together(tool, steps):
    one, two = steps[0][1], steps[1][1]
    refused(1, 2, one, "norms", one, two, mentions=["--sweep"])
    for args in (["--histogram"], ["--by", "module"], ["--top", "3"], ["--max-norm", "1"]):
        refused(1, 2, one, "norms", one, two, "--sweep", "1", *args, mentions=["--sweep", args[0]])
    assert len(tool.norms(one, "--sweep", "1", env={"GRADCLIP_HISTOGRAM": "1", "GRADCLIP_TOP": "2"})["sweep"]) == 1
    assert tool.norms(one, env={"GRADCLIP_SWEEP": "1,2"})["sweep"][1]["max_norm"] == 2


def test_an_error_names_the_dump(tool, steps):
    good = steps[0][1]
    refused(1, 3, good, "norms", good, tool.folder / "nowhere", "--sweep", "1", mentions=["nowhere"])
    torn = step(70, 2.0).write(tool.fresh("torn"))
    (torn / "rank_00001.h5").unlink(missing_ok=True)
    for file in sorted(torn.glob("rank_*1.h5")):
        file.unlink()
    refused(1, 3, good, "norms", good, torn, "--sweep", "1", mentions=[str(torn)])
    refused(3, 3, good, "norms", good, torn, "--sweep", "1", mentions=[str(torn)])
    no_axis = step(80, 2.0, pp_enabled=True).write(tool.fresh("no_axis"))
    refused(1, 3, good, "norms", good, no_axis, "--sweep", "1", mentions=[str(no_axis), "device_mesh"])


def test_exit_codes(tool, steps):
    finite, nan = steps[0][1], steps[3][1]
    assert run(1, "norms", finite, "--sweep", "1", "--strict").code == 0
    assert run(1, "norms", finite, nan, "--sweep", "1", "--strict").code == 1
    result = run(1, "norms", nan, finite, "--sweep", "1", "--nonfinite", "error", "--format", "json")
    assert result.code == 4 and result.json()["nonfinite_steps"] == 1, result
    assert str(nan) in result.err and str(finite) not in result.err
    suites = tool.folder / "sweep.xml"
    assert run(1, "norms", finite, nan, "--sweep", "1", "--report", suites).code == 0
    assert '<testsuite name="gradclip norms --sweep of 2 dumps"' in suites.read_text()
    zeroed = tool.norms(finite, nan, "--sweep", "1", "--nonfinite", "zero")
    assert zeroed["nonfinite_steps"] == 0 and zeroed["sweep"][0]["steps"] == 2


def test_without_a_finite_step(tool, steps):
    report = tool.norms(steps[3][1], "--sweep", "1")
    assert report["sweep"] == [{"max_norm": 1, "clipped": 0, "steps": 0,
                                "coefficient": {"min": None, "median": None, "mean": None}}]
    assert finding(report, "nonfinite")


def test_text_and_csv(tool, steps):
    paths = [path for _, path in steps]
    table = tool.fresh("report").with_suffix(".csv")
    result = run(1, "norms", *paths, "--sweep", "0.5,1", "--report", table)
    assert result.code == 0 and result.err == "", result
    lines = result.out.splitlines()
    assert lines[0].startswith("gradclip norms --sweep 6 steps")
    at = lines.index(next(line for line in lines if line.startswith("    max norm")))
    assert lines[at + 1].split()[:6] == ["0.5", "3", "of", "4", "75.00", "%"]
    assert lines[at + 2].split()[:6] == ["1", "2", "of", "4", "50.00", "%"]
    assert "the total of 2 steps" in result.out and "nonfinite" in result.out
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    report = tool.norms(*paths, "--sweep", "0.5,1")
    for row, line in zip(rows, report["sweep"], strict=True):
        assert float(row["max_norm"]) == line["max_norm"] and int(row["clipped"]) == line["clipped"]
        assert float(row["coefficient_mean"]) == line["coefficient"]["mean"]
