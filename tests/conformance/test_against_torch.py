"""gradclip against PyTorch: totals, coefficients and every clipped bit, on random steps and on the recorded ones.

GRADCLIP_LONG=1 plays twenty times as many random steps; GRADCLIP_SEED=n plays one. A step follows from its seed, and
`python random_cases.py n` describes it. Its dump stays where the failure message says.
"""

import json
import math
import os
import pickle
import random
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import xxhash

import random_cases
import reference_step
from conftest import ROOT, free_port
from random_cases import DTYPES, NORM_TYPES, PARTIAL_PARAMETERS, raw_bytes

GOLDEN = sorted((ROOT / "testdata" / "golden").iterdir())
LONG = os.environ.get("GRADCLIP_LONG") == "1"
ONE = [int(os.environ["GRADCLIP_SEED"])] if "GRADCLIP_SEED" in os.environ else None
SEEDS = ONE or list(range(720) if LONG else (*range(36), 41))  # 41: empty shards in a shape of FSDP2's own
PARTIAL_SEEDS = [] if ONE else [PARTIAL_PARAMETERS + i for i in range(20 if LONG else 2)]
PLAIN_SEEDS = [seed for seed in SEEDS if random_cases.describe(seed).kind == "plain"]
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@pytest.fixture(scope="session")
def steps(tmp_path_factory):
    """Plays all random steps in one world of processes, and leaves a folder for each."""
    folder = tmp_path_factory.mktemp("steps")
    seeds = SEEDS + [seed for seed in PARTIAL_SEEDS if seed not in SEEDS]
    try:
        mp.spawn(random_cases.play, (free_port(), seeds, folder), nprocs=random_cases.WORLD)
    except Exception:
        for error in folder.glob("*.error.*"):
            print(f"{error.name}: {error.read_text()}")
        raise
    return folder


@pytest.fixture
def step(request, steps):
    """One of them: where it is, and what each rank's PyTorch found."""
    folder = steps / str(request.param)
    found = [pickle.loads((folder / f"torch_{rank}.pickle").read_bytes())
             for rank in range(random_cases.describe(request.param).world)]
    print(f"reproduce with GRADCLIP_SEED={request.param}; dump in {folder / 'dump'}\n{found[0]['case']}")
    return folder, found


def over(seeds):
    return pytest.mark.parametrize("step", seeds, ids=str, indirect=True)


def close(found, expected, tolerance):
    if math.isnan(expected) or math.isinf(expected) or expected == 0:
        return found == expected or math.isnan(found) and math.isnan(expected)
    return abs(found - expected) <= tolerance * abs(expected)


def totals_by_rank(report):
    return {rank: total["total"] for total in report["reference"]["totals"] for rank in total["ranks"]}


def differing_ranks(report, torchs, p):
    """Where `reference.totals` is not what that rank's PyTorch computed. A rank without gradients need not be listed."""
    by_rank = totals_by_rank(report)
    return [f"p = {p}, rank {rank}: {by_rank.get(rank)!r}, the reference has {found['reference'][p]!r}"
            for rank, found in enumerate(torchs)
            if p in found["reference"] and (rank in by_rank or found["holds"])
            and (rank not in by_rank or not close(by_rank[rank], found["reference"][p], 1e-12))]


def scale_of(case):
    """The two divisors that the report has to name."""
    training, rows = case.training, len(random_cases.MESHES[case.world]["moe"][1]) if case.given_moe_mesh else 0
    tokens, ranks = training.get("num_label_tokens"), training.get("dp_group_size")
    yield tokens / ranks if training.get("pp_enabled") and tokens and ranks else None
    yield ranks / rows * training["expert_tp_replication_factor"] if rows and ranks else None


def files_of(dump):
    return {file.name: file.read_bytes() for file in dump.iterdir()}


def read_rank(dump, rank):
    """{link name: (type, raw bytes)} of one rank file."""
    with h5py.File(dump / f"rank_{rank:05d}.h5") as file:
        return {name: (dataset.attrs["dtype"].decode(), dataset[()].tobytes())
                for name, dataset in file["gradients"].items()}


