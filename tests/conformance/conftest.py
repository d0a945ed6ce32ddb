"""What the conformance tests share: the program under test, and worlds of gloo processes."""

import json
import math
import os
import shutil
import socket
import subprocess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]

import pytest  # noqa: E402


class Gradclip:
    """The program as a user runs it; every run's report as a dictionary, non-finite numbers as floats."""

    def __init__(self, program):
        self.program, self.commands = program, []

    def __call__(self, command, dump, *options, processes=None, reports):
        report = reports / f"report{len(self.commands)}.json"
        line = [self.program, command, dump, *options, "--report", report, "--quiet"]
        if processes is not None:
            line = [ROOT / "tests/support/mpirun.sh", "mpirun", "--allow-run-as-root", "--oversubscribe", "-q", "-np", processes,
                    *line]
        line = list(map(str, line))
        self.commands.append(" ".join(line))
        print("ran:", self.commands[-1])
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(report.read_text(encoding="utf-8"), object_hook=_with_floats)


def _with_floats(found):
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {key: words.get(value, value) if isinstance(value, str) else value for key, value in found.items()}


@pytest.fixture(scope="session")
def gradclip():
    program = os.environ.get("GRADCLIP_BIN", ROOT / "build" / "release" / "apps" / "gradclip" / "gradclip")
    assert shutil.which(program), f"{program} is not there; build gradclip, or set GRADCLIP_BIN"
    return Gradclip(program)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
