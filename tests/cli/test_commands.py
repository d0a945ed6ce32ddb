"""The commands as people type them: help, options and where they come from, output formats, exit codes of usage."""

import csv
import io
import json
import math
import os

import numpy as np
import pytest

from conftest import (GOLDEN, LONG, binary, close, environment, execute, launcher, parse_report, refused, run, tree)
from dump_builder import Dump

COMMANDS = ("clip", "norms", "inspect", "doctor")
DUMP = GOLDEN / "fsdp_tp/dump"


@pytest.fixture
def small(tool):
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("layers.0.weight", np.float32([[3, 4], [0, 0]]), "dp", ["Shard(0)"])
    dump.plain("layers.1.bias", np.float32([12]), dtype="float32")
    return dump.write(tool.fresh("dump"))


# Help and version ------------------------------------------------------------------------------------------------------------

def test_general_help_and_version():
    for word in ("--help", "-h"):
        result = run(1, word)
        assert result.code == 0 and result.err == "" and all(command in result.out for command in COMMANDS), result
        assert "--print-completion" in result.out and "--print-man" in result.out
    version = run(1, "--version")
    assert version.code == 0 and version.out.startswith("gradclip ") and version.out.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_version_of_each_command(command):
    result = run(1, command, "--help")
    assert result.code == 0 and result.err == "" and f"gradclip {command}" in result.out, result
    for option in ("--report", "--format", "--config", "--quiet", "--color", "--version", "--help"):
        assert option in result.out, option
    scale = ("--max-norm", "--no-clip", "--nonfinite", "--pp", "--no-pp", "--pp-axis", "--ep-axis", "--num-label-tokens",
             "--dp-group-size", "--expert-tp-replication-factor", "--foreach", "--no-foreach", "--no-scale",
             "--use-torch-clip-grad-norm", "--device-memory-budget", "--offload")
    if command in ("clip", "norms"):
        assert [option for option in scale if option not in result.out] == []
    if command == "clip":
        assert "--overwrite" in result.out and "--total-norm" in result.out and "-o" in result.out
    codes = result.out[result.out.index("Exit codes:"):]
    assert ("1 findings (--strict)" in codes) == (command in ("clip", "norms", "merge", "tokens", "accumulate")), codes
    assert ("1 findings, " in codes) == (command in ("verify", "diff", "check")), codes
    assert run(1, command, "--version").out == run(1, "--version").out


def test_one_voice_under_mpirun():
    assert run(3, "clip", "--help").out.replace("\r", "") == run(1, "clip", "--help").out
    assert run(2, "--version").out.replace("\r", "") == run(1, "--version").out


@pytest.mark.parametrize("arguments", [
    [], ["frobnicate", "x"], ["clip"], ["clip", "DUMP"], ["clip", "DUMP", "-o"], ["norms"], ["inspect"],
    ["clip", "DUMP", "-o", "OUT", "--no-such-option"], ["norms", "DUMP", "extra"], ["norms", "DUMP", "-o", "OUT"],
    ["clip", "DUMP", "-o", "OUT", "--max-norm"], ["--max-norm", "1", "clip", "DUMP", "-o", "OUT"],
    ["clip", "DUMP", "-o", "OUT", "--max-norm", "1", "--no-clip"], ["inspect", "DUMP", "--max-norm", "1"],
    ["inspect", "DUMP", "--offload"], ["doctor", "--device-memory-budget", "1G"], ["clip", "DUMP", "-o", "OUT", "--no-offload"],
    ["clip", "DUMP", "-o", ""], ["norms", ""], ["norms", "DUMP", "--sort", "size"], ["norms", "DUMP", "--top", "0"],
    ["norms", "DUMP", "--report", "r.foo"], ["norms", "DUMP", "--report", "r"], ["norms", "DUMP", "--format", "yaml"],
    ["norms", "DUMP", "--color", "sometimes"], ["norms", "DUMP", "--report", "no/such/r.json"],
    ["norms", "DUMP", "--report", "DUMP/r.json"]], ids=" ".join)
