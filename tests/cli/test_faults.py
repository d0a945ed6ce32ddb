"""Storage that fails, changes or plays tricks: one message, the documented code, the input as it was, nothing left behind;
and wrong bits. GRADCLIP_LONG: at every system call, and more of everything."""

import json
import os
import random
import re
import shutil
import signal
import subprocess

import h5py
import numpy as np
import pytest

from conftest import LONG, binary, environment, refused, run, tree
from dump_builder import Dump
from faults import Launched, Place, faulty, until


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def clean(place):
    yield
    place.clear()


def some(calls, count, seed):
    return range(1, calls + 1) if LONG else sorted(random.Random(seed).sample(range(1, calls + 1), min(calls, count)))


# What is written ---------------------------------------------------------------------------------------------------------

def assert_failed_cleanly(place, result, *where):
    """Or did not need what failed."""
    place.assert_whole_or_absent()
    if result.code == 0:
        assert place.out.exists() and result.err == "", (where, result)
        return
    assert result.code == 5 and len(result.error_lines) == 1 and result.err.count("\n") == 1, (where, result)


@pytest.mark.parametrize("call, what", [("write", "ENOSPC"), ("allocate", "ENOSPC"), ("sync", "EIO"), ("rename", "EIO"),
                                        ("mkdir", "EROFS"), ("write", "EDQUOT"), ("remove", "EIO")])
def test_a_call_that_changes_something_fails(place, call, what):
    calls = place.calls(call)
    failed = 0
    for number in some(calls, 3, call):
        result = place.clip(env=faulty(call, number, what, place.work))
        assert_failed_cleanly(place, result, call, number)
        failed += result.code != 0
        if call != "remove":
            place.assert_nothing_else()
        place.assert_next_run_works()
    assert failed > 0 or call in ("remove", "allocate")


def test_no_space_from_some_moment_on(place):
    for number in some(place.calls("write"), 3, "from"):
        result = place.clip(env=faulty("write", f"{number}+", "ENOSPC", place.work))
        assert result.code == 5 and "No space left on device" in result.err, result
        assert_failed_cleanly(place, result, number)
        place.assert_nothing_else()
        assert not place.out.exists()


@pytest.mark.parametrize("call, what", [("write", "EINTR"), ("sync", "EINTR"), ("read", "EINTR"), ("allocate", "EINTR")])
def test_an_interrupted_call_is_made_again(place, call, what):
    for number in some(place.calls(call), 2, call):
        assert place.clip(env=faulty(call, number, what, place.work)).code == 0
        assert tree(place.out) == place.expected, (call, number)
        place.clear()


@pytest.mark.parametrize("call", ["write", "read"])
def test_calls_that_transfer_less_than_they_were_asked_for(place, call):
    result = place.clip("--verify", env=faulty(call, "1+", "short", place.folder))
    assert result.code == 0 and tree(place.out) == place.expected, result


def test_one_of_three_processes_cannot_write(place):
    for call, what in (("write", "ENOSPC"), ("sync", "EIO")) if LONG else (("write", "ENOSPC"),):
        result = place.clip(np=3, env=faulty(call, 4, what, place.work, process=1))
        assert_failed_cleanly(place, result, call)
        assert result.code == 5 and not place.out.exists()
        place.assert_nothing_else()


def test_the_directory_vanishes(place):
    other = Launched(1, "clip", place.dump, "-o", place.out, env=faulty("change", 40, "stop", place.work))
    stopped(other)
    shutil.rmtree(place.work)
    os.kill(other.pid, signal.SIGCONT)
    code, _, err = other.end()
    place.work.mkdir()
    assert code in (2, 3, 5) and err.count("gradclip: error:") == 1 and err.count("\n") == 1, err


def test_outputs_that_are_links(place):
    (place.work / "real").mkdir()
    for name, target in (("nowhere", "no-such-place"), ("dir", "real"), ("dump", place.dump)):
        link = place.work / name
        link.symlink_to(target)
        for more in ([], ["--overwrite"]):
            refused(1, 2, place.dump, *more, out=link)
            assert link.is_symlink()
    assert run(1, "clip", place.dump, "-o", place.work / "dir" / "out").code == 0
    assert tree(place.work / "real" / "out") == place.expected


