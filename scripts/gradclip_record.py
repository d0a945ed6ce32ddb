"""Record the gradients of one training step, exactly as each rank holds them, for gradclip.

Three lines in a training loop, run by every rank between the backward pass and clipping:

    from gradclip_record import record_gradients
    recording = record_gradients(f"dumps/step_{step:06d}", model_parts, step=step, device_mesh=mesh,
                                 training={"max_grad_norm": 1.0, "norm_type": 2.0})
    ...; recording.log(grad_norm)                       # optional, after clipping: what the step logged

Each rank writes its own shards to its own file, one tensor at a time; rank 0 gathers a little metadata (names, shapes,
meshes, placements) and writes manifest.json last. With communicate=False every rank leaves a fragment instead, and
`python gradclip_record.py assemble DIR` makes the manifest later, on any machine.

Recording never raises and never leaves a collective unmatched: what goes wrong is logged, training goes on, and no
manifest is written, so that the directory is recognised as unfinished. Needs torch, h5py and numpy; xxhash too if the
dump is to carry checksums.

Every microbatch of an accumulation loop: gradclip_microbatches.py. The clipping call of a framework, wrapped:
gradclip_attach.py. Both use this file and stand beside it.
"""

import json
import logging
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
import torch.distributed as dist

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # a PyTorch without torch.distributed
    DTensor = ()
try:
    import xxhash
except ImportError:
    xxhash = None

__all__ = ["record_gradients", "finish", "assemble", "Recording"]

VERSION = "0.1.0"
RANK_FILE = "rank_{rank:05d}.h5"
# What a manifest's "training" means something by (docs/format.md): any other key would be kept and never read.
TRAINING_KEYS = ("max_grad_norm", "norm_type", "pp_enabled", "pp_axis_name", "ep_axis_name", "num_label_tokens",
                 "dp_group_size", "expert_tp_replication_factor", "foreach", "use_torch_clip_grad_norm", "ignore_index",
                 "grad_norm")
log = logging.getLogger("gradclip_record")

# Expert weights of Transformer Engine's grouped linear layers: local to a rank and of the same name on each.
EXPERT_NAME = re.compile(r"(^|\.)mlp\.experts\.(gate_up_linear|down_linear)\.(weight|bias)\d+")
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

