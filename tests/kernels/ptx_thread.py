"""Executes a kernel's PTX for one thread, to count the instructions that its data make it execute.

A block's threads run one after another up to the first barrier; then one of them goes on, until it ends or meets the
first instruction that needs the others. Registers hold bits, as unsigned integers."""

import math
import re
import struct
from collections import Counter

WIDTHS = {"%p": 1, "%rs": 16, "%r": 32, "%rd": 64, "%f": 32, "%fd": 64}
NEEDS_OTHERS = ("shfl", "redux", "vote", "activemask")


class Unsupported(Exception):
    """An instruction that nvcc did not write in these kernels when this was made."""


FORMATS = {16: "<e", 32: "<f", 64: "<d"}


def float_of(bits, width):
    return struct.unpack(FORMATS[width], bits.to_bytes(width // 8, "little"))[0]


def bits_of(value, width):
    """Rounded to nearest even; a double's sum, product or quotient of float32 numbers rounds to float32 as one step."""
    try:
        return int.from_bytes(struct.pack(FORMATS[width], value), "little")
    except OverflowError:
        return bits_of(math.copysign(math.inf, value), width)


def signed(bits, width):
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits


class Memory:
    """Global and shared memory of a block."""

    def __init__(self):
        self.spaces = {"global": bytearray(), "shared": bytearray()}

    def place(self, data, space="global"):
        """The address of a copy of the bytes, aligned to 256."""
        memory = self.spaces[space]
        memory.extend(bytes(-len(memory) % 256 + 256))
        address = len(memory)
        memory.extend(data)
        return address

    def load(self, space, address, size):
        data = self.spaces[space][address : address + size]
        if len(data) != size or address % size:
            raise Unsupported(f"a load of {size} bytes at {address}")
        return int.from_bytes(data, "little")

    def store(self, space, address, size, bits):
        if address + size > len(self.spaces[space]) or address % size:
            raise Unsupported(f"a store of {size} bytes at {address}")
        self.spaces[space][address : address + size] = (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")


COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}


def divide(a, b):
    if b != 0 or math.isnan(a):
        return a / b if b != 0 else math.nan
    return math.nan if a == 0 else math.copysign(math.inf, a) * math.copysign(1.0, b)


def arithmetic(base, values, width):
    """Of floating-point numbers."""
    a, b = values[0], values[1] if len(values) > 1 else 0.0
    return {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: divide(a, b),
            "rcp": lambda: divide(1.0, a), "neg": lambda: -a, "abs": lambda: abs(a),
            "max": lambda: b if math.isnan(a) else a if math.isnan(b) else max(a, b),
            "min": lambda: b if math.isnan(a) else a if math.isnan(b) else min(a, b),
            "fma": lambda: exact_fma(a, b, values[2], width)}[base]()


def exact_fma(a, b, c, width):
    from fractions import Fraction
    if not all(math.isfinite(x) for x in (a, b, c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if width == 64:
        return float(exact)
    raise Unsupported("fma.f32")


class Thread:
    def __init__(self, function, memory, parameters, symbols, number, block):
        self.function, self.memory, self.parameters, self.symbols = function, memory, parameters, symbols
        self.registers = {"%tid.x": number, "%ntid.x": block, "%ctaid.x": 0}
        self.at = 0
        self.executed = Counter()

    def run(self, past_barriers, limit=10_000_000):
        """Until the end, the first barrier, or the first instruction that needs other threads."""
        instructions, labels = self.function.instructions, self.function.labels
        for _ in range(limit):
            if self.at >= len(instructions):
                return
            instruction = instructions[self.at]
            base = instruction.base
            if base in NEEDS_OTHERS or base in ("ret", "exit") and not instruction.predicate:
                return
            if base == "bar" and not past_barriers:
                return
            self.at += 1
            self.executed[instruction.opcode] += 1
            if instruction.predicate:
                negated, register = instruction.predicate.startswith("!"), instruction.predicate.lstrip("!")
                if bool(self.registers[register]) == negated:
                    continue
            if base == "bra":
                self.at = labels[instruction.operands[0]]
            elif base != "bar":
                self.execute(instruction)
        raise Unsupported("a loop without end")

    # -----------------------------------------------------------------------------------------------------------------

    def read(self, operand, kind="b64"):
        if operand.startswith("{"):
            words = [word.strip() for word in operand.strip("{}").split(",")]
            bits = shift = 0
            for word in words:
                bits |= self.registers[word] << shift
                shift += self.width(word)
            return bits
        if operand.startswith("%"):
            return self.registers[operand]
        if operand.startswith("0f") or operand.startswith("0d"):
            return int(operand[2:], 16)
        if operand in self.symbols:
            return self.symbols[operand]
        return int(operand, 0) & ((1 << int(re.sub(r"\D", "", kind) or 64)) - 1)

    @staticmethod
    def width(register):
        return WIDTHS[re.match(r"%[a-z]+", register)[0]] if register != "%temp" else 32

    def write(self, operand, bits):
        if operand.startswith("{"):
            for word in (word.strip() for word in operand.strip("{}").split(",")):
                self.registers[word] = bits & ((1 << self.width(word)) - 1)
                bits >>= self.width(word)
        else:
            self.registers[operand] = bits & ((1 << self.width(operand)) - 1)

    def address(self, operand):
        base, _, offset = operand.strip("[]").partition("+")
        return (self.read(base) + int(offset or "0", 0)) & (1 << 64) - 1

    def execute(self, instruction):
        base, parts, operands = instruction.base, instruction.parts, instruction.operands
        kind = parts[-1]
        width = int(re.sub(r"\D", "", kind)) if re.fullmatch(r"[busf]\d+", kind) else 1
        if base in ("ld", "st", "atom"):
            return self.access(instruction, width)
        if base == "cvta" or base == "mov":
            return self.write(operands[0], self.read(operands[1], kind))
        if base == "cvt":
            return self.convert(parts, operands)
        if base == "setp":
            return self.compare(parts, operands, kind, width)
        values = [self.read(operand, kind) for operand in operands[1:]]
        if kind == "pred":
            values = [bool(value) for value in values]
        if base == "selp":
            return self.write(operands[0], values[0] if values[2] else values[1])
        if base == "prmt":
            return self.write(operands[0], permute(*values))
        if kind.startswith("f"):
            numbers = [float_of(value & (1 << width) - 1, width) for value in values]
            return self.write(operands[0], bits_of(arithmetic(base, numbers, width), width))
        return self.write(operands[0], integers(base, parts, values, kind, width))

    def access(self, instruction, width):
        parts, operands = instruction.parts, instruction.operands
        size = width // 8
        if "param" in parts:
            found = re.fullmatch(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", operands[1])
            data, offset = self.parameters[int(found[1])], int(found[2] or 0)
            return self.spread(operands[0], size, lambda i: int.from_bytes(
                data[offset + i * size : offset + (i + 1) * size], "little"))
        space = "global" if "global" in parts else "shared"
        if instruction.base == "ld":
            address = self.address(operands[1])
            return self.spread(operands[0], size, lambda i: self.memory.load(space, address + i * size, size))
        if instruction.base == "st":
            address = self.address(operands[0])
            words = [word.strip() for word in operands[1].strip("{}").split(",")]
            for i, word in enumerate(words):
                self.memory.store(space, address + i * size, size, self.read(word))
            return None
        raise Unsupported(instruction.text)

    def spread(self, operand, size, word):
        for i, register in enumerate(register.strip() for register in operand.strip("{}").split(",")):
            self.write(register, word(i))

    def convert(self, parts, operands):
        to, source = parts[-2], parts[-1]
        to_width, source_width = int(to[1:]), int(source[1:])
        bits = self.read(operands[1], source) & ((1 << source_width) - 1)
        if source[0] == "f":
            value = float_of(bits, source_width)
        else:
            value = signed(bits, source_width) if source[0] == "s" else bits
        if to[0] == "f":
            result = bits_of(float(value), to_width)
        else:
            result = int(value) if source[0] != "f" or math.isfinite(value) else 0
        self.write(operands[0], result & ((1 << 64) - 1))

    def compare(self, parts, operands, kind, width):
        a, b = (self.read(operand, kind) & ((1 << width) - 1) for operand in operands[1:3])
        how = parts[1]
        if kind[0] == "f":
            a, b = float_of(a, width), float_of(b, width)
            unordered = math.isnan(a) or math.isnan(b)
            if how in ("nan", "num"):
                result = unordered == (how == "nan")
            elif len(how) == 3:  # equ, neu, ltu...: true for NaN
                result = unordered or COMPARISONS[how[:2]](a, b)
            else:
                result = not unordered and COMPARISONS[how](a, b)
        else:
            if kind[0] == "s":
                a, b = signed(a, width), signed(b, width)
            result = COMPARISONS[how](a, b)
        if len(parts) > 3 or len(operands) > 3:
            raise Unsupported(".".join(parts))
        self.registers[operands[0]] = int(result)


def permute(a, b, selector):
    data = (a & 0xFFFFFFFF) | (b & 0xFFFFFFFF) << 32
    result = 0
    for i in range(4):
        choice = selector >> 4 * i & 0xF
        byte = data >> 8 * (choice & 7) & 0xFF
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * i
    return result


def integers(base, parts, values, kind, width):
    mask = (1 << width) - 1
    if kind[0] == "s":
        values = [signed(value, width) for value in values]
    else:
        values = [value & mask for value in values]
    a, b = values[0], values[1] if len(values) > 1 else 0
    if base in ("shl", "shr"):
        b &= 0xFFFFFFFF
        return a << b if base == "shl" and b < width else (a >> min(b, width) if base == "shr" else 0)
    if base == "div":
        return int(a / b)
    if base == "mul" and "hi" in parts:
        return a * b >> width
    if base == "mad":
        return a * b + values[2]
    return {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "min": lambda: min(a, b),
            "max": lambda: max(a, b), "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b,
            "not": lambda: ~a if kind != "pred" else not a, "neg": lambda: -a}[base]()


def run_block(function, memory, parameters, block, thread=0):
    """Thread `thread` of a block, after what all of them do before the first barrier."""
    symbols = {}
    for declaration in function.declarations:
        found = re.match(r"\.shared .*?\.b8 ([\w$]+)\[(\d+)\]", declaration)
        if found:
            symbols[found[1]] = memory.place(bytes(int(found[2])), "shared")
    threads = [Thread(function, memory, parameters, symbols, number, block) for number in range(block)]
    waits = any(instruction.base == "bar" for instruction in function.instructions)
    for each in threads if waits else []:
        each.run(past_barriers=False)
    threads[thread].run(past_barriers=True)
    return threads[thread]
