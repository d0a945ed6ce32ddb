"""Dumps made to do harm: to write elsewhere or to the terminal, to run code, to use memory or time without end, to crash
the HDF5 library. What is merely wrong is in test_bad_input.py."""

import html.parser
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
import xml.etree.ElementTree
import zlib
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest

from conftest import GOLDEN, LONG, binary, environment, finding, run, tree
from dump_builder import Dump, read_manifest, read_shards

EVIL = ["../../../evil", "/etc/passwd", "..", ".", "a/../../b", "line\nbreak", "\r\x1b[2J\x1b]0;title\x07", "c1\u009b31m",
        "right\u202eleft", "<script>alert(1)</script>", "</title><img src=x onerror=alert(1)>", "\" onload=\"x", "'quote'\\",
        "=cmd|' /C calc'!A0", "::error::injected", "%2e%2e%2f", "{rank:05d}", "x" * 4096]


def evil_dump(world_size=2, value=np.nan):
    dump = Dump(world_size, max_grad_norm=1.0)
    dump.mesh("m\x1b[31m<b>", ["d\x1b[0m\n<i>"], list(range(world_size)))
    for i, name in enumerate(EVIL):
        if len(name) < 1000:
            dump.sharded(name, np.arange(1, 9, dtype=np.float32) * (i + 1), "m\x1b[31m<b>", ["Shard(0)"])
    dump.plain("long", np.float32([value, 1]), dataset="long")
    dump.more["producer"] = {"name": "p\x1b[2J<u>", "version": "\x07", "framework": "\n"}
    return dump


@dataclass
class Measured:
    code: int
    out: str
    err: str
    seconds: float
    peak: int  # bytes of resident memory


def measured(*arguments, timeout=60, **env):
    """gradclip on one process, with what it used."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        process = subprocess.Popen([binary(), *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   env=environment(**env),
                                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout)))
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
        return Measured(process.returncode, *texts, time.monotonic() - began, used.ru_maxrss * 1024)


@pytest.fixture(scope="module")
def resting():
    """What gradclip uses on next to nothing."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Dump(1)
        dump.plain("w", np.float32([1]))
        return measured("norms", dump.write(Path(folder) / "dump")).peak


def refused_cheaply(resting, path, *arguments, code=3, most=64 << 20, seconds=10):
    result = measured(*arguments or ("norms", path))
    assert result.code == code and result.err.count("\n") == 1 and result.out == "", result
    assert result.peak < resting + most, f"{result.peak >> 20} MiB, at rest {resting >> 20} MiB: {result.err}"
    assert result.seconds < seconds, result
    return result


# Names -------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    return evil_dump().write(tmp_path_factory.mktemp("evil") / "dump", offsets=True)


def assert_harmless(text, where):
    bad = [c for c in text if not c.isprintable() and c not in "\n"]
    assert not bad, f"{where}: {bad[:5]}"


@pytest.mark.parametrize("arguments", [["inspect"], ["norms"], ["norms", "--by", "module"], ["norms", "--by", "group"],
                                       ["norms", "--histogram"], ["verify"], ["diff"], ["tokens"], ["norms", "--color", "never"]],
                         ids=" ".join)
def test_names_do_not_reach_the_terminal(tool, evil, arguments):
    command, *options = arguments
    result = run(1, command, evil, *([evil] if command == "diff" else []), *options)
    assert result.code in (0, 1, 3), result
    assert_harmless(result.out + result.err, " ".join(arguments))


