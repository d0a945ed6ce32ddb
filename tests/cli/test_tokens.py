"""`tokens` and --num-label-tokens auto: labels counted once for each data-parallel coordinate, against numpy."""

import csv
import io
import json

import h5py
import numpy as np
import pytest

from conftest import GOLDEN, finding, kinds, refused, run, tree, without_run
from dump_builder import Dump

IGNORE = -100


def counts(labels, ignore=IGNORE):
    """(sequences, elements, label tokens, tail padding) by numpy, a row at a time."""
    labels = np.asarray(labels, np.int64)
    tail = 0
    for row in labels:
        kept = np.flatnonzero(row != ignore)
        tail += row.size - (kept[-1] + 1 if kept.size else 0)
    return np.array([labels.shape[0], labels.size, int((labels != ignore).sum()), int(tail)])


def entry(values):
    return dict(zip(("sequences", "elements", "label_tokens", "tail_padding"), map(int, values)))


def random_labels(random, batch, sequence):
    labels = random.integers(-3, 50, (batch, sequence))
    labels[labels < 0] = IGNORE
    for row in labels:
        row[sequence - random.integers(0, sequence + 1):] = IGNORE
    return labels


def grid(**training):
    """pp 2 x dp_replicate 2 x dp_shard 2 x tp 2; labels on the last stage, which both tp ranks have."""
    dump = Dump(16, device_mesh="world", **{"pp_enabled": True, "pp_axis_name": "pp", "dp_group_size": 4, **training})
    ranks = np.arange(16).reshape(2, 2, 2, 2)
    dump.mesh("world", ["pp", "dp_replicate", "dp_shard", "tp"], ranks)
    dump.mesh("last", ["dp_replicate", "dp_shard", "tp"], ranks[1])
    random = np.random.default_rng(5)
    dump.sharded("w", random.standard_normal((8, 4)).astype(np.float32), "last", ["Replicate()", "Shard(0)", "Shard(1)"])
    by_coordinate = []
    for c, ranks_there in enumerate(ranks[1].reshape(4, 2).tolist()):
        labels = [random_labels(random, 1 + c % 2, 30), random_labels(random, 2, 7 + c), np.empty((0, 9), np.int64)]
        by_coordinate.append(labels)
        for rank in ranks_there:
            dump.labels[rank] = [part.copy() for part in labels]
    return dump, by_coordinate


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    dump, by_coordinate = grid()
    return dump.write(tmp_path_factory.mktemp("tokens") / "dump"), by_coordinate


def tokens(dump, *args, np_=1, code=0):
    result = run(np_, "tokens", dump, "--format", "json", *args)
    assert result.code == code and result.err == "", result
    return result.json()


def test_counts_of_every_rank_and_in_all(recorded):
    path, by_coordinate = recorded
    report = tokens(path)
    assert report["command"] == "tokens" and report["findings"] == []
    each = [sum(counts(part) for part in labels) for labels in by_coordinate]
    total = sum(each)
    labels = report["labels"]
    assert {key: labels[key] for key in entry(total)} == entry(total)
    assert labels["tokens_without_tail"] == total[1] - total[3] and labels["ignore_index"] == IGNORE
    assert labels["dp_axes"] == ["dp_replicate", "dp_shard"] and labels["recorded_label_tokens"] is None
    assert labels["coordinates"] == labels["coordinates_counted"] == 4
    assert report["microbatches"] == [entry(sum(counts(labels[k]) for labels in by_coordinate)) for k in range(3)]
    assert report["ranks"] == [{"rank": 8 + 2 * c + t, "coordinate": c, "counted": t == 0, "microbatches": 3,
                                **entry(each[c])} for c in range(4) for t in range(2)]
    assert report["dump"]["world_size"] == 16 and report["microbatch"] is None


def test_any_number_of_processes(recorded):
    assert without_run(tokens(recorded[0], np_=3)) == without_run(tokens(recorded[0]))


def test_text_csv_xml_and_html(tool, recorded):
    path, by_coordinate = recorded
    total = sum(counts(part) for labels in by_coordinate for part in labels)
    for ending in ("csv", "xml", "html", "json"):
        report = tool.fresh("report").with_suffix("." + ending)
        result = run(1, "tokens", path, "--report", report)
        assert result.code == 0 and result.err == "", result
        assert report.stat().st_size > 0
        if ending == "csv":
            rows = list(csv.DictReader(io.StringIO(report.read_text())))
            assert sum(int(row["label_tokens"]) for row in rows if row["counted"] == "true") == total[2]
            assert [int(row["rank"]) for row in rows] == list(range(8, 16))
        if ending == "html":
            assert "label_tokens" in report.read_text() and f"{total[2]}" in report.read_text().replace(",", "")
    lines = {line[:13].strip(): line[14:] for line in result.out.splitlines() if not line.startswith(" ")}
    assert lines["label tokens"].split()[0] == str(total[2]) and lines["tail padding"].split()[0] == str(total[3])
    assert lines["coordinates"].split()[:3] == ["4", "of", "4"] and lines["findings"] == "none"
    assert run(1, "tokens", path, "--quiet").out == ""