def test_usage_errors(tool, small, arguments):
    words = [small if w == "DUMP" else str(w).replace("DUMP", str(small)) for w in arguments]
    refused(1, 2, small, *[tool.folder / w if w == "OUT" else w for w in words], cwd=tool.folder)
    assert not (tool.folder / "OUT").exists()


def test_usage_error_under_mpirun(tool, small):
    refused(4, 2, small, "--max-norm", "-1", out=tool.fresh("out"), mentions=["--max-norm", "-1"])
    refused(4, 2, small, "frobnicate")


# Values --------------------------------------------------------------------------------------------------------------------------

BAD = {"--max-norm": ["abc", "", "-1", "nan", "-0x1p-3", "1e400", "1,5", "0x", " 1", "1 ", "--", "1e", "-inf", "+-1"],
       "--norm-type": ["0", "-1", "nan", "abc", "-inf", "", "two"],
       "--total-norm": ["-1", "abc", "", "0x1.8q3", "-inf"],
       "--dp-group-size": ["0", "-4", "1.5", "abc", "99999999999999999999"],
       "--num-label-tokens": ["-1", "2.5", "many", ""],
       "--expert-tp-replication-factor": ["0", "-1", "x"],
       "--threads": ["0", "-1", "two", "1.5", "1000000000"],
       "--memory-budget": ["0", "-1G", "abc", "1Q", "", "1e999G", "nan"],
       "--device-memory-budget": ["0", "-1G", "abc", "1Q", "", "1e999G", "nan"],
       "--nonfinite": ["ignore", "", "ERROR"], "--numerics": ["exactly", ""], "--device": ["gpu", ""]}


@pytest.mark.parametrize("option", BAD)
def test_bad_values_from_the_command_line(tool, small, option):
    for value in BAD[option]:
        refused(1, 2, small, f"{option}={value}", out=tool.fresh("out"), mentions=[option])


def test_bad_values_from_elsewhere(tool, small):
    cases = [("max-norm", "-1"), ("norm-type", "0"), ("threads", "none"), ("nonfinite", "often"), ("dp-group-size", "0"),
             ("no-scale", "perhaps"), ("pp", "2"), ("offload", "partly"), ("device-memory-budget", "0")]
    for key, value in cases:
        name = "GRADCLIP_" + key.upper().replace("-", "_")
        refused(1, 2, small, out=tool.fresh("out"), env={name: value}, mentions=[name])
        config = tool.fresh("config").with_suffix(".json")
        config.write_text(json.dumps({key: value}))
        refused(1, 2, small, "--config", config, out=tool.fresh("out"), mentions=[key, config.name])


@pytest.mark.parametrize("text, mention", [
    ('{"max-nrom": 1}', "max-nrom"), ('{"max_norm": 1}', "max_norm"), ("{", ""), ("[1]", ""), ('{"max-norm": [1]}', "max-norm"),
    ('{"max-norm": 1, "max-norm": 2}', "max-norm"), ('{"max-norm": NaN}', ""), ("", ""), ('{"max-norm": null}', "max-norm"),
    ('{"--max-norm": 1}', "max-norm"), ('{"config": "x.json"}', "config")])
def test_bad_config(tool, small, text, mention):
    config = tool.folder / "run.json"
    config.write_text(text)
    refused(1, 2, small, "--config", config, out=tool.fresh("out"), mentions=[mention, "run.json"])


def test_missing_config(tool, small):
    refused(1, 2, small, "--config", tool.folder / "none.json", out=tool.fresh("out"), mentions=["none.json"])
    refused(4, 2, small, "--config", tool.folder / "none.json", out=tool.fresh("out"), mentions=["none.json"])


