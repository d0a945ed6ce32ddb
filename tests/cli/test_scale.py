"""Jobs of very many ranks and parameters: the right total, within memory; and what processes send one another, by formula."""

import collections
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, Tool, binary, close

sys.path.insert(0, str(ROOT / "scripts"))

import scale_dumps  # noqa: E402

KINDS = ("sharded", "copies", "partial")
# Bytes of what travels (docs/scale.md).
SHARD, PARAMETER, RANK_AND_GROUP, RANK, RANK_OF_TORCH = 136, 232, 120, 120, 32


def cost(*args):
    """Exit code and peak memory of one run, which says what it says to nobody."""
    devnull = os.open(os.devnull, os.O_RDWR)
    child = os.posix_spawn(binary(), [binary(), *map(str, args)], os.environ,
                           file_actions=[(os.POSIX_SPAWN_DUP2, devnull, fd) for fd in (0, 1, 2)])
    os.close(devnull)
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "dump"
    scale_dumps.make(path, ranks=2048, parameters=48, elements=16, kinds=KINDS)
    return path


def test_total_of_many_ranks(tool, many_ranks):
    report = tool.norms(many_ranks, "--memory-budget", "64Mi")
    assert close(report["norm"]["total"], math.sqrt(scale_dumps.total_square(2048, 48, 16, KINDS)))
    assert report["reference"]["totals"][0]["ranks"] == list(range(2048)) and report["findings"] == []
    assert report["run"]["memory_peak_bytes"] <= (64 << 20) + 200e6
    assert report["run"]["communication"]["bytes_sent"] == report["run"]["communication"]["bytes_received"] == 0


def test_manifest_of_many_parameters_and_ranks(tmp_path):
    """Planned and grouped: what follows is the first rank file, and there is none. docs/scale.md has its seconds."""
    ranks, parameters = 4096, 100_000
    manifest = {"format": "gradclip.dump", "version": 1, "world_size": ranks, "rank_file": "rank_{rank:05d}.h5",
                "meshes": {"world": {"dim_names": ["dp_shard", "tp"],
                                     "ranks": [list(range(i, i + 8)) for i in range(0, ranks, 8)]}},
                "device_mesh": "world",
                "parameters": [{"name": f"layers.{i // 8}.mlp.{i % 8}.weight", "shape": [4096, 4096],
                                "dtype": "bfloat16", "mesh": "world",
                                "placements": ["Shard(0)", "Replicate()" if i % 2 else "Shard(1)"]}
                               for i in range(parameters)]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for code, command, *options in ((0, "inspect"), (3, "norms", "--threads", 1)):
        found, memory = cost(command, tmp_path, *options)
        assert found == code
        assert memory <= 500e6, f"{command} needs {memory / 1e6:.0f} MB"


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("command", ["norms", "verify", "clip", "diff", "merge"])
def test_rank_files_are_opened_a_few_times(tmp_path, command):
    """However little memory there is: not for each of their parameters, of which there are 64 on each rank here."""
    dump, log = tmp_path / "dump", tmp_path / "trace"
    scale_dumps.make(dump, ranks=64, parameters=512, elements=16, kinds=KINDS)
    more = {"clip": ["-o", tmp_path / "out"], "merge": ["-o", tmp_path / "out"], "diff": [dump]}.get(command, [])
    words = [binary(), command, dump, *more, "--quiet", "--threads", "2", "--memory-budget", "1Mi"]
    subprocess.run(["strace", "-f", "-e", "trace=openat", "-o", log, *map(str, words)], check=True)
    opened = collections.Counter(re.findall(r'rank_[0-9]+\.h5", O_RDONLY', log.read_text()))
    assert len(opened) == 64
    assert max(opened.values()) <= 16  # HDF5 and the positional reads have one each; a copy is compared with the first one


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_replay_opens_files_a_few_times(tmp_path):
    """Not for each of the sums that a rank's gradients are part of: 8 ranks' copies, and 8 ranks' slices."""
    dump, out, log = tmp_path / "dump", tmp_path / "out", tmp_path / "trace"
    ranks, parameters, elements = 8, 192, 16
    scale_dumps.make(dump, ranks, parameters, elements, kinds=("partial",))
    manifest = json.loads((dump / "manifest.json").read_text())
    manifest["microbatch"] = {"index": 0, "count": 1}
    for number, entry in enumerate(manifest["parameters"]):
        kept = "Replicate()" if number % 2 else "Shard(0)"
        entry.update(placements=["Shard(0)", kept], gradient_placements=["Shard(0)", "Partial(avg)"])
    (dump / "manifest.json").write_text(json.dumps(manifest))
    words = [binary(), "accumulate", dump, "-o", out, "--quiet", "--threads", "2", "--memory-budget", "1Mi"]
    subprocess.run(["strace", "-f", "-e", "trace=openat", "-o", log, *map(str, words)], check=True)
    opened = collections.Counter(re.findall(r'dump/rank_[0-9]+\.h5", O_RDONLY', log.read_text()))
    assert len(opened) == ranks
    assert max(opened.values()) <= 16
    # What all ranks add is equal, so that their average is what each has.
    report = Tool(tmp_path).norms(out)
    assert close(report["norm"]["total"], math.sqrt(scale_dumps.total_square(ranks, parameters, elements, ("copies",))))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_volume_is_the_formula(tmp_path, processes):
    ranks, parameters, on_each = 64, 64, 8  # 8 pipeline stages of 8 ranks, so that all processes have the same
    scale_dumps.make(tmp_path / "dump", ranks, parameters, elements=4)
    found = Tool(tmp_path).norms(tmp_path / "dump", np=processes)["run"]["communication"]
    groups = 2  # on each rank
    of_others = 1 - 1 / processes
    received = of_others * (SHARD * ranks * on_each / processes + PARAMETER * parameters +
                            (RANK_AND_GROUP * groups + RANK + RANK_OF_TORCH) * ranks)
    counts = 8 * (processes - 1) * found["collectives"]
    assert received <= found["bytes_received"] <= received + counts
    # A process's share of what is gathered goes to each of the others.
    assert received <= found["bytes_sent"] <= received + counts
    assert found["collectives"] <= 24
