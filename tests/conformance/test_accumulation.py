"""Real accumulation loops, recorded microbatch by microbatch and replayed by `gradclip accumulate`.

The oracle is what the loop itself had at its end: the same bits where PyTorch's own order of additions is defined (each
collective of two ranks), within a bound otherwise; and the norm that it logged.
"""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from conftest import ROOT, free_port

HERE = ROOT / "tests" / "conformance"
LONG = os.environ.get("GRADCLIP_LONG") == "1"
WORLD = 4

# Every mesh dimension has two ranks: bit for bit.
EXACT = ["fsdp", "fsdp_bfloat16", "fsdp_every", "fsdp_every_bfloat16", "hsdp", "fsdp_tp", "pipeline", "pipeline_every",
         "pipeline_plain", "ddp", "ddp_bfloat16", "corner"]
# Four ranks in one collective.
BOUNDED = ["fsdp_4", "sum_order", "moe"]
IN_LONG = [f"{layout}{how}" for layout in ("hsdp", "fsdp_tp", "pipeline")
           for how in ("_every", "_bfloat16", "_every_bfloat16") if (layout, how) != ("pipeline", "_every")]
CASES = EXACT + BOUNDED + ["failure"] + (IN_LONG if LONG else [])


@pytest.fixture(scope="session")
def loops(tmp_path_factory):
    """All loops, in one world of processes that import PyTorch once."""
    folder, port = tmp_path_factory.mktemp("loops"), free_port()
    line = [sys.executable, HERE / "accumulation_cases.py"]
    world = [subprocess.Popen([*line, str(rank), str(port), folder, *CASES], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
             for rank in range(WORLD)]
    try:
        said = [process.communicate(timeout=240)[0] for process in world]
    finally:
        for process in world:
            process.kill()
    assert [process.returncode for process in world] == [0] * WORLD, "\n".join(said)
    return folder


def shards(dump):
    """{(rank, name): (type, array)} of all rank files."""
    found = {}
    for path in sorted(dump.glob("rank_*.h5")):
        with h5py.File(path) as file:
            for name, dataset in file["gradients"].items():
                found[int(path.stem[5:]), name] = dataset.attrs["dtype"].decode(), dataset[()]
    return found


def manifest_of(dump):
    return json.loads((dump / "manifest.json").read_text(encoding="utf-8"))


def microbatches(loop):
    return sorted(loop.glob("microbatch_*"))


@pytest.fixture
def replayed(loops, gradclip, tmp_path):
    """What gradclip makes of a loop's microbatches."""
    def replay(case, *options):
        out = tmp_path / f"{case}_accumulated"
        gradclip("accumulate", *microbatches(loops / case), "-o", out, *options, reports=tmp_path)
        return out
    return replay


def logged(loops, case):
    return float(np.load(loops / f"{case}.npz")["grad_norm"])


def assert_norm(gradclip, loops, case, dump, tmp_path, tolerance=1e-6):
    report = gradclip("clip", dump, "-o", tmp_path / "clipped", "--max-norm", "1.0", reports=tmp_path)
    expected = logged(loops, case)
    assert abs(report["norm"]["total"] - expected) <= tolerance * expected


@pytest.mark.parametrize("case", EXACT + (IN_LONG if LONG else []))
def test_bits(case, loops, replayed, gradclip, tmp_path):
    out = replayed(case)
    mine, torchs = shards(out), shards(loops / case / "gradients")
    assert mine.keys() == torchs.keys()
    for place, (dtype, values) in torchs.items():
        if case == "corner" and place[1].startswith("often."):
            continue  # test_a_unit_that_runs_several_times_is_reduced_twice
        assert mine[place][0] == dtype and mine[place][1].tobytes() == values.tobytes(), place
    # DistributedDataParallel's bfloat16 gradients have a bfloat16 norm.
    assert_norm(gradclip, loops, case, out, tmp_path, 2.0**-7 if case == "ddp_bfloat16" else 1e-6)


@pytest.mark.parametrize("case, sync", [("fsdp_every", "every"), ("pipeline_every", "schedule"), ("fsdp", "deferred")])
def test_windows_by_the_command_line(case, sync, loops, gradclip, tmp_path):
    """The right word gives what training had, another one gives other roundings, which --check tells."""
    for word in ("every", "schedule", "deferred"):
        if word == "schedule" and not case.startswith("pipeline"):
            continue  # without schedule steps it means every
        line = [gradclip.program, "accumulate", *microbatches(loops / case), "--sync", word, "--check",
                loops / case / "gradients", "--ulp", "0", "--quiet"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == (0 if word == sync else 1), (word, done.stdout, done.stderr)


# What PyTorch does differently --------------------------------------------------------------------------------------

def addends(loop, name, world):
    """[microbatch, rank, ...] of a parameter that every rank recorded whole, in float32."""
    found = [[of[rank, name][1] for rank in range(world)] for of in map(shards, microbatches(loop))]
    return np.array(found, np.float32)


def around_the_ring(parts, place, chunk):
    """Four ranks' addends of elements of one rank's chunk as gloo adds them: it cuts the whole buffer into segments of
    whole 8 bytes, one a rank; of segment s the sum begins with ranks s - 1 and s - 2 and ends with s. All additions
    round."""
    segments = (place + np.arange(parts[0].size).reshape(parts[0].shape)) // (chunk + chunk % 2)
    total = np.empty_like(parts[0])
    for segment in np.unique(segments):
        here = segments == segment
        ordered = [parts[(segment - step) % 4][here] for step in (1, 2, 3, 4)]
        total[here] = ((ordered[0] + ordered[1]) + ordered[2]) + ordered[3]
    return total / np.float32(4)


@pytest.mark.parametrize("case", ["fsdp_4", "sum_order"])
def test_gloo_adds_around_the_ring(case, loops, replayed, gradclip, tmp_path):
    """With the ring's order the recorded microbatches give PyTorch's own bits over four ranks. gradclip adds in float64
    and rounds once, and is within the bound of the ring's four roundings."""
    out = replayed(case)
    mine, torchs = shards(out), shards(loops / case / "gradients")
    units = {}  # FSDP2 reduces a unit's parameters together
    for entry in manifest_of(loops / case / "gradients")["parameters"]:
        units.setdefault(entry["name"].rsplit(".", 2)[0] if "blocks" in entry["name"] else "", []).append(entry)
    for unit in units.values():
        rows = [-(-entry["shape"][0] // 4) for entry in unit]
        sizes = [n * int(np.prod(entry["shape"][1:])) for n, entry in zip(rows, unit)]
        for k, (n, entry) in enumerate(zip(rows, unit)):
            name, accumulated = entry["name"], 0
            for microbatch in addends(loops / case, entry["name"], 4):
                accumulated = microbatch + accumulated
            for rank in range(4):
                parts = [part[rank * n:(rank + 1) * n] for part in accumulated]
                ring = around_the_ring(parts, rank * sum(sizes) + sum(sizes[:k]), sum(sizes))
                assert ring.tobytes() == torchs[rank, name][1].tobytes(), (name, rank)
                bound = 4 * 2.0**-24 * np.abs(np.array(parts, np.float64)).sum(0) / 4
                assert (np.abs(mine[rank, name][1].astype(np.float64) - torchs[rank, name][1]) <= bound).all()
    assert_norm(gradclip, loops, case, out, tmp_path)


def test_the_smallest_case_of_that(loops, replayed):
    """1, 2^-24, 2^-24, 2^-24: rounded once the sum is 1 + 2^-22, and so is the ring's where it meets 1 last."""
    mine, torchs = shards(replayed("sum_order")), shards(loops / "sum_order" / "gradients")
    up, down = (1 + 2.0**-22) / 4, 0.25
    assert [float(mine[rank, "weight"][1][0, 0]) for rank in range(4)] == [up] * 4
    assert [float(torchs[rank, "weight"][1][0, 0]) for rank in range(4)] == [up, up, down, down]


def test_experts_are_exact_beside_a_dense_part_within_its_bound(loops, replayed, gradclip, tmp_path):
    out = replayed("moe")
    mine, torchs = shards(out), shards(loops / "moe" / "gradients")
    for (rank, name), (_, values) in torchs.items():
        if ".experts." in name:  # ep_shard has two ranks
            assert mine[rank, name][1].tobytes() == values.tobytes()
        else:
            np.testing.assert_allclose(mine[rank, name][1], values, rtol=1e-5, atol=1e-8)
    assert_norm(gradclip, loops, "moe", out, tmp_path)


def test_a_unit_that_runs_several_times_is_reduced_twice(loops, replayed):
    """FSDP2's hook after each of its runs: the first one of the last microbatch reduces what earlier microbatches left,
    the last one this microbatch's own. So its windows are not the loop's, and the sums are rounded in another order."""
    loop = loops / "corner"
    torchs, mine = shards(loop / "gradients"), shards(replayed("corner"))
    for name in ("often.weight", "often.bias"):
        g = addends(loop, name, 2)
        early, late = ((of[0] + of[1]) / np.float32(2) for of in (g[0] + g[1], g[2]))
        whole = early + late
        for rank, rows in ((0, slice(0, 2)), (1, slice(2, 3))):
            assert whole[rows].tobytes() == torchs[rank, name][1].tobytes()
            np.testing.assert_allclose(mine[rank, name][1], torchs[rank, name][1], rtol=1e-5, atol=1e-6)


# What is recorded ---------------------------------------------------------------------------------------------------

def test_gradients_that_some_microbatches_do_not_have(loops):
    loop = loops / "corner"
    none = {}
    for k, dump in enumerate(microbatches(loop)):
        with h5py.File(dump / "rank_00001.h5") as file:
            none[k] = {name.decode() for name in file["none"][()]}
    never = {"never.weight", "never.bias"}
    assert none == {0: never | {"rare.weight", "rare.bias"}, 1: never, 2: never | {"rare.weight", "rare.bias"}}
    entries = [{p["name"]: p for p in manifest_of(dump)["parameters"]} for dump in microbatches(loop)]
    assert entries[0] == entries[1] == entries[2]
    assert entries[0]["rare.weight"]["gradient_placements"] == ["Partial(avg)"]
    assert shards(loop / "gradients")[1, "scale"][1].shape == (0,)


def test_a_rank_that_cannot_write_leaves_no_manifest(loops):
    assert logged(loops, "failure") == 2 and not list((loops / "failure").rglob("manifest.json"))


def test_flags_labels_and_types(loops):
    flags = [manifest_of(dump)["microbatch"] for dump in microbatches(loops / "fsdp_bfloat16")]
    assert flags == [{"index": k, "count": 3, "first_microbatch": k == 0, "optimizer_step": k == 2,
                      "synchronised": k == 2} for k in range(3)]
    steps = [manifest_of(dump)["microbatch"] for dump in microbatches(loops / "pipeline")]
    assert steps == [{"index": k, "count": 4, "schedule_step": 0, "synchronised": k == 3} for k in range(4)]
    plain = [manifest_of(dump) for dump in microbatches(loops / "pipeline_plain")]
    assert "synchronised" not in plain[3]["microbatch"] and plain[0]["accumulation"] == {"sync": "schedule"}
    for dump in microbatches(loops / "fsdp_bfloat16"):
        for entry in manifest_of(dump)["parameters"]:
            assert entry["reduce_dtype"] == entry["storage_dtype"] == "float32"
    # Of a weight that is used twice PyTorch adds the first microbatch's two gradients in float32, others' in bfloat16.
    types = [{p["name"]: p["dtype"] for p in manifest_of(dump)["parameters"] if "norm" not in p["name"]}
             for dump in microbatches(loops / "fsdp_bfloat16")]
    assert [of.pop("embed.weight") for of in types] == ["float32", "bfloat16", "bfloat16"]
    assert {dtype for of in types for dtype in of.values()} == {"bfloat16"}
    with h5py.File(loops / "fsdp" / "gradients" / "rank_00001.h5") as final:
        for k, dump in enumerate(microbatches(loops / "fsdp")):
            with h5py.File(dump / "rank_00001.h5") as one:
                assert (one["labels/0"][()] == final[f"labels/{k}"][()]).all()
        assert final["labels"].keys() == {"0", "1", "2"}


def test_losses_are_normalised_by_the_tokens_of_all_microbatches(loops, replayed, gradclip, tmp_path):
    """The recorded sum is the gradient of the mean over all label tokens, on two ranks as on one; the mean of the
    microbatches' means is another gradient, because microbatches have different numbers of label tokens."""
    merged = tmp_path / "merged"
    gradclip("merge", replayed("fsdp"), "-o", merged, reports=tmp_path)
    expected = np.load(loops / "tokens.npz")
    whole, other, mine = [], [], []
    for (_, name), (_, values) in shards(merged).items():
        np.testing.assert_allclose(values, expected[f"global_mean/{name}"], rtol=1e-4, atol=1e-6)
        whole.append(expected[f"global_mean/{name}"].ravel())
        other.append(expected[f"mean_of_means/{name}"].ravel())
        mine.append(values.ravel())
    whole, other, mine = map(np.concatenate, (whole, other, mine))
    size = np.linalg.norm(whole)
    assert np.linalg.norm(mine - whole) < 1e-6 * size < 0.01 * size < np.linalg.norm(other - whole)
    tokens = gradclip("tokens", loops / "fsdp" / "gradients", reports=tmp_path)
    assert "labels" in json.dumps(tokens)