def test_who_wins(tool, small):
    """The command line beats the environment, that the file, that the manifest."""
    config = tool.folder / "run.json"
    config.write_text('{"max-norm": 2.0, "norm-type": 1, "quiet": true, "no-scale": true, "overwrite": false, "by": "parameter"}')
    env = {"GRADCLIP_MAX_NORM": "3", "GRADCLIP_NUMERICS": "automodel-cpu"}

    def of(*args, **how):
        report, _, _ = tool.clip(small, *args, **how)
        return report["clip"]["max_norm"], report["norm"]["type"], report["run"]["numerics"]
    assert of() == (1.0, 2.0, "exact")
    assert of("--config", config) == (2.0, 1.0, "exact")
    assert of("--config", config, env=env) == (3.0, 1.0, "automodel-cpu")
    assert of("--config", config, "--max-norm", "4", env=env) == (4.0, 1.0, "automodel-cpu")
    assert of("--max-norm=4", "--numerics=exact", env=env, np=2) == (4.0, 2.0, "exact")
    assert of(env={"GRADCLIP_CONFIG": str(config), "GRADCLIP_NORM_TYPE": "inf"}) == (2.0, "inf", "exact")
    # An empty variable is no variable; --no-clip and --max-norm: the stronger source wins.
    assert of(env={"GRADCLIP_MAX_NORM": ""}) == (1.0, 2.0, "exact")
    assert of("--no-clip", env=env)[0] is None
    assert of("--max-norm", "4", env={"GRADCLIP_NO_CLIP": "1"})[0] == 4.0
    assert of(env={"GRADCLIP_NO_CLIP": "true"})[0] is None
    assert of(env={"GRADCLIP_NO_CLIP": "0"})[0] == 1.0


def test_toggles(tool):
    dump = Dump(1, device_mesh="pp", pp_enabled=True, pp_axis_name="pp", num_label_tokens=8, dp_group_size=4)
    dump.mesh("pp", ["pp", "other"], [[0]])
    dump.plain("w", np.float32([8]))
    path = dump.write(tool.fresh("dump"))

    def divisor(*args, **how):
        return tool.norms(path, *args, **how)["scale"]["label_token_divisor"]
    assert divisor() == 2.0
    assert divisor("--no-pp") is None and divisor(env={"GRADCLIP_PP": "0"}) is None
    assert divisor(env={"GRADCLIP_NO_PP": "1"}) is None
    assert divisor("--pp", env={"GRADCLIP_PP": "false"}) == 2.0
    assert divisor("--no-scale") is None and divisor("--num-label-tokens", "0") is None
    assert divisor("--num-label-tokens", "2", "--dp-group-size", "8") == 0.25
    assert divisor("--pp-axis", "other") == 2.0
    refused(1, 2, path, "--pp-axis", "absent", out=tool.fresh("out"),
            mentions=["--pp-axis: 'absent'; expected an axis of the device mesh: 'pp', 'other'"])
    refused(4, 2, path, "--pp-axis", "absent", out=tool.fresh("out"), mentions=["absent"])
    refused(1, 2, path, "norms", path, "--no-pp", "--pp-axis", "absent", mentions=["'absent'", "'pp', 'other'"])
    rewritten = run(1, "norms", path, "--no-pp").out
    assert "\nscale         none (label tokens divide with pipeline parallelism only)\n" in rewritten
    assert tool.norms(path, "--no-foreach", "--use-torch-clip-grad-norm")["norm"]["total"] == 4.0


def test_expert_options(tool):
    dump = Dump(2, moe_mesh="moe", dp_group_size=2)
    dump.mesh("moe", ["ep_shard", "ep"], [[0, 1]])
    dump.sharded("experts", np.full((2, 2), 12, np.float32), "moe", ["Shard(1)", "Shard(0)"])
    path = dump.write(tool.fresh("dump"))
    report = tool.norms(path)
    assert report["norm"]["total"] == 24 and report["parameters"][0]["expert"] is False
    report = tool.norms(path, "--ep-axis", "ep")
    assert report["norm"]["total"] == 12 and report["parameters"][0]["expert"] is True
    report = tool.norms(path, "--ep-axis", "ep", "--expert-tp-replication-factor", "3", "--dp-group-size", "1")
    assert report["norm"]["total"] == 8 and report["scale"]["expert_divisor"] == 3.0
    report = tool.norms(path, "--ep-axis", "")
    assert report["norm"]["total"] == 24 and report["scale"]["expert_divisor"] is None
    assert report["scale"]["explanation"] == "none"
    refused(1, 2, path, "norms", path, "--ep-axis", "nosuch",
            mentions=["--ep-axis: 'nosuch'; expected an axis of a mesh: 'ep_shard', 'ep'"])
    refused(1, 2, path, "norms", path, "--pp-axis", "nosuch",
            mentions=["--pp-axis: 'nosuch'; expected an axis of a mesh: 'ep_shard', 'ep'"])


