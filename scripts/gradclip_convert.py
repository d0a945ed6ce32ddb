#!/usr/bin/env python3
"""Make a gradclip dump of gradients that were saved in another way.

    python gradclip_convert.py from-dcp CHECKPOINT -o DUMP                  torch.distributed.checkpoint
    python gradclip_convert.py from-pt rank_*.pt -o DUMP                    torch.save, a file per rank
    python gradclip_convert.py from-safetensors *.safetensors -o DUMP       whole tensors; with --layout a file per rank
    python gradclip_convert.py from-npz FILE.npz -o DUMP                    likewise
    python gradclip_convert.py from-megatron rank_*.pt -o DUMP              flat parts of the distributed optimizer

docs/converting.md has a section on each, and on the layout file. One tensor at a time is in memory; DUMP appears whole
or not at all; inputs are never changed, and nothing that they hold is run. Exit codes are those of docs/exit-codes.md.
Needs torch, h5py and numpy, gradclip_record.py and converters/ beside it, safetensors for its files, and xxhash if the
dump is to carry checksums.
"""

import argparse
import ctypes
import json
import math
import os
import re
import shutil
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch

import gradclip_record
from converters import dcp, files, megatron, per_rank
from converters.errors import BAD_INPUT, BUG, RESOURCES, USAGE, ConvertError, shown
from converters.layout import Layout


def main(arguments=None):
    options = _parser().parse_args(arguments)
    _give_memory_back()
    try:
        job = _job(options)
        with _new_directory(options.output, options.overwrite, options.inputs) as folder:
            write_dump(folder, job, options)
        return 0
    except ConvertError as error:
        print(f"gradclip_convert: error: {error}", file=sys.stderr)
        return error.code
    except FileNotFoundError as error:
        print(f"gradclip_convert: error: {shown(error.filename)}: no such file", file=sys.stderr)
        return BAD_INPUT
    except (OSError, MemoryError) as error:
        print(f"gradclip_convert: error: {shown(error) or 'no memory'}", file=sys.stderr)
        return RESOURCES
    except Exception:  # noqa: BLE001 - Python's own code for it is 1, which means findings
        traceback.print_exc()
        print("gradclip_convert: error: a bug in gradclip_convert; please report the lines above", file=sys.stderr)
        return BUG


def _give_memory_back():
    """Let glibc map each tensor on its own. On its heap, small objects settle where a tensor was, the next one does not
    fit there any more, and the process grows to the size of the model."""
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    except (AttributeError, OSError):
        pass  # another C library


def _job(options):
    """What the inputs hold, as a Job; reads no gradient."""
    for path in options.inputs:
        if not path.exists():
            raise ConvertError(path, "no such file or directory", "an input")
    layout = Layout(options.layout) if options.layout else None
    if options.command == "from-dcp":
        job = dcp.convert(options.inputs, layout, _renaming(options), _note)
    elif options.command == "from-megatron":
        job = megatron.convert(options.inputs, _renaming(options))
    else:
        job = per_rank.convert(KINDS[options.command], options.inputs, layout, _renaming(options), options.key)
    for pattern in layout.unused() if layout else []:
        _note(f"the pattern {pattern!r} of {options.layout} is no tensor's name")
    return job


M_MMAP_THRESHOLD = -3  # of mallopt(3)
KINDS = {"from-pt": files.TorchFile, "from-safetensors": files.SafetensorsFile, "from-npz": files.NpzFile}


def _renaming(options):
    """A function from a tensor's name in the input to the dump's; None leaves it out."""
    def rename(name):
        kept = name.removeprefix(options.prefix) if name.startswith(options.prefix) else None
        return None if kept is None or options.skip and options.skip.search(kept) else kept
    return rename


def _note(text):
    print(f"gradclip_convert: note: {shown(text)}", file=sys.stderr)


# The dump -------------------------------------------------------------------------------------------------------------

def write_dump(folder, job, options):
    """Rank file after rank file, then the manifest, as gradclip_record writes them."""
    head = {"step": options.step, "state": options.state or DEFAULT_STATE.get(options.command, "before_scale"),
            "microbatch": None, "world_size": job.world_size, "training": {**job.training, **_training(options)},
            "producer": {"name": "gradclip_convert", "version": gradclip_record.VERSION,
                         "framework": f"torch {torch.__version__}"}}
    fragments = []
    for rank in range(job.world_size):
        moe = next((mesh for mesh in job.moe_meshes if rank in mesh), None)
        fragment = {"rank": rank, "job": head, "meshes": [mesh.row for mesh in job.meshes], "parameters": [],
                    "device_mesh": job.meshes.index(job.device_mesh) if job.device_mesh else None,
                    "moe_mesh": job.meshes.index(moe) if moe else None, "stage": job.stage(rank)}
        file = folder / gradclip_record.RANK_FILE.format(rank=rank)
        gradclip_record._write_rank_file(file, fragment, _gradients(job, rank), None)
        fragments.append(fragment)
    try:
        manifest = gradclip_record._manifest(fragments)
    except ValueError as error:
        raise ConvertError(options.inputs[0], error, "the gradients of one job") from error
    gradclip_record._write_text(folder / "manifest.json", gradclip_record._manifest_text(manifest))


