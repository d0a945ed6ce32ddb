"""How the cost of commands grows with bytes, parameters, recorded ranks and processes, each over a factor of 64 at least.

    python growth.py run FILE.json [--only ranks,bytes] [--quick]     measures; gradclip is $GRADCLIP_BIN or in build/
    python growth.py draw FILE.json DIR                               growth_*.svg and a Markdown table of the exponents

Measured are instructions in user mode (perf stat, where there is one: they do not depend on who else uses the machine),
processor seconds, the resident peak of the largest process, and, of several processes, what their collectives carried. The
exponent is the slope of log(cost) over log(size): over the whole range, and over its last factor of 8, where constants no
longer hide it. A cost that grows no faster than the work has at most 1.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import growth_plot
import scale_dumps

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Small, but where it would be the budget that is measured: each time that shards do not fit, files are opened once more.
BUDGETS = {"bytes": "256M", "parameters": "4G", "ranks": "256M", "processes": "256M"}

#: What grows: sizes, the dump of one (ranks, parameters, elements of a shard), processes.
AXES = {
    "bytes": ([1, 4, 16, 64, 256], lambda n: (8, 16, n * 2048), lambda n: 1, "MiB of gradients"),
    "parameters": ([256, 1024, 4096, 16384, 65536], lambda n: (8, n, 16), lambda n: 1, "parameters, 8 ranks"),
    "ranks": ([256, 1024, 4096, 16384], lambda n: (n, 64, 16), lambda n: 1, "recorded ranks, 8 parameters on each"),
    "processes": ([1, 4, 16, 64], lambda n: (512, 512, 16), lambda n: n, "processes, 512 ranks"),
}
COMMANDS = {
    "bytes": ("norms", "clip", "verify", "diff", "merge"),
    "parameters": ("inspect", "norms", "clip", "verify", "diff", "merge"),
    "ranks": ("inspect", "norms", "clip", "verify", "diff", "merge"),
    "processes": ("norms",),
}


def program():
    return os.environ.get("GRADCLIP_BIN") or str(ROOT / "build" / "release" / "apps" / "gradclip" / "gradclip")


def arguments(command, dump, out, budget):
    if command == "inspect":
        return ["inspect", dump, "--quiet"]
    common = ["--quiet", "--threads", "1", "--memory-budget", budget]
    more = {"clip": ["-o", out], "merge": ["-o", out], "diff": [dump]}.get(command, [])
    return [command, dump, *more, *common]


def counts_instructions():
    perf = shutil.which("perf")
    if perf is None:
        return False
    tried = subprocess.run([perf, "stat", "-x,", "-e", "instructions:u", "true"], capture_output=True, text=True)
    return tried.returncode == 0 and tried.stderr.split(",")[0].isdigit()


def measure(command, processes=1, perf=False):
    """One run of a command line: instructions, seconds, bytes."""
    launch = ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-np", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        counted = pathlib.Path(folder) / "counted"
        report = pathlib.Path(folder) / "report.json"
        count = ["perf", "stat", "-x,", "-e", "instructions:u", "-o", str(counted)] if perf else []
        words = [*count, *launch, program(), *map(str, command)]
        if command[0] != "inspect":
            words += ["--report", str(report)]
        process = subprocess.Popen(words, env={**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1",
                                               "OMPI_MCA_btl": "self,vader", "OMPI_MCA_hwloc_base_binding_policy": "none"})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1):
            sys.exit(f"exit code {process.returncode}: {' '.join(words)}")
        found = {"seconds": usage.ru_utime + usage.ru_stime, "memory": usage.ru_maxrss * 1024}
        if perf:
            found["instructions"] = int(counted.read_text().split("\n")[-2].split(",")[0])
        if report.exists():
            run = json.loads(report.read_text())["run"]
            found["memory"] = run["memory_peak_bytes"]
            found["received"] = run["communication"]["bytes_received"]
            found["collectives"] = run["communication"]["collectives"]
    return found


def measure_axis(axis, sizes, folder, perf):
    _, dump_of, processes_of, label = AXES[axis]
    found = {}
    made = None
    for size in sizes:
        if dump_of(size) != made:
            made = dump_of(size)
            shutil.rmtree(folder / "dump", ignore_errors=True)
            scale_dumps.make(folder / "dump", *made)
        for command in COMMANDS[axis]:
            one = measure(arguments(command, folder / "dump", folder / "out", BUDGETS[axis]), processes_of(size), perf)
            found.setdefault(command, []).append({"size": size, **one})
            shutil.rmtree(folder / "out", ignore_errors=True)
            print(f"{axis} {size} {command}: " + ", ".join(f"{k} {v:.4g}" for k, v in one.items()), flush=True)
    shutil.rmtree(folder / "dump")
    return {"label": label, "commands": found}


def slope(points):
    """Of log(y) over log(x), by least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len(logs) < 2:
        return None
    mx, my = (sum(each) / len(logs) for each in zip(*logs))
    return sum((x - mx) * (y - my) for x, y in logs) / sum((x - mx) ** 2 for x, _ in logs)


def exponents(points, key):
    pairs = [(point["size"], point[key]) for point in points if key in point]
    last = [pair for pair in pairs if pair[0] * 8 >= pairs[-1][0]] if pairs else []
    return slope(pairs), slope(last)


def table(result):
    lines = ["| grows | command | instructions: exponent, at the end | memory: exponent, at the end | from, to |",
             "|---|---|---|---|---|"]
    for axis, of in result.items():
        for command, points in of["commands"].items():
            work = "instructions" if "instructions" in points[0] else "seconds"
            cells = []
            for key in (work, "memory"):
                whole, last = exponents(points, key)
                cells.append("-" if whole is None else f"{whole:.2f}, {last:.2f}")
            ends = " to ".join(f"{p['size']:,}: {p['seconds']:.2f} s, {p['memory'] / 1e6:.0f} MB"
                               for p in (points[0], points[-1]))
            lines.append(f"| {of['label']} | `{command}` | {cells[0]} | {cells[1]} | {ends} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=("run", "draw"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("directory", nargs="?", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(AXES), help="axes, separated by commas")
    parser.add_argument("--quick", action="store_true", help="two small sizes of each: does it run at all")
    options = parser.parse_args()
    result = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.action == "run":
        perf = counts_instructions()
        with tempfile.TemporaryDirectory() as folder:
            for axis in options.only.split(","):
                sizes = AXES[axis][0][:2] if options.quick else AXES[axis][0]
                result[axis] = measure_axis(axis, sizes, pathlib.Path(folder), perf)
                options.file.write_text(json.dumps(result, indent=1))
    else:
        growth_plot.draw(result, options.directory)
    print(table(result))


if __name__ == "__main__":
    main()
