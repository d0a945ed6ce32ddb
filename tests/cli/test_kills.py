"""kill -9 at any moment: afterwards OUT is whole or absent, the next run clears what is left or continues it, and its
result has the bytes of an undisturbed run. GRADCLIP_LONG: at every call that changes something, and 200 random moments."""

import contextlib
import os
import random
import shutil
import signal
import time

import pytest

from conftest import LONG, run, tree
from faults import Launched, Place, faulty, processes_of, until


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("kills"))


@pytest.fixture(autouse=True)
def clean(place):
    yield
    place.clear()


def kept_files(result):
    return result.json()["run"]["kept_files"]


@pytest.mark.parametrize("how", ["kill", "killed"])
def test_at_every_call_that_changes_something(place, how):
    """Instead of the call, and right after it."""
    calls = place.calls("change")
    assert calls > 60
    for number in range(1, calls + 1) if LONG else random.Random(how).sample(range(1, calls + 1), 8):
        result = place.clip(env=faulty("change", number, how, place.work))
        assert result.code in (-signal.SIGKILL, 137), (number, result)
        place.assert_whole_or_absent()
        place.assert_next_run_works(*(["--resume"] if number % 2 else []))


@pytest.mark.parametrize("process", [0, 1])
def test_at_calls_of_one_of_three_processes(place, process):
    calls = place.calls("change", np=3, process=process)
    assert calls > 20
    chosen = random.Random(process)
    for number in chosen.sample(range(1, calls + 1), min(calls, 40)) if LONG else [chosen.randrange(1, calls + 1)]:
        result = place.clip(np=3, env=faulty("change", number, "kill", place.work, process))
        assert result.code != 0, (number, result)
        place.assert_whole_or_absent()
        place.assert_next_run_works("--resume", np=3 if number % 2 and LONG else 1)


@pytest.mark.parametrize("np, count", [(1, 140 if LONG else 3), (3, 60 if LONG else 1)])
def test_at_random_moments(place, np, count):
    """Of one process, or of all of them and the launcher at once."""
    chosen = random.Random(np)
    began = time.monotonic()
    assert place.clip(np=np).code == 0
    longest = time.monotonic() - began
    place.clear()
    for number in range(count):
        launched = Launched(np, "clip", place.dump, "-o", place.out)
        time.sleep(chosen.uniform(0.4 if np > 1 else 0.0, 1.0) * longest)
        alive = processes_of(launched) if np > 1 else [launched.pid]  # those of three may not be there yet, or any more
        for pid in [launched.pid, *alive] if number % 2 else alive[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launched.end()
        place.assert_whole_or_absent()
        place.assert_next_run_works(*(["--resume"] if number % 2 else []))


def interrupted(place, finished, *args):
    """A run that is killed once it has finished so many rank files."""
    notes = place.work / "out.partial" / "finished"
    result = place.clip(*args, env=faulty("sync", 2 * finished + 2, "killed", "out.partial/"))
    assert result.code == -signal.SIGKILL, result
    assert len(list(notes.iterdir())) >= finished, sorted(notes.iterdir())
    return notes


def test_resume_keeps_what_is_finished(place):
    notes = interrupted(place, 4)
    finished = len(list(notes.iterdir()))
    made = place.work / "out.partial" / "output"
    stamps = {path.name: path.stat().st_ino for path in made.iterdir() if (notes / path.name).exists()}
    result = place.clip("--resume", "--format", "json")
    assert result.code == 0 and kept_files(result) >= finished - 1 > 0, result
    assert tree(place.out) == place.expected
    place.assert_nothing_else()
    kept = [name for name, number in stamps.items() if (place.out / name).stat().st_ino == number]
    assert len(kept) == kept_files(result)


@pytest.mark.parametrize("storage", [{"packed": True}, {"compression": "gzip", "chunks": True}], ids=["packed", "deflate"])
def test_resume_and_paranoid_of_other_storage(tmp_path, storage):
    place = Place(tmp_path, **storage)
    interrupted(place, 3)
    result = place.clip("--resume", "--paranoid", "--format", "json")
    assert result.code == 0 and kept_files(result) > 0, result
    assert tree(place.out) == place.expected
    place.assert_nothing_else()


def test_resume_reports_what_an_undisturbed_run_does(place):
    undisturbed = place.clip("--format", "json").json()
    place.clear()
    interrupted(place, 4)
    for np in (1, 3):
        report = place.clip("--resume", "--format", "json", np=np).json()
        assert report["clip"] == undisturbed["clip"] and report["norm"] == undisturbed["norm"]
        place.clear()
        interrupted(place, 4)


def test_resume_checks_what_it_keeps(place):
    notes = interrupted(place, 4)
    finished = sorted(path.name for path in notes.iterdir())
    first, second = (place.work / "out.partial" / "output" / name for name in finished[:2])
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 4
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-1])
    (notes / finished[2]).write_text("not a note")
    result = place.clip("--resume", "--format", "json")
    assert result.code == 0 and kept_files(result) <= len(finished) - 3, result
    assert tree(place.out) == place.expected