def test_the_ignored_label(tool):
    dump = Dump(1, ignore_index=7)
    dump.labels = {0: [[[7, 7, 1, 7, -100, 7, 7]]]}
    path = dump.write(tool.fresh("dump"))
    assert tokens(path)["labels"]["label_tokens"] == 2 and tokens(path)["labels"]["tail_padding"] == 2
    other = tokens(path, "--ignore-index", "-100")["labels"]
    assert (other["ignore_index"], other["label_tokens"], other["tail_padding"]) == (-100, 6, 0)


def test_the_references_examples(tool):
    for labels, ignore, expected in (
            ([[-100, 1, 1, -100, -100], [-100, -100, 2, 3, 4], [5, 6, -100, -100, -100]], -100, 5),
            ([[-100] * 4] * 2, -100, 8), ([[9, 0, 0], [0, 0, 0]], 0, 5)):
        dump = Dump(1)
        dump.labels = {0: [labels]}
        assert tokens(dump.write(tool.fresh("dump")), "--ignore-index", str(ignore))["labels"]["tail_padding"] == expected


def test_stored_in_chunks_and_large(tool):
    """More than one piece of the reading, in chunks that it does not fit."""
    labels = random_labels(np.random.default_rng(1), 37, 3001)

    def store(rank, file):
        file.create_dataset("labels/0", data=labels.astype("<i8"), chunks=(5, 1000), compression="gzip", shuffle=True)
    report = tokens(Dump(1).write(tool.fresh("dump"), edit_file=store))
    assert {key: report["labels"][key] for key in entry(counts(labels))} == entry(counts(labels))


@pytest.mark.parametrize("np_", [1, 3])
def test_copies_that_differ(tool, np_):
    dump, by_coordinate = grid()
    dump.labels[13][0][0, 3] = 1000
    dump.labels[13][1][1, 2] = 1001
    dump.labels[11] = dump.labels[11][:2]
    dump.labels[15][1] = dump.labels[15][1][:, :-1]
    path = dump.write(tool.fresh("dump"))
    report = tokens(path, np_=np_)
    assert report["labels"]["label_tokens"] == sum(counts(p)[2] for labels in by_coordinate for p in labels)
    assert kinds(report) == ["labels-differ"] * 3
    fewer, values, shapes = report["findings"]
    assert fewer["ranks"] == [10, 11] and fewer["index"] is None
    assert "rank 11 has labels of 2 microbatches, rank 10 of 3" in fewer["message"]
    assert values["ranks"] == [12, 13] and values["index"] == [0, 0, 3] and values["value"] == 2
    assert f"the first is 1000, there {by_coordinate[2][0][0, 3]}" in values["message"]
    assert shapes["ranks"] == [14, 15] and "[2, 9], rank 14's [2, 10]" in shapes["message"]
    if np_ == 1:
        assert run(1, "tokens", path, "--strict").code == 1


def test_coordinates_without_labels(tool):
    dump, by_coordinate = grid()
    for rank in (10, 11):
        del dump.labels[rank]
    path = dump.write(tool.fresh("dump"))
    report = tokens(path)
    missing = finding(report, "labels-missing")
    assert missing["ranks"] == [2, 3, 10, 11] and missing["value"] == 1
    assert report["labels"]["label_tokens"] == sum(
        counts(p)[2] for c, labels in enumerate(by_coordinate) for p in labels if c != 1)
    out = tool.fresh("out")
    for np_ in (1, 2):
        refused(np_, 3, path, "--num-label-tokens", "auto", out=out, mentions=["1 of 4", "--num-label-tokens N"])


def test_coordinates_with_fewer_microbatches(tool):
    """Both ranks of a coordinate lost their last microbatch: no copy tells, the other coordinates do."""
    dump, by_coordinate = grid()
    for rank in (10, 11):
        dump.labels[rank].pop()
    for rank in (14, 15):
        del dump.labels[rank][1:]
    path = dump.write(tool.fresh("dump"))
    report = tokens(path)
    assert kinds(report) == ["labels-incomplete"]
    short = finding(report, "labels-incomplete")
    assert short["ranks"] == [10, 14] and short["value"] == 2
    assert "coordinate 1 (rank 10) has none of microbatch 2, coordinate 3 (rank 14) has none of microbatches 1 to 2" in \
        short["message"]
    assert report["labels"]["coordinates_counted"] == 4
    assert run(1, "tokens", path, "--strict").code == 1
    refused(1, 3, path, "--num-label-tokens", "auto", out=tool.fresh("out"),
            mentions=["2 of 4", "rank 10", "microbatch 2", "--num-label-tokens N"])


