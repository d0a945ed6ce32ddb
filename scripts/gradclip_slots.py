"""Where a backward pass hands over a parameter's gradient, for each way of data parallelism. gradclip_microbatches'.

A slot is one parameter of this rank: the tensor at which a hook sees the gradient of one backward pass, how that is
described in a dump (Partial(avg) where ranks are still to be averaged), and whether it was reduced since.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from gradclip_record import DTensor, Shard, _local, named_parameters
from torch.distributed.tensor import Partial, Replicate


def slots_of(model_parts):
    """The slots of all parameters that the training step clips, in its order."""
    parts = [model_parts] if isinstance(model_parts, torch.nn.Module) else list(model_parts)
    modules = [module for part in parts for module in part.modules()]
    fsdp, ddp = _fsdp_parameters(modules), {}
    for module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            ddp.update(_averaged_by(module))
    slots = []
    for part, name, parameter in named_parameters(parts):
        if id(parameter) in fsdp:
            slot = _FsdpSlot(*fsdp[id(parameter)])
        elif id(parameter) in ddp:
            slot = _DdpSlot(parameter, *ddp[id(parameter)])
        else:
            slot = _Slot(parameter)
        slot.model_part, slot.name, slot.part = part, name, parts[part]
        slots.append(slot)
    return slots


def _fsdp_parameters(modules):
    """{id of a parameter: (FSDP2's own object for it, its group)}, sharded and unsharded alike."""
    found = {}
    for module in modules:
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None)  # in older PyTorch a state has one group
        for group in (groups if groups is not None else [getattr(state, "_fsdp_param_group", None)]):
            for unit in group.fsdp_params if group is not None else []:
                for tensor in (unit.sharded_param, getattr(unit, "_unsharded_param", None)):
                    if tensor is not None:
                        found[id(tensor)] = (unit, group)
    return found


class _Slot:
    """A parameter that no data-parallel ranks reduce: what its backward pass leaves is its gradient."""

    model_part = name = part = None

    def __init__(self, parameter):
        self.parameter = parameter

    def hook(self, capture, undo):
        undo.append(self.parameter.register_hook(capture).remove)

    def captured(self, gradient):
        """A copy on the host, and the placements of a DTensor."""
        if gradient.layout != torch.strided:
            raise TypeError(f"{self.name}: sparse gradients cannot be recorded")
        placements = tuple(gradient.placements) if isinstance(gradient, DTensor) else None
        return _local(gradient).to("cpu", copy=True), placements

    def described(self, captured):
        """(parameter, gradient) as gradclip_record.Held has them."""
        if captured is None:
            return self.parameter, None
        local, placements = captured
        if placements is None:
            return self.parameter, local
        return self.parameter, Shard(self.parameter.shape, local.dtype, self.parameter.device_mesh, placements, local)

    def types(self):
        """In which gradients are added and reduced, and stored: without FSDP, the parameter's."""
        return {key: _name(self.parameter.dtype) for key in ("reduce_dtype", "storage_dtype")}

    def reduced(self):
        """After a backward pass: did a reduction follow? None: not known."""
        return None

    def inside(self, module):
        return self.part is module or any(self.parameter is other for other in module.parameters())


class _DdpSlot(_Slot):
    """DistributedDataParallel averages plain parameters over its process group, after its last backward pass."""

    def __init__(self, parameter, module, kept):
        super().__init__(parameter)
        self.module, self.kept = module, kept

    def described(self, captured):
        if captured is None:
            return self.kept, None
        return self.kept, self.kept._replace(dtype=captured[0].dtype, placements=(Partial("avg"),), local=captured[0])

    def reduced(self):
        return bool(self.module.require_forward_param_sync)  # as the last forward pass found no_sync


def _averaged_by(module):
    """{id of a parameter: (the DistributedDataParallel module, the parameter as a tensor on the mesh of its ranks)}"""
    ranks = dist.get_process_group_ranks(module.process_group)
    mesh = SimpleNamespace(mesh=np.array(ranks), mesh_dim_names=("dp",), shape=(len(ranks),),
                           get_coordinate=lambda: [ranks.index(dist.get_rank())])
    ignored, found = set(getattr(module, "parameters_to_ignore", ())), {}
    for name, parameter in module.module.named_parameters():
        if isinstance(parameter, DTensor):
            raise NotImplementedError(f"{name}: DistributedDataParallel over DTensors cannot be recorded")
        if name not in ignored:
            found[id(parameter)] = module, Shard(parameter.shape, parameter.dtype, mesh, (Replicate(),))
    return found


class _FsdpSlot(_Slot):
    """FSDP2's backward pass ends in an unsharded parameter; it is made by the first forward pass and then stays."""

    def __init__(self, unit, group):
        self.unit, self.group = unit, group

    @property
    def parameter(self):
        return self.unit.sharded_param

    @property
    def leaf(self):
        return getattr(self.unit, "_unsharded_param", None)

    def hook(self, capture, undo):
        if self.leaf is not None:
            undo.append(self.leaf.register_hook(capture).remove)
            return
        make, handles = self.unit.init_unsharded_param, []

        def init_unsharded_param(*arguments, **named):
            made = make(*arguments, **named)
            if not handles and self.leaf is not None:
                handles.append(self.leaf.register_hook(capture))
            return made

        def restore():
            vars(self.unit).pop("init_unsharded_param", None)
            for handle in handles:
                handle.remove()
        self.unit.init_unsharded_param = init_unsharded_param
        undo.append(restore)

    def captured(self, gradient):
        """FSDP2 may ask autograd for a wider type than was computed in: narrowed again where that loses nothing."""
        local, placements = super().captured(self._own_slice(gradient))
        narrow = local.to(self._compute_dtype())
        if local.dtype != narrow.dtype and torch.equal(narrow.to(local.dtype), local):
            local = narrow
        return local, placements

    def _own_slice(self, gradient):
        """Of a gradient that every tp rank has whole, the part of the parameter's shard. Nothing is communicated."""
        if not isinstance(gradient, DTensor) or not isinstance(self.leaf, DTensor):
            return gradient
        kept = [mine if now.is_replicate() and mine.is_shard() else now
                for now, mine in zip(gradient.placements, self.leaf.placements)]
        with torch.no_grad():
            return gradient.redistribute(placements=kept) if kept != list(gradient.placements) else gradient

    def described(self, captured):
        kept = self.parameter
        if captured is None:
            return kept, None
        local, inner = captured
        return kept, Shard(kept.shape, local.dtype, kept.device_mesh, self._placements(inner or ()), local)

    def _placements(self, inner):
        """Of the unsharded gradient: still to be averaged over FSDP's own dimensions, else as autograd left it."""
        mesh = self.parameter.device_mesh
        whole = len(inner) == mesh.ndim  # given by DataParallelMeshDims, on the whole mesh
        outer = list(self.unit._dp_dim_indices) if whole else list(range(mesh.ndim - len(inner)))
        rest = iter(inner)
        addend = Partial(self._operation(math.prod(mesh.shape[d] for d in outer)))
        placements = []
        for d in range(mesh.ndim):
            own = next(rest) if whole or d not in outer else None
            placements.append(addend if d in outer else own)
        return tuple(placements)

    def _operation(self, ranks):
        factor = getattr(self.group, "gradient_divide_factor", None)
        if factor is None or factor == ranks:
            return "avg"
        if factor == 1:
            return "sum"
        raise ValueError(f"{self.name}: divided by {factor} over {ranks} ranks, which is no mean and no sum")

    def _compute_dtype(self):
        return getattr(self.unit, "param_dtype", None) or self.parameter.dtype

    def types(self):
        unit = self.unit
        if not hasattr(unit, "reduce_dtype"):
            return {}  # it has not run yet
        if hasattr(type(unit), "unsharded_grad_dtype"):
            reduce, storage = unit.unsharded_grad_dtype, unit.sharded_grad_dtype
        else:  # older PyTorch: the compute type, unless another was asked for
            reduce, storage = unit.reduce_dtype or self._compute_dtype(), self.parameter.dtype
        types = {"reduce_dtype": reduce, "storage_dtype": storage}
        return {key: _name(dtype) for key, dtype in types.items() if dtype is not None}

    def reduced(self):
        if getattr(self.group, "_partial_reduce_output", None) is not None:
            raise RuntimeError(f"{self.name} was reduced over dp_shard alone (set_requires_all_reduce(False)), which "
                               "no replay has")
        waiting = getattr(self.leaf, "grad", None) is not None
        return not (waiting or getattr(self.unit, "unsharded_accumulated_grad", None) is not None)

    def inside(self, module):
        return self.part is module or any(self.unit._module_info.module is other for other in module.modules())


def _name(dtype):
    return str(dtype).removeprefix("torch.")