# What numpy cannot hold is stored as its bits: HDF5's own conversions of small floats round wrongly.
STORED_AS = {"float64": "<f8", "float32": "<f4", "float16": "<f2",
             "bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}
BITS = {"<u2": torch.int16, "|u1": torch.uint8}
OF_THE_JOB = ("step", "state", "microbatch", "world_size", "producer", "accumulation")  # alike on all ranks
_recorded_here = set()


def record_gradients(path, model_parts, *, step, device_mesh=None, moe_mesh=None, labels=None, training=None,
                     state="before_scale", microbatch=None, copies=None, tied=None, experts=None, stage=None,
                     communicate=None, group=None, rank=None, world_size=None, overwrite=False, more=None):
    """Write this rank's gradients below `path`, a directory for this step alone; call it on every rank.

    model_parts  the modules, in the order in which the training step iterates over them
    device_mesh, moe_mesh   the DeviceMeshes that the step itself is given, if any
    labels       [batch, sequence] label ids of this rank's microbatches (one tensor or a list), whole sequences. One rank
                 per data-parallel coordinate suffices (say the last pipeline stage's); copies on others are compared
    training     what the step passes to its clipping: max_grad_norm, norm_type, pp_enabled, ... (TRAINING_KEYS; others
                 are refused)
    state        "before_scale", "before_clip" or "after_clip"
    microbatch   {"index": i, "count": n} for one microbatch's unsynchronised gradients
    copies       {name: "replicated" | "distinct"} or a function (name, parameter) -> one of these or None, for
                 parameters that no mesh relates to each other: replicated, unless they are a rank's own experts
    tied         {name: key}: parameters with the same key are one weight (an embedding on two pipeline stages)
    experts      a function (name, parameter) -> bool, for experts that neither their mesh nor their name tells
    stage        this rank's pipeline stage, where device_mesh has no pipeline axis to tell it
    communicate  False: no collective at all, leave a fragment for `assemble`. Default: if there is a job
    group        the process group to gather over (default: the whole job); it has to contain every rank
    overwrite    replace a dump that is at `path`; without it, one is left alone and nothing is recorded
    more         further keys of the manifest, which gradclip keeps but does not read; rank 0's count

    Returns a Recording, whose `log(grad_norm)` adds the norm that the step reports.
    """
    job = Job(rank, world_size, communicate, group)
    recording = Recording(path, job.rank)
    fragment = write_rank(
        recording.path, job, lambda: held_gradients(model_parts), overwrite=overwrite, labels=labels,
        device_mesh=device_mesh, moe_mesh=moe_mesh, stage=stage, copies=copies, tied=tied, experts=experts,
        keys={"step": step, "state": state, "microbatch": microbatch, "training": training}, more=more)

    # No rank may leave before this line: the others wait in the gather.
    try:
        fragments = job.gather(fragment)
        if fragments is None and not job.communicate and "error" not in fragment:
            leave_fragment(recording.path, fragment)
        if fragments is not None:
            _write_text(recording.path / "manifest.json", _manifest_text(_manifest(fragments)))
        recording.ok = "error" not in fragment
    except Exception:  # noqa: BLE001
        log.exception("gradclip: no manifest written to %s", path)
    return recording


class Job:
    """This process among those that record together."""

    def __init__(self, rank=None, world_size=None, communicate=None, group=None):
        in_job = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if in_job else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if in_job else 1
        self.communicate = in_job and self.world_size > 1 if communicate is None else communicate
        self.group = group

    def gather(self, fragment):
        """Every rank's, on rank 0; None elsewhere, and where nothing is communicated. A collective."""
        if not self.communicate:
            return [fragment] if self.world_size == 1 else None
        fragments = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(fragment, fragments, dst=0, group=self.group)
        return fragments


class Recording:
    """One rank's handle on a dump. `ok`: this rank did its part (and, on rank 0, the dump is whole)."""

    def __init__(self, path, rank):
        self.path, self.rank, self.ok = Path(str(path)), rank, False

    def log(self, grad_norm):
        """Add the norm that the training step logged. Rank 0 writes it; elsewhere, and after a failure, a no-op."""
        if self.ok and self.rank == 0:
            finish(self.path, grad_norm=grad_norm)


def finish(path, *, more=None, **training):
    """Add to `training` of a recorded dump (grad_norm=...), and to further objects of its manifest (more={key: {...}}).

    Call it on rank 0 only. Logs instead of raising.
    """
    try:
        added, manifest, fragment = _training(training), Path(path) / "manifest.json", _fragment_file(Path(path), 0)
        content = json.loads((manifest if manifest.exists() else fragment).read_text(encoding="utf-8"))
        for key, values in {**_plain(more or {}), "training": added}.items():
            content.get("job", content).setdefault(key, {}).update(values)
        if manifest.exists():
            _write_text(manifest, _manifest_text(content))
        else:
            _write_text(fragment, json.dumps(content, ensure_ascii=False))
    except Exception:  # noqa: BLE001
        log.exception("gradclip: could not add %s to %s", sorted(training), path)


def assemble(path):
    """Make the manifest of a dump that was recorded with communicate=False, and remove its fragments."""
    fragments = {file: json.loads(file.read_text(encoding="utf-8")) for file in Path(path).glob("rank_*.json")}
    manifest = _manifest(fragments.values())
    for name, recorded in manifest["files"].items():
        if _describe_file(Path(path) / name) != recorded:
            raise ValueError(f"{Path(path) / name} is not the file that its fragment describes")
    _write_text(Path(path) / "manifest.json", _manifest_text(manifest))
    for file in fragments:
        file.unlink()


class Located:
    """A shard that is no DTensor, as gradclip_convert.py finds them: the local tensor, and for each dimension of the
    full tensor the [begin, end) ranges that it holds (of a flat shard the one range of the flattening)."""

    def __init__(self, local, ranges):
        self.local, self.ranges = local, ranges


# One rank ------------------------------------------------------------------------------------------------------------

class Shard(NamedTuple):
    """This rank's part of a tensor where there is no DTensor of it. As a parameter it needs no `local`."""
    shape: Any
    dtype: torch.dtype
    device_mesh: Any
    placements: tuple
    local: Any = None

    @property
    def ndim(self):
        return len(self.shape)


class Held(NamedTuple):
    """A parameter of this rank and its gradient, each a tensor, a DTensor or a Shard; the gradient may be None."""
    model_part: int
    name: str
    parameter: Any
    gradient: Any
    more: dict = {}  # further keys of its manifest entry


def write_rank(path, job, held, *, keys, more=None, overwrite=False, labels=None, device_mesh=None, moe_mesh=None,
               stage=None, copies=None, tied=None, experts=None):
    """Write this rank's file below `path` and return its fragment of the manifest, or one that tells of the failure.

    held: a function that yields Held, so that its failures are caught too. keys: of the manifest. Arguments else as
    record_gradients'.
    """
    try:
        _claim(path, job.rank, overwrite)
        keys = {**_plain(more or {}), **keys, "step": int(keys["step"]), "world_size": job.world_size,
                "training": _training(keys["training"] or {}),
                "producer": {"name": "gradclip_record", "version": VERSION, "framework": f"torch {torch.__version__}"}}
        meshes = _MeshTable()
        fragment = {"rank": job.rank, "job": keys, "meshes": meshes.rows, "device_mesh": meshes.add(device_mesh),
                    "moe_mesh": meshes.add(moe_mesh), "parameters": [], "stage": stage}
        if stage is None:
            fragment["stage"] = _coordinate(device_mesh, keys["training"].get("pp_axis_name") or "pp")
        found = _entries(held(), meshes, copies, tied, experts)
        _write_rank_file(path / RANK_FILE.format(rank=job.rank), fragment, found, labels)
        return fragment
    except Exception as error:  # noqa: BLE001 - training must go on
        log.exception("gradclip: rank %d could not record to %s", job.rank, path)
        return {"rank": job.rank, "error": f"{type(error).__name__}: {error}"}


def _training(numbers):
    """As the manifest has them. Raises ValueError for a key that gradclip does not know: a misspelt one says nothing."""
    unknown = sorted(set(numbers) - set(TRAINING_KEYS))
    if unknown:
        raise ValueError(f"unknown training keys {', '.join(map(repr, unknown))}; known are {', '.join(TRAINING_KEYS)}")
    return _plain(numbers)


def leave_fragment(path, fragment):
    """For `assemble`, where ranks may not communicate."""
    _write_text(_fragment_file(path, fragment["rank"]), json.dumps(fragment, ensure_ascii=False))


def _claim(path, rank, overwrite):
    """Make sure that nothing written from here on stands under an older dump's word."""
    path.mkdir(parents=True, exist_ok=True)
    # The second test holds off a rank that is ahead of rank 0, which may be about to write this manifest.
    if not overwrite and ((path / "manifest.json").exists() or path.resolve() in _recorded_here):
        raise FileExistsError(f"{path} already holds a dump")
    _recorded_here.add(path.resolve())
    for stale in (path / "manifest.json", _fragment_file(path, rank)):
        stale.unlink(missing_ok=True)


def _write_rank_file(target, fragment, found, labels):
    """Write what _gradients yields, and add to the fragment what the manifest has to know of it."""
    if fragment["job"]["state"] not in ("before_scale", "before_clip", "after_clip"):
        raise ValueError(f"unknown state {fragment['job']['state']!r}")
    if xxhash is None:
        log.warning("gradclip: xxhash is not installed, %s will carry no checksums", target)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # FSDP reduces gradients on streams of its own
    temporary, missing = target.with_name(target.name + ".tmp"), []
    try:
        # The oldest format, fixed, so that every HDF5 opens it and every h5py writes the same bytes.
        with h5py.File(temporary, "w", libver=("earliest", "v110")) as file:
            file.attrs["format"], file.attrs["version"] = np.bytes_("gradclip.dump"), np.int64(1)
            for key, value in (("rank", fragment["rank"]), ("world_size", fragment["job"]["world_size"]),
                               ("step", fragment["job"]["step"])):
                file.attrs[key] = np.int64(value)
            gradients = file.create_group("gradients")
            for entry, gradient in found:
                fragment["parameters"].append(entry)
                if gradient is None:
                    missing.append(entry.get("dataset", entry["name"]).encode())
                else:
                    _write_gradient(gradients, entry, gradient)
            if missing:
                names = np.array(missing, h5py.string_dtype("utf-8", max(map(len, missing))))
                file.create_dataset("none", data=names, track_times=False)
            for k, part in enumerate([labels] if torch.is_tensor(labels) else labels or []):
                values = _local(part).cpu().numpy().astype("<i8")
                if values.ndim != 2:
                    raise ValueError(f"labels {k} have {values.ndim} dimensions, expected [batch, sequence]")
                file.create_dataset(f"labels/{k}", data=values, track_times=False)
        fragment["file"] = _describe_file(temporary)
        _sync_and_rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    if missing and len(missing) == len(fragment["parameters"]):
        log.warning("gradclip: not one gradient in %s; is it recorded after the backward pass?", target)


def named_parameters(model_parts):
    """(model part, name, parameter) of every parameter of this rank that the training step clips."""
    for part_index, part in enumerate([model_parts] if isinstance(model_parts, torch.nn.Module) else model_parts):
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            part = part.module
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in part.modules()):
            raise NotImplementedError("FSDP1's flattened parameters cannot be recorded; use fully_shard")
        for name, parameter in part.named_parameters():
            elsewhere = isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is None
            if parameter.requires_grad and not elsewhere:
                yield part_index, name, parameter


