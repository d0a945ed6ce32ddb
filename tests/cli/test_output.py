"""What clip leaves behind: a whole dump or nothing, the input's layout, checksums that hold, the same bytes each time."""

import json
import os
import shutil
import signal
import subprocess
import time

import h5py
import numpy as np
import pytest
import xxhash

from conftest import GOLDEN, binary, environment, refused, run, tree
from dump_builder import Dump, describe_file, manifest_checksum, read_manifest


def small(**training):
    dump = Dump(2, **{"max_grad_norm": 1.0, **training})
    dump.mesh("dp", ["dp"], [0, 1])
    dump.sharded("weight", np.float32([[3, 4], [1, 2], [0, 1]]), "dp", ["Shard(0)"])
    dump.plain("bias", np.float32([1, 2]))
    return dump


def test_manifest_keeps_what_it_does_not_know_and_records_the_clip(tool):
    dump = small()
    dump.more = {"vendor": {"z": 1, "a": [1, 2.5, None, "ü\u2028\n"], "big": 12345678901234567890, "small": 1e-30},
                 "notes": "kept"}
    dump.parameters[0].entry["author's note"] = {"deep": [[]]}
    dump.training["logged_by_us"] = 0.1
    path = dump.write(tool.fresh("dump"))
    report, _, out = tool.clip(path)
    before, after = read_manifest(path), read_manifest(out)
    assert after["state"] == "after_clip" and before["state"] == "before_scale"
    record = after.pop("clip")
    for key in set(before) - {"state", "files", "checksum"}:
        assert after[key] == before[key], key
    assert [k for k in after if k in before] == list(before), "the keys' order"
    assert set(after) == set(before)
    assert record["total"] == report["norm"]["total"] and record["coefficient"] == report["clip"]["coefficient"]
    assert record["total_after"] == report["clip"]["total_after"] == pytest.approx(1.0, rel=1e-6)
    assert record["version"] == run(1, "--version").out.split()[-1]
    text = json.dumps(record)
    assert "1.0" in text and str(out) not in text and str(path) not in text


def test_checksums_of_the_output_hold(tool):
    for packed in (False, True):
        _, _, out = tool.clip(small().write(tool.fresh("dump"), packed=packed), np=2)
        manifest = read_manifest(out)
        assert manifest["checksum"] == manifest_checksum(manifest)
        assert manifest["files"] == {f"rank_0000{r}.h5": describe_file(out / f"rank_0000{r}.h5") for r in (0, 1)}
        with h5py.File(out / "rank_00001.h5") as file:
            if packed:
                index = json.loads(file["packed/index"].asstr()[()])
                for entry in index.values():
                    data = file["packed/" + entry["dtype"]][entry["offset"]:][:int(np.prod(entry["shape"]))]
                    assert entry["xxh3_64"] == xxhash.xxh3_64_hexdigest(data.tobytes())
            else:
                for dataset in file["gradients"].values():
                    assert dataset.attrs["xxh3_64"] == xxhash.xxh3_64_intdigest(dataset[()].tobytes())
                    assert dataset.attrs["xxh3_64"].dtype == np.uint64


def test_keys_spelled_with_escapes(tool):
    """The same names to every reader of JSON: what is replaced under them does not stand there twice."""
    def spell(rank, file):
        text = file["packed/index"].asstr()[()].replace('"xxh3_64"', '"xxh3\\u005f64"')
        del file["packed/index"]
        file["packed"].create_dataset("index", data=text, dtype=h5py.string_dtype("utf-8"), track_times=False)
    path = small().write(tool.fresh("dump"), packed=True, edit_file=spell)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"checksum"', '"\\u0063hecksum"').replace('"state"', '"stat\\u0065"'))
    _, _, out = tool.clip(path)
    assert run(1, "verify", out).code == 0
    assert tool.clip(out, "--no-scale")[0]["clip"]["total_after"] == pytest.approx(1.0, rel=1e-6)