def test_names_do_not_reach_the_log_of_a_pipeline(tool):
    """Lines that begin with :: are commands to GitHub's runner."""
    evil = evil_dump(value=2.0).write(tool.fresh("dump"))
    baseline = tool.folder / "baseline.json"
    assert run(1, "check", evil, "--baseline", baseline, "--update").code == 0
    edited = json.loads(baseline.read_text())
    for parameter in edited["parameters"]:
        parameter["norm"] = 12345.0
    baseline.write_text(json.dumps(edited))
    summary = tool.folder / "summary"
    result = run(1, "check", evil, "--baseline", baseline, "--report", tool.folder / "r.xml",
                 env={"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)})
    assert result.code == 1, result
    assert_harmless(result.out + result.err, "check")
    for line in (result.out + result.err).splitlines():
        assert not line.startswith("::error::injected"), line
    xml.etree.ElementTree.parse(tool.folder / "r.xml")


def test_names_stay_within_the_output(tool, evil):
    """clip and merge write below OUT alone, whatever a parameter is called, and every name comes out as it was."""
    root = tool.folder / "root"
    root.mkdir()
    before = sorted(os.listdir(tool.folder))
    result = run(1, "clip", evil, "-o", root / "out")
    assert result.code == 0, result
    assert sorted(os.listdir(root)) == ["out"] and sorted(os.listdir(tool.folder)) == before
    assert [sorted(each) for each in read_shards(root / "out").values()] == [sorted(each) for each in read_shards(evil).values()]
    result = run(1, "merge", evil, "-o", root / "merged")
    assert result.code == 0, result
    assert sorted(os.listdir(root)) == ["merged", "out"]
    names = [p["name"] for p in read_manifest(root / "merged")["parameters"]]
    assert names == [p["name"] for p in read_manifest(evil)["parameters"]]


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.handlers, self.sources = set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.sources += [value for name, value in attrs if name in ("src", "href") and not (value or "").startswith(("#", "data:"))]


@pytest.mark.parametrize("command", ["norms", "verify", "diff", "inspect"])
def test_names_are_text_in_a_page(tool, evil, command):
    page = tool.folder / "page.html"
    assert run(1, command, evil, *([evil] if command == "diff" else []), "--report", page).code in (0, 1)
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert not tags.tags & {"img", "iframe", "object", "embed", "u", "i", "b"}, tags.tags
    assert tags.handlers == [] and tags.sources == []


# The reach of a file -----------------------------------------------------------------------------------------------------

def simple(tool, edit_file=None, name="w", shape=(4, 3), **how):
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    return dump.write(tool.fresh("dump"), edit_file=(lambda rank, file: edit_file(file)) if edit_file else None, **how)


def replaced(tool, make, shape=(4, 3), **how):
    """The gradient's dataset made anew by make(file, path of the dataset), and the manifest's shape with it."""
    def edit_file(file):
        del file["gradients/w"]
        make(file, "gradients/w")
    return simple(tool, edit_file, edit=lambda m: m["parameters"][0].update(shape=list(shape)), **how)


@pytest.mark.parametrize("kind", ["external storage", "external link", "virtual", "soft link", "user-defined link to root"])
def test_no_other_file_is_opened(tool, kind):
    """strace sees no attempt on the secret, by any command that reads gradients."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    secret = tool.folder / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["w"] = np.ones((4, 3), "<f4")

    def make(file, path):
        if kind == "external storage":
            file.create_dataset(path, shape=(4, 3), dtype="<f4", external=[(str(secret), 0, 48)])
        elif kind == "external link":
            file[path] = h5py.ExternalLink(str(secret), "/w")
        elif kind == "virtual":
            layout = h5py.VirtualLayout(shape=(4, 3), dtype="<f4")
            layout[:] = h5py.VirtualSource(str(secret), "w", shape=(4, 3))
            file.create_virtual_dataset(path, layout)
        elif kind == "soft link":
            file["other"] = np.ones((4, 3), "<f4")
            file[path] = h5py.SoftLink("/other")
        else:
            file[path] = file["/"]  # a cycle
    path = replaced(tool, make)
    for command in (["norms", path], ["clip", path, "-o", tool.folder / "out"], ["verify", path]):
        log = tool.folder / "log"
        traced = subprocess.run(["strace", "-f", "-e", "trace=open,openat", "-o", str(log), binary(), *map(str, command)],
                                capture_output=True, text=True, env=environment(), timeout=60)
        assert traced.returncode == (1 if command[0] == "verify" else 3), traced
        assert "rank_00000.h5" in log.read_text() and "secret" not in log.read_text()
    assert not (tool.folder / "out").exists()


PLUGIN = """#include <stdio.h>
__attribute__((constructor)) static void loaded(void) { FILE* f = fopen(MARK, "w"); if (f) fclose(f); }
int H5PLget_plugin_type(void) { return 0; }
const void* H5PLget_plugin_info(void) { return 0; }
"""


def test_filters_come_from_the_users_own_folder(tool):
    """A plugin in the dump, or where the program runs, is not loaded; one in HDF5_PLUGIN_PATH is, which shows that this
    one could have been."""
    path = replaced(tool, lambda file, where: file.create_dataset(where, data=np.ones((4, 3), "<f4"), compression="lzf"))
    mark = tool.folder / "mark"
    (tool.folder / "plugin.c").write_text(PLUGIN)
    subprocess.run(["cc", "-shared", "-fPIC", f'-DMARK="{mark}"', "-o", path / "libh5lzf.so", tool.folder / "plugin.c"], check=True)
    (path / "plugin").mkdir()
    shutil.copy(path / "libh5lzf.so", path / "plugin")
    result = run(1, "norms", ".", cwd=path)
    assert result.code == 3 and "HDF5 filter 32000" in result.err, result
    assert not mark.exists()
    assert run(1, "norms", path, env={"HDF5_PLUGIN_PATH": str(path)}).code == 3
    assert mark.exists()


# What a file does to the library ------------------------------------------------------------------------------------------

TRAP = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
long H5Fopen(const char* name, unsigned flags, long access) {
  if (strstr(name, "rank_00001")) { const char* how = getenv("TRAP");
    if (!strcmp(how, "crash")) raise(SIGSEGV);
    if (!strcmp(how, "abort")) abort();
    if (!strcmp(how, "exit")) _exit(0);
    if (!strcmp(how, "memory")) { char* p = malloc(2ul << 30); if (!p) abort(); memset(p, 1, 2ul << 30); }
    for (volatile unsigned i = 0; !strcmp(how, "loop"); ++i) { } }
  return ((long (*)(const char*, unsigned, long))dlsym(RTLD_NEXT, "H5Fopen"))(name, flags, access);
}
"""


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """An HDF5 library that comes to grief on rank 1's file."""
    folder = tmp_path_factory.mktemp("trap")
    (folder / "trap.c").write_text(TRAP)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "trap.so", folder / "trap.c", "-ldl"], check=True)
    return lambda how: {"LD_PRELOAD": str(folder / "trap.so"), "TRAP": how}


