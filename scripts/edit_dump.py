#!/usr/bin/env python3
"""Change a dump's gradients in place, with its checksums: make a fault, and see how gradclip names it.

    python edit_dump.py DUMP --parameters experts --to 'g * 2'              of all names in which the pattern is found
    python edit_dump.py DUMP --parameters norm --ranks 1,3 --to '0 * g'     on these ranks only
    python edit_dump.py DUMP --tie embed.weight lm_head.weight              the second becomes the first's weight
    python edit_dump.py DUMP --step 120 --logged 5.902                      which step it was, what it logged

--to is a Python expression: g is the rank's own shard as float32 (float64 stays), rank its number, np is numpy; bf16(x)
rounds to bfloat16, bf16_sum(x, n) adds up n equal parts of x in it, addend(x, 0) and addend(x, 1) are two numbers with the
sum x. Needs numpy, h5py, xxhash and gradclip_load.py beside it; for contiguous float64, float32, float16 and bfloat16
gradients. To try things out: what a job recorded should stay as it is.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import h5py
import numpy as np
import xxhash

from gradclip_load import STORED, link_name, numbers


def bf16(values):
    """To nearest even, still as float32. Finite values only."""
    bits = np.asarray(values, "<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype("<u4").view("<f4")


def bf16_sum(values, parts):
    total = np.zeros_like(values)
    for _ in range(parts):
        total = bf16(total + bf16(values / parts))
    return total


def addend(values, number):
    first = bf16(values * np.linspace(0.5, 0.9, values.size).reshape(values.shape))
    return first if number == 0 else values - first


def write(dataset, stored):
    dataset[...] = stored
    dataset.attrs.modify("xxh3_64", np.uint64(xxhash.xxh3_64_intdigest(np.ascontiguousarray(stored).tobytes())))


class Refused(Exception):
    """What cannot be done, in one line; nothing was changed."""


class Editor:
    def __init__(self, path):
        self.path = Path(path)
        try:
            self.manifest = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: no manifest.json that can be read ({error}); expected the directory of a dump")

    def open(self, rank):
        return h5py.File(self.path / self.manifest["rank_file"].format(rank=rank), "r+")

    def entry(self, name):
        found = next((entry for entry in self.manifest["parameters"] if entry["name"] == name), None)
        if found is None:
            raise Refused(f"--tie {name}: the dump has no parameter of this name")
        return found

    def ranks_of(self, entry):
        return np.ravel(self.manifest["meshes"][entry["mesh"]]["ranks"] if entry["mesh"] else entry["ranks"]).tolist()

    def chosen(self, pattern, ranks):
        """Entries with the ranks on which they are changed."""
        entries = [entry for entry in self.manifest["parameters"] if re.search(pattern, entry["name"])]
        if not entries:
            raise Refused(f"--parameters {pattern!r}: is found in none of {len(self.manifest['parameters'])} names, "
                          f"of which the first is {self.manifest['parameters'][0]['name']!r}")
        chosen = [(entry, set(self.ranks_of(entry)) & set(ranks or self.ranks_of(entry))) for entry in entries]
        if not any(held for _, held in chosen):
            raise Refused(f"--ranks {','.join(map(str, ranks))}: none of them holds one of the parameters")
        return chosen

    def change(self, pattern, ranks, expression):
        names = {"np": np, "bf16": bf16, "bf16_sum": bf16_sum, "addend": addend}
        for entry, held in self.chosen(pattern, ranks):
            for rank in held:
                with self.open(rank) as file:
                    dataset, dtype = file["gradients"][link_name(entry["name"])], entry["dtype"]
                    shard = numbers(dataset[()], dtype)
                    new = np.broadcast_to(eval(expression, {**names, "g": shard, "rank": rank}), shard.shape)
                    write(dataset, (bf16(new).view("<u4") >> 16).astype("<u2") if dtype == "bfloat16"
                          else new.astype(STORED[dtype]))

    def tie(self, name, other):
        """On ranks of its own the other is a second entry of the name; on the same ranks a model has the weight once."""
        first, second = self.entry(name), self.entry(other)
        same = self.ranks_of(first) == self.ranks_of(second)
        for from_rank, rank in zip(self.ranks_of(first), self.ranks_of(second)):
            with self.open(from_rank) as file:
                stored = file["gradients"][link_name(name)][()]
            with self.open(rank) as file:
                if same:
                    del file["gradients"][link_name(other)]
                else:
                    write(file["gradients"][link_name(other)], stored)
                    file["gradients"].move(link_name(other), link_name(name))
        if same:
            self.manifest["parameters"].remove(second)
        else:
            second["name"], first["tied"], second["tied"] = name, name, name

    def seal(self):
        files = self.manifest["files"] = {}
        for rank in range(self.manifest["world_size"]):
            with self.open(rank) as file:
                file.attrs.modify("step", np.int64(self.manifest["step"]))
            path = self.path / self.manifest["rank_file"].format(rank=rank)
            files[path.name] = {"bytes": path.stat().st_size, "xxh3_64": xxhash.xxh3_64_hexdigest(path.read_bytes())}
        self.manifest.pop("checksum", None)
        text = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self.manifest["checksum"] = xxhash.xxh3_64_hexdigest(text.encode())
        text = json.dumps(self.manifest, indent=1, ensure_ascii=False)
        (self.path / "manifest.json").write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Change a dump's gradients in place, with its checksums.")
    parser.add_argument("dump", metavar="DUMP")
    parser.add_argument("--parameters", metavar="REGEX", default="", help="which; all without it")
    parser.add_argument("--ranks", metavar="LIST", type=lambda text: [int(rank) for rank in text.split(",")])
    parser.add_argument("--to", metavar="EXPRESSION", help="of g, for example 'g * 2'")
    parser.add_argument("--tie", nargs=2, metavar=("NAME", "OTHER"))
    parser.add_argument("--step", type=int)
    parser.add_argument("--logged", type=float, metavar="NORM")
    options = parser.parse_args()
    try:
        return edit(options)
    except Refused as refusal:
        print(f"edit_dump.py: {refusal}", file=sys.stderr)
        return 1


def edit(options):
    editor = Editor(options.dump)
    if options.to:
        editor.change(options.parameters, options.ranks, options.to)
    if options.tie:
        editor.tie(*options.tie)
    if options.step is not None:
        editor.manifest["step"] = options.step
    if options.logged is not None:
        finite = np.isfinite(options.logged)
        editor.manifest["training"]["grad_norm"] = options.logged if finite else str(options.logged)
    editor.seal()
    return 0


if __name__ == "__main__":
    sys.exit(main())
