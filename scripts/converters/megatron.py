"""Megatron-LM's distributed optimizer: each rank's flat part of every gradient buffer, and whose elements stand where.

The files are what docs/converting.md's save_flat_gradients makes of the optimizer's buffers and gbuf_ranges.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard

import gradclip_record
from converters.errors import ConvertError, first_line
from converters.job import Job, Mesh, Parameter
from converters.safe_load import load_tensors

FORMAT = "gradclip.megatron"


@dataclass(frozen=True)
class _Piece:
    """Where a rank's elements of a parameter are: grad_data[local of bucket of buffer], elements `param` of its own."""

    buffer: int
    bucket: int
    local: tuple
    param: tuple
    dtype: str


def convert(inputs, rename):
    ranks = _Ranks(inputs)
    parameters = [parameter for key in ranks.keys() if rename(key[1]) is not None
                  for parameter in _parameters(ranks, key, rename(key[1]))]
    places = {id(parameter): key for key, parameter in parameters}

    @contextmanager
    def read(rank):
        content = ranks.load(rank)

        def tensor(parameter):
            piece = ranks.pieces[rank].get(places[id(parameter)])
            if piece is None:
                return torch.empty(0, dtype=getattr(torch, parameter.dtype))
            begin, end = piece.local
            return content["buffers"][piece.buffer][piece.bucket]["grad_data"][begin:end]
        yield tensor

    world = ranks.pipeline_mesh()
    return Job(len(inputs), [parameter for _, parameter in parameters], read, world,
               training={"pp_enabled": True, "pp_axis_name": "pp"} if world else {})


def _parameters(ranks, key, name):
    """[(key, Parameter)] for each set of ranks that holds it: one for every stage."""
    found, meshes = [], {}
    for rank in range(len(ranks.files)):
        if key in ranks.described[rank]:
            meshes.setdefault(ranks.mesh(rank, key), []).append(rank)
    for mesh, holders in meshes.items():
        where = f"{ranks.files[holders[0]]}: {name}"
        if sorted(holders) != mesh.members():
            missing = sorted(set(mesh.members()) ^ set(holders))
            raise ConvertError(where, f"described by the ranks {holders}", f"the ranks {mesh.members()} of its groups",
                               f"are the groups of rank {missing[0]} those of the others?")
        first = ranks.described[holders[0]][key]
        for rank in holders:
            if ranks.described[rank][key] != first:
                raise ConvertError(f"{ranks.files[rank]}: {name}", f"{ranks.described[rank][key]}",
                                   f"{first}, as rank {holders[0]} has it")
        found.append((key, _parameter(ranks, key, name, mesh, first)))
    return found


def _parameter(ranks, key, name, mesh, described):
    """Outer dimensions of the mesh stack experts and join tensor parallel slices; the last one has the flat ranges."""
    shape, placements = list(described["shape"]), []
    axis, tensor_size = described["partition_dim"], mesh.shape[-2]
    local_elements = math.prod(shape)
    if axis >= len(shape):
        raise ConvertError(f"{ranks.files[mesh.members()[0]]}: {name}", f"partition_dim {axis}",
                           f"a dimension of {shape}")
    if axis >= 0:
        shape[axis] *= tensor_size
    if described["expert"]:
        shape, placements, axis = [mesh.shape[0], *shape], [Shard(0)], axis + 1 if axis >= 0 else axis
    placements.append(Shard(axis) if axis >= 0 else Replicate())
    pieces = {rank: ranks.pieces[rank].get(key) for rank in mesh.members()}
    dtypes = {piece.dtype: rank for rank, piece in pieces.items() if piece}
    if len(dtypes) != 1:
        raise ConvertError(name, f"elements of the types {', '.join(dtypes) or '(none: no rank has a part)'}",
                           "one type")
    ranges = {rank: piece.param if piece else (0, 0) for rank, piece in pieces.items()}
    for line in mesh.ranks.reshape(-1, mesh.shape[-1]).tolist():
        _check_cover(ranks, name, [(ranges[rank], rank) for rank in line], local_elements)
    extra = {"model_part": key[0], "expert": described["expert"], "tied": described["tied"]}
    if ranks.is_twice(key[1]):  # as gradclip_record names what two model parts of one rank have
        extra["dataset"] = f"{gradclip_record._link_name(name)}%40{key[0]}"
    return Parameter(name, shape, next(iter(dtypes)), mesh, placements, flat_ranges=ranges, **extra)


