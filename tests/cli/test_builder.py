"""The tests' own tools: slices tile their tensor, numbers round as documented, HDF5 1.10 opens the files."""

import math
import subprocess

import numpy as np
import pytest

import element_types as types
import oracle
from dump_builder import Dump, Mesh, read_shards, slice_indices


@pytest.mark.parametrize("placements", [
    ["Shard(0)", "Shard(0)"], ["Shard(0)", "Shard(1)"], ["_StridedShard(dim=0, sf=2)", "Shard(0)"],
    ["_S(1, 3)", "S(0)"], ["_StridedShard(0, split_factor=4)", "Shard(1)"]])
@pytest.mark.parametrize("shape", [(8, 6), (9, 5), (1, 1), (7, 0), (5, 13)])
def test_shards_tile_the_tensor(placements, shape):
    mesh = Mesh(["a", "b"], [[0, 1], [2, 3], [4, 5]])
    seen = np.zeros(shape, int)
    for rank in range(6):
        seen[np.ix_(*slice_indices(shape, mesh, placements, rank))] += 1
    assert (seen == 1).all()


def test_documented_slices():
    mesh = Mesh(["a"], [0, 1, 2, 3])
    found = [slice_indices((9,), mesh, ["_S(0, 2)"], rank)[0].tolist() for rank in range(4)]
    assert found == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]
    assert [len(slice_indices((5,), mesh, ["S(0)"], r)[0]) for r in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("dtype", types.FIELDS)
def test_every_number_survives_and_ties_go_to_even(dtype):
    code = np.arange(2 ** (8 * types.BITS[dtype].itemsize)).astype(types.BITS[dtype])
    numbers = types.widen(code.view(types.STORED[dtype]), dtype)
    back = types.narrow(numbers, dtype).view(types.BITS[dtype])
    nan = np.isnan(numbers)
    assert (back[~nan] == code[~nan]).all() and (back[nan] == types.CANONICAL_NAN[dtype]).all()
    finite = numbers[np.isfinite(numbers) & (numbers >= 0) & ~np.signbit(numbers)]
    middle = types.narrow((finite[:-1] + finite[1:]) / 2, dtype).view(types.BITS[dtype])
    assert (middle % 2 == 0).all()


def test_known_bits():
    assert types.narrow(np.array([1.1640625, 65520.0, 1e-45]), "bfloat16").tolist() == [0x3F95, 0x4780, 0x0000]
    assert types.narrow(np.array([448.0, 464.0, 465.0, np.inf]), "float8_e4m3fn").tolist() == [0x7E, 0x7E, 0x7F, 0x7F]
    assert types.narrow(np.array([57344.0, 61440.0, 61439.0]), "float8_e5m2").tolist() == [0x7B, 0x7C, 0x7B]
    halves = np.random.default_rng(1).standard_normal(4000) * 2.0 ** np.random.default_rng(2).integers(-28, 17, 4000)
    with np.errstate(over="ignore"):
        assert types.same_bits(types.narrow(halves, "float16"), halves.astype(np.float16))


def test_oracle_norm():
    assert math.isclose(oracle.norm([np.array([3e200, 4e200])]), 5e200, rel_tol=3e-16)
    assert oracle.norm([np.ones(4)], 1) == 4 and oracle.norm([np.ones(4)], np.inf) == 1 and oracle.norm([]) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_files_open_in_hdf5_1_10_and_read_back(tmp_path, packed):
    dump = Dump(2)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("a/b.weight", np.arange(6.0, dtype=np.float32).reshape(3, 2), "dp", ["Shard(0)"])
    dump.plain("norm", np.arange(3.0), dtype="bfloat16")
    dump.sharded("unused", np.zeros(4, np.float16), "dp", ["Shard(0)"], none=[1])
    path = dump.write(tmp_path / "dump", packed=packed)
    shards = read_shards(path)
    assert shards[1]["a/b.weight"].tolist() == [[4.0, 5.0]] and shards[1]["unused"] is None
    assert shards[0]["norm"].tolist() == [0, 0x3F80, 0x4000]
    seen = subprocess.run(["h5dump", "-H", path / "rank_00001.h5"], capture_output=True, text=True, timeout=30)
    assert seen.returncode == 0 and "H5T_STD_U16LE" in seen.stdout, seen.stderr
