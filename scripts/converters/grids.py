"""Meshes for the blocks that a tensor is cut into, where nothing tells the job's own mesh.

A grid is, for each dimension of a tensor, the lengths of its pieces. PyTorch's chunk rule and its repetition (a chunk
of a chunk, as FSDP2 over tensor parallelism has it) are what placements can say; all else needs a layout file.
"""

import itertools
import math

import numpy as np
from torch.distributed.tensor import Replicate, Shard

from converters.errors import ConvertError
from converters.job import Mesh

LARGEST_FACTOR = 4  # ranks whose shards are all empty leave no trace; how many times the blocks the ranks may be


def common_world(grids):
    """The smallest number of ranks on which every tensor of {name: grid} can be laid out."""
    distinct = {tuple(grid): name for name, grid in grids.items()}
    blocks = max((math.prod(map(len, grid)) for grid in distinct), default=1)
    refused = None
    for world in range(blocks, LARGEST_FACTOR * blocks + 1):
        refused = next((name for grid, name in distinct.items() if _cuts(grid, world) is None), None)
        if refused is None:
            return world
    raise ConvertError(refused, f"cut into pieces of {_text(grids[refused])}",
                       f"pieces that Shard placements make on the same ranks as the other tensors' ({blocks} or more)",
                       "describe the shards with --layout")


def plan(shape, grid, world):
    """(mesh, placements) of a tensor on `world` ranks: a dimension of the mesh for each cut, and one for copies."""
    if world == 1:
        return None, ()
    cuts = _cuts(grid, world)
    names = [f"shard{d}" + (f"_{i}" if i else "") for d, factors in enumerate(cuts) for i in range(len(factors))]
    sizes = [factor for factors in cuts for factor in factors]
    placements = [Shard(d) for d, factors in enumerate(cuts) for _ in factors]
    copies = world // math.prod(sizes)
    if copies > 1:
        names, sizes, placements = [*names, "copies"], [*sizes, copies], [*placements, Replicate()]
    return Mesh(names, np.arange(world).reshape(sizes)), placements


def _cuts(grid, world):
    """Per dimension the factors that cut it, with the fewest copies on `world` ranks; None if there are none."""
    options = [_factors(pieces, world) for pieces in grid]
    fitting = [cuts for cuts in itertools.product(*options)
               if world % math.prod(factor for factors in cuts for factor in factors) == 0]
    return max(fitting, default=None, key=lambda cuts: math.prod(factor for factors in cuts for factor in factors))


def _factors(pieces, world):
    """The ways to cut a dimension into these pieces: () if it is whole, (k,), or (a, b) where nothing simpler does."""
    length, divisors = sum(pieces), [k for k in range(2, world + 1) if world % k == 0]
    found = [()] if len(pieces) <= 1 else []
    found += [(k,) for k in divisors if _chunks([length], k) == list(pieces)]
    return found or [(a, b) for a in divisors for b in divisors
                     if world % (a * b) == 0 and _chunks(_chunks([length], a), b) == list(pieces)]


def _chunks(lengths, count):
    """torch.chunk of each length, without what is left empty."""
    found = []
    for length in lengths:
        size = -(-length // count)
        while length > 0:
            found.append(min(size, length))
            length -= size
    return found


def _text(grid):
    return " x ".join(str(list(pieces)) for pieces in grid)