def with_one_nan(dtype, raw):
    """Raw bytes with every NaN made the same one: processors differ in the NaN they make, gradclip does not."""
    tensor = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]) if raw else torch.zeros(0, dtype=DTYPES[dtype])
    return raw_bytes(torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor))


def assert_same_bits(found, expected, where):
    assert found.keys() == expected.keys(), where
    for name, (dtype, raw) in expected.items():
        assert found[name][0] == dtype, f"{where}, {name}: type"
        if with_one_nan(*found[name]) == with_one_nan(dtype, raw):
            continue
        size = DTYPES[dtype].itemsize
        mine, torchs = (np.frombuffer(bytes_, f"<u{size}") for bytes_ in (found[name][1], raw))
        assert len(mine) == len(torchs), f"{where}, {name}: {len(mine)} elements, torch has {len(torchs)}"
        wrong = np.flatnonzero(mine != torchs)
        pytest.fail(f"{where}, {name} ({dtype}): {len(wrong)} of {len(mine)} elements differ, the first at {wrong[0]}: "
                    f"{mine[wrong[0]]:#x}, torch has {torchs[wrong[0]]:#x}")


# Random steps ---------------------------------------------------------------------------------------------------------

@over(SEEDS)
def test_totals(gradclip, step, tmp_path):
    """The exact total, and the total that each rank of the reference computes, for every norm type."""
    folder, torchs = step
    case, wrong = torchs[0]["case"], []
    for p in NORM_TYPES:
        options = ("--numerics", "automodel-cpu", "--norm-type", p)
        report = gradclip("norms", folder / "dump", *options, reports=tmp_path)
        assert close(report["norm"]["total"], torchs[0]["exact"][p], 1e-12), f"p = {p}: exact total"
        assert report["norm"]["elements"] == torchs[0]["elements"]
        if p in torchs[0]["float32"]:
            assert close(report["norm"]["total"], torchs[0]["float32"][p], 1e-6), f"p = {p}: get_total_norm"
        wrong += differing_ranks(report, torchs, p)
        assert [report["scale"][key] for key in ("label_token_divisor", "expert_divisor")] == list(scale_of(case))
        if p == case.training["norm_type"] and case.seed % 2:
            parallel = gradclip("norms", folder / "dump", *options, processes=case.processes, reports=tmp_path)
            for key in ("norm", "reference", "scale", "parameters", "findings"):
                assert json.dumps(parallel[key]) == json.dumps(report[key]), f"{case.processes} processes: {key}"
    assert not wrong, "the reference's total by rank:\n" + "\n".join(wrong)


@over(SEEDS)
def test_clipped_bits(gradclip, step, tmp_path):
    """The same total on both sides: every bit that PyTorch leaves, on one process and on several."""
    folder, torchs = step
    case, total, max_norm = torchs[0]["case"], torchs[0]["total"], torchs[0]["max_norm"]
    narrow = {parameter.dtype for parameter in case.parameters} - {"float32", "float64"}
    options = ["--max-norm", repr(max_norm)]
    if math.isfinite(total):
        options += ["--total-norm", total.hex(), "--numerics", "automodel-cpu" if narrow else "exact"]
    report = gradclip("clip", folder / "dump", "-o", tmp_path / "one", *options, reports=tmp_path)
    for rank, found in enumerate(torchs):
        assert_same_bits(read_rank(tmp_path / "one", rank), found["clipped"], f"rank {rank}")
    assert close(report["clip"]["coefficient"], torchs[0]["coefficient"], 0.0)
    gradclip("clip", folder / "dump", "-o", tmp_path / "several", *options, processes=case.processes, reports=tmp_path)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "several"), f"{case.processes} processes"


@over(SEEDS)
def test_own_total_clips_alike(gradclip, step, tmp_path):
    """Nothing given: the exact total, from it the coefficient, and with PyTorch's own product the same bits again."""
    folder, torchs = step
    max_norm, total = torchs[0]["max_norm"], torchs[0]["total"]
    report = gradclip("clip", folder / "dump", "-o", tmp_path / "out", "--max-norm", repr(max_norm), reports=tmp_path)
    assert close(report["norm"]["total"], total, 1e-12)
    assert close(report["clip"]["coefficient"], torchs[0]["coefficient"], 4e-12)
    if report["norm"]["total"] == total:
        for rank, found in enumerate(torchs):
            assert_same_bits(read_rank(tmp_path / "out", rank), found["clipped"], f"rank {rank}")


