"""Files that hold tensors of one rank under their names: torch.save, safetensors, .npz.

Each class opens one file: names() in the file's order; found(name) without reading data, None for a gradient that is
None; tensor(name), the local part.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from converters.errors import RESOURCES, ConvertError, first_line, is_damage
from converters.job import Mesh
from converters.safe_load import load_tensors


@dataclass
class Found:
    """What a file says of a tensor, its data aside. What follows dtype is a DTensor's; then shape is the global one,
    and root the mesh that its own is a part of."""

    file: Path
    shape: tuple
    local_shape: tuple
    dtype: str
    mesh: Mesh = None
    placements: tuple = ()
    coordinate: tuple = None
    root: Mesh = None


class TorchFile:
    SUFFIXES = (".pt", ".pth", ".bin")

    def __init__(self, path, key=None):
        self.path, self.content = path, load_tensors(path)
        for part in [key] if key else []:
            if not isinstance(self.content, dict) or part not in self.content:
                raise ConvertError(path, f"no {part!r} in it", "a dict that has the --key",
                                   f"it has {', '.join(map(str, self.content))[:200]}" if self.content else "")
            self.content = self.content[part]
        if not isinstance(self.content, dict):
            raise ConvertError(path, f"a {type(self.content).__name__}", "a dict of names and tensors")

    def close(self):
        self.content = None

    def names(self):
        return list(self.content)

    def found(self, name):
        tensor = self.content[name]
        if tensor is None:
            return None
        if not isinstance(name, str):
            raise ConvertError(f"{self.path}: {name}", f"a name that is a {type(name).__name__}", "text")
        if not torch.is_tensor(tensor):
            raise ConvertError(f"{self.path}: {name}", f"a {type(tensor).__name__}", "a tensor",
                               "if the gradients are a dict below this name, take it with --key; else --skip it")
        if tensor.layout != torch.strided:
            raise ConvertError(f"{self.path}: {name}", f"the layout {tensor.layout}", "a dense tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not isinstance(tensor, DTensor):
            return Found(self.path, tuple(tensor.shape), tuple(tensor.shape), dtype)
        try:
            mesh = tensor.device_mesh
            root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
            return Found(self.path, tuple(tensor.shape), tuple(tensor.to_local().shape), dtype,
                         _mesh(mesh), tensor.placements, mesh.get_coordinate(), _mesh(root))
        except Exception as error:  # a pickle of other things in these classes
            raise ConvertError(f"{self.path}: {name}", f"a DTensor without a mesh ({first_line(error)})",
                               "one as torch.save writes it") from error

    def tensor(self, name):
        tensor = self.content[name]
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh(mesh):
    """A DeviceMesh's ranks and names, outside the job that it was made in."""
    try:
        ranks = mesh.mesh
    except (ValueError, RuntimeError):  # a part of a larger mesh: newer versions ask a process group which one it is
        ranks = mesh._get_mesh_tensor_from_full_mesh(mesh._layout.remap_to_tensor(mesh._rank_map), mesh._rank)
    return Mesh(mesh.mesh_dim_names or [f"dim_{d}" for d in range(ranks.ndim)], ranks.tolist())


class SafetensorsFile:
    SUFFIXES = (".safetensors",)
    DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
              "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}

    def __init__(self, path, key=None):
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ConvertError(path, "the Python package safetensors is not installed", "it", "pip install safetensors",
                               code=RESOURCES) from error
        self.path = path
        with open(path, "rb"):  # an error of the system's, rather than the library's words for it
            pass
        try:
            self.content = safe_open(path, framework="pt")
        except (SafetensorError, ValueError) as error:
            raise ConvertError(path, f"not readable by safetensors ({first_line(error)})", "a whole safetensors file",
                               "is it truncated, or still being written?") from error

    def close(self):
        self.content = None

    def names(self):
        return list(self.content.offset_keys() if hasattr(self.content, "offset_keys") else self.content.keys())

    def found(self, name):
        tensor = self.content.get_slice(name)
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        return Found(self.path, shape, shape, self.DTYPES.get(dtype, dtype))

    def tensor(self, name):
        return self.content.get_tensor(name)


class NpzFile:
    SUFFIXES = (".npz",)
    # Raw bits, which numpy has no type for: unsigned integers, or the opaque bytes that ml_dtypes' arrays are saved as.
    RAW = {("u", 2), ("V", 2), ("u", 1), ("V", 1)}

    def __init__(self, path, key=None):
        self.path = path
        with self._reading():
            self.content = np.load(path, allow_pickle=False)
        if not isinstance(self.content, np.lib.npyio.NpzFile):
            raise ConvertError(path, "one array", "an .npz file, which has names",
                               "save it with np.savez(FILE, name=...)")

    def close(self):
        self.content.close()

    def names(self):
        return list(self.content.files)

    def found(self, name):
        shape, dtype = self._header(name)
        if (dtype.kind, dtype.itemsize) in self.RAW:
            return Found(self.path, shape, shape, f"raw{8 * dtype.itemsize}")
        return Found(self.path, shape, shape, dtype.name)

    def tensor(self, name):
        with self._reading(name):
            array = self.content[name]
        if (array.dtype.kind, array.dtype.itemsize) in self.RAW:
            array = array.view(f"i{array.dtype.itemsize}" if array.dtype.itemsize > 1 else "u1")
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))

    def _header(self, name):
        """Shape and type of an array, without its data."""
        member = name if name in self.content.zip.namelist() else name + ".npy"
        with self._reading(name), self.content.zip.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version](stream)
        if dtype.hasobject:
            raise ConvertError(f"{self.path}: {name}", "pickled objects", "an array of numbers")
        return shape, dtype

    @contextmanager
    def _reading(self, name=None):
        """Name the file, and the array, in what numpy and the zip reader say of damage: they raise all kinds."""
        try:
            yield
        except Exception as error:
            if not is_damage(error):
                raise
            where = f"{self.path}: {name}" if name else self.path
            raise ConvertError(where, f"not readable ({first_line(error)})", "a whole .npz file, saved by np.savez",
                               "is it truncated, or still being written?") from error