def held_gradients(model_parts):
    """Every parameter with the gradient that it has now."""
    for part_index, name, parameter in named_parameters(model_parts):
        yield Held(part_index, name, parameter, parameter.grad)


def _entries(held, meshes, copies, tied, experts):
    """Of each: its manifest entry and its gradient or None."""
    owner, links, objects = {}, set(), {}
    for part_index, raw_name, parameter, gradient, more in held:
        name, sharded = WRAPPERS.sub("", raw_name), hasattr(parameter, "placements")
        if gradient is not None and hasattr(gradient, "placements") != sharded:
            raise TypeError(f"{name}: only one of parameter and gradient is a DTensor")
        dtype = str((parameter if gradient is None else gradient).dtype).removeprefix("torch.")
        if dtype not in STORED_AS:
            raise TypeError(f"{name}: gradients of type {dtype} cannot be recorded")

        entry = {"name": name, "model_part": part_index, "shape": list(parameter.shape), "mesh": None,
                 "dtype": dtype, "none": gradient is None, **more}
        if experts and experts(name, parameter):
            entry["expert"] = True
        answer = copies(name, parameter) if callable(copies) else (copies or {}).get(name)
        entry["copies"] = answer or ("distinct" if "expert" in entry or EXPERT_NAME.search(name) else "replicated")
        if entry["copies"] not in ("replicated", "distinct"):
            raise ValueError(f"{name}: copies is {answer!r}, expected 'replicated' or 'distinct'")
        if sharded:
            entry["mesh"], entry["placements"] = meshes.add(parameter.device_mesh), _placements(parameter)
            # The training step groups by the mesh object, and FSDP makes a new one for each parameter.
            known = objects.setdefault(entry["mesh"], {})
            if number := known.setdefault(id(parameter.device_mesh), len(known)):
                entry["mesh_object"] = number
            if gradient is not None and meshes.add(gradient.device_mesh) != entry["mesh"]:
                raise ValueError(f"{name}: the gradient is on another mesh than the parameter")
            if gradient is not None and _placements(gradient) != entry["placements"]:
                entry["gradient_placements"] = _placements(gradient)

        # A tensor that two model parts share is stepped over twice, but is one weight.
        first = owner.setdefault(id(parameter), entry)
        key = (tied or {}).get(name) or (first.setdefault("tied", first["name"]) if first is not entry else None)
        if key is not None:
            entry["tied"] = key
        if _link_name(name) in links:
            entry["dataset"] = f"{_link_name(name)}%40{part_index}"  # "name@part"; no other link name has %40
        links.add(_link_name(name))
        yield entry, gradient