def test_resume_of_another_run_starts_anew(place):
    interrupted(place, 4)
    result = place.clip("--resume", "--max-norm", "0.25", "--format", "json")
    assert result.code == 0 and kept_files(result) == 0, result
    assert run(1, "verify", place.out).code == 0 and tree(place.out) != place.expected
    place.clear()
    interrupted(place, 4)
    touched = place.dump / "rank_00001.h5"
    stamp = touched.stat()
    try:
        os.utime(touched, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
        result = place.clip("--resume", "--format", "json")
    finally:
        os.utime(touched, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert result.code == 0 and kept_files(result) == 0, result
    assert tree(place.out) == place.expected


def test_resume_without_anything_to_resume(place):
    result = place.clip("--resume", "--format", "json")
    assert result.code == 0 and kept_files(result) == 0 and tree(place.out) == place.expected
    place.clear()
    assert "kept_files" not in place.clip("--format", "json").json()["run"]


def test_with_resume_an_ended_run_can_be_continued(place):
    """After an error too: what was finished stays, and the next run takes it over."""
    calls = place.calls("change", "--resume")
    result = place.clip("--resume", env=faulty("change", calls // 2, "EIO", place.work))
    assert result.code == 5 and len(result.error_lines) == 1, result
    assert (place.work / "out.partial" / ".gradclip-partial").is_file() and not place.out.exists()
    result = place.clip("--resume", "--format", "json")
    assert result.code == 0 and kept_files(result) > 0 and tree(place.out) == place.expected, result
    place.assert_nothing_else()


def test_a_living_run_is_left_alone(place):
    """Stopped in the middle, it still holds its lock; killed, it does not."""
    other = Launched(1, "clip", place.dump, "-o", place.out, env=faulty("change", 30, "stop", place.work))
    until(lambda: "T" in open(f"/proc/{other.pid}/stat").read().rsplit(")", 1)[1].split()[0])
    before = tree(place.work)
    for more in ([], ["--resume"], ["--overwrite"]):
        result = place.clip(*more)
        assert result.code == 5 and "another run is writing it" in result.err and len(result.error_lines) == 1, result
        assert tree(place.work) == before
    os.kill(other.pid, signal.SIGCONT)
    assert other.end()[0] == 0
    place.assert_whole_or_absent()
    assert place.out.exists()


def test_two_runs_to_one_output(place):
    """One wins, the other is told; whoever wins, OUT is whole."""
    for attempt in range(20 if LONG else 3):
        both = [Launched(1, "clip", place.dump, "-o", place.out) for _ in range(2)]
        ends = [each.end() for each in both]
        codes = sorted(code for code, _, _ in ends)
        assert codes[0] == 0 and codes[1] in (2, 5), ends
        told = next(err for code, _, err in ends if code != 0)
        assert any(words in told for words in ("another run is writing it", "exists", "made by somebody else")), told
        place.assert_whole_or_absent()
        place.assert_nothing_else()
        place.clear()


def test_two_readers_of_one_dump(place):
    readers = [Launched(1, "norms", place.dump, "--format", "json") for _ in range(2)]
    ends = [each.end() for each in readers]
    totals = {out[out.index('"norm"'):out.index('"clip"') if '"clip"' in out else None][:400] for _, out, _ in ends}
    assert [code for code, _, _ in ends] == [0, 0] and len(totals) == 1


@pytest.mark.parametrize("stage", ["exchange", "cleaning"])
def test_an_overwrite_is_killed_around_the_exchange(place, stage):
    """The old OUT or the new one is there, whole; the other is cleared by the next run."""
    assert place.clip("--max-norm", "0.5").code == 0
    old = tree(place.out)
    for call, number, how in ((("rename", 2, "kill"), ("rename", 2, "killed")) if stage == "exchange" else
                              (("remove", 1, "killed"), ("remove", 4, "killed"))):
        where = "out.partial" if stage == "exchange" else "out.partial/output"  # what is removed there is the old OUT
        result = place.clip("--overwrite", env=faulty(call, number, how, where))
        assert result.code == -signal.SIGKILL, result
        assert tree(place.out) == (old if how == "kill" else place.expected)
        assert run(1, "verify", place.out).code == 0
        place.assert_next_run_works()
        assert place.clip("--max-norm", "0.5").code == 0
    shutil.rmtree(place.out)


def test_a_report_that_was_being_written(place):
    """Its temporary file is taken over by the next run that writes it."""
    report = place.work / "report.json"
    arguments = ["norms", place.dump, "--report", report]
    result = run(1, *arguments, env=faulty("write", 1, "killed", place.work))
    assert result.code == -signal.SIGKILL and not report.exists(), result
    assert run(1, *arguments).code == 0
    assert sorted(path.name for path in place.work.iterdir()) == ["report.json"]
