"""Save what Megatron-LM's distributed optimizer holds of one step's gradients, for gradclip_convert.py from-megatron.

Every rank calls it after finalize_model_grads, when its part of each gradient buffer is reduced, and before the
optimizer's step. Nothing is communicated; each rank writes a file of its own parts, padding included:

    from megatron.core import parallel_state as mpu
    from gradclip_megatron import save_flat_gradients
    save_flat_gradients(
        f"gradients/rank_{torch.distributed.get_rank()}.pt", optimizer, model,
        groups={"dense": {"data": mpu.get_data_parallel_group(with_context_parallel=True),
                          "tensor": mpu.get_tensor_model_parallel_group()},
                "expert": {"data": mpu.get_expert_data_parallel_group(),
                           "tensor": mpu.get_expert_tensor_parallel_group(),
                           "expert": mpu.get_expert_model_parallel_group()}},   # only where there are experts
        pipeline=mpu.get_pipeline_model_parallel_group())

Needs torch alone. Copy it next to the training script.
"""

import torch
import torch.distributed as dist


def save_flat_gradients(path, optimizer, model_chunks, *, groups, pipeline=None, rank=None, world_size=None):
    """Write this rank's file.

    optimizer      DistributedOptimizer, or the ChainedOptimizer of several (dense and expert parameters)
    model_chunks   the model parts of this rank, in the order of the training step: what get_model returned
    groups         as above, process groups or lists of ranks
    pipeline       the pipeline's group, or its ranks; None without one
    """
    index, parameters = {}, []
    for part, chunk in enumerate(model_chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and parameter not in index:
                index[parameter] = len(parameters)
                parameters.append(_description(name, part, parameter))
    buffers = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for buffer, ranges_by_dtype in zip(each.buffers, each.gbuf_ranges):
            (ranges,) = ranges_by_dtype.values()  # one type of parameters and gradients for each buffer
            group = buffer.data_parallel_group
            buffers.append([{"grad_data": _own_part(bucket.grad_data, group.rank(), group.size()),
                             "param_map": {index[parameter]: _numbers(row)
                                           for parameter, row in bucket_ranges["param_map"].items()}}
                            for bucket, bucket_ranges in zip(buffer.buckets, ranges)])
    rank = dist.get_rank() if rank is None else rank
    torch.save({"format": "gradclip.megatron", "rank": rank,
                "world_size": dist.get_world_size() if world_size is None else world_size,
                "groups": {kind: {axis: _ranks(group) for axis, group in axes.items()}
                           for kind, axes in groups.items()},
                "pipeline": [rank] if pipeline is None else _ranks(pipeline),
                "parameters": parameters, "buffers": buffers}, path)


def _description(name, part, parameter):
    """What the flat parts do not tell. Attributes are those that Megatron-LM sets on its parameters."""
    if getattr(parameter, "partition_stride", 1) != 1:
        raise ValueError(f"{name}: a partition_stride of {parameter.partition_stride} is no slice of one dimension")
    sliced = getattr(parameter, "tensor_model_parallel", False)
    shared = getattr(parameter, "shared_embedding", False) or getattr(parameter, "shared", False)
    return {"name": name.removeprefix("module.").removeprefix("module."), "model_part": part,
            "shape": list(parameter.shape), "partition_dim": parameter.partition_dim if sliced else -1,
            "expert": not getattr(parameter, "allreduce", True), "tied": "embedding" if shared else None}


def _own_part(data, rank, size):
    """A copy, as torch.save would write all of the buffer that a view looks at."""
    part = data.numel() // size
    return data[rank * part:(rank + 1) * part].detach().cpu().clone()


def _numbers(ranges):
    return {key: (found.start, found.end) for key, found in ranges.items()}


def _ranks(group):
    return list(group) if isinstance(group, (list, tuple)) else dist.get_process_group_ranks(group)
