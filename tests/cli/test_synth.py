"""synth -o OUT: dumps of models' shapes. Two layouts of one seed hold one gradient; what is injected is found."""

import json
import math
import shutil

import numpy as np
import pytest

import element_types as types
from conftest import ROOT, finding, kinds, number, parameter, refused, run, tree
from dump_builder import read_manifest, read_shards, slice_indices, Mesh

MODELS = ROOT / "src" / "synth" / "models"


def synth(out, *args, np=1, code=0, **how):
    result = run(np, "synth", "-o", out, "--quiet", *args, **how)
    assert result.code == code and result.err == "", result
    assert not out.with_name(out.name + ".partial").exists()
    return out


def norms(dump, *args):
    return run(1, "norms", dump, "--format", "json", *args).json()


MESHES = ["dp_shard=1", "pp=2,dp_shard=2,tp=2", "tp=3", "dp_replicate=2,dp_shard=3", "pp=4", "dp_shard=4,ep=2",
          "pp=2,dp_shard=2,cp=2,ep=4", "tp=2,dp_shard=2"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """moe-tiny of one seed on every mesh."""
    folder = tmp_path_factory.mktemp("synth")
    return [synth(folder / f"dump{i}", "--model", "moe-tiny", "--mesh", mesh, "--seed", "7", "--dtype", "bfloat16")
            for i, mesh in enumerate(MESHES)]


@pytest.mark.parametrize("other", range(1, len(MESHES)))
def test_layouts_of_one_seed_are_one_gradient(small, other):
    compared = run(1, "diff", small[0], small[other], "--format", "json")
    assert compared.code == 0, compared
    assert all(each["status"] == "equal" for each in compared.json()["parameters"])
    totals = [norms(dump)["norm"]["total"] for dump in (small[0], small[other])]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12) and totals[0] > 0
    assert run(1, "verify", small[other]).code == 0


@pytest.mark.parametrize("index", range(len(MESHES)))
def test_shards_are_what_the_placements_say(small, index):
    """By the index arrays of dump_builder: the same slices of the unsharded dump."""
    whole = read_shards(small[0])[0]
    manifest, shards = read_manifest(small[index]), read_shards(small[index])
    assert manifest["world_size"] == len(shards)
    for entry in manifest["parameters"]:
        if entry["mesh"] is None:
            assert types.same_bits(shards[entry["ranks"][0]][entry["name"]], whole[entry["name"]])
            continue
        mesh = Mesh(**manifest["meshes"][entry["mesh"]])
        for rank in mesh.ranks.flatten().tolist():
            indices = slice_indices(entry["shape"], mesh, entry["placements"], rank)
            expected = whole[entry["name"]][np.ix_(*indices)]
            found = shards[rank][entry["name"]]
            assert found.size == expected.size and found.tobytes() == expected.tobytes(), (entry, rank)


def test_placements(small):
    """What FSDP2 over tensor parallelism, pipeline stages and experts are recorded as."""
    manifest = read_manifest(small[1])
    entries = {entry["name"]: entry for entry in manifest["parameters"]}
    query = entries["model.layers.3.self_attn.q_b_proj.weight"]
    assert query["mesh"] == "stage1" and query["placements"] == ["_StridedShard(dim=0, sf=2)", "Shard(0)"]
    assert entries["model.layers.0.self_attn.o_proj.weight"]["placements"] == ["Shard(0)", "Shard(1)"]
    assert entries["model.norm.weight"]["placements"] == ["Shard(0)", "Replicate()"]
    assert manifest["meshes"]["stage1"] == {"dim_names": ["dp_shard", "tp"], "ranks": [[4, 5], [6, 7]]}
    manifest = read_manifest(small[5])
    expert = next(e for e in manifest["parameters"] if e["name"].endswith("experts.down_projs"))
    assert expert["placements"] == ["Shard(1)", "Shard(0)"] and manifest["moe_mesh"] == ["world.moe"]
    assert manifest["meshes"]["world.moe"] == {"dim_names": ["ep_shard", "ep"], "ranks": [[0, 1], [2, 3]]}
    assert entries["model.layers.1.mlp.gate.weight"]["shape"] == [16, 256]
    assert "model.layers.0.mlp.gate.weight" not in entries and "model.layers.1.mlp.gate_proj.weight" not in entries