def test_rank_files_keep_what_is_not_a_gradient(tool):
    dump = small()
    dump.labels = {0: [[[1, 2, -100]], [[3, -100, -100]]], 1: [[[5, 6, 7]]]}

    def edit_file(rank, file):
        file["gradients"]["weight"].attrs["comment"] = "attribute of a user"
        file.attrs["host"] = "node7"
        file.create_dataset("extra/numbers", data=np.arange(3, dtype="<i4"))
    path = dump.write(tool.fresh("dump"), offsets=True, edit_file=edit_file)
    _, _, out = tool.everywhere(path, counts=(1, 2))
    for rank in (0, 1):
        with h5py.File(path / f"rank_0000{rank}.h5") as before, h5py.File(out / f"rank_0000{rank}.h5") as after:
            for k, labels in before["labels"].items():
                assert after[f"labels/{k}"].dtype == labels.dtype and (after[f"labels/{k}"][()] == labels[()]).all()
            assert {k: v for k, v in after.attrs.items()} == {k: v for k, v in before.attrs.items()}
            a, b = before["gradients/weight"].attrs, after["gradients/weight"].attrs
            assert sorted(a) == sorted(b) and b["comment"] == "attribute of a user"
            assert (a["global_offset"] == b["global_offset"]).all()
            assert after["extra/numbers"][()].tolist() == [0, 1, 2]


def test_hdf5_1_10_opens_the_output(tool):
    _, _, out = tool.clip(GOLDEN / "uneven/dump")
    for file in out.glob("rank_*.h5"):
        seen = subprocess.run(["h5dump", "-H", file], capture_output=True, text=True, timeout=30)
        assert seen.returncode == 0 and "H5T_IEEE_F32LE" in seen.stdout, seen.stderr


def test_the_same_command_writes_the_same_bytes(tool, tmp_path):
    path = small().write(tool.fresh("dump"))
    trees = []
    for where, np_ in (("a", 1), ("elsewhere/b", 1), ("c", 2)):
        (tmp_path / where).parent.mkdir(exist_ok=True)
        assert run(np_, "clip", path, "-o", tmp_path / where).code == 0
        time.sleep(1.1 if where == "a" else 0)  # HDF5 counts seconds
        trees.append(tree(tmp_path / where))
    assert trees[0] == trees[1] == trees[2]
    # Nor does it depend on where the input lies.
    shutil.copytree(path, tmp_path / "moved")
    assert run(1, "clip", tmp_path / "moved", "-o", tmp_path / "d").code == 0
    assert tree(tmp_path / "d") == trees[0]


def test_the_recorded_layout_is_kept_file_by_file(tool):
    _, _, out = tool.clip(GOLDEN / "fsdp_tp/dump")
    dump = GOLDEN / "fsdp_tp/dump"
    assert sorted(tree(out)) == sorted(tree(dump))
    for name in tree(out):
        if name.endswith(".h5"):
            with h5py.File(dump / name) as before, h5py.File(out / name) as after:
                names = []
                before.visit(names.append)
                others = []
                after.visit(others.append)
                assert names == others
                assert list(before["gradients"].id) == list(after["gradients"].id)


