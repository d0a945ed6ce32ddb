"""Random training steps on real DTensors: what is to be recorded, and what PyTorch makes of it.

A case follows from its seed alone. `describe` is pure: every rank, and a person with a failing seed, gets the same
plan. `play` runs in a gloo world of four processes, in which a case of w ranks takes part with the first w: it sets the
gradients, records them with gradclip_record, and then lets PyTorch scale, take norms and clip.
"""

import dataclasses
import math
import os
import pickle
import random
import sys
import traceback
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import gradclip_record  # noqa: E402
import reference_step  # noqa: E402

WORLD = 4
PARTIAL_PARAMETERS = 1_000_000  # seeds from here on: parameters, not only gradients, that are Partial
NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
DECADES = {"float32": (-44, 37), "float64": (-250, 150), "bfloat16": (-44, 37), "float16": (-7.5, 4)}

# name: dimension names, ranks. Sub-meshes and stages are slices of the others.
MESHES = {1: {"line": (("dp",), [0]), "grid": (("dp", "tp"), [[0]]), "moe": (("ep_shard", "ep"), [[0]])},
          2: {"line": (("dp",), [0, 1]), "turned_line": (("x",), [1, 0]), "first": (("y",), [0]),
              "grid": (("dp", "tp"), [[0, 1]]), "tall": (("a", "b"), [[0], [1]]),
              "moe": (("ep_shard", "ep"), [[0, 1]]), "pipeline": (("pp", "dp"), [[0], [1]])},
          3: {"line": (("dp",), [0, 1, 2]), "first": (("y",), [0, 1]), "ends": (("x",), [2, 0]),
              "tall": (("a", "b"), [[0], [1], [2]]), "grid": (("dp", "tp"), [[0], [1], [2]]),
              "moe": (("ep_shard", "ep"), [[0, 1, 2]])},
          4: {"line": (("dp",), [0, 1, 2, 3]), "ends": (("x",), [3, 1]), "first": (("y",), [0, 1, 2]),
              "grid": (("dp", "tp"), [[0, 1], [2, 3]]), "turned": (("a", "b"), [[0, 2], [1, 3]]),
              "cube": (("dp_replicate", "dp", "tp"), [[[0, 1]], [[2, 3]]]),
              "moe": (("ep_shard", "ep"), [[0, 1], [2, 3]]), "pipeline": (("pp", "dp"), [[0, 1], [2, 3]])}}


# The plan -------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Parameter:
    name: str
    shape: tuple
    dtype: str
    mesh: str | None            # None: a plain tensor
    placements: tuple = ()
    gradient: tuple = ()        # the gradient's placements
    fsdp: bool = False          # placements are tensor parallelism's; FSDP2 adds its own
    stage: int | None = None
    copies: str = "replicated"
    none: bool = False
    spoilt: float | None = None  # written over one element


@dataclasses.dataclass
class Case:
    seed: int
    world: int
    kind: str
    parameters: list
    training: dict
    wide: bool
    given_moe_mesh: bool
    max_norm: float | None      # None: a share of the total, so that it clips
    share: float
    processes: int


