"""Checkpoints of torch.distributed.checkpoint. They say which blocks a tensor was cut into, but not for which mesh."""

import io
import itertools
import math
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import Partial

from converters.errors import ConvertError, first_line
from converters.grids import common_world, plan
from converters.job import Job, Parameter
from converters.safe_load import load_dcp_metadata, load_tensors
from gradclip_record import _runs


def convert(inputs, layout, rename, note):
    """The job of one checkpoint directory. rename: a function from a checkpoint's name to the dump's, None to leave it
    out. note: a function that tells people of what is left out."""
    if len(inputs) != 1:
        raise ConvertError(inputs[1], "a second INPUT", "one directory: the whole checkpoint")
    checkpoint = _Checkpoint(inputs[0], rename, note)
    if layout is None:
        world, parameters = _from_chunks(checkpoint)
        return Job(world, parameters, checkpoint.reader)
    parameters = [parameter for name in checkpoint.tensors for parameter in _by_rule(checkpoint, name, layout)]
    return Job(layout.world_size, parameters, checkpoint.reader, layout.device_mesh, layout.moe_meshes, layout.training)


def _from_chunks(checkpoint):
    """World size and parameters for which each chunk is one rank's shard, or a copy that several ranks have."""
    grids = {name: tensor.grid() for name, tensor in checkpoint.tensors.items()}
    world = common_world(grids)
    parameters = []
    for name, tensor in checkpoint.tensors.items():
        mesh, placements = plan(tensor.shape, grids[name], world)
        parameters.append(Parameter(name, tensor.shape, tensor.dtype, mesh, placements, ranks=[0]))
    return world, parameters


def _by_rule(checkpoint, name, layout):
    tensor, rule = checkpoint.tensors[name], layout.rule(name)
    if any(isinstance(placement, Partial) for placement in rule.placements) or rule.copies == "distinct":
        raise ConvertError(f"{layout.path}: {name}", "addends or distinct tensors", "shards and copies",
                           "a checkpoint has each tensor once")
    if rule.dtype not in (None, tensor.dtype):
        raise ConvertError(f"{checkpoint.path}: {name}", f"elements of type {tensor.dtype}", rule.dtype)
    if len(rule.meshes) > 1:
        raise ConvertError(f"{layout.path}: {name}", "several meshes", "one: a checkpoint does not say which it was on")
    mesh = rule.meshes[0] if rule.meshes else None
    return [Parameter(name, tensor.shape, tensor.dtype, mesh, rule.placements, ranks=range(layout.world_size),
                      **rule.extra)]


class _Checkpoint:
    """Its tensors by the names that the dump gives them."""

    def __init__(self, path, rename, note):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConvertError(path, "no directory" if self.path.exists() else "no such directory",
                               "the directory that torch.distributed.checkpoint wrote")
        if not (self.path / ".metadata").exists():
            raise ConvertError(path, "no .metadata in it", "a whole checkpoint", "it is written last: did saving end?")
        metadata = load_dcp_metadata(self.path / ".metadata")
        self.tensors, others = {}, []
        for found_name, found in metadata.state_dict_metadata.items():
            name = rename(found_name)
            if name is None:
                continue
            if isinstance(found, BytesStorageMetadata):
                others.append(found_name)
            elif not isinstance(found, TensorStorageMetadata):
                raise ConvertError(f"{path}: {found_name}", f"a {type(found).__name__}", "a tensor")
            else:
                try:
                    self.tensors[name] = _Tensor(self.path, found_name, found, metadata.storage_data)
                except (AttributeError, TypeError, ValueError) as error:  # a pickle of other things in these classes
                    raise ConvertError(f"{path}: {found_name}", f"not described as a tensor ({first_line(error)})",
                                       "what torch.distributed.checkpoint writes") from error
        if others:
            note(f"{len(others)} entries of the checkpoint are no tensors and were left out: {', '.join(others[:5])}")

    @contextmanager
    def reader(self, rank):
        def tensor(parameter):
            readings = parameter.readings(rank)
            return self.tensors[parameter.name].block(readings[0])
        yield tensor


