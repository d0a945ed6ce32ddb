"""Microbatches of a step, and what `accumulate` has to make of them: an oracle in numpy, written from FSDP2's own steps.

Each rank adds the microbatches of a window in the reduce type; the group's average is rounded to it (float16 and float64:
divided before and after the sum); then one rounding to the storage type, stored or added there to what the windows before
left.
"""

import numpy as np

import element_types as types
from conftest import kinds, run
from dump_builder import Dump, parse_placement, slice_indices

AVG = "Partial(avg)"
#: name: mesh's dimensions, its ranks, the tensor, the parameter's placements, the gradient's
LAYOUTS = {
    "fsdp": (["dp_shard"], [0, 1, 2], (7, 5), ["Shard(0)"], [AVG]),
    "fsdp of columns": (["dp_shard"], [0, 1], (6, 10), ["Shard(1)"], [AVG]),
    "fsdp with empty shards": (["dp_shard"], [0, 1, 2], (4, 2), ["Shard(0)"], [AVG]),
    "hsdp": (["dp_replicate", "dp_shard"], [[0, 1], [2, 3]], (6, 4), ["Replicate()", "Shard(0)"], [AVG, AVG]),
    "fsdp x tp": (["dp_shard", "tp"], [[0, 1], [2, 3]], (8, 3), ["_StridedShard(dim=0, sf=2)", "Shard(0)"], [AVG, "Shard(0)"]),
    "ddp": (["dp"], [0, 1, 2], (5,), ["Replicate()"], [AVG]),
    "sum": (["tp"], [0, 1], (5,), ["Replicate()"], ["Partial(sum)"]),
    "cp of its own": (["dp_shard", "cp"], [[0, 1], [2, 3]], (6, 2), ["Shard(0)", "Replicate()"], [AVG, AVG]),
    "one rank": (["dp_shard"], [0], (3, 3), ["Shard(0)"], [AVG]),
    "no reduction": (["tp"], [0, 1], (4, 4), ["Shard(1)"], ["Shard(1)"]),
}


def microbatches(layouts, count, dtype, seed=3, none=()):
    """`count` Dumps of all layouts, on 4 ranks. none: (microbatch, parameter, rank)"""
    random, dumps = np.random.default_rng(seed), []
    for k in range(count):
        dump = Dump(4)
        dump.more["microbatch"] = {"index": k, "count": count}
        for name, (dims, ranks, shape, kept, recorded) in layouts.items():
            mesh = dump.mesh(name, dims, ranks)
            shards = {}
            for rank in np.ravel(ranks).tolist():
                local = tuple(map(len, slice_indices(shape, dump.meshes[mesh], recorded, rank)))
                values = random.standard_normal(local) * 2.0 ** random.integers(-3, 4, local)
                shards[rank] = None if (k, name, rank) in none else types.narrow(values, dtype)
            more = {} if kept == recorded else {"gradient_placements": recorded}
            dump.local(name, shape, mesh, kept, shards, dtype=dtype, **more)
        dumps.append(dump)
    return dumps


def written(tool, dumps):
    return [dump.write(tool.fresh("microbatch")) for dump in dumps]


def rounded(values, dtype):
    return types.widen(types.narrow(np.asarray(values, np.float64), dtype), dtype)


def accumulated(dumps, p, rank, reduce):
    """One window on one rank."""
    total = None
    for dump in dumps:
        parameter = dump.parameters[p]
        stored = parameter.shards[rank]
        if stored is None:
            continue
        here = rounded(types.widen(stored, parameter.dtype), reduce)
        total = here if total is None else rounded(total + here, reduce)
    return total


def factors(n):
    """FSDP2's divisors around a sum of float16 or float64."""
    before = 1
    while n % before == 0 and n / before > before:
        before *= 2
    return before, n / before


def groups(mesh, recorded, kept):
    """The dimensions of the reduce-scatter and of the all-reduce."""
    partial = [d for d in range(len(recorded)) if recorded[d] != kept[d]]
    copies = [d for d in partial if kept[d] == "Replicate()"]
    if len(copies) < len(partial):
        copies = [d for d in copies if mesh.dim_names[d] != "cp"]
    return [d for d in partial if d not in copies], copies


