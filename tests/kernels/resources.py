"""What a kernel takes of a multiprocessor, from ptxas -v, and the committed table of it."""

import re
from dataclasses import dataclass

from ptx import title_of

HEADER = """\
# What each kernel takes of a multiprocessor, from ptxas. Registers by compute capability; bytes of shared memory and
# barriers, which are the same for all. None has a stack or spills. Written by
#   tests/kernels/kernel_facts.py resources --write
"""


@dataclass(frozen=True)
class Usage:
    registers: int
    shared: int
    barriers: int
    stack: int
    spills: int  #: bytes stored and loaded


def parse_log(text):
    """Usage by title, or by name for functions that kernels call (registers 0: their caller's count)."""
    usages, name, memory = {}, None, {}
    current = None
    for line in text.splitlines():
        found = re.search(r"Compiling entry function '([^']+)'", line)
        if found:
            current = found[1]
        found = re.search(r"Function properties for (\S+)", line)
        if found:
            name = found[1]
        found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if found:
            memory[name] = (int(found[1]), int(found[2]) + int(found[3]))
        found = re.search(r"Used (\d+) registers", line)
        if found:
            shared, barriers = (re.search(pattern, line) for pattern in (r"(\d+) bytes smem", r"used (\d+) barriers"))
            usages[str(title_of(current) or current)] = Usage(
                int(found[1]), int(shared[1]) if shared else 0, int(barriers[1]) if barriers else 0, *memory[current])
    for name, (stack, spills) in memory.items():
        if title_of(name) is None and name not in usages:
            usages[name] = Usage(0, 0, 0, stack, spills)
    return usages


def spilling(usages):
    return [f"{name}: a stack of {usage.stack} bytes, {usage.spills} bytes of spills"
            for name, usage in usages.items() if usage.stack or usage.spills]


def write_table(version, by_architecture):
    """The table's text. @param by_architecture  usages by "80", "90", ..."""
    architectures = list(by_architecture)
    first = by_architecture[architectures[0]]
    lines = [HEADER + f"nvcc {version}",
             f"{'kernel':<44}" + "".join(f"{architecture:>6}" for architecture in architectures) + "  shared  barriers"]
    for name, usage in first.items():
        if not usage.registers:
            continue
        each = [by_architecture[architecture][name] for architecture in architectures]
        if len({(one.shared, one.barriers) for one in each}) != 1:
            raise SystemExit(f"{name}: shared memory or barriers differ by architecture; the table needs more columns")
        lines.append(f"{name:<44}" + "".join(f"{one.registers:>6}" for one in each) +
                     f"{usage.shared:>8}{usage.barriers:>10}")
    return "\n".join(lines) + "\n"


def read_table(text):
    """The version of nvcc, and by architecture each kernel's (registers, shared, barriers)."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    version = lines[0].split()[1]
    architectures = lines[1].split()[1:-2]
    table = {architecture: {} for architecture in architectures}
    for line in lines[2:]:
        name, numbers = line[:44].strip(), [int(word) for word in line[44:].split()]
        for architecture, registers in zip(architectures, numbers):
            table[architecture][name] = (registers, numbers[-2], numbers[-1])
    return version, table


def compare(usages, version, architecture, table_text):
    """(sentences about what is wrong, a remark or "")."""
    wrong = spilling(usages)
    recorded_version, table = read_table(table_text)
    if version != recorded_version:
        return wrong, f"this is nvcc {version}, the table is of {recorded_version}: looked for spills and stacks only"
    if architecture not in table:
        return wrong, f"the table has no column {architecture}: looked for spills and stacks only"
    kernels = {name: (usage.registers, usage.shared, usage.barriers)
               for name, usage in usages.items() if usage.registers}
    recorded = table[architecture]
    for name in sorted(set(kernels) | set(recorded)):
        if kernels.get(name) != recorded.get(name):
            wrong.append(f"{name}: (registers, shared, barriers) are {kernels.get(name)}, "
                         f"in the table {recorded.get(name)}")
    return wrong, ""
