"""Accumulation loops on real PyTorch, recorded: the examples' layouts, and what no example shows.

    python accumulation_cases.py RANK PORT FOLDER CASE...

is one of four processes; a case of w ranks takes part with the first w, in a process group of its own. Each leaves
FOLDER/<case> as the loop recorded it. What rank 0 knows besides (the norm that was logged, gradients that PyTorch
finds by other ways) is in FOLDER/<case>.npz.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "examples")]
WORLD = 4


def by_name(folder):
    """{case: (ranks, function)}"""
    import ddp
    import fsdp
    import fsdp_tp
    import hsdp
    import moe
    import pipeline
    import torch
    bfloat16 = {"compute": torch.bfloat16}
    cases = {
        "corner": (2, corner), "sum_order": (4, sum_order), "fsdp_4": (4, fsdp.train), "failure": (2, failure),
        "pipeline_plain": (2, lambda to: pipeline.train(to, shard=False)),
        "ddp": (2, ddp.train), "ddp_bfloat16": (2, lambda to: ddp.train(to, **bfloat16))}
    for name, ranks, train in (("fsdp", 2, fsdp.train), ("hsdp", 4, hsdp.train), ("fsdp_tp", 4, fsdp_tp.train),
                               ("pipeline", 4, pipeline.train), ("moe", 4, moe.train)):
        cases[name] = (ranks, train)
        cases[f"{name}_every"] = (ranks, lambda to, train=train: train(to, every=True))
        cases[f"{name}_bfloat16"] = (ranks, lambda to, train=train: train(to, **bfloat16))
        cases[f"{name}_every_bfloat16"] = (ranks, lambda to, train=train: train(to, every=True, **bfloat16))
    return cases


# What no example shows -----------------------------------------------------------------------------------------------

def corner(folder):
    """A unit that one microbatch alone uses, a parameter that none uses, one that each uses three times."""
    import torch
    import torch.distributed as dist
    from gradclip_microbatches import record_microbatches
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Corner(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.rare, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(1))  # fewer elements than ranks

        def forward(self, x, k):
            for _ in range(3):
                x = torch.tanh(self.often(x)) * self.scale
            return self.rare(x) if k == 1 else x

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(3)
    model = Corner()
    for part in (model.often, model.rare, model.never):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    with record_microbatches(folder, model, step=1, device_mesh=mesh) as loop:
        for k in range(3):
            model.set_requires_gradient_sync(k == 2)
            model.set_is_last_backward(k == 2)
            with loop.microbatch():
                model(torch.randn(4, 3), k).square().sum().backward()
    units = [unit for group in (module._get_fsdp_state()._fsdp_param_groups for module in model.modules()
                                if hasattr(module, "_get_fsdp_state")) for one in group for unit in one.fsdp_params]
    assert not any("init_unsharded_param" in vars(unit) for unit in units)
    assert all(not unit._unsharded_param._backward_hooks for unit in units if hasattr(unit, "_unsharded_param"))
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()


def sum_order(folder):
    """One weight, one row on each of four ranks; each rank's gradient is 1 on rank 0 and 2^-24 on the others."""
    import torch
    import torch.distributed as dist
    from gradclip_microbatches import record_microbatches
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    model = fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh)
    with record_microbatches(folder, model, step=1, device_mesh=mesh) as loop, loop.microbatch():
        model(torch.tensor([[1.0 if dist.get_rank() == 0 else 2.0**-24]])).sum().backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()


def failure(folder):
    """Rank 1 cannot write; neither rank waits for the other, and both go on training."""
    import gradclip_record
    import torch
    import torch.distributed as dist
    from gradclip_microbatches import record_microbatches
    from torch import nn
    model, write = nn.Linear(2, 2), gradclip_record._write_gradient
    gradclip_record._write_gradient = None if dist.get_rank() == 1 else write
    with record_microbatches(folder, model, step=1) as loop, loop.microbatch():
        model(torch.ones(1, 2)).sum().backward()
    gradclip_record._write_gradient = write
    assert not loop.ok  # nor rank 0's: the dump is not whole
    loop.log(1.0)
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return ranks


def tokens(to):
    """The examples' model and batches on one rank: the mean over all label tokens, and the mean of batches' means."""
    import numpy as np
    from example import Model, batches, seeded, summed_loss
    found = {}
    for kind in ("global_mean", "mean_of_means"):
        model = seeded(Model())
        losses = [(summed_loss(model(inputs), labels), int((labels != -100).sum()))
                  for rank in range(2) for inputs, labels in batches(rank, 3)]
        if kind == "global_mean":
            loss = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
        else:
            loss = sum(loss / count for loss, count in losses) / len(losses)
        loss.backward()
        found.update({f"{kind}/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()})
    np.savez(to, **found)


def main(rank, port, folder, names):
    import numpy as np
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    stores = {ranks: dist.PrefixStore(f"world of {ranks}", dist.distributed_c10d._get_default_store())
              for ranks in (2, WORLD)}
    dist.destroy_process_group()
    cases = by_name(folder)
    for number, name in enumerate(names):
        ranks, train = cases[name]
        if rank >= ranks:
            continue
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), stores[ranks]), rank=rank, world_size=ranks)
        grad_norm = float(train(folder / name))
        dist.destroy_process_group()
        if rank == 0:
            np.savez(folder / f"{name}.npz", grad_norm=grad_norm)
    if rank == 0:
        tokens(folder / "tokens.npz")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
