"""Random dumps, whole and damaged, for as long as asked: every run against the slow oracle of tests/cli (numpy, math.fsum
over float64) or against what `verify` promises.

    GRADCLIP_BIN=build/release/apps/gradclip/gradclip build/venv/bin/python tests/soak/soak.py --minutes 30 --seed 1
    ... --emulated build/release/tests/cli/gradclip-emulated    some of the runs on the emulated device
    ... --only 123                                              the case of one seed again, its dump kept

A case that fails names its seed and ends the soak with exit code 1.
"""

import argparse
import collections
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
import conftest  # noqa: E402
import element_types as types  # noqa: E402
import test_random  # noqa: E402

KINDS = {"sound": 0.5, "nan": 0.1, "copy": 0.1, "bit": 0.15, "cut": 0.1, "missing": 0.05}
ANSWERS = (0, 1, 3)  # what a damaged dump may give: never a crash, never "our bug"


class Case:
    """One dump with at most one fault, and the run that is to deal with it."""

    def __init__(self, seed, folder, emulated=None):
        self.random = np.random.default_rng([seed, 1])
        self.dump, self.storage, _ = test_random.draw(seed)
        self.tool = conftest.Tool(folder)
        self.kind = str(self.random.choice(list(KINDS), p=list(KINDS.values())))
        self.processes = int(self.random.choice([1, 2, 3, 4], p=[0.55, 0.2, 0.15, 0.1]))
        self.arguments = [["--threads", "1"], ["--threads", "3"], ["--memory-budget", "1M"], []][int(self.random.integers(4))]
        on_device = emulated and self.kind in ("sound", "nan") and self.random.random() < 0.5
        self.how = {"program": emulated, "env": {"GRADCLIP_DEVICE": "cuda", "GRADCLIP_EMULATION_DEVICES": "8"}} if on_device else {}
        self.checksums = self.storage.get("checksums", True)

    def name(self):
        return f"{self.kind}, {'emulated device' if self.how else 'CPU'}, {self.processes} processes"

    def check(self):
        getattr(self, self.kind)()

    def sound(self):
        self.clip_and_compare()

    def nan(self):
        with_elements = [p for p in self.dump.parameters if any(s is not None and s.size for s in p.shards.values())]
        if with_elements:
            parameter = with_elements[self.random.integers(len(with_elements))]
            for rank, stored in parameter.shards.items():  # the first element of each, so that copies stay equal
                if stored is not None and stored.size:
                    parameter.shards[rank] = changed(stored, lambda bits: types.CANONICAL_NAN[parameter.dtype])
        self.clip_and_compare(also=["nonfinite"] if with_elements else [])

    def clip_and_compare(self, also=()):
        path = self.dump.write(self.tool.fresh("dump"), **self.storage)
        report, shards, _ = self.tool.clip(path, *self.arguments, np=self.processes, **self.how)
        test_random.assert_as_expected(self.dump, report, shards, also=also)

    def copy(self):
        """A copy of which one bit differs: verify names the parameter."""
        candidates = [p for p in self.dump.parameters if has_copies(p)]
        changed_one = None
        if candidates:
            changed_one = candidates[self.random.integers(len(candidates))]
            rank = max(rank for rank, stored in changed_one.shards.items() if stored is not None and stored.size)
            changed_one.shards[rank] = changed(changed_one.shards[rank], lambda bits: bits ^ 1)
        result = self.verify(self.dump.write(self.tool.fresh("dump"), **self.storage), (0, 1))
        if changed_one is not None:
            names = [f["parameter"] for f in result.json()["findings"] if f["kind"] == "replicas-differ"]
            assert changed_one.name in names, result

    def bit(self):
        def flip(data):
            at = self.random.integers(len(data))
            return data[:at] + bytes([data[at] ^ 1 << int(self.random.integers(8))]) + data[at + 1:]
        self.damage(flip)

    def cut(self):
        self.damage(lambda data: data[:self.random.integers(len(data))])

    def missing(self):
        self.damage(lambda data: None)

    def damage(self, change):
        path = self.dump.write(self.tool.fresh("dump"), **self.storage)
        files = sorted(path.glob("rank_*.h5"))
        file = files[self.random.integers(len(files))]
        content = change(file.read_bytes())
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        noticed = self.checksums or content is None
        self.verify(path, (1,) if noticed else (0, 1))
        if noticed:
            conftest.refused(self.processes, 3, path, "--verify", out=self.tool.fresh("out"), within=conftest.TIMEOUT)

    def verify(self, path, codes):
        result = conftest.run(self.processes, "verify", path, "--format", "json")
        assert result.code in codes and result.err == "", result
        return result


def changed(stored, change):
    """The array with its first element's bits changed."""
    bits = np.array(stored, order="C")
    first = bits.reshape(-1).view(types.BITS[next(d for d in types.ALL if types.STORED[d] == bits.dtype)])
    first[0] = change(int(first[0]))
    return bits


def has_copies(parameter):
    present = [s for s in parameter.shards.values() if s is not None and s.size]
    if parameter.mesh is None:
        return len(present) > 1 and parameter.entry.get("copies") == "replicated"
    kinds = parameter.kinds()
    replicas = any(k[0] == "replicate" and n > 1 for k, n in zip(kinds, parameter.mesh.ranks.shape))
    return bool(present) and replicas and all(k[0] in ("replicate", "shard") for k in kinds)


def run_case(seed, emulated, keep):
    """What it was. Raises what went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="gradclip-soak-"))
    try:
        case = Case(seed, folder, emulated)
        case.check()
        return case.name()
    except BaseException:
        keep = True
        print(f"seed {seed} failed; its files are in {folder}", flush=True)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first case; the next have the next numbers")
    parser.add_argument("--emulated", help="the program with the emulated device")
    parser.add_argument("--only", type=int, help="one case alone, by its seed")
    options = parser.parse_args()
    if options.only is not None:
        print(run_case(options.only, options.emulated, keep=True))
        return 0
    counts, end, seed = collections.Counter(), time.monotonic() + 60 * options.minutes, options.seed
    while time.monotonic() < end:
        try:
            counts[run_case(seed, options.emulated, keep=False)] += 1
        except BaseException as error:  # pytest.fail() is no Exception
            traceback.print_exc()
            return 1 if not isinstance(error, KeyboardInterrupt) else 130
        seed += 1
        if sum(counts.values()) % 200 == 0:
            print(f"{sum(counts.values())} cases, seeds {options.seed} to {seed - 1}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:6}  {name}")
    print(f"{sum(counts.values())} cases, seeds {options.seed} to {seed - 1}: no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