def _write_gradient(group, entry, gradient):
    """One tensor: to host, to disk, forgotten."""
    local, stored = _local(gradient), STORED_AS[entry["dtype"]]
    if local.layout != torch.strided:
        raise TypeError(f"{entry['name']}: sparse gradients cannot be recorded")
    local = local.cpu().contiguous()
    values = (local.view(BITS[stored]) if stored in BITS else local).numpy().view(stored)
    dataset = group.create_dataset(entry.get("dataset") or _link_name(entry["name"]), data=values, track_times=False)
    dataset.attrs["dtype"] = np.bytes_(entry["dtype"])
    # An empty shard starts nowhere, and PyTorch's versions do not agree on where.
    if entry["mesh"] is not None and values.ndim and values.size:
        ranges = (gradient.ranges if isinstance(gradient, Located)
                  else _global_ranges(gradient, values.shape, entry["name"]))
        if all(len(dimension) == 1 for dimension in ranges):
            dataset.attrs["global_offset"] = np.array([dimension[0][0] for dimension in ranges], "<i8")
        else:
            rows = [(d, begin, end) for d, dimension in enumerate(ranges) for begin, end in dimension]
            dataset.attrs["global_ranges"] = np.array(rows, "<i8")
    if xxhash is not None:
        dataset.attrs["xxh3_64"] = np.uint64(xxhash.xxh3_64_intdigest(values.reshape(-1).view(np.uint8)))