def describe(seed):
    choose = random.Random(seed)
    kinds = ("dense",) * 4 + ("fsdp", "fsdp", "pipeline", "pipeline", "experts", "experts", "plain", "plain")
    kind = "partial" if seed >= PARTIAL_PARAMETERS else kinds[seed % len(kinds)]
    world = choose.choice((2, 4) if kind == "pipeline" else (2, 3, 4, 4) if kind in ("fsdp", "dense") else (1, 2, 3, 4))
    wide = kind == "dense" and choose.random() < 0.3
    dtypes = [choose.choice(["float32", *DTYPES])] if choose.random() < 0.7 else choose.sample(list(DTYPES), 2)
    training = {"norm_type": choose.choice(NORM_TYPES), "foreach": choose.random() < 0.5}
    case = Case(seed, world, kind, [], training, wide, False, choose.choice((None,) * 7 + (0.0, math.inf, 1e-30)),
                10 ** choose.uniform(-3, 0.2), choose.randint(1, 4))

    def add(name, mesh, **how):
        shape = _shape(choose, how.get("fsdp"))
        case.parameters.append(Parameter(name, shape, choose.choice(dtypes), mesh, **how))
        return case.parameters[-1]

    meshes = [name for name in MESHES[world] if name not in ("moe", "pipeline")]
    for i in range(choose.randint(1, 3) if kind == "pipeline" else choose.randint(1, 7)):
        if kind == "plain":
            add(f"plain.{i}", None)
        elif kind == "pipeline":
            for stage in (0, 1):
                parameter = add(f"stage{stage}.weight{i}", choose.choice((f"stage{stage}",) * 4 + (None,)), stage=stage)
                _place(choose, parameter, 1, ("sum", "avg"))
        elif kind == "fsdp" and choose.random() < 0.7:
            parameter = add(f"sharded.weight{i}", choose.choice([m for m in meshes if m in ("grid", "cube")]), fsdp=True)
            parameter.placements = (choose.choice((Replicate(), *map(Shard, range(len(parameter.shape))))),)
        elif kind == "experts" and choose.random() < 0.6:
            if choose.random() < 0.5:
                add(f"layers.{i}.mlp.experts.{choose.choice(('gate_up', 'down'))}_linear.weight{i}", None, copies="distinct")
            else:
                parameter = add(f"layers.{i}.experts.weight", "moe")
                _place(choose, parameter, 2, ("sum", "avg"))
        else:
            mesh = choose.choice([*meshes, None])
            parameter = add(f"layers.{i}.weight", mesh)
            if mesh is None and choose.random() < 0.3:
                parameter.copies = "distinct"
            operations = ("sum", "avg") if kind == "experts" else ("sum", "sum", "avg", "max", "min")
            _place(choose, parameter, np.ndim(MESHES[world][mesh][1]) if mesh else 0, operations)
            if kind == "partial" and mesh:
                parameter.gradient = tuple(Partial() if isinstance(p, (Replicate, Partial)) else p
                                           for p in parameter.placements)
                parameter.placements = parameter.gradient
    for parameter in case.parameters:
        parameter.none = choose.random() < 0.06
    if kind not in ("pipeline", "partial") and choose.random() < 0.08:
        parameter = choose.choice(case.parameters)
        if not {"max", "min"} & operations_of(parameter.gradient):
            parameter.spoilt = choose.choice((math.inf, -math.inf, math.nan))

    if kind == "pipeline":
        training.update(pp_enabled=choose.random() < 0.8, pp_axis_name="pp", num_label_tokens=choose.choice((0, 7, 52, 8192)),
                        dp_group_size=choose.choice((1, 3, 4)))
    if kind == "experts":
        case.given_moe_mesh = choose.random() < 0.85
        training.update(dp_group_size=choose.choice((1, 3, 4, 8)), num_label_tokens=choose.choice((None, 5)),
                        expert_tp_replication_factor=choose.choice((1, 1, 2)))
        if choose.random() < 0.8:
            training["ep_axis_name"] = "ep"
    return case


def _shape(choose, at_least_one_dimension=False):
    if choose.random() < 0.05:
        return (choose.randint(65_530, 90_000),)  # more than a chunk
    if choose.random() < 0.12 and not at_least_one_dimension:
        return ()
    return tuple(choose.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13)) for _ in range(choose.randint(1, 3)))


def _place(choose, parameter, mesh_dimensions, operations):
    """Placements of a parameter and, mostly the same, of its gradient."""
    if parameter.mesh is None:
        return
    kinds = (Replicate(), *map(Shard, range(len(parameter.shape))))
    placements = [choose.choice(kinds) for _ in range(mesh_dimensions)]
    if parameter.shape and mesh_dimensions == 1 and choose.random() < 0.1:
        placements = [_StridedShard(choose.randrange(len(parameter.shape)), split_factor=choose.choice((2, 3)))]
    gradient, operation = list(placements), choose.choice(operations)
    for d, placement in enumerate(placements):
        if choose.random() < (0.35 if placement == Replicate() else 0.05):
            gradient[d] = Partial(operation)
        elif placement != Replicate() and choose.random() < 0.05:
            gradient[d] = Replicate()
    parameter.placements, parameter.gradient = tuple(placements), tuple(gradient)


def operations_of(placements):
    return {placement.reduce_op for placement in placements if isinstance(placement, Partial)}


def mesh_ranks(case, name):
    if name in ("stage0", "stage1"):
        return np.array(MESHES[case.world]["pipeline"][1])[int(name[-1])]
    return np.array(MESHES[case.world][name][1])


