"""FSDP2 over tensor parallelism: a mesh of 2 x 2, norms in sequence parallel, whose gradients are sums over tp.

    python scripts/examples/fsdp_tp.py OUT
"""

import torch
from example import MAX_NORM, Model, batches, clip_, label_tokens, reduce_after, run, seeded, summed_loss
from fsdp import sharded
from gradclip_microbatches import record_microbatches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

MICROBATCHES = 3


def train(folder, *, every=False, compute=torch.float32):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = seeded(Model())
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {
            "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1))})
    parallelize_module(model, mesh["tp"], {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    sharded(model, mesh["dp_shard"], compute)
    ranks, rank = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
    tokens = label_tokens(ranks, MICROBATCHES)
    with record_microbatches(folder, model, step=1, device_mesh=mesh,
                             training={"max_grad_norm": MAX_NORM, "norm_type": 2.0}) as loop:
        for k, (inputs, labels) in enumerate(batches(rank, MICROBATCHES)):
            synchronise = every or k + 1 == MICROBATCHES
            reduce_after(model, synchronise)
            with loop.microbatch(labels=labels):
                logits = model(inputs)
                logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
                (summed_loss(logits, labels) / tokens * ranks).backward()
    grad_norm = clip_(list(model.parameters()))
    loop.log(grad_norm)
    return grad_norm


if __name__ == "__main__":
    run(4, train)
