"""What is typed: spellings of paths, files that are no files, limits of the system, options that contradict each other,
names that are almost right."""

import json
import os
import resource
import subprocess

import numpy as np
import pytest

from conftest import binary, environment, refused, run
from dump_builder import Dump


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    dump = Dump(2, max_grad_norm=1.0)
    dump.plain("weight", np.float32([3, 4, 0, 0]))
    return dump.write(tmp_path_factory.mktemp("small") / "dump")


# Spellings of one path ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("report", ["{}", "./{}", "{here}/{}", "sub/../{}"])
@pytest.mark.parametrize("output", ["{}", "./{}", "{here}/{}"])
def test_a_report_in_place_of_the_output(small, tmp_path, report, output):
    (tmp_path / "sub").mkdir()
    of = lambda spelling, name: spelling.format(name, here=tmp_path)  # noqa: E731
    refused(1, 2, small, "clip", small, "-o", of(output, "same.json"), "--report", of(report, "same.json"), cwd=tmp_path,
            mentions=["it is the output dump"])
    refused(1, 2, small, "clip", small, "-o", of(output, "out"), "--report", of(report, "out/r.json"), cwd=tmp_path,
            mentions=["inside the output dump"])
    assert sorted(os.listdir(tmp_path)) == ["sub"]


@pytest.mark.parametrize("dump", ["dump", "./dump", "{here}/dump"])
@pytest.mark.parametrize("report", ["dump/r.json", "./dump/r.json", "{here}/dump/r.json", "link/r.json", "dangling.json"])
def test_a_report_inside_the_input(small, dump, report):
    here = small.parent
    for link, target in (("link", "dump"), ("dangling.json", "dump/new.json")):
        if not os.path.lexists(here / link):
            (here / link).symlink_to(target)
    refused(1, 2, small, "norms", dump.format(here=here), "--report", report.format(here=here), cwd=here,
            mentions=["inside the input dump"])


@pytest.mark.parametrize("report", ["same.json", "./same.json", "{here}/same.json", "link.json"])
def test_a_report_in_place_of_the_baseline(small, tmp_path, report):
    (tmp_path / "link.json").symlink_to("same.json")
    for baseline in ("same.json", "./same.json", f"{tmp_path}/same.json"):
        refused(1, 2, small, "check", small, "--baseline", baseline, "--update", "--report", report.format(here=tmp_path),
                cwd=tmp_path, mentions=["it is the baseline"])


def test_links_are_followed_to_what_is_not_there_yet(small, tmp_path):
    (tmp_path / "kept").mkdir()
    for link, *words in (("base.json", "check", small, "--update", "--baseline"), ("report.json", "norms", small, "--report")):
        (tmp_path / link).symlink_to(f"kept/{link}")
        for _ in range(2):  # the second time the link has a target
            result = run(1, *words, f"./{link}", cwd=tmp_path)
            assert result.code == 0, result
            assert (tmp_path / link).is_symlink() and (tmp_path / "kept" / link).is_file(), result
    (tmp_path / "page.html").symlink_to("kept/page.html")
    assert run(1, "report", "report.json", "-o", "page.html", cwd=tmp_path).code == 0
    assert (tmp_path / "page.html").is_symlink() and (tmp_path / "kept/page.html").is_file()
    (tmp_path / "loop.json").symlink_to("loop.json")
    refused(1, 2, small, "norms", small, "--report", "loop.json", cwd=tmp_path, mentions=["loop.json"])


def test_a_page_goes_by_the_rules_of_reports(small, tmp_path):
    assert run(1, "norms", small, "--report", "r.json", cwd=tmp_path).code == 0
    for output, mention in [("none/page.html", "its directory does not exist"), ("page.pdf", "ends in .html"),
                            ("page", "has no ending"), ("page.html.json", "ends in .html"), (".", "it is a directory"),
                            ("./r.json", "it is the input")]:
        refused(1, 2, small, "report", "r.json", "-o", output, cwd=tmp_path, mentions=["--output", mention])
    assert os.listdir(tmp_path) == ["r.json"]


def test_hosts_with_storage_of_their_own_continue_nothing(small, tmp_path):
    refused(1, 2, small, "clip", small, "-o", "out", "--resume", "--locality", "files", cwd=tmp_path,
            mentions=["--resume", "--locality"])
    assert os.listdir(tmp_path) == []


# Files that are named by options ---------------------------------------------------------------------------------------------

def reading(small, file):
    """Every command that reads a small file of the user, with the code of a file that is none."""
    return [(2, "diff", small, small, "--map", file), (2, "norms", small, "--config", file),
            (3, "synth", "-o", "out", "--model", file), (3, "check", small, "--baseline", file),
            (3, "report", file, "-o", "page.html")]


