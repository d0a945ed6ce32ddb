"""Processes that are killed, stopped, interrupted or out of memory, and launchers that are gone: all of a run's processes
end within 10 s, one message says why, the code is the documented one, nothing is left behind."""

import contextlib
import os
import random
import resource
import signal
import time

import pytest

from conftest import LONG, run
from faults import Launched, Place, faulty, until


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("processes"))


@pytest.fixture(autouse=True)
def clean(place):
    yield
    place.clear()


def held(place, number=1):
    """A run that never gets to the end: from that write of a rank file on all wait, however busy the machine is."""
    return faulty("write", f"{number}+", "wait", place.unfinished)


def begun(place):
    until(place.unfinished.is_dir)


def assert_ended(place, launched, code, *words, told=True, within=10):
    got, out, err = launched.end(within)
    assert got in (code if isinstance(code, tuple) else (code,)), (got, err)
    lines = [line for line in err.splitlines() if "gradclip: error:" in line]
    assert len(lines) == 1 or not (told or lines), err
    for word in words:
        assert all(word in line for line in lines), err
    assert out == "" and not place.out.exists()
    place.assert_nothing_else()
    return err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_one_process(place, sent):
    launched = Launched(1, "clip", place.dump, "-o", place.out, env=held(place),
                        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL))  # a test may run where it is ignored
    begun(place)
    os.kill(launched.pid, sent)
    err = assert_ended(place, launched, -sent, f"interrupted by {sent.name}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("np, runs, seconds", [(1, 400 if LONG else 60, 0.06), (3, 60 if LONG else 5, 0.5)])
def test_a_signal_at_any_moment(place, np, runs, seconds):
    """Of the start, of the output's making, of its end: nothing is left but a whole output. In the order of a seed."""
    moments, report = random.Random(np), place.work / "report.json"
    for _ in range(runs):
        launched = Launched(np, "clip", place.dump, "-o", place.out, "--report", report)
        processes = launched.processes()
        time.sleep(moments.random() * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(moments.choice(processes), signal.SIGTERM)
        code, _, err = launched.end()
        place.assert_whole_or_absent()
        assert not report.exists() or place.out.exists(), err
        report.unlink(missing_ok=True)
        place.assert_nothing_else()
        assert code != 0 or place.out.exists(), (code, err)
        place.clear()


def test_a_signal_while_a_report_is_written(place):
    report = place.work / "report.json"
    launched = Launched(1, "norms", place.dump, "--report", report, env=faulty("sync", 1, "wait", place.work))
    until(lambda: any(place.work.iterdir()))
    os.kill(launched.pid, signal.SIGTERM)
    assert_ended(place, launched, -signal.SIGTERM, "interrupted by SIGTERM")


def test_a_signal_with_resume_keeps_what_is_finished(place):
    options = ["--resume", "--threads", "1"]  # one file after another
    last = place.calls("write", *options, within=place.unfinished)
    launched = Launched(1, "clip", place.dump, "-o", place.out, *options, env=held(place, last))
    notes = place.work / "out.partial" / "finished"
    until(lambda: notes.is_dir() and len(list(notes.iterdir())) > 1)
    os.kill(launched.pid, signal.SIGTERM)
    code, _, err = launched.end()
    assert code == -signal.SIGTERM and "interrupted by SIGTERM; run it again with --resume to continue" in err, err
    result = place.clip("--resume", "--format", "json")
    assert result.json()["run"]["kept_files"] > 0, result
    place.assert_whole_or_absent()
    again = place.clip("--resume")
    assert again.code == 2 and "exists and is whole: nothing is left to resume" in again.err, again


def test_a_signal_that_is_ignored_stays_so(place):
    launched = Launched(1, "clip", place.dump, "-o", place.out,
                        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.kill(launched.pid, signal.SIGHUP)
    assert launched.end()[0] == 0 and place.out.exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher(place, sent):
    launched = Launched(3, "clip", place.dump, "-o", place.out, env=held(place))
    begun(place)
    os.kill(launched.pid, sent)
    # Open MPI 4 forwards nothing more of what its processes say once it is interrupted itself.
    assert_ended(place, launched, (1, 130, 143), "interrupted by SIGTERM", told=False)


def test_a_signal_to_one_of_three(place):
    launched = Launched(3, "clip", place.dump, "-o", place.out, env=held(place))
    begun(place)
    os.kill(launched.processes()[1], signal.SIGTERM)
    assert_ended(place, launched, 143, "interrupted by SIGTERM")


def test_one_of_three_is_killed(place):
    launched = Launched(3, "clip", place.dump, "-o", place.out, env=held(place))
    begun(place)
    os.kill(launched.processes()[1], signal.SIGKILL)
    assert_ended(place, launched, 137, "process", "is gone: it was killed")


def test_the_launcher_is_killed(place):
    launched = Launched(3, "clip", place.dump, "-o", place.out, env=held(place))
    begun(place)
    pids = launched.processes()
    os.kill(launched.pid, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: not any(map(os.path.exists, (f"/proc/{pid}" for pid in pids))), within=10)
    assert time.monotonic() - began < 10
    _, _, err = launched.end()
    assert err.count("gradclip: error:") <= 1 and not place.out.exists(), err
    place.assert_nothing_else()


@pytest.mark.parametrize("process", [0, 1, 2] if LONG else [1])
def test_one_of_three_is_stopped(place, process):
    launched = Launched(3, "clip", place.dump, "-o", place.out, "--timeout", "4",
                        env=faulty("read", 5, "stop", f"{place.dump}/rank_", process))
    began = time.monotonic()
    # Starting takes its time too, on a busy machine.
    assert_ended(place, launched, 5, "within 4 s (--timeout)", f"process {process} (pid", "is stopped", within=20)
    assert time.monotonic() - began > 4


def test_a_timeout_is_a_number_of_seconds(place):
    for value in ("0", "-1", "1.5", "never"):
        result = run(1, "norms", place.dump, "--timeout", value)
        assert result.code == 2 and "--timeout" in result.err, result
    assert run(1, "norms", place.dump, "--timeout", "1").code == 0


@pytest.mark.parametrize("call, number, where", [("read", 3, "input"), ("open", 2, "input"), ("mkdir", 1, "output"),
                                                 ("write", 9, "output"), ("sync", 3, "output"), ("rename", 1, "output")])
def test_failing_in_any_stage(place, call, number, where):
    """On several processes; those that do not fail are ended by the one that does."""
    path = f"{place.dump}/rank_" if where == "input" else place.work
    process = 0 if call in ("mkdir", "rename") else 2
    if not LONG and call not in ("open", "rename"):
        pytest.skip("GRADCLIP_LONG")
    launched = Launched(3, "clip", place.dump, "-o", place.out, env=faulty(call, number, "EIO", path, process))
    assert_ended(place, launched, (3, 5))


def test_out_of_memory(place):
    """At any limit on its address space it works, or says that there is not enough."""
    ended = set()
    for mebibytes in range(40, 400, 8) if LONG else (64, 96, 120, 160):
        limit = mebibytes << 20
        launched = Launched(1, "clip", place.dump, "-o", place.out, "--threads", "4",
                            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        code, _, err = launched.end()
        if code == 0:
            place.assert_whole_or_absent()
        elif code != 127:  # where the program itself cannot be loaded
            assert code == 5 and err.count("gradclip: error:") == 1 and err.count("\n") == 1, (mebibytes, code, err)
            assert not place.out.exists()
            place.assert_nothing_else()
        ended.add(code)
        place.clear()
    assert ended <= {0, 5, 127}
