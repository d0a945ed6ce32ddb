"""Every element type, norm type and numerics against the numpy oracle: totals to the last bits, written values bit for bit."""

import json
import math

import h5py
import numpy as np
import pytest

import element_types as types
import oracle
from conftest import assert_shards, close, finding, kinds, number, parameter, run, tree
from dump_builder import Dump

RANGE = {"float64": 300, "float32": 60, "float16": 14, "bfloat16": 60, "float8_e4m3fn": 7, "float8_e5m2": 14}


def wide(seed, shape, dtype):
    """Numbers of very different magnitudes, some zeros and subnormals: equal ones would hide a wrong order."""
    generator = np.random.default_rng(seed)
    numbers = generator.standard_normal(shape) * 2.0 ** generator.integers(-RANGE[dtype], RANGE[dtype] // 2 + 1, shape)
    numbers = np.where(generator.random(shape) < 0.05, np.where(generator.random(shape) < 0.5, -0.0, 0.0), numbers)
    stored = types.narrow(numbers, dtype)
    flat = stored.reshape(-1).view(types.BITS[dtype])
    if flat.size > 8 and dtype != "float8_e4m3fn":
        flat[3], flat[7] = 1, 2  # the smallest subnormals
    return stored


def mixed_dump(dtypes, **training):
    dump = Dump(4, **training)
    dump.mesh("fsdp-tp", ["dp", "tp"], [[0, 1], [2, 3]])
    dump.mesh("dp", ["dp"], [3, 1, 0, 2])
    for i, dtype in enumerate(dtypes):
        dump.sharded(f"{dtype}.matrix", wide(i, (9, 7), dtype), "fsdp-tp", ["_StridedShard(dim=0, sf=2)", "Shard(0)"],
                     dtype=dtype)
        dump.sharded(f"{dtype}.odd", wide(10 + i, (5, 3), dtype), "dp", ["Shard(0)"], dtype=dtype)
        dump.sharded(f"{dtype}.columns", wide(20 + i, (4, 6), dtype), "fsdp-tp", ["Replicate()", "Shard(1)"], dtype=dtype)
        dump.plain(f"{dtype}.plain", wide(30 + i, (11,), dtype), dtype=dtype)
        dump.plain(f"{dtype}.scalar", wide(40 + i, (), dtype) if i else types.narrow(0.7, dtype), dtype=dtype)
    return dump


def check_statistics(entry, stored, values, dtype):
    magnitude = np.abs(values[np.isfinite(values)])
    assert entry["elements"] == values.size and entry["zeros"] == int((values == 0).sum())
    assert number(entry["max_abs"]) == magnitude.max(initial=0)
    if (magnitude > 0).any():
        assert number(entry["min_abs"]) == magnitude[magnitude > 0].min()
    bits = stored.reshape(-1).view(types.BITS[dtype]) & (2 ** (8 * types.BITS[dtype].itemsize - 1) - 1)
    fields = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}
    assert entry["subnormals"] == int(((bits > 0) & (bits < 2 ** fields[dtype])).sum())
    scale = math.fsum(magnitude) / max(values.size, 1)
    assert math.isclose(number(entry["mean"]), math.fsum(values.flat) / values.size, rel_tol=1e-13, abs_tol=1e-14 * scale)


@pytest.mark.parametrize("dtype", types.ALL)
def test_one_type(tool, dtype):
    dump = mixed_dump([dtype], max_grad_norm=0.25)
    path = dump.write(tool.fresh("dump"))
    report, shards, _ = tool.everywhere(path, counts=(1, 3))
    expected = oracle.Expectation(dump)
    assert close(report["norm"]["total"], expected.total())
    coefficient = oracle.coefficient_of(report["norm"]["total"], 0.25)
    assert report["clip"]["coefficient"] == coefficient
    assert_shards(shards, expected.shards(coefficient))
    assert close(report["clip"]["total_after"], expected.total(coefficient=coefficient))
    assert report["clip"]["clipped"] is (coefficient < 1)
    assert report["dtypes"][0]["dtype"] == dtype and len(report["dtypes"]) == 1
    for entry, values in expected.counted():
        found = parameter(report, entry.name)
        assert close(found["norm"], oracle.norm(values))
        assert close(found["share"], (oracle.norm(values) / report["norm"]["total"]) ** 2, 1e-13)
        numbers = np.concatenate([v.reshape(-1) for v in values])
        check_statistics(found, types.narrow(numbers, dtype), numbers, dtype)
    assert math.isclose(sum(p["share"] for p in report["parameters"]), 1, rel_tol=1e-12)