def test_stages_that_disagree_on_ep_shard(tool):
    """Only experts are divided by it: a model without them is not asked."""
    dump = Dump(2, moe_mesh=["a", "b"], dp_group_size=2)
    dump.mesh("a", ["ep_shard", "ep"], [[0], [1]])
    dump.mesh("b", ["ep_shard", "ep"], [[0, 1]])
    dump.sharded("dense", np.full((2, 2), 12, np.float32), "a", ["Shard(0)", "Replicate()"])
    path = dump.write(tool.fresh("dump"))
    report = tool.norms(path)
    assert report["norm"]["total"] == 24 and report["scale"]["expert_divisor"] is None
    refused(1, 3, path, "norms", path, "--ep-axis", "ep_shard", mentions=["moe_mesh 'b'", "ep_shard dimension of size 1"])


@pytest.mark.parametrize("given, total", [("0x1.ap+3", 13.0), ("13", 13.0), ("1.3e1", 13.0), ("0X1.AP3", 13.0), ("26", 26.0),
                                          ("0", 0.0), ("inf", math.inf), ("nan", math.nan)])
def test_total_norm(tool, small, given, total):
    report, shards, _ = tool.clip(small, "--total-norm", given)
    assert close(report["norm"]["total"], total, 0)
    assert [report["norm"][k] for k in ("elements", "zeros", "nan", "posinf", "neginf")] == [None] * 5
    coefficient = min(1.0, 1 / (total + 1e-6)) if not math.isnan(total) else math.nan
    assert close(report["clip"]["coefficient"], coefficient, 0)
    expected = np.float32([[3, 4]]) * np.float32(coefficient)
    assert np.array_equal(shards[0]["layers.0.weight"], expected, equal_nan=True)
    assert all(p["norm"] is None and p["zeros"] is None for p in report["parameters"])
    assert [(f["kind"], f["value"]) for f in report["findings"]] == (
        [] if math.isfinite(total) else [("total-nonfinite", given)])


def test_a_total_beyond_float64(tool):
    """No gradient is at fault: the norm type is."""
    dump = Dump(1, max_norm=1.0)
    dump.plain("w", np.full(8, 2.0, np.float32))
    path = dump.write(tool.fresh("dump"))
    report = tool.norms(path, "--norm-type", "0.001")
    assert report["norm"]["total"] == "inf"
    assert [f["kind"] for f in report["findings"]] == ["total-nonfinite"]
    assert "p = 0.001" in report["findings"][0]["message"] and "becomes" not in report["findings"][0]["message"]
    assert run(1, "norms", path, "--norm-type", "0.001", "--strict", "--quiet").code == 1
    report, shards, _ = tool.clip(path, "--norm-type", "0.001", "--max-norm", "1")
    assert report["findings"][0]["message"].endswith(": every gradient becomes 0") and not shards[0]["w"].any()
    sweep = tool.norms(path, "--norm-type", "0.001", "--sweep", "1")
    assert [f["kind"] for f in sweep["findings"]] == ["total-nonfinite"] and sweep["steps"][0]["findings"] == 1


