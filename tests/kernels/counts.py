"""Instructions for each element in the loops that every gradient goes through, counted by executing them."""

import random
import struct

from ptx import SIZES, TYPES
from ptx_thread import Memory, run_block

VECTOR_BYTES, LANES = 16, 64
DIVIDE, MULTIPLY, CLIP_IN_GRADIENT_PRECISION = 1, 2, 1


def elements_of(dtype, count):
    """Normal numbers of both signs, as gradients are."""
    chance = random.Random(7)
    formats = {"float64": "<d", "float32": "<f", "float16": "<e"}
    data = bytearray()
    for _ in range(count):
        number = chance.gauss(0.0, 1.0)
        if dtype in formats:
            data += struct.pack(formats[dtype], number)
        elif dtype == "bfloat16":
            data += struct.pack("<f", number)[2:]
        else:
            data.append(chance.randrange(0x08, 0x60) | chance.randrange(2) << 7)
    return bytes(data)


def factors_of(divisor=None, coefficient=None, multiplier=None):
    """ScaleFactors as the device has it."""
    step = DIVIDE if divisor else MULTIPLY if multiplier else 0
    return struct.pack("<4dfBBBBB7x", divisor or multiplier or 1.0, 1.0, coefficient or 1.0, 1.0, 1.0, step, 0,
                       CLIP_IN_GRADIENT_PRECISION if coefficient else 0, 0, 0)


def as_given(dtype, divisor=None, **others):
    """Factors as the backend gives them to a kernel: of 16 bits mostly with a reciprocal (src/base/divisions.hpp)."""
    if divisor and SIZES[dtype] == 2:
        return factors_of(multiplier=1.0 / divisor, **others)
    return factors_of(divisor=divisor, **others)


class Execution:
    """One thread of a kernel on one chunk."""

    def __init__(self, function, dtype, count, factors):
        self.memory, elements = Memory(), elements_of(dtype, count)
        self.data = self.memory.place(elements)
        self.size = len(elements)
        chunk = self.memory.place(struct.pack("<Q4I", self.data, count, 0, 0, 0))
        table = struct.pack("<QQI4x", chunk, self.memory.place(factors), 1)
        request = struct.pack("<dB7x", 2.0, 0)
        out = struct.pack("<Q", self.memory.place(bytes(64)))
        self.executed = run_block(function, self.memory, [table, request, out], function.threads).executed

    @property
    def elements(self):
        return bytes(self.memory.spaces["global"][self.data : self.data + self.size])


def per_element(function, factors):
    """Instructions of one thread for one of its elements: what twice as many elements add. Counter of opcodes."""
    dtype = function.title.types[0]
    owned = VECTOR_BYTES // SIZES[dtype]
    if function.title.kernel == "statistics":
        count, own = 16 * LANES, 16 * owned  # rows of a sub-block, of which a thread has one vector each
    else:
        count, own = 4 * owned * function.threads, 4 * owned
    once = Execution(function, dtype, count, factors).executed
    twice = Execution(function, dtype, 2 * count, factors).executed
    return {opcode: (twice[opcode] - once[opcode]) / own for opcode in twice if twice[opcode] != once[opcode]}


CASES = [
    ("statistics", "squares", "statistics", {}),
    ("statistics", "squares", "statistics, divided", {"divisor": 1000.0}),
    ("scale", "", "scale: clip", {"coefficient": 0.3}),
    ("scale", "", "scale: divide, clip", {"divisor": 1000.0, "coefficient": 0.3}),
]


def table(functions):
    """Lines of a Markdown table: instructions, and of them those of the float64 units and branches."""
    titles = {str(function.title): function for function in functions if function.title}
    yield "| instructions per element (float64 arithmetic, branches) | " + " | ".join(c[2] for c in CASES) + " |"
    yield "|---" * (1 + len(CASES)) + "|"
    for dtype in TYPES:
        cells = []
        for kernel, terms, _, factors in CASES:
            title = f"{kernel}<{dtype}{', ' + terms if terms else ''}>"
            executed = per_element(titles[title], as_given(dtype, **factors))
            wide = sum(number for opcode, number in executed.items()
                       if opcode.endswith(".f64") and opcode.split(".")[0] in ("add", "sub", "mul", "div", "fma"))
            branches = sum(number for opcode, number in executed.items() if opcode.startswith("bra"))
            cells.append(f"{sum(executed.values()):.1f} ({wide:.1f}, {branches:.1f})")
        yield f"| {dtype} | " + " | ".join(cells) + " |"