def test_no_labels(tool):
    path = Dump(2).write(tool.fresh("dump"))
    report = tokens(path)
    assert report["labels"]["label_tokens"] == 0 and report["ranks"] == [] and kinds(report) == ["labels-missing"]
    assert run(1, "tokens", path).code == 0
    refused(1, 3, path, "norms", path, "--num-label-tokens", "auto", mentions=["none", "auto"])


def test_the_recorded_number(tool):
    dump = Dump(1, num_label_tokens=5)
    dump.labels = {0: [[[1, 2, -100]]]}
    report = tokens(dump.write(tool.fresh("dump")))
    assert report["labels"]["recorded_label_tokens"] == 5
    assert "recorded 5 label tokens, its labels have 2" in finding(report, "label-tokens")["message"]
    dump.training["num_label_tokens"] = 2
    assert tokens(dump.write(tool.fresh("dump")))["findings"] == []


def test_a_recorded_step():
    report = tokens(GOLDEN / "pp_fsdp" / "dump")
    assert report["labels"]["label_tokens"] == report["labels"]["recorded_label_tokens"] == 52
    assert report["findings"] == []


# ----------------------------------------------------------------------------------------------------------------------
# --num-label-tokens auto
# ----------------------------------------------------------------------------------------------------------------------


def test_auto_is_the_counted_number(tool, recorded):
    path, by_coordinate = recorded
    number = sum(counts(part)[2] for labels in by_coordinate for part in labels)
    how = ["--max-norm", "0.01"]
    by_hand, _, expected = tool.clip(path, *how, "--num-label-tokens", str(number))
    assert by_hand["scale"]["label_token_divisor"] == number / 4
    for np_ in (1, 3):
        report, _, out = tool.clip(path, *how, "--num-label-tokens", "auto", np=np_)
        assert tree(out) == tree(expected)
        assert without_run(report) == without_run(by_hand)
    norms = tool.norms(path, "--num-label-tokens", "auto")
    assert norms["scale"] == by_hand["scale"] and norms["norm"]["total"] == by_hand["norm"]["total"]
    baseline = tool.fresh("baseline")
    assert run(1, "check", path, "--baseline", baseline, "--update", "--num-label-tokens", "auto").code == 0
    assert run(1, "check", path, "--baseline", baseline, "--num-label-tokens", str(number)).code == 0
    assert run(1, "check", path, "--baseline", baseline, "--num-label-tokens", str(number + 1)).code == 1
    sweep = run(1, "norms", path, "--sweep", "1,2", "--num-label-tokens", "auto", "--format", "json").json()
    assert sweep["steps"][0]["total"] == by_hand["norm"]["total"]
    environment = tool.norms(path, env={"GRADCLIP_NUM_LABEL_TOKENS": "auto"})
    assert environment["scale"] == by_hand["scale"]


def test_findings_of_labels_are_the_clips(tool):
    dump, _ = grid(num_label_tokens=3)
    dump.labels[9][0][0, 0] = 77
    path = dump.write(tool.fresh("dump"))
    for more in ([], ["--total-norm", "1"]):
        report, _, _ = tool.clip(path, "--num-label-tokens", "auto", *more)
        assert kinds(report) == ["labels-differ", "label-tokens"]
        assert run(1, "clip", path, "-o", tool.fresh("out"), "--num-label-tokens", "auto", "--strict", *more).code == 1
    report, _, _ = tool.clip(path)
    assert kinds(report) == []


def test_one_microbatch_is_not_the_step(tool):
    dump = Dump(1)
    dump.labels = {0: [[[1, 2, -100]]]}
    dump.more["microbatch"] = {"index": 1, "count": 4}
    path = dump.write(tool.fresh("dump"))
    assert tokens(path)["microbatch"] == {"index": 1, "count": 4}
    assert "of microbatch 1 of 4 alone" in run(1, "tokens", path).out
    refused(1, 3, path, "norms", path, "--num-label-tokens", "auto", mentions=["microbatch 1 of 4"])


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def on_rank_1(name, **how):
    def store(rank, file):
        if rank == 1:
            file.create_dataset(name, **how)
    return store


