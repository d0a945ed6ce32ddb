"""The recorded dumps of testdata/golden on 1, 2, 3 and 4 processes, against what PyTorch logged (testdata/README.md)."""

import json
import math
import re

import pytest
import xxhash

from conftest import GOLDEN, LONG, close, kinds, number, run, tree, without_run

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
COUNTS = (1, 2, 3, 4)
DISAGREE = {"tp2_sequence"}  # the reference's ranks have different totals there


def expected_of(case):
    return json.loads((GOLDEN / case / "expected.json").read_text())


def test_all_cases_are_there():
    assert {"single", "fsdp4", "tp2", "fsdp_tp", "hsdp", "pp_fsdp", "moe_ep", "uneven", "bf16"} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_right_total_and_the_same_bytes_from_any_number_of_processes(tool, case):
    expected, dump = expected_of(case), GOLDEN / case / "dump"
    counts = COUNTS + ((8, "mpirun 1") if LONG or case in ("fsdp_tp", "tp2_sequence") else ())
    before = tree(dump)
    report, shards, out = tool.everywhere(dump, counts=counts)
    assert tree(dump) == before
    exact = float.fromhex(expected["exact_norm"]["hex"])
    assert close(report["norm"]["total"], exact, 1e-12)
    assert close(report["clip"]["coefficient"], float.fromhex(expected["exact_coefficient"]), 1e-12)
    assert close(report["clip"]["total_after"], expected["arguments"]["max_grad_norm"], 2e-2 if case == "bf16" else 1e-5)
    assert ("ranks-disagree" in kinds(report)) is (case in DISAGREE)
    assert {k for k in kinds(report)} <= {"ranks-disagree"}, report["findings"]
    assert report["dump"]["step"] == 100 and report["dump"]["world_size"] == len(shards)
    # The totals that ranks saw, in exact arithmetic, are near those that they logged.
    for total in report["reference"]["totals"]:
        for rank in total["ranks"]:
            logged = float.fromhex(expected["grad_norm"]["by_rank"][rank])
            assert close(total["total"], logged, 1e-2 if case == "bf16" else 1e-6), (rank, total)
    assert sorted(r for t in report["reference"]["totals"] for r in t["ranks"]) == list(range(len(shards)))


@pytest.mark.parametrize("case", CASES)
def test_the_training_step_s_own_arithmetic_bit_for_bit(tool, case):
    expected = expected_of(case)
    report, shards, _ = tool.clip(GOLDEN / case / "dump", "--numerics", "automodel-cpu",
                                  np=4 if case in DISAGREE else 1)
    assert report["reference"]["arithmetic"] == "automodel-cpu" and report["run"]["numerics"] == "automodel-cpu"
    logged = [float.fromhex(text) for text in expected["grad_norm"]["by_rank"]]
    totals = {rank: t for t in report["reference"]["totals"] for rank in t["ranks"]}
    assert sorted(totals) == list(range(len(logged)))
    for rank, total in enumerate(logged):
        assert close(totals[rank]["total"], total), (rank, totals[rank], total)
        assert close(totals[rank]["coefficient"], float.fromhex(expected["coefficient_by_rank"][rank]))
    if len(set(logged)) > 1:
        assert report["clip"]["coefficient"] is None
    assert close(report["norm"]["total"], float.fromhex(expected["exact_norm"]["hex"]), 1e-12)
    hashes = {str(rank): {name: xxhash.xxh3_64_hexdigest(stored.tobytes()) for name, stored in names.items()
                          if stored is not None} for rank, names in shards.items()}
    assert hashes == expected["clipped"]


@pytest.mark.parametrize("case", CASES)
def test_other_norm_types(tool, case):
    expected = expected_of(case)
    for p, one in expected["other_norm_types"].items():
        report = tool.norms(GOLDEN / case / "dump", "--norm-type", p)
        assert close(report["norm"]["total"], float.fromhex(one["exact_norm"]["hex"]), 1e-12), p
        assert number(report["norm"]["type"]) == float(p)
    if case in ("uneven", "moe_ep", "tp2_sequence") or LONG:
        for p, one in expected["other_norm_types"].items():
            report = tool.norms(GOLDEN / case / "dump", "--norm-type", p, "--numerics", "automodel-cpu")
            for total in report["reference"]["totals"]:
                for rank in total["ranks"]:
                    assert close(total["total"], float.fromhex(one["by_rank"][rank]), 1e-6), (p, rank)


