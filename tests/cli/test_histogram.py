"""norms --histogram: every element that the norm counts, by binary exponent and by what casts would do to it, against numpy;
the same from any number of processes; as text, JSON and CSV."""

import csv
import fcntl
import math
import os
import pty
import re
import struct
import termios

import numpy as np
import pytest

import element_types as types
from conftest import DEVICE, LONG, binary, environment, parameter, run, without_run
from dump_builder import Dump
from oracle import Expectation
from test_random import draw

CASTS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def histogram(arrays):
    """As the report has it, of float64 numbers."""
    values = np.concatenate([np.ravel(array) for array in arrays] or [np.empty(0)]).astype(np.float64)
    numbers = values[np.isfinite(values) & (values != 0)]
    exponents = np.frexp(np.abs(numbers))[1] - 1
    first = int(exponents.min()) if exponents.size else None
    result = {"exponents": {"first": first, "counts": np.bincount(exponents - first).tolist() if exponents.size else []},
              "zeros": int((values == 0).sum()), "nan": int(np.isnan(values).sum()),
              "posinf": int((values == math.inf).sum()), "neginf": int((values == -math.inf).sum()), "casts": {}}
    for dtype in CASTS:
        with np.errstate(over="ignore"):
            stored = types.narrow(numbers.astype(np.float32), dtype)  # as PyTorch converts float64
        size = types.BITS[dtype].itemsize * 8
        magnitude = stored.view(types.BITS[dtype]) & np.array(2 ** (size - 1) - 1, types.BITS[dtype])
        result["casts"][dtype] = {"underflow_to_zero": int((magnitude == 0).sum()),
                                  "subnormal": int(((magnitude > 0) & (magnitude < 2 ** types.FIELDS[dtype][1])).sum()),
                                  "overflow": int((~np.isfinite(types.widen(stored, dtype))).sum())}
    return result


def check(report, expectation):
    counted = expectation.counted()
    for entry, arrays in counted:
        assert parameter(report, entry.name)["histogram"] == histogram(arrays), entry.name
    assert report["norm"]["histogram"] == histogram([array for _, arrays in counted for array in arrays])
    for each in [*report["parameters"], report["norm"]]:
        found = each["histogram"]
        assert sum(found["exponents"]["counts"]) + sum(found[k] for k in ("zeros", "nan", "posinf", "neginf")) == each["elements"]


@pytest.mark.parametrize("seed", range(3000, 3200 if LONG else 3016))
def test_random_layouts(tool, seed):
    dump, storage, _ = draw(seed)
    path = dump.write(tool.fresh("dump"), **storage)
    report = tool.norms(path, "--histogram", "--no-scale")
    check(report, Expectation(dump))
    plain = tool.norms(path, "--no-scale")
    assert [p["norm"] for p in plain["parameters"]] == [p["norm"] for p in report["parameters"]]
    assert not any("histogram" in p for p in [*plain["parameters"], plain["norm"]])
    if seed % 4 == 0:
        assert without_run(tool.norms(path, "--histogram", "--no-scale", np=3)) == without_run(report)


def rich():
    """Copies of which one is None, Partial gradients, a tied weight, float8 with its scale, distinct plain tensors, more
    than a block, everything that is not finite."""
    random = np.random.default_rng(5)

    def values(count, dtype="float32"):
        return types.narrow(random.standard_normal(count) * 2.0 ** random.integers(-30, 12, count), dtype)
    dump = Dump(4, pp_enabled=True, pp_axis_name="pp", device_mesh="world", num_label_tokens=24, dp_group_size=2)
    dump.mesh("world", ["pp", "dp"], [[0, 1], [2, 3]])
    dump.mesh("s0", ["dp"], [0, 1])
    tied = values(300_001)
    dump.sharded("embed.weight", tied, "s0", ["Shard(0)"], tied="embed")
    dump.plain("norm.weight", {0: None, 1: values(5000)})
    dump.local("up.weight", (3000,), "s0", ["Partial()"], {0: values(3000, "bfloat16"), 1: values(3000, "bfloat16")},
               dtype="bfloat16")
    dump.local("router.weight", (70,), "s0", ["Partial(avg)"], {0: values(70), 1: None})
    dump.sharded("down.weight", values(150_000, "bfloat16"), "s0", ["Shard(0)"], dtype="bfloat16")
    dump.sharded("copied.weight", values(9000, "float16"), "s0", ["Replicate()"], dtype="float16")
    dump.plain("experts.weight", {2: values(600), 3: values(700)[:600]}, copies="distinct")
    dump.plain("eight.weight", values(5000, "float8_e4m3fn"), ranks=[2, 3], dtype="float8_e4m3fn", scale_inv=0.0173)
    dump.plain("wide.weight", random.standard_normal(4000) * 2.0 ** random.integers(-1000, 900, 4000), ranks=[2],
               dtype="float64")
    special = values(5000)
    special[::7], special[::11], special[::13], special[::17] = math.nan, math.inf, -math.inf, -0.0
    dump.plain("special.weight", special, ranks=[3])
    dump.sharded("head.weight", tied, "s0", ["Shard(0)"], tied="embed")
    return dump