def _local(tensor):
    """This rank's part, with any communication that is still under way finished."""
    if isinstance(tensor, Shard):
        return tensor.local
    with torch.no_grad():
        tensor = tensor.local if isinstance(tensor, Located) else tensor
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return (tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor).detach()


def _link_name(name):
    name = name.replace("%", "%25").replace("/", "%2F")
    return "%2E" + name[1:] if name.startswith(".") else name


# Meshes, placements, slices ------------------------------------------------------------------------------------------

class _MeshTable:
    """The distinct meshes that this rank knows, by their ranks and names rather than by object."""

    def __init__(self):
        self.rows = []

    def add(self, mesh):
        if mesh is None:
            return None
        names = mesh.mesh_dim_names or [f"dim_{d}" for d in range(mesh.mesh.ndim)]
        row = {"dim_names": list(names), "ranks": mesh.mesh.tolist()}
        if row not in self.rows:
            self.rows.append(row)
        return self.rows.index(row)


def _coordinate(mesh, axis):
    if mesh is None or axis not in (mesh.mesh_dim_names or ()) or mesh.get_coordinate() is None:
        return 0
    return mesh.get_coordinate()[mesh.mesh_dim_names.index(axis)]


def _placements(tensor):
    """Placements in the format's spelling; str() and repr() have changed between PyTorch's versions."""
    def spell(placement):
        kind = type(placement).__name__
        if kind == "Replicate":
            return "Replicate()"
        if kind == "Shard":
            return f"Shard({placement.dim % tensor.ndim})"
        if kind == "_StridedShard":
            return f"_StridedShard(dim={placement.dim % tensor.ndim}, sf={int(placement.split_factor)})"
        if kind == "Partial" and placement.reduce_op in ("sum", "avg", "max", "min", "product"):
            return "Partial()" if placement.reduce_op == "sum" else f"Partial({placement.reduce_op})"
        raise ValueError(f"placement {placement!r} cannot be recorded")
    return [spell(placement) for placement in tensor.placements]


def _global_ranges(tensor, local_shape, name):
    """Per dimension, the [begin, end) ranges of the full tensor that this rank's shard holds."""
    for indices in _readings(tensor):
        if tuple(map(len, indices)) == tuple(local_shape):
            return [_runs(dimension) for dimension in indices]
    raise ValueError(f"{name}: the local shape {list(local_shape)} does not follow from {list(tensor.shape)} "
                     f"as {tensor.placements} on {tensor.device_mesh}")


def _readings(tensor):
    """What the placements can mean, the likeliest first: per dimension, the indices of this rank's shard.

    FSDP2 cuts what tensor parallelism left, so the dimension of a _StridedShard is cut after the later Shards that
    its factor stands for. PyTorch reads the same placements left to right, which differs for some uneven sizes; what
    counts is where the numbers physically come from. A _StridedShard without such Shards has only PyTorch's reading.
    """
    mesh_shape, coordinate = tensor.device_mesh.shape, tensor.device_mesh.get_coordinate()
    kinds = [type(placement).__name__ for placement in tensor.placements]
    strided = {m for m, kind in enumerate(kinds) if kind == "_StridedShard"}
    shards = [(m, placement.dim % tensor.ndim, int(placement.split_factor) if m in strided else 1)
              for m, placement in enumerate(tensor.placements) if kinds[m] == "Shard" or m in strided]
    for order in (_physical_order(shards, strided, mesh_shape), shards):
        if order is None:
            continue
        indices = [np.arange(size) for size in tensor.shape]
        for m, d, factor in order:
            pieces = [_chunk(indices[d], factor, j) for j in range(factor)]
            indices[d] = np.concatenate([_chunk(piece, mesh_shape[m], coordinate[m]) for piece in pieces])
        yield indices