def test_directories_and_endless_devices_are_no_files(small, tmp_path):
    with open(tmp_path / "long", "w") as file:
        file.truncate((1 << 30) + 1)
    for file, mention in (("/", "is a directory"), (".", "is a directory"), ("long", "has more than")):
        for code, *words in reading(small, file):
            refused(1, code, small, *words, cwd=tmp_path, mentions=[mention])
    for code, *words in reading(small, "/dev/zero")[:3]:
        result = refused(1, code, small, *words, cwd=tmp_path, mentions=["/dev/zero", "has more than 16777216 bytes"])
        assert result.seconds < 5


def test_pipes_are_read_to_their_end(small, tmp_path):
    report = run(1, "norms", small, "--format", "json").out
    assert run(1, "check", small, "--baseline", "base.json", "--update", cwd=tmp_path).code == 0
    description = {"format": "gradclip.model", "version": 1, "name": "m", "layers": 1,
                   "parameters": [{"name": "layers.{layer}.w", "shape": [4]}]}
    texts = ["x" * 100000 + " -> y\nweight -> weight\n", json.dumps({"norm-type": 1}) + " " * 200000, json.dumps(description),
             (tmp_path / "base.json").read_text(), report]
    for text, (_, *words) in zip(texts, reading(small, "pipe")):
        if os.path.lexists(tmp_path / "pipe"):
            (tmp_path / "pipe").unlink()
        os.mkfifo(tmp_path / "pipe")
        writer = subprocess.Popen(["sh", "-c", "cat > pipe"], cwd=tmp_path, stdin=subprocess.PIPE)
        process = subprocess.Popen([binary(), *words], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        writer.communicate(text.encode())
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, (words, out, err)


@pytest.mark.parametrize("text, mentions", [
    ("{", ["well-formed", "line 1"]), ("", ["well-formed"]), ("[1]", ["not a JSON object"]), ('{"top": NaN}', ["NaN"]),
    ('{"top": 1e999}', ["float64"]), ('{"top": 1, "top": 2}', ["'top'", "stands twice"]), ("\xff", ["well-formed"]),
    ('{"top": [1]}', ["'top'", "text, a number"]), ('{"tops": 1}', ["'tops'", "no such option"])])
def test_a_config_file_is_refused_in_words(small, tmp_path, text, mentions):
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    result = refused(1, 2, small, "norms", small, "--config", "run.json", cwd=tmp_path, mentions=["'run.json'", *mentions])
    assert "json.exception" not in result.err


# Limits ---------------------------------------------------------------------------------------------------------------------

def test_the_limit_of_file_sizes_is_a_failed_write(tmp_path):
    """ulimit -f: every file that is written, not a signal."""
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain("weight", np.ones(1 << 16, np.float32))
    path = dump.write(tmp_path / "dump")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))  # noqa: E731
    before = sorted(os.listdir(tmp_path))
    for words in (["clip", path, "-o", "out"], ["merge", path, "-o", "out"], ["merge", path, "-o", "out.safetensors", "--safetensors"],
                  ["synth", "-o", "out", "--model", "moe-tiny"], ["norms", path, "--report", "r.html"]):
        result = run(1, *words, cwd=tmp_path, preexec_fn=limit)
        assert result.code == 5 and len(result.error_lines) == 1, result
        assert "File too large" in result.err and "18446744073709551615" not in result.err, result
        assert sorted(os.listdir(tmp_path)) == before, result


# Options that contradict each other -------------------------------------------------------------------------------------

def test_both_sources_of_a_contradiction_are_named(small, tmp_path):
    (tmp_path / "run.json").write_text('{"sweep": "1,2", "by": "group"}')
    both = "both are given"
    refused(1, 2, small, "norms", small, "--top", "2", env={"GRADCLIP_SWEEP": "1"}, mentions=["GRADCLIP_SWEEP and --top", both])
    refused(1, 2, small, "norms", small, "--top", "2", "--config", "run.json", cwd=tmp_path,
            mentions=["'sweep' in config file 'run.json' and --top", both])
    refused(1, 2, small, "norms", small, "--top", "2", "--sweep", "1", mentions=["--sweep and --top", both])
    refused(1, 2, small, "norms", small, "--depth", "2", env={"GRADCLIP_BY": "group"}, mentions=["--depth", "GRADCLIP_BY is 'group'"])


# A step that is not started alone ------------------------------------------------------------------------------------------