def test_a_total_beyond_the_steps_own_arithmetic(tool):
    """float32 squares overflow where the exact total does not."""
    dump = Dump(1)
    dump.plain("w", np.full(8, 1e30, np.float32))
    path = dump.write(tool.fresh("dump"))
    assert tool.norms(path)["findings"] == []
    report, shards, _ = tool.clip(path, "--numerics", "torch", "--max-norm", "1")
    assert [(f["kind"], f["value"]) for f in report["findings"]] == [("total-nonfinite", "inf")]
    assert report["findings"][0]["message"].endswith(": every gradient becomes 0") and not shards[0]["w"].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_total_that_a_copy_spoils(tool, value):
    """In a rank's own total a copy counts that does not in the exact one: the copy is the finding."""
    dump = Dump(2, device_mesh="m")
    dump.mesh("m", ["dp"], [0, 1])
    dump.local("w", (4,), "m", ["Replicate()"], {0: np.ones(4, np.float32), 1: np.float32([1, value, 1, 1])})
    report = tool.norms(dump.write(tool.fresh("dump")), "--numerics", "automodel")
    assert report["norm"]["total"] == 2 and "total-nonfinite" not in [f["kind"] for f in report["findings"]]
    assert report["findings"][0]["kind"] == "nonfinite"
    what = "nan" if np.isnan(value) else "infinite"
    failed = run(1, "norms", report["dump"]["path"], "--numerics", "automodel", "--nonfinite", "error")
    assert failed.code == 4 and f"total norm: {what} on rank 1" in failed.err and "'w' on rank 1" in failed.err, failed


def test_a_copy_that_does_not_count_is_sorted_by_its_nan(tool):
    dump = Dump(2)
    dump.mesh("m", ["dp"], [0, 1])
    for name, spoilt in (("a", 0), ("b", 1), ("c", 2)):
        copy = np.ones(4, np.float32)
        copy[:spoilt] = np.nan
        dump.local(name, (4,), "m", ["Replicate()"], {0: np.ones(4, np.float32), 1: copy})
    out = run(1, "norms", dump.write(tool.fresh("dump")), "--sort", "nan").out
    assert [line[0] for line in out.splitlines() if line[:2] in ("a ", "b ", "c ")] == ["c", "b", "a"], out


def test_a_total_beyond_float64_fails_a_gate(tool):
    dump = Dump(1)
    dump.plain("w", np.full(8, 2.0, np.float32))
    path, baseline = dump.write(tool.fresh("dump")), tool.fresh("baseline.json")
    gate = ["check", path, "--baseline", baseline, "--norm-type", "0.001"]
    refused = run(1, *gate, "--update")
    assert refused.code == 1 and not baseline.exists() and "total-nonfinite" in refused.out, refused
    assert run(1, *gate, "--update", "--allow-nonfinite").code == 0
    assert run(1, *gate).code == 1
    passed = run(1, *gate, "--allow-nonfinite")
    assert passed.code == 0, passed


def test_no_max_norm_at_all(tool):
    dump = Dump(1)
    dump.plain("w", np.float32([3, 4]))
    report, shards, _ = tool.clip(dump.write(tool.fresh("dump")))
    assert report["norm"]["total"] == 5 and report["clip"]["max_norm"] is None and report["clip"]["coefficient"] is None
    assert report["clip"]["total_after"] == 5 and shards[0]["w"].tolist() == [3, 4]
    assert report["reference"]["totals"] == [{"total": 5.0, "coefficient": None, "ranks": [0]}]
    for max_norm, why in ((None, "no max norm was recorded or given"), (1.0, "--no-clip")):
        limited = Dump(1, **({} if max_norm is None else {"max_grad_norm": max_norm}))
        limited.plain("w", np.float32([3, 4]))
        text = run(1, "clip", limited.write(tool.fresh("dump")), "-o", tool.fresh("out"), "--no-clip").out
        assert f"nothing is clipped: {why}\n" in text, text


def test_memory_budget_spellings(tool, small):
    for text in ("64M", "64MiB", "1.5G", "67108864", "100kB"):
        assert tool.norms(small, "--memory-budget", text)["norm"]["total"] == 13.0
    assert tool.norms(small, "--memory-budget", "512Mi")["run"]["memory_budget_bytes"] == 512 << 20