def test_all_types_together_scaled_and_clipped(tool):
    dump = mixed_dump(types.ALL, max_grad_norm=3.0, pp_enabled=True, pp_axis_name="dp", num_label_tokens=21,
                      dp_group_size=2, device_mesh="fsdp-tp")
    path = dump.write(tool.fresh("dump"))
    report, shards, _ = tool.everywhere(path, counts=(1, 2))
    expected = oracle.Expectation(dump, tokens=10.5)
    assert report["scale"]["label_token_divisor"] == 10.5 and report["scale"]["expert_divisor"] is None
    assert close(report["norm"]["total"], expected.total())
    coefficient = oracle.coefficient_of(report["norm"]["total"], 3.0)
    assert_shards(shards, expected.shards(coefficient))
    assert [t["dtype"] for t in report["dtypes"]] == types.ALL


@pytest.mark.parametrize("p", ["1", "2", "3", "4", "inf", "2.5", "0.5"])
def test_norm_types(tool, p):
    dump = mixed_dump(types.ALL, max_grad_norm=1.0)
    for each in dump.parameters:  # |x|^3 of float64's extremes is for a test of its own
        if each.dtype == "float64":
            each.shards = {r: None if s is None else np.clip(s, -1e30, 1e30) for r, s in each.shards.items()}
    path = dump.write(tool.fresh("dump"))
    report, shards, _ = tool.everywhere(path, "--norm-type", p, counts=(1, 2) if p in ("3", "2.5") else (1,))
    expected = oracle.Expectation(dump)
    assert close(report["norm"]["total"], expected.total(float(p)), 1e-14)
    assert number(report["norm"]["type"]) == float(p)
    coefficient = oracle.coefficient_of(number(report["norm"]["total"]), 1.0)
    assert report["clip"]["coefficient"] == coefficient
    assert_shards(shards, expected.shards(coefficient))
    assert close(report["clip"]["total_after"], expected.total(float(p), coefficient), 1e-14)
    for entry, values in expected.counted():
        assert close(parameter(report, entry.name)["norm"], oracle.norm(values, float(p)), 1e-14)
        if p != "inf":
            share = (oracle.norm(values, float(p)) / number(report["norm"]["total"])) ** float(p)
            assert math.isclose(parameter(report, entry.name)["share"], share, rel_tol=1e-12, abs_tol=1e-300)


@pytest.mark.parametrize("p", ["1", "2", "3", "inf", "2.5"])
@pytest.mark.parametrize("unit", [1e300, 1e-300])
def test_float64_at_the_ends_of_its_range(tool, p, unit):
    dump = Dump(1, max_grad_norm=unit / 4)
    dump.plain("large", np.array([3.0, -4.0, 0.5]) * unit)
    dump.plain("other", np.array([1.0, 1e-5]) * unit)
    report, shards, _ = tool.clip(dump.write(tool.fresh("dump")), "--norm-type", p)
    expected = oracle.Expectation(dump)
    assert close(report["norm"]["total"], expected.total(float(p)), 1e-14)
    assert_shards(shards, expected.shards(oracle.coefficient_of(report["norm"]["total"], unit / 4)))


