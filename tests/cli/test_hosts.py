"""Three hosts with storage of their own (--locality files): the same bits as one process that sees everything, output
where its process is, and words for files that no host sees or that hosts see differently."""

import shutil

import numpy as np
import pytest

import hosts as hosts_module
from conftest import Tool, binary, parse_report, tree, without_run
from dump_builder import RANK_FILE, Dump

RANKS = 6
#: Not in the order of processes, not contiguous, rank 2 on two hosts.
HELD = [[3, 4], [0, 2, 5], [1, 2]]


def dump_of_several_kinds():
    generator = np.random.default_rng(5)
    dump = Dump(RANKS, max_grad_norm=0.5)
    dump.mesh("world", ["dp", "tp"], [[0, 1, 2], [3, 4, 5]])
    values = generator.standard_normal((12, 5)).astype(np.float32)
    dump.sharded("weight", values, "world", ["Shard(0)", "Shard(1)"])
    dump.sharded("norm", values[:, 0], "world", ["Replicate()", "Shard(0)"])
    dump.local("partial", (4,), "world", ["Partial()", "Replicate()"],
               {rank: np.full(4, 1.0 + rank // 3, np.float32) for rank in range(RANKS)})
    dump.plain("bias", {rank: np.full(3, 0.25 if rank != 4 else 0.75, np.float32) for rank in range(RANKS)})
    return dump


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    reason = hosts_module.why_not()
    if reason:
        pytest.skip(reason)
    with hosts_module.Hosts(tmp_path_factory.mktemp("hosts"), 3) as started:
        yield started


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return dump_of_several_kinds().write(tmp_path_factory.mktemp("whole") / "dump")


@pytest.fixture
def spread(hosts, whole):
    """The dump's files on the hosts; the manifest on the first alone."""
    for number in range(len(HELD)):
        for entry in hosts.folder(number).iterdir():  # the folder itself is what the host has mounted
            shutil.rmtree(entry)
    for number, ranks in enumerate(HELD):
        (hosts.folder(number) / "dump").mkdir()
        for rank in ranks:
            shutil.copy(whole / RANK_FILE.format(rank=rank), hosts.folder(number) / "dump")
    shutil.copy(whole / "manifest.json", hosts.folder(0) / "dump")
    return hosts


def refused(result, code, *words):
    assert result.code == code and result.out == "", result
    assert len(result.error_lines) == 1, result
    for word in words:
        assert word in result.err, result


def test_each_host_serves_what_it_sees(spread, whole, tmp_path):
    report, _, out = Tool(tmp_path).clip(whole)
    result = spread.mpirun([2, 1, 1], binary(), "clip", spread.local / "dump", "-o", spread.local / "out",
                           "--locality", "files", "--format", "json")
    assert result.code == 0 and result.err == "", result
    found = parse_report(result.out)
    found["dump"]["path"] = report["dump"]["path"]
    assert without_run(found) == without_run(report)
    # Rank 4's bias, compared between hosts.
    assert [each["kind"] for each in found["findings"]] == ["ranks-disagree", "replicas-differ"]
    assert found["run"]["processes"] == 4
    for name in spread.names:
        assert f"{name} serves" in found["run"]["locality"]

    expected, written = tree(out), [tree(spread.folder(number) / "out") for number in range(3)]
    for number, files in enumerate(written):
        assert files.pop("manifest.json") == expected["manifest.json"]
        assert set(files) <= {RANK_FILE.format(rank=rank) for rank in HELD[number]}
    together = [name for files in written for name in files]
    assert sorted(together) == [RANK_FILE.format(rank=rank) for rank in range(RANKS)]
    for files in written:
        for name, content in files.items():
            assert content == expected[name], name


def test_without_the_option_a_file_elsewhere_is_missing(spread):
    refused(spread.mpirun([1, 1, 1], binary(), "norms", spread.local / "dump"), 3, "manifest.json")


def test_what_no_host_sees_is_named(spread):
    (spread.folder(1) / "dump" / RANK_FILE.format(rank=5)).unlink()
    refused(spread.mpirun([1, 1, 1], binary(), "clip", spread.local / "dump", "-o", spread.local / "out", "--locality",
                          "files"), 3, "no host sees the files of rank 5", "node0, node1, node2")
    assert not any((spread.folder(number) / "out").exists() or (spread.folder(number) / "out.partial").exists()
                   for number in range(3))


def test_copies_of_different_sizes_are_refused(spread):
    with open(spread.folder(2) / "dump" / RANK_FILE.format(rank=2), "ab") as file:
        file.write(b"x")
    refused(spread.mpirun([1, 1, 1], binary(), "norms", spread.local / "dump", "--locality", "files"), 3,
            RANK_FILE.format(rank=2), "on host node1", "node2")