def test_device(tool, small):
    assert tool.norms(small, "--device", "cpu")["run"]["device"] == "cpu"
    result = run(1, "norms", small, "--device", "cuda")
    assert result.code == 5 and "cuda" in result.err.lower() or result.code == 0, result
    if result.code == 5:
        refused(4, 5, small, "--device", "cuda", out=tool.fresh("out"))


def test_device_options_do_nothing_on_the_cpu(tool, small):
    plain, _, expected = tool.clip(small, "--device", "cpu")
    assert plain["run"]["device_memory_peak_bytes"] is None and plain["run"]["device_memory_budget_bytes"] is None
    assert plain["run"]["offload"] is None
    report, _, out = tool.clip(small, "--device", "cpu", "--offload", "--device-memory-budget", "1")
    assert tree(out) == tree(expected) and report["norm"] == plain["norm"] and report["reference"] == plain["reference"]
    assert report["run"]["device_memory_peak_bytes"] is None and "host memory" in report["run"]["offload"]
    text = run(2, "norms", small, "--device", "cpu", env={"GRADCLIP_OFFLOAD": "1"})
    assert text.code == 0 and "offload       nothing to move" in text.out.replace("\r", ""), text


def test_doctor_tells_why_there_is_no_nccl(tool):
    for np_ in (1, 2):
        result = run(np_, "doctor", "--device", "cpu", "--format", "json")
        assert result.code == 0 and "host memory" in result.out and '"nccl"' in result.out, result


# Where output goes -------------------------------------------------------------------------------------------------------------------

def test_report_keys(tool, small):
    """Scripts rely on these names (shared/cli.md)."""
    report, _, _ = tool.clip(small)
    assert report["format"] == "gradclip.report" and report["version"] == 1 and report["command"] == "clip"
    keys = {"dump": "path step world_size parameters elements bytes",
            "run": "processes device communicator threads numerics memory_peak_bytes seconds",
            "scale": "label_token_divisor expert_divisor", "norm": "type total elements zeros nan posinf neginf",
            "clip": "max_norm coefficient clipped total_after", "reference": "totals arithmetic"}
    for part, names in keys.items():
        assert set(names.split()) <= set(report[part]), part
    assert set(report["run"]["seconds"]) == {"read", "compute", "write", "total"}
    assert {"mesh", "placements", "parameters", "elements", "norm"} <= set(report["groups"][0])
    assert set("name model_part shape dtype mesh placements expert elements norm share max_abs min_abs mean zeros subnormals "
               "nan posinf neginf first_nonfinite".split()) <= set(report["parameters"][0])
    assert {"stages", "dtypes", "findings"} <= set(report)
    assert report["dump"] == {"path": str(small), "step": 100, "world_size": 2, "parameters": 2, "elements": 5,
                              "bytes": report["dump"]["bytes"]}
    assert report["dump"]["bytes"] == 16 + 2 * 4
    assert report["run"]["memory_peak_bytes"] > 1 << 20 and report["run"]["seconds"]["total"] > 0
    assert report["norm"]["total"] == 13 and report["norm"]["zeros"] == 2
    assert report["parameters"][0]["mesh"] == "dp" and report["parameters"][1]["mesh"] is None
    assert "clip" not in tool.norms(small)


def test_json_on_stdout_is_the_report_file(tool, small):
    file = tool.folder / "r.json"
    for np_ in (1, 3):
        result = run(np_, "norms", small, "--format", "json", "--report", file)
        assert result.code == 0 and result.err == "", result
        assert parse_report(result.out) == parse_report(file.read_text())


def test_csv_report(tool, small):
    file = tool.folder / "r.csv"
    result = run(1, "norms", small, "--report", file, "--quiet")
    assert result.code == 0 and result.out == "" and result.err == "", result
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [row["name"] for row in rows] == ["layers.0.weight", "layers.1.bias"]
    assert float(rows[0]["norm"]) == 5.0 and rows[0]["zeros"] == "2" and rows[1]["dtype"] == "float32"


