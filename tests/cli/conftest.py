"""The installed gradclip as a user runs it, alone or under mpirun. GRADCLIP_BIN names it; ctest sets that."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDEN = ROOT / "testdata" / "golden"
LONG = os.environ.get("GRADCLIP_LONG", "") not in ("", "0")
DEVICE = os.environ.get("GRADCLIP_TEST_DEVICE", "")  # "cuda": the program under test is the emulated one
TIMEOUT = 60  # seconds for any command: nothing may hang

sys.path.insert(0, str(HERE))
pytest.register_assert_rewrite("accumulation", "dump_builder", "oracle", "element_types")

import dump_builder  # noqa: E402
import element_types  # noqa: E402

# A launch that ends removes the directory that all launches of a machine share, now and then while another one is about to
# make its own in it, which then fails. Suites run side by side.
SESSIONS = tempfile.TemporaryDirectory(prefix="gradclip-mpi-", ignore_cleanup_errors=True)
os.chmod(SESSIONS.name, 0o1777)  # other users' too, as /tmp

# The last but one: mpirun waits a second before it kills what a failed process has left, and again before it ends. It does
# not protect anything here, and most of these tests are about runs that end otherwise.
QUIET_MPI = {"OMPI_MCA_btl_base_warn_component_unused": "0", "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
             "OMPI_MCA_btl": "self,vader", "OMPI_MCA_mpi_yield_when_idle": "1",
             "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_rmaps_base_oversubscribe": "1",
             "OMPI_MCA_odls_base_sigkill_timeout": "0", "OMPI_MCA_orte_tmpdir_base": SESSIONS.name}
LAUNCHED = re.compile(r"GRADCLIP_|GITHUB_|OMPI_|PMI|SLURM_|(RANK|WORLD_SIZE|LOCAL_RANK|NO_COLOR|CLICOLOR_FORCE)$")


def binary():
    path = os.environ.get("GRADCLIP_BIN", "")
    if not path or not os.access(path, os.X_OK):
        pytest.exit(f"GRADCLIP_BIN is {path!r}: set it to the gradclip to test", returncode=2)
    return os.path.abspath(path)


def environment(**changes):
    env = {key: value for key, value in os.environ.items() if not LAUNCHED.match(key)}
    env.update(QUIET_MPI)
    if DEVICE:  # a process has a device of its own, so that NCCL serves them
        env.update(GRADCLIP_DEVICE=DEVICE, GRADCLIP_EMULATION_DEVICES="8")
    env.update({key: str(value) for key, value in changes.items()})
    return env


def launcher(np):
    return ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-np", str(np)]


@dataclass
class Result:
    command: list
    code: int
    out: str
    err: str
    seconds: float

    def __str__(self):
        return f"{' '.join(self.command)}\nexit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    def json(self):
        return parse_report(self.out)

    @property
    def error_lines(self):
        return [line for line in self.err.splitlines() if "gradclip: error:" in line]


#: Of mpirun, now and then: of its event library when a process ends while its standard input is being closed, and of its
#: remote agent.
LAUNCHER_NOISE = re.compile(r"^(\[warn\] Epoll |\[[^\n]*\] plm:rsh: Warning: setpgid)[^\n]*\n", re.MULTILINE)


def execute(command, *, timeout=TIMEOUT, env=None, **popen):
    began = time.monotonic()
    process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True, env=env or environment(), **popen)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # mpirun ends its processes, which are sessions of their own
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        pytest.fail(f"still running after {timeout} s: {' '.join(map(str, command))}")
    err = LAUNCHER_NOISE.sub("", err.decode("utf-8", "replace"))
    return Result([str(word) for word in command], process.returncode, out.decode("utf-8", "replace"), err,
                  time.monotonic() - began)


def run(np, *args, env=None, timeout=TIMEOUT, program=None, **popen):
    """gradclip ARGS on np processes; np = 1 without a launcher, np = "mpirun 1" with one. Never raises for an exit code."""
    launch = [] if np == 1 else launcher(1 if np == "mpirun 1" else np)
    return execute([*launch, program or binary(), *args], env=environment(**(env or {})), timeout=timeout, **popen)


def parse_report(text):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    def pairs(items):
        assert len({key for key, _ in items}) == len(items), f"a key stands twice: {[key for key, _ in items]}"
        return dict(items)
    return json.loads(text, parse_constant=refuse, object_pairs_hook=pairs)


def number(value):
    """A report's number: JSON's own, or one of the strings for those that JSON cannot carry."""
    if isinstance(value, str):
        assert value in ("nan", "inf", "-inf"), value
    return float(value)


def close(value, expected, relative=4e-15):
    value = number(value)
    if math.isnan(expected):
        return math.isnan(value)
    if math.isinf(expected):
        return value == expected
    return math.isclose(value, expected, rel_tol=relative, abs_tol=0.0)


def tree(path):
    """Every file below a directory, with its bytes."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(Path(path).rglob("*")) if file.is_file()}