def numbers(case, index, which=0):
    """The gradient's values, or one addend's or rank's (`which`), as every rank can compute them."""
    parameter, random_numbers = case.parameters[index], np.random.default_rng([case.seed, index, which])
    values = random_numbers.standard_normal(parameter.shape)
    if case.wide:
        values = values * 10 ** random_numbers.uniform(*DECADES[parameter.dtype], parameter.shape)
    else:
        values = values * 10 ** random_numbers.uniform(-3, 1.5)
    values = np.array(values)
    values[random_numbers.random(parameter.shape) < 0.05] = 0.0
    values[random_numbers.random(parameter.shape) < 0.03] = -0.0
    tiny = np.array(random_numbers.random(parameter.shape) < 0.03)
    values[tiny] = 0.0
    tensor = torch.from_numpy(values).to(DTYPES[parameter.dtype])
    tensor[torch.from_numpy(tiny)] = torch.finfo(tensor.dtype).smallest_normal / 4
    if parameter.spoilt is not None and tensor.numel():
        tensor.view(-1)[int(random_numbers.integers(tensor.numel()))] = parameter.spoilt
    return tensor


# What is right --------------------------------------------------------------------------------------------------------

def divisors(case, parameter):
    """The two divisions of numerics.md, for this parameter."""
    training, found = case.training, []
    if training.get("pp_enabled") and training.get("num_label_tokens") and training.get("dp_group_size"):
        found.append(training["num_label_tokens"] / training["dp_group_size"])
    expert = parameter.mesh == "moe" and training.get("ep_axis_name") or ".mlp.experts." in parameter.name
    if case.given_moe_mesh and training.get("dp_group_size") and expert:
        found.append(training["dp_group_size"] / len(MESHES[case.world]["moe"][1])
                     * training.get("expert_tp_replication_factor", 1))
    return found


def whole_gradients(case):
    """Each parameter's whole gradient after scaling in float64, once for every one that counts; None where none is."""
    whole = []
    for index, parameter in enumerate(case.parameters):
        def addend(which):
            tensor = numbers(case, index, which)
            for divisor in divisors(case, parameter):
                tensor = tensor.div(divisor)
            return tensor.double()
        dimensions = [d for d, placement in enumerate(parameter.gradient) if isinstance(placement, Partial)]
        if parameter.none:
            whole.append(None)
        elif parameter.mesh is None and parameter.copies == "distinct":
            whole.append(torch.stack([addend(rank) for rank in range(case.world)]))
        elif dimensions:
            count = math.prod(mesh_ranks(case, parameter.mesh).shape[d] for d in dimensions)
            total, operation = addend(0), parameter.gradient[dimensions[0]].reduce_op
            for which in range(1, count):
                total = {"max": torch.maximum, "min": torch.minimum}.get(operation, torch.add)(total, addend(which))
            whole.append(total / count if operation == "avg" else total)
        else:
            whole.append(addend(0))
    return whole


def exact_total(tensors, norm_type):
    """(Σ |g|^p)^(1/p) by math.fsum; divided by the largest first, so that nothing overflows."""
    values = np.abs(np.concatenate([tensor.reshape(-1).numpy() for tensor in tensors] or [np.zeros(0)]))
    if np.isnan(values).any():
        return math.nan
    largest = float(values.max(initial=0.0))
    if not 0 < largest < math.inf or math.isinf(norm_type):
        return largest
    return largest * math.fsum(((values / largest) ** norm_type).tolist()) ** (1 / norm_type)


# Inside the world -----------------------------------------------------------------------------------------------------