def test_synced_before_it_gets_its_name(place):
    """As strace sees it: every file after its last write, then its directory, then the rename, then what holds OUT."""
    trace = place.folder / "trace"
    seen = subprocess.run(["strace", "-f", "-y", "-o", trace, "-e", "trace=write,pwrite64,fsync,rename,renameat2,ftruncate",
                           binary(), "clip", place.dump, "-o", place.out], capture_output=True, env=environment(),
                          timeout=60, check=False)
    if seen.returncode != 0 and "ptrace" in seen.stderr.decode():
        pytest.skip("no process may be traced here")
    assert seen.returncode == 0, seen
    last_write, synced, renamed = {}, {}, None
    for number, line in enumerate(trace.read_text().splitlines()):
        call = re.search(r"(\w+)\((?:\d+<([^>]*)>)?", line)
        if call is None:
            continue
        if call[1] in ("write", "pwrite64", "ftruncate"):
            last_write[call[2]] = number
        elif call[1] == "fsync":
            synced.setdefault(call[2], []).append(number)
        elif '/output"' in line and "renameat2" in line and " = 0" in line:
            renamed = number
    made = f"{place.out}.partial/output"
    files = [f"{made}/{name}" for name in place.expected]
    assert renamed is not None and len(files) == 7
    for path in files:
        assert any(last_write[path] < at < renamed for at in synced[path]), path
    last_file = max(max(synced[path]) for path in files)
    assert any(last_file < at < renamed for at in synced[made]), "the new directory"
    assert any(at > renamed for at in synced[str(place.out.parent)]), "the directory that holds OUT"


# What is read ------------------------------------------------------------------------------------------------------------

def test_reading_fails(place):
    path = f"{place.dump}/rank_"
    for number in some(60, 3, "reading"):
        result = place.clip(env=faulty("read", number, "EIO", path))
        assert result.code in (3, 5) and len(result.error_lines) == 1 and result.err.count("\n") == 1, (number, result)
        assert "rank_0" in result.err
        place.assert_whole_or_absent()
        place.assert_nothing_else()


def stopped(launched):
    until(lambda: open(f"/proc/{launched.pid}/stat").read().rsplit(")", 1)[1].split()[0] == "T")


@pytest.mark.parametrize("name", ["rank_00000.h5", "manifest.json"])
@pytest.mark.parametrize("change, words", [("replaced", "replaced"), ("truncated", ""), ("written", "written to"),
                                           ("removed", "removed")])
def test_the_input_changes_while_it_is_read(place, change, words, name):
    """Between the two passes, of which the second would write what the first has not measured."""
    dump = place.work / "dump"
    shutil.copytree(place.dump, dump)
    file = dump / name
    other = Launched(1, "clip", dump, "-o", place.out, env=faulty("mkdir", 1, "stop", place.work))
    stopped(other)
    if change == "replaced":
        shutil.copy(dump / "rank_00001.h5" if name != "manifest.json" else file, place.work / "new")
        os.replace(place.work / "new", file)
    elif change == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif change == "written":
        with open(file, "r+b") as open_file:  # HDF5 would ask for a lock
            open_file.seek(-1, os.SEEK_END)
            open_file.write(b"x")
    else:
        file.unlink()
    os.kill(other.pid, signal.SIGCONT)
    code, _, err = other.end()
    assert code == 3 and err.count("gradclip: error:") == 1 and name in err and words in err, err
    assert not place.out.exists() and not (place.work / "out.partial").exists()


def test_a_compared_dump_changes_while_it_is_read(place):
    """After its first file was read, and while the second is opened."""
    dump = place.work / "dump"
    shutil.copytree(place.dump, dump)
    other = Launched(1, "diff", dump, place.dump, "--threads", 1,
                     env=faulty("read", 1, "stop", f"{dump}/rank_00001.h5"))
    stopped(other)
    os.utime(dump / "rank_00000.h5")
    os.kill(other.pid, signal.SIGCONT)
    code, out, err = other.end()
    assert code == 3 and err.count("gradclip: error:") == 1 and "rank_00000.h5" in err and "written to" in err, err


@pytest.mark.skipif(not LONG, reason="GRADCLIP_LONG")
def test_a_dataset_beyond_4_gib(place):
    """Sparse: its last element alone is not 0, and decides the total."""
    elements = (1 << 32) // 8 + 1000
    dump = Dump(1)
    dump.plain("w", np.zeros(1, np.float64))
    path = dump.write(place.work / "large", checksums=False)
    with h5py.File(path / "rank_00000.h5", "r+") as file:
        del file["gradients/w"]
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        made = h5py.h5d.create(file["gradients"].id, b"w", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((elements,)), creation)
        h5py.Dataset(made)[elements - 1] = 3.0
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["parameters"][0]["shape"] = [elements]
    for key in ("files", "checksum"):
        manifest.pop(key, None)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert (path / "rank_00000.h5").stat().st_blocks < 1 << 12
    report = run(1, "norms", path, "--format", "json").json()
    assert (report["norm"]["total"], report["norm"]["zeros"]) == (3.0, elements - 1)
    if LONG:
        assert run(1, "clip", path, "-o", place.out, "--max-norm", "1.5", timeout=300).code == 0
        with h5py.File(place.out / "rank_00000.h5") as file:
            written = file["gradients/w"]
            assert abs(written[-1] - 1.5) < 1e-5 and written.shape == (elements,) and not written[:1000].any()