@pytest.mark.parametrize("np_, how, words", [
    (1, "crash", "makes the HDF5 library crash (signal 11"), (3, "crash", "makes the HDF5 library crash (signal 11"),
    (1, "abort", "makes the HDF5 library crash (signal 6"), (1, "exit", "damage the process that reads it"),
    (1, "memory", "makes the HDF5 library crash"),
    pytest.param(1, "loop", "more processor time", marks=pytest.mark.skipif(not LONG, reason="20 s of processor time"))])
def test_a_file_that_ends_the_library_is_a_finding(tool, trap, np_, how, words):
    dump = Dump(4)
    dump.mesh("m", ["dp"], [0, 1, 2, 3])
    dump.sharded("w", np.arange(8, dtype=np.float32), "m", ["Shard(0)"])
    path = dump.write(tool.fresh("dump"))
    result = run(np_, "verify", path, "--format", "json", env=trap(how))
    assert result.code == 1 and result.err == "", result
    found = finding(result.json(), "unreadable")
    assert found["ranks"] == [1] and "rank_00001.h5" in found["message"] and words in found["message"], found
    assert result.json()["checked"]["files"] == 3, "the others are read"
    assert run(np_, "verify", path).code == 0


def test_an_attribute_whose_length_is_a_lie(tool):
    """A file that libhdf5 1.10.8 reads 64 KiB too far of, found by rank_file_fuzz: in the process that checks it this is a
    crash or a refusal, and never one of the command."""
    path = shutil.copytree(GOLDEN / "fsdp_tp" / "dump", tool.fresh("dump"))
    content = bytearray((path / "rank_00000.h5").read_bytes())
    content[0x1716:0x1718] = b"\xfc\xff"
    (path / "rank_00000.h5").write_bytes(content)
    for np_ in (1, 3):
        result = run(np_, "verify", path, "--format", "json")
        assert result.code == 1 and result.err == "", result
        assert any(f["ranks"] == [0] and "rank_00000.h5" in f["message"] for f in result.json()["findings"])


def test_without_isolation_it_ends_the_command(tool, trap):
    """Which shows that the trap is one."""
    dump = Dump(2)
    dump.plain("w", np.float32([1]))
    path = dump.write(tool.fresh("dump"))
    assert run(1, "verify", path, "--no-isolate", env=trap("crash")).code == -11
    assert run(1, "verify", path, "--no-isolate").code == 0


# Memory and time ---------------------------------------------------------------------------------------------------------

def test_a_chunk_that_inflates_without_end(tool, resting):
    def make(file, path):
        dataset = file.create_dataset(path, shape=(4, 3), dtype="<f4", chunks=(4, 3), compression="gzip")
        dataset.id.write_direct_chunk((0, 0), zlib.compress(bytes(128 << 20), 1))
    refused_cheaply(resting, replaced(tool, make, checksums=False))