def play(rank, port, seeds, folder):
    """The entry of a spawned process."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    groups = {world: dist.new_group(list(range(world))) for world in MESHES}
    meshes = {}
    for world, named in MESHES.items():
        meshes[world] = {name: DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
                         for name, (names, ranks) in named.items()}
        if "pipeline" in named and rank < world:
            own = meshes[world]["pipeline"]
            meshes[world][f"stage{own.get_local_rank('pp')}"] = own["dp"]
    for seed in seeds:
        case = describe(seed)
        if rank < case.world:
            try:
                _play_case(case, rank, meshes[case.world], groups[case.world], Path(folder) / str(seed))
            except Exception:
                (Path(folder) / f"{seed}.error.{rank}").write_text(f"{case}\n\n{traceback.format_exc()}")
                raise
    dist.barrier()
    dist.destroy_process_group()


def _play_case(case, rank, meshes, group, folder):
    model, held, layers = nn.Module(), {}, _fully_sharded_layers(case, meshes)
    for index, parameter in enumerate(case.parameters):
        made = _make(case, index, rank, meshes, layers)
        if made is not None:
            held[parameter.name] = made
            _register(model, parameter.name, made)

    training, device_mesh = dict(case.training), meshes.get("pipeline") if case.kind == "pipeline" else None
    moe_mesh = meshes["moe"] if case.given_moe_mesh else None
    named = {p.name: p for p in case.parameters}
    recording = gradclip_record.record_gradients(
        folder / "dump", model, step=case.seed, device_mesh=device_mesh, moe_mesh=moe_mesh, training=training,
        copies=lambda name, _: named[name].copies, group=group, rank=rank, world_size=case.world)
    assert recording.ok, "not recorded"

    parts, arguments = [model], {**training, "device_mesh": device_mesh, "moe_mesh": moe_mesh}
    whole = whole_gradients(case)
    _compare_with_full_tensors(case, rank, model, whole, arguments)
    finite = all(torch.isfinite(tensor).all() for tensor in whole if tensor is not None)
    exact = {p: exact_total([tensor for tensor in whole if tensor is not None], p) for p in NORM_TYPES}
    found = {"case": case, "exact": exact, "holds": [p.grad is not None for p in held.values()].count(True),
             "reference": {}, "float32": {}, "clipped": {}, "elements": sum(t.numel() for t in whole if t is not None)}
    if finite:  # gloo's MAX loses a NaN that is not the first rank's, and so would the reference
        for p in NORM_TYPES:
            found["reference"][p] = float(reference_step.total_norm(parts, **{**arguments, "norm_type": p}))
        found["float32"] = _float32_totals(case, model, group)

    total = torch.tensor(exact[training["norm_type"]], dtype=torch.float64)
    max_norm = case.max_norm if case.max_norm is not None else float(total) * case.share
    if not finite:
        max_norm = 1.0
    found["total"], found["max_norm"] = float(total), max_norm
    if case.kind == "plain":
        copies = [_with_gradient(p.grad.clone()) for p in model.parameters() if p.grad is not None]
        try:
            found["torch_total"] = torch.nn.utils.clip_grad_norm_(
                copies, max_norm, training["norm_type"], foreach=training["foreach"])
        except RuntimeError as error:
            found["torch_total"] = str(error)
        found["torch_clipped"] = [raw_bytes(copy.grad) for copy in copies]
    found["coefficient"] = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    _clip(parts, max_norm, total, training["foreach"])
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            found["clipped"][name] = (str(local.dtype).removeprefix("torch."), raw_bytes(local))
    (folder / f"torch_{rank}.pickle").write_bytes(pickle.dumps(found))


def _fully_sharded_layers(case, meshes):
    """Modules whose parameters are tensor parallel, given to FSDP2 two by two: each call has a mesh object of its own."""
    layers = {}
    for index, parameter in enumerate(case.parameters):
        if parameter.fsdp:
            layer = layers.setdefault((parameter.mesh, index // 2), nn.Module())
            tensor = distribute_tensor(numbers(case, index), meshes[parameter.mesh]["tp"], parameter.placements,
                                       src_data_rank=None)
            layer.register_parameter(f"p{index}", nn.Parameter(tensor))
    for (mesh, _), layer in layers.items():
        fully_shard(layer, mesh=meshes[mesh]["dp_replicate", "dp"] if mesh == "cube" else meshes[mesh]["dp"])
    return layers


def _make(case, index, rank, meshes, layers):
    """The parameter with its gradient as this rank holds it; None if it holds nothing of it."""
    parameter = case.parameters[index]
    if parameter.fsdp:
        made = getattr(layers[parameter.mesh, index // 2], f"p{index}")
        gradient = DTensor.from_local(made.to_local().detach().clone(), made.device_mesh, made.placements,
                                      run_check=False, shape=made.shape, stride=made.stride())
    elif parameter.mesh is None:
        if parameter.stage is not None and rank not in mesh_ranks(case, f"stage{parameter.stage}"):
            return None
        gradient = numbers(case, index, rank if parameter.copies == "distinct" else 0)
        made = nn.Parameter(torch.zeros_like(gradient))
    else:
        mesh, ranks = meshes.get(parameter.mesh), mesh_ranks(case, parameter.mesh)
        if rank not in ranks:
            return None
        coordinate, which = [int(c[0]) for c in np.nonzero(ranks == rank)], 0
        for d, placement in enumerate(parameter.gradient):
            if isinstance(placement, Partial):
                which = which * ranks.shape[d] + coordinate[d]
        values = numbers(case, index, which)
        kept = [Replicate() if isinstance(p, Partial) else p for p in parameter.gradient]
        local = distribute_tensor(values, mesh, kept, src_data_rank=None).to_local().clone()
        gradient = DTensor.from_local(local, mesh, parameter.gradient, run_check=False, shape=values.shape,
                                      stride=values.stride())
        if operations_of(parameter.placements):
            made = nn.Parameter(gradient.detach().clone())
        else:
            zeros = torch.zeros_like(values)
            made = nn.Parameter(distribute_tensor(zeros, mesh, parameter.placements, src_data_rank=None))
    made.grad = None if parameter.none else gradient
    return made


def _register(model, name, parameter):
    *path, last = name.split(".")
    for part in path:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model._modules[part]
    model.register_parameter(last, parameter)


def _with_gradient(gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _compare_with_full_tensors(case, rank, model, whole, arguments):
    """Scale as the reference does; DTensor.full_tensor then agrees with `whole`, on which the totals rest."""
    reference_step.scale([model], **arguments)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter, expected in zip(case.parameters, whole):
        gradient = gradients.get(parameter.name)
        if not isinstance(gradient, DTensor):
            continue
        if parameter.mesh in ("ends", "turned_line"):
            continue  # ranks that do not ascend: a process group sorts them, and full_tensor takes its order
        if parameter.fsdp and any(size % math.prod(mesh_ranks(case, parameter.mesh).shape) for size in parameter.shape):
            continue  # uneven: PyTorch reads strided shards in another order than FSDP wrote them, or cannot read them
        full = DTensor.from_local(gradient.to_local().double(), gradient.device_mesh, gradient.placements,
                                  run_check=False, shape=gradient.shape, stride=gradient.stride()).full_tensor()
        largest = float(expected.abs().nan_to_num(0, 0, 0).max())
        torch.testing.assert_close(full, expected, rtol=1e-15, equal_nan=True, msg=lambda text: f"{parameter}: {text}",
                                   atol=1e-14 * largest if operations_of(gradient.placements) else 0.0)


def _float32_totals(case, model, group):
    """torch.nn.utils.get_total_norm mesh by mesh, combined in float64; {} where it does not apply."""
    big = any(math.prod(parameter.shape) > 10_000 for parameter in case.parameters)  # its own sums are off by more
    strided = any(isinstance(p, _StridedShard) for parameter in case.parameters for p in parameter.gradient)
    plain = any(p.mesh is None and (p.copies == "distinct" or p.stage is not None) for p in case.parameters)
    if case.wide or big or plain or strided or case.kind in ("pipeline", "fsdp", "partial") or any(
            p.dtype != "float32" for p in case.parameters):
        return {}
    by_mesh = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            key = None if mesh is None else f"{mesh.mesh_dim_names} {mesh.mesh.tolist()}"
            by_mesh.setdefault(key, []).append(parameter.grad)
    totals = {}
    for p in NORM_TYPES:
        norms = {}
        for mesh, gradients in by_mesh.items():
            empty = any(0 in local.shape for local in (g.to_local() if mesh else g for g in gradients))
            if mesh and math.isinf(p):  # PyTorch refuses the maximum of nothing, on the ranks that have nothing
                anywhere = torch.tensor(float(empty))
                for d in range(gradients[0].device_mesh.ndim):
                    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=gradients[0].device_mesh.get_group(d))
                empty = bool(anywhere)
            if empty and math.isinf(p):
                norms[mesh] = None
                continue
            norm = torch.nn.utils.get_total_norm(gradients, p)
            norms[mesh] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        everywhere = [None] * case.world
        dist.all_gather_object(everywhere, norms, group=group)
        merged = {mesh: norm for found in everywhere for mesh, norm in found.items()}
        if None not in merged.values() and merged:
            totals[p] = exact_total([torch.tensor([norm], dtype=torch.float64) for norm in merged.values()], p)
    return totals


def _clip(parts, max_norm, total, foreach):
    """clip_grads_with_norm_ on the DTensors themselves, but for what it refuses: Partial(max) and Partial(min)."""
    refused = [p for part in parts for p in part.parameters()
               if isinstance(p.grad, DTensor) and {"max", "min"} & operations_of(p.grad.placements)]
    kept = [(parameter, parameter.grad) for parameter in refused]
    for parameter in refused:
        parameter.grad = None
    reference_step.clip(parts, max_norm, total, foreach)
    for parameter, gradient in kept:
        torch.nn.utils.clip_grads_with_norm_([_with_gradient(gradient.to_local())], max_norm, total, foreach)
        parameter.grad = gradient


def raw_bytes(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


if __name__ == "__main__":
    for text in sys.argv[1:]:
        print(describe(int(text)))