def test_more_than_one_chunk_in_any_order_of_magnitude(tool):
    """Beyond 65,536 elements a shard is summed chunk by chunk: the same bits from every process and thread count."""
    dump = Dump(3, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1, 2])
    dump.sharded("weight", wide(7, (400_001,), "float32"), "dp", ["Shard(0)"])
    dump.sharded("copies", wide(8, (70_003,), "bfloat16"), "dp", ["Replicate()"], dtype="bfloat16")
    dump.sharded("precise", wide(9, (140_009,), "float64"), "dp", ["Shard(0)"])
    path = dump.write(tool.fresh("dump"))
    report, shards, _ = tool.everywhere(path, counts=(1, 2, 4))
    expected = oracle.Expectation(dump)
    assert close(report["norm"]["total"], expected.total())
    assert_shards(shards, expected.shards(oracle.coefficient_of(report["norm"]["total"], 1.0)))
    tight, same, _ = tool.clip(path, "--threads", "3", "--memory-budget", "300k")
    assert tight["norm"] == report["norm"] and tight["parameters"] == report["parameters"]
    assert_shards(same, shards)


def test_zero_dimensional_gradients_promote_to_float64(tool):
    """float32(g × c) from float64 differs from the float32 product for these."""
    generator = np.random.default_rng(5)
    dump = Dump(1, max_grad_norm=0.1)
    for i in range(40):
        for dtype in ("float32", "bfloat16", "float16"):
            dump.plain(f"{dtype}.{i}", types.narrow(np.array(generator.standard_normal()), dtype), dtype=dtype)
    report, shards, _ = tool.clip(dump.write(tool.fresh("dump")))
    coefficient = report["clip"]["coefficient"]
    expected = oracle.Expectation(dump)
    assert_shards(shards, expected.shards(coefficient))
    in_float32 = [np.float32(types.widen(p.shards[0], "float32")) * np.float32(coefficient)
                  for p in dump.parameters if p.dtype == "float32"]
    assert any(a != shards[0][f"float32.{i}"] for i, a in enumerate(in_float32)), "the data does not tell the two apart"
    assert parameter(report, "float32.0")["shape"] == []


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_with_scale_inv(tool, dtype):
    dump = Dump(2, max_grad_norm=1.0, pp_enabled=True, device_mesh="pp", num_label_tokens=3, dp_group_size=1)
    dump.mesh("pp", ["pp"], [0, 1])
    dump.mesh("dp", ["dp"], [0, 1])
    whole = wide(3, (8, 5), dtype)
    dump.local("weight", (8, 5), "dp", ["Shard(0)"], {0: whole[:4], 1: whole[4:]}, dtype=dtype,
               scale_inv={0: 0.3, 1: 1000.7})
    path = dump.write(tool.fresh("dump"))
    report, shards, out = tool.everywhere(path, counts=(1, 2))
    expected = oracle.Expectation(dump, tokens=3.0)
    assert close(report["norm"]["total"], expected.total())
    coefficient = oracle.coefficient_of(report["norm"]["total"], 1.0)
    assert_shards(shards, expected.shards(coefficient))
    assert close(report["clip"]["total_after"], expected.total(coefficient=coefficient))
    with h5py.File(out / "rank_00001.h5") as file:
        dataset = file["gradients/weight"]
        assert dataset.attrs["scale_inv"] == np.float32(1000.7) and dataset.attrs["scale_inv"].dtype == np.float32
        assert np.bytes_(dataset.attrs["dtype"]) == dtype.encode()


@pytest.mark.parametrize("dtype", types.ALL)
def test_bits_that_nothing_may_touch(tool, dtype):
    """Without an operation NaN payloads, -0.0 and infinities stay; with one NaN is canonical, -0.0 stays -0.0."""
    kind = types.BITS[dtype]
    width = 8 * kind.itemsize
    sign, nan = 2 ** (width - 1), types.CANONICAL_NAN[dtype]
    odd = np.array([0, sign, 1, sign | 1, nan | 1, sign | nan, nan], kind).view(types.STORED[dtype])
    dump = Dump(1)
    dump.plain("weight", odd, dtype=dtype)
    path = dump.write(tool.fresh("dump"))
    for arguments in ([], ["--max-norm", "1", "--no-scale", "--nonfinite", "skip"]):
        _, shards, _ = tool.clip(path, *arguments)
        assert shards[0]["weight"].tobytes() == odd.tobytes(), arguments
    report, shards, _ = tool.clip(path, "--max-norm", "1")
    assert report["norm"]["total"] == "nan" and report["norm"]["nan"] == 3
    assert set(shards[0]["weight"].view(kind).tolist()) == {nan}
    report, shards, _ = tool.clip(path, "--max-norm", "1", "--total-norm", "0.5")  # coefficient 1: still a product
    assert report["clip"]["coefficient"] == 1.0 and report["clip"]["clipped"] is False
    assert shards[0]["weight"].view(kind).tolist() == [0, sign, 1, sign | 1, nan, nan, nan]