def test_an_existing_output_needs_overwrite(tool, tmp_path):
    path, out = small().write(tool.fresh("dump")), tmp_path / "out"
    tool.clip(path)
    assert run(1, "clip", path, "-o", out).code == 0
    (out / "stray.txt").write_text("of the old dump")
    kept = tree(out)
    for np_ in (1, 4):
        refused(np_, 2, path, out=out, mentions=["--overwrite"])
        assert tree(out) == kept
    for np_ in (1, 2):
        result = run(np_, "clip", path, "-o", out, "--overwrite", "--max-norm", "2")
        assert result.code == 0, result
        assert read_manifest(out)["clip"]["max_norm"] == 2.0 and not (out / "stray.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir() if "partial" in p.name or p.name.startswith("out.")) == []


def test_a_failed_overwrite_keeps_the_old_output(tool, tmp_path):
    path, out = small().write(tool.fresh("dump")), tmp_path / "out"
    assert run(1, "clip", path, "-o", out).code == 0
    kept = tree(out)
    (path / "rank_00001.h5").unlink()
    refused(1, 3, path, "--overwrite", out=out)
    refused(2, 3, path, "--overwrite", out=out)
    assert tree(out) == kept and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("spelling, np_", [
    ("same", 1), ("same", 4), ("inside", 1), ("inside", 4), ("slash", 1), ("dot", 1), ("link", 1), ("deep inside", 1),
    ("containing", 1), ("through link", 1)])
def test_output_that_would_harm_the_input(tool, tmp_path, spelling, np_):
    (tmp_path / "parent").mkdir()
    path = small().write(tmp_path / "parent" / "dump")
    os.symlink(path, tmp_path / "link")
    os.symlink(tmp_path / "parent", tmp_path / "parent-link")
    out = {"same": path, "slash": f"{path}/", "dot": path / ".", "link": tmp_path / "link", "inside": path / "out",
           "deep inside": path / "no" / "such", "containing": tmp_path / "parent",
           "through link": tmp_path / "parent-link" / "dump"}[spelling]
    before = tree(tmp_path)
    for more in ([], ["--overwrite"]):
        result = run(np_, "clip", path, "-o", out, *more)
        assert result.code == 2 and len(result.error_lines) == 1, result
    assert tree(tmp_path) == before
    assert sorted(p.name for p in tmp_path.rglob("*.partial")) == []


def test_output_without_a_parent_or_on_a_file(tool, tmp_path):
    path = small().write(tool.fresh("dump"))
    refused(1, 2, path, out=tmp_path / "no" / "such" / "out", mentions=["no"])
    (tmp_path / "file").write_text("x")
    refused(1, 2, path, out=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_overwrite_does_not_eat_a_directory_that_is_no_dump(tool, tmp_path):
    """A slip of the fingers must not replace a home directory."""
    path, home = small().write(tool.fresh("dump")), tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    result = run(1, "clip", path, "-o", home, "--overwrite")
    assert (home / "thesis.tex").exists(), result
    assert result.code == 2, result


def test_a_relative_output_and_a_trailing_slash(tool, tmp_path):
    path = small().write(tool.fresh("dump"))
    for name, expected in (("here", "here"), ("./there/", "there")):
        result = run(1, "clip", path, "-o", name, cwd=tmp_path)
        assert result.code == 0 and (tmp_path / expected / "manifest.json").is_file(), result
    assert run(2, "clip", os.path.relpath(path, tmp_path), "--output", "third", cwd=tmp_path).code == 0


def test_a_bare_name_is_a_file_here(tool, tmp_path):
    path = small().write(tool.fresh("dump"))
    for words in (["norms", path, "--report", "report.json"], ["check", path, "--baseline", "norms.json", "--update"]):
        result = run(1, *words, cwd=tmp_path)
        assert result.code == 0 and (tmp_path / words[3]).is_file(), result
    refused(1, 2, path, "clip", path, "-o", "same.json", "--report", "same.json", mentions=["it is the output dump"], cwd=tmp_path)


def test_leftover_of_a_killed_run_is_cleared(tool, tmp_path):
    path, out, partial = large(tool), tmp_path / "out", tmp_path / "out.partial"
    for _ in range(20):
        process = subprocess.Popen([binary(), "clip", path, "-o", out], stdout=subprocess.DEVNULL, env=environment())
        while not partial.exists() and process.poll() is None:
            time.sleep(0.0005)
        process.kill()
        process.wait(30)
        if partial.exists():
            break
        shutil.rmtree(out, ignore_errors=True)
    assert partial.exists() and not out.exists(), "never killed in time"
    assert run(2, "clip", path, "-o", out).code == 0
    assert sorted(tree(out)) == ["manifest.json", *(f"rank_0000{rank}.h5" for rank in range(4))]
    assert not partial.exists()


def test_a_stranger_s_directory_in_the_way_is_kept(tool, tmp_path):
    path = small().write(tool.fresh("dump"))
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("years")
    result = run(1, "clip", path, "-o", tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.tex").exists() and len(result.error_lines) == 1, result
    assert result.code in (2, 5), result


def test_state_after_clip_is_refused_unless_no_scale(tool):
    path = small().write(tool.fresh("dump"))
    _, _, out = tool.clip(path)
    refused(1, 3, out, out=tool.fresh("out"), mentions=["after_clip", "--no-scale"])
    refused(4, 3, out, out=tool.fresh("out"), mentions=["after_clip", "--no-scale"])
    report, _, _ = tool.clip(out, "--no-scale", "--max-norm", "0.5")
    assert report["clip"]["clipped"] is True
    assert run(1, "norms", out).code == 0


@pytest.mark.parametrize("state", ["before_clip", "after_clip"])
def test_only_before_scale_is_scaled(tool, state):
    dump = small(pp_enabled=True, num_label_tokens=4, dp_group_size=1)
    dump.device_mesh, dump.training["pp_axis_name"] = "dp", "dp"
    totals = {}
    for each in ("before_scale", state):
        dump.state = each
        report = tool.norms(dump.write(tool.fresh("dump")))
        totals[each] = report["norm"]["total"], report["scale"]["label_token_divisor"]
    assert totals["before_scale"][1] == 4.0 and totals[state] == (4 * totals["before_scale"][0], None)
    dump.state = "before_scale"
    report = tool.norms(dump.write(tool.fresh("dump")), "--no-scale")
    assert (report["norm"]["total"], report["scale"]["label_token_divisor"]) == totals[state]


def large(tool):
    dump = Dump(4, max_grad_norm=1.0)
    dump.mesh("dp", ["dp"], [0, 1, 2, 3])
    dump.sharded("weight", np.random.default_rng(1).standard_normal(3_000_000).astype(np.float32), "dp", ["Shard(0)"])
    return dump.write(tool.fresh("dump"), checksums=False)


@pytest.mark.parametrize("np_", [1, 4])
def test_no_space(tool, tmp_path, np_):
    """A tmpfs of 1 MiB in a mount namespace of its own; where that is not allowed, a limit on the size of files."""
    path, full = large(tool), tmp_path / "full"
    full.mkdir()
    launch = [] if np_ == 1 else ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-np", str(np_)]
    script = 'mount -t tmpfs -o size=1M tmpfs "$1" || exit 99; shift; "$@"; code=$?; ls -A "$FULL"; exit $code'
    command = [*launch, binary(), "clip", path, "-o", full / "out"]
    result = subprocess.run(["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", script, "sh", full, *command],
                            capture_output=True, text=True, timeout=60, env=environment(FULL=full))
    if result.returncode in (99, 1) and ("unshare" in result.stderr or "mount" in result.stderr):
        def limit():
            import resource
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(),
                                preexec_fn=limit, restore_signals=False)
    assert result.returncode == 5, result
    assert result.stderr.count("gradclip: error:") == 1 and result.stderr.count("\n") == 1, result
    assert result.stdout == "" and list(full.iterdir()) == [], result


def test_report_on_a_full_device(tool):
    path = small().write(tool.fresh("dump"))
    with open("/dev/full", "w") as full:
        process = subprocess.run([binary(), "norms", path], stdout=full, stderr=subprocess.PIPE, text=True, timeout=30,
                                 env=environment())
    assert process.returncode == 5 and process.stderr.count("gradclip: error:") == 1, process


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_it_leaves_no_output(tool, tmp_path, how):
    """OUT is whole or absent; a leftover OUT.partial is cleared by the next run."""
    path, out = large(tool), tmp_path / "out"
    for delay in (0.005, 0.02, 0.05):
        process = subprocess.Popen([binary(), "clip", path, "-o", out], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=environment())
        time.sleep(delay)
        process.send_signal(how)
        process.wait(30)
        assert process.returncode != 0 or out.exists()
        if out.exists():  # it may have its name before the run ends
            assert run(1, "verify", out).code == 0
            shutil.rmtree(out)
    assert run(1, "clip", path, "-o", out).code == 0 and not (tmp_path / "out.partial").exists()


def test_input_is_opened_read_only(tool, tmp_path):
    """Also from a directory where nothing can be written."""
    path = small().write(tool.fresh("dump"))
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    stamps = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    try:
        tool.clip(path, np=2)
        assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == stamps
    finally:
        path.chmod(0o755)