@pytest.fixture(scope="module")
def rich_dump(tmp_path_factory):
    dump = rich()
    return dump, dump.write(tmp_path_factory.mktemp("rich") / "dump")


@pytest.mark.parametrize("zero", [False, True])
def test_everything_that_a_dump_can_have(tool, rich_dump, zero):
    dump, path = rich_dump
    args = ["--histogram", *(["--nonfinite", "zero"] if zero else [])]
    report = tool.norms(path, *args)
    check(report, Expectation(dump, tokens=12.0, zero=zero))
    assert parameter(report, "head.weight")["histogram"] == parameter(report, "embed.weight")["histogram"]
    for np_, more in ((3, []), (1, ["--threads", "3"]), (1, ["--numerics", "automodel-cpu"])):
        other = tool.norms(path, *args, *more, np=np_)
        assert [p["histogram"] for p in other["parameters"]] == [p["histogram"] for p in report["parameters"]]
        assert other["norm"]["histogram"] == report["norm"]["histogram"]


def test_boundaries(tool):
    edges = [464, np.nextafter(np.float32(464), np.float32(1e9)), 480, 61439, 61440, 65519, 65520, 2.0 ** -10,
             np.nextafter(np.float32(2.0 ** -10), np.float32(1)), 2.0 ** -25, 2.0 ** -24, 2.0 ** -14 - 2.0 ** -25, 3.4e38]
    dump = Dump(1)
    for i, edge in enumerate(edges):
        dump.plain(f"edge{i}", np.array([edge, -edge], np.float32))
    report = tool.norms(dump.write(tool.fresh("dump")), "--histogram")
    check(report, Expectation(dump))

    def fate(i):
        casts = parameter(report, f"edge{i}")["histogram"]["casts"]
        return "".join(next((letter for letter, key in (("z", "underflow_to_zero"), ("s", "subnormal"), ("o", "overflow"))
                             if casts[dtype][key] == 2), ".") for dtype in CASTS)
    assert [fate(i) for i in range(len(edges))] == [
        "....", "..o.", "..o.", "..o.", "..oo", "..oo", "o.oo", "..z.", "..s.", "z.zz", "s.zz", "..z.", "oooo"]


def test_millions_of_nan(tool):
    count = 128_000_000 if LONG else 1_280_000
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("weight", np.full(count, math.nan, np.float32), "dp", ["Shard(0)"])
    path = dump.write(tool.fresh("dump"), checksums=False, chunks=(65536,), compression="gzip", shuffle=True)
    report = tool.norms(path, "--histogram", timeout=300)
    nothing = {"underflow_to_zero": 0, "subnormal": 0, "overflow": 0}
    assert report["norm"]["histogram"] == {
        "exponents": {"first": None, "counts": []}, "zeros": 0, "nan": count, "posinf": 0, "neginf": 0,
        "casts": dict.fromkeys(CASTS, nothing)}
    text = run(1, "norms", path, "--histogram", timeout=300).out
    assert f"{count:,} NaN (100.00 % of all) in 1 parameter" in text
    assert [line.split() for line in charts(text)[1][1:]] == [[dtype, "0", "-", "0", "-", "0", "-"] for dtype in CASTS]


def shown():
    dump = Dump(1)
    dump.plain("layers.0.mlp.up.weight", np.repeat(2.0 ** np.arange(-12, 4), [1, 1, 2, 4, 8, 16, 32, 64, 64, 32, 16, 8, 4, 2, 1, 1]))
    dump.plain("layers.0.norm.weight", np.full(100, 2.0 ** -30, np.float32))
    dump.plain("layers.1.zero.weight", np.zeros(10, np.float32))
    return dump


def charts(out):
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("binary exponents"))
    end = lines.index("", first)
    casts = lines[end + 1:lines.index("", end + 1)]
    return lines[first + 1:end], casts


def test_text(tool):
    path = shown().write(tool.fresh("dump"))
    axis, *rows = charts(run(1, "norms", path, "--histogram", env={"LC_ALL": "C"}).out)[0]
    assert axis.split() == ["2^-30", "2^-20", "2^-10", "2^0", "float16", "bfloat16", "e4m3fn", "e5m2"]
    begin = axis.index("2^-30")
    assert [axis.index(f"2^{e}") - begin for e in (-20, -10, 0)] == [10, 20, 30]
    # A column for each exponent from -30 to 3, eighths of the highest one.
    assert [row[begin:begin + 34] for row in rows] == [
        " " * 18 + ".....:=@@=:.....", "@" + " " * 33, " " * 34, "@" + " " * 17 + "......-++-......"]
    up, norm, zero, total = rows
    assert up.split()[0] == "layers.0.mlp.up.weight" and total.split()[0] == "total"
    assert norm[begin + 34:].split() == ["100.00", "%", "0.00", "%", "100.00", "%", "100.00", "%"]
    assert zero.split() == ["layers.1.zero.weight", "-", "-", "-", "-"]
    in_utf8 = run(1, "norms", path, "--histogram", env={"LC_ALL": "C.UTF-8"}).out
    assert "█" in in_utf8 and "▁" in in_utf8 and "@" not in in_utf8
    for variables in ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, {"LC_ALL": "", "LC_CTYPE": "POSIX", "LANG": "C.UTF-8"}):
        assert run(1, "norms", path, "--histogram", env=variables).out.isascii()
    assert "\x1b[" in run(1, "norms", path, "--histogram", "--color", "always").out