def test_values(tool, small):
    """Nearly normal, of a known scale, unlike between parameters, seeds and types no more than rounding."""
    wide = read_shards(synth(tool.fresh("dump"), "--model", "moe-tiny", "--mesh", "dp=1", "--seed", "7", "--dtype",
                             "float64", "--scale", "0.5"))[0]
    narrow = read_shards(small[0])[0]
    name = "model.embed_tokens.weight"
    assert 0.125 * 0.99 < wide[name].std() < 0.5 * 1.01 and abs(wide[name].mean()) < 0.002
    assert 2.5 < np.abs(wide[name]).max() / wide[name].std() < 3.5
    scaled = types.narrow((wide[name] / 50).astype(np.float32), "bfloat16")
    apart = np.abs(types.widen(scaled, "bfloat16") - types.widen(narrow[name], "bfloat16"))
    assert (apart <= 2 ** -7 * np.abs(wide[name] / 50)).all()
    flat = np.concatenate([values.reshape(-1)[:500] for values in wide.values()])
    assert len(np.unique(flat)) > 0.98 * flat.size
    correlation = np.corrcoef(wide[name].reshape(-1)[:100_000], wide["lm_head.weight"].reshape(-1)[:100_000])[0, 1]
    assert abs(correlation) < 0.02
    other = read_shards(synth(tool.fresh("dump"), "--model", "moe-tiny", "--mesh", "dp=1", "--seed", "8", "--dtype",
                              "float64", "--scale", "0.5"))[0]
    assert not np.array_equal(other[name], wide[name])


def test_any_number_of_processes_writes_the_same_bytes(tool, small):
    for np_, more in ((3, []), (1, ["--threads", "3"])):
        out = synth(tool.fresh("dump"), "--model", "moe-tiny", "--mesh", MESHES[1], "--seed", "7", "--dtype", "bfloat16",
                    *more, np=np_)
        a, b = tree(small[1]), tree(out)
        assert sorted(a) == sorted(b) and [name for name in a if a[name] != b[name]] == []


@pytest.mark.parametrize("dtype", types.ALL)
def test_types(tool, dtype):
    out = synth(tool.fresh("dump"), "--model", "moe-tiny", "--mesh", "dp_shard=2", "--dtype", dtype, "--layers", "2")
    report = norms(out)
    assert {each["dtype"] for each in report["parameters"]} == {dtype}
    assert report["norm"]["nan"] == report["norm"]["posinf"] == 0 and report["norm"]["total"] > 0
    assert max(int(each["name"].split(".")[2]) for each in report["parameters"] if ".layers." in each["name"]) == 1
    assert run(1, "verify", out).code == 0


@pytest.mark.parametrize("model, parameters, elements", [("llama-8b", 291, 8_030_261_248), ("llama-70b", 723, 70_553_706_496)])
def test_real_models(model, parameters, elements):
    """The published sizes, from the description alone."""
    text = json.loads((MODELS / f"{model}.json").read_text())
    in_layers = [p for p in text["parameters"] if "{layer}" in p["name"]]
    outer = [p for p in text["parameters"] if "{layer}" not in p["name"]]
    assert len(outer) + text["layers"] * len(in_layers) == parameters
    size = lambda some: sum(int(np.prod(p["shape"])) for p in some)  # noqa: E731
    assert size(outer) + text["layers"] * size(in_layers) == elements


def test_a_model_of_ones_own(tool):
    model = {"format": "gradclip.model", "version": 1, "name": "mine", "layers": 2, "parameters": [
        {"name": "embed", "shape": [5, 3], "tp": 1, "stage": "first"},
        {"name": "h.{layer}.w", "shape": [7], "tp": 0}, {"name": "scale", "shape": [], "stage": "last"}]}
    file = tool.folder / "model.json"
    file.write_text(json.dumps(model))
    dumps = [synth(tool.fresh("dump"), "--model", file, "--mesh", mesh, "--dtype", "float32")
             for mesh in ("dp=1", "pp=2,dp_shard=2,tp=3")]
    assert run(1, "diff", *dumps).code == 0
    assert [p["name"] for p in read_manifest(dumps[1])["parameters"]] == ["embed", "h.0.w", "h.1.w", "scale"]


# ----------------------------------------------------------------------------------------------------------------------
# Faults
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, count", [("nan", "nan"), ("inf", "posinf")])
def test_a_nonfinite_element_is_found(tool, kind, count):
    name = "model.layers.1.mlp.experts.down_projs"
    for what in (kind, f"{kind}:{name}", f"{kind}:{name}:3"):
        out = synth(tool.fresh("dump"), "--model", "moe-tiny", "--mesh", "dp_shard=4,ep=2", "--inject", what)
        report = norms(out)
        found = finding(report, "nonfinite")
        assert report["norm"][count] == 1
        if ":" in what:
            assert found["parameter"] == name and parameter(report, name)[count] == 1
        if what.endswith(":3"):
            assert found["ranks"] == [3]


def test_a_diverged_copy_is_found(tool):
    for what, ranks in (("replica", None), ("replica:model.norm.weight:1", [0, 1])):
        out = synth(tool.fresh("dump"), "--model", "moe-tiny", "--mesh", "dp_shard=2,tp=2", "--inject", what)
        found = run(1, "verify", out, "--format", "json")
        assert found.code == 1
        copies = finding(found.json(), "replicas-differ")
        assert number(copies["value"]) > 0.005
        if ranks:
            assert copies["parameter"] == "model.norm.weight" and copies["ranks"] == ranks