def test_quiet_and_text(tool, small):
    out = tool.fresh("out")
    assert run(1, "clip", small, "-o", out, "--quiet").out == ""
    result = run(1, "clip", small, "-o", out, "--overwrite")
    assert "13" in result.out and str(out) in result.out and result.err == "", result
    assert 5 <= len(result.out.splitlines()) <= 40
    result = run(1, "clip", small, "-o", out, "--overwrite", "--quiet", "--format", "json")
    assert result.json()["norm"]["total"] == 13


def test_norms_table(tool):
    dump = Dump(1, max_grad_norm=1.0)
    for name, values in (("m.a", [1, 1]), ("m.b", [5, 0]), ("m.d", [2, np.nan]), ("m.c", [3, 3])):
        dump.plain(name, np.float32(values))
    path = dump.write(tool.fresh("dump"))

    def order(*args):
        result = run(1, "norms", path, *args)
        assert result.code == 0 and result.err == "", result
        lines = [line.split() for line in result.out.splitlines()]
        head = next(i for i, words in enumerate(lines) if words[:2] == ["name", "norm"])
        table = lines[head + 1:next(i for i, words in enumerate(lines) if words[:1] == ["total"])]
        return "".join(words[0][-1] for words in table if words and words[0].startswith("m."))
    assert order() == order("--by", "parameter") == "abdc"
    assert order("--sort", "name") == "abcd"
    assert order("--sort", "norm") == "dbca" and order("--sort", "nan")[0] == "d"
    assert order("--sort", "max") == "bcda"
    assert order("--top", "2", "--sort", "max") == "bc" and len(order("--top", "1")) == 1


def test_colour(tool, small):
    for env, args, coloured in (({}, [], False), ({}, ["--color", "always"], True), ({"CLICOLOR_FORCE": "1"}, [], True),
                                ({"CLICOLOR_FORCE": "1"}, ["--color", "never"], False),
                                ({"NO_COLOR": "1"}, ["--color", "always"], True)):
        assert ("\x1b[" in run(1, "norms", small, *args, env=env).out) is coloured, (env, args)
    assert "\x1b" not in run(2, "norms", small).out


def test_names_cannot_write_to_the_terminal(tool):
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain("evil\x1b[31m\rname\nline", np.float32([3, np.nan]))
    path = dump.write(tool.fresh("dump"))
    for args in (["norms", path], ["norms", path, "--format", "json"], ["inspect", path]):
        result = run(1, *args)
        assert result.code == 0 and "\x1b" not in result.out + result.err and "\r" not in result.out, result
    assert tool.norms(path)["parameters"][0]["name"] == "evil\x1b[31m\rname\nline"


def test_progress(tool, small):
    result = run(1, "norms", small, "--progress")
    assert result.code == 0 and "error" not in result.err
    assert run(1, "norms", small, "--no-progress").err == "" and run(2, "norms", small).err == ""


def test_a_closed_pipe_is_no_crash(tool, small):
    """gradclip norms DUMP | head -1"""
    for np_ in (1, 2):
        words = [*(launcher(2) if np_ > 1 else []), binary(), "norms", str(small)]
        result = execute(["bash", "-c", "set -o pipefail; " + " ".join(words) + " | head -n 1"], timeout=30)
        assert "terminate" not in result.err and "Segmentation" not in result.err, result
        assert result.code < 128 or result.code == 141, result


def test_a_dump_of_many_forms_of_path(tool, small):
    for path, cwd in ((f"{small}/", None), (small.name, small.parent), (".", small), (f"{small}/../{small.name}", None)):
        assert tool.norms(path, cwd=cwd)["norm"]["total"] == 13.0
    os.symlink(small, tool.folder / "link")
    assert tool.norms(tool.folder / "link")["norm"]["total"] == 13.0