# Wrong bits --------------------------------------------------------------------------------------------------------------

def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_flipped_bit_in_a_rank_file(place):
    """Anywhere: found by the manifest's checksum of the file; in a gradient, its own says where."""
    dump = place.work / "dump"
    shutil.copytree(place.folder / "reference", dump)
    chosen = random.Random(8)
    for number in range(300 if LONG else 6):
        file = dump / f"rank_0000{chosen.randrange(6)}.h5"
        kept = file.read_bytes()
        flip(file, chosen.randrange(8 * len(kept)))
        found = run(1, "verify", dump, "--format", "json")
        assert found.code == 1 and any(file.name in f["message"] for f in found.json()["findings"]), (number, found)
        if LONG or number < 2:
            refused(1, 3, dump, "norms", dump, "--no-scale", "--verify", mentions=[file.name])
        file.write_bytes(kept)
    with h5py.File(dump / "rank_00002.h5") as h5:
        weight = h5["gradients/layers.0.weight"]
        at = 8 * (weight.id.get_offset() + 17) + 3
    flip(dump / "rank_00002.h5", at)
    findings = run(1, "verify", dump, "--format", "json").json()["findings"]
    assert any("layers.0.weight" in str(f["parameter"]) and f["ranks"] == [2] for f in findings), findings


def test_a_flipped_bit_in_the_manifest(place):
    """Found by its own checksum, unless the text means the same (a digit of the checksum that becomes a capital); in the
    name of the checksum itself, which a manifest may lack, by --verify."""
    dump = place.work / "dump"
    shutil.copytree(place.folder / "reference", dump)
    manifest = dump / "manifest.json"
    kept = manifest.read_bytes()
    chosen = random.Random(9)
    in_its_name = 8 * (kept.index(b'"checksum"') + 3)
    for number in range(1000 if LONG else 12):
        bit = chosen.randrange(8 * len(kept)) if number else in_its_name
        flip(manifest, bit)
        changed = manifest.read_bytes()
        result = run(1, "verify", dump)
        if result.code == 0 and "checksum" not in json.loads(changed):
            refused(1, 3, dump, "norms", dump, "--no-scale", "--verify", mentions=["no checksum of itself"])
        elif result.code == 0:
            assert json.loads(changed) == json.loads(kept) or changed.lower() == kept.lower(), (number, bit)
        else:
            assert result.code in (1, 3), (number, bit, result)
        manifest.write_bytes(kept)


def test_paranoid_reads_back_what_was_computed(place):
    """A bit that changes on its way to the disk, of a gradient or of the manifest."""
    log = place.folder / "writes"
    assert place.clip("--paranoid", env=faulty("write", 1 << 30, "EIO", place.work, log=log)).code == 0
    assert tree(place.out) == place.expected
    place.clear()
    paths = [line.split()[1] for line in log.read_text().splitlines()]
    caught = 0
    for number in some(len(paths), 12, "paranoid"):
        if not paths[number - 1].endswith((".h5", ".json")):
            continue
        result = place.clip("--paranoid", env=faulty("write", number, "flip", place.work))
        if result.code != 0:
            assert result.code in (3, 5, 70) and len(result.error_lines) == 1, (number, result)
            caught += "of what was computed" in result.err
            place.assert_nothing_else()
        place.clear()
    manifest = max(number for number, path in enumerate(paths, 1) if path.endswith("manifest.json"))
    result = place.clip("--paranoid", env=faulty("write", manifest, "flip", place.work))
    assert result.code == 5 and "the manifest: reads back" in result.err, result
    assert not place.out.exists() and caught > 0


@pytest.mark.parametrize("command", ["synth", "accumulate"])
def test_paranoid_of_the_other_commands_that_make_dumps(place, command):
    if command == "synth":
        words = ["synth", "--model", "moe-tiny", "--layers", "1"]
    else:
        dump = Dump(1)
        dump.plain("w", np.arange(3000, dtype=np.float32))
        dump.more["microbatch"] = {"index": 0, "count": 1}
        words = ["accumulate", dump.write(place.work / "mb")]
    assert run(1, *words, "-o", place.out, "--paranoid").code == 0
    shutil.rmtree(place.out)
    log = place.folder / f"{command}-writes"
    assert run(1, *words, "-o", place.out, env=faulty("write", 1 << 30, "EIO", place.out, log=log)).code == 0
    shutil.rmtree(place.out)
    calls = len(log.read_text().splitlines())
    codes = []
    for number in some(calls, 8, command)[:40]:
        result = run(1, *words, "-o", place.out, "--paranoid", env=faulty("write", number, "flip", place.out))
        codes.append(result.code)
        shutil.rmtree(place.out, ignore_errors=True)
    assert 5 in codes, codes