def test_chunks_of_more_than_is_read_at_once(tool, resting):
    def make(file, path):
        dataset = file.create_dataset(path, shape=(1 << 20, 128), dtype="<f4", chunks=(1 << 20, 128), compression="gzip")
        dataset.id.write_direct_chunk((0, 0), zlib.compress(bytes(1 << 20), 1))
    result = refused_cheaply(resting, replaced(tool, make, shape=(1 << 20, 128), checksums=False))
    assert "256 MiB" in result.err


def test_much_out_of_little_stays_within_the_budget(tool, resting):
    """256 MiB of zeros that lie in a quarter of a megabyte of chunks: a sound dump, whose data is streamed."""
    rows = 256

    def make(file, path):
        dataset = file.create_dataset(path, shape=(rows, 1 << 18), dtype="<f4", chunks=(1, 1 << 18), compression="gzip")
        chunk = zlib.compress(bytes(1 << 20), 9)
        for row in range(rows):
            dataset.id.write_direct_chunk((row, 0), chunk)
    path = replaced(tool, make, shape=(rows, 1 << 18), checksums=False)
    assert sum(len(content) for content in tree(path).values()) < 2 << 20
    result = measured("norms", path, "--memory-budget", "64M", "--format", "json")
    assert result.code == 0 and json.loads(result.out)["norm"]["zeros"] == rows << 18
    assert result.peak < resting + (64 << 20) + (96 << 20), f"{result.peak >> 20} MiB"