def test_max_norm_zero_and_infinite(tool):
    dump = Dump(1, max_grad_norm=0)
    dump.plain("weight", np.float32([3, -4, 0]))
    path = dump.write(tool.fresh("dump"))
    report, shards, _ = tool.clip(path)
    assert report["clip"] | {"coefficient": 0.0, "clipped": True, "total_after": 0.0, "max_norm": 0.0} == report["clip"]
    assert shards[0]["weight"].view("u4").tolist() == [0, 0x80000000, 0]
    report, shards, _ = tool.clip(path, "--max-norm", "inf")
    assert report["clip"]["coefficient"] == 1.0 and report["clip"]["max_norm"] == "inf"
    assert shards[0]["weight"].tolist() == [3, -4, 0]


def test_totals_at_the_limit(tool):
    """The 1e-6 of the coefficient shows: a total equal to the limit is still multiplied."""
    dump = Dump(1, max_grad_norm=5.0)
    dump.plain("weight", np.array([3.0, 4.0]))
    report, shards, _ = tool.clip(dump.write(tool.fresh("dump")))
    assert report["norm"]["total"] == 5.0 and report["clip"]["coefficient"] == 5.0 * (1 / (5.0 + 1e-6)) < 1
    assert report["clip"]["clipped"] is True and shards[0]["weight"][0] == 3.0 * report["clip"]["coefficient"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_automodel_cpu_arithmetic(tool, dtype):
    """m × sqrt(Σ round(round(|g| / m)²)), both roundings to the gradient's type, per rank's own group."""
    values = wide(11, (64,), dtype)
    dump = Dump(2, max_grad_norm=0.5)
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("weight", values, "dp", ["Shard(0)"], dtype=dtype)
    path = dump.write(tool.fresh("dump"))
    report, shards, _ = tool.everywhere(path, "--numerics", "automodel-cpu", counts=(1, 2))
    magnitude = np.abs(types.widen(values, dtype)).astype(np.float32)
    largest = np.float32(magnitude.max())
    ratio = types.widen(types.narrow(magnitude / largest, dtype), dtype).astype(np.float32)
    square = types.widen(types.narrow(ratio * ratio, dtype), dtype)
    total = float(largest) * math.sqrt(math.fsum(square))
    assert close(report["reference"]["totals"][0]["total"], total)
    coefficient = oracle.coefficient_of(report["reference"]["totals"][0]["total"], 0.5)
    assert report["clip"]["coefficient"] == coefficient
    assert_shards(shards, oracle.Expectation(dump).shards(coefficient))


def test_automodel_multiplies_by_the_reciprocal_and_rounds_the_coefficient(tool):
    dump = Dump(1, max_grad_norm=0.5, pp_enabled=True, device_mesh="pp", num_label_tokens=7, dp_group_size=3)
    dump.mesh("pp", ["pp"], [0])
    numbers = {dtype: wide(12, (50,), dtype) for dtype in ("float64", "float32", "bfloat16")}
    for dtype, values in numbers.items():
        dump.plain(dtype, np.clip(values, -1e6, 1e6) if dtype == "float64" else values, dtype=dtype)
    report, shards, _ = tool.clip(dump.write(tool.fresh("dump")), "--numerics", "automodel")
    coefficient, divisor = report["clip"]["coefficient"], 7 / 3
    for p in dump.parameters:
        stored = p.shards[0]
        if p.dtype == "float64":
            expected = stored * (1 / divisor) * coefficient
        else:
            factor = np.float32(1 / divisor)
            scaled = types.widen(types.narrow(types.widen(stored, p.dtype).astype(np.float32) * factor, p.dtype), p.dtype)
            c = np.float32(types.widen(types.narrow(coefficient, p.dtype), p.dtype))
            expected = types.narrow(scaled.astype(np.float32) * c, p.dtype)
        assert types.same_bits(shards[0][p.name], expected), p.dtype


def test_torch_numerics_is_torch_s(tool):
    """torch.nn.utils.clip_grad_norm_ itself, in float32."""
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(3)
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in ((30, 20), (17,), (1,))]
    dump = Dump(1, max_grad_norm=1.0, use_torch_clip_grad_norm=True)
    parameters = []
    for i, array in enumerate(arrays):
        dump.plain(f"p{i}", array)
        parameters.append(torch.nn.Parameter(torch.zeros(array.shape)))
        parameters[-1].grad = torch.tensor(array)
    total = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    report, shards, _ = tool.clip(dump.write(tool.fresh("dump")), "--numerics", "torch")
    assert report["reference"]["arithmetic"] == "torch"
    assert close(report["reference"]["totals"][0]["total"], float(total), 1e-6)
    if report["reference"]["totals"][0]["total"] == float(total):
        for i, each in enumerate(parameters):
            assert shards[0][f"p{i}"].tobytes() == each.grad.numpy().tobytes()


