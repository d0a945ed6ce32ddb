"""What gradclip has to find and write, computed from a Dump of dump_builder.py by shared/numerics.md: one tensor at a
time, math.fsum over float64, products in numpy. Neither torch nor gradclip takes part."""

import itertools
import math
import re

import numpy as np

import element_types as types

EXPERT_NAME = re.compile(r"(^|\.)mlp\.experts\.(gate_up_linear|down_linear)\.(weight|bias)\d+")
COMBINE = {"max": np.maximum, "min": np.minimum, "product": np.multiply}


def divided(stored, dtype, divisor):
    if divisor is None:
        return stored
    with np.errstate(all="ignore"):
        if dtype == "float64":
            return types.narrow(stored / np.float64(divisor), dtype)
        return types.narrow(types.widen(stored, dtype).astype(np.float32) / np.float32(divisor), dtype)


def multiplied(stored, dtype, coefficient):
    """The clipping product: 0-dim gradients by PyTorch's promotion in float64, the others in their own precision."""
    if coefficient is None:
        return stored
    with np.errstate(all="ignore"):
        if dtype == "float64" or np.ndim(stored) == 0:
            return types.narrow(types.widen(stored, dtype) * np.float64(coefficient), dtype)
        return types.narrow(types.widen(stored, dtype).astype(np.float32) * np.float32(coefficient), dtype)


def coefficient_of(total, max_norm):
    """min(1, max_norm / (total + 1e-6)) by PyTorch's operations: a number divided by a tensor is a reciprocal and a
    product."""
    if max_norm is None:
        return None
    if math.isnan(total):
        return math.nan
    if math.isinf(max_norm):
        return 1.0
    return min(1.0, (1.0 / (total + 1e-6)) * max_norm)


def norm(values, p=2.0):
    magnitudes = [abs(float(v)) for v in np.concatenate([np.ravel(v) for v in values] or [np.empty(0)])]
    if any(map(math.isnan, magnitudes)):
        return math.nan
    if any(map(math.isinf, magnitudes)):
        return math.inf
    largest = max(magnitudes, default=0.0)
    if math.isinf(p) or largest == 0.0:
        return largest
    unit = 2.0 ** math.frexp(largest)[1]
    return unit * math.fsum((m / unit) ** p for m in magnitudes) ** (1.0 / p)


class Expectation:
    """`scaled`, then `written(coefficient)`: {rank: {name: stored}}; `total(p)` of either."""

    def __init__(self, dump, *, tokens=None, expert=None, ep_axis=None, zero=False):
        self.dump, self.scaled = dump, {}
        for parameter in dump.parameters:
            is_expert = (parameter.entry.get("expert") or EXPERT_NAME.search(parameter.name)
                         or parameter.mesh is not None and ep_axis in parameter.mesh.dim_names)
            for rank, stored in parameter.shards.items():
                if stored is not None:
                    stored = divided(divided(stored, parameter.dtype, tokens), parameter.dtype,
                                     expert if is_expert else None)
                    if zero:
                        finite = np.isfinite(types.widen(stored, parameter.dtype))
                        stored = np.where(finite, stored, np.zeros_like(stored))
                self.scaled[id(parameter), rank] = stored

    def shards(self, coefficient=None):
        """{rank: {recorded name: stored}} as a clipped dump holds them."""
        found = {rank: {} for rank in range(self.dump.world_size)}
        for parameter in self.dump.parameters:
            for rank in parameter.shards:
                stored = self.scaled[id(parameter), rank]
                found[rank][parameter.recorded_name] = (
                    None if stored is None else multiplied(stored, parameter.dtype, coefficient))
        return found

    def counted(self, coefficient=None):
        """[(parameter, [arrays of numbers])]: what the norm of the whole model sees."""
        seen, result = set(), []
        for parameter in self.dump.parameters:
            key = parameter.entry.get("tied")
            if key is not None and key in seen:
                continue
            seen.add(key)
            result.append((parameter, list(self._counted(parameter, coefficient))))
        return result

    def total(self, p=2.0, coefficient=None):
        return norm([values for _, each in self.counted(coefficient) for values in each], p)

    def _numbers(self, parameter, rank, coefficient):
        stored = self.scaled[id(parameter), rank]
        if stored is None:
            return None
        numbers = types.widen(multiplied(stored, parameter.dtype, coefficient), parameter.dtype)
        if rank in parameter.scale_inv:
            numbers = (numbers.astype(np.float32) * np.float32(parameter.scale_inv[rank])).astype(np.float64)
        return numbers

    def _counted(self, parameter, coefficient):
        def numbers(rank):
            return self._numbers(parameter, rank, coefficient)

        if parameter.mesh is None:
            default = "distinct" if EXPERT_NAME.search(parameter.name) or parameter.entry.get("expert") else "replicated"
            held = [numbers(r) for r in sorted(parameter.shards) if numbers(r) is not None]
            yield from held if parameter.entry.get("copies", default) == "distinct" else held[:1]
            return
        kinds, mesh = parameter.kinds(), parameter.mesh
        along = {kind: [d for d, k in enumerate(kinds) if k[0] == kind] for kind in ("replicate", "partial")}
        free = [d for d in range(mesh.ranks.ndim) if d not in along["replicate"] + along["partial"]]
        for at in itertools.product(*(range(mesh.ranks.shape[d]) for d in free)):
            for copy in itertools.product(*(range(mesh.ranks.shape[d]) for d in along["replicate"])):
                addends = []
                for one in itertools.product(*(range(mesh.ranks.shape[d]) for d in along["partial"])):
                    coordinate = [0] * mesh.ranks.ndim
                    for dims, values in ((free, at), (along["replicate"], copy), (along["partial"], one)):
                        for d, value in zip(dims, values):
                            coordinate[d] = value
                    addends.append(numbers(int(mesh.ranks[tuple(coordinate)])))
                present = [a for a in addends if a is not None]
                if not present:
                    continue  # the next copy counts
                value = present[0]
                if along["partial"]:
                    operation = kinds[along["partial"][0]][1]
                    for addend in present[1:]:
                        value = COMBINE.get(operation, np.add)(value, addend)
                    value = value / len(addends) if operation == "avg" else value
                yield value
                break
