"""Random jobs: meshes, placements, types, storage and options drawn from a seed, against the oracle. GRADCLIP_LONG=1 draws
more of them; GRADCLIP_SEED=N one alone."""

import math
import os

import numpy as np
import pytest

import element_types as types
import oracle
from conftest import LONG, assert_shards, close, kinds, number
from dump_builder import Dump, chunk, slice_indices
from test_values import RANGE

SEEDS = [int(os.environ["GRADCLIP_SEED"])] if "GRADCLIP_SEED" in os.environ else range(400 if LONG else 40)


def draw_mesh(random, dump):
    sizes = [int(random.integers(1, 4)) for _ in range(random.integers(1, 4))]
    while math.prod(sizes) > dump.world_size:
        sizes[int(np.argmax(sizes))] -= 1
    ranks = random.permutation(dump.world_size)[:math.prod(sizes)].reshape(sizes)
    name = f"mesh{len(dump.meshes)}"
    return dump.mesh(name, [f"d{i}" for i in range(len(sizes))], ranks.tolist())


def draw_values(random, shape, dtype):
    reach = min(RANGE[dtype], 100)
    numbers = random.standard_normal(shape) * 2.0 ** random.integers(-reach, reach // 4 + 1, shape)
    return types.narrow(np.where(random.random(shape) < 0.05, -0.0, numbers), dtype)


def draw_placements(random, dump, mesh, ndim):
    sizes, placements, sharded = dump.meshes[mesh].ranks.shape, [], {}
    for m in range(len(sizes) - 1, -1, -1):  # from the last, so that a strided shard knows its later ones
        kind = random.choice(["shard", "replicate", "partial", "strided"], p=[0.45, 0.25, 0.15, 0.15])
        d = int(random.integers(ndim)) if ndim else None
        if d is None and kind in ("shard", "strided"):
            kind = "replicate"
        if kind == "strided" and sharded.get(d, 1) > 1:
            placements.insert(0, f"_StridedShard(dim={d}, sf={sharded[d]})")
            sharded[d] *= sizes[m]
        elif kind == "partial" and not any(p.startswith("Partial") for p in placements):
            placements.insert(0, f"Partial({random.choice(['sum', 'avg', 'max', 'min'])})")
        elif kind == "replicate" or d is None or kind == "partial":
            placements.insert(0, "Replicate()")
        elif any(p.startswith("_Strided") for p in placements):
            placements.insert(0, "Replicate()")  # keep to orders that PyTorch makes
        else:
            placements.insert(0, f"Shard({d})")
            sharded[d] = sharded.get(d, 1) * sizes[m]
    return placements


def draw(seed):
    random = np.random.default_rng(seed)
    dump = Dump(int(random.integers(1, 9)), step=int(seed))
    meshes = [draw_mesh(random, dump) for _ in range(random.integers(1, 4))]
    kinds_of_types = list(random.choice(types.ALL, random.integers(1, 4), replace=False))
    for i in range(int(random.integers(0, 9))):
        dtype = str(random.choice(kinds_of_types))
        shape = tuple(int(n) for n in random.choice([0, 1, 2, 3, 5, 7, 8, 12], random.integers(0, 4), p=[.04] + [.96 / 7] * 7))
        name = f"layers.{i}." + str(random.choice(["weight", "bias", "a/b%c", "ünïcode"]))
        if random.random() < 0.25:
            ranks = sorted(random.permutation(dump.world_size)[:random.integers(1, dump.world_size + 1)].tolist())
            copies = str(random.choice(["replicated", "distinct"]))
            one = draw_values(random, shape, dtype)
            dump.plain(name, {r: one if copies == "replicated" else draw_values(random, shape, dtype) for r in ranks},
                       copies=copies, dtype=dtype)
            continue
        mesh = str(random.choice(meshes))
        placements = draw_placements(random, dump, mesh, len(shape))
        more = {}
        if random.random() < 0.15 and placements[-1] == "Replicate()":  # Flat is the last one
            placements[-1] = "Flat()"
            of, position = dump.meshes[mesh], len(placements) - 1
            more["flat_ranges"] = {}
            for rank in of.ranks.flatten().tolist():
                held = math.prod(map(len, slice_indices(shape, of, placements, rank)))
                part = chunk(np.arange(held), of.ranks.shape[position], of.coordinate(rank)[position])
                more["flat_ranges"][rank] = (int(part[0]), int(part[-1]) + 1) if len(part) else (held, held)
        parameter = dump.sharded(name, draw_values(random, shape, dtype), mesh, placements, dtype=dtype, **more)
        if any(p.startswith("Partial") for p in placements):  # addends of their own, the same on every replica
            of, drawn = dump.meshes[mesh], {}
            for rank in sorted(parameter.shards):
                key = tuple(c for c, p in zip(of.coordinate(rank), placements) if p != "Replicate()")
                if key not in drawn:
                    drawn[key] = draw_values(random, parameter.shards[rank].shape, dtype)
                parameter.shards[rank] = drawn[key]
        elif random.random() < 0.1:
            parameter.shards = dict.fromkeys(parameter.shards)  # unused in this step
    if random.random() < 0.3:
        dump.device_mesh = meshes[0]
        dump.training = {"pp_enabled": True, "pp_axis_name": "d0", "num_label_tokens": int(random.integers(1, 100)),
                         "dp_group_size": int(random.integers(1, 5))}
    dump.training["norm_type"] = float(random.choice([1, 2, 2, 2, 3, 4, 1.5])) if random.random() < 0.9 else "inf"
    if random.random() < 0.9:
        dump.training["max_grad_norm"] = float(random.choice([0.0, 0.3, 1.0, 1e-20, 1e30]))
    storage = [{}, {"packed": True}, {"compression": "gzip", "chunks": True}, {"offsets": True}, {"checksums": False}]
    return dump, storage[int(random.integers(len(storage)))], random


def rank_totals(expected, p):
    """What each rank's own view gives without pipelining: groups by mesh and placements, reduced over the dimensions that
    are not Replicate, full tensors where one is Partial."""
    dump, totals = expected.dump, {}
    for rank in range(dump.world_size):
        seen = []
        for parameter in dump.parameters:
            if rank not in parameter.shards or parameter.shards[rank] is None:
                continue
            if parameter.mesh is None:
                seen.append(expected._numbers(parameter, rank, None))
            elif any(k[0] == "partial" for k in parameter.kinds()):
                seen.extend(expected._counted(parameter, None))  # copies are equal here
            else:
                here = parameter.mesh.coordinate(rank)
                for other in parameter.shards:
                    there = parameter.mesh.coordinate(other)
                    if all(a == b for a, b, k in zip(here, there, parameter.kinds()) if k[0] == "replicate"):
                        seen.append(expected._numbers(parameter, other, None))
        if any(rank in q.shards for q in dump.parameters):
            totals[rank] = oracle.norm(seen, p)
    return totals


def assert_as_expected(dump, report, shards, also=()):
    """The report and the shards of `clip` on the dump. `also`: kinds of findings that it has to have."""
    training, p = dump.training, float(dump.training["norm_type"])
    tokens = training["num_label_tokens"] / training["dp_group_size"] if training.get("pp_enabled") else None
    expected = oracle.Expectation(dump, tokens=tokens)
    assert report["scale"]["label_token_divisor"] == tokens
    assert close(report["norm"]["total"], expected.total(p), 2e-14)
    coefficient = oracle.coefficient_of(number(report["norm"]["total"]), training.get("max_grad_norm"))
    if coefficient is None:
        assert report["clip"]["coefficient"] is None
    else:
        assert close(report["clip"]["coefficient"], coefficient, 0.0)
    assert_shards(shards, expected.shards(coefficient))
    assert close(report["clip"]["total_after"], expected.total(p, coefficient), 2e-14)
    assert set(also) <= set(kinds(report)) <= {"ranks-disagree", "nothing-seen", *also}, report["findings"]
    for (parameter, values), found in zip(expected.counted(), report["parameters"], strict=True):
        assert found["name"] == parameter.name and close(found["norm"], oracle.norm(values, p), 2e-14), parameter.name
        assert found["elements"] == sum(v.size for v in values)
    assert report["norm"]["elements"] == sum(v.size for _, values in expected.counted() for v in values)
    if not training.get("pp_enabled"):
        totals = {rank: t["total"] for t in report["reference"]["totals"] for rank in t["ranks"]}
        assert sorted(totals) == sorted(rank_totals(expected, p))
        for rank, total in rank_totals(expected, p).items():
            assert close(totals[rank], total, 2e-14), f"rank {rank}"


@pytest.mark.parametrize("seed", SEEDS)
def test_random_job(tool, seed):
    dump, storage, random = draw(seed)
    path = dump.write(tool.fresh("dump"), **storage)
    counts = (1, int(random.integers(2, 6))) if seed % 4 == 0 or LONG else (1,)
    more = [["--threads", "1"], ["--threads", "3"], ["--memory-budget", "1M"], []][seed % 4]
    report, shards, _ = tool.everywhere(path, *more, counts=counts)
    assert_as_expected(dump, report, shards)
