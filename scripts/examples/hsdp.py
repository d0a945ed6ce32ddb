"""HSDP: two replicas of a model that two ranks shard each: FSDP2 on a mesh of two dimensions.

    python scripts/examples/hsdp.py OUT
"""

import fsdp
import torch
from example import run
from torch.distributed.device_mesh import init_device_mesh


def train(folder, *, every=False, compute=torch.float32):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return fsdp.train(folder, every=every, compute=compute, mesh=mesh)  # the loop is FSDP2's


if __name__ == "__main__":
    run(4, train)