def reduced(mesh, recorded, kept, at, of_rank, reduce):
    """One window's gradient of the rank at these coordinates."""
    averaged = [mesh.ranks.shape[d] for d in range(len(recorded))
                if recorded[d] != kept[d] and parse_placement(recorded[d])[1] == "avg"]
    around = reduce in ("float16", "float64")
    before, after = factors(int(np.prod(averaged))) if around else (1, 1)

    def over(dimensions, addend, here):
        places = [list(here)]
        for d in dimensions:
            places = [[*place[:d], i, *place[d + 1:]] for place in places for i in range(mesh.ranks.shape[d])]
        present = [value for value in map(addend, places) if value is not None]
        if len(places) == 1 or not present:
            return present[0] if present else None
        total = present[0]
        for value in present[1:]:
            total = total + value
        average = [mesh.ranks.shape[d] for d in dimensions if parse_placement(recorded[d])[1] == "avg"]
        return rounded(total if around else total / np.prod(average), reduce)

    def divided(place):
        value = of_rank[int(mesh.ranks[tuple(place)])]
        return value if value is None or before == 1 else rounded(value / before, reduce)
    scatter, copy = groups(mesh, recorded, kept)
    value = over(copy, lambda place: over(scatter, divided, place), list(at))
    return value if value is None or after == 1 else rounded(value / after, reduce)


def windows(dumps, ends):
    found, window = [], []
    for dump, end in zip(dumps, ends):
        window.append(dump)
        if end:
            found.append(window)
            window = []
    assert not window
    return found


def expected_shards(dumps, reduce, storage, ends=None):
    """ends: by microbatch, whether a window ends there; the last alone by default."""
    ends = ends or [dump is dumps[-1] for dump in dumps]
    shards = {rank: {} for rank in range(dumps[0].world_size)}
    for p, parameter in enumerate(dumps[0].parameters):
        mesh, kept = parameter.mesh, parameter.entry["placements"]
        recorded = parameter.entry.get("gradient_placements", kept)
        add_in = parameter.entry.get("reduce_dtype", reduce)
        keep_in = parameter.entry.get("storage_dtype", storage)
        for rank in map(int, mesh.ranks.flat):
            shards[rank][parameter.name] = None
        for window in windows(dumps, ends):
            of_rank = {int(rank): accumulated(window, p, int(rank), add_in) for rank in mesh.ranks.flat}
            for rank in of_rank:
                value = reduced(mesh, recorded, kept, mesh.coordinate(rank), of_rank, add_in)
                if value is None:
                    continue
                whole = np.full(parameter.shape, np.nan)
                whole[np.ix_(*slice_indices(parameter.shape, mesh, recorded, rank))] = value
                local = types.narrow(whole[np.ix_(*slice_indices(parameter.shape, mesh, kept, rank))], keep_in)
                before = shards[rank][parameter.name]
                if before is not None:
                    local = types.narrow(types.widen(before, keep_in) + types.widen(local, keep_in), keep_in)
                shards[rank][parameter.name] = local
    return shards


def accumulate(tool, paths, *args, np_=1):
    out = tool.fresh("out")
    result = run(np_, "accumulate", *paths, "-o", out, *args)
    assert result.code == 0 and result.err == "", result
    return out


def verified(dump):
    """The kinds of what is wrong with it. Its layouts are of different ranks, which therefore disagree on the total."""
    return kinds(run(1, "verify", dump, "--format", "json").json())


def declared(count=4, synchronised=None, schedule=None, accumulation=None, layouts=LAYOUTS, **types_of):
    """bfloat16 microbatches with flags in their manifests. types_of: name: (reduce, storage)"""
    dumps = microbatches(layouts, count, "bfloat16", seed=11)
    for k, dump in enumerate(dumps):
        record = dump.more["microbatch"]
        record.update(first_microbatch=k == 0, optimizer_step=k == count - 1)
        if synchronised and synchronised[k] is not None:
            record["synchronised"] = synchronised[k]
        if schedule and schedule[k] is not None:
            record["schedule_step"] = schedule[k]
        if accumulation:
            dump.more["accumulation"] = accumulation
        for parameter in dump.parameters:
            if parameter.name in types_of:
                parameter.entry["reduce_dtype"], parameter.entry["storage_dtype"] = types_of[parameter.name]
    return dumps


def one(tool, index, count, *, edit=None, placements=("Shard(0)",), recorded=(AVG,), shape=(4,), plain=False):
    dump = Dump(2)
    if index is not None:
        dump.more["microbatch"] = {"index": index, "count": count}
    dump.mesh("dp", ["dp"], [0, 1])
    if plain:
        dump.plain("w", np.ones(4, np.float32))
    else:
        local = {rank: np.ones(shape, np.float32) for rank in range(2)}
        dump.local("w", shape, "dp", list(placements), local, gradient_placements=list(recorded))
    return dump.write(tool.fresh("microbatch"), edit=edit)
