"""Files that are pickles inside, read without running what they hold."""

import logging
import pickle
import re
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint import filesystem, metadata

from converters.errors import ConvertError, first_line, is_damage


def load_tensors(path, mmap=True, where=None):
    """What torch.save wrote, tensors mapped rather than read. Only tensors, containers and numbers are let in.
    path: a file's name, or a stream of the file `where`, which cannot be mapped."""
    where = where or path
    try:
        if mmap:
            open(path, "rb").close()  # the system's own word on a file that cannot be read
        with _without_mesh_warnings():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # the zip reader, the unpickler and the tensors' own constructors raise all kinds
        if not is_damage(error):
            raise
        unpickling = isinstance(error, pickle.UnpicklingError)
        if unpickling and (name := _refused_name(error)):
            raise ConvertError(where, f"objects that are no tensors ({name})", "a file of tensors, saved by torch.save",
                               "gradclip_convert never runs what a file holds: save a dict of names and tensors alone"
                               ) from error
        reason = "UnpicklingError" if unpickling else first_line(error)
        raise ConvertError(where, f"not readable by torch.load ({reason})",
                           "a whole file, saved by torch.save in its zip format",
                           "is it truncated, or still being written?") from error


def load_dcp_metadata(path):
    """The Metadata of a distributed checkpoint, from a pickle of which nothing but its own classes is let in."""
    try:
        with open(path, "rb") as file:
            found = _MetadataUnpickler(file).load()
    except (OSError, ConvertError):
        raise
    except Exception as error:  # a damaged pickle raises whatever it happens to hit, MemoryError for a frame too
        raise ConvertError(path, f"not readable ({first_line(error)})", "the .metadata of a distributed checkpoint",
                           "is the checkpoint complete?") from error
    if not isinstance(found, metadata.Metadata) \
            or not all(isinstance(found.__dict__.get(key), dict) for key in ("state_dict_metadata", "storage_data")):
        raise ConvertError(path, "something else", "the .metadata of a distributed checkpoint")
    return found


def _layout(name):
    return getattr(torch, name.removeprefix("torch.")) if name == "torch.strided" else None


def _memory_format(kind, name):
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("getattr")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Lets in the classes of a checkpoint's metadata, and harmless stand-ins for the functions in it."""

    STAND_INS = {("torch.serialization", "_get_layout"): _layout, ("builtins", "getattr"): _memory_format,
                 ("torch", "Size"): torch.Size, ("collections", "OrderedDict"): dict,
                 ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
                 ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts)}
    CLASSES = {metadata.__name__: ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                                   "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
               filesystem.__name__: ("_StorageInfo",)}

    def find_class(self, module, name):
        if (module, name) in self.STAND_INS:
            return self.STAND_INS[module, name]
        if name in self.CLASSES.get(module, ()):
            return getattr(metadata if module == metadata.__name__ else filesystem, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ConvertError("the checkpoint's .metadata", f"a pickle that asks for {module}.{name}",
                           "nothing but tensors' names, shapes and places",
                           "gradclip_convert never runs what a file holds: save the gradients again, by "
                           "torch.distributed.checkpoint and as tensors alone")


def _refused_name(error):
    """The object that torch.load refused, out of its paragraphs of advice; None if it failed for another reason."""
    found = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
    return found and found[1]


@contextmanager
def _without_mesh_warnings():
    """A DeviceMesh that is read outside its job warns that it has no process groups; it needs none here."""
    log = logging.getLogger("torch.distributed.device_mesh")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
