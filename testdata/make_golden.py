"""Make testdata/golden: real gradients of a tiny seeded transformer under each kind of parallelism, on the CPU.

    python testdata/make_golden.py [CASE ...]

Every case runs a forward and backward pass through PyTorch's own FSDP2, tensor parallelism, DDP and so on over gloo,
records the gradients with scripts/gradclip_record.py, then takes the re-enacted training step of
tests/conformance/reference_step.py and writes down what it logged. See testdata/README.md for the files.
"""

import json
import math
import os
import shutil
import socket
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "scripts"), str(HERE.parent / "tests" / "conformance")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import xxhash  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import _functional_collectives as collectives  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)

import reference_step  # noqa: E402
from gradclip_record import record_gradients  # noqa: E402

VOCABULARY, WIDTH, HEADS, HIDDEN, BATCH, SEQUENCE, IGNORED = 32, 16, 4, 24, 2, 8, -100


# The model ------------------------------------------------------------------------------------------------------------

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = width // HEADS
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=name == "q_proj"))

    def forward(self, x):
        q, k, v = (projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
                   for projection in (self.q_proj, self.k_proj, self.v_proj))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(self.head)).softmax(-1)
        return self.o_proj((scores @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width, mlp):
        super().__init__()
        self.input_norm, self.self_attn = nn.RMSNorm(width), Attention(width)
        self.post_norm, self.mlp = nn.RMSNorm(width), mlp

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Model(nn.Module):
    """A decoder without its mask; a pipeline stage leaves out what it does not hold, names stay the whole model's."""

    def __init__(self, *, layers=2, stage=None, make_mlp=lambda: Mlp(WIDTH, HIDDEN)):
        super().__init__()
        first, last = stage in (None, 0), stage in (None, 1)
        held = range(layers) if stage is None else range(stage * layers // 2, (stage + 1) * layers // 2)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.layers = nn.ModuleDict({str(i): Block(WIDTH, make_mlp()) for i in held})
        self.norm = nn.RMSNorm(WIDTH) if last else None
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x):
        x = self.embed_tokens(x) if self.embed_tokens is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x)) if self.lm_head is not None else x


def seeded(model, dtype=torch.float32):
    """Weights that depend on the parameter's name only, so that every rank and layout starts from the same model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = torch.Generator().manual_seed(xxhash.xxh32_intdigest(name.encode()))
            noise = torch.randn(parameter.shape, generator=seed)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise)
    return model.to(dtype)


def batch(data_rank, padding=0):
    generator = torch.Generator().manual_seed(1000 + data_rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(BATCH):
        if padding + row:
            labels[row, SEQUENCE - padding - row:] = IGNORED
    return tokens[:, :-1], labels


def loss_of(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def shard(model, **how):
    for layer in getattr(model, "layers", {}).values():
        fully_shard(layer, **how)
    return fully_shard(model, **how)


# The cases: each runs one backward pass and says how it is recorded and stepped ---------------------------------------

def single(rank):
    model = seeded(Model())
    tokens, labels = batch(0)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "max_grad_norm": 0.5}


def fsdp4(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    model = shard(seeded(Model()), mesh=mesh)
    tokens, labels = batch(rank)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5}


def hsdp(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = shard(seeded(Model()), mesh=mesh)
    tokens, labels = batch(rank)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5}


def bf16(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = shard(seeded(Model(), torch.bfloat16), mesh=mesh)
    tokens, labels = batch(rank)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5}


def ddp(rank):
    model = nn.parallel.DistributedDataParallel(seeded(Model()))
    tokens, labels = batch(rank)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "max_grad_norm": 0.5}


def tensor_parallel(model, mesh, **more):
    """Weights split by columns and rows, the rest left as plain tensors: every rank holds a copy of those."""
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {
            "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()})
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate()), **more})


def sequence_parallel(model, mesh):
    """The same with the activations between blocks split along the sequence: norms are DTensors too."""
    rows = {"output_layouts": Shard(1)}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {
            "input_norm": SequenceParallel(), "post_norm": SequenceParallel(),
            "self_attn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(**rows),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(**rows)})
    return parallelize_module(model, mesh, {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), **rows), "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})


def tp2(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tensor_parallel(seeded(Model()), mesh)
    tokens, labels = batch(0)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5}


def tp2_sequence(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = sequence_parallel(seeded(Model()), mesh)
    tokens, labels = batch(0)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5}


def fsdp_tp(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = shard(sequence_parallel(seeded(Model()), mesh["tp"]), mesh=mesh["dp_shard"])
    tokens, labels = batch(mesh.get_local_rank("dp_shard"))
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5}


def fsdp_tp_plain(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    embedding = RowwiseParallel(input_layouts=Replicate())
    model = shard(tensor_parallel(seeded(Model()), mesh["tp"], embed_tokens=embedding), mesh=mesh["dp_shard"])
    tokens, labels = batch(mesh.get_local_rank("dp_shard"))
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5}


def run_pipeline(model, mesh, microbatches):
    """Two stages, one microbatch after the other; the last stage's loss is a sum over label tokens."""
    stage, peers = mesh.get_local_rank("pp"), dist.get_process_group_ranks(mesh["pp"].get_group())
    for tokens, labels in microbatches:
        if stage == 0:
            output = model(tokens)
            dist.send(output.detach().contiguous(), peers[1])
            gradient = torch.empty_like(output)
            dist.recv(gradient, peers[1])
            output.backward(gradient)
        else:
            hidden = torch.empty(BATCH, SEQUENCE, WIDTH)
            dist.recv(hidden, peers[0])
            hidden.requires_grad_()
            loss_of(model(hidden), labels, "sum").backward()
            dist.send(hidden.grad, peers[0])


