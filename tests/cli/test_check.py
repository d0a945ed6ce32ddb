"""check DUMP --baseline FILE: numbers against numpy, every way to regress, what --update writes, bad baselines, and what CI
systems read: JUnit, annotations, step summaries, CSV."""

import csv
import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from conftest import finding, kinds, number, parse_report, refused, run, tree, without_run
from dump_builder import Dump

HOSTILE = "::error::x,y|<b>%0A`@me`\n]]>\"&\x1b[31m\ufffe"
FORMULA = "=cmd|' /C calc'!A0"


def values(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model(change=None, *, extra=None, **training):
    """Two ranks, sharded and whole tensors, one of names that bite."""
    tensors = {"layers.0.weight": values(1, (8, 6)), "layers.1.weight": values(2, (4, 4)), "bias": values(3, 5),
               HOSTILE: values(4, 3), FORMULA: values(5, 2)}
    tensors["layers.1.weight"][0, 0] = 0
    for name, tensor in (change or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    dump = Dump(2, **training)
    dump.mesh("m", ["dp"], [0, 1])
    for name, tensor in {**tensors, **(extra or {})}.items():
        if name.startswith("layers"):
            dump.sharded(name, tensor, "m", ["Shard(0)"])
        else:
            dump.plain(name, tensor)
    return dump, tensors


def norm_of(tensor, p=2.0):
    wide = np.abs(np.asarray(tensor, np.float64)).reshape(-1)
    return float(wide.max()) if math.isinf(p) else math.fsum(wide ** p) ** (1 / p)


def check(dump, baseline, *args, code=0, np=1, **how):
    result = run(np, "check", dump, "--baseline", baseline, "--format", "json", *args, **how)
    assert result.code == code, result
    assert result.err == "", result
    return result.json()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A dump and its baseline. Tests change neither."""
    folder = tmp_path_factory.mktemp("good")
    path = model()[0].write(folder / "dump")
    result = run(1, "check", path, "--baseline", folder / "baseline.json", "--update")
    assert result.code == 0 and result.err == "", result
    return path, folder / "baseline.json"


def altered(good, tool, edit):
    """A copy of the baseline with its document edited."""
    document = json.loads(good[1].read_text())
    edit(document)
    path = tool.fresh("baseline").with_suffix(".json")
    path.write_text(json.dumps(document))
    return path


def entry(document, name):
    return next(each for each in document["parameters"] if each["name"] == name)


def test_the_baseline_is_what_numpy_measures(good):
    text = good[1].read_text()
    document = json.loads(text)
    tensors = model()[1]
    assert (document["format"], document["version"], document["step"]) == ("gradclip.baseline", 1, 100)
    assert (document["norm_type"], document["numerics"]) == (2.0, "exact")
    assert document["tolerance"] == {"rtol": 1e-6, "atol": 0.0, "zeros_rtol": 0.0}
    assert [each["name"] for each in document["parameters"]] == list(tensors)
    for each in document["parameters"]:
        tensor = tensors[each["name"]]
        assert each["shape"] == list(tensor.shape) and each["dtype"] == "float32"
        assert each["elements"] == tensor.size and each["zeros"] == int((tensor == 0).sum())
        assert math.isclose(each["norm"], norm_of(tensor), rel_tol=1e-14)
        assert each["max_abs"] == float(np.abs(tensor).max())
    assert math.isclose(document["total"]["norm"], norm_of([norm_of(t) for t in tensors.values()]), rel_tol=1e-14)
    assert document["total"]["elements"] == sum(t.size for t in tensors.values()) and document["total"]["zeros"] == 1
    lines = [line for line in text.splitlines() if '"name"' in line]
    assert len(lines) == len(tensors) and all(line.count("{") == 1 for line in lines)
    assert text.isascii() and text.endswith("}\n") and max(map(len, text.splitlines())) < 250


def test_the_same_dump_passes_on_any_number_of_processes(good, tool):
    before = good[1].read_bytes(), tree(good[0])
    report = check(*good)
    assert report["outcome"] == "passed" and report["findings"] == [] and report["changes"] == []
    assert report["command"] == "check" and report["counts"]["items_failed"] == 0
    assert {item["status"] for item in report["items"]} == {"passed"}
    assert len(report["items"]) == 10 * 5 + 8 and report["items"][0]["parameter"] is None
    assert report["counts"] == {"items_passed": 58, "items_failed": 0, "parameters_passed": 5, "parameters_failed": 0}
    assert without_run(check(*good, np=3)) == without_run(report)
    fresh = tool.fresh("baseline")
    assert run(3, "check", good[0], "--baseline", fresh, "--update").code == 0
    assert fresh.read_bytes() == good[1].read_bytes()
    text = run(1, "check", *(good[0], "--baseline", good[1]))
    assert text.code == 0 and text.err == ""
    assert text.out.splitlines()[0] == f"gradclip check: passed: 58 items of 5 parameters fit {good[1]}"
    assert (good[1].read_bytes(), tree(good[0])) == before


def test_no_baseline(good, tool):
    missing = tool.fresh("none")
    report = check(good[0], missing, code=1)
    assert report["outcome"] == "no-baseline" and kinds(report) == ["no-baseline"] and report["baseline"] is None
    result = run(3, "check", good[0], "--baseline", missing)
    assert result.code == 1 and "no-baseline" in result.out.splitlines()[0] and "--update" in result.out, result
    assert not missing.exists() and list(tool.folder.iterdir()) == []


def test_what_is_off_is_named_worst_first(good, tool):
    tensors = model()[1]
    change = {"layers.0.weight": tensors["layers.0.weight"] * np.float32(1.001), "bias": tensors["bias"] * np.float32(4),
              "layers.1.weight": np.where(tensors["layers.1.weight"] == 0, np.float32(1e-30), tensors["layers.1.weight"])}
    dump, changed = model(change)
    path = dump.write(tool.fresh("dump"))
    report = check(path, good[1], code=1)
    assert report["outcome"] == "regressed"
    assert [each["parameter"] for each in report["findings"][:2]] == ["bias", None]
    assert {each["parameter"] for each in report["findings"]} == {"bias", None, "layers.0.weight", "layers.1.weight"}
    assert report["findings"][-1]["parameter"] == "layers.1.weight" and set(kinds(report)) == {"differs"}
    for each in report["items"]:
        if each["item"] == "norm" and each["parameter"]:
            assert math.isclose(each["found"], norm_of(changed[each["parameter"]]), rel_tol=1e-14)
            assert math.isclose(each["expected"], norm_of(tensors[each["parameter"]]), rel_tol=1e-14)
            off = abs(each["found"] - each["expected"])
            assert math.isclose(each["deviation"], off / each["expected"], rel_tol=1e-12, abs_tol=0)
            assert each["status"] == ("failed" if off > 1e-6 * each["expected"] else "passed")
    failed = {(each["parameter"], each["item"]) for each in report["items"] if each["status"] == "failed"}
    assert failed == {(None, "norm"), (None, "zeros"), (None, "max_abs"), ("bias", "norm"), ("bias", "max_abs"),
                      ("layers.0.weight", "norm"), ("layers.0.weight", "max_abs"), ("layers.1.weight", "zeros")}
    assert math.isclose(report["findings"][0]["value"], 3.0, rel_tol=1e-6)
    assert without_run(check(path, good[1], code=1, np=3)) == without_run(report)
    out = run(1, "check", path, "--baseline", good[1]).out
    assert out.startswith("gradclip check: regressed: 4 findings, 8 of 58 items in 3 of 5 parameters; worst: differs bias: norm")


def test_tolerances(good, tool):
    tensors = model()[1]
    path = model({"bias": tensors["bias"] * np.float32(1.01)})[0].write(tool.fresh("dump"))
    check(path, good[1], code=1)
    check(path, good[1], "--rtol", "0.02")
    check(path, good[1], "--atol", "1")
    check(path, good[1], "--rtol", "0.001", code=1)

    def rules(document):
        document["tolerance"]["rtol"] = 0.01  # of the total
        document["tolerances"] = [{"pattern": "^bias$", "rtol": 0.02}, {"pattern": "bias", "rtol": 0}]
    lenient = altered(good, tool, rules)
    report = check(path, lenient)
    assert report["baseline"]["unused_patterns"] == ["bias"]
    report = check(path, lenient, "--rtol", "0", code=1)
    assert {each["parameter"] for each in report["findings"]} == {None}

    zero = model({"bias": np.where(np.arange(5) < 2, np.float32(0), tensors["bias"])})[0].write(tool.fresh("dump"))
    anything = altered(good, tool, lambda d: d["tolerance"].update(rtol="inf", zeros_rtol=0))
    assert [each["item"] for each in check(zero, anything, code=1)["items"] if each["status"] == "failed"] == ["zeros"] * 2
    check(zero, altered(good, tool, lambda d: d["tolerance"].update(rtol="inf", zeros_rtol=2)))


def test_new_and_gone_parameters_types_and_shapes(good, tool):
    tensors = model()[1]
    dump, _ = model({"bias": None, "layers.0.weight": tensors["layers.0.weight"].reshape(6, 8)},
                    extra={"new": np.ones(2, np.float32)})
    path = dump.write(tool.fresh("dump"))
    report = check(path, good[1], "--rtol", "inf", code=1)
    assert [(each["kind"], each["parameter"]) for each in report["findings"]] == [
        ("missing", "bias"), ("extra", "new"), ("shape", "layers.0.weight"), ("differs", None)]
    present = [each for each in report["items"] if each["item"] == "present"]
    assert [(each["parameter"], each["expected"], each["found"]) for each in present] == [("new", False, True),
                                                                                         ("bias", True, False)]
    typed = model({"bias": tensors["bias"].astype(np.float64)})[0].write(tool.fresh("dump"))
    assert [(each["kind"], each["parameter"]) for each in check(typed, good[1], code=1)["findings"]] == [("dtype", "bias")]


def test_another_layout_of_the_same_gradient_passes(good, tool):
    dump = Dump(4)
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    for name, tensor in model()[1].items():
        dump.sharded(name, tensor, "m", ["Replicate()", "Shard(0)"])
    assert check(dump.write(tool.fresh("dump")), good[1])["outcome"] == "passed"


def test_several_entries_of_one_name(tool):
    """On two meshes: the one that is gone or new is told, not the one that stays."""
    def written(*stages, tied=None):
        dump = Dump(4)
        for stage in stages:
            mesh = dump.mesh(f"stage{stage}", ["dp"], [2 * stage, 2 * stage + 1])
            dump.sharded("norm", values(7 if tied else 7 + stage, (8, 2)), mesh, ["Shard(0)"], **({"tied": tied} if tied else {}))
        dump.plain("bias", values(3, 5))
        return dump.write(tool.fresh("dump"))

    def findings(measured, recorded):
        baseline = tool.fresh("baseline")
        assert run(1, "check", recorded, "--baseline", baseline, "--update").code == 0
        report = json.loads(run(1, "check", measured, "--baseline", baseline, "--format", "json").out)
        return [each for each in report["findings"] if each["kind"] != "ranks-disagree" and each["parameter"]]
    both, first, second = written(0, 1), written(0), written(1)
    for stage, alone in enumerate((first, second)):
        for kind, whose, (gone,) in (("missing", "baseline's", findings(alone, both)), ("extra", "dump's", findings(both, alone))):
            assert (gone["kind"], gone["parameter"]) == (kind, "norm")
            assert f"the {whose} no. {2 - stage} is without a counterpart" in gone["message"]
    both, first, second = written(0, 1, tied="w"), written(0, tied="w"), written(1, tied="w")
    for measured in (both, first, second):
        for recorded in (both, first, second):
            assert findings(measured, recorded) == []


def test_nonfinite_values_come_before_the_baseline(good, tool):
    broken = model()[1]["layers.0.weight"]
    broken[5, 2] = np.nan
    path = model({"layers.0.weight": broken})[0].write(tool.fresh("dump"))
    rubbish = tool.fresh("rubbish")
    rubbish.write_text("{")
    absent = tool.fresh("absent")
    for baseline in (good[1], rubbish, absent):
        for update in ((), ("--update",)):
            before = baseline.read_bytes() if baseline.exists() else None
            report = check(path, baseline, *update, code=1)
            assert report["outcome"] == "regressed" and kinds(report) == ["nonfinite"] and report["baseline"] is None
            assert finding(report, "nonfinite")["index"] == [5, 2] and finding(report, "nonfinite")["ranks"] == [1]
            assert (baseline.read_bytes() if baseline.exists() else None) == before
    result = run(3, "check", path, "--baseline", absent, "--update")
    assert result.code == 1 and not absent.exists()
    assert f"not updated: {absent} was not written, --allow-nonfinite records" in result.out.splitlines()[0], result

    report = check(path, absent, "--update", "--allow-nonfinite")
    assert report["outcome"] == "updated"
    document = json.loads(absent.read_text())
    assert entry(document, "layers.0.weight")["nan"] == 1 and entry(document, "layers.0.weight")["norm"] == "nan"
    assert document["findings"] == [{"kind": "nonfinite", "parameter": "layers.0.weight", "ranks": [1], "value": 1.0}]
    check(path, absent, code=1)
    report = check(path, absent, "--allow-nonfinite")
    assert report["known_findings"] == [{"kind": "nonfinite", "parameter": "layers.0.weight", "seen": True}]
    check(good[0], absent, "--allow-nonfinite", code=1)

    result = run(1, "check", path, "--baseline", absent, "--nonfinite", "error", "--allow-nonfinite", "--update")
    assert result.code == 4 and "'layers.0.weight' on rank 1" in result.err, result


def test_findings_of_the_dump(good, tool):
    dump, _ = model()
    dump.parameters[2].shards[1] = dump.parameters[2].shards[1] + 1  # a copy of bias that differs
    path = dump.write(tool.fresh("dump"))
    report = check(path, good[1], code=1)
    assert "replicas-differ" in kinds(report)
    assert report["findings"][0]["kind"] == "replicas-differ" and report["findings"][0]["parameter"] == "bias"
    known = tool.fresh("baseline")
    report = check(path, known, "--update")
    assert "replicas-differ" in [each["kind"] for each in report["changes"]]
    report = check(path, known)
    assert report["outcome"] == "passed" and all(each["seen"] for each in report["known_findings"])
    report = check(good[0], known)
    assert {"kind": "replicas-differ", "parameter": "bias", "seen": False} in report["known_findings"]
    file = tool.folder / "known.xml"
    assert run(1, "check", good[0], "--baseline", known, "--report", file).code == 0
    suite = ElementTree.parse(file).getroot()[0]
    assert suite.get("skipped") == str(len(report["known_findings"])) and suite.get("failures") == "0"


def test_update_says_what_changed(good, tool):
    baseline = tool.fresh("baseline").with_suffix(".json")
    baseline.write_text(good[1].read_text().replace('"tolerances": []', '"tolerances": [{"pattern": "^lay", "rtol": 0.5}]'))
    unchanged = baseline.stat().st_mtime_ns
    report = check(good[0], baseline, "--update")
    assert report["outcome"] == "unchanged" and report["changes"] == [] and baseline.stat().st_mtime_ns == unchanged
    tensors = model()[1]
    dump, changed = model({"bias": tensors["bias"] * np.float32(2), FORMULA: None}, extra={"new": np.ones(2, np.float32)})
    path = dump.write(tool.fresh("dump"))
    result = run(1, "check", path, "--baseline", baseline, "--update", "--rtol", "0.25")
    assert result.code == 0 and result.err == "", result
    first = result.out.splitlines()[0]
    assert first == f"gradclip check: updated: baseline {baseline} written: of 5 parameters 1 changed, 1 new, 1 gone"
    assert "extra new" in result.out and "missing =cmd" in result.out and "differs bias" in result.out
    document = json.loads(baseline.read_text())
    assert document["tolerances"] == [{"pattern": "^lay", "rtol": 0.5}] and document["tolerance"]["rtol"] == 0.25
    assert math.isclose(entry(document, "bias")["norm"], norm_of(changed["bias"]), rel_tol=1e-14)
    assert check(path, baseline)["outcome"] == "passed"
    assert sorted(p.name for p in tool.folder.iterdir()) == sorted([path.name, baseline.name])


def test_conditions_that_differ_are_named_not_compared(tool):
    dump, tensors = model(pp_enabled=True, num_label_tokens=64, dp_group_size=2)
    dump.device_mesh, _ = "w", dump.mesh("w", ["pp", "dp"], [[0], [1]])
    path = dump.write(tool.fresh("dump"))
    baseline = tool.fresh("baseline")
    check(path, baseline, "--update", "--norm-type", "inf")
    document = json.loads(baseline.read_text())
    assert document["norm_type"] == "inf" and document["scale"] == {"label_token_divisor": 32.0, "expert_divisor": None}
    for each in document["parameters"]:
        assert math.isclose(each["norm"], norm_of(tensors[each["name"]], math.inf) / 32, rel_tol=1e-7)
    assert check(path, baseline, "--norm-type", "inf")["outcome"] == "passed"
    report = check(path, baseline, "--no-scale", "--numerics", "automodel-cpu", code=1)
    assert report["outcome"] == "conditions-differ"
    assert [each["message"] for each in report["findings"]] == [
        "norm type 2, in the baseline inf", "numerics automodel-cpu, in the baseline exact",
        "label token divisor none, in the baseline 32"]
    assert {each["item"] for each in report["items"]} == {"nonfinite"}
    report = check(path, baseline, "--norm-type", "inf", "--num-label-tokens", "128", code=1)
    assert report["findings"][0]["message"] == "label token divisor 64, in the baseline 32"


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

def bad_baselines(text):
    """(what, text) of files that are no baseline."""
    source = random.Random(20)
    for size in sorted({0, 1, 2, *(source.randrange(len(text) - 2) for _ in range(6))}):
        yield f"cut at {size}", text[:size]
    for pattern, replacement in [
            (r'"version": 1', '"version": 2'), (r'"version": 1', '"version": "1"'), (r'"version": 1', '"version": 1, "version": 1'),
            (r"gradclip\.baseline", "gradclip.report"), (r'"rtol": [^,]+', '"rtol": NaN'), (r'"rtol": [^,]+', '"rtol": "nan"'),
            (r'"rtol": [^,]+', '"rtol": -1e-6'), (r'"rtol": [^,]+', '"rtol": [1]'), (r'"rtol"', '"rtoll"'),
            (r'"elements": \d+', '"elements": -1'), (r'"elements": \d+', '"elements": 1e99'), (r'"elements": \d+', '"elements": true'),
            (r'"norm": [^,]+', '"norm": null'), (r'"norm": [^,]+', '"norm": -0.5'), (r'"norm": [^,]+', '"norm": 1e999'),
            (r'"dtype": "float32"', '"dtype": "float31"'), (r'"shape": \[8, 6\]', '"shape": [8, "6"]'),
            (r'"name": "bias"', '"name": ""'), (r'"name": "bias"', '"name": 3'), (r'"name": "bias", ', ''),
            (r'"parameters": \[', '"parameters": [[], '), (r'"parameters": \[', '"more": 1, "parameters": ['),
            (r'"findings": \[\]', '"findings": {}'), (r'"findings": \[\]', '"findings": [{"kind": "::stop-commands::"}]'),
            (r'"tolerances": \[\]', '"tolerances": [{"pattern": "("}]'), (r'"tolerances": \[\]', '"tolerances": [{"rtol": 1}]'),
            (r'"total": \{', '"total": {"total": 1, '), (r"\}\n$", "}\n{}"), (r"^", "[" * 100000), (r"^", "\ufeff\ufeff")]:
        changed, count = re.subn(pattern, lambda _: replacement, text, count=1)
        assert count == 1, pattern
        yield f"{pattern} -> {replacement[:40]}", changed


def test_bad_baselines_are_refused_with_their_name(good, tool):
    path = tool.folder / "bad.json"
    cases = list(bad_baselines(good[1].read_text()))
    for what, text in cases:
        path.write_text(text)
        result = refused(1, 3, good[0], "check", good[0], "--baseline", path, mentions=[f"baseline '{path}'"])
        assert path.read_text() == text, what
        assert len(result.err) < 2000, what
    path.write_bytes(b"\xff\xfe{\x00")
    refused(1, 3, good[0], "check", good[0], "--baseline", path, mentions=[str(path)])
    path.write_text("{}")
    refused(3, 3, good[0], "check", good[0], "--baseline", path, mentions=[str(path), "format"])
    refused(1, 3, good[0], "check", good[0], "--baseline", path, "--update", mentions=[str(path), "format"])
    assert path.read_text() == "{}"
    refused(1, 3, good[0], "check", good[0], "--baseline", tool.folder, mentions=[str(tool.folder)])


def test_paths_and_words_that_cannot_be(good, tool):
    path, baseline = good
    refused(1, 2, path, "check", path, mentions=["--baseline FILE is missing"])
    refused(1, 2, path, "check", path, "--baseline", tool.folder / "no" / "b", "--update", mentions=["directory"])
    refused(1, 2, path, "check", path, "--baseline", path / "b.json", "--update", mentions=["inside the input"])
    refused(1, 2, path, "check", path, "--baseline", tool.folder, "--update", mentions=["is a directory"])
    refused(1, 2, path, "check", path, "--baseline", baseline, "--report", baseline, mentions=["it is the baseline"])
    refused(1, 2, path, "check", path, "--baseline", baseline, "--rtol", "nan", mentions=["--rtol"])
    refused(1, 2, path, "check", path, "--baseline", baseline, "--atol", "-1", mentions=["--atol"])
    refused(1, 2, path, "norms", path, "--baseline", baseline)
    link = tool.folder / "link.json"
    target = tool.folder / "target.json"
    target.write_bytes(baseline.read_bytes().replace(b'"zeros": 0', b'"zeros": 1'))
    link.symlink_to(target)
    assert run(1, "check", path, "--baseline", link, "--update").code == 0
    assert link.is_symlink() and target.read_bytes() == baseline.read_bytes()


def test_a_baseline_that_cannot_be_written(good):
    for np_ in (1, 3):
        refused(np_, 5, good[0], "check", good[0], "--baseline", "/proc/b.json", "--update", mentions=["baseline '/proc/b.json'"])


# ---------------------------------------------------------------------------------------------------------------------
# What CI systems read
# ---------------------------------------------------------------------------------------------------------------------

def broken(tool):
    """Every parameter twice as large, and more parameters than are shown."""
    tensors = model()[1]
    return model({name: tensor * np.float32(2) for name, tensor in tensors.items()},
                 extra={f"new.{i}": np.ones(1, np.float32) for i in range(20)})[0].write(tool.fresh("dump"))


def read_junit(path):
    """The one suite of a file, its counts checked against its cases."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "testsuites" and [child.tag for child in root] == ["testsuite"]
    suite = root[0]
    cases = suite.findall("testcase")
    assert all(child.tag == "testcase" for child in suite)
    for tag, key in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        count = sum(1 for case in cases if case.find(tag) is not None)
        assert suite.get(key) == root.get(key) == str(count)
    assert suite.get("tests") == root.get("tests") == str(len(cases))
    assert float(suite.get("time")) >= 0 and suite.get("name")
    for case in cases:
        assert case.get("classname") and case.get("name") and len(case) <= 1
        for child in case:
            assert child.tag in ("failure", "error", "skipped") and child.get("message")
            assert child.tag == "skipped" or child.get("type")
    return cases


def test_junit(good, tool):
    file = tool.folder / "check.xml"
    assert run(1, "check", good[0], "--baseline", good[1], "--report", file).code == 0
    cases = read_junit(file)
    escaped = HOSTILE.replace("\x1b", "\\x1b").replace("\ufffe", "\ufffd")
    assert [case.get("name") for case in cases] == ["(whole model)", "layers.0.weight", "layers.1.weight", "bias", escaped, FORMULA]
    assert all(len(case) == 0 for case in cases)
    assert run(3, "check", broken(tool), "--baseline", good[1], "--report", file).code == 1
    cases = read_junit(file)
    assert len(cases) == 26 and all(case[0].tag == "failure" for case in cases)
    assert cases[4].get("name") == escaped and cases[4][0].get("type") == "differs" and "norm" in cases[4][0].text
    assert run(1, "check", good[0], "--baseline", tool.folder / "none", "--report", file).code == 1
    cases = read_junit(file)
    assert [case[0].tag for case in cases] == ["skipped"] * 6 + ["error"] and cases[-1][0].get("type") == "no-baseline"


def test_junit_of_other_commands(good, tool):
    file = tool.folder / "other.xml"
    other = broken(tool)
    assert run(1, "diff", good[0], good[0], "--report", file).code == 0
    assert len(read_junit(file)) == 5
    assert run(1, "diff", good[0], other, "--report", file).code == 1
    cases = read_junit(file)
    assert len([case for case in cases if case.find("failure") is not None]) >= 21
    assert run(1, "verify", good[0], "--report", file).code == 0
    assert [case.get("name") for case in read_junit(file)] == ["findings"]
    dump, _ = model()
    dump.parameters[2].shards[1] = dump.parameters[2].shards[1] + 1
    path = dump.write(tool.fresh("dump"))
    (path / "rank_00007.h5").write_bytes(b"no part of it")
    result = run(1, "verify", path, "--report", file, "--format", "json")
    assert result.code == 1
    failures = [case[0].get("type") for case in read_junit(file)]
    assert sorted(failures) == sorted(kinds(result.json())) and {"extra", "replicas-differ"} <= set(failures)
    assert run(1, "norms", path, "--report", file).code == 0
    assert {case[0].get("type") for case in read_junit(file) if len(case)} >= {"replicas-differ"}
    for command in (["inspect", path], ["doctor"]):
        refused(1, 2, path, *command, "--report", file, mentions=["nothing that passes or fails"])
        table = tool.folder / "other.csv"
        assert run(1, *command, "--report", table).code == 0
        assert len(list(csv.DictReader(table.open(newline="")))) >= 5


def test_a_suite_is_named_by_what_is_compared(good, tool):
    file, other = tool.folder / "suite.xml", broken(tool)
    unfinished = tool.fresh("unfinished")
    unfinished.mkdir()
    microbatches = []
    for index in range(2):
        dump = Dump(1)
        dump.plain("bias", values(3, 5))
        dump.more["microbatch"] = {"index": index, "count": 2}
        microbatches.append(dump.write(tool.fresh("microbatch")))

    def suite(*command):
        result = run(1, *command, "--report", file, "--quiet")
        assert result.code == (3 if unfinished in command else 1 if other in command else 0), result
        root = ElementTree.parse(file).getroot()
        assert root.get("name") == root[0].get("name")
        return root[0].get("name")
    for b in (other, unfinished):  # also of a run that an error ended
        assert suite("diff", good[0], b) == f"gradclip diff {good[0]} against {b}"
        assert suite("check", b, "--baseline", good[1]) == f"gradclip check {b} against {good[1]}"
    for b in (good[0], unfinished):
        assert suite("norms", b) == f"gradclip norms {b}"
        assert suite("norms", good[0], b, "--sweep", "1,2") == "gradclip norms --sweep of 2 dumps"
    for b in (other, unfinished):
        assert suite("accumulate", *microbatches, "--check", b) == f"gradclip accumulate (accumulated) against {b}"


def test_format_json_on_every_command(good, tool):
    out = tool.fresh("out")
    for command in (["clip", good[0], "-o", out], ["norms", good[0]], ["inspect", good[0]], ["verify", good[0]],
                    ["diff", good[0], good[0]], ["check", good[0], "--baseline", good[1]], ["doctor"]):
        report = run(1, *command, "--format", "json").json()
        assert (report["format"], report["version"], report["command"]) == ("gradclip.report", 1, command[0])


def test_csv(good, tool):
    file = tool.folder / "check.csv"
    path = broken(tool)
    result = run(1, "check", path, "--baseline", good[1], "--report", file, "--format", "json")
    assert result.code == 1
    with open(file, newline="") as text:
        rows = list(csv.DictReader(text))
    items = result.json()["items"]
    assert len(rows) == len(items)
    for row, item in zip(rows, items):
        assert row["status"] == item["status"] and row["item"] == item["item"]
        if item["item"] == "norm":
            assert float(row["found"]) == item["found"] and float(row["expected"]) == item["expected"]
    assert {row["parameter"] for row in rows} >= {"'" + FORMULA, HOSTILE, ""}


def test_github(good, tool):
    path, summary = broken(tool), tool.folder / "summary.md"
    summary.write_text("before\n")
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": summary}
    for np_ in (1, 3):
        result = run(np_, "check", path, "--baseline", good[1], "--format", "json", env=github)
        assert result.code == 1
        report = parse_report(result.out)
        lines = result.err.splitlines()
        assert len(lines) == 10 and all(re.fullmatch(r"::error title=[^:,%]*(%3A[^:,%]*)?::[^\r\n]+", line) for line in lines)
        assert lines[-1] == "::error title=gradclip check::" + report["summary"].replace("%", "%25")
        for line, each in zip(lines, report["findings"][:9]):
            data = line.split("::", 2)[2].replace("%0A", "\n").replace("%25", "%")
            assert data == f"{each['parameter']}: {each['message']}" and each["kind"] == "extra"
    text = summary.read_text()
    assert text.startswith("before\n### gradclip check: regressed\n") and text.count("### ") == 2
    assert "... and 17 more" in text

    hostile = {HOSTILE: model()[1][HOSTILE] * np.float32(2)}
    one = model(hostile)[0].write(tool.fresh("dump"))
    summary.write_text("")
    result = run(1, "check", one, "--baseline", good[1], env=github)
    assert result.code == 1 and len(result.err.splitlines()) == 3
    assert all(line.startswith("::error title=gradclip check") for line in result.err.splitlines())
    assert "::error::x,y|<b>%250A`@me`%0A]]>" in result.err and "\x1b" not in result.err + result.out + summary.read_text()
    assert not [line for line in result.out.splitlines() if line.strip().startswith("::")]
    rows = [line for line in summary.read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 4 and all(row.count("|") == 4 for row in rows)
    assert "<b>" not in summary.read_text() and "`" not in summary.read_text()

    result = run(1, "check", good[0], "--baseline", good[1], env=github)
    assert result.code == 0 and result.err == ""
    assert "### gradclip check: passed" in summary.read_text()
    result = run(1, "check", good[0], "--baseline", good[1], env={**github, "GITHUB_STEP_SUMMARY": tool.folder})
    assert result.code == 0 and "warning: GITHUB_STEP_SUMMARY" in result.err
    assert run(1, "check", path, "--baseline", good[1], env={"GITHUB_ACTIONS": "false"}).err == ""


# ---------------------------------------------------------------------------------------------------------------------
# Known findings that become worse; updates and errors as test results
# ---------------------------------------------------------------------------------------------------------------------

def test_a_known_finding_does_not_hide_a_worse_one(tool):
    def written(*off):
        """One plain tensor on four ranks; rank r's copy is off by off[r] in one element."""
        dump = Dump(4, max_grad_norm=1.0)
        copies = {rank: np.arange(1, 9, dtype=np.float32) for rank in range(4)}
        for rank, by in enumerate(off):
            copies[rank][3] += np.float32(by)
        dump.plain("bias", copies)
        return dump.write(tool.fresh("dump"))
    baseline = tool.fresh("baseline")
    check(written(0, 0.5), baseline, "--update")
    recorded = next(f for f in json.loads(baseline.read_text())["findings"] if f["kind"] == "replicas-differ")
    assert recorded == {"kind": "replicas-differ", "parameter": "bias", "ranks": [0, 1], "value": 0.5}
    for off in ((0, 0.5), (0, 0.25), (0, 0)):  # as bad, not so bad, gone
        assert check(written(*off), baseline)["outcome"] == "passed"
    for off in ((0, 0.75), (0, 0, 0.5), (0, 0.5, 0.25), (0, 1e6)):  # farther, elsewhere, elsewhere too
        report = check(written(*off), baseline, code=1)
        worse = finding(report, "replicas-differ")
        assert "worse than the baseline's 0.5 on ranks 0, 1" in worse["message"]
        assert {"kind": "replicas-differ", "parameter": "bias", "seen": True} in report["known_findings"]
    assert "replicas-differ" not in kinds(check(written(0, 0.75), baseline, "--rtol", "1"))
    assert "replicas-differ" not in kinds(check(written(0, 0.75), baseline, "--atol", "1"))
    report = check(written(0, 0.25), baseline, "--update")
    assert report["outcome"] == "updated" and "replicas-differ" in [each["kind"] for each in report["changes"]]


def test_an_update_has_no_failures(good, tool):
    baseline, file = tool.fresh("baseline"), tool.folder / "update.xml"
    baseline.write_bytes(good[1].read_bytes())
    dump, _ = model({"bias": values(9, 5), FORMULA: None}, extra={"new": np.ones(2, np.float32)})
    dump.parameters[2].shards[1] = dump.parameters[2].shards[1] + 1
    path = dump.write(tool.fresh("dump"))
    for outcome in ("updated", "unchanged"):
        report = check(path, baseline, "--update", "--report", file)
        suite = ElementTree.parse(file).getroot()[0]
        assert report["outcome"] == outcome and int(suite.get("tests")) > 5
        assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "0")
        assert not suite.findall(".//failure") and not suite.findall(".//error")
    check(good[0], baseline, "--report", file, code=1)
    assert ElementTree.parse(file).getroot()[0].get("failures") != "0"


@pytest.mark.parametrize("ending", ["json", "csv", "html"])
def test_an_error_leaves_no_older_report(good, tool, ending):
    """However the run ends: bad input, a refusal, or being killed by what nobody catches."""
    file, link = tool.folder / f"result.{ending}", tool.folder / f"link.{ending}"
    broken = tool.fresh("broken")
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    link.symlink_to(file)
    for command in (["norms", broken], ["inspect", broken], ["diff", good[0], broken], ["merge", broken, "-o", tool.fresh("out")],
                    ["check", good[0], "--baseline", broken / "manifest.json"]):
        assert run(1, "norms", good[0], "--report", file, "--quiet").code == 0 and file.exists()
        result = run(1, *command, "--report", link)
        assert result.code == 3 and not file.exists(), result
    file.write_text("old")
    assert run(1, "norms", good[0], "--report", file, "--no-such-option").code == 2 and file.read_text() == "old"
    assert run(1, "norms", good[0], "--report", "/dev/null").code == 2  # no ending that says how


def test_no_report_takes_the_place_of_what_is_read(good, tool):
    config, model = tool.folder / "config.json", tool.folder / "model.json"
    config.write_text('{"norm-type": 1}')
    model.write_text("{}")
    for command, file in ((["norms", good[0], "--config", config], config),
                          (["synth", "-o", tool.fresh("out"), "--model", model], model),
                          (["diff", good[0], good[0], "--map", config], config)):
        before = file.read_text()
        refused(1, 2, good[0], *command, "--report", file, mentions=["a file that the command reads"])
        assert file.read_text() == before


@pytest.mark.parametrize("np", [1, 2])
def test_an_error_does_not_leave_an_older_result(good, tool, np):
    file = tool.folder / "result.xml"
    broken = tool.fresh("broken")
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    no_baseline = tool.fresh("rubbish")
    no_baseline.write_text("{")
    other = tool.folder / "absent"
    for command in (["check", broken, "--baseline", good[1]], ["check", good[0], "--baseline", no_baseline],
                    ["check", other, "--baseline", good[1]], ["norms", broken], ["diff", good[0], broken]):
        assert run(1, "check", good[0], "--baseline", good[1], "--report", file, "--quiet").code == 0
        result = run(np, *command, "--report", file)
        assert result.code == 3 and "::error" not in result.err, result
        suite = ElementTree.parse(file).getroot()[0]
        assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "1")
        error = suite[0].find("error")
        assert suite[0].get("classname") == f"gradclip.{command[0]}" and error.get("type") == "bad-input"
        assert "gradclip: error: " + error.get("message") in result.err
    result = run(np, "check", broken, "--baseline", good[1], env={"GITHUB_ACTIONS": "true"})
    lines = [line for line in result.err.splitlines() if line.startswith("::error")]
    assert result.code == 3 and len(lines) == 1 and lines[0].startswith("::error title=gradclip check::"), result


def test_an_error_writes_nothing_where_no_report_may_be(good, tool):
    broken = tool.fresh("broken")
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    baseline = tool.folder / "baseline.xml"
    baseline.write_bytes(good[1].read_bytes())
    before = tree(broken)
    assert run(1, "check", broken, "--baseline", good[1], "--report", broken / "x.xml").code == 2
    assert tree(broken) == before
    assert run(1, "check", broken, "--baseline", baseline, "--report", baseline).code == 2
    assert baseline.read_bytes() == good[1].read_bytes()
    file = tool.folder / "old.xml"
    file.write_text("old")
    assert run(1, "check", good[0], "--baseline", good[1], "--report", file, "--no-such-option").code == 2
    assert file.read_text() == "old"