def test_torchrun_of_one_process_and_what_reads_no_gradients(small, tmp_path):
    assert run(1, "norms", small, "--report", "r.json", cwd=tmp_path, env={"RANK": "0", "WORLD_SIZE": "1"}).code == 0
    many = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    for words in (["inspect", small], ["doctor"], ["report", "r.json", "-o", "page.html"], ["--help"], ["norms", "--help"], ["--version"]):
        result = run(1, *words, cwd=tmp_path, env=many)
        assert result.code == 0 and result.err == "", result
    for words in (["norms", small], ["clip", small, "-o", "out"], ["verify", small], ["diff", small, small],
                  ["merge", small, "-o", "out"], ["check", small, "--baseline", "b.json", "--update"],
                  ["tokens", small], ["synth", "-o", "out", "--model", "moe-tiny"]):
        refused(1, 2, small, *words, cwd=tmp_path, env={"RANK": "0", "WORLD_SIZE": "2"}, mentions=["torchrun", "mpirun"])
        assert run(1, *words, cwd=tmp_path, env=many).code == 2
    assert sorted(os.listdir(tmp_path)) == ["page.html", "r.json"]


# Names that are almost right ---------------------------------------------------------------------------------------------------

def test_what_was_meant(small):
    refused(1, 2, small, "norms", small, "--max-nrom", "1", mentions=["--max-nrom", "did you mean --max-norm?"])
    refused(2, 2, small, "nroms", small, mentions=["did you mean norms?"])
    refused(1, 2, small, "norms", small, "--threads", "999999", mentions=["from 1 to 65536"])


NO_USE = {  # options of other commands, which would do nothing
    "inspect": ["--norm-type", "--numerics", "--strict", "--device", "--threads", "--memory-budget", "--progress", "--offload"],
    "verify": ["--numerics", "--max-norm", "--offload", "--histogram"],
    "diff": ["--norm-type", "--numerics", "--device", "--pp-axis"],
    "merge": ["--norm-type", "--numerics", "--device", "--rtol"],
    "tokens": ["--norm-type", "--numerics", "--device", "--threads", "--progress"],
    "synth": ["--norm-type", "--numerics", "--device", "--memory-budget", "--strict"],
    "doctor": ["--norm-type", "--numerics", "--threads", "--memory-budget", "--strict", "--progress"]}
VALUES = {"--norm-type": "2", "--numerics": "torch", "--device": "cpu", "--threads": "1", "--memory-budget": "1G",
          "--max-norm": "1", "--pp-axis": "pp", "--rtol": "0"}


@pytest.mark.parametrize("command", NO_USE)
def test_an_option_that_would_do_nothing_is_refused(small, tmp_path, command):
    words = {"diff": [small, small], "merge": [small, "-o", tmp_path / "out"], "doctor": [],
             "synth": ["-o", tmp_path / "out", "--model", "moe-tiny"]}.get(command, [small])
    options = {line.split()[0].rstrip(",") for line in run(1, command, "--help").out.splitlines() if line.strip()}
    assert "--report" in options
    for option in NO_USE[command]:
        assert option not in options, option
        value = [VALUES[option]] if option in VALUES else []
        refused(1, 2, small, command, *words, option, *value, mentions=[f"{command} has no use for {option}"])
    config = tmp_path / "config.json"  # which may serve several commands
    config.write_text(json.dumps({option[2:]: VALUES.get(option, True) for option in NO_USE[command]}))
    assert run(1, command, *words, "--config", config, "--quiet", env={"GRADCLIP_NUMERICS": "torch"}).code == 0


@pytest.mark.parametrize("np_", [1, 2])
def test_a_variable_of_no_option_is_a_warning(small, np_):
    env = {"GRADCLIP_TOPP": "1", "GRADCLIP_CPU_KERNELS": "baseline", "GRADCLIP_EMULATION_DEVICES": "1", "GRADCLIP_EMPTY": ""}
    result = run(np_, "norms", small, env=env)
    assert result.code == 0 and "total norm" in result.out, result
    assert result.err == "gradclip: warning: the environment variable GRADCLIP_TOPP is no option's; did you mean GRADCLIP_TOP?\n"


# What gradients were multiplied by ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("numerics", ["exact", "torch"])
def test_a_skipped_clipping_has_no_coefficient(tool, value, numerics):
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain("weight", np.float32([3, 4, value]))
    path = dump.write(tool.fresh("dump"))
    report, shards, out = tool.clip(path, "--nonfinite", "skip", "--numerics", numerics)
    assert report["clip"]["skipped"] and report["clip"]["coefficient"] is None and not report["clip"]["clipped"]
    np.testing.assert_array_equal(shards[0]["weight"], np.float32([3, 4, value]))
    assert json.loads((out / "manifest.json").read_text())["clip"]["coefficient"] is None
    report, shards, _ = tool.clip(path, "--nonfinite", "propagate", "--numerics", numerics)
    assert report["clip"]["coefficient"] == (0.0 if value == np.inf else "nan")
    np.testing.assert_array_equal(shards[0]["weight"][:2], np.float32([3, 4]) * np.float32(0.0 if value == np.inf else np.nan))
