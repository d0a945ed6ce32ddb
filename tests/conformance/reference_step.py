"""The training step that gradclip's `automodel` numerics explain, re-enacted with public PyTorch functions.

NeMo Automodel scales gradients by label tokens and by the expert ratio, then clips by one norm that it forms group by
group. What is re-enacted here is its order of operations and of roundings; `total_norm` and `clip` stand alone, so
that a test can take one without the other.
"""

import math
import re

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

EXPERT_NAME = re.compile(r"(^|\.)mlp\.experts\.(gate_up_linear|down_linear)\.(weight|bias)\d+")


@torch.no_grad()
def scale(model_parts, *, pp_enabled=False, moe_mesh=None, ep_axis_name=None, num_label_tokens=None,
          dp_group_size=None, expert_tp_replication_factor=1, **_):
    """Two divisions in place, each with its own rounding: all by tokens per rank, then experts by their ratio."""
    tokens = None
    if pp_enabled and num_label_tokens and dp_group_size:
        tokens = num_label_tokens / dp_group_size
    ratio = None
    if moe_mesh is not None and dp_group_size is not None:
        shards = moe_mesh["ep_shard"].size() if "ep_shard" in moe_mesh.mesh_dim_names else 1
        ratio = float(dp_group_size) / float(shards) * float(expert_tp_replication_factor)
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is None:
                continue
            if tokens is not None:
                parameter.grad.div_(tokens)
            on_expert_axis = (isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
                              and ep_axis_name and ep_axis_name in parameter.device_mesh.mesh_dim_names)
            if ratio is not None and (on_expert_axis or EXPERT_NAME.search(name)):
                parameter.grad.div_(ratio)


def groups_of(model_parts):
    """Parameters with a gradient, by mesh object and the parameter's placements; plain tensors are one group."""
    groups = {}
    for part in model_parts:
        for parameter in part.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                sharded = isinstance(parameter, DTensor)
                key = (id(parameter.device_mesh), tuple(map(str, parameter.placements))) if sharded else None
                groups.setdefault(key, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def total_norm(model_parts, *, norm_type=2.0, pp_enabled=False, device_mesh=None, pp_axis_name=None, **_):
    """The float64 norm that this rank computes. A collective: every rank takes part."""
    norms = [_group_norm(group, norm_type) for group in groups_of(model_parts)]
    total = torch.zeros((), dtype=torch.float64)
    if norms:
        stacked = torch.stack(norms)
        total = stacked.max() if math.isinf(norm_type) else _from_parts(stacked, stacked.abs().max(), norm_type)
    if pp_enabled:
        stages = device_mesh[pp_axis_name].get_group()
        largest = total.abs().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=stages)
        if math.isinf(norm_type):
            return largest
        power = total.div(_divisor(largest)).pow(norm_type)
        dist.all_reduce(power, group=stages)
        total = largest * power.pow(1.0 / norm_type)
    return total


def _group_norm(group, norm_type):
    first = group[0]
    partial = isinstance(first, DTensor) and any(isinstance(p, Partial) for p in first.placements)
    process_groups = []
    if isinstance(first, DTensor) and not partial:
        process_groups = [first.device_mesh.get_group(dim) for dim, p in enumerate(first.placements)
                          if not isinstance(p, Replicate)]

    def local_gradients():
        for parameter in group:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor() if partial else gradient.to_local()
            if gradient.numel():
                yield gradient.abs()

    def reduced(value, op):
        for process_group in process_groups:
            dist.all_reduce(value, op=op, group=process_group)
        return value

    largest = torch.zeros((), dtype=torch.float64)
    for magnitude in local_gradients():
        largest = torch.maximum(largest, magnitude.max().double())
    reduced(largest, dist.ReduceOp.MAX)
    if math.isinf(norm_type):
        return largest
    power = torch.zeros((), dtype=torch.float64)
    for magnitude in local_gradients():
        # Rounded to the gradient's type twice: a 0-dim float64 divisor promotes nothing but a 0-dim gradient.
        ratio = magnitude.div(_divisor(largest))
        power += (ratio.square() if norm_type == 2.0 else ratio.pow(norm_type)).sum(dtype=torch.float64)
    reduced(power, dist.ReduceOp.SUM)
    return largest * power.pow(1.0 / norm_type)


def _from_parts(norms, largest, norm_type):
    return largest * norms.div(_divisor(largest)).pow(norm_type).sum().pow(1.0 / norm_type)


def _divisor(largest):
    usable = torch.isfinite(largest) & largest.ne(0)
    return torch.where(usable, largest, torch.ones_like(largest))


@torch.no_grad()
def clip(model_parts, max_grad_norm, total, foreach=True):
    """PyTorch's own clipping with a given float64 total, group by group: it cannot mix meshes."""
    for group in groups_of(model_parts):
        torch.nn.utils.clip_grads_with_norm_(group, max_grad_norm, total, foreach)


def step(model_parts, max_grad_norm, *, foreach=True, use_torch_clip_grad_norm=False, **arguments):
    """Scale, norm, clip; returns the norm before clipping, as the training loop logs it."""
    scale(model_parts, **arguments)
    if max_grad_norm is None:
        return torch.zeros((), dtype=torch.float64)
    parameters = [p for part in model_parts for p in part.parameters() if p.requires_grad]
    plain = not any(isinstance(p, DTensor) or isinstance(p.grad, DTensor) for p in parameters)
    if use_torch_clip_grad_norm and plain and not arguments.get("pp_enabled"):
        norm_type = arguments.get("norm_type", 2.0)
        return torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm, norm_type=norm_type, foreach=foreach)
    total = total_norm(model_parts, **arguments)
    clip(model_parts, max_grad_norm, total, foreach)
    return total