def on_a_terminal(columns, *args):
    """What the program writes to a terminal of that width."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.execve(binary(), [binary(), *map(str, args)], environment(LC_ALL="C.UTF-8", TERM="dumb"))
    written = b""
    try:
        while part := os.read(terminal, 65536):
            written += part
    except OSError:  # the program has ended
        pass
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    return written.decode().replace("\r\n", "\n")


def test_text_keeps_to_the_terminal(rich_dump):
    _, path = rich_dump
    for columns in (76, 90, 200):
        axis, *rows = charts(on_a_terminal(columns, "norms", path, "--histogram"))[0]
        assert max(map(len, [axis, *rows])) <= columns
        assert len({row.split()[0] for row in rows}) == len(rows) == 12
        end = axis.index("float16") - 3
        assert all(len(row) == len(axis) for row in rows)
        drawn = {row.split()[0]: row[:end] for row in rows}
        assert all(any(block in row for block in "▁▂▃▄▅▆▇█") for row in drawn.values())
    out = run(1, "norms", path, "--histogram").out  # from 2^-1002 to 2^901 in at most 80 columns
    assert re.search(r"^binary exponents, 2\d a column", out, re.M), out
    assert len(charts(out)[0][0]) <= 20 + 80 + 40


def test_text_of_casts(tool):
    path = shown().write(tool.fresh("dump"))
    _, casts = charts(run(1, "norms", path, "--histogram").out)
    assert casts[0].split() == ["cast", "to", "underflow", "to", "0", "subnormal", "overflow"]
    assert [line.split() for line in casts[1:]] == [
        ["float16", "100", "28.09", "%", "0", "0.00", "%", "0", "0.00", "%"],
        ["bfloat16", "0", "0.00", "%", "0", "0.00", "%", "0", "0.00", "%"],
        ["float8_e4m3fn", "104", "29.21", "%", "28", "7.87", "%", "0", "0.00", "%"],
        ["float8_e5m2", "100", "28.09", "%", "0", "0.00", "%", "0", "0.00", "%"]]


def test_views_have_theirs(tool):
    dump = shown()
    path = dump.write(tool.fresh("dump"))
    report = tool.norms(path, "--histogram", "--by", "module", "--depth", "2")
    arrays = [types.widen(p.shards[0], p.dtype) for p in dump.parameters]
    assert [line["histogram"] for line in report["view"]["lines"]] == [histogram(arrays[:2]), histogram(arrays[2:])]
    rows = charts(run(1, "norms", path, "--histogram", "--by", "module", "--depth", "2").out)[0]
    assert [row.split()[0] for row in rows[1:]] == ["layers.0", "layers.1", "total"]
    by_rank = tool.norms(path, "--histogram", "--by", "rank")
    assert "histogram" not in by_rank["view"]["lines"][0] and by_rank["norm"]["histogram"] == report["norm"]["histogram"]
    assert [row.split()[0] for row in charts(run(1, "norms", path, "--histogram", "--by", "rank").out)[0][1:]] == ["total"]
    top = charts(run(1, "norms", path, "--histogram", "--top", "1").out)[0]
    assert [row.split()[0] for row in top[1:]] == ["layers.0.mlp.up.weight", "total"]


def test_csv(tool, rich_dump):
    _, path = rich_dump
    for by, name in (("parameter", "name"), ("module", "module")):
        table = tool.fresh("report").with_suffix(".csv")
        report = tool.norms(path, "--histogram", "--by", by, "--report", table)
        with open(table, newline="") as file:
            rows = list(csv.DictReader(file))
        entries = report["parameters"] if by == "parameter" else report["view"]["lines"]
        assert [row[name] for row in rows] == [entry["name"] for entry in entries]
        for row, entry in zip(rows, entries):
            found = entry["histogram"]
            assert row["exponents_first"] == ("" if found["exponents"]["first"] is None else str(found["exponents"]["first"]))
            assert [int(n) for n in row["exponents_counts"].split()] == found["exponents"]["counts"]
            for dtype in CASTS:
                for key, count in found["casts"][dtype].items():
                    assert int(row[f"{dtype}_{key}"]) == count
    plain = tool.fresh("report").with_suffix(".csv")
    tool.norms(path, "--report", plain)
    assert "exponents" not in plain.read_text().splitlines()[0]


@pytest.mark.skipif(bool(DEVICE), reason="the command line's own")
def test_only_norms_takes_it(tool, rich_dump):
    _, path = rich_dump
    assert run(1, "inspect", path, "--histogram").code == 2