@over(PARTIAL_SEEDS)
def test_partial_parameters(gradclip, step, tmp_path):
    """Parameters that are Partial themselves: the reference takes the full tensors of such a group."""
    (folder, torchs), wrong = step, []
    for p in NORM_TYPES:
        report = gradclip("norms", folder / "dump", "--numerics", "automodel-cpu", "--norm-type", p, reports=tmp_path)
        assert close(report["norm"]["total"], torchs[0]["exact"][p], 1e-12)
        wrong += differing_ranks(report, torchs, p)
    assert not wrong, "the reference's total by rank:\n" + "\n".join(wrong)


@over(PLAIN_SEEDS)
def test_torch_numerics(gradclip, step, tmp_path):
    """Plain tensors under --numerics torch: torch.nn.utils.clip_grad_norm_."""
    folder, torchs = step
    total, max_norm = torchs[0]["torch_total"], torchs[0]["max_norm"]
    assert isinstance(total, torch.Tensor), f"PyTorch refused: {total}"
    dtypes = {dtype for dtype, _ in torchs[0]["clipped"].values()} or {"float32"}
    report = gradclip("clip", folder / "dump", "-o", tmp_path / "out", "--numerics", "torch", "--max-norm",
                      repr(max_norm), reports=tmp_path)
    assert report["reference"]["arithmetic"] == "torch"
    for rank, found in totals_by_rank(report).items():
        tolerance = {"float64": 1e-14, "float32": 1e-6}.get(max(dtypes, key=EPSILON.get), max(map(EPSILON.get, dtypes)))
        assert close(found, float(total), tolerance), f"rank {rank}: {found!r}, torch has {float(total)!r}"
        if found == float(total):
            assert_clipped_as_by_torch(tmp_path / "out", torchs, rank)
    gradclip("clip", folder / "dump", "-o", tmp_path / "given", "--numerics", "torch", "--max-norm", repr(max_norm),
             "--total-norm", repr(float(total)), reports=tmp_path)
    for rank in range(len(torchs)):
        assert_clipped_as_by_torch(tmp_path / "given", torchs, rank)


def assert_clipped_as_by_torch(out, torchs, rank):
    mine, names = read_rank(out, rank), list(torchs[rank]["clipped"])
    expected = {name: (mine[name][0], raw) for name, raw in zip(names, torchs[rank]["torch_clipped"])}
    assert_same_bits(mine, expected, f"rank {rank}")


# The recorded steps ---------------------------------------------------------------------------------------------------

def expected_of(case):
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    every = {str(expected["arguments"]["norm_type"]): expected["grad_norm"] | {"exact_norm": expected["exact_norm"]}}
    return expected, every | expected["other_norm_types"]


