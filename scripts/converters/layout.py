"""The layout file: which mesh and which placements a tensor has, by patterns of names (docs/converting.md)."""

import json
import re

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from converters.errors import ConvertError, first_line
from converters.job import Mesh

TOP_KEYS = {"world_size", "meshes", "device_mesh", "moe_mesh", "parameters", "training"}
RULE_KEYS = {"pattern", "mesh", "placements", "copies", "expert", "tied", "model_part", "dtype"}
MAX_WORLD_SIZE = 1 << 24


class Layout:
    """A layout file that has been read and checked.

    world_size, device_mesh, moe_meshes, training   as Job has them
    rules          may be empty, where tensors are DTensors and only the job's meshes are to be told
    rule(name)     what it says of a tensor: the first rule whose pattern is the whole name
    """

    def __init__(self, path):
        self.path = path
        found = self._read()
        self._check_keys(found, TOP_KEYS, str(path))
        self.world_size = self._integer(found.get("world_size"), "world_size", 1, MAX_WORLD_SIZE)
        self.meshes = {name: self._mesh(name, row) for name, row in self._object(found, "meshes").items()}
        self.device_mesh = self._named(found.get("device_mesh"), "device_mesh")
        moe = found.get("moe_mesh") or []
        self.moe_meshes = [self._named(name, "moe_mesh") for name in ([moe] if isinstance(moe, str) else moe)]
        self.training = self._object(found, "training")
        rules = found.get("parameters", [])
        if not isinstance(rules, list):
            self._refuse("parameters", "no list of rules", 'objects such as {"pattern": ".*", "mesh": null}')
        self.rules = [_Rule(self, f"parameters[{i}]", rule) for i, rule in enumerate(rules)]

    def rule(self, name):
        for rule in self.rules:
            if rule.pattern.fullmatch(name):
                rule.used = True
                return rule
        raise ConvertError(name, f"no pattern of {self.path} is this name", "a rule for each tensor",
                           'add one to "parameters" (a last one with the pattern ".*" takes all others), or leave the '
                           "tensor out with --skip")

    def unused(self):
        return [rule.pattern.pattern for rule in self.rules if not rule.used]

    # Reading ---------------------------------------------------------------------------------------------------------

    def _read(self):
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConvertError(self.path, first_line(error), "a layout file in JSON") from error
        if not isinstance(found, dict):
            raise ConvertError(self.path, "no object", "a layout file in JSON")
        return found

    def _refuse(self, key, found, expected="", advice=""):
        raise ConvertError(f"{self.path}, {key}", found, expected, advice)

    def _check_keys(self, found, known, where):
        for key in found.keys() - known:
            raise ConvertError(where, f"the key {key!r}", f"only {' '.join(sorted(known))}")

    def _object(self, holder, key):
        found = holder.get(key) or {}
        if not isinstance(found, dict):
            self._refuse(key, json.dumps(found)[:100], "an object")
        return found

    def _integer(self, found, key, low, high):
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            self._refuse(key, json.dumps(found)[:100], f"an integer from {low} to {high}")
        return found

    def _named(self, name, key):
        if name is None:
            return None
        if not isinstance(name, str) or name not in self.meshes:
            self._refuse(key, json.dumps(name)[:100],
                         f"one of the meshes {', '.join(self.meshes) or '(there is none)'}")
        return self.meshes[name]

    def _mesh(self, name, row):
        key = f"meshes[{name!r}]"
        if not isinstance(row, dict) or row.keys() != {"dim_names", "ranks"}:
            self._refuse(key, json.dumps(row)[:100], '{"dim_names": [...], "ranks": [...]}')
        try:
            ranks = np.array(row["ranks"])
        except ValueError:  # rows of different lengths
            ranks = np.array("uneven")
        names = row["dim_names"]
        if ranks.dtype.kind != "i" or ranks.size == 0:
            self._refuse(key, json.dumps(row["ranks"])[:100], "ranks as lists of equal length in lists")
        if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names) \
                or len(names) != ranks.ndim or len(set(names)) != len(names):
            self._refuse(key, f"dim_names {json.dumps(names)[:100]}", f"{ranks.ndim} different names")
        if ranks.min() < 0 or ranks.max() >= self.world_size or len(set(ranks.ravel().tolist())) != ranks.size:
            self._refuse(key, f"the ranks {ranks.tolist()}"[:200], f"each of 0 to {self.world_size - 1} at most once")
        return Mesh(names, ranks)


class _Rule:
    """One entry of "parameters": meshes is empty for plain tensors."""

    def __init__(self, layout, key, found):
        def refuse(what, expected):
            raise ConvertError(f"{layout.path}, {key}", what, expected)

        if not isinstance(found, dict) or not isinstance(found.get("pattern"), str):
            refuse(json.dumps(found)[:100], 'an object with a "pattern"')
        layout._check_keys(found, RULE_KEYS, f"{layout.path}, {key}")
        try:
            self.pattern = re.compile(found["pattern"])
        except re.error as error:
            refuse(f"the pattern {found['pattern']!r}: {error}", "a regular expression")
        names = found.get("mesh") or []
        self.meshes = [layout._named(name, f"{key}.mesh") for name in ([names] if isinstance(names, str) else names)]
        self.placements = [self._placement(text, refuse) for text in found.get("placements") or []]
        for mesh in self.meshes:
            if len(self.placements) != len(mesh.shape):
                refuse(f"{len(self.placements)} placements", f"{len(mesh.shape)}, one for each dimension of its mesh")
        if self.placements and not self.meshes:
            refuse("placements without a mesh", "both, or none for a plain tensor")
        self.copies = found.get("copies") or "replicated"
        if self.copies not in ("replicated", "distinct"):
            refuse(f"copies {json.dumps(self.copies)[:100]}", '"replicated" or "distinct"')
        self.dtype = found.get("dtype")
        self.extra = {key: found.get(key) for key in ("expert", "tied", "model_part")}
        self.used = False

    @staticmethod
    def _placement(text, refuse):
        try:
            return parse_placement(text)
        except ValueError:
            refuse(f"the placement {json.dumps(text)[:100]}",
                   "Shard(0), Replicate(), Partial(), Partial(avg), _StridedShard(dim=0, sf=2) or the like")


def parse_placement(text):
    """PyTorch's placement of any spelling that it has printed. Raises ValueError for anything else."""
    text = text.strip() if isinstance(text, str) else ""
    if text in ("Replicate()", "R"):
        return Replicate()
    if match := re.fullmatch(r"(?:Shard|S)\((?:dim=)?(\d{1,3})\)", text):
        return Shard(int(match[1]))
    if match := re.fullmatch(r"(?:_StridedShard|_S)\((?:dim=)?(\d{1,3}), ?(?:sf=|split_factor=)?(\d{1,8})\)", text):
        if int(match[2]) > 0:
            return _StridedShard(int(match[1]), split_factor=int(match[2]))
    if match := re.fullmatch(r"(?:Partial|P)(?:\((sum|avg|max|min|product)?\))?", text):
        return Partial(match[1] or "sum")
    raise ValueError(text)
