"""A dump in a few lines, written with h5py from numpy arrays: no torch, no recorder, nothing of gradclip.

    dump = Dump(world_size=2, max_grad_norm=1.0)
    dump.mesh("dp", ["dp_shard"], [0, 1])
    dump.sharded("weight", np.ones(16, np.float32), "dp", ["Shard(0)"])
    dump.plain("expert", {0: np.full(16, 10.0), 1: np.full(16, 0.1)}, copies="distinct")
    dump.write(path)

Slices follow shared/dump-format.md with index arrays, one per tensor dimension: slow and easy to check.
"""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import xxhash

import element_types as types

RANK_FILE = "rank_{rank:05d}.h5"
OPERATIONS = {"": "sum", "sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "product"}


def parse_placement(text):
    """("shard", dim) | ("strided", dim, factor) | ("replicate",) | ("partial", operation) | ("flat",)"""
    text = text.strip()
    if match := re.fullmatch(r"(?:Shard|S)\((?:dim=)?(\d+)\)", text):
        return "shard", int(match[1])
    if match := re.fullmatch(r"(?:_StridedShard|_S)\((?:dim=)?(\d+), *(?:sf=|split_factor=)?(\d+)\)", text):
        return "strided", int(match[1]), int(match[2])
    if text in ("Replicate()", "R"):
        return ("replicate",)
    if match := re.fullmatch(r"(?:Partial|P)(?:\((\w*)\))?", text):
        return "partial", OPERATIONS[match[1] or ""]
    if text == "Flat()":
        return ("flat",)
    raise ValueError(text)


class Mesh:
    def __init__(self, dim_names, ranks):
        self.dim_names, self.ranks = list(dim_names), np.array(ranks)

    def coordinate(self, rank):
        return tuple(int(i) for i in np.argwhere(self.ranks == rank)[0])

    def json(self):
        return {"dim_names": self.dim_names, "ranks": self.ranks.tolist()}


def chunk(indices, parts, position):
    """torch.chunk: pieces of ceil(n / parts) until the elements run out."""
    size = -(-len(indices) // parts)
    return indices[position * size:(position + 1) * size]


def slice_indices(shape, mesh, placements, rank):
    """Which indices of each dimension a rank holds, before Flat."""
    coordinate, sizes = mesh.coordinate(rank), mesh.ranks.shape
    cuts, waiting, product = [], {}, {}
    for m, placement in enumerate(map(parse_placement, placements)):
        if placement[0] == "strided":
            waiting.setdefault(placement[1], []).append((m, placement[2]))
            product[placement[1]] = 1
        elif placement[0] == "shard":
            d = placement[1]
            cuts.append((m, d, 1))
            product[d] = product.get(d, 1) * sizes[m]
            while waiting.get(d) and waiting[d][-1][1] == product[d]:
                later, _ = waiting[d].pop()
                cuts.append((later, d, 1))
                product[d] *= sizes[later]
    if any(waiting.values()):  # a strided shard without its later shards: PyTorch's left-to-right reading
        cuts = [(m, p[1], p[2] if p[0] == "strided" else 1)
                for m, p in enumerate(map(parse_placement, placements)) if p[0] in ("shard", "strided")]
    indices = [np.arange(n) for n in shape]
    for m, d, factor in cuts:
        pieces = [chunk(indices[d], factor, j) for j in range(factor)]
        indices[d] = np.concatenate([chunk(piece, sizes[m], coordinate[m]) for piece in pieces])
    return indices


class Parameter:
    def __init__(self, entry, shards, shape, dtype, mesh=None, placements=(), scale_inv=None, indices=None):
        self.entry, self.shards, self.shape, self.dtype = entry, shards, tuple(shape), dtype
        self.mesh, self.placements, self.scale_inv, self.indices = mesh, list(placements), scale_inv or {}, indices or {}
        self.name = entry["name"]
        self.link = entry.get("dataset") or link_name(self.name)
        self.recorded_name = entry.get("dataset") or self.name

    def kinds(self):
        return [parse_placement(text) for text in self.placements]


def link_name(name):
    name = name.replace("%", "%25").replace("/", "%2F")
    return "%2E" + name[1:] if name.startswith(".") else name


class Dump:
    def __init__(self, world_size=1, *, step=100, state="before_scale", device_mesh=None, moe_mesh=None, **training):
        self.world_size, self.step, self.state = world_size, step, state
        self.device_mesh, self.moe_mesh, self.training = device_mesh, moe_mesh, training
        self.meshes, self.parameters, self.labels, self.more = {}, [], {}, {}

    def mesh(self, name, dim_names, ranks):
        self.meshes[name] = Mesh(dim_names, ranks)
        return name

    def sharded(self, name, whole, mesh, placements, *, dtype=None, flat_ranges=None, none=(), **more):
        """A global tensor, cut by its placements: Shard, _StridedShard, Replicate, Flat. `none`: ranks whose gradient
        was None."""
        whole, dtype = _stored(whole, dtype)
        shards, held = {}, {}
        gradient_placements = more.get("gradient_placements", placements)
        for rank in self.meshes[mesh].ranks.flatten().tolist():
            indices = slice_indices(whole.shape, self.meshes[mesh], gradient_placements, rank)
            local = whole[np.ix_(*indices)] if whole.ndim else whole
            if flat_ranges:
                begin, end = flat_ranges[rank]
                local = local.reshape(-1)[begin:end]
            shards[rank], held[rank] = None if rank in none else local, indices
        if flat_ranges:
            more["flat_ranges"] = {str(rank): list(r) for rank, r in flat_ranges.items()}
        return self.local(name, whole.shape, mesh, placements, shards, dtype=dtype, indices=held, **more)

    def local(self, name, shape, mesh, placements, shards, *, dtype=None, scale_inv=None, indices=None, **more):
        """Local gradients as they are, rank by rank (None: no gradient): Partial addends, copies that differ."""
        entry = {"name": name, "model_part": 0, "shape": list(shape), "dtype": None, "mesh": mesh,
                 "placements": list(placements), **more}
        return self._add(entry, shards, shape, dtype, self.meshes[mesh], more.get("gradient_placements", placements),
                         scale_inv, indices)

    def plain(self, name, value, *, ranks=None, copies="replicated", dtype=None, shape=None, scale_inv=None, **more):
        """A tensor that is no DTensor: one array for all ranks, or {rank: array or None}."""
        shards = dict(value) if isinstance(value, dict) else dict.fromkeys(ranks or range(self.world_size), value)
        shape = np.shape(next(v for v in shards.values() if v is not None)) if shape is None else shape
        entry = {"name": name, "model_part": 0, "shape": list(shape), "dtype": None, "mesh": None,
                 "ranks": sorted(shards), **({"copies": copies} if copies else {}), **more}
        return self._add(entry, shards, shape, dtype, None, (), scale_inv, None)

    def _add(self, entry, shards, shape, dtype, mesh, placements, scale_inv, indices):
        shards = {rank: None if local is None else _stored(local, dtype)[0] for rank, local in shards.items()}
        if dtype is None:
            dtype = next((types.dtype_of(s) for s in shards.values() if s is not None), "float32")
        if scale_inv is not None and not isinstance(scale_inv, dict):
            scale_inv = dict.fromkeys(shards, scale_inv)
        entry["dtype"] = dtype
        self.parameters.append(Parameter(entry, shards, shape, dtype, mesh, placements, scale_inv, indices))
        return self.parameters[-1]

    def manifest(self):
        return {"format": "gradclip.dump", "version": 1,
                "producer": {"name": "dump_builder", "version": "1", "framework": "numpy"},
                "step": self.step, "microbatch": None, "state": self.state, "world_size": self.world_size,
                "rank_file": RANK_FILE, "meshes": {name: mesh.json() for name, mesh in self.meshes.items()},
                "device_mesh": self.device_mesh, "moe_mesh": self.moe_mesh,
                "parameters": [dict(p.entry) for p in self.parameters], "training": dict(self.training), **self.more}

    def write(self, path, *, packed=False, checksums=True, offsets=False, edit=None, edit_file=None, **storage):
        """`edit(manifest)` changes the manifest before its checksum is formed, `edit_file(rank, file)` an open rank
        file; `storage` goes to h5py.create_dataset (compression, shuffle, fletcher32, chunks)."""
        path = Path(path)
        path.mkdir(parents=True)
        for rank in range(self.world_size):
            with h5py.File(path / RANK_FILE.format(rank=rank), "w", libver=("earliest", "v110")) as file:
                file.attrs["format"], file.attrs["version"] = np.bytes_("gradclip.dump"), np.int64(1)
                file.attrs["rank"], file.attrs["world_size"] = np.int64(rank), np.int64(self.world_size)
                file.attrs["step"] = np.int64(self.step)
                (self._write_packed if packed else self._write_gradients)(file, rank, checksums, offsets, storage)
                missing = [p.recorded_name.encode() for p in self.parameters
                           if rank in p.shards and p.shards[rank] is None]
                if missing:
                    kind = h5py.string_dtype("utf-8", max(map(len, missing)))
                    file.create_dataset("none", data=np.array(missing, kind), track_times=False)
                for k, labels in enumerate(self.labels.get(rank, [])):
                    file.create_dataset(f"labels/{k}", data=np.asarray(labels, "<i8"), track_times=False)
                if edit_file:
                    edit_file(rank, file)
        manifest = self.manifest()
        if checksums:
            manifest["files"] = {file.name: describe_file(file) for file in sorted(path.glob("rank_*.h5"))}
        if edit:
            edited = edit(manifest)
            manifest = manifest if edited is None else edited
        if checksums and isinstance(manifest, dict):
            manifest["checksum"] = manifest_checksum(manifest)
        text = manifest if isinstance(manifest, (str, bytes)) else json.dumps(manifest, indent=1, ensure_ascii=False)
        (path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def _write_gradients(self, file, rank, checksums, offsets, storage):
        group = file.create_group("gradients")
        for parameter in self.parameters:
            local = parameter.shards.get(rank)
            if local is None:
                continue
            how = storage if local.ndim and local.size else {}
            dataset = group.create_dataset(parameter.link, data=local, track_times=False, **how)
            dataset.attrs["dtype"] = np.bytes_(parameter.dtype)
            if rank in parameter.scale_inv:
                dataset.attrs["scale_inv"] = np.float32(parameter.scale_inv[rank])
            block = "Flat()" not in parameter.placements and local.ndim and local.size
            if offsets and rank in parameter.indices and block:
                runs = [np.split(i, np.flatnonzero(np.diff(i) != 1) + 1) for i in parameter.indices[rank]]
                if all(len(r) == 1 for r in runs):
                    dataset.attrs["global_offset"] = np.array([r[0][0] for r in runs], "<i8")
                else:
                    rows = [(d, piece[0], piece[-1] + 1) for d, r in enumerate(runs) for piece in r]
                    dataset.attrs["global_ranges"] = np.array(rows, "<i8")
            if checksums:
                dataset.attrs["xxh3_64"] = np.uint64(xxhash.xxh3_64_intdigest(local.tobytes()))

    def _write_packed(self, file, rank, checksums, offsets, storage):
        index, parts = {}, {}
        for parameter in self.parameters:
            local = parameter.shards.get(rank)
            if local is None:
                continue
            size, data = local.dtype.itemsize, parts.setdefault(parameter.dtype, bytearray())
            data.extend(b"\0" * (-len(data) % 64))
            index[parameter.recorded_name] = {"dtype": parameter.dtype, "offset": len(data) // size,
                                              "shape": list(local.shape)}
            if checksums:
                index[parameter.recorded_name]["xxh3_64"] = xxhash.xxh3_64_hexdigest(local.tobytes())
            if rank in parameter.scale_inv:
                index[parameter.recorded_name]["scale_inv"] = float(np.float32(parameter.scale_inv[rank]))
            data.extend(local.tobytes())
        group = file.create_group("packed")
        for dtype, data in parts.items():
            values = np.frombuffer(bytes(data), types.STORED[dtype])
            dataset = group.create_dataset(dtype, data=values, track_times=False, **(storage if values.size else {}))
            dataset.attrs["dtype"] = np.bytes_(dtype)
        group.create_dataset("index", data=json.dumps(index), dtype=h5py.string_dtype("utf-8"), track_times=False)


def _stored(values, dtype):
    values = np.asarray(values)
    if dtype is None:
        dtype = types.dtype_of(values)
    if values.dtype == types.STORED[dtype]:
        return values, dtype
    if values.dtype.kind == "u" and types.STORED[dtype].kind == "u":
        return values.astype(types.STORED[dtype]), dtype
    return types.narrow(values.astype(np.float64), dtype), dtype


def describe_file(path):
    data = Path(path).read_bytes()
    return {"bytes": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}


def manifest_checksum(manifest):
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def read_manifest(path):
    return json.loads((Path(path) / "manifest.json").read_text(encoding="utf-8"))


def read_shards(path):
    """{rank: {recorded name: stored array, or None where /none lists it}} of a dump in either layout."""
    manifest, found = read_manifest(path), {}
    for rank in range(manifest["world_size"]):
        names = {}
        pattern = manifest["rank_file"]
        with h5py.File(Path(path) / pattern.format(rank=rank), "r") as file:
            for link, dataset in file["gradients"].items() if "gradients" in file else ():
                names[link.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")] = dataset[()]
            if "packed" in file:
                for name, entry in json.loads(file["packed/index"].asstr()[()]).items():
                    count = int(np.prod(entry["shape"], dtype=np.int64))
                    data = file["packed/" + entry["dtype"]][entry["offset"]:entry["offset"] + count]
                    names[name] = data.reshape(entry["shape"])
            for name in file["none"][()] if "none" in file else ():
                names[name.decode()] = None
        found[rank] = {name: v if v is None else np.asarray(v) for name, v in names.items()}
    return found
