"""DistributedDataParallel: two ranks, three microbatches, no_sync() before the last one.

    python scripts/examples/ddp.py OUT
"""

import contextlib

import torch
from example import MAX_NORM, Model, batches, clip_, dist, label_tokens, run, seeded, summed_loss
from gradclip_microbatches import record_microbatches
from torch.nn.parallel import DistributedDataParallel

MICROBATCHES = 3


def train(folder, *, every=False, compute=torch.float32):
    model = DistributedDataParallel(seeded(Model()).to(compute))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens = label_tokens(ranks, MICROBATCHES)
    with record_microbatches(folder, model, step=1, training={"max_grad_norm": MAX_NORM, "norm_type": 2.0}) as loop:
        for k, (inputs, labels) in enumerate(batches(rank, MICROBATCHES)):
            synchronise = every or k + 1 == MICROBATCHES
            with loop.microbatch(labels=labels), contextlib.nullcontext() if synchronise else model.no_sync():
                (summed_loss(model(inputs), labels) / tokens * ranks).backward()
    grad_norm = clip_(list(model.parameters()))
    loop.log(grad_norm)
    return grad_norm


if __name__ == "__main__":
    run(2, train)
