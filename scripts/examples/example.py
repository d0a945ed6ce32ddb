"""What the examples share: processes over gloo, a tiny model, its batches, and what gradclip says of the recording."""

import argparse
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

VOCABULARY, WIDTH, HIDDEN, ROWS, SEQUENCE, IGNORED = 20, 8, 12, 2, 6, -100
MAX_NORM = 0.25


class Block(nn.Module):
    def __init__(self, mlp=None):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head; the head is the embedding's weight, which is thus used twice in each microbatch."""

    def __init__(self, blocks=2, make_block=Block):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(model):
    """The same weights on every rank and in every layout."""
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)))
    return model


def batches(data_rank, count):
    """(tokens, labels) of one data-parallel rank's microbatches. They have different numbers of label tokens."""
    found = []
    for k in range(count):
        generator = torch.Generator().manual_seed(1000 * data_rank + k)
        text = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
        labels = text[:, 1:].clone()
        labels[0, 1 + (data_rank + k) % 4:] = IGNORED
        found.append((text[:, :-1], labels))
    return found


def label_tokens(data_ranks, count):
    """Of all microbatches of all data-parallel ranks: what the step's losses are divided by."""
    return sum(int((labels != IGNORED).sum()) for rank in range(data_ranks) for _, labels in batches(rank, count))


def summed_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def reduce_after(model, now):
    """FSDP2: whether the next backward pass ends in a reduction, or gradients stay as they are."""
    model.set_requires_gradient_sync(now)
    model.set_is_last_backward(now)
    model.set_reshard_after_backward(now)


def clip_(*groups, pipeline=None):
    """torch.nn.utils.clip_grad_norm_, which takes one mesh at a time, over several; returns the total norm."""
    gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
    norms = [torch.nn.utils.get_total_norm(group) for group in gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms)) ** 2
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    total = total.sqrt()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, MAX_NORM, total)
    return total


def run(world, train):
    """The command line of an example: train in `world` processes, then replay what they recorded."""
    parser = argparse.ArgumentParser(description=sys.modules[train.__module__].__doc__)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the recording; it must not exist")
    parser.add_argument("--every", action="store_true", help="reduce at every microbatch instead of at the last")
    options = parser.parse_args()
    mp.spawn(_process, (world, free_port(), train, options.out, {"every": options.every}), nprocs=world)
    replay(options.out, exact=world == 2)


def _process(rank, world, port, train, folder, how):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    train(folder, **how)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def replay(folder, exact):
    """The microbatches give the gradient that the step had, and that gives the norm that it logged."""
    program = os.environ.get("GRADCLIP_BIN") or shutil.which("gradclip") or \
        ROOT / "build" / "release" / "apps" / "gradclip" / "gradclip"
    # A collective of more than two ranks adds in an order of its own.
    tolerance = ("0", "0") if exact else ("1e-6", "1e-7")
    microbatches = sorted(folder.glob("microbatch_*"))
    for line in (["accumulate", *microbatches, "-o", folder / "accumulated", "--check", folder / "gradients",
                  "--rtol", tolerance[0], "--atol", tolerance[1]],
                 ["clip", folder / "accumulated", "-o", folder / "clipped"]):
        print("\n$ gradclip", *line, flush=True)
        done = subprocess.run([program, *line], check=False)
        if done.returncode:
            sys.exit(done.returncode)