# Non-finite values -----------------------------------------------------------------------------------------------------

INF = np.float32([3, -4, np.inf, 0, -0.0])
NAN = np.float32([3, -4, np.nan, np.inf, -np.inf])


def nonfinite_dump(tool, bad, **training):
    dump = Dump(2, **{"max_grad_norm": 1.0, **training})
    dump.mesh("dp", ["dp"], [0, 1])
    dump.plain("fine", np.float32([1, 1]))
    dump.sharded("layers.0.bad", np.concatenate([np.zeros(5, np.float32), bad]), "dp", ["Shard(0)"])
    dump.sharded("later.bad", bad.reshape(1, 5), "dp", ["Shard(1)"])
    return dump, dump.write(tool.fresh("dump"))


def test_propagate_infinity(tool):
    dump, path = nonfinite_dump(tool, INF)
    report, shards, _ = tool.everywhere(path, counts=(1, 4))
    assert report["norm"]["total"] == "inf" and report["norm"]["posinf"] == 2 and report["norm"]["nan"] == 0
    assert report["clip"]["coefficient"] == 0 and report["clip"]["total_after"] == "nan"
    assert shards[1]["layers.0.bad"].view("u4").tolist() == [0, 0x80000000, 0x7FC00000, 0, 0x80000000]
    assert shards[0]["fine"].tolist() == [0, 0]
    assert parameter(report, "layers.0.bad")["first_nonfinite"] == {"index": [7], "rank": 1}
    assert parameter(report, "later.bad")["first_nonfinite"] == {"index": [0, 2], "rank": 0}
    assert parameter(report, "fine")["first_nonfinite"] is None
    found = [f for f in report["findings"] if f["kind"] == "nonfinite"]
    assert [f["parameter"] for f in found] == ["layers.0.bad", "later.bad"]
    assert found[0]["index"] == [7] and found[0]["ranks"] == [1]


def test_propagate_nan(tool):
    dump, path = nonfinite_dump(tool, NAN)
    report, shards, _ = tool.everywhere(path, counts=(1, 3))
    assert report["norm"]["total"] == "nan" and report["clip"]["coefficient"] == "nan"
    assert [report["norm"][k] for k in ("nan", "posinf", "neginf")] == [2, 2, 2]
    for names in shards.values():
        for stored in names.values():
            assert set(stored.reshape(-1).view("u4").tolist()) <= {0x7FC00000}
    entry = parameter(report, "layers.0.bad")
    assert [entry[k] for k in ("nan", "posinf", "neginf", "max_abs", "norm")] == [1, 1, 1, 4, "nan"]