def without_run(report):
    """A report without what may differ between two runs."""
    return {key: value for key, value in report.items() if key not in ("run", "output")}


def kinds(report):
    return [finding["kind"] for finding in report["findings"]]


def finding(report, kind):
    found = [each for each in report["findings"] if each["kind"] == kind]
    assert len(found) == 1, report["findings"]
    return found[0]


def parameter(report, name):
    return next(each for each in report["parameters"] if each["name"] == name)


def assert_shards(found, expected):
    """Bit for bit, with the first difference shown as numbers."""
    assert {rank: sorted(names) for rank, names in found.items()} == {
        rank: sorted(names) for rank, names in expected.items()}
    for rank, names in expected.items():
        for name, stored in names.items():
            got = found[rank][name]
            if stored is None or got is None:
                assert got is None and stored is None, (rank, name, got, stored)
                continue
            if not element_types.same_bits(got, stored):
                size = stored.dtype.itemsize
                bits = [np_bits(a, size) for a in (got, stored)]
                assert got.dtype == stored.dtype and got.shape == stored.shape, (rank, name, got, stored)
                at = next(i for i, (a, b) in enumerate(zip(*bits)) if a != b)
                pytest.fail(f"rank {rank}, {name}, element {at}: {bits[0][at]:#x}, expected {bits[1][at]:#x}")


def np_bits(array, size):
    import numpy
    return numpy.ascontiguousarray(array).reshape(-1).view(f"<u{size}").tolist()


class Tool:
    """Commands on dumps in a test's own directory."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def fresh(self, name):
        self.count += 1
        path = self.folder / f"{name}{self.count}"
        return path

    def clip(self, dump, *args, np=1, code=0, **how):
        """(report, shards as written, directory) of a run that has to succeed."""
        out, report = self.fresh("out"), self.fresh("report").with_suffix(".json")
        result = run(np, "clip", dump, "-o", out, "--report", report, *args, **how)
        assert result.code == code, result
        assert result.err == "", result
        assert not out.with_name(out.name + ".partial").exists()
        return parse_report(report.read_text()), dump_builder.read_shards(out), out

    def norms(self, dump, *args, np=1, code=0, **how):
        result = run(np, "norms", dump, "--format", "json", *args, **how)
        assert result.code == code and result.err == "", result
        return result.json()

    def everywhere(self, dump, *args, counts=(1, 3), **how):
        """clip() on each process count: the same bytes and the same report from each."""
        first = None
        for np in counts:
            report, shards, out = self.clip(dump, *args, np=np, **how)
            assert report["run"]["processes"] == (1 if np == "mpirun 1" else np)
            if first is None:
                first = report, shards, out
                continue
            assert without_run(report) == without_run(first[0]), f"{np} processes"
            a, b = tree(first[2]), tree(out)
            assert sorted(a) == sorted(b)
            assert [name for name in a if a[name] != b[name]] == [], f"{np} processes wrote other bytes"
        return first


@pytest.fixture
def tool(tmp_path):
    yield Tool(tmp_path)
    if not os.environ.get("GRADCLIP_KEEP"):
        shutil.rmtree(tmp_path, ignore_errors=True)


def refused(np, code, dump, *args, out=None, mentions=(), within=10, watched=(), **how):
    """A command that has to be refused: the code, one message, in time, nothing written, nothing changed."""
    dumps = [path for path in [Path(dump), *map(Path, watched)] if path.is_dir()]
    before = [tree(path) for path in dumps]
    beside = out is not None and not out.exists()
    arguments = ["clip", dump, "-o", out, *args] if out is not None else args
    result = run(np, *arguments, **how)
    assert result.code == code, result
    assert len(result.error_lines) == 1 and result.err.count("\n") == 1 and result.err.startswith("gradclip: error:"), result
    assert result.out == "", result
    assert result.seconds < within, f"took {result.seconds:.1f} s\n{result}"
    assert all(character.isprintable() for character in result.err.rstrip("\n")), repr(result.err)
    for word in mentions:
        assert word in result.err, result
    if beside:
        assert not out.exists(), result
        assert not out.with_name(out.name + ".partial").exists(), result
    assert [tree(path) for path in dumps] == before, "the input was changed"
    return result


@pytest.fixture
def stranger():
    """(folder, how to run): a dump's place and a user that is not root, who may read everything; "home" is theirs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        home = folder / "home"
        home.mkdir()
        how = {"env": {"HOME": home, "TMPDIR": home}}
        if os.geteuid() == 0:
            os.chown(home, 65534, 65534)
            how |= {"user": 65534, "group": 65534, "extra_groups": [], "program": shutil.copy(binary(), folder)}
        yield folder, how