def _physical_order(shards, strided, mesh_shape):
    """The shards in the order of cutting, each a plain one in its place; None if a strided one finds no place."""
    order, waiting, product = [], {}, {}
    for m, d, factor in shards:
        if m in strided:
            waiting.setdefault(d, []).append((m, factor))
            product[d] = 1
            continue
        order.append((m, d, 1))
        product[d] = product.get(d, 1) * mesh_shape[m]
        while waiting.get(d) and waiting[d][-1][1] == product[d]:
            later = waiting[d].pop()[0]
            order.append((later, d, 1))
            product[d] *= mesh_shape[later]
    return None if any(waiting.values()) else order


def _chunk(indices, count, position):
    size = -(-len(indices) // count)
    return indices[position * size:(position + 1) * size]


def _runs(indices):
    pieces = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


# The manifest --------------------------------------------------------------------------------------------------------

def _manifest(fragments, keep_none=False):
    """Join what the ranks know. Raises, so that no manifest is written, if they do not describe one job.

    keep_none: leave in each parameter's entry whether its gradient is None on all ranks.
    """
    fragments = sorted(fragments, key=lambda fragment: fragment["rank"])
    for fragment in fragments:
        if "error" in fragment:
            raise RuntimeError(f"rank {fragment['rank']} recorded nothing: {fragment['error']}")
    job = fragments[0]["job"] if fragments else {"world_size": 1}
    if [fragment["rank"] for fragment in fragments] != list(range(job["world_size"])):
        raise ValueError(f"found parts of ranks {[f['rank'] for f in fragments]}, expected all {job['world_size']}")
    for fragment in fragments:
        for key, value in fragment["job"].items():
            if key in OF_THE_JOB and value != job[key]:
                raise ValueError(f"{key} is {value} on rank {fragment['rank']}, {job[key]} on rank 0")
        if any(job["training"].get(key, value) != value for key, value in fragment["job"]["training"].items()):
            log.warning("gradclip: rank %d was given other training numbers than rank 0", fragment["rank"])

    # Dimension names make a mesh's name; meshes that share them are numbered.
    by_stage, alike, names = sorted(fragments, key=lambda f: (f["stage"], f["rank"])), {}, {}
    for row in (row for fragment in by_stage for row in fragment["meshes"]):
        alike.setdefault("-".join(row["dim_names"]), {})[_compact(row)] = row
    for name, rows in alike.items():
        names.update({key: f"{name}#{i}" if len(rows) > 1 else name for i, key in enumerate(rows)})
    meshes = {names[key]: row for rows in alike.values() for key, row in rows.items()}
    for fragment in by_stage:
        for holder in (fragment, *fragment["parameters"]):
            for use in {"device_mesh", "moe_mesh", "mesh"} & holder.keys():
                index = holder[use]
                holder[use] = None if index is None else names[_compact(fragment["meshes"][index])]

    device, moe = (list(dict.fromkeys(f[use] for f in by_stage if f[use])) for use in ("device_mesh", "moe_mesh"))
    if len(device) > 1:
        if job["training"].get("pp_enabled"):
            raise ValueError(f"the ranks were given different device meshes: {device}")
        device = []  # each rank's own part of one: no single mesh to name, and without pipelining none is needed
    moe_axes = {axis for mesh in moe for axis in meshes[mesh]["dim_names"]}
    dense_axes = set(meshes[device[0]]["dim_names"]) if device else None
    parameters = _parameters(by_stage, meshes, moe_axes, dense_axes)
    for entry in [] if keep_none else parameters:
        del entry["none"]
    return {"format": "gradclip.dump", "version": 1, "rank_file": RANK_FILE, **job, "meshes": meshes,
            "device_mesh": device[0] if device else None, "moe_mesh": moe if len(moe) > 1 else moe[0] if moe else None,
            "parameters": parameters,
            "files": {RANK_FILE.format(rank=fragment["rank"]): fragment["file"] for fragment in fragments}}


def _parameters(by_stage, meshes, moe_axes, dense_axes):
    """One entry per parameter, stage by stage, in each in the order of its ranks' iteration."""
    entries, families, order = {}, {}, []
    for fragment in by_stage:
        after = 0  # entries that this rank alone knows stand where it iterates over them
        for found in fragment["parameters"]:
            # Copies of a plain tensor have one shape; equal names in two stages are not copies by themselves.
            place = (fragment["stage"], found["model_part"], found["name"], found["mesh"] or tuple(found["shape"]))
            if place not in entries:
                entries[place] = {**found, "ranks": []}
                order.insert(after, place)
            entry, after = entries[place], order.index(place, after if place in order[after:after + 1] else 0) + 1
            entry["ranks"].append(fragment["rank"])
            if entry["none"] and not found["none"]:  # type and placements of a missing gradient were only guesses
                entry.update(found)
            loose = {"none", "ranks", "mesh_object"} | ({"dtype", "gradient_placements"} if found["none"] else set())
            for key in (entry.keys() | found.keys()) - loose:
                if entry.get(key) != found.get(key):
                    raise ValueError(f"{found['name']}: {key} is {found.get(key)} on rank {fragment['rank']}, "
                                     f"{entry.get(key)} on rank {entry['ranks'][0]}")
    for (stage, part, name, mesh), entry in entries.items():
        if entry["mesh"] is not None:
            ranks, expected = entry.pop("ranks"), sorted(np.ravel(meshes[mesh]["ranks"]).tolist())
            if sorted(ranks) != expected:
                raise ValueError(f"{name}: held by ranks {ranks}, but its mesh has {expected}")
            if entry.pop("copies") == "replicated":
                families.setdefault((stage, part, name), []).append(entry)
    # Several meshes of one stage with the same parameter (FSDP's, one per tensor-parallel coordinate, for a weight that
    # tensor parallelism left alone) hold copies of it, unless they belong to experts.
    for (stage, _, name), family in families.items():
        axes = {axis for entry in family for axis in meshes[entry["mesh"]]["dim_names"]}
        if len(family) > 1 and dense_axes and not axes & (moe_axes - dense_axes):
            for entry in family:
                entry.setdefault("tied", f"stage {stage}: {name}")
        elif len(family) > 1 and not dense_axes:
            log.warning("gradclip: %s is on several meshes; without device_mesh or tied they count as several", name)
    return [entries[place] for place in order]


def _manifest_text(manifest):
    """Sorted keys and no spaces but line ends, so that what the checksum covers can be seen in the file itself."""
    manifest = {key: value for key, value in manifest.items() if key != "checksum"}
    if xxhash is not None:
        manifest["checksum"] = xxhash.xxh3_64_hexdigest(_compact(manifest).encode())

    def spread(value):
        if isinstance(value, dict):
            return "{\n" + ",\n".join(f"{_compact(key)}:{_compact(item)}" for key, item in sorted(value.items())) + "}"
        return "[\n" + ",\n".join(map(_compact, value)) + "]"
    long = {key for key in ("files", "meshes", "parameters") if manifest[key]}
    return "{\n" + ",\n".join(f"{_compact(key)}:{spread(value) if key in long else _compact(value)}"
                              for key, value in sorted(manifest.items())) + "}\n"


def _compact(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _plain(value):
    """Numbers that JSON can carry: tensors become numbers, non-finite ones the strings the format has for them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        raise TypeError("this number is a DTensor; pass its full_tensor()")
    value = value.item() if isinstance(value, (torch.Tensor, np.generic)) else value
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


# Files ---------------------------------------------------------------------------------------------------------------

def _fragment_file(path, rank):
    return path / f"rank_{rank:05d}.json"


def _describe_file(file):
    if xxhash is None:
        return {"bytes": file.stat().st_size}
    state = xxhash.xxh3_64()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return {"bytes": file.stat().st_size, "xxh3_64": state.hexdigest()}


def _write_text(file, text):
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(text.encode())
    _sync_and_rename(temporary, file)


def _sync_and_rename(temporary, file):
    for path in (temporary, file.parent):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        if path == temporary:
            os.replace(temporary, file)


def assemble_or_exit(work, path):
    """For a command line: what is wrong with the directory is one line and exit code 1."""
    try:
        work(path)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"gradclip: cannot assemble {path}: {error or type(error).__name__}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "assemble":
        sys.exit("usage: python gradclip_record.py assemble DIR")
    assemble_or_exit(assemble, sys.argv[2])
