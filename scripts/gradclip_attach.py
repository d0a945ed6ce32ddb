"""Record the gradients that a framework clips, by wrapping its own clipping call.

    from gradclip_attach import attach

    attached = attach("automodel", "dumps", steps={100, 101})                        # NeMo Automodel
    attached = attach("torchtitan", "dumps", model_parts=lambda: trainer.model_parts)
    attached = attach("hf", "dumps")                                                 # accelerate and transformers
    attached = attach(optimizer, "dumps", model_parts=model)                         # any optimizer, before its step
    ...
    attached.detach()                                                                # or: with attach(...):

Before each call that is due, on every rank, dumps/step_000100 is recorded (gradclip_record.record_gradients). The
manifest gets the call's arguments under "clip_call", those that gradclip knows under "training" too, and the norm that
the call returned. The call itself gets its own arguments, its result is handed on, what it raises passes through.

Where: NeMo Automodel's recipes import the function by name, so it is replaced in every recipe module that is loaded and
in the module that defines it, for later imports; attach after importing the recipe. torchtitan calls its function as an
attribute of the module. Accelerator.clip_grad_norm_ first divides by the loss scale of float16: recorded is what that
leaves. DeepSpeed clips gradients that nobody sees: nothing is recorded. An optimizer's step comes after clipping: the
dump is "after_clip" unless `state` says otherwise, and there is no call to store.
"""

import functools
import inspect
import logging
import sys
from pathlib import Path

import torch
from gradclip_record import DTensor, _plain, finish, record_gradients
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["attach", "Attachment"]

log = logging.getLogger("gradclip_record")

# What NeMo Automodel's function is given and the manifest's "training" has under the same name.
AUTOMODEL_ARGUMENTS = ("max_grad_norm", "norm_type", "pp_enabled", "pp_axis_name", "ep_axis_name", "foreach",
                       "num_label_tokens", "dp_group_size", "expert_tp_replication_factor", "use_torch_clip_grad_norm")


def attach(where, directory, *, steps=None, step=None, model_parts=None, training=None, **how):
    """Record at every clipping call that is due; returns an Attachment, whose detach() ends it.

    where        "automodel", "torchtitan", "hf", an accelerate.Accelerator, or a torch.optim.Optimizer
    directory    each step gets a folder in it, step_000100
    steps        the numbers of the steps to record, any container; default: all
    step         a function that tells the number of the running step; default: calls are counted, from 0
    model_parts  the modules, or a function that returns them, where the call does not tell
    training     numbers that the call does not tell, such as those for scaling
    how          device_mesh, moe_mesh, copies, tied, experts, communicate, ..., as record_gradients has them

    Raises TypeError or ModuleNotFoundError at once where there is nothing to attach to; nothing is raised later on.
    """
    common = {"directory": Path(directory), "steps": steps, "step": step, "training": training or {}, "how": how,
              "model_parts": model_parts}
    if isinstance(where, torch.optim.Optimizer):
        attachment = _OptimizerAttachment(where, **common)
    elif where == "automodel":
        attachment = _AutomodelAttachment(**common)
    elif where == "torchtitan":
        attachment = _TorchtitanAttachment(**common)
    elif where == "hf" or hasattr(where, "clip_grad_norm_"):
        attachment = _AccelerateAttachment(None if where == "hf" else where, **common)
    else:
        raise TypeError(f"cannot attach to {where!r}: expected 'automodel', 'torchtitan', 'hf', an Accelerator or an "
                        "optimizer")
    attachment.attach()
    return attachment


