"""Shell completion and the manual page, as they are installed: that they have every command and option that --help has, and
that the shells and man take them."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from conftest import binary, environment, execute, run

COMMANDS = re.findall(r"^  (\w+) {2,}\S", run(1, "--help").out.split("\nCommands\n")[1].split("\n\n")[0], re.M)


def installed(*parts):
    path = Path(binary()).parent.parent.joinpath("share", *parts)
    assert path.is_file(), f"{path} is not installed"
    return path


def options(command):
    """Every spelling in the command's --help."""
    text = run(1, command, "--help").out
    lines = [line[2:].split("  ")[0] for line in text.splitlines() if line.startswith("  -")]
    return sorted(word.rstrip(",") for line in lines for word in line.split() if word.startswith("-"))


BASH = installed("bash-completion", "completions", "gradclip")


def completed(*words, folder=None):
    """What bash offers for the last of the words."""
    script = ('source "$0"; compopt() { :; }; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _gradclip; '
              'printf "%s\\n" "${COMPREPLY[@]}"')
    result = execute(["bash", "--norc", "-c", script, BASH, *words], cwd=folder or "/")
    assert result.code == 0 and result.err == "", result
    return sorted(result.out.split())


def test_commands():
    assert {"clip", "norms", "inspect", "verify", "diff", "doctor"} <= set(COMMANDS)
    assert completed("gradclip", "") == sorted([*COMMANDS, "help", "--help", "--version"])
    assert completed("gradclip", "cl") == ["clip"]
    assert completed("gradclip", "x") == []
    assert completed("gradclip", "help", "") == sorted(COMMANDS) and completed("gradclip", "help", "clip", "") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_options(command):
    assert completed("gradclip", command, "-") == options(command)
    assert completed("gradclip", "nonsense", "-") == []


def test_values(tmp_path):
    assert completed("gradclip", "norms", "d", "--by", "") == sorted(["parameter", "module", "group", "stage", "dtype", "rank"])
    assert completed("gradclip", "clip", "--nonfinite", "s") == ["skip"]
    assert completed("gradclip", "clip", "--device", "") == ["auto", "cpu", "cuda"]
    assert completed("gradclip", "clip", "--max-norm", "") == []
    assert completed("gradclip", "accumulate", "--dtype", "") == ["bfloat16", "float16", "float32", "float64"]
    assert "float8_e4m3fn" in completed("gradclip", "synth", "--dtype", "")
    assert completed("gradclip", "clip", "--nonfinite", "=") == completed("gradclip", "clip", "--nonfinite", "")
    assert completed("gradclip", "clip", "--nonfinite", "=", "z") == ["zero"]
    assert completed("gradclip", "synth", "--model", "l", folder=tmp_path) == ["llama-70b", "llama-8b"]
    (tmp_path / "dump").mkdir()
    (tmp_path / "report.json").touch()
    assert completed("gradclip", "norms", "", folder=tmp_path) == ["dump"]
    assert completed("gradclip", "norms", "--report", "", folder=tmp_path) == ["dump", "report.json"]
    assert completed("gradclip", "norms", "--config", "re", folder=tmp_path) == ["report.json"]
    assert completed("gradclip", "synth", "--model", "", folder=tmp_path) == ["dump", "llama-70b", "llama-8b", "moe-tiny", "report.json"]
    (tmp_path / "a dump").mkdir()
    assert completed("gradclip", "norms", "a", folder=tmp_path) == ["a", "dump"]  # words of one line here


def test_tab_in_bash():
    """An interactive bash on a terminal; what it ran after the key says what the key made."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**environment(), "TERM": "dumb", "PS1": "$ "})
    try:
        seen = b""
        os.write(terminal, f'source "{BASH}"; gradclip() {{ echo "it was: $*."; }}; echo rea""dy\n'.encode())
        sent, end = False, time.monotonic() + 20
        while b"it was: clip --nonfinite propagate." not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096)
            if b"ready\r\n" in seen and not sent:
                os.write(terminal, b"gradclip cl\t--nonf\tpro\t\n")
                sent = True
        assert b"it was: clip --nonfinite propagate." in seen, seen.decode()
    finally:
        os.close(terminal)
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
def test_zsh():
    script = installed("zsh", "site-functions", "_gradclip")
    # _arguments takes the specifications only within a completion: run one, and have it print what it was given.
    setup = "autoload -U compinit; compinit -u -D; source $0; words=(gradclip norms -); CURRENT=3; " \
            "_arguments() { print -rl -- $@; }; _gradclip"
    result = execute(["zsh", "-f", "-c", setup, script])
    assert result.code == 0 and result.err == "", result
    assert sorted(re.findall(r"^(-[\w-]+)\[", result.out, re.M)) == options("norms")
    assert "--by[rows of the table" in result.out and "(parameter module group stage dtype rank)" in result.out


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish here")
def test_fish():
    script = installed("fish", "vendor_completions.d", "gradclip.fish")

    def offered(line):
        result = execute(["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"])
        assert result.code == 0 and result.err == "", result
        return sorted(each.split("\t")[0] for each in result.out.splitlines())
    assert offered("gradclip cl") == ["clip"]
    assert offered("gradclip clip --nonfinite ") == ["error", "propagate", "skip", "zero"]
    assert set(offered("gradclip norms --")) == {o for o in options("norms") if o.startswith("--")}


MAN = installed("man", "man1", "gradclip.1")


@pytest.mark.skipif(not shutil.which("man"), reason="no man here")
def test_manual_page():
    how = environment(MANWIDTH="200", LC_ALL="C.UTF-8", MANROFFOPT="-ww", MAN_KEEP_FORMATTING="")
    result = execute(["man", "--warnings=w", "-E", "UTF-8", "-l", MAN], env=how)
    assert result.code == 0 and result.err == "", result
    text = re.sub(".\b", "", result.out)
    for heading in ("NAME", "SYNOPSIS", "COMMANDS", "SCALING AND CLIPPING", "COMMON OPTIONS", "ENVIRONMENT", "EXIT STATUS"):
        assert f"\n{heading}\n" in text
    for command in COMMANDS:
        assert f"gradclip {command}" in text
        for option in options(command):
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), (command, option)


def test_what_prints_them():
    for shell, path in (("bash", BASH), ("zsh", installed("zsh", "site-functions", "_gradclip")),
                        ("fish", installed("fish", "vendor_completions.d", "gradclip.fish"))):
        assert run(1, "--print-completion", shell).out == path.read_text()
    assert run(1, "--print-man").out == MAN.read_text()
    assert run(1, "--print-completion").code == 2 and run(1, "--print-completion", "csh").code == 2
    assert subprocess.run(["bash", "-n", BASH], check=True)
