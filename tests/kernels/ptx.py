"""The text of a PTX module as functions, instructions and loops. Only as much of the language as nvcc writes here."""

import re
from dataclasses import dataclass, field

#: In the order of gradclip::DType and of gradclip::cuda::Terms.
TYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
SIZES = dict(zip(TYPES, [8, 4, 2, 2, 1, 1]))
TERMS = ["squares", "products", "general"]


class Unreadable(Exception):
    """A text that is not what this module expects."""


@dataclass(frozen=True)
class Title:
    """Which of the project's kernels a mangled name is, as kernel<type, ...>."""

    kernel: str
    types: tuple
    terms: str = ""

    def __str__(self):
        return f"{self.kernel}<{', '.join(self.types + ((self.terms,) if self.terms else ()))}>"


def title_of(mangled):
    """The title of a kernel's mangled name; None if it is none of the project's."""
    found = re.search(r"\d(statistics|scale|combine|accumulate)_kernelI(\w+)", mangled)
    if not found:
        return None
    numbers = [int(number) for number in re.findall(r"E?L(?:NS\w*?E|S\d*_)(\d+)E", found[2].split("EEEv")[0] + "E")]
    kernel = found[1]
    if len(numbers) != (2 if kernel in ("statistics", "accumulate") else 1):
        raise Unreadable(f"the name of a kernel: {mangled}")
    if kernel == "statistics":
        return Title(kernel, (TYPES[numbers[0]],), TERMS[numbers[1]])
    return Title(kernel, tuple(TYPES[number] for number in numbers))


@dataclass
class Instruction:
    opcode: str
    operands: list
    predicate: str = ""  #: register that must be true, or false after "!"
    text: str = ""

    @property
    def parts(self):
        return self.opcode.split(".")

    @property
    def base(self):
        return self.parts[0]

    @property
    def target(self):
        """The label that a branch goes to."""
        return self.operands[0] if self.base == "bra" else None


@dataclass
class Function:
    name: str
    is_kernel: bool
    instructions: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)  #: label -> index of the instruction after it
    declarations: list = field(default_factory=list)
    threads: int = 0  #: of a block, at most

    @property
    def title(self):
        return title_of(self.name) if self.is_kernel else None

    def count(self, pattern):
        return sum(1 for instruction in self.instructions if re.fullmatch(pattern, instruction.opcode))

    def loops(self):
        """Index ranges [first, last] from a label to each branch back to it."""
        ranges = []
        for index, instruction in enumerate(self.instructions):
            start = self.labels.get(instruction.target)
            if start is not None and start <= index:
                ranges.append((start, index))
        return ranges


def split_operands(text):
    operands, depth, word = [], 0, ""
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            operands.append(word.strip())
            word = ""
        else:
            word += character
    return operands + [word.strip()] if word.strip() else operands


def instruction_of(text):
    found = re.match(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
    if not found:
        raise Unreadable(f"a statement of PTX: {text}")
    return Instruction(found[2], split_operands(found[3]), found[1] or "", " ".join(text.split()))


def parse(text):
    """The functions that the module defines, in its order."""
    functions, current, header, statement, depth = [], None, "", "", 0
    for line in text.splitlines():
        line = line.split("//")[0].strip()
        if not line:
            continue
        if current is None:
            # Between functions. A declaration ends in ';', a definition's parameters are followed by '{'.
            header += line + "\n"
            if line == "{":
                found = re.search(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", header)
                if not found:
                    raise Unreadable(f"a definition: {header}")
                threads = re.search(r"\.maxntid\s+(\d+)", header)
                current = Function(found[2], found[1] == "entry", threads=int(threads[1]) if threads else 0)
                functions.append(current)
                header, depth = "", 1
            elif line.endswith(";"):
                header = ""
            continue
        if line in ("{", "}") and not statement:
            depth += 1 if line == "{" else -1
            if depth == 0:
                current = None
            continue
        label = re.fullmatch(r"([$\w]+):", line)
        if label and not statement:
            current.labels[label[1]] = len(current.instructions)
            continue
        statement += line + " "
        if line.endswith(";"):
            statement = statement.strip().rstrip(";")
            if statement.startswith("."):
                current.declarations.append(statement)
            else:
                current.instructions.append(instruction_of(statement))
            statement = ""
    if current is not None or not functions:
        raise Unreadable("a module that ends inside a function, or has none")
    return functions


def is_memory_access(instruction):
    return instruction.base in ("ld", "st", "atom", "red")


STATE_SPACES = {"global", "shared", "local", "param", "const"}


def state_space(instruction):
    """"generic" where an access names none."""
    return next((part for part in instruction.parts if part in STATE_SPACES), "generic")


def access_bytes(instruction):
    """How many bytes a load or store moves for one thread."""
    words = {"v2": 2, "v4": 4}
    count = next((words[part] for part in instruction.parts if part in words), 1)
    return count * int(re.sub(r"\D", "", instruction.parts[-1])) // 8
