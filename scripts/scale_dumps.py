"""Dumps of jobs with very many recorded ranks or parameters, made in seconds: the rank files of a pipeline stage differ in
their rank and in the first element of each shard only, so one file of each stage is written with h5py and the others are its
bytes with these places changed.

    python scale_dumps.py DIR --ranks 16384 --parameters 64 --elements 16

Element i of every shard is 2^-5, but its first one, which is 1 + the rank's data-parallel coordinate modulo 1024: totals
are known without adding them up (total_square).
"""

import argparse
import json
import pathlib

import numpy as np

MAGIC_RANK = 0x5A3C96E1  # found in the template's bytes, where its rank stands
REST = 2.0 ** -5
ALIGNMENT = 64


def sizes(ranks):
    """Pipeline stages, data-parallel size, tensor-parallel size."""
    tp = min(8, ranks)
    pp = min(8, ranks // tp)
    return pp, ranks // tp // pp, tp


def placements(kind, tp):
    return {"sharded": [f"_StridedShard(dim=0, sf={tp})", "Shard(0)"], "copies": ["Shard(0)", "Replicate()"],
            "partial": ["Shard(0)", "Partial()"]}[kind]


def entries_of(stage, count, elements, dp, tp, kinds):
    entries = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        length = elements * dp * (tp if kind == "sharded" else 1)
        entries.append({"name": f"stages.{stage}.layers.{number // 4}.weight{number % 4}", "model_part": 0,
                        "shape": [length], "dtype": "float32", "mesh": f"stage{stage}",
                        "placements": placements(kind, tp)})
    return entries


def template(path, entries, elements, world, packed):
    """Bytes of a rank file, where its rank stands, and where each shard's first element does."""
    import h5py

    values = np.full(elements, REST, np.float32)
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        file.attrs["format"], file.attrs["version"] = np.bytes_("gradclip.dump"), np.int64(1)
        file.attrs["rank"], file.attrs["world_size"], file.attrs["step"] = (
            np.int64(MAGIC_RANK), np.int64(world), np.int64(1))
        if packed:
            stride = -(-elements * 4 // ALIGNMENT) * ALIGNMENT // 4
            data = file.create_dataset("packed/float32", data=np.resize(
                np.pad(values, (0, stride - elements)), stride * len(entries)))
            data.attrs["dtype"] = "float32"
            index = {entry["name"]: {"dtype": "float32", "offset": number * stride, "shape": [elements]}
                     for number, entry in enumerate(entries)}
            file["packed"].create_dataset("index", data=np.bytes_(json.dumps(index)))
            firsts = [data.id.get_offset() + number * stride * 4 for number in range(len(entries))]
        else:
            group, firsts = file.create_group("gradients"), []
            for entry in entries:
                data = group.create_dataset(entry["name"], data=values)
                data.attrs["dtype"] = "float32"
                firsts.append(data.id.get_offset())
    content = bytearray(path.read_bytes())
    path.unlink()
    magic = MAGIC_RANK.to_bytes(8, "little")
    assert content.count(magic) == 1
    return content, content.index(magic), np.array(firsts)


def make(directory, ranks, parameters, elements, kinds=("sharded", "copies"), packed=True):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True)
    pp, dp, tp = sizes(ranks)
    grid = np.arange(ranks).reshape(pp, dp, tp)
    meshes = {"world": {"dim_names": ["pp", "dp_shard", "tp"], "ranks": grid.tolist()}}
    entries = []
    for stage in range(pp):
        meshes[f"stage{stage}"] = {"dim_names": ["dp_shard", "tp"], "ranks": grid[stage].tolist()}
        count = parameters // pp + (stage < parameters % pp)
        of_stage = entries_of(stage, count, elements, dp, tp, kinds)
        entries += of_stage
        content, rank_at, firsts = template(directory / "template", of_stage, elements, ranks, packed)
        places = (firsts[:, None] + np.arange(4)).reshape(-1)
        whole = np.frombuffer(content, np.uint8).copy()
        for (coordinate, _), rank in np.ndenumerate(grid[stage]):
            whole[rank_at:rank_at + 8] = np.frombuffer(int(rank).to_bytes(8, "little"), np.uint8)
            whole[places] = np.tile(np.array([first(coordinate)], np.float32).view(np.uint8), count)
            (directory / f"rank_{rank:05d}.h5").write_bytes(whole.tobytes())
    manifest = {"format": "gradclip.dump", "version": 1, "step": 1, "microbatch": None, "state": "before_scale",
                "world_size": ranks, "rank_file": "rank_{rank:05d}.h5", "meshes": meshes, "device_mesh": "world",
                "moe_mesh": None, "parameters": entries,
                "training": {"max_grad_norm": 1.0, "norm_type": 2.0, "pp_enabled": True, "pp_axis_name": "pp"}}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def first(coordinate):
    return 1.0 + coordinate % 1024


def total_square(ranks, parameters, elements, kinds=("sharded", "copies")):
    """Of the whole gradient, exactly: every shard counts once, a copy on one rank of its tensor-parallel group alone, and
    the addends of a Partial one as their sum."""
    pp, dp, tp = sizes(ranks)
    total = 0.0
    for stage in range(pp):
        for number in range(parameters // pp + (stage < parameters % pp)):
            kind = kinds[number % len(kinds)]
            factor = {"sharded": tp, "copies": 1, "partial": tp * tp}[kind]
            total += factor * sum(first(c) ** 2 + (elements - 1) * REST ** 2 for c in range(dp))
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--parameters", type=int, default=64)
    parser.add_argument("--elements", type=int, default=16, help="of each shard")
    parser.add_argument("--kinds", default="sharded,copies", help="in turn: sharded, copies, partial")
    parser.add_argument("--plain", action="store_true", help="a dataset for each shard in place of packed ones")
    options = parser.parse_args()
    make(options.directory, options.ranks, options.parameters, options.elements, options.kinds.split(","),
         not options.plain)


if __name__ == "__main__":
    main()
