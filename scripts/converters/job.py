"""A job as the converters describe it: its meshes, and of each parameter who holds which part."""

from types import SimpleNamespace

import numpy as np
from torch.distributed.tensor import Partial

import gradclip_record
from converters.errors import ConvertError

MAX_NAME_BYTES = 4096


class Mesh:
    """An n-dimensional array of ranks with a name for each dimension. Compares by content."""

    def __init__(self, dim_names, ranks):
        self.row = {"dim_names": list(dim_names), "ranks": np.asarray(ranks).tolist()}
        self.ranks = np.asarray(ranks)
        self.shape = self.ranks.shape
        self._coordinates = {int(rank): at for at, rank in np.ndenumerate(self.ranks)}

    def __eq__(self, other):
        return isinstance(other, Mesh) and self.row == other.row

    def __hash__(self):
        return hash((*self.row["dim_names"], self.ranks.tobytes()))

    def __contains__(self, rank):
        return rank in self._coordinates

    def coordinate(self, rank):
        return self._coordinates[rank]

    def members(self):
        return sorted(self._coordinates)


class Parameter:
    """One entry of the manifest.

    shape          global; dtype is PyTorch's name of the type
    mesh           None for a plain tensor: then `ranks` hold it, and `copies` is "replicated" or "distinct"
    placements     of the gradient, PyTorch's objects, one for each dimension of the mesh
    flat_ranges    {rank: (begin, end)} where a last dimension of the mesh cuts the flattening; placements leave it out
    extra          other keys of the manifest's entry (expert, tied, model_part, dataset); None and False are left out
    """

    def __init__(self, name, shape, dtype, mesh=None, placements=(), ranks=(), copies="replicated", flat_ranges=None,
                 **extra):
        self.name, self.shape, self.dtype = name, tuple(shape), dtype
        self.mesh, self.placements, self.flat_ranges = mesh, tuple(placements), flat_ranges
        self.ranks = mesh.members() if mesh else sorted(ranks)
        self.copies, self.extra = copies, {key: value for key, value in extra.items() if value not in (None, False)}
        _check_name(name)
        if dtype not in gradclip_record.STORED_AS:
            raise ConvertError(name, f"elements of type {dtype}", f"one of {' '.join(gradclip_record.STORED_AS)}",
                               "leave it out with --skip if it is no gradient")
        for placement in self.placements:
            if getattr(placement, "dim", -1) >= len(self.shape):
                raise ConvertError(name, f"{placement} of a tensor with the shape {list(self.shape)}",
                                   "a dimension that the tensor has")

    def entry(self, meshes):
        """A new entry as gradclip_record's fragments have it; meshes is the job's list."""
        entry = {"name": self.name, "model_part": 0, "shape": list(self.shape), "mesh": None, "dtype": self.dtype,
                 "none": False, "copies": self.copies, **self.extra}
        if self.mesh:
            entry["mesh"] = meshes.index(self.mesh)
            entry["placements"] = gradclip_record._placements(self._at(self.ranks[0]))
        if self.flat_ranges is not None:
            entry["placements"].append("Flat()")
            entry["flat_ranges"] = {str(rank): list(found) for rank, found in sorted(self.flat_ranges.items())}
        elif any(isinstance(placement, Partial) for placement in self.placements):
            entry["gradient_placements"] = entry["placements"]
            entry["placements"] = [text if not text.startswith("Partial") else "Replicate()"
                                   for text in entry["placements"]]
        return entry

    def located(self, rank, local):
        """What gradclip_record writes for this rank's part of it."""
        if self.mesh is None:
            return local
        ranges = self._ranges(rank, local.shape) if local.numel() and local.ndim else []
        return gradclip_record.Located(local, ranges)

    def check_local_shape(self, rank, shape, where, advice=""):
        """Raise unless `shape` is what the layout gives this rank. An empty shard may be empty in any dimension."""
        expected = self.local_shapes(rank)
        if tuple(shape) in expected or 0 in shape and any(0 in each for each in expected):
            return
        kind = f"as {gradclip_record._placements(self._at(rank))} on the mesh {self.mesh.row}" if self.mesh else ""
        raise ConvertError(f"{where}: {self.name}", f"the shape {list(shape)} on rank {rank}",
                           f"{list(expected[0])}, which is rank {rank}'s part of {list(self.shape)} {kind}".rstrip(),
                           advice)

    def local_shapes(self, rank):
        """The shapes that the placements can mean on a rank, the likeliest first."""
        if self.flat_ranges is not None:
            begin, end = self.flat_ranges[rank]
            return [(end - begin,)]
        return [tuple(map(len, indices)) for indices in self.readings(rank)]

    def readings(self, rank):
        """For each reading of the placements: per dimension, the indices that the rank holds."""
        if self.mesh is None:
            return [[np.arange(size) for size in self.shape]]
        return list(gradclip_record._readings(self._at(rank)))

    def _ranges(self, rank, local_shape):
        if self.flat_ranges is not None:
            return [[self.flat_ranges[rank]]]
        return gradclip_record._global_ranges(self._at(rank), local_shape, self.name)

    def _at(self, rank):
        """What gradclip_record asks a DTensor for, without the process group that a DTensor would want."""
        mesh = SimpleNamespace(shape=self.mesh.shape, get_coordinate=lambda: self.mesh.coordinate(rank))
        return SimpleNamespace(shape=self.shape, ndim=len(self.shape), placements=self.placements, device_mesh=mesh)


class Job:
    """Everything that the dump is made of.

    read(rank)     a context manager that gives a function: parameter -> the rank's local tensor, or None for a gradient
                   that is None. One tensor is asked for at a time
    device_mesh    what the training step was given, or None; moe_meshes likewise, one for each pipeline stage
    """

    def __init__(self, world_size, parameters, read, device_mesh=None, moe_meshes=(), training=None):
        self.world_size, self.parameters, self.read = world_size, parameters, read
        self.device_mesh, self.moe_meshes, self.training = device_mesh, tuple(moe_meshes), dict(training or {})
        used = [*([device_mesh] if device_mesh else []), *self.moe_meshes, *(p.mesh for p in parameters if p.mesh)]
        self.meshes = list(dict.fromkeys(used))
        if not parameters:
            raise ConvertError("the input", "not one tensor", "gradients")

    def stage(self, rank):
        """The pipeline stage of a rank, as far as the device mesh tells."""
        axis = self.training.get("pp_axis_name", "pp")
        if self.device_mesh is None or axis not in self.device_mesh.row["dim_names"] or rank not in self.device_mesh:
            return 0
        return self.device_mesh.coordinate(rank)[self.device_mesh.row["dim_names"].index(axis)]


def _check_name(name):
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConvertError(name, "a name that is no text", "UTF-8") from None
    if not 0 < size <= MAX_NAME_BYTES or "\0" in name:
        raise ConvertError(name[:100] or "a tensor without a name", f"a name of {size} bytes",
                           f"1 to {MAX_NAME_BYTES} bytes, none of them 0")
