"""record_microbatches in one process: what is captured, what a failure leaves, and that training never notices."""

import json
import subprocess
import sys
from types import ModuleType

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import gradclip_record  # noqa: E402
from gradclip_microbatches import record_microbatch, record_microbatches  # noqa: E402


class Twice(nn.Module):
    """One weight that is used twice, one that only odd microbatches use, one that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.both, self.odd, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x, k):
        x = self.frozen(torch.tanh(self.both(torch.tanh(self.both(x)))))
        return self.odd(x) if k % 2 else x


def backward(model, k):
    model(torch.linspace(-1, k + 1, 6).reshape(2, 3), k).square().sum().backward()


def expected(microbatches):
    """{name: [gradient or None of each]}, each microbatch on a model of its own."""
    found = {}
    for k in range(microbatches):
        model = Twice()
        backward(model, k)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found.setdefault(name, []).append(None if parameter.grad is None else parameter.grad.numpy())
    return found


def gradients(dump):
    with h5py.File(dump / "rank_00000.h5") as file:
        return {name: dataset[()] for name, dataset in file["gradients"].items()}


def manifest_of(dump):
    return json.loads((dump / "manifest.json").read_text(encoding="utf-8"))


def unfinished(folder):
    return not list(folder.rglob("manifest.json"))


def hooks(model):
    return sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


def test_each_microbatch_alone_and_their_sum(tmp_path, gradclip):
    model = Twice()
    with record_microbatches(tmp_path / "loop", model, step=7, training={"max_grad_norm": 1.0}) as loop:
        for k in range(3):
            with loop.microbatch(labels=torch.full((1, 2), k), first_microbatch=k == 0):
                backward(model, k)
    assert loop.ok and not hooks(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    loop.log(norm)
    dumps = sorted((tmp_path / "loop").glob("microbatch_*"))
    for name, of in expected(3).items():
        for dump, values in zip(dumps, of):
            held = gradients(dump)
            assert name not in held if values is None else (held[name] == values).all()
    for k, dump in enumerate(dumps):
        manifest = manifest_of(dump)
        assert manifest["microbatch"] == {"index": k, "count": 3, "first_microbatch": k == 0} and manifest["step"] == 7
        assert all(p["reduce_dtype"] == p["storage_dtype"] == "float32" for p in manifest["parameters"])
        assert len(manifest["parameters"]) == 4
    gradclip("accumulate", *dumps, "-o", tmp_path / "out", reports=tmp_path)
    final = gradients(tmp_path / "loop" / "gradients")
    assert gradients(tmp_path / "out").keys() == final.keys() == {"both.weight", "both.bias", "odd.weight", "odd.bias"}
    for name, values in gradients(tmp_path / "out").items():
        assert values.tobytes() == final[name].tobytes()
    report = gradclip("clip", tmp_path / "out", "-o", tmp_path / "clipped", reports=tmp_path)
    assert abs(report["norm"]["total"] - float(norm)) < 1e-6 * float(norm)
    assert manifest_of(dumps[0])["training"]["grad_norm"] == manifest_of(tmp_path / "loop" / "gradients")["training"][
        "grad_norm"] == float(norm)


def test_a_single_microbatch(tmp_path):
    model = Twice()
    for k in (0, 1):
        with record_microbatch(tmp_path / str(k), model, step=1, index=k, count=2, synchronised=k == 1):
            backward(model, k)
    assert [manifest_of(tmp_path / str(k))["microbatch"] for k in (0, 1)] == [
        {"index": k, "count": 2, "synchronised": k == 1} for k in (0, 1)]
    assert (gradients(tmp_path / "1")["odd.bias"] == expected(2)["odd.bias"][1]).all()


def test_automodels_own_flags(tmp_path, monkeypatch):
    state = ModuleType("nemo_automodel.components.models.common.utils")
    state.get_is_first_microbatch, state.get_is_optim_step = lambda: state.first, lambda: state.last
    monkeypatch.setitem(sys.modules, state.__name__, state)
    model, state.first, state.last = Twice(), True, False
    with record_microbatches(tmp_path, model, step=1) as loop:
        for k in range(2):
            state.last = k == 1  # prepare_for_final_backward
            with loop.microbatch():
                backward(model, k)
                state.first = False  # prepare_after_first_microbatch
    assert [manifest_of(tmp_path / f"microbatch_000{k}")["microbatch"] for k in range(2)] == [
        {"index": k, "count": 2, "first_microbatch": k == 0, "optimizer_step": k == 1} for k in range(2)]


# Failures -------------------------------------------------------------------------------------------------------------

def test_an_exception_of_the_loop_passes_through(tmp_path):
    model = Twice()
    with pytest.raises(KeyError, match="training's own"), record_microbatches(tmp_path, model, step=1) as loop:
        with loop.microbatch():
            backward(model, 0)
        with loop.microbatch():
            raise KeyError("training's own")
    assert unfinished(tmp_path) and not hooks(model) and not loop.ok
    loop.log(1.0)


def second_backward(model, loop):
    with loop.microbatch():
        backward(model, 0)
        backward(model, 1)


def backward_outside(model, loop):
    with loop.microbatch():
        backward(model, 0)
    backward(model, 1)


def bad_labels(model, loop):
    with loop.microbatch(labels="words"):
        backward(model, 0)
    backward_outside(model, loop)


@pytest.mark.parametrize("body, told", [(second_backward, "a second backward pass in one microbatch"),
                                        (backward_outside, "outside of a microbatch"),
                                        (bad_labels, "could not take the labels")])
def test_what_is_no_loop_is_logged_and_training_goes_on(tmp_path, caplog, body, told):
    model = Twice()
    with record_microbatches(tmp_path, model, step=1) as loop:
        body(model, loop)
    assert told in caplog.text and not loop.ok and not hooks(model) and model.both.weight.grad is not None
    assert not list(tmp_path.glob("microbatch_*/manifest.json"))


def test_a_microbatch_that_cannot_be_written(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    model = Twice()
    for how in ({"path": tmp_path / "file"}, {"path": tmp_path / "x", "training": 3},
                {"path": tmp_path / "y", "step": None}, {"path": tmp_path / "z", "model_parts": None}):
        with record_microbatches(**{"model_parts": model, "step": 1, **how}) as loop, loop.microbatch():
            backward(model, 0)
        assert not loop.ok and not hooks(model)
    monkeypatch.setattr(gradclip_record, "_write_gradient", None)
    with record_microbatches(tmp_path / "w", model, step=1) as loop, loop.microbatch():
        backward(model, 0)
    assert not loop.ok and unfinished(tmp_path)


def test_sparse_gradients_and_old_ones(tmp_path, caplog):
    sparse = nn.Embedding(4, 2, sparse=True)
    with record_microbatches(tmp_path / "sparse", sparse, step=1) as loop, loop.microbatch():
        sparse(torch.tensor([1])).sum().backward()
    assert not loop.ok and "sparse" in caplog.text and sparse.weight.grad.is_sparse
    model = Twice()
    backward(model, 1)
    with record_microbatches(tmp_path / "old", model, step=1) as loop, loop.microbatch():
        backward(model, 1)
    assert loop.ok and "before the first microbatch" in caplog.text


# Without communication ------------------------------------------------------------------------------------------------

def test_fragments_become_manifests(tmp_path):
    for rank in (0, 1):  # two ranks of a job, one after the other
        model = Twice()
        gradclip_record._recorded_here.clear()
        with record_microbatches(tmp_path, model, step=1, rank=rank, world_size=2, communicate=False,
                                 copies=lambda *_: "distinct") as loop:
            for k in range(2 if rank else 3):
                with loop.microbatch(synchronised=(k == 1) if rank else None):
                    backward(model, k + rank)
    line = [sys.executable, ROOT / "scripts" / "gradclip_microbatches.py", "assemble", tmp_path]
    assert unfinished(tmp_path)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode and "count is 2 on rank 1, 3 on others" in done.stderr
    for file in (tmp_path / "microbatch_0002").iterdir():
        file.unlink()
    (tmp_path / "microbatch_0002").rmdir()
    for fragment in tmp_path.glob("microbatch_*/rank_00000.json"):
        fragment.write_text(fragment.read_text().replace('"count": 3', '"count": 2'))
    subprocess.run(line, check=True)
    assert not list(tmp_path.rglob("rank_*.json"))
    first, second = (manifest_of(tmp_path / f"microbatch_000{k}") for k in range(2))
    assert [one["microbatch"]["synchronised"] for one in (first, second)] == [False, True]
    assert [p["dtype"] for p in first["parameters"]] == [p["dtype"] for p in second["parameters"]]
    assert manifest_of(tmp_path / "gradients")["world_size"] == 2
    np.testing.assert_array_equal(gradients(tmp_path / "microbatch_0000")["both.bias"], expected(1)["both.bias"][0])