class _Tensor:
    """One tensor: boxes [(begin, end) per dimension] with the place of each one's bytes."""

    def __init__(self, path, name, found, storage):
        self.where, self.shape = f"{path}: {name}", tuple(found.size)
        self.dtype = str(found.properties.dtype).removeprefix("torch.")
        if any(len(chunk.offsets) != len(self.shape) or len(chunk.sizes) != len(self.shape) for chunk in found.chunks):
            raise ConvertError(self.where, "a chunk of other dimensions", f"chunks of {list(self.shape)}")
        table = len(found.chunks), len(self.shape)
        self.begins = np.array([tuple(chunk.offsets) for chunk in found.chunks], "i8").reshape(table)
        sizes = np.array([tuple(chunk.sizes) for chunk in found.chunks], "i8").reshape(table)
        self.ends = self.begins + sizes
        self.places = [self._place(path, storage.get(MetadataIndex(name, chunk.offsets)), chunk)
                       for chunk in found.chunks]
        filled = [i for i, size in enumerate(sizes) if (size > 0).all()]  # an empty shard starts nowhere
        self.begins, self.ends = self.begins[filled], self.ends[filled]
        self.places = [self.places[i] for i in filled]
        self._check_tiling()

    def _place(self, path, info, chunk):
        """(file, offset, length), or None for an empty chunk, which may be stored nowhere."""
        if 0 in chunk.sizes:
            return None
        if info is None:
            raise ConvertError(self.where, f"no bytes for the chunk at {list(chunk.offsets)}", "all of it",
                               "is the checkpoint complete?")
        if info.transform_descriptors:
            raise ConvertError(self.where, f"a chunk that is stored by {' '.join(info.transform_descriptors)}",
                               "one that is stored as it is", "save the gradients without extensions")
        file = Path(path) / info.relative_path
        if Path(path).resolve() not in file.resolve().parents:
            raise ConvertError(self.where, f"a chunk in {info.relative_path}", "a file inside the checkpoint")
        if not file.exists():
            raise ConvertError(self.where, f"{info.relative_path} is not there", "all files of the checkpoint")
        size = file.stat().st_size
        if not 0 <= info.offset <= info.offset + info.length <= size:
            raise ConvertError(self.where, f"{info.relative_path} has {size} bytes", f"a chunk of {info.length} at "
                               f"{info.offset}", "the file is truncated, or of another checkpoint")
        return file, info.offset, info.length

    def _check_tiling(self):
        """Chunks have to be the whole tensor, each element once."""
        if (self.begins < 0).any() or (self.ends > np.array(self.shape, "i8")).any():
            raise ConvertError(self.where, "a chunk outside the tensor", f"chunks of {list(self.shape)}")
        for i in range(len(self.begins)):
            meets = (self.begins[i + 1:] < self.ends[i]).all(axis=1) & (self.ends[i + 1:] > self.begins[i]).all(axis=1)
            if meets.any():
                other = i + 1 + int(np.argmax(meets))
                raise ConvertError(self.where, f"the chunks at {self.begins[i].tolist()} and "
                                   f"{self.begins[other].tolist()} overlap", "each element once")
        held = sum(math.prod(sizes) for sizes in (self.ends - self.begins).tolist())
        if held != math.prod(self.shape):
            raise ConvertError(self.where, f"chunks of {held} elements in all",
                               f"{math.prod(self.shape)}, the whole of {list(self.shape)}",
                               "was the checkpoint saved by every rank?")

    def grid(self):
        """Per dimension the lengths of the pieces, if every piece of one meets every piece of the others."""
        starts = [sorted(set(column)) for column in self.begins.T.tolist()]
        if math.prod(map(len, starts)) != len(self.places):
            raise ConvertError(self.where, f"{len(self.places)} chunks that are no grid", "rows and columns of blocks",
                               "describe the shards with --layout")
        return [tuple(np.diff([*column, size]).tolist()) for column, size in zip(starts, self.shape)]

    def block(self, indices):
        """The elements at these indices of each dimension, from the chunks that have them."""
        local = torch.empty(tuple(map(len, indices)), dtype=getattr(torch, self.dtype))
        ranges = [_runs(dimension) if len(dimension) else [] for dimension in indices]
        if local.numel() == 0:
            return local
        for begin, end, place in zip(self.begins.tolist(), self.ends.tolist(), self.places):
            pieces = [_common(runs, low, high) for runs, low, high in zip(ranges, begin, end)]
            if not all(pieces):
                continue
            chunk = self._chunk(place, tuple(high - low for low, high in zip(begin, end)))
            if chunk.shape == local.shape:
                return chunk
            for piece in itertools.product(*pieces):
                into = tuple(slice(at, at + length) for at, _, length in piece)
                start = tuple(slice(b - low, b - low + length) for (_, b, length), low in zip(piece, begin))
                local[into] = chunk[start]
        return local

    def _chunk(self, place, shape):
        file, offset, length = place
        with open(file, "rb") as stream:
            tensor = load_tensors(io.BufferedReader(_Part(stream, offset, length)), mmap=False, where=file)
        if not torch.is_tensor(tensor) or tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{self.dtype}":
            found = f"{list(tensor.shape)} of {tensor.dtype}" if torch.is_tensor(tensor) else type(tensor).__name__
            raise ConvertError(self.where, f"{found} in {file}", f"{list(shape)} of torch.{self.dtype}")
        return tensor


def _common(runs, low, high):
    """What runs of indices have in common with [low, high): (position among the indices, begin, length)."""
    found, position = [], 0
    for begin, end in runs:
        first, last = max(begin, low), min(end, high)
        if first < last:
            found.append((position + first - begin, first, last - first))
        position += end - begin
    return found


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, stream, offset, length):
        self.stream, self.offset, self.length, self.at = stream, offset, length, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        self.at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence])
        return self.at

    def readinto(self, buffer):
        self.stream.seek(self.offset + self.at)
        part = memoryview(buffer)[:max(0, self.length - self.at)]
        count = self.stream.readinto(part)
        self.at += count
        return count
