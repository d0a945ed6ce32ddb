"""What the PTX of every kernel must and must not contain. check() returns what is wrong, a sentence each."""

import collections
import re

from ptx import SIZES, access_bytes, is_memory_access, state_space

VECTOR_BYTES = 16
LANES, SUB_BLOCKS = 64, 16
POW = "__internal_accurate_pow"

#: Contractions that a source did not ask for would change bits. These are pow's and powf's own, in the order of powf's
#: polynomial and the division inside it; everything else multiplies and adds in two roundings.
FUSED = {POW: 39}
FUSED_GENERAL = 19  # powf, inlined once; a float64's term is pow's

#: Reciprocals that powf and pow refine; any other approximation is a fast-math flag.
APPROXIMATE = {POW: 1}
APPROXIMATE_GENERAL = 1


def threads_of(title):
    if title.kernel != "statistics":
        return 256
    owned = 2 if title.terms == "general" else VECTOR_BYTES // SIZES[title.types[0]]
    return LANES // owned * SUB_BLOCKS


def barriers_of(title):
    """One before the totals are used, one after; one more where a chunk may be gone over twice."""
    if title.kernel != "statistics":
        return 0
    return 3 if title.types[0] == "float64" or title.terms == "general" else 2


def floats(opcode):
    return re.search(r"\.(f16|bf16|f32|f64|f16x2|bf16x2)$", opcode)


def check_function(function):
    """What holds for kernels and for the functions that they call."""
    name = str(function.title or function.name)
    wrong = []
    for instruction in function.instructions:
        parts, opcode = instruction.parts, instruction.opcode
        if is_memory_access(instruction):
            space = state_space(instruction)
            if space == "generic":
                wrong.append(f"{name}: a generic access, which the device has to look up: {instruction.text}")
            if space == "local":
                wrong.append(f"{name}: local memory, which is in the device's slow one: {instruction.text}")
        if instruction.base in ("atom", "red"):
            if floats(opcode):
                wrong.append(f"{name}: an atomic on a floating-point number, whose order is left to chance: {opcode}")
            if state_space(instruction) != "shared":
                wrong.append(f"{name}: an atomic outside shared memory: {opcode}")
        if "ftz" in parts and "approx" not in parts:
            wrong.append(f"{name}: subnormals flushed to zero: {opcode}")
        if instruction.base == "call" and not any(POW in operand for operand in instruction.operands):
            wrong.append(f"{name}: a call: {instruction.text}")
        if instruction.base in ("div", "sqrt", "rcp", "add", "sub", "mul") and floats(opcode):
            if "rn" not in parts and "approx" not in parts:
                wrong.append(f"{name}: not rounded to nearest even: {opcode}")
    if any(declaration.startswith(".local") for declaration in function.declarations):
        wrong.append(f"{name}: local memory is declared")

    general = function.title is not None and function.title.terms == "general" and function.title.types[0] != "float64"
    for what, pattern, expected in (
        ("fused multiply-adds", r"fma\..*|mad\..*\.f\d+", FUSED.get(function.name, FUSED_GENERAL if general else 0)),
        ("approximations", r".*\.approx\..*", APPROXIMATE.get(function.name, APPROXIMATE_GENERAL if general else 0)),
    ):
        found = function.count(pattern)
        if found != expected:
            wrong.append(f"{name}: {found} {what}, expected {expected}")
    return wrong


def in_a_loop(function, opcode):
    """Whether an instruction with this opcode is inside a loop. What an unrolled one leaves over stands behind it."""
    ranges = function.loops()
    places = [index for index, instruction in enumerate(function.instructions) if instruction.opcode == opcode]
    return any(first <= index <= last for first, last in ranges for index in places)


def streaming(function, base):
    """Opcodes of loads or stores that pass by the caches, with their numbers: those of whole vectors."""
    return collections.Counter(
        instruction.opcode for instruction in function.instructions
        if instruction.base == base and "global" in instruction.parts and "cs" in instruction.parts)


def vector_opcodes(base, sizes, count):
    """What moves `count` elements of each of these sizes in one instruction."""
    words = {1: "u8", 2: "u16", 4: "u32", 8: "v2.u32", 16: "v4.u32"}
    return {f"{base}.global.cs.{words[size * count]}" for size in sizes}