@pytest.mark.parametrize("store, mentions", [
    (on_rank_1("labels/0", data=np.zeros((2, 3), "<i4")), ["rank_00001.h5, /labels/0", "32-bit", "int64 [batch, sequence]"]),
    (on_rank_1("labels/0", data=np.zeros((2, 3), ">i8")), ["rank_00001.h5, /labels/0", "int64 [batch, sequence]"]),
    (on_rank_1("labels/0", data=np.zeros((2, 3), "<f8")), ["rank_00001.h5, /labels/0", "int64 [batch, sequence]"]),
    (on_rank_1("labels/0", data=np.zeros(6, "<i8")), ["rank_00001.h5, /labels/0", "has 1 dimensions"]),
    (on_rank_1("labels/0", data=np.zeros((1, 2, 3), "<i8")), ["rank_00001.h5, /labels/0", "has 3 dimensions"]),
    (on_rank_1("labels/1", data=np.zeros((2, 3), "<i8")), ["rank_00001.h5, /labels/0", "does not exist"]),
    (on_rank_1("labels", data=np.zeros((2, 3), "<i8")), ["rank_00001.h5, /labels"]),
], ids=["int32", "big-endian", "float64", "1-D", "3-D", "a number left out", "no group"])
def test_labels_that_are_none(tool, store, mentions):
    dump = Dump(2)
    dump.plain("w", np.ones(4, np.float32))
    dump.labels = {0: [[[1, 2]]]}
    path = dump.write(tool.fresh("dump"), edit_file=store)
    refused(1, 3, path, "tokens", path, mentions=mentions)
    refused(1, 3, path, "--num-label-tokens", "auto", out=tool.fresh("out"), mentions=mentions)
    assert run(1, "norms", path).code == 0  # gradients are whole
    found = run(1, "verify", path, "--format", "json")
    assert found.code == 1
    labels = finding(found.json(), "unreadable")
    assert labels["ranks"] == [1] and labels["parameter"] in mentions[0] and labels["parameter"].startswith("/labels")


def test_one_message_of_several_processes(tool):
    store = on_rank_1("labels/0", data=np.zeros(6, "<i8"))
    path = Dump(2).write(tool.fresh("dump"), edit_file=store)
    refused(3, 3, path, "tokens", path, mentions=["/labels/0"])  # one of them serves no rank


def test_axes(tool):
    dump = Dump(4, device_mesh="world")
    dump.mesh("world", ["data", "model"], [[0, 1], [2, 3]])
    dump.labels = {rank: [[[rank // 2, 5, -100]]] for rank in range(4)}
    path = dump.write(tool.fresh("dump"))
    refused(1, 3, path, "tokens", path, mentions=["'data'", "--dp-axes"])
    assert tokens(path, "--dp-axes", "data")["labels"]["label_tokens"] == 4
    assert tokens(path, "--dp-axes", "data,model")["labels"]["label_tokens"] == 8
    refused(1, 2, path, "tokens", path, "--dp-axes", "batch", mentions=["--dp-axes", "'batch'", "'data', 'model'"])
    refused(1, 2, path, "tokens", path, "--dp-axes", "data", "--pp-axis", "nosuch",
            mentions=["--pp-axis", "'nosuch'", "'data', 'model'"])
    for axes in ("", "data,", ",data", "data,,model"):
        refused(1, 2, path, "tokens", path, f"--dp-axes={axes}", mentions=["--dp-axes"])
    two = Dump(2)
    two.mesh("a", ["dp"], [0, 1])
    two.mesh("b", ["tp"], [0, 1])
    two.labels = {0: [[[1]]]}
    path = two.write(tool.fresh("dump"))
    refused(1, 3, path, "tokens", path, mentions=["device_mesh", "2 meshes"])


def test_usage(tool, recorded):
    path, _ = recorded
    for words in (["--ignore-index", "many"], ["--ignore-index", "1.5"], ["-o", "x"], ["--max-norm", "1"],
                  ["--num-label-tokens", "auto"]):
        refused(1, 2, path, "tokens", path, *words)
    refused(1, 2, path, "norms", path, "--num-label-tokens", "automatic", mentions=["auto"])
    refused(1, 3, tool.folder / "no", "tokens", tool.folder / "no")


def test_labels_of_a_rank_outside_the_mesh(tool):
    dump = Dump(3, device_mesh="world")
    dump.mesh("world", ["dp"], [0, 1])
    dump.labels = {rank: [[[1]]] for rank in range(3)}
    path = dump.write(tool.fresh("dump"))
    refused(1, 3, path, "tokens", path, mentions=["rank_00002.h5", "rank 2", "'world'"])


def test_a_json_report_makes_a_page(tool, recorded):
    file = tool.fresh("report").with_suffix(".json")
    page = tool.fresh("page").with_suffix(".html")
    assert run(1, "tokens", recorded[0], "--report", file).code == 0
    assert json.loads(file.read_text())["command"] == "tokens"
    assert run(1, "report", file, "-o", page).code == 0
    assert "gradclip tokens" in page.read_text()


def test_nothing_is_changed(tool, recorded):
    before = tree(recorded[0])
    with h5py.File(recorded[0] / "rank_00008.h5") as file:
        assert list(file["labels"]) == ["0", "1", "2"]
    tokens(recorded[0])
    assert tree(recorded[0]) == before