def totals_from_dump(dump, norm_type):
    """numerics.md's view from each rank in the reference's arithmetic, from the files and without communication."""
    manifest = json.loads((dump / "manifest.json").read_text(encoding="utf-8"))
    training, meshes = manifest["training"], {n: np.array(m["ranks"]) for n, m in manifest["meshes"].items()}
    groups = {}  # {group: {rank: [magnitudes]}}
    for rank in range(manifest["world_size"]):
        held = read_rank(dump, rank)
        for entry in manifest["parameters"]:
            name, mesh = entry.get("dataset", entry["name"]), entry["mesh"]
            if name not in held or rank not in (meshes[mesh] if mesh else entry["ranks"]):
                continue
            dtype, raw = held[name]
            gradient = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]) if raw else torch.zeros(0)
            if not entry["shape"]:
                gradient = gradient.reshape(())  # which the division below promotes to float64, as in the reference
            if training.get("pp_enabled"):
                gradient = gradient / (training["num_label_tokens"] / training["dp_group_size"])
            if mesh and "ep" in manifest["meshes"][mesh]["dim_names"]:
                gradient = gradient / (training["dp_group_size"] / len(meshes[manifest["moe_mesh"]]))
            key = (mesh, tuple(entry.get("placements", ())), entry.get("mesh_object", 0))
            groups.setdefault(key, {}).setdefault(rank, []).append(gradient.abs())

    def alike(key, rank):
        mesh, placements, _ = key
        if mesh is None:
            return [rank]
        place = np.argwhere(meshes[mesh] == rank)[0]
        return meshes[mesh][tuple(int(at) if p == "Replicate()" else slice(None)
                                  for at, p in zip(place, placements))].ravel().tolist()

    def norm_of(key, rank):
        ranks = [r for r in alike(key, rank) if r in groups[key]]
        largest = torch.tensor([float(g.max()) for r in ranks for g in groups[key][r] if g.numel()] or [0.0],
                               dtype=torch.float64).max()
        power = torch.zeros((), dtype=torch.float64)
        for gradient in (g for r in ranks for g in groups[key][r]):
            ratio = gradient.div(reference_step._divisor(largest))
            power += (ratio.square() if norm_type == 2 else ratio.pow(norm_type)).sum(dtype=torch.float64)
        return largest if math.isinf(norm_type) else largest * power.pow(1 / norm_type)

    def combined(norms):
        norms = torch.stack(norms)
        return norms.max() if math.isinf(norm_type) else reference_step._from_parts(norms, norms.max(), norm_type)

    of_rank = {rank: combined([norm_of(key, rank) for key in groups if rank in groups[key]])
               for rank in range(manifest["world_size"])}
    if training.get("pp_enabled"):
        stages = np.array(manifest["meshes"][manifest["device_mesh"]]["ranks"])
        return {rank: float(combined([of_rank[r] for r in line if r in of_rank]))
                for line in stages.reshape(len(stages), -1).T.tolist() for rank in line}
    return {rank: float(total) for rank, total in of_rank.items()}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_golden_totals(gradclip, case, tmp_path):
    _, every = expected_of(case)
    for p, expected in every.items():
        report = gradclip("norms", case / "dump", "--numerics", "automodel-cpu", "--norm-type", p, reports=tmp_path)
        assert close(report["norm"]["total"], float.fromhex(expected["exact_norm"]["hex"]), 1e-13), f"p = {p}"
        found, on_dump = totals_by_rank(report), totals_from_dump(case / "dump", float(p))
        for rank, text in enumerate(expected["by_rank"]):
            assert close(found[rank], on_dump[rank], 1e-12), f"p = {p}, rank {rank}: not what the dump gives"
            assert close(found[rank], float.fromhex(text), 1e-12), \
                f"p = {p}, rank {rank}: {found[rank]!r}, trained with {float.fromhex(text)!r}"


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_golden_clip_is_the_training_steps(gradclip, case, tmp_path):
    expected, _ = expected_of(case)
    processes = random.Random(case.name).randint(1, 4)
    report = gradclip("clip", case / "dump", "-o", tmp_path / "out", "--numerics", "automodel-cpu", reports=tmp_path)
    gradclip("clip", case / "dump", "-o", tmp_path / "several", "--numerics", "automodel-cpu", processes=processes,
             reports=tmp_path)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "several"), f"{processes} processes"
    for rank, checksums in expected["clipped"].items():
        found = {name: xxhash.xxh3_64_hexdigest(raw) for name, (_, raw) in read_rank(tmp_path / "out", int(rank)).items()}
        assert found == checksums, f"rank {rank}"
    coefficients = {rank: total["coefficient"] for total in report["reference"]["totals"] for rank in total["ranks"]}
    for rank, text in enumerate(expected["coefficient_by_rank"]):
        assert close(coefficients[rank], float.fromhex(text), 2e-12), f"rank {rank}: coefficient"


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_golden_exact_clip(gradclip, case, tmp_path):
    expected, _ = expected_of(case)
    report = gradclip("clip", case / "dump", "-o", tmp_path / "out", reports=tmp_path)
    assert close(report["norm"]["total"], float.fromhex(expected["exact_norm"]["hex"]), 1e-13)
    assert close(report["clip"]["coefficient"], float.fromhex(expected["exact_coefficient"]), 2e-13)
