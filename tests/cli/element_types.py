"""The element types of a dump in numpy, independent of torch and of gradclip.

"Stored" arrays are what a rank file holds: floats for float64, float32 and float16, raw bits (uint16, uint8) for the
rest. Rounding goes through a table of every finite number of a type, so that nothing is shared with the bit tricks of
the program under test.
"""

import functools

import numpy as np

STORED = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4"), "float16": np.dtype("<f2"),
          "bfloat16": np.dtype("<u2"), "float8_e4m3fn": np.dtype("u1"), "float8_e5m2": np.dtype("u1")}
BITS = {"float64": np.dtype("<u8"), "float32": np.dtype("<u4"), "float16": np.dtype("<u2"),
        "bfloat16": np.dtype("<u2"), "float8_e4m3fn": np.dtype("u1"), "float8_e5m2": np.dtype("u1")}
CANONICAL_NAN = {"float64": 0x7FF8000000000000, "float32": 0x7FC00000, "float16": 0x7E00,
                 "bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}
FIELDS = {"float16": (5, 10), "bfloat16": (8, 7), "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}
ALL = list(STORED)


def dtype_of(array):
    """PyTorch's name of a numpy array's float type; integers are converted to float32 by the builder."""
    return {"f8": "float64", "f4": "float32", "f2": "float16"}.get(array.dtype.str[1:], "float32")


@functools.cache
def _finite(dtype):
    """Every finite number >= 0 of a narrow type in ascending order, which is the order of its bits, and one more: the
    first number that the type would have next."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    bias, numbers = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & (2 ** mantissa_bits - 1)
        if dtype == "float8_e4m3fn":
            if code == 0x7F:
                break
        elif exponent == 2 ** exponent_bits - 1:
            break
        if exponent == 0:
            numbers.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            numbers.append((2 ** mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits))
    numbers.append(2 * numbers[-1] - numbers[-2])
    return np.array(numbers)


def widen(stored, dtype):
    """Stored elements as float64 numbers, exactly."""
    stored = np.asarray(stored)
    if dtype not in FIELDS or dtype == "float16":
        return stored.astype(np.float64)
    magnitudes, bits = _finite(dtype)[:-1], BITS[dtype].itemsize * 8
    code = stored & (2 ** (bits - 1) - 1)
    values = np.where(code < len(magnitudes), magnitudes[np.minimum(code, len(magnitudes) - 1)], np.nan)
    if dtype != "float8_e4m3fn":
        values = np.where(code == len(magnitudes), np.inf, values)
    return np.where(stored >> (bits - 1), -values, values)


def narrow(numbers, dtype):
    """float64 numbers as stored elements: nearest, ties to even, overflow to infinity (float8_e4m3fn: NaN); NaN becomes
    the type's canonical one."""
    numbers = np.asarray(numbers, np.float64)
    bits = np.empty(numbers.shape, BITS[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in ("float64", "float32"):
            bits[...] = numbers.astype(STORED[dtype]).view(BITS[dtype])
        else:
            table, width = _finite(dtype), BITS[dtype].itemsize * 8
            magnitude = np.minimum(np.where(np.isnan(numbers), 0, np.abs(numbers)), table[-1])
            above = np.searchsorted(table, magnitude)
            below = np.maximum(above - 1, 0)
            to_below, to_above = magnitude - table[below], table[above] - magnitude
            down = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
            code = np.where(down & (magnitude != table[above]), below, above)
            bits[...] = code + np.where(np.signbit(numbers), 2 ** (width - 1), 0)
    if dtype == "float8_e4m3fn":
        numbers = np.where((bits & 0x7F) == 0x7F, np.nan, numbers)
    bits[np.isnan(numbers)] = CANONICAL_NAN[dtype]
    return bits.view(STORED[dtype])


def same_bits(a, b):
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