@pytest.mark.parametrize("bad, total", [(INF, "inf"), (NAN, "nan")])
@pytest.mark.parametrize("np_", [1, 4])
def test_error_policy_refuses_and_reports(tool, bad, total, np_):
    dump, path = nonfinite_dump(tool, bad)
    out, report, before = tool.fresh("out"), tool.fresh("r").with_suffix(".json"), tree(path)
    result = run(np_, "clip", path, "-o", out, "--nonfinite", "error", "--report", report)
    assert result.code == 4, result
    assert len(result.error_lines) == 1 and "layers.0.bad" in result.err and "later.bad" not in result.err, result
    assert not out.exists() and not out.with_name(out.name + ".partial").exists() and tree(path) == before
    written = json.loads(report.read_text())
    assert written["norm"]["total"] == total and written["clip"]["clipped"] is False
    assert written["clip"]["total_after"] is None
    assert run(np_, "norms", path, "--nonfinite", "error", "--quiet").code == 4


def test_error_policy_takes_a_given_total_at_its_word(tool):
    dump, path = nonfinite_dump(tool, INF)
    for total in ("nan", "inf"):
        out = tool.fresh("out")
        result = run(1, "clip", path, "-o", out, "--nonfinite", "error", "--total-norm", total)
        assert result.code == 4 and len(result.error_lines) == 1 and not out.exists(), result
    tool.clip(path, "--nonfinite", "error", "--total-norm", "5")


@pytest.mark.parametrize("bad, total", [(INF, "inf"), (NAN, "nan")])
def test_skip_policy_scales_only(tool, bad, total):
    dump, path = nonfinite_dump(tool, bad, pp_enabled=True, device_mesh="pp", num_label_tokens=2, dp_group_size=1)
    dump.mesh("pp", ["pp"], [0, 1])
    path = dump.write(tool.fresh("dump"))
    report, shards, _ = tool.everywhere(path, "--nonfinite", "skip", counts=(1, 2))
    assert report["norm"]["total"] == total and report["clip"]["clipped"] is False
    assert report["clip"]["total_after"] == total
    assert_shards(shards, oracle.Expectation(dump, tokens=2.0).shards(None))


@pytest.mark.parametrize("bad, total", [(INF, math.sqrt(2 + 50)), (NAN, math.sqrt(2 + 50))])
def test_zero_policy_replaces_before_the_norm(tool, bad, total):
    dump, path = nonfinite_dump(tool, bad)
    report, shards, _ = tool.everywhere(path, "--nonfinite", "zero", counts=(1, 2))
    assert close(report["norm"]["total"], total)
    coefficient = oracle.coefficient_of(report["norm"]["total"], 1.0)
    assert_shards(shards, oracle.Expectation(dump, zero=True).shards(coefficient))
    assert close(report["clip"]["total_after"], 1.0, 1e-5)


@pytest.mark.parametrize("policy", ["propagate", "error", "skip", "zero"])
def test_policies_leave_finite_gradients_alone(tool, policy):
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain("weight", np.float32([3, 4]))
    report, shards, _ = tool.clip(dump.write(tool.fresh("dump")), "--nonfinite", policy)
    assert report["norm"]["total"] == 5.0 and kinds(report) == []
    assert_shards(shards, oracle.Expectation(dump).shards(report["clip"]["coefficient"]))


def test_infinite_limit_and_infinite_total(tool):
    dump, path = nonfinite_dump(tool, INF)
    report, shards, _ = tool.clip(path, "--max-norm", "inf")
    assert report["norm"]["total"] == "inf" and report["clip"]["coefficient"] == 1
    assert shards[1]["layers.0.bad"].tobytes() == INF.tobytes()
    report, shards, _ = tool.clip(path, "--max-norm", "inf", "--numerics", "automodel-cpu")
    assert report["clip"]["coefficient"] == "nan" and np.isnan(shards[1]["layers.0.bad"]).all()


def test_nonfinite_under_the_infinity_norm(tool):
    dump, path = nonfinite_dump(tool, NAN, norm_type="inf")
    report, _, _ = tool.clip(path)
    assert report["norm"]["total"] == "nan" and finding(tool.clip(
        dump_of_one(tool, INF), "--norm-type", "inf")[0], "nonfinite")["index"] == [2]


def dump_of_one(tool, values):
    dump = Dump(1, max_grad_norm=1.0)
    dump.plain("weight", values)
    return dump.write(tool.fresh("dump"))
