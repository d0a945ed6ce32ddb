"""What nvcc made of scaling computes the right bits: its PTX executed on 16-bit elements of every kind."""

import math
import struct

import counts
from ptx_thread import Memory, Thread

#: Divides and clips, with numbers that round everywhere, lose subnormals, and overflow.
CASES = [{"coefficient": 0.3}, {"divisor": 1234.567, "coefficient": 0.7}, {"coefficient": 1e30}]


def float32(x):
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def widen(dtype, bits):
    if dtype == "float16":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def narrow(dtype, x):
    """To nearest even; the canonical NaN."""
    if math.isnan(x):
        return 0x7E00 if dtype == "float16" else 0x7FC0
    if dtype == "float16":
        try:
            return struct.unpack("<H", struct.pack("<e", x))[0]
        except OverflowError:
            return 0xFC00 if x < 0 else 0x7C00
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def scaled(dtype, bits, divisor=None, coefficient=None):
    if divisor is not None:
        bits = narrow(dtype, float32(widen(dtype, bits) / divisor))
    return narrow(dtype, float32(widen(dtype, bits) * coefficient))


def check_scale(function, patterns):
    """Sentences about elements that came out wrong."""
    dtype, wrong = function.title.types[0], []
    for case in CASES:
        numbers = {name: float32(number) for name, number in case.items()}
        memory = Memory()
        data = memory.place(struct.pack(f"<{len(patterns)}H", *patterns))
        chunk = memory.place(struct.pack("<Q4I", data, len(patterns), 0, 0, 0))
        table = struct.pack("<QQI4x", chunk, memory.place(counts.factors_of(**numbers)), 1)
        for number in range(function.threads):
            Thread(function, memory, [table], {}, number, function.threads).run(past_barriers=True)
        results = struct.unpack(f"<{len(patterns)}H", memory.spaces["global"][data : data + 2 * len(patterns)])
        for bits, result in zip(patterns, results):
            expected = scaled(dtype, bits, **numbers)
            if result != expected:
                wrong.append(f"{function.title}, {case}: {bits:#06x} became {result:#06x}, expected {expected:#06x}")
    return wrong


def check(functions):
    """Every 41st pattern and what lies around zero, the normal numbers' beginning, infinity and NaN."""
    titles = {str(function.title): function for function in functions if function.title}
    edges = [0, 1, 2, 0x7F, 0x80, 0x81, 0x3FF, 0x400, 0x401, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7F7F, 0x7F80, 0x7F81,
             0x7FFF]
    patterns = list(range(0, 1 << 16, 41)) + edges + [bits | 0x8000 for bits in edges]
    wrong = []
    for dtype in ("bfloat16", "float16"):
        wrong += check_scale(titles[f"scale<{dtype}>"], patterns)
    return wrong
