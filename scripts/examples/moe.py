"""A mixture of experts: four data-parallel ranks, whose experts are cut over ep = 2 and sharded by FSDP2 over
ep_shard = 2. An expert sees the tokens of all ranks of its ep group, so its mean is over ep_shard alone, and before
clipping it is divided by dp_group_size / ep_shard = 2: by NeMo Automodel, by this example and by `gradclip clip`.

    python scripts/examples/moe.py OUT
"""

import torch
from example import (
    HIDDEN, MAX_NORM, WIDTH, Model, batches, clip_, dist, label_tokens, reduce_after, run, seeded, summed_loss)
from gradclip_microbatches import record_microbatches
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

MICROBATCHES, EXPERTS = 3, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x, weights):
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return torch.einsum("teh,ehw,te->tw", torch.tanh(torch.einsum("tw,ewh->teh", x, up)), down, weights)


class MoeBlock(nn.Module):
    """Every expert works on every token, weighted by the router: tokens travel to experts and results back."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.ep = Experts(), None

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        group, mine = self.ep.get_group(), EXPERTS // self.ep.size()
        everyone = collectives.all_gather_tensor_autograd(tokens, 0, group)
        columns = collectives.all_gather_tensor_autograd(weights, 0, group)
        parts = self.experts(everyone, columns[:, self.ep.get_local_rank() * mine:][:, :mine])
        mixed = collectives.reduce_scatter_tensor_autograd(parts, "sum", 0, group)
        return x + mixed.view_as(x)


def train(folder, *, every=False, compute=torch.float32):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    moe_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    model = seeded(Model(blocks=1, make_block=MoeBlock))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.ep = moe_mesh["ep"]
        for name, parameter in list(block.experts.named_parameters()):
            setattr(block.experts, name, nn.Parameter(distribute_tensor(parameter.data, moe_mesh["ep"], [Shard(0)])))
        fully_shard(block.experts, mesh=moe_mesh["ep_shard"], shard_placement_fn=lambda _: Shard(1), mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    tokens = label_tokens(4, MICROBATCHES)
    training = {"max_grad_norm": MAX_NORM, "norm_type": 2.0, "ep_axis_name": "ep", "dp_group_size": 4}
    with record_microbatches(folder, model, step=1, device_mesh=mesh, moe_mesh=moe_mesh, training=training) as loop:
        for k, (inputs, labels) in enumerate(batches(dist.get_rank(), MICROBATCHES)):
            synchronise = every or k + 1 == MICROBATCHES
            reduce_after(model, synchronise)
            with loop.microbatch(labels=labels):
                (summed_loss(model(inputs), labels) / tokens * 4).backward()
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    with torch.no_grad():
        for parameter in experts:
            parameter.grad /= 4 / moe_mesh["ep_shard"].size()
    grad_norm = clip_(experts, [parameter for name, parameter in model.named_parameters() if ".experts." not in name])
    loop.log(grad_norm)
    return grad_norm


if __name__ == "__main__":
    run(4, train)
