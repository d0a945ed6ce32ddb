"""attach() against stand-ins that publish the frameworks' names and signatures and call them as the frameworks do."""

import json
import math
import sys
from types import ModuleType, SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import reference_step  # noqa: E402
from gradclip_attach import attach  # noqa: E402


def published(monkeypatch, name, **contents):
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def model_with(value):
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def manifest_of(dump):
    return json.loads((dump / "manifest.json").read_text(encoding="utf-8"))


def gradient(dump, name="weight"):
    with h5py.File(dump / "rank_00000.h5") as file:
        return file["gradients"][name][()]


# NeMo Automodel -------------------------------------------------------------------------------------------------------

@pytest.fixture
def automodel(monkeypatch):
    """The function's home, and two recipes that import it by name."""
    def scale_grads_and_clip_grad_norm(max_grad_norm, model_parts, *, norm_type=2.0, pp_enabled=False, device_mesh=None,
                                       moe_mesh=None, ep_axis_name=None, pp_axis_name=None, foreach=True,
                                       num_label_tokens=None, dp_group_size=None, expert_tp_replication_factor=1,
                                       use_torch_clip_grad_norm=False):
        if max_grad_norm is not None and max_grad_norm < 0:
            raise ValueError("as the framework would")
        return reference_step.step(
            model_parts, max_grad_norm, norm_type=norm_type, foreach=foreach,
            use_torch_clip_grad_norm=use_torch_clip_grad_norm, num_label_tokens=num_label_tokens)

    function = scale_grads_and_clip_grad_norm
    home = published(monkeypatch, "nemo_automodel.components.training.utils", scale_grads_and_clip_grad_norm=function)
    recipes = [published(monkeypatch, f"nemo_automodel.recipes.{name}", scale_grads_and_clip_grad_norm=function)
               for name in ("llm.train_ft", "vlm.finetune")]
    return SimpleNamespace(home=home, recipes=recipes, function=function)


def test_automodel_is_recorded_before_scaling_wherever_it_is_called(automodel, tmp_path, gradclip):
    attached = attach("automodel", tmp_path / "dumps", training={"ignore_index": -100})
    norms = []
    for value, recipe in zip((3.0, 5.0), automodel.recipes):
        norms.append(recipe.scale_grads_and_clip_grad_norm(
            0.5, [model_with(value)], num_label_tokens=7, dp_group_size=1))
    imported_later = automodel.home.scale_grads_and_clip_grad_norm
    imported_later(None, model_parts=[model_with(1.0)])
    attached.detach()
    for module in (automodel.home, *automodel.recipes):
        assert module.scale_grads_and_clip_grad_norm is automodel.function
    imported_later(0.5, [model_with(1.0)])  # kept by name, still works, records nothing
    dumps = sorted((tmp_path / "dumps").iterdir())
    assert [dump.name for dump in dumps] == ["step_000000", "step_000001", "step_000002"]

    for dump, value, norm in zip(dumps, (3.0, 5.0), norms):
        manifest = manifest_of(dump)
        call, training = manifest["clip_call"], manifest["training"]
        assert (gradient(dump) == value).all() and manifest["state"] == "before_scale"
        assert call["function"].endswith("scale_grads_and_clip_grad_norm")
        assert call["arguments"] == {
            "max_grad_norm": 0.5, "model_parts": ["<Linear>"], "norm_type": 2.0, "pp_enabled": False,
            "device_mesh": None, "moe_mesh": None, "ep_axis_name": None, "pp_axis_name": None, "foreach": True,
            "num_label_tokens": 7, "dp_group_size": 1, "expert_tp_replication_factor": 1,
            "use_torch_clip_grad_norm": False}
        assert training["max_grad_norm"] == 0.5 and training["ignore_index"] == -100 and "ep_axis_name" not in training
        assert training["grad_norm"] == float(norm) and float.fromhex(call["returned"]["hexadecimal"]) == float(norm)
        assert call["returned"]["type"] == "float64"
        report = gradclip("clip", dump, "-o", tmp_path / f"out{value}", reports=tmp_path)
        assert math.isclose(report["norm"]["total"], float(norm), rel_tol=1e-12)
    assert "max_grad_norm" not in manifest_of(dumps[2])["training"]


def test_an_older_automodel_without_a_keyword(monkeypatch, tmp_path):
    def scale_grads_and_clip_grad_norm(max_grad_norm, model_parts, *, norm_type=2.0):
        return torch.tensor(max_grad_norm * norm_type)
    home = published(monkeypatch, "nemo_automodel.components.training.utils",
                     scale_grads_and_clip_grad_norm=scale_grads_and_clip_grad_norm)
    with attach("automodel", tmp_path):
        assert home.scale_grads_and_clip_grad_norm(2.0, [model_with(1.0)]) == 4
    assert manifest_of(tmp_path / "step_000000")["training"] == {
        "max_grad_norm": 2.0, "norm_type": 2.0, "grad_norm": 4.0}