def check_vectors(function):
    """Gradients are read and written in whole vectors, inside the loops, and in no narrower piece on that way."""
    title = function.title
    name, wrong = str(title), []
    sizes = [SIZES[kind] for kind in title.types]
    count = VECTOR_BYTES // max(sizes)
    loads, stores = streaming(function, "ld"), streaming(function, "st")
    expected_loads, expected_stores = set(), set()
    if title.kernel == "statistics" and title.terms != "general":
        expected_loads = vector_opcodes("ld", sizes, count)
    elif title.kernel == "scale":
        expected_loads, expected_stores = vector_opcodes("ld", sizes, count), vector_opcodes("st", sizes, count)
    elif title.kernel == "accumulate":
        expected_loads, expected_stores = vector_opcodes("ld", sizes, count), vector_opcodes("st", sizes[:1], count)
    for what, found, expected in (("loads", loads, expected_loads), ("stores", stores, expected_stores)):
        if set(found) != expected:
            wrong.append(f"{name}: vector {what} {sorted(found)}, expected {sorted(expected)}")
        for opcode in found:
            if not in_a_loop(function, opcode):
                wrong.append(f"{name}: {opcode} in no loop")
    if expected_loads and max(access_bytes(i) for i in function.instructions if i.base == "ld") != VECTOR_BYTES:
        wrong.append(f"{name}: no load of {VECTOR_BYTES} bytes")
    # As recorded, and scaled on the way: two loops.
    if title.kernel == "statistics" and title.terms != "general" and len(hot_loops(function)) < 2:
        wrong.append(f"{name}: {len(hot_loops(function))} loops over vectors, expected one unscaled and one scaled")
    return wrong


def hot_loops(function):
    """Innermost loops that load vectors, as index ranges."""
    ranges = [range_ for range_ in function.loops()
              if any(i.opcode.startswith("ld.global.cs") for i in function.instructions[range_[0] : range_[1] + 1])]
    return [a for a in ranges if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in ranges)]


def check_hot_loops(function):
    """A loop over vectors meets no other thread and no memory but its own."""
    name, wrong = str(function.title), []
    looks_up = function.title.kernel == "statistics" and function.title.types[0].startswith("float8")
    for first, last in hot_loops(function):
        for instruction in function.instructions[first : last + 1]:
            base, parts = instruction.base, instruction.parts
            if base in ("bar", "atom", "red", "shfl", "redux", "call", "vote", "membar", "fence"):
                wrong.append(f"{name}: in a loop over vectors: {instruction.text}")
            if base in ("ld", "st") and "cs" not in parts and not (looks_up and instruction.opcode == "ld.shared.u8"):
                wrong.append(f"{name}: in a loop over vectors: {instruction.text}")
    return wrong


def check_kernel(function):
    title = function.title
    name, wrong = str(title), check_vectors(function) + check_hot_loops(function)
    if function.threads != threads_of(title):
        wrong.append(f"{name}: blocks of {function.threads} threads, expected {threads_of(title)}")
    barriers = function.count(r"bar\..*|barrier\..*")
    if barriers != barriers_of(title):
        wrong.append(f"{name}: {barriers} barriers, expected {barriers_of(title)}")
    return wrong


def expected_titles():
    types = list(SIZES)
    titles = {f"statistics<{kind}, {terms}>" for kind in types for terms in ("squares", "products", "general")}
    titles |= {f"{kernel}<{kind}>" for kernel in ("scale", "combine") for kind in types}
    return titles | {f"accumulate<{into}, {source}>" for into in types for source in types}


def check(functions, titles=None):
    """@param titles  of the kernels that must be there; without it all of the project's"""
    wrong = []
    found = [str(function.title) for function in functions if function.is_kernel]
    expected = expected_titles() if titles is None else set(titles)
    for title in sorted(expected - set(found)):
        wrong.append(f"{title}: no such kernel")
    for title in sorted(set(found) - expected):
        wrong.append(f"{title}: a kernel that is not expected")
    for function in functions:
        wrong += check_function(function)
        if function.is_kernel and function.title is not None:
            wrong += check_kernel(function)
    return wrong
