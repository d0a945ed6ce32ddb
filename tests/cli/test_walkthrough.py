"""docs/walkthrough.md and README.md, run: every command in order, and what it prints compared with the page, line by line."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from conftest import ROOT, binary, environment

PAGE = ROOT / "docs" / "walkthrough.md"
LEFT_OUT = "..."  # alone in its line: one line or more that the page does not show
MARK = "\x1e"


@dataclass
class Step:
    """A command of the page, and the lines below it."""
    command: str
    shown: list = field(default_factory=list)


def steps_of(text):
    """The commands of a piece of the page: what is indented by four and begins with "$ "; "> " continues it."""
    steps, inside, fenced = [], False, False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if fenced or line.strip() and not line.startswith("    "):
            inside = False
        elif line.startswith("    $ "):
            inside = True
            steps.append(Step(line[6:]))
        elif line.startswith("    > ") and inside:
            steps[-1].command += "\n" + line[6:]
        elif inside:
            steps[-1].shown.append(line[4:])
    for step in steps:
        while step.shown and not step.shown[-1]:
            step.shown.pop()
    return steps


def agrees(shown, printed):
    """Whether the page's lines are the printed ones, but for what it leaves out."""
    pieces = [[]]
    for line in shown:
        if line.strip() == LEFT_OUT:
            pieces.append([])
        else:
            pieces[-1].append(line)
    if len(pieces) == 1:
        return shown == printed
    first, *middle, last = pieces
    if printed[:len(first)] != first:
        return False
    at, end = len(first), len(printed) - len(last)
    for piece in middle:
        at += 1  # what is left out is something
        while at + len(piece) <= end and printed[at:at + len(piece)] != piece:
            at += 1
        at += len(piece)
    return at < end and printed[end:] == last


def sections():
    """What runs by itself: each situation of the walk-through in a folder two levels below a clone, README at its top."""
    parts = re.split(r"^## (\d.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {**dict(zip(parts[1::2], parts[2::2])), "README": (ROOT / "README.md").read_text(encoding="utf-8")}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """By section: its steps, each with the lines that it printed. All commands of a section run in one shell."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("scripts", "testdata"):
        (clone / name).symlink_to(ROOT / name)
    programs = clone / "bin"
    programs.mkdir()
    for name, command in (("gradclip", f'"{binary()}"'), ("python3", f'"{sys.executable}" -B')):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    env = environment(PATH=f"{programs}:{os.environ['PATH']}", LC_ALL="C.UTF-8", GRADCLIP_DEVICE="cpu",
                      OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    results = {}
    for title, text in sections().items():
        folder = clone / "build" / "walkthrough" if title != "README" else clone
        folder.mkdir(parents=True, exist_ok=True)
        steps = steps_of(text)
        script = "".join(f"(exit $code)\n{step.command}\ncode=$?; printf '{MARK}'\n" for step in steps)
        shell = subprocess.run(["bash", "-c", "code=0\n" + script], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
        if title != "README":
            shutil.rmtree(folder)
        outputs = shell.stdout.decode().split(MARK)
        assert len(outputs) == len(steps) + 1, shell
        results[title] = [(step, [line.rstrip() for line in output.rstrip().splitlines()])
                          for step, output in zip(steps, outputs)]
    return results


@pytest.mark.parametrize("title", sections())
def test_the_page_is_true(printed, title):
    for step, lines in printed[title]:
        shown = "\n".join(step.shown)
        assert agrees(step.shown, lines), f"$ {step.command}\n--- the page\n{shown}\n--- printed\n" + "\n".join(lines)


def test_every_shown_character_counts(printed):
    """A page with any one of its lines altered, left out or added to is false."""
    checked = 0
    for step, lines in (each for section in printed.values() for each in section):
        for number, line in enumerate(step.shown):
            if line.strip() == LEFT_OUT:
                continue
            before, after = step.shown[:number], step.shown[number + 1:]
            altered = [line + ".", line[:-1], *(line[:m.start()] + str((int(m[0]) + 1) % 10) + line[m.end():]
                                                for m in re.finditer(r"\d", line))]
            for other in altered if line else [line + "."]:
                assert not agrees([*before, other, *after], lines), (step.command, other)
                checked += 1
        assert not agrees([*step.shown, "something else"], lines), step.command
    assert checked > 1500


def test_what_is_left_out():
    assert agrees(["a", "...", "d"], ["a", "b", "c", "d"])
    assert agrees(["...", "b", "..."], ["a", "b", "b"]) and agrees(["a", "..."], ["a", ""])
    assert not agrees(["a", "..."], ["a"]) and not agrees(["...", "d"], ["d"])  # nothing to leave out
    assert not agrees(["a", "...", "c", "...", "b"], ["a", "x", "b", "x", "c", "x"])
    assert not agrees([], ["a warning"]) and agrees([], [])


def test_five_situations_with_the_commands_for_them():
    text = {title: [step.command for step in steps_of(section)] for title, section in sections().items()}
    assert [title[0] for title in text] == list("12345R")
    commands = "\n".join(command for title, part in text.items() for command in part if title != "README")
    used = {word for pair in re.findall(r"gradclip (\w+)|(--\w+)", commands) for word in pair}
    assert {"norms", "verify", "diff", "check", "merge", "report", "clip", "synth", "--histogram", "--sweep"} <= used
    for title, section in sections().items():  # one that was written without its "$ " would not be run
        assert len(re.findall(r"^    [$>] ", section, re.MULTILINE)) == sum(c.count("\n") + 1 for c in text[title]), title


def test_a_fault_that_cannot_be_made_is_refused_in_one_line(tmp_path):
    dump = shutil.copytree(ROOT / "testdata" / "golden" / "ddp" / "dump", tmp_path / "dump")
    before = {file.name: file.read_bytes() for file in dump.iterdir()}
    for path, words, mention in ((tmp_path / "none", ["--to", "g"], "expected the directory of a dump"),
                                 (dump, ["--parameters", "zzz", "--to", "g * 2"], "'zzz': is found in none of"),
                                 (dump, ["--tie", "zzz", "yyy"], "--tie zzz"),
                                 (dump, ["--ranks", "99", "--to", "g * 2"], "--ranks 99")):
        result = subprocess.run([sys.executable, "-B", ROOT / "scripts" / "edit_dump.py", path, *words],
                                capture_output=True, text=True, check=False)
        assert result.returncode == 1 and result.stderr.count("\n") == 1 and mention in result.stderr, result
    assert {file.name: file.read_bytes() for file in dump.iterdir()} == before