def pp_fsdp(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    stage, data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
    model = shard(seeded(Model(stage=stage)), mesh=mesh["dp_shard"])
    microbatches = [batch(10 * data_rank + k, padding=data_rank + k) for k in range(2)]
    run_pipeline(model, mesh, microbatches)
    labels = [labels for _, labels in microbatches]
    count = torch.tensor(sum(int((part != IGNORED).sum()) for part in labels))
    dist.all_reduce(count, group=mesh["dp_shard"].get_group())
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5, "labels": labels if stage == 1 else None,
            "arguments": {"pp_enabled": True, "pp_axis_name": "pp", "num_label_tokens": int(count), "dp_group_size": 2}}


def tied_pp(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = seeded(Model(stage=rank))
    weight = model.embed_tokens.weight if rank == 0 else model.lm_head.weight
    with torch.no_grad():  # one weight on both stages
        dist.broadcast(weight.data, 0)
    run_pipeline(model, mesh, [batch(0, padding=1)])
    dist.all_reduce(weight.grad)
    count = int((batch(0, padding=1)[1] != IGNORED).sum())
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.5,
            "tied": {"embed_tokens.weight": "embedding", "lm_head.weight": "embedding"},
            "arguments": {"pp_enabled": True, "pp_axis_name": "pp", "num_label_tokens": count, "dp_group_size": 1}}


class Experts(nn.Module):
    """Every expert sees every token of its expert group, weighed by the router; each rank has some of the experts."""

    def __init__(self, experts=4):
        super().__init__()
        self.gate_and_up_projs = nn.Parameter(torch.empty(experts, WIDTH, 2 * WIDTH))
        self.down_projs = nn.Parameter(torch.empty(experts, WIDTH, WIDTH))
        self.group = None

    def forward(self, x, weights):
        x, weights = (collectives.all_gather_tensor_autograd(t.contiguous(), 0, self.group) for t in (x, weights))
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.gate_and_up_projs, self.down_projs))
        mine = slice(dist.get_rank(self.group) * len(up), (dist.get_rank(self.group) + 1) * len(up))
        gate, value = torch.einsum("td,edh->eth", x, up).chunk(2, -1)
        outputs = torch.einsum("eth,ehd->etd", F.silu(gate) * value, down)
        mixed = torch.einsum("etd,te->td", outputs, weights[:, mine])
        return collectives.reduce_scatter_tensor_autograd(mixed, "sum", 0, self.group)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), Experts()

    def forward(self, x):
        flat = x.flatten(0, 1)
        return self.experts(flat, self.gate(flat).softmax(-1)).reshape(x.shape)


def moe_ep(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    moe_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    model = seeded(Model(make_mlp=MoE))
    for layer in model.layers.values():
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter.data, moe_mesh["ep"], [Shard(0)])))
        experts.group = moe_mesh["ep"].get_group()
        fully_shard(experts, mesh=moe_mesh["ep_shard"], shard_placement_fn=lambda parameter: Shard(1))
    shard(model, mesh=mesh)
    tokens, labels = batch(rank)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "moe_mesh": moe_mesh, "max_grad_norm": 0.5,
            "arguments": {"ep_axis_name": "ep", "dp_group_size": 4}}


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.up_proj = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 9)
        self.down_proj, self.lm_head = nn.Linear(9, 3), nn.Linear(3, VOCABULARY, bias=False)
        self.temperature, self.unused = nn.Parameter(torch.empty(1)), nn.Linear(3, 5)

    def forward(self, x):
        return self.lm_head(self.down_proj(F.silu(self.up_proj(self.embed_tokens(x))))) * self.temperature