def test_an_attribute_of_more_than_is_copied(tool, resting):
    path = simple(tool, checksums=False)
    with h5py.File(path / "rank_00000.h5", "r+", libver="latest") as file:
        stored = file["gradients/w"]
        values, attributes = stored[()], dict(stored.attrs)
        del file["gradients/w"]
        made = file["gradients"].create_dataset("w", data=values)
        made.attrs.update(attributes)
        made.attrs["history"] = np.zeros((8 << 20) // 8 + 1)
    out = tool.fresh("out")
    result = refused_cheaply(resting, path, "clip", path, "-o", out)
    assert "'history'" in result.err and "at most 8388608 bytes" in result.err and not out.exists()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """Of each block, every one of 400 ranks has something else: 100 MiB for one chunk of the tensor. Written by another
    process, since a process begins with the peak of the one that started it."""
    folder = tmp_path_factory.mktemp("crowd")
    writer = os.fork()
    if writer == 0:
        code = 1
        try:
            for placement in "Replicate()", "Partial()":
                dump = Dump(400, max_grad_norm=1.0)
                dump.mesh("m", ["dp"], list(range(400)))
                ones = np.ones(1 << 16, np.float32)
                dump.local("w", ones.shape, "m", [placement], {rank: ones * (rank + 1) for rank in range(400)})
                dump.write(folder / placement)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(writer, 0)[1] == 0
    return folder


@pytest.mark.parametrize("command, placement", [("diff", "Replicate()"), ("merge", "Partial()"), ("norms", "Partial()")] + LONG * [
    ("diff", "Partial()"), ("merge", "Replicate()"), ("norms", "Replicate()"), ("clip", "Replicate()"), ("clip", "Partial()")])
def test_very_many_copies_or_addends_stay_within_the_budget(tool, crowd, command, placement):
    path, out = crowd / placement, tool.fresh("out")
    arguments = {"diff": [path, path], "norms": [path], "merge": [path, "-o", out], "clip": [path, "-o", out]}[command]
    result = measured(command, *arguments, "--memory-budget", "32M", "--format", "json")
    copies = placement == "Replicate()"
    assert result.code in (0, 1), result
    report = json.loads(result.out)
    kinds = {each["kind"] for each in report["findings"]}
    assert ("replicas-differ" in kinds) if copies else not kinds, result
    open_files = (1 << 19) * 128 * (2 if command == "diff" else 1)
    assert result.peak < (32 << 20) + open_files + (64 << 20), f"{result.peak >> 20} MiB"
    if copies:
        return
    total = 400 * 401 // 2
    if command == "merge":
        merged = read_shards(out)[0]["w"]
        assert merged.dtype == np.float32 and np.all(merged == total)
    if command == "norms":
        assert report["norm"]["total"] == total * 256


def test_split_factors_of_a_million_take_no_memory(tool, resting):
    """Every second row is another rank's: a million pieces, of each of 12 parameters on both ranks."""
    pieces = 1 << 20
    dump = Dump(2, max_grad_norm=1.0)
    dump.mesh("m", ["dp"], [0, 1])
    rows = {rank: np.full(pieces, rank + 1, np.float16) for rank in range(2)}
    for i in range(12):
        dump.local(f"w{i}", (2 * pieces,), "m", [f"_StridedShard(dim=0, sf={pieces})"], rows)
    path, out = dump.write(tool.fresh("dump")), tool.fresh("out")
    for arguments in ["norms", path], ["verify", path], ["diff", path, path], ["merge", path, "-o", out]:
        result = measured(*arguments, "--memory-budget", "64M", "--format", "json")
        assert result.code == 0, result
        assert result.peak < resting + (64 << 20) + (32 << 20), f"{arguments[0]}: {result.peak >> 20} MiB"
    assert np.array_equal(read_shards(out)[0]["w7"], np.tile(np.float16([1, 2]), pieces))


BILLION = 1 << 30
EMPTY = {
    "contiguous, never allocated": lambda f, p: f.create_dataset(p, shape=(BILLION,), dtype="<f4"),
    "chunks of one element": lambda f, p: f.create_dataset(p, shape=(BILLION,), dtype="<f4", chunks=(1,)),
    "one chunk of all": lambda f, p: f.create_dataset(p, shape=(BILLION,), dtype="<f4", chunks=(BILLION // 4,), compression="gzip"),
    "another, small shape": lambda f, p: f.create_dataset(p, shape=(3,), dtype="<f4"),
    "no dataset": lambda f, p: None,
}


@pytest.mark.parametrize("storage", EMPTY)
def test_a_billion_elements_without_data(tool, resting, storage):
    path = replaced(tool, EMPTY[storage], shape=(BILLION,), checksums=False)
    refused_cheaply(resting, path)
    found = measured("verify", path)
    assert found.code == 1 and found.peak < resting + (64 << 20), found


def test_shapes_whose_products_overflow(tool, resting):
    for shape in ([2 ** 62, 4], [2 ** 31] * 3, [2 ** 63 - 1, 2 ** 63 - 1], [2 ** 16] * 5, [0, 2 ** 62, 2 ** 62], [1] * 33):
        path = simple(tool, edit=lambda m: m["parameters"][0].update(shape=shape))
        refused_cheaply(resting, path, most=16 << 20)


def test_a_job_of_very_many_ranks(tool, resting):
    """No file of 100,000 is there."""
    path = simple(tool, edit=lambda m: m.update(world_size=100_000, files={}))
    (path / "rank_00000.h5").unlink()
    refused_cheaply(resting, path)
    found = measured("verify", path, "--format", "json")
    assert found.code == 1 and found.peak < resting + (64 << 20) and found.seconds < 20, found
    assert len(finding(json.loads(found.out), "missing")["ranks"]) == 100_000


@pytest.mark.parametrize("text", [b'{"a":' * 100_000, b"[" * 5_000_000, b'{"format":"gradclip.dump","x":' + b"9" * 5_000_000,
                                  b'{"' + b"k" * 5_000_000, b'{"a":1,' * 200_000, b"\xff" * 1000, b'{"a":NaN}', b'{"a":1,"a":2}', b'{"' + b"k" * 400_000 + b'":1,"' + b"k" * 400_000 + b'":2}'],
                         ids=["objects", "lists", "digits", "a key", "the same key", "bytes", "nan", "twice", "a long key twice"])
@pytest.mark.parametrize("reader", ["manifest", "report", "baseline", "config", "model"])
def test_json_made_to_hurt(tool, resting, text, reader):
    if reader != "manifest" and len(text) > 1_000_000:
        text = text[:1_000_000]
    file = tool.folder / "file.json"
    file.write_bytes(text)
    path = simple(tool)
    if reader == "manifest":
        (path / "manifest.json").write_bytes(text)
    arguments = {"manifest": ["norms", path], "report": ["report", file, "-o", tool.folder / "page.html"],
                 "baseline": ["check", path, "--baseline", file], "config": ["norms", path, "--config", file],
                 "model": ["synth", "--model", file, "-o", tool.folder / "out"]}[reader]
    result = refused_cheaply(resting, path, *arguments, code=2 if reader == "config" else 3, most=128 << 20)
    assert_harmless(result.err, reader)
    assert len(result.err) < 40_000, "a message, not the file"
    assert not (tool.folder / "page.html").exists() and not (tool.folder / "out").exists()
