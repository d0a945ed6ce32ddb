"""Faults of storage and of processes, made on purpose: tests/faults/faults.c in front of the C library."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import LAUNCHER_NOISE, binary, environment, launcher, run, tree
from dump_builder import Dump

LIBRARY = os.environ.get("GRADCLIP_FAULTS", "")
# How long mpirun waits before it sends a signal, and again before it kills: longer than by default, for busy machines.
PATIENT = {"OMPI_MCA_odls_base_sigkill_timeout": "2"}


def library():
    if not os.path.isfile(LIBRARY):
        pytest.skip("GRADCLIP_FAULTS does not name the library of tests/faults")
    return LIBRARY


def faulty(call, number, what, path, process=None, log=None):
    """The environment in which that happens."""
    env = {"LD_PRELOAD": library(), "FAULT": f"{call}:{number}:{what}:{path}", **PATIENT}
    if process is not None:
        env["FAULT_PROCESS"] = process
    if log is not None:
        env["FAULT_LOG"] = log
    return env


def several_ranks(folder, ranks=6, seed=5, elements=600, **storage):
    """Large enough that every process has rank files, small enough to be clipped in milliseconds."""
    dump = Dump(ranks, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], list(range(ranks)))
    values = np.random.default_rng(seed)
    dump.sharded("layers.0.weight", values.standard_normal((elements, 4)).astype(np.float32), "dp", ["Shard(0)"])
    dump.plain("bias", values.standard_normal(5).astype(np.float32))
    return dump.write(folder / "dump", **storage)


class Place:
    """One dump, what clipping it gives without faults, and where it is clipped with them."""

    def __init__(self, folder, **storage):
        library()  # without it there is nothing to test
        self.folder = folder
        self.dump = several_ranks(folder, **storage)
        self.before = tree(self.dump)
        reference = folder / "reference"
        result = run(1, "clip", self.dump, "-o", reference)
        assert result.code == 0, result
        self.expected = tree(reference)
        self.work = folder / "work"
        self.work.mkdir()
        self.out = self.work / "out"
        self.unfinished = self.work / "out.partial" / "output"  # where the rank files of `out` are made

    def clip(self, *args, np=1, **how):
        return run(np, "clip", self.dump, "-o", self.out, *args, **how)

    def calls(self, call, *args, np=1, process=None, within=None):
        """How many of these calls a run without faults makes within that place, `work` if none is given."""
        log = self.folder / "calls"
        log.unlink(missing_ok=True)
        result = self.clip(*args, np=np, env=faulty(call, 1 << 30, "EIO", within or self.work, process, log))
        assert result.code == 0, result
        self.clear()
        return len(log.read_text().splitlines()) if log.exists() else 0

    def clear(self):
        for path in self.work.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def assert_whole_or_absent(self):
        """OUT is nothing or a dump without findings, and nothing was done to the input."""
        if self.out.exists():
            verified = run(1, "verify", self.out)
            assert verified.code == 0, verified
            assert tree(self.out) == self.expected
        assert tree(self.dump) == self.before, "the input was changed"

    def assert_nothing_else(self):
        left = sorted(path.name for path in self.work.iterdir() if path != self.out)
        assert left == [], left

    def assert_next_run_works(self, *args, np=1):
        """After which only OUT is there, as if nothing had ever happened."""
        result = self.clip("--overwrite", *args, np=np)
        assert result.code == 0 and result.err == "", result
        assert tree(self.out) == self.expected, "other bytes than those of an undisturbed run"
        self.assert_nothing_else()
        self.clear()
        return result


def processes_of(launched):
    """The gradclip processes below it, by process id."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            stat = (entry / "stat").read_text()
            parent = int(stat.rsplit(")", 1)[1].split()[1])
            if parent == launched.pid and f"({Path(binary()).name[:15]})" in stat:
                found.append(int(entry.name))
    return sorted(found)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


class Launched:
    """A run that goes on while the test does something to it."""

    def __init__(self, np, *args, env=None, **popen):
        launch = [] if np == 1 else launcher(np)
        self.np = np
        self.process = subprocess.Popen([*launch, binary(), *map(str, args)], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                                        env=environment(**{**PATIENT, **(env or {})}), **popen)
        self.pid = self.process.pid

    def processes(self, within=20):
        """Waits until all of them are there."""
        if self.np == 1:
            return [self.pid]
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            found = processes_of(self)
            if len(found) == self.np:
                return found
            time.sleep(0.005)
        raise AssertionError("the processes did not start")

    def end(self, within=10):
        """(code, stdout, stderr); all of its processes are gone in time, the launcher when it has waited for them."""
        deadline = time.monotonic() + within
        pids = processes_of(self) or [self.pid]
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [pid for pid in pids if is_alive(pid)]
        try:
            out, err = self.process.communicate(timeout=0.1 if left else 20)
        except subprocess.TimeoutExpired:
            left.append(self.pid)
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.communicate()
        assert left == [], f"still there after {within} s"
        return self.process.returncode, out.decode(), LAUNCHER_NOISE.sub("", err.decode())


def until(condition, within=20):
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)
