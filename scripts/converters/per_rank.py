"""Inputs that hold each rank's own tensors: torch.save, safetensors and .npz files, joined to a job."""

import re
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from converters.errors import ConvertError
from converters.files import TorchFile
from converters.job import Job, Parameter

RAW_BITS = {"bfloat16": "raw16", "float8_e4m3fn": "raw8", "float8_e5m2": "raw8"}


def convert(kind, inputs, layout, rename, key=None):
    """The job of per-rank inputs.

    kind     one of the classes of files.py
    layout   a Layout, or None
    rename   a function from a tensor's name in a file to the dump's; None leaves it out
    key      take the dict that torch.save's dict has there
    """
    ranks = _files_of_ranks(kind, inputs, layout)
    found = [_scan(rank, kind, files, rename, key) for rank, files in enumerate(ranks)]
    parameters = _Parameters(found, layout).all()

    @contextmanager
    def read(rank):
        with ExitStack() as stack:
            places = {}
            for path in ranks[rank]:
                file = kind(path, key)
                stack.callback(file.close)
                places.update((rename(name), (file, name)) for name in file.names())

            def tensor(parameter):
                description = found[rank][parameter.name]
                if description is None:
                    return None
                file, name = places[parameter.name]
                local = file.tensor(name)
                return local.view(getattr(torch, parameter.dtype)) if description.dtype.startswith("raw") else local
            yield tensor

    if layout is not None:
        return Job(len(ranks), parameters, read, layout.device_mesh, layout.moe_meshes, layout.training)
    return Job(len(ranks), parameters, read, _device_mesh(found, parameters))


def _device_mesh(ranks, parameters):
    """The mesh of which those of all DTensors are parts. It tells that one name on several of them is one tensor."""
    roots = {found.root for rank in ranks for found in rank.values() if found is not None and found.root is not None}
    several = [a.name for a, b in zip(parameters, parameters[1:]) if a.name == b.name and a.mesh is not None]
    if len(roots) > 1 and several:
        raise ConvertError(several[0], "DTensors on several meshes that are not parts of one", "the mesh of the job",
                           'give its "device_mesh" (and "moe_mesh" for experts) in a file to --layout')
    return roots.pop() if len(roots) == 1 else None


def _files_of_ranks(kind, inputs, layout):
    """For each rank the files that hold its tensors."""
    if layout is None and kind is not TorchFile:  # no layout: whole tensors, in one file or in several
        return [[file for path in inputs for file in _files(kind, path)]]
    ranks = [_files(kind, path) for path in _in_order_of_ranks(inputs)]
    if layout is not None and len(ranks) != layout.world_size:
        raise ConvertError(layout.path, f"world_size {layout.world_size}, but {len(ranks)} INPUTs",
                           "one INPUT for each rank: a file, or a directory of one rank's files")
    return ranks


def _files(kind, path):
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in kind.SUFFIXES)
    if not files:
        raise ConvertError(path, "a directory without such files", f"files that end in {' or '.join(kind.SUFFIXES)}")
    return files


def _in_order_of_ranks(inputs):
    """As given, unless the names differ in one number alone: then by that number, as a shell puts 10 before 2."""
    split = [re.split(r"(\d+)", str(path)) for path in inputs]
    if len({len(parts) for parts in split}) > 1:
        return inputs
    places = {i for parts in split for i, (part, first) in enumerate(zip(parts, split[0])) if part != first}
    if len(places) != 1 or min(places) % 2 == 0:  # every second part is a number
        return inputs
    place = places.pop()
    numbered = sorted((int(parts[place]), path) for parts, path in zip(split, inputs))
    for (number, path), (following, next_path) in zip(numbered, numbered[1:]):
        if following != number + 1:
            raise ConvertError(next_path, f"comes after {path}", f"a file with the number {number + 1}, as the numbers "
                               "in the files' names are taken for ranks", "give every rank's file once")
    return [path for _, path in numbered]


def _scan(rank, kind, files, rename, key):
    """{name: Found or None} of one rank, without what is only another rank's."""
    result = {}
    for path in files:
        file = kind(path, key)
        try:
            for name in file.names():
                target = rename(name) if isinstance(name, str) else name
                if target is None:
                    continue
                if target in result:
                    raise ConvertError(f"{path}: {name}", "another file of this rank has this tensor too",
                                       "each tensor once", "if each rank has a file, describe them with --layout")
                found = file.found(name)
                if found is None or found.mesh is None or found.coordinate is not None or rank in found.mesh:
                    result[target] = found
        finally:
            file.close()
    return result


