#!/usr/bin/env python3
"""Static facts of the CUDA kernels, from what nvcc and ptxas make of them. No GPU, nothing but Python's own library.

    kernel_facts.py compile -- NVCC OPTION...   compiles both files of kernels for one architecture, unless that is done
    kernel_facts.py check                       what PTX must and must not contain (facts.py), and what scaling computes
    kernel_facts.py resources                   registers, spills, shared memory against resources.txt
    kernel_facts.py resources --all             ... and a table of all architectures (minutes)
    kernel_facts.py resources --write           ... which then replaces resources.txt
    kernel_facts.py counts                      instructions for each element, as docs/cuda.md has them

--folder is where compile leaves what the others read. ctest runs compile, check and resources (label kernels)."""

import argparse
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import counts  # noqa: E402
import execution  # noqa: E402
import facts  # noqa: E402
import ptx  # noqa: E402
import resources  # noqa: E402

FILES = ["statistics", "elementwise"]
ARCHITECTURES = ["80", "90", "100", "120"]
TABLE = HERE / "resources.txt"


def nvcc_version(nvcc):
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d[\d.]+)", text)
    return found[1] if found else "unknown"


def fingerprint(command, version):
    """Of everything that the result depends on."""
    digest = hashlib.sha256(json.dumps([command, version]).encode())
    for folder in ("backend", "base", "cuda_runtime"):
        for path in sorted((ROOT / "src" / folder).rglob("*")):
            if path.suffix in (".cu", ".hpp"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def compile_for(architecture, command, folder):
    """PTX and ptxas's log of each file, in folder/architecture. Nothing is done twice."""
    nvcc, version = command[0], nvcc_version(command[0])
    place = folder / architecture
    stamp, key = place / "stamp", fingerprint(command, version)
    if stamp.exists() and stamp.read_text() == key:
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "nvcc.txt").write_text(version)
    for file in FILES:
        run = subprocess.run(
            [nvcc, *command[1:], "-O3", "-DNDEBUG", "-Xptxas=-v", f"-arch=sm_{architecture}", "-cubin", "--keep",
             "--keep-dir", place, "-o", place / f"{file}.cubin", ROOT / f"src/backend/cuda/{file}.cu"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if run.returncode != 0:
            sys.exit(f"{run.stdout}\nkernels: nvcc failed on {file}.cu")
        (place / f"{file}.log").write_text(run.stdout)
        for path in place.iterdir():
            if path.suffix not in (".ptx", ".log", ".txt"):
                path.unlink()
    stamp.write_text(key)
    return place


def usages_in(place):
    usages = {}
    for file in FILES:
        usages.update(resources.parse_log((place / f"{file}.log").read_text()))
    return dict(sorted(usages.items(), key=lambda item: order_of(item[0])))


def order_of(title):
    """By kernel, then in the types' order."""
    kernel, words = title.split("<")[0], re.findall(r"\w+", title)[1:]
    known = ["statistics", "scale", "combine", "accumulate"]
    return (known.index(kernel) if kernel in known else len(known),
            [(ptx.TYPES + ptx.TERMS).index(word) for word in words if word in ptx.TYPES + ptx.TERMS])


def functions_in(place):
    return [function for file in FILES for function in ptx.parse((place / f"{file}.ptx").read_text())]


def finish(wrong, what):
    for sentence in wrong:
        print(f"kernels: {sentence}")
    if wrong:
        sys.exit(f"kernels: {len(wrong)} of {what} do not hold")
    print(f"kernels: {what} hold")


def run_resources(options):
    place = options.folder / options.architecture
    usages, version = usages_in(place), (place / "nvcc.txt").read_text()
    if options.all or options.write:
        command = json.loads((options.folder / "command.json").read_text())
        by_architecture = {each: usages_in(compile_for(each, command, options.folder)) for each in ARCHITECTURES}
        wrong = [f"sm_{each}: {sentence}" for each in ARCHITECTURES
                 for sentence in resources.spilling(by_architecture[each])]
        text = resources.write_table(version, by_architecture)
        print(text, end="")
        if options.write and not wrong:
            TABLE.write_text(text)
        return finish(wrong, "the kernels without spills and stacks")
    wrong, remark = resources.compare(usages, version, options.architecture, TABLE.read_text())
    if remark:
        print(f"kernels: {remark}")
    if wrong:
        print("kernels: if the change is meant: tests/kernels/kernel_facts.py resources --write "
              f"--folder {options.folder}")
    return finish(wrong, f"the resources for sm_{options.architecture}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compile", "check", "resources", "counts"])
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/release/tests/kernels/kept")
    parser.add_argument("--architecture", default="90", choices=ARCHITECTURES)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:end]), words[end + 1 :]
    if options.what == "compile":
        if not command:
            parser.error("compile needs -- NVCC OPTION...")
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "command.json").write_text(json.dumps(command))
        compile_for(options.architecture, command, options.folder)
        return
    place = options.folder / options.architecture
    if not (place / "stamp").exists():
        sys.exit(f"kernels: nothing is compiled in {place}; ctest -L kernels does that")
    if options.what == "check":
        functions = functions_in(place)
        finish(facts.check(functions) + execution.check(functions), f"the facts of {len(functions)} functions")
    elif options.what == "resources":
        run_resources(options)
    else:
        print("\n".join(counts.table(functions_in(place))))


if __name__ == "__main__":
    main()