def uneven(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    model = seeded(Uneven())
    nn.init.constant_(model.temperature, 5.0)
    model = shard(model, mesh=mesh)
    tokens, labels = batch(rank)
    loss_of(model(tokens), labels).backward()
    return {"parts": [model], "device_mesh": mesh, "max_grad_norm": 0.05}


CASES = {"single": 1, "fsdp4": 4, "tp2": 2, "tp2_sequence": 2, "fsdp_tp": 4, "fsdp_tp_plain": 4, "hsdp": 4,
         "pp_fsdp": 4, "moe_ep": 4, "uneven": 4, "bf16": 2, "ddp": 2, "tied_pp": 2}


# Recording and what is to be expected ---------------------------------------------------------------------------------

def bare(parts):
    return [part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part for part in parts]


def full_gradients(parts, tied, stage):
    """{identity of the weight: its whole gradient}, in float64 before Partial addends are summed."""
    found = {}
    for part in bare(parts):
        for name, parameter in part.named_parameters():
            whole = parameter.grad
            if isinstance(whole, DTensor):
                whole = DTensor.from_local(whole.to_local().double(), whole.device_mesh, whole.placements,
                                           shape=whole.shape, stride=whole.stride()).full_tensor()
            if whole is not None:
                found[tied.get(name, (stage, name))] = whole.detach().double().flatten()
    return found


def exact_norm(weights, norm_type):
    values = [abs(value) for gradient in weights for value in gradient.tolist()]
    if math.isinf(norm_type):
        return max(values)
    return math.fsum(value ** norm_type for value in values) ** (1 / norm_type)


def shards(parts):
    return {name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for part in bare(parts) for name, p in part.named_parameters() if p.grad is not None}


def raw_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def run(rank, world, port, case, folder):
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    made = globals()[case](rank)
    parts, device_mesh, moe_mesh = made["parts"], made.get("device_mesh"), made.get("moe_mesh")
    arguments = {"norm_type": 2.0, "foreach": True, **made.get("arguments", {})}
    max_grad_norm = made["max_grad_norm"]

    recording = record_gradients(
        folder / "dump", parts, step=100, device_mesh=device_mesh, moe_mesh=moe_mesh, labels=made.get("labels"),
        tied=made.get("tied"), training={"max_grad_norm": max_grad_norm, **arguments})
    assert recording.ok

    def on_all(value):
        values = [None] * world
        if world == 1:
            return [value]
        dist.all_gather_object(values, value)
        return values

    meshes = {"device_mesh": device_mesh, "moe_mesh": moe_mesh}
    reference_step.scale(bare(parts), **arguments, **meshes)
    stage = device_mesh.get_local_rank("pp") if arguments.get("pp_enabled") else 0
    weights = {}
    for found in on_all(full_gradients(parts, made.get("tied", {}), stage)):
        for key, gradient in found.items():
            weights.setdefault(key, gradient)
    totals = {}
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        total = reference_step.total_norm(bare(parts), **{**arguments, **meshes, "norm_type": norm_type})
        exact = exact_norm(weights.values(), norm_type)
        totals[str(norm_type)] = {"by_rank": on_all(float(total).hex()),
                                  "exact_norm": {"decimal": repr(exact), "hex": exact.hex()}}
        if norm_type == arguments["norm_type"]:
            applied = total
    reference_step.clip(bare(parts), max_grad_norm, applied, arguments["foreach"])
    recording.log(applied)

    coefficient = torch.clamp(max_grad_norm / (applied + 1e-6), max=1.0)
    clipped = {name: xxhash.xxh3_64_hexdigest(raw_bytes(local)) for name, local in shards(parts).items()}
    coefficients, clipped = on_all(float(coefficient).hex()), on_all(clipped)
    if rank == 0:
        chosen = totals.pop(str(arguments["norm_type"]))
        exact = float.fromhex(chosen["exact_norm"]["hex"])
        assert exact > 2 * max_grad_norm, f"{case}: nothing to clip, the norm is {exact}"
        expected = {
            "case": case, "torch": torch.__version__, "arguments": {"max_grad_norm": max_grad_norm, **arguments},
            "grad_norm": {"by_rank": chosen["by_rank"]}, "exact_norm": chosen["exact_norm"],
            "coefficient": coefficients[0], "coefficient_by_rank": coefficients,
            "exact_coefficient": min(1.0, max_grad_norm / (exact + 1e-6)).hex(),
            "other_norm_types": totals, "clipped": {str(r): each for r, each in enumerate(clipped)}}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        by_rank = sorted({float.fromhex(text) for text in chosen["by_rank"]})
        print(f"{case}: exact {exact:.9g}, by rank {by_rank}, coefficient {float(coefficient):.6g}", flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def main():
    for case in sys.argv[1:] or CASES:
        folder = HERE / "golden" / case
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if CASES[case] == 1:
            run(0, 1, port, case, folder)
        else:
            mp.spawn(run, (CASES[case], port, case, folder), nprocs=CASES[case])


if __name__ == "__main__":
    main()