def test_all_copies_have_the_fault_unless_one_is_named(tool):
    out = synth(tool.fresh("dump"), "--model", "moe-tiny", "--mesh", "dp=3", "--inject", "nan:model.norm.weight")
    report = norms(out)
    assert set(kinds(report)) == {"nonfinite"}
    values = [shards["model.norm.weight"] for shards in read_shards(out).values()]
    assert all(np.isnan(types.widen(v, "bfloat16")).sum() == 1 for v in values)
    assert values[0].tobytes() == values[1].tobytes() == values[2].tobytes()


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, mentions", [
    (["--mesh", "dp=2"], ["--model is missing"]),
    (["--model", "gpt-9", "--mesh", "dp=2"], ["gpt-9", "llama-8b"]),
    (["--model", "moe-tiny", "--mesh", "zp=2"], ["--mesh", "'zp'"]),
    (["--model", "moe-tiny", "--mesh", "dp"], ["--mesh", "NAME=SIZE"]),
    (["--model", "moe-tiny", "--mesh", "dp=0"], ["--mesh"]),
    (["--model", "moe-tiny", "--mesh", "dp=2,dp=2"], ["twice"]),
    (["--model", "moe-tiny", "--mesh", "dp=1000000,tp=1000000"], ["ranks"]),
    (["--model", "moe-tiny", "--mesh", "ep=2"], ["no dimension"]),
    (["--model", "moe-tiny", "--mesh", "dp=3,ep=2"], ["divisor"]),
    (["--model", "moe-tiny", "--mesh", "pp=5"], ["pp=5", "layers"]),
    (["--model", "moe-tiny", "--dtype", "int8"], ["--dtype", "bfloat16"]),
    (["--model", "moe-tiny", "--seed", "-1"], ["--seed"]),
    (["--model", "moe-tiny", "--layers", "0"], ["--layers"]),
    (["--model", "moe-tiny", "--layers", "999"], ["--layers 999", "moe-tiny", "cut down"]),
    (["--model", "moe-tiny", "--scale", "0"], ["--scale"]),
    (["--model", "moe-tiny", "--inject", "zero"], ["--inject"]),
    (["--model", "moe-tiny", "--inject", "nan:nobody"], ["--inject", "nobody"]),
    (["--model", "moe-tiny", "--inject", "nan:model.norm.weight:9"], ["rank 9"]),
    (["--model", "moe-tiny", "--inject", "replica"], ["no parameter has copies"]),
])
def test_usage(tool, arguments, mentions):
    out = tool.fresh("out")
    refused(1, 2, tool.folder / "no", "synth", "-o", out, *arguments, mentions=mentions)
    assert list(tool.folder.iterdir()) == []


def test_bad_models(tool):
    good = {"format": "gradclip.model", "version": 1, "name": "m", "layers": 1, "parameters": [
        {"name": "w.{layer}", "shape": [2]}]}
    for change, word in (({"format": "x"}, "gradclip.model"), ({"layers": 0}, "layers"), ({"parameters": []}, "parameters"),
                         ({"parameters": [{"name": "w", "shape": [2]}]}, "{layer}"),
                         ({"parameters": [{"name": "w.{layer}", "shape": [2], "tp": 1}]}, "tp"),
                         ({"parameters": [{"name": "w.{layer}", "shape": [0]}]}, "shape")):
        file = tool.folder / "model.json"
        file.write_text(json.dumps({**good, **change}))
        refused(1, 3, file, "synth", "-o", tool.fresh("out"), "--model", file, "--mesh", "dp=1", mentions=[word])


def test_more_than_the_disk_holds(tool):
    out = tool.fresh("out")
    free = shutil.disk_usage(tool.folder).free
    assert free < 2_000 * 140e9
    refused(1, 5, tool.folder / "no", "synth", "-o", out, "--model", "llama-70b", "--mesh", "dp=2000", within=30,
            mentions=["GB are free", "--layers"])
    assert list(tool.folder.iterdir()) == []


def test_outputs(tool):
    out = tool.fresh("out")
    more = ["--model", "moe-tiny", "--mesh", "dp=1", "--layers", "1"]
    refused(1, 2, out, "synth", *more, mentions=["--output OUT is missing"])
    synth(out, *more)
    before = tree(out)
    refused(1, 2, out, "synth", "-o", out, *more, mentions=["exists", "--overwrite"])
    text = run(1, "synth", "-o", out, "--overwrite", *more)
    assert text.code == 0 and "moe-tiny" in text.out and tree(out) == before
    report = run(1, "synth", "-o", tool.fresh("out"), "--format", "json", *more).json()
    assert report["command"] == "synth"
    manifest = read_manifest(out)
    elements = sum(math.prod(each["shape"]) for each in manifest["parameters"])
    assert report["model"] == {"model": "moe-tiny", "layers": 1, "parameters": len(manifest["parameters"]),
                               "elements": elements, "dtype": "bfloat16", "seed": 0}
    assert report["output"] == {"path": report["output"]["path"], "ranks": 1, "bytes": 2 * elements}
    table = tool.folder / "facts.csv"
    assert run(1, "synth", "-o", tool.fresh("out"), "--report", table, "--progress", *more).code == 0
    assert f"model,elements,{elements}\n" in table.read_text() and f"output,bytes,{2 * elements}\n" in table.read_text()
