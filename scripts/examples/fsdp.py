"""FSDP2: two ranks shard a model, three microbatches, one reduction at the last one.

    python scripts/examples/fsdp.py OUT
"""

import torch
from example import MAX_NORM, Model, batches, clip_, dist, label_tokens, reduce_after, run, seeded, summed_loss
from gradclip_microbatches import record_microbatches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

MICROBATCHES = 3


def sharded(model, mesh, compute):
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(folder, *, every=False, compute=torch.float32, mesh=None):
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model, ranks, rank = sharded(seeded(Model()), mesh, compute), mesh.size(), dist.get_rank()
    tokens = label_tokens(ranks, MICROBATCHES)
    with record_microbatches(folder, model, step=1, device_mesh=mesh,
                             training={"max_grad_norm": MAX_NORM, "norm_type": 2.0}) as loop:
        for k, (inputs, labels) in enumerate(batches(rank, MICROBATCHES)):
            synchronise = every or k + 1 == MICROBATCHES
            reduce_after(model, synchronise)
            with loop.microbatch(labels=labels, first_microbatch=k == 0, optimizer_step=k + 1 == MICROBATCHES):
                (summed_loss(model(inputs), labels) / tokens * ranks).backward()  # FSDP2 averages over the ranks
    grad_norm = clip_(list(model.parameters()))
    loop.log(grad_norm)
    return grad_norm


if __name__ == "__main__":
    run(2, train)