def _gradients(job, rank):
    """What gradclip_record writes to one rank file: manifest entries with their tensors, one at a time."""
    with job.read(rank) as tensor:
        for parameter in job.parameters:
            if rank not in parameter.ranks:
                continue
            entry, local = parameter.entry(job.meshes), tensor(parameter)
            if local is None:
                entry["none"] = True
                yield entry, None
                continue
            parameter.check_local_shape(rank, local.shape, f"rank {rank}")
            yield entry, parameter.located(rank, local)
            del local


def _training(options):
    given = {key: getattr(options, key) for key in TRAINING}
    return {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in given.items() if value is not None}


@contextmanager
def _new_directory(out, overwrite, inputs):
    """A directory beside OUT that becomes OUT when all went well, and else goes."""
    target = out.resolve()
    for path in (each.resolve() for each in inputs):
        if target == path or target in path.parents or path in target.parents:
            raise ConvertError(out, f"is the input {path}, inside it or around it", "a place of its own", code=USAGE)
    if out.exists() or out.is_symlink():
        if not overwrite:
            raise ConvertError(out, "is there already", "a new name", "replace it with --overwrite", code=USAGE)
        if not _is_dump(out):
            raise ConvertError(out, "is no dump", "a dump, as --overwrite replaces nothing else", code=USAGE)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        os.chmod(folder, 0o777 & ~_umask())  # mkdtemp's is for its owner alone
        yield folder
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f"{target.name}.old-", dir=target.parent))
            os.rename(target, old / "dump")
            os.rename(folder, target)
            shutil.rmtree(old)
        else:
            os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_dump(path):
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return path.is_dir() and not path.is_symlink() and isinstance(manifest, dict) \
        and manifest.get("format") == "gradclip.dump"


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


# The command line -----------------------------------------------------------------------------------------------------

TRAINING = ("max_grad_norm", "norm_type", "num_label_tokens", "dp_group_size", "grad_norm")
# Megatron has divided by the tokens before its optimizer sees the gradients.
DEFAULT_STATE = {"from-megatron": "before_clip"}


def _parser():
    parser = argparse.ArgumentParser(
        prog="gradclip_convert", description="Make a gradclip dump of gradients that were saved in another way.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about, inputs in COMMANDS:
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        command.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help=inputs)
        command.add_argument("-o", "--output", required=True, type=Path, metavar="OUT", help="the dump to make")
        command.add_argument("--overwrite", action="store_true", help="replace a dump that is at OUT")
        command.add_argument("--layout", type=Path, metavar="FILE.json", help="meshes and placements, by names")
        command.add_argument("--prefix", default="", metavar="TEXT",
                             help="only names that begin with it, without it (a checkpoint's 'gradients.')")
        command.add_argument("--skip", type=_regex, metavar="REGEX", help="leave out the names that it is found in")
        command.add_argument("--step", type=_integer(0), default=0, metavar="N", help="the training step (default: 0)")
        command.add_argument("--state", choices=["before_scale", "before_clip", "after_clip"],
                             help="what the step had done to the gradients (default: "
                                  f"{DEFAULT_STATE.get(name, 'before_scale')})")
        command.add_argument("--max-grad-norm", type=_norm_limit, metavar="X", help="the step's limit")
        command.add_argument("--norm-type", type=_norm_type, metavar="P", help="the step's norm: 2, inf, ...")
        command.add_argument("--num-label-tokens", type=_integer(1), metavar="N")
        command.add_argument("--dp-group-size", type=_integer(1), metavar="N")
        command.add_argument("--grad-norm", type=float, metavar="X", help="the norm that the step logged")
        if name == "from-megatron":
            command.set_defaults(layout=None)
        command.add_argument("--key", metavar="NAME", help="take the dict that torch.save's dict has there"
                             ) if name == "from-pt" else command.set_defaults(key=None)
    return parser


COMMANDS = (
    ("from-dcp", "a checkpoint of torch.distributed.checkpoint", "the checkpoint's directory"),
    ("from-pt", "files of torch.save, one for each rank", "one for each rank: a file, or a directory of its files"),
    ("from-safetensors", "safetensors files: whole tensors, or each rank's with --layout",
     "files of whole tensors; with --layout one for each rank: a file, or a directory of its files"),
    ("from-npz", ".npz files of numpy: whole tensors, or each rank's with --layout",
     "files of whole tensors; with --layout one for each rank: a file, or a directory of its files"),
    ("from-megatron", "flat parts of Megatron-LM's distributed optimizer", "what save_flat_gradients wrote: all ranks"))


def _integer(low):
    def integer(text):
        value = int(text)
        if not low <= value < 1 << 63:
            raise ValueError
        return value
    return integer


def _norm_limit(text):
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to inf")
    return value


def _norm_type(text):
    value = float(text)
    if not (0 < value <= 1000 or math.isinf(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and up to 1000, or inf")
    return value


def _regex(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