def test_given_the_logged_total(tool):
    """The reference's own total in hexadecimal gives the reference's own bits, without the first pass."""
    expected = expected_of("fsdp_tp")
    report, shards, _ = tool.everywhere(GOLDEN / "fsdp_tp/dump", "--total-norm", expected["grad_norm"]["by_rank"][0])
    assert close(report["norm"]["total"], float.fromhex(expected["grad_norm"]["by_rank"][0]), 0)
    assert report["norm"]["elements"] is None and report["reference"] is None
    assert {p["norm"] for p in report["parameters"]} == {None}
    hashes = {str(rank): {name: xxhash.xxh3_64_hexdigest(stored.tobytes()) for name, stored in names.items()}
              for rank, names in shards.items()}
    assert hashes == expected["clipped"]


@pytest.mark.parametrize("case", CASES if LONG else ["moe_ep", "tp2_sequence", "bf16"])
def test_threads_and_memory_do_not_change_a_bit(tool, case):
    dump, trees, reports = GOLDEN / case / "dump", [], []
    for more in (["--threads", "1"], ["--threads", "3"], ["--memory-budget", "1M"], ["--memory-budget", "1", "--threads", "2"]):
        report, _, out = tool.clip(dump, *more)
        trees.append(tree(out))
        reports.append(without_run(report))
    assert all(each == trees[0] for each in trees) and all(each == reports[0] for each in reports)


@pytest.mark.parametrize("numerics", ["automodel", "torch"])
@pytest.mark.parametrize("case", CASES if LONG else ["single", "tp2_sequence", "bf16", "pp_fsdp"])
def test_other_numerics(tool, case, numerics):
    expected = expected_of(case)
    report, shards, _ = tool.everywhere(GOLDEN / case / "dump", "--numerics", numerics, counts=(1, 2))
    scaled_otherwise = numerics == "automodel" and expected["arguments"].get("dp_group_size")  # by the reciprocal
    assert close(report["norm"]["total"], float.fromhex(expected["exact_norm"]["hex"]), 1e-7 if scaled_otherwise else 1e-12)
    torch_applies = case == "single"
    if numerics == "torch":
        assert report["reference"]["arithmetic"] == ("torch" if torch_applies else "automodel-cpu")
        assert bool(report["reference"]["note"]) is not torch_applies
    else:
        assert report["reference"]["arithmetic"] == "automodel"
    for total in report["reference"]["totals"]:
        for rank in total["ranks"]:
            assert close(total["total"], float.fromhex(expected["grad_norm"]["by_rank"][rank]), 1e-6)


def test_recorded_norm_is_shown_beside_the_right_one(tool):
    result = run(1, "clip", GOLDEN / "bf16/dump", "-o", tool.fresh("out"))
    assert result.code == 0, result
    exact = float.fromhex(expected_of("bf16")["exact_norm"]["hex"])
    logged = float.fromhex(expected_of("bf16")["grad_norm"]["by_rank"][0])
    shown = [float(text) for text in re.findall(r"\d+\.\d{4,}", result.out)]
    for number_ in (exact, logged):
        assert any(math.isclose(number_, each, rel_tol=1e-5) for each in shown), result
    report, _, _ = tool.clip(GOLDEN / "bf16/dump")
    assert report["reference"]["recorded"]["grad_norm"] == logged


def test_text_of_one_and_of_four_processes_differs_only_in_how_it_ran(tool):
    texts = []
    for np in (1, 4):
        out = tool.folder / "same-name"
        result = run(np, "clip", GOLDEN / "hsdp/dump", "-o", out, "--overwrite")
        assert result.code == 0 and result.err == "", result
        assert "\x1b" not in result.out and "\r" not in result.out.replace("\r\n", "\n")
        texts.append(result.out.replace("\r\n", "\n").splitlines())
    assert len(texts[0]) == len(texts[1])
    different = [(a, b) for a, b in zip(*texts) if a != b]
    assert all(re.search(r"\bs\b|process|thread|MB|memory", a) for a, _ in different), different


def test_clipping_twice_needs_no_scale(tool):
    """What clip wrote is a dump: read again, its total is what was measured on it."""
    report, shards, out = tool.clip(GOLDEN / "pp_fsdp/dump")
    again, same, _ = tool.clip(out, "--no-scale", "--no-clip")
    assert close(again["norm"]["total"], report["clip"]["total_after"])
    for rank, names in shards.items():
        for name, stored in names.items():
            assert stored.tobytes() == same[rank][name].tobytes()
