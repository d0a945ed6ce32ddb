"""Errors as gradclip words them: where, what was found, what was expected, what to do. Codes: docs/exit-codes.md."""

import errno

USAGE, BAD_INPUT, RESOURCES, BUG = 2, 3, 5, 70


class ConvertError(Exception):
    """Ends the conversion. Its text may hold names from the input; shown() has made them printable."""

    def __init__(self, where, found, expected="", advice="", code=BAD_INPUT):
        message = f"{shown(where)}: {shown(found)}"
        super().__init__("; ".join([message, *([f"expected {shown(expected)}"] if expected else []),
                                    *([advice] if advice else [])]))
        self.code = code


def is_damage(error):
    """Whether what a library raised is about what the file holds; EINVAL: a seek to before its beginning."""
    return not isinstance(error, (MemoryError, OSError)) or getattr(error, "errno", None) == errno.EINVAL


def shown(text):
    """On one line and printable, whatever the input called it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def first_line(error):
    """What a library says, without the paragraphs of advice that follow it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