def _check_cover(ranks, name, ranges, elements):
    at = 0
    for (begin, end), rank in sorted(ranges):
        if begin < end and begin != at:
            what = "are twice" if begin < at else "are on no rank"
            raise ConvertError(f"{ranks.files[rank]}: {name}", f"the elements from {min(begin, at)} to "
                               f"{max(begin, at)} {what}", f"ranges that are 0 to {elements} together",
                               "are the files of one step?")
        at = max(at, end)
    if at != elements:
        raise ConvertError(name, f"the elements from {at} to {elements} are on no rank of {[r for _, r in ranges]}",
                           f"ranges that are 0 to {elements} together", "are the files of one step?")


class _Ranks:
    """What the files say, their data aside. A parameter's key is (model part, name)."""

    def __init__(self, inputs):
        self.files, by_rank = [], {}
        for path in inputs:
            content = self._content(path)
            rank = content["rank"]
            if rank in by_rank:
                raise ConvertError(path, f"rank {rank}, as {by_rank[rank]}", "each rank once")
            if content["world_size"] != len(inputs):
                raise ConvertError(path, f"a job of {content['world_size']} ranks", f"as many as INPUTs, {len(inputs)}")
            by_rank[rank] = path
        self.files = [by_rank[rank] for rank in sorted(by_rank)]
        self.described, self.pieces, self.groups, self.pipelines = [], [], [], []
        for rank, path in enumerate(self.files):
            try:
                self._scan(path, self.load(rank))
            except (AttributeError, IndexError, KeyError, TypeError) as error:  # lists and dicts of other things
                raise ConvertError(path, f"not put together as expected ({first_line(error)})",
                                   "what save_flat_gradients writes (docs/converting.md)") from error

    def keys(self):
        return list(dict.fromkeys(key for described in self.described for key in described))

    def load(self, rank):
        return self._content(self.files[rank])

    def is_twice(self, name):
        return any(sum(key[1] == name for key in described) > 1 for described in self.described)

    def mesh(self, rank, key):
        """(expert, tensor, data) or (tensor, data): the ranks that hold a parameter as `rank` does."""
        expert = self.described[rank][key]["expert"]
        kind = "expert" if expert else "dense"
        rows = [[self._group(peer, kind, "data") for peer in self._group(leader, kind, "tensor")]
                for leader in (self._group(rank, kind, "expert") if expert else [rank])]
        names = ["ep", "etp", "edp"] if expert else ["tp", "dp"]
        return self._checked_mesh(names, rows if expert else rows[0], self.files[rank])

    def pipeline_mesh(self):
        """(pp, tp, dp) of the whole job, or None without pipeline parallelism."""
        if all(len(ranks) == 1 for ranks in self.pipelines):
            return None
        first = [[self.pipelines[rank] for rank in self._group(peer, "dense", "data")]
                 for peer in self._group(self.pipelines[0][0], "dense", "tensor")]
        return self._checked_mesh(["tp", "dp", "pp"], first, self.files[0], order=(2, 0, 1))

    @staticmethod
    def _checked_mesh(names, rows, file, order=None):
        try:
            ranks = np.array(rows, "i8")
        except ValueError:  # groups of different sizes
            ranks = np.zeros(2, "i8")
        if ranks.ndim != len(names) or len(set(ranks.ravel().tolist())) != ranks.size:
            raise ConvertError(file, f"groups that are no {' x '.join(names)} array of ranks: {rows}"[:300],
                               "groups of one size, each rank in one")
        order = order or range(len(names))
        return Mesh([names[i] for i in order], ranks.transpose(list(order)))

    def _group(self, rank, kind, axis):
        ranks = self.groups[rank].get(kind, {}).get(axis)
        if ranks is None:
            raise ConvertError(self.files[rank], f'no "{axis}" group of "{kind}"', "the ranks of each group")
        return ranks

    # Reading: every number is checked before it is used ---------------------------------------------------------------

    def _content(self, path):
        content = load_tensors(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ConvertError(path, "something else", "what save_flat_gradients writes (docs/converting.md)")
        kinds = {"rank": int, "world_size": int, "groups": dict, "parameters": list, "buffers": list}
        for key, kind in kinds.items():
            if not isinstance(content.get(key), kind):
                raise ConvertError(f"{path}, {key}", f"a {type(content.get(key)).__name__}", f"a {kind.__name__}")
        if not 0 <= content["rank"] < content["world_size"]:
            raise ConvertError(path, f"rank {content['rank']} of {content['world_size']}", "0 and up, below world_size")
        return content

    def _scan(self, path, content):
        world = content["world_size"]
        self.groups.append({kind: {axis: _rank_list(path, f"groups, {kind}, {axis}", ranks, world)
                                   for axis, ranks in axes.items()} for kind, axes in content["groups"].items()})
        self.pipelines.append(_rank_list(path, "pipeline", content.get("pipeline") or [content["rank"]], world))
        keys = [(row.get("model_part", 0), row.get("name")) for row in content["parameters"]]
        described = {key: _description(path, key[1], row) for key, row in zip(keys, content["parameters"])}
        if len(described) != len(keys):
            raise ConvertError(path, "a parameter twice", "each name once in a model part")
        self.described.append(described)
        self.pieces.append({})
        for b, buckets in enumerate(content["buffers"]):
            for i, bucket in enumerate(buckets):
                data = bucket["grad_data"]
                if not torch.is_tensor(data) or data.ndim != 1:
                    raise ConvertError(f"{path}, buffer {b}, bucket {i}", "grad_data of another kind", "a 1-D tensor")
                for index, ranges in bucket["param_map"].items():
                    key = keys[index]
                    piece = _piece(f"{path}: {key[1]}", b, i, data, ranges)
                    if key in self.pieces[-1]:
                        raise ConvertError(f"{path}: {key[1]}", "a part in two buckets", "in one, as Megatron has it")
                    self.pieces[-1][key] = piece


def _rank_list(path, key, ranks, world):
    if not isinstance(ranks, list) or not ranks or not all(isinstance(r, int) and 0 <= r < world for r in ranks):
        raise ConvertError(f"{path}, {key}", str(ranks)[:100], f"a list of ranks from 0 to {world - 1}")
    return ranks


def _description(path, name, row):
    shape, axis = row.get("shape"), row.get("partition_dim", -1)
    if not isinstance(name, str) or not isinstance(shape, (list, tuple)) \
            or not all(isinstance(size, int) and size >= 0 for size in shape) or not isinstance(axis, int):
        raise ConvertError(f"{path}: {name}", f"the description {row}"[:200], "a name, a shape and a partition_dim")
    return {"shape": list(shape), "partition_dim": axis, "expert": bool(row.get("expert")), "tied": row.get("tied")}


def _piece(where, buffer, bucket, data, ranges):
    local, param = (tuple(ranges.get(key) or ()) for key in ("gbuf_local", "param"))
    if not all(len(each) == 2 and all(isinstance(n, int) for n in each) and 0 <= each[0] < each[1]
               for each in (local, param)) or local[1] > data.numel() or local[1] - local[0] != param[1] - param[0]:
        raise ConvertError(where, f"gbuf_local {local} and param {param} in a buffer of {data.numel()}",
                           "two ranges [begin, end) of one length, inside the buffer and the parameter")
    return _Piece(buffer, bucket, local, param, str(data.dtype).removeprefix("torch."))