class Attachment:
    """A clipping call that is wrapped. `recordings`: of the steps so far."""

    state = "before_clip"

    def __init__(self, directory, steps, step, training, how, model_parts):
        self.recordings = []
        self._directory, self._steps, self._step, self._training, self._how = directory, steps, step, training, how
        self._model_parts, self._calls, self._running, self._replaced = model_parts, 0, False, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()

    def detach(self):
        """Put back what was there. What somebody else wrapped since stays wrapped, and records nothing."""
        for owner, name, original, wrapper, own in reversed(self._replaced):
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original) if own else delattr(owner, name)
        self._replaced = None

    # What each framework tells ---------------------------------------------------------------------------------------

    def attach(self):
        raise NotImplementedError

    def numbers(self, arguments):
        """The manifest's "training" by the call's arguments."""
        raise NotImplementedError

    def parts(self, _):
        return self._model_parts() if callable(self._model_parts) and not isinstance(
            self._model_parts, torch.nn.Module) else self._model_parts

    def meshes(self, _):
        return {}

    # The wrapped call ------------------------------------------------------------------------------------------------

    def replace(self, owner, name):
        original, own = getattr(owner, name), name in vars(owner)

        @functools.wraps(original)
        def wrapper(*arguments, **named):
            if self._replaced is None or self._running:
                return original(*arguments, **named)
            self._running = True  # a clipping function that calls another one is one call
            try:
                return self.called(original, arguments, named)
            finally:
                self._running = False

        setattr(owner, name, wrapper)
        self._replaced.append((owner, name, original, wrapper, own))
        return wrapper

    def called(self, original, arguments, named):
        number = self._due()
        if number is None:
            return original(*arguments, **named)
        bound = self._bound(original, arguments, named)
        if bound is not None:
            arguments, named = bound.args, bound.kwargs  # an iterator of parameters became a list
        recording = self.record(number, original, bound)
        returned = original(*arguments, **named)
        self.store_norm(recording, returned)
        return returned

    def record(self, number, function, bound):
        """Before the call. A recording that failed is one whose `ok` is false."""
        try:
            arguments = {} if bound is None else dict(bound.arguments)
            training = {key: value for key, value in self.numbers(arguments).items() if value is not None}
            how = {**self.meshes(arguments), "state": self.state, **self._how}
            parts, more = self.parts(arguments), {"clip_call": _described_call(function, arguments)}
        except Exception:  # noqa: BLE001 - training must go on; record_gradients tells the other ranks
            log.exception("gradclip: this clipping call cannot be read")
            training, how, parts, more = {}, self._how, None, None
        recording = record_gradients(self._directory / f"step_{number:06d}", parts, step=number,
                                     training={**training, **self._training}, more=more, **how)
        self.recordings.append(recording)
        return recording

    def store_norm(self, recording, returned):
        """After the call. A norm that is a DTensor is reduced first, by all ranks alike."""
        try:
            value = returned.full_tensor() if isinstance(returned, DTensor) else returned
            if value is None or recording is None or not recording.ok or recording.rank != 0:
                return
            kind = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else type(value).__name__
            value = float(value)
            finish(recording.path, grad_norm=value,
                   more={"clip_call": {"returned": {"value": value, "hexadecimal": value.hex(), "type": kind}}})
        except Exception:  # noqa: BLE001
            log.exception("gradclip: the norm that the call returned is not recorded")

    def _due(self):
        """The number of the running step if it is to be recorded."""
        try:
            number, self._calls = int(self._step()) if self._step else self._calls, self._calls + 1
            return number if self._steps is None or number in self._steps else None
        except Exception:  # noqa: BLE001
            log.exception("gradclip: the number of this step is not known; it is not recorded")
            return None

    @staticmethod
    def _bound(function, arguments, named):
        """The arguments by name, with the defaults of this version of the function; None if they do not fit it."""
        try:
            bound = inspect.signature(function).bind(*arguments, **named)
        except (TypeError, ValueError):
            log.exception("gradclip: the arguments of the clipping call cannot be read")
            return None
        for name, value in bound.arguments.items():
            if inspect.isgenerator(value) or isinstance(value, (map, filter)):
                bound.arguments[name] = list(value)
        bound.apply_defaults()
        return bound


class _AutomodelAttachment(Attachment):
    state = "before_scale"
    NAME, HOME = "scale_grads_and_clip_grad_norm", "nemo_automodel.components.training.utils"

    def attach(self):
        original = getattr(_loaded(self.HOME), self.NAME)
        wrapper = self.replace(sys.modules[self.HOME], self.NAME)
        for module in [one for name, one in sys.modules.items() if name.startswith("nemo_automodel.")]:
            if vars(module).get(self.NAME) is original:
                setattr(module, self.NAME, wrapper)
                self._replaced.append((module, self.NAME, original, wrapper, True))

    def numbers(self, arguments):
        return {key: arguments.get(key) for key in AUTOMODEL_ARGUMENTS}

    def parts(self, arguments):
        return arguments["model_parts"]

    def meshes(self, arguments):
        return {key: arguments.get(key) for key in ("device_mesh", "moe_mesh")}


