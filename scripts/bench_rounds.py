"""Commands measured in turn, round after round, and what became of them as tables and JSON. For bench_peers.py."""

import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time


@dataclasses.dataclass
class Command:
    words: list
    cold: tuple = ()  #: directories whose files leave the page cache before each run


@dataclasses.dataclass
class Ratio:
    """One command's time over another's, in seconds or, for how much faster it is, the other way round."""

    name: str
    over: str
    under: str
    goal: str = ""  #: "≤ 1.5", "≥ 20" or nothing

    def reached(self, value):
        if not self.goal:
            return ""
        limit = float(self.goal.split()[1])
        return "yes" if (value <= limit if self.goal.startswith("≤") else value >= limit) else "**no**"


def forget(directory):
    """Takes a directory's files out of the page cache: what is dirty is written first."""
    for file in pathlib.Path(directory).rglob("*"):
        if not file.is_file():
            continue
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(command, out, codes):
    """Wall seconds, processor seconds and peak memory of one run, after its output is gone."""
    shutil.rmtree(out, ignore_errors=True)
    for directory in command.cold:
        forget(directory)
    start = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command.words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) not in codes:
        sys.exit(f"{command.words} ended with status {status}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


class Bench:
    """Measures, prints tables as it goes, and keeps everything for a JSON file."""

    def __init__(self, rounds, out):
        self.rounds, self.out, self.tables = rounds, pathlib.Path(out), []
        processor = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        self.machine = {"processor": processor[1] if processor else platform.machine(),
                        "processors": len(os.sched_getaffinity(0)), "load at the start": round(os.getloadavg()[0], 1)}
        print("machine: {processor}, {processors} processors, load {load at the start}".format(**self.machine))

    def measure(self, what, commands, ratios, codes=(0,)):
        runs = {name: [] for name in commands}
        for round_number in range(self.rounds + 1):
            for name, command in commands.items():
                run = timed(command, self.out, codes)
                if round_number > 0:  # the first round warms the page cache and the machine's memory
                    runs[name].append(run)
        shutil.rmtree(self.out, ignore_errors=True)
        self.table(what, {name: dict(zip(("seconds", "processor", "memory"), map(list, zip(*of_one))))
                          for name, of_one in runs.items()}, ratios)

    def table(self, what, runs, ratios):
        load = os.getloadavg()[0]
        print(f"\n{what}; {self.rounds} interleaved round{'s' if self.rounds > 1 else ''}, load {load:.1f}\n")
        print("| what | seconds, median (smallest to largest) | processor seconds, smallest | peak memory, MB |")
        print("|---|---|---|---|")
        for name, run in runs.items():
            digits = 2 if min(run["seconds"]) > 0.1 else 4
            print(f"| {name} | {spread(run['seconds'], digits)} | {min(run['processor']):.{digits}f} | "
                  f"{max(run['memory']) / 1e6:.0f} |")
        print("\n| ratio | of the smallest | median (smallest to largest) | of processor seconds | goal | reached |")
        print("|---|---|---|---|---|---|")
        rows = []
        for ratio in ratios:
            over, under = runs[ratio.over], runs[ratio.under]
            smallest = min(over["seconds"]) / min(under["seconds"])
            processor = min(over["processor"]) / max(min(under["processor"]), 1e-4)
            each = [x / y for x, y in zip(over["seconds"], under["seconds"])]
            print(f"| {ratio.name} | {smallest:.2f} | {spread(each)} | {processor:.2f} | {ratio.goal} | "
                  f"{ratio.reached(smallest)} |")
            rows.append({"name": ratio.name, "of the smallest": smallest, "rounds": each, "processor": processor,
                         "goal": ratio.goal, "reached": ratio.reached(smallest).strip("*")})
        sys.stdout.flush()
        self.tables.append({"what": what, "load": load, "runs": runs, "ratios": rows})

    def write(self, path):
        pathlib.Path(path).write_text(json.dumps({"machine": self.machine, "rounds": self.rounds, "tables": self.tables},
                                                 indent=1, ensure_ascii=False) + "\n")
