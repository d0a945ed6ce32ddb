"""A pipeline of two stages, each sharded by FSDP2 over two ranks; four chunks a step. Losses are summed, and gradients
divided by the label tokens before clipping, as NeMo Automodel does it: `gradclip clip` divides likewise.

    python scripts/examples/pipeline.py OUT
"""

import torch
from example import MAX_NORM, VOCABULARY, WIDTH, Block, batches, clip_, dist, label_tokens, run, seeded, summed_loss
from gradclip_microbatches import record_microbatches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

CHUNKS = 4


class Stage(nn.Module):
    """Half of the model; names are the whole model's."""

    def __init__(self, number):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.blocks = nn.ModuleDict({str(number): Block()})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if number == 1 else None

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def train(folder, *, every=False, compute=torch.float32, shard=True):
    ranks = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=("pp", "dp_shard"))
    number, rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
    model = seeded(Stage(number))
    if shard:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=summed_loss, scale_grads=False)
    steps = 2 if every else 1  # every step of the schedule ends in a reduction
    microbatches = batches(rank, steps * CHUNKS)
    tokens = label_tokens(ranks, steps * CHUNKS)
    training = {"max_grad_norm": MAX_NORM, "norm_type": 2.0, "pp_enabled": True, "pp_axis_name": "pp",
                "num_label_tokens": tokens, "dp_group_size": ranks}
    with record_microbatches(folder, model, step=1, device_mesh=mesh, training=training) as loop:
        for step in range(steps):
            chunks = microbatches[step * CHUNKS:(step + 1) * CHUNKS]
            labels = [of for _, of in chunks]
            with loop.schedule_step(schedule, labels=labels if number == 1 else None):
                if number == 0:
                    schedule.step(torch.cat([inputs for inputs, _ in chunks]))
                else:
                    schedule.step(target=torch.cat(labels))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad /= tokens / ranks
    grad_norm = clip_(list(model.parameters()), pipeline=mesh.get_group("pp"))
    loop.log(grad_norm)
    return grad_norm


if __name__ == "__main__":
    run(4, train)