class _Parameters:
    """Joins what the ranks hold, and checks that it is what meshes and placements say."""

    def __init__(self, ranks, layout):
        self.ranks, self.layout = ranks, layout

    def all(self):
        parameters = []
        for name in dict.fromkeys(name for found in self.ranks for name in found):
            holders = {rank: found[name] for rank, found in enumerate(self.ranks) if name in found}
            known = {rank: found for rank, found in holders.items() if found is not None}
            if not known:
                raise ConvertError(name, "None wherever it stands", "a tensor on one rank at least",
                                   "without one, shape and type are not known: leave it out with --skip")
            parameters += self._of(name, holders, known)
        for parameter in parameters:
            for rank in parameter.ranks:
                found = self.ranks[rank].get(parameter.name)
                if found is not None:
                    self._check(parameter, rank, found)
        return parameters

    def _of(self, name, holders, known):
        example = next(iter(known.values()))
        meshes = list(dict.fromkeys(found.mesh for found in known.values()))
        if meshes != [None]:
            return [self._distributed(name, mesh, holders, known) for mesh in meshes if mesh is not None]
        if self.layout is None or not self.layout.rules:
            return self._plain(name, holders, known, example.dtype)
        rule = self.layout.rule(name)
        dtype = self._dtype(name, example, rule)
        if not rule.meshes:
            return self._plain(name, holders, known, dtype, rule)
        meshes = [mesh for mesh in rule.meshes if any(rank in mesh for rank in holders)]
        for rank in holders:
            if not any(rank in mesh for mesh in meshes):
                raise ConvertError(f"{holders[rank].file if holders[rank] else 'an input'}: {name}",
                                   f"rank {rank} holds it", "only ranks of the meshes that its rule names")
        return [self._by_rule(name, mesh, rule, dtype, holders, known) for mesh in meshes]

    def _distributed(self, name, mesh, holders, known):
        """A parameter of DTensors, which say themselves what they are."""
        on_mesh = {rank: found for rank, found in known.items() if found.mesh == mesh}
        first_rank, first = next(iter(on_mesh.items()))
        for rank, found in known.items():
            if found.mesh is None:
                raise ConvertError(f"{found.file}: {name}", "a plain tensor", "a DTensor, as in the other files")
            if rank not in found.mesh:
                raise ConvertError(f"{found.file}: {name}", f"a DTensor of the ranks {found.mesh.members()}, read as "
                                   f"rank {rank}'s", "the files in the order of the ranks")
            if rank in on_mesh and (found.shape, str(found.placements)) != (first.shape, str(first.placements)):
                raise ConvertError(f"{found.file}: {name}", f"{list(found.shape)} as {found.placements}",
                                   f"{list(first.shape)} as {first.placements}, as rank {first_rank} has it")
        self._need_all(name, mesh, holders)
        return Parameter(name, first.shape, first.dtype, mesh, first.placements)

    def _plain(self, name, holders, known, dtype, rule=None):
        copies, extra = (rule.copies, rule.extra) if rule else ("replicated", {})
        shapes = {}
        for rank, found in known.items():
            shapes.setdefault(found.shape, []).append(rank)
        if len(shapes) > 1 and copies == "replicated":
            (shape, ranks), (other, others) = list(shapes.items())[:2]
            raise ConvertError(f"{known[others[0]].file}: {name}", f"the shape {list(other)}, but {list(shape)} on "
                               f"rank {ranks[0]}", "copies of one tensor",
                               "if these are shards, describe them with --layout")
        for rank in holders.keys() - known.keys():
            next(iter(shapes.values())).append(rank)
        return [Parameter(name, shape, dtype, ranks=ranks, copies=copies, **extra) for shape, ranks in shapes.items()]

    def _by_rule(self, name, mesh, rule, dtype, holders, known):
        """A parameter of plain shards, which the layout file puts on a mesh."""
        self._need_all(name, mesh, holders)
        missing = [rank for rank in mesh.members() if rank not in known]
        if missing:
            raise ConvertError(name, f"None on rank {missing[0]} only", "a shard on each rank of its mesh")
        shape = list(known[int(mesh.ranks.flat[0])].shape)
        for rank in mesh.members():
            if len(known[rank].shape) != len(shape):
                raise ConvertError(f"{known[rank].file}: {name}", f"{len(known[rank].shape)} dimensions",
                                   f"{len(shape)}")
        Parameter(name, shape, dtype, mesh, rule.placements)  # refuses dimensions that the tensor has not
        for d in range(len(shape)):
            cut = [m for m, placement in enumerate(rule.placements) if getattr(placement, "dim", None) == d]
            line = mesh.ranks[tuple(slice(None) if m in cut else 0 for m in range(mesh.ranks.ndim))]
            if cut:
                shape[d] = sum(known[int(rank)].shape[d] for rank in np.ravel(line))
        return Parameter(name, shape, dtype, mesh, rule.placements, **rule.extra)

    def _need_all(self, name, mesh, holders):
        for rank in mesh.members():
            if rank not in holders:
                raise ConvertError(name, f"rank {rank} does not have it", f"it on each rank of its mesh {mesh.row}",
                                   "are all files given, in the order of the ranks?")

    @staticmethod
    def _dtype(name, found, rule):
        if rule.dtype is None:
            return found.dtype
        if found.dtype not in (rule.dtype, RAW_BITS.get(rule.dtype)):
            raise ConvertError(f"{found.file}: {name}", f"elements of type {found.dtype}",
                               f"{rule.dtype}, as its rule in the layout says")
        return rule.dtype

    @staticmethod
    def _check(parameter, rank, found):
        where = f"{found.file}: {parameter.name}"
        if found.dtype not in (parameter.dtype, RAW_BITS.get(parameter.dtype)):
            raise ConvertError(where, f"elements of type {found.dtype}", f"{parameter.dtype}, as on the other ranks")
        if found.coordinate is not None and tuple(found.coordinate) != parameter.mesh.coordinate(rank):
            raise ConvertError(where, f"the shard at {list(found.coordinate)} of its mesh",
                               f"rank {rank}'s, which is at {list(parameter.mesh.coordinate(rank))}",
                               "give the files in the order of the ranks")
        advice = "" if found.mesh else "the whole shape is the sum of the ranks' shards: one of them does not fit"
        parameter.check_local_shape(rank, found.local_shape, found.file, advice)