def test_strict(tool, small):
    assert run(1, "norms", small, "--strict").code == 0
    dump = Dump(2)
    dump.plain("w", {0: np.float32([1]), 1: np.float32([2])})
    path = dump.write(tool.fresh("dump"))
    assert run(1, "norms", path, "--strict").code == 1 and run(3, "norms", path, "--strict").code == 1
    assert run(1, "norms", path, env={"GRADCLIP_STRICT": "1"}).code == 1
    _, shards, _ = tool.clip(path, "--strict", "--max-norm", "9", code=1)
    assert shards[1]["w"].tolist() == [2]


# inspect and doctor ----------------------------------------------------------------------------------------------------------------------

def test_inspect(tool):
    result = run(1, "inspect", DUMP)
    assert result.code == 0 and result.err == "", result
    for word in ("dp_shard", "tp", "lm_head.weight", "_StridedShard(dim=0, sf=2)", "max_grad_norm", "0.5", "gradclip_record"):
        assert word in result.out or word.replace("_", " ") in result.out, word
    report = run(1, "inspect", DUMP, "--format", "json").json()
    assert report["command"] == "inspect" and report["dump"]["world_size"] == 4 and report["dump"]["step"] == 100
    assert all(p["norm"] is None for p in report["parameters"])
    assert run(3, "inspect", DUMP).out.replace("\r", "") == result.out


def test_inspect_reads_no_gradient_data(tool, small):
    whole = run(1, "inspect", small, "--format", "json").out
    for file in small.glob("rank_*.h5"):
        file.unlink()
    result = run(1, "inspect", small, "--format", "json")
    assert result.code == 0 and result.out == whole, result


def test_doctor():
    result = run(1, "doctor")
    assert result.code == 0 and result.err == "", result
    for word in ("gradclip", "HDF5", "MPI", "cpu", "NCCL"):
        assert word.lower() in result.out.lower(), word
    report = run(1, "doctor", "--format", "json").json()
    assert report["command"] == "doctor" and report["format"] == "gradclip.report"
    memory, processor = report["memory"], report["processor"]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory["physical_bytes"] == pages
    assert memory["control_group_bytes"] is None or memory["control_group_bytes"] > 0
    assert 0 < memory["budget_bytes"] <= pages
    assert processor["processors"] == len(os.sched_getaffinity(0)) >= processor["threads"] > 0
    assert report["communicator"]["processes"] == 1 == report["communicator"]["processes_on_this_host"]
    text = run(1, "doctor").out
    assert f"{processor['processors']} usable: {processor['allowed_processors']}" in text and "a process by default" in text
    assert run(2, "doctor").code == 0


# Launchers ---------------------------------------------------------------------------------------------------------------------------------

def test_started_by_torchrun(tool, small):
    """RANK without an MPI launcher: one sentence instead of N runs that do the same work."""
    for rank in ("0", "1"):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
        out = tool.fresh("out")
        result = run(1, "clip", small, "-o", out, env=env)
        assert result.code == 2 and not out.exists(), result
        assert len(result.error_lines) == (rank == "0"), result
        if rank == "0":
            assert "torchrun" in result.err and "mpirun" in result.err, result
    assert run(2, "norms", small, env={"RANK": "0", "WORLD_SIZE": "1"}).code == 0


def test_more_processes_than_ranks(tool, small):
    first = tool.norms(small)
    for np_ in (3, 5) if LONG else (5,):
        again = tool.norms(small, np=np_)
        assert again["norm"] == first["norm"] and again["run"]["processes"] == np_


def test_threads_follow_the_affinity_mask(tool, small):
    """A process that its launcher bound to one core runs one thread, however many the machine has."""
    mine = sorted(os.sched_getaffinity(0))
    assert tool.norms(small)["run"]["threads"] == len(mine)
    for cores in {1, max(1, len(mine) // 2)}:
        bound = tool.norms(small, preexec_fn=lambda: os.sched_setaffinity(0, mine[:cores]))
        assert bound["run"]["threads"] == cores, bound["run"]


def test_environment_of_the_launch_is_clean():
    assert not [key for key in environment() if key.startswith(("GRADCLIP_", "PMI"))]