class _TorchtitanAttachment(Attachment):
    def attach(self):
        if self._model_parts is None:
            raise TypeError("torchtitan clips a list of parameters without names: give "
                            "model_parts=lambda: trainer.model_parts")
        self.replace(_loaded("torchtitan.distributed.utils"), "clip_grad_norm_")

    def numbers(self, arguments):
        axes = getattr(arguments.get("pp_mesh"), "mesh_dim_names", None) or ()
        mesh = self._how.get("device_mesh")
        pipeline = next((axis for axis in axes if mesh is not None and axis in (mesh.mesh_dim_names or ())), None)
        if axes and pipeline is None:
            log.warning("gradclip: pipeline stages; give device_mesh=parallel_dims.world_mesh to see each rank's norm")
        return {**_norm_numbers(arguments), "pp_enabled": pipeline is not None, "pp_axis_name": pipeline}


class _AccelerateAttachment(Attachment):
    def __init__(self, accelerator, **common):
        super().__init__(**common)
        self._accelerator = accelerator

    def attach(self):
        if self._accelerator is not None:
            self.replace(self._accelerator, "clip_grad_norm_")
            return
        self.replace(_loaded("accelerate").Accelerator, "clip_grad_norm_")
        # Trainer clips gradients on several meshes by itself.
        trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
        if hasattr(trainer, "_mixed_mesh_grad_norm"):
            self.replace(trainer, "_mixed_mesh_grad_norm")

    def numbers(self, arguments):
        return _norm_numbers(arguments)

    def parts(self, arguments):
        if self._model_parts is not None:
            return super().parts(arguments)
        if "model" in arguments:
            return [arguments["model"]]
        return list((arguments.get("self") or self._accelerator)._models)

    def called(self, original, arguments, named):
        """Recorded is what unscale_gradients leaves, in the middle of the call."""
        accelerator = self._accelerator if self._accelerator is not None else arguments[0]
        if not hasattr(accelerator, "unscale_gradients"):
            return super().called(original, arguments, named)
        number = self._due()
        if number is None:
            return original(*arguments, **named)
        bound, made = self._bound(original, arguments, named), []
        if bound is not None:
            arguments, named = bound.args, bound.kwargs
        unscale, own = accelerator.unscale_gradients, "unscale_gradients" in vars(accelerator)

        def unscale_gradients(*of, **them):
            result = unscale(*of, **them)
            if not made:
                made.append(self.record(number, original, bound))
            return result
        accelerator.unscale_gradients = unscale_gradients
        try:
            returned = original(*arguments, **named)
        finally:
            if own:
                accelerator.unscale_gradients = unscale
            else:
                del accelerator.unscale_gradients
        if not made:
            log.warning("gradclip: this accelerator clips gradients that it does not show; nothing is recorded")
        self.store_norm(made[0] if made else None, returned)
        return returned


class _OptimizerAttachment(Attachment):
    state = "after_clip"

    def __init__(self, optimizer, **common):
        super().__init__(**common)
        self._optimizer = optimizer

    def attach(self):
        if self._model_parts is None:
            raise TypeError("an optimizer has parameters without names: give model_parts")
        self._handle = self._optimizer.register_step_pre_hook(self._before_step)

    def detach(self):
        self._handle.remove()

    def numbers(self, _):
        return {}

    def _before_step(self, *_):
        number = self._due()
        if number is not None:
            self.record(number, self._optimizer.step, None)


def _loaded(name):
    """A module that the training script has imported."""
    if name not in sys.modules:
        raise ModuleNotFoundError(f"{name} is not loaded; attach after importing what trains")
    return sys.modules[name]


def _norm_numbers(arguments):
    norm_type = arguments.get("norm_type")
    return {"max_grad_norm": arguments.get("max_norm"), "foreach": arguments.get("foreach"),
            "norm_type": float(norm_type) if isinstance(norm_type, str) else norm_type}


def _described_call(function, arguments):
    return {"function": f"{function.__module__}.{function.__qualname__}",
            "arguments": {name: _described(value) for name, value in arguments.items() if name != "self"}}


def _described(value):
    """As it is where JSON has it; of tensors, modules and meshes, what they are."""
    if isinstance(value, DeviceMesh):
        return {"dim_names": list(value.mesh_dim_names or ()), "ranks": value.mesh.tolist()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return _plain(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() == 1:
        return _plain(value)
    if isinstance(value, (list, tuple)):
        many = f"<{len(value)} of {type(value[0]).__name__}>" if len(value) > 16 else None
        return many or [_described(one) for one in value]
    return f"<{type(value).__name__}>"
