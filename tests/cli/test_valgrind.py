"""The whole program under memcheck, on a small dump: no use of memory that was not written or is not there, no leak.
Known reports of libraries are in tests/support/valgrind.supp."""

import shutil

import pytest

from conftest import GOLDEN, LONG, ROOT, binary, execute, launcher

if shutil.which("valgrind") is None:
    pytest.skip("needs valgrind", allow_module_level=True)

MEMCHECK = ["valgrind", "--quiet", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite",
            f"--suppressions={ROOT / 'tests/support/valgrind.supp'}"]


@pytest.mark.parametrize("np_", [1, pytest.param(2, marks=pytest.mark.skipif(not LONG, reason="takes long"))])
def test_clip_is_clean(tool, np_):
    command = [*MEMCHECK, binary(), "clip", GOLDEN / "fsdp_tp" / "dump", "-o", tool.folder / "out", "--threads", "2"]
    result = execute(command if np_ == 1 else [*launcher(np_), *command])
    assert result.code == 0, result
    assert result.err == "", "memcheck found something:\n" + result.err[:4000]
