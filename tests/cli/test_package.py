"""The Debian package that cpack makes: what is in it, what it depends on, and that its program runs."""

import os
import re
import shutil
import subprocess

import pytest

from conftest import environment, execute

BUILD = os.environ.get("GRADCLIP_BUILD", "")
TOOLS = ["cpack", "dpkg-deb", "dpkg-shlibdeps", "file", "gzip"]
pytestmark = pytest.mark.skipif(not BUILD or not all(map(shutil.which, TOOLS)),
                                reason=f"needs GRADCLIP_BUILD and {', '.join(TOOLS)}")

EXPECTED = ["usr/bin/gradclip", "usr/share/bash-completion/completions/gradclip",
            "usr/share/fish/vendor_completions.d/gradclip.fish", "usr/share/man/man1/gradclip.1.gz",
            "usr/share/zsh/vendor-completions/_gradclip", "usr/share/doc/gradclip/copyright"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    result = execute(["cpack", "--config", f"{BUILD}/CPackConfig.cmake", "-G", "DEB", "-B", folder], cwd=BUILD, timeout=300)
    assert result.code == 0, result
    made = list(folder.glob("*.deb"))
    assert len(made) == 1 and re.fullmatch(r"gradclip_\d+\.\d+\.\d+_\w+\.deb", made[0].name), made
    return made[0]


def test_contents(package):
    lines = subprocess.run(["dpkg-deb", "-c", package], check=True, capture_output=True, text=True).stdout.splitlines()
    files = {line.split(None, 5)[5].removeprefix("./"): line for line in lines if not line.startswith("d")}
    assert sorted(files) == sorted(EXPECTED)
    assert all(line.split()[1] == "root/root" for line in lines)
    assert files["usr/bin/gradclip"].startswith("-rwxr-xr-x") and files["usr/share/man/man1/gradclip.1.gz"].startswith("-rw-r--r--")


def test_control(package):
    def field(name):
        return subprocess.run(["dpkg-deb", "-f", package, name], check=True, capture_output=True, text=True).stdout.strip()
    assert field("Package") == "gradclip" and field("Section") == "science"
    depends = [each.split()[0] for each in field("Depends").split(", ")]
    assert "libc6" in depends and "libstdc++6" in depends and any(each.startswith("libhdf5-") for each in depends), depends
    assert any("mpi" in each for each in depends), depends


def test_the_program_runs(package, tmp_path):
    subprocess.run(["dpkg-deb", "-x", package, tmp_path], check=True)
    result = execute([tmp_path / "usr/bin/gradclip", "--version"], env=environment())
    assert result.code == 0 and result.out.startswith("gradclip "), result
