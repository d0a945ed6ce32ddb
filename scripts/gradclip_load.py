#!/usr/bin/env python3
"""Load gradients out of a gradclip dump as full tensors, for numpy or PyTorch.

    from gradclip_load import Dump
    dump = Dump("step_000100")             # of `gradclip merge`, or as it was recorded
    dump.names()                           # in model order
    dump.numpy("model.norm.weight")        # float64, float32, float16 as they are; bfloat16 and float8 as their bits
    dump.values("model.norm.weight")       # as numbers: float64 stays, everything else as float32
    dump.torch("model.norm.weight")        # in PyTorch's own type

    python gradclip_load.py DUMP --list
    python gradclip_load.py DUMP --parameter NAME [-o FILE.npy]

A sharded dump is read directly where its placements are Shard and Replicate, or its shards say themselves which slice
they are. For all others (Partial gradients have to be combined) there is `gradclip merge DUMP -o MERGED`. Of copies the
first rank's is taken. Needs numpy and h5py; torch() needs torch. One file, meant to be copied and changed.
"""

import argparse
import itertools
import json
import re
import sys
from pathlib import Path

import h5py
import numpy as np

STORED = {"float64": "<f8", "float32": "<f4", "float16": "<f2",
          "bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}


class Dump:
    """One dump. Rank files are opened when they are needed and closed again."""

    def __init__(self, path):
        self.path = Path(path)
        self.manifest = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
        if self.manifest.get("format") != "gradclip.dump":
            raise ValueError(f"{self.path} is no gradclip dump")
        self.entries, taken = {}, {entry["name"] for entry in self.manifest["parameters"]}
        for entry in self.manifest["parameters"]:
            name, number = entry["name"], 2
            while name in self.entries or number > 2 and name in taken:  # it may stand several times: "name@2"
                name, number = f"{entry['name']}@{number}", number + 1
            self.entries[name] = entry

    def names(self):
        return list(self.entries)

    def info(self, name):
        """(shape, dtype) of a parameter; dtype is PyTorch's name of it."""
        entry = self.entries[name]
        return tuple(entry["shape"]), entry["dtype"]

    def numpy(self, name):
        """The full tensor as it is stored: bfloat16 as uint16, float8 as uint8 (scale_inv is not applied)."""
        return self._assembled(name, lambda local, scale_inv: local, STORED[self.entries[name]["dtype"]])

    def values(self, name):
        """The full tensor as numbers: float64 as such, everything else as float32, float8 times its scale_inv."""
        dtype = self.entries[name]["dtype"]
        wide = "f8" if dtype == "float64" else "f4"
        return self._assembled(name, lambda local, scale_inv: numbers(local, dtype, scale_inv), wide)

    def torch(self, name):
        """The full tensor in PyTorch's type; float8 without its scale_inv, see values()."""
        import torch
        dtype = self.entries[name]["dtype"]
        stored = np.require(self.numpy(name), requirements=["C", "W"])
        bits = {"bfloat16": "<i2"}.get(dtype)
        return torch.from_numpy(stored.view(bits) if bits else stored).view(getattr(torch, dtype))

    # Shards ----------------------------------------------------------------------------------------------------------

    def _assembled(self, name, convert, kind):
        entry = self.entries[name]
        shape = tuple(entry["shape"])
        if entry["mesh"] is None and entry.get("copies") == "distinct" and len(entry["ranks"]) > 1:
            raise ValueError(f"{name} is another tensor on each rank: gradclip merge stacks them")
        result, seen = np.zeros(shape, kind), 0
        for rank, indices in self._slices(name, entry):
            found = self._local(entry, rank)
            if found is None:
                raise ValueError(f"{name}: the gradient is None on rank {rank}")
            local, attributes = found
            indices = recorded_indices(shape, attributes, local.shape) or indices
            if indices is None:
                raise ValueError(f"{name}: {entry['placements']} cannot be put together here; gradclip merge can")
            expected = tuple(map(len, indices))
            if local.size == 0 and 0 in expected:
                continue
            if local.shape != expected:
                raise ValueError(f"{name}: rank {rank} holds {local.shape}, expected {expected}")
            seen += local.size
            result[np.ix_(*indices) if shape else ()] = convert(local, attributes.get("scale_inv"))
            if seen == result.size:
                break  # the rest are copies
        if seen != result.size:
            raise ValueError(f"{name}: {seen} of {result.size} elements are on some rank")
        return result

    def _slices(self, name, entry):
        """(rank, indices of each dimension) of one copy; indices None where the placements alone do not tell."""
        shape = entry["shape"]
        if entry["mesh"] is None:
            yield entry["ranks"][0], [np.arange(n) for n in shape]
            return
        mesh = np.array(self.manifest["meshes"][entry["mesh"]]["ranks"])
        placements = [placement(text) for text in entry.get("gradient_placements", entry["placements"])]
        if any(kind == "other" for kind, _ in placements):
            raise ValueError(f"{name}: {entry['placements']} cannot be put together here; gradclip merge can")
        told = all(kind != "strided" for kind, _ in placements)
        copies = [range(1) if kind == "replicate" else range(n) for (kind, _), n in zip(placements, mesh.shape)]
        for coordinate in itertools.product(*copies):
            indices = [np.arange(n) for n in shape]
            for (kind, d), at, parts in zip(placements, coordinate, mesh.shape):
                if kind == "shard":
                    size = -(-len(indices[d]) // parts)  # torch.chunk: 4 over 3 is 2, 2, 0
                    indices[d] = indices[d][at * size:(at + 1) * size]
            yield int(mesh[coordinate]), indices if told else None

    def _local(self, entry, rank):
        """A rank's stored array and what is recorded of it; None for a gradient that is None."""
        own = entry.get("dataset")
        with h5py.File(self.path / self.manifest["rank_file"].format(rank=rank), "r") as file:
            if "packed" in file:
                found = json.loads(file["packed/index"].asstr()[()]).get(own or entry["name"])
                if found is None:
                    return None
                begin, count = found["offset"], int(np.prod(found["shape"], dtype=np.int64))
                stored = file["packed/" + found["dtype"]][begin:begin + count].reshape(found["shape"])
                return stored, found
            link = own or link_name(entry["name"])
            if link not in file["gradients"]:
                return None
            dataset = file["gradients"][link]
            return np.asarray(dataset[()]), dict(dataset.attrs)


def link_name(name):
    name = name.replace("%", "%25").replace("/", "%2F")
    return "%2E" + name[1:] if name.startswith(".") else name


def placement(text):
    if match := re.fullmatch(r"(?:Shard|S)\((?:dim=)?(\d+)\)", text):
        return "shard", int(match[1])
    if text in ("Replicate()", "R"):
        return "replicate", None
    return ("strided" if text.startswith(("_StridedShard", "_S(")) else "other"), None


def recorded_indices(shape, attributes, local_shape):
    """The slice that a shard itself says it is, as indices of each dimension; None if it says nothing."""
    if "global_ranges" in attributes:
        ranges = np.asarray(attributes["global_ranges"]).reshape(-1, 3).tolist()
        return [np.concatenate([np.arange(b, e) for d, b, e in ranges if d == dim] or [np.arange(0)])
                for dim in range(len(shape))]
    if "global_offset" in attributes and 0 not in local_shape:
        return [np.arange(b, b + n) for b, n in zip(np.asarray(attributes["global_offset"]).tolist(), local_shape)]
    return None


def numbers(stored, dtype, scale_inv=None):
    """Stored elements as numbers: float64 as such, everything else as float32."""
    if dtype == "float64":
        return stored
    if dtype == "bfloat16":
        return (stored.astype("<u4") << 16).view("<f4")
    if dtype.startswith("float8"):
        wide = float8_table(dtype)[stored]
        return wide if scale_inv is None else wide * np.float32(scale_inv)
    return stored.astype("<f4")


def float8_table(dtype):
    """The number of each of the 256 codes, as float32."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "float8_e4m3fn" else (5, 2, 15)
    code = np.arange(256)
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    normal = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
    value = np.where(exponent > 0, normal, mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias))
    if dtype == "float8_e4m3fn":
        value[code & 0x7F == 0x7F] = np.nan
    else:
        value[(exponent == 31) & (mantissa == 0)], value[(exponent == 31) & (mantissa != 0)] = np.inf, np.nan
    return np.where(code & 0x80, -value, value).astype("<f4")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Full tensors out of a gradclip dump.")
    parser.add_argument("dump", metavar="DUMP")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="names, shapes and types")
    what.add_argument("--parameter", metavar="NAME", help="print this one")
    parser.add_argument("-o", "--output", metavar="FILE.npy", help="with --parameter: write its numbers there instead")
    options = parser.parse_args(arguments)
    try:
        dump = Dump(options.dump)
        if options.list:
            for name in dump.names():
                shape, dtype = dump.info(name)
                print(f"{name}\t{'x'.join(map(str, shape)) or 'scalar'}\t{dtype}")
            return 0
        if options.parameter not in dump.entries:
            raise ValueError(f"no parameter {options.parameter!r}; --list shows them")
        values = dump.values(options.parameter)
    except (OSError, ValueError) as error:
        print(f"gradclip_load: {error}", file=sys.stderr)
        return 3
    if options.output:
        np.save(options.output, values)
    else:
        print(values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