def test_nothing_of_recording_reaches_training(automodel, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    clip = automodel.recipes[0]
    with attach("automodel", tmp_path / "file") as attached:  # no directory can be made there
        model = model_with(3.0)
        norm = clip.scale_grads_and_clip_grad_norm(0.5, [model])
        assert math.isclose(norm, 3 * math.sqrt(6), rel_tol=1e-6) and not attached.recordings[0].ok
        assert math.isclose(float(reference_step.total_norm([model])), 0.5, rel_tol=1e-5)  # clipped all the same
        with pytest.raises(ValueError, match="as the framework would"):
            clip.scale_grads_and_clip_grad_norm(-1.0, [model])
        with pytest.raises(TypeError):
            clip.scale_grads_and_clip_grad_norm(0.5, [model], no_such_argument=1)
    with attach("automodel", tmp_path, step=lambda: 1 / 0):
        clip.scale_grads_and_clip_grad_norm(0.5, [model])
    assert "number of this step is not known" in caplog.text and sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_steps_that_are_due(automodel, tmp_path):
    running = iter(range(98, 110))
    with attach("automodel", tmp_path, steps=range(100, 102), step=lambda: next(running)):
        for _ in range(6):
            automodel.recipes[0].scale_grads_and_clip_grad_norm(0.5, [model_with(1.0)])
    assert sorted(dump.name for dump in tmp_path.iterdir()) == ["step_000100", "step_000101"]


# torchtitan -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def torchtitan(monkeypatch):
    def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None, pp_mesh=None,
                        ep_enabled=False):
        parameters = list(parameters)
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type, error_if_nonfinite, foreach)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
        return total

    utils = published(monkeypatch, "torchtitan.distributed.utils", clip_grad_norm_=clip_grad_norm_)

    def train_step(model_parts):  # as torchtitan.trainer calls it: dist_utils.clip_grad_norm_
        return utils.clip_grad_norm_((p for m in model_parts for p in m.parameters()), 1.0, norm_type="inf",
                                     foreach=True, pp_mesh=None, ep_enabled=False)
    return train_step


def test_torchtitan_gets_names_from_its_model_parts(torchtitan, tmp_path):
    parts = [model_with(2.0), model_with(4.0)]
    with pytest.raises(TypeError, match="trainer.model_parts"):
        attach("torchtitan", tmp_path)
    with attach("torchtitan", tmp_path, model_parts=lambda: parts):
        assert torchtitan(parts) == 4.0  # the generator arrives whole
    assert torch.allclose(parts[1].weight.grad, torch.ones(2, 2)) and (gradient(tmp_path / "step_000000") == 2.0).all()
    manifest = manifest_of(tmp_path / "step_000000")
    assert manifest["state"] == "before_clip" and len(manifest["parameters"]) == 4
    assert manifest["training"] == {"max_grad_norm": 1.0, "norm_type": "inf", "foreach": True, "pp_enabled": False,
                                    "grad_norm": 4.0}
    assert manifest["clip_call"]["arguments"]["parameters"] == ["<Parameter>"] * 4


# accelerate and transformers ------------------------------------------------------------------------------------------

class Accelerator:
    deepspeed = False

    def __init__(self, model, loss_scale):
        self._models, self.loss_scale = [model], loss_scale

    def unscale_gradients(self, optimizer=None):
        for model in self._models:
            for parameter in model.parameters():
                parameter.grad /= self.loss_scale

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        if self.deepspeed:
            return 3.0
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type)


@pytest.mark.parametrize("by_instance", [False, True])
def test_hf_is_recorded_after_unscaling(monkeypatch, tmp_path, by_instance):
    published(monkeypatch, "accelerate", Accelerator=Accelerator)
    original, model = Accelerator.clip_grad_norm_, model_with(64.0)
    accelerator = Accelerator(model, 32.0)
    attached = attach(accelerator if by_instance else "hf", tmp_path)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    attached.detach()
    assert Accelerator.clip_grad_norm_ is original and vars(accelerator).keys() == {"_models", "loss_scale"}
    assert (gradient(tmp_path / "step_000000") == 2.0).all()
    manifest = manifest_of(tmp_path / "step_000000")
    assert manifest["training"] == {"max_grad_norm": 1.0, "norm_type": 2, "grad_norm": float(norm)}
    assert math.isclose(float(norm), 2 * math.sqrt(6), rel_tol=1e-6)


def test_hf_trainer_clips_several_meshes_itself(monkeypatch, tmp_path):
    class Trainer:
        def _mixed_mesh_grad_norm(self, model, max_norm):
            return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    published(monkeypatch, "accelerate", Accelerator=Accelerator)
    published(monkeypatch, "transformers.trainer", Trainer=Trainer)
    with attach("hf", tmp_path):
        Trainer()._mixed_mesh_grad_norm(model_with(2.0), 1.0)
    assert (gradient(tmp_path / "step_000000") == 2.0).all()
    assert manifest_of(tmp_path / "step_000000")["clip_call"]["arguments"]["max_norm"] == 1.0


def test_deepspeed_shows_no_gradients(monkeypatch, tmp_path, caplog):
    published(monkeypatch, "accelerate", Accelerator=Accelerator)
    accelerator = Accelerator(model_with(1.0), 1.0)
    accelerator.deepspeed = True
    with attach("hf", tmp_path):
        assert accelerator.clip_grad_norm_([], 1.0) == 3.0
    assert "does not show" in caplog.text and not list(tmp_path.iterdir())


# An optimizer ---------------------------------------------------------------------------------------------------------

def test_an_optimizer_is_recorded_before_its_step(tmp_path):
    model = model_with(2.0)
    before = model.weight.detach().clone().numpy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(TypeError, match="model_parts"):
        attach(optimizer, tmp_path)
    with attach(optimizer, tmp_path, model_parts=model, training={"max_grad_norm": 1.0}):
        optimizer.step()
    optimizer.step()
    assert np.allclose(model.weight.detach().numpy(), before - 2.0) and len(list(tmp_path.iterdir())) == 1
    manifest = manifest_of(tmp_path / "step_000000")
    assert manifest["state"] == "after_clip" and manifest["training"] == {"max_grad_norm": 1.0}


def test_what_there_is_to_attach_to(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("nemo_automodel", "torchtitan", "accelerate")]:
        monkeypatch.delitem(sys.modules, name)
    for where in ("automodel", "hf"):
        with pytest.raises(ModuleNotFoundError, match="not loaded"):
            attach(where, tmp_path)
    with pytest.raises(TypeError, match="expected 'automodel'"):
        attach("something", tmp_path)
