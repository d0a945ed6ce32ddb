"""Dumps that cannot be trusted: the documented exit code, one message, within seconds, nothing written, nothing hung; on
one process and on four."""

import json
import os
import shutil
import struct
import zlib

import h5py
import numpy as np
import pytest

from conftest import LONG, binary, execute, launcher, refused, run
from dump_builder import Dump


def base(**training):
    dump = Dump(4, **{"max_grad_norm": 1.0, **training})
    dump.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    dump.sharded("layers.0.weight", np.arange(48, dtype=np.float32).reshape(8, 6), "m", ["Shard(0)", "Shard(1)"])
    dump.plain("layers.1.bias", np.float32([1, 2, 3]))
    return dump


CASES = {}      # name -> (function(tool) -> path or (path, arguments), words that the message has to have)
ON_FOUR = set()  # also on 4 processes without GRADCLIP_LONG: issue 2's own list


def case(*mentions, four=False):
    def keep(function):
        name = function.__name__.replace("_", " ")
        CASES[name] = function, mentions
        if four:
            ON_FOUR.add(name)
        return function
    return keep


def manifest(*mentions, four=False):
    """A case that changes the manifest."""
    def keep(edit):
        key = edit.__name__.replace("_", " ")
        CASES[key] = (lambda tool: base().write(tool.fresh("dump"), edit=edit)), mentions
        if four:
            ON_FOUR.add(key)
        return edit
    return keep


def rank_file(*mentions, four=False, **write):
    """A case that changes rank 2's open file."""
    def keep(edit):
        def edit_file(rank, file):
            if rank == 2:
                edit(file)
        name = edit.__name__.replace("_", " ")
        CASES[name] = (lambda tool: base().write(tool.fresh("dump"), edit_file=edit_file, **write)), mentions
        if four:
            ON_FOUR.add(name)
        return edit
    return keep


# The directory -----------------------------------------------------------------------------------------------------------------

@case(four=True)
def no_such_directory(tool):
    return tool.folder / "absent"


@case()
def a_file_instead_of_a_directory(tool):
    (tool.folder / "file").write_text("x")
    return tool.folder / "file"


@case("manifest.json", four=True)
def no_manifest(tool):
    path = base().write(tool.fresh("dump"))
    (path / "manifest.json").unlink()
    return path


@case("manifest.json")
def an_empty_directory(tool):
    path = tool.fresh("dump")
    path.mkdir()
    return path


@case("assemble", four=True)
def fragments_that_nobody_assembled(tool):
    path = base().write(tool.fresh("dump"))
    (path / "manifest.json").unlink()
    for rank in range(4):
        (path / f"rank_{rank:05d}.json").write_text('{"rank": %d}' % rank)
    return path


@case("rank_00002.h5", four=True)
def a_rank_file_is_missing(tool):
    path = base().write(tool.fresh("dump"))
    (path / "rank_00002.h5").unlink()
    return path


@case("rank_00002.h5")
def a_rank_file_is_a_directory(tool):
    path = base().write(tool.fresh("dump"))
    (path / "rank_00002.h5").unlink()
    (path / "rank_00002.h5").mkdir()
    return path


@case("rank_00002.h5", four=True)
def a_rank_file_is_a_pipe(tool):
    path = base().write(tool.fresh("dump"))
    (path / "rank_00002.h5").unlink()
    os.mkfifo(tool.folder / "pipe")
    os.symlink(tool.folder / "pipe", path / "rank_00002.h5")
    return path


@case("rank_00002.h5")
def a_rank_file_leads_out_of_the_dump(tool):
    path = base().write(tool.fresh("dump"))
    shutil.move(path / "rank_00002.h5", tool.folder / "elsewhere.h5")
    os.symlink(tool.folder / "elsewhere.h5", path / "rank_00002.h5")
    return path


@case("rank_00001.h5")
def two_rank_files_are_swapped(tool):
    path = base().write(tool.fresh("dump"), checksums=False)
    for a, b in (("rank_00001.h5", "x"), ("rank_00002.h5", "rank_00001.h5"), ("x", "rank_00002.h5")):
        (path / a).rename(path / b)
    return path


def damaged(tool, change, **how):
    path = base().write(tool.fresh("dump"), **how)
    file = path / "rank_00002.h5"
    file.write_bytes(change(file.read_bytes()))
    return path


@case("rank_00002.h5", four=True)
def an_hdf5_file_without_its_end(tool):
    return damaged(tool, lambda data: data[:-10])


@case("rank_00002.h5", four=True)
def half_an_hdf5_file(tool):
    return damaged(tool, lambda data: data[:len(data) // 2], checksums=False)


@case("rank_00002.h5")
def an_empty_rank_file(tool):
    return damaged(tool, lambda data: b"")


@case("rank_00002.h5")
def no_hdf5_at_all(tool):
    return damaged(tool, lambda data: b"not what it says " * 100, checksums=False)


@case("rank_00002.h5")
def an_hdf5_file_whose_heads_are_zeros(tool):
    return damaged(tool, lambda data: data[:96] + bytes(len(data) - 96), checksums=False)


# The manifest as text ----------------------------------------------------------------------------------------------------------

def text(name, make, *mentions):
    CASES[name] = (lambda tool: base().write(tool.fresh("dump"), edit=make, checksums=False)), ("manifest.json", *mentions)


text("an empty manifest", lambda m: "")
text("half a manifest", lambda m: json.dumps(m)[:200])
text("a manifest that is a list", lambda m: "[]")
text("text after the manifest", lambda m: json.dumps(m) + "x")
text("a bare NaN", lambda m: json.dumps(m).replace('"max_grad_norm": 1.0', '"max_grad_norm": NaN'), "NaN")
text("a bare Infinity", lambda m: json.dumps(m).replace('"max_grad_norm": 1.0', '"max_grad_norm": Infinity'), "Infinity")
text("a key twice", lambda m: json.dumps(m)[:-1] + ', "step": 3}', "step")
text("a parameter's key twice", lambda m: json.dumps(m).replace('"model_part": 0', '"model_part": 0, "dtype": "float16"', 1),
     "dtype")
text("nested too deeply", lambda m: json.dumps(m)[:-1] + ', "x": ' + "[" * 100 + "]" * 100 + "}")
text("nested without end", lambda m: json.dumps(m)[:-1] + ', "x": ' + "[" * 1_000_000)
text("invalid UTF-8", lambda m: json.dumps(m).encode().replace(b"layers.1", b"layers\xff1"))
text("a lone surrogate", lambda m: json.dumps(m).replace("layers.1", "layers\\ud800"))
text("a number beyond float64", lambda m: json.dumps(m).replace('"max_grad_norm": 1.0', '"max_grad_norm": 1e999'))
text("an integer beyond 64 bits", lambda m: json.dumps(m).replace('"world_size": 4', '"world_size": 36893488147419103236'))


@case("manifest.json")
def a_manifest_that_is_a_directory(tool):
    path = base().write(tool.fresh("dump"))
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()
    return path


@case("checksum")
def a_manifest_changed_after_it_was_written(tool):
    path = base().write(tool.fresh("dump"))
    content = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(content.replace('"max_grad_norm": 1.0', '"max_grad_norm": 2.0'))
    return path


# The manifest's values -----------------------------------------------------------------------------------------------------------

@manifest("format")
def another_format(m):
    m["format"] = "torch.checkpoint"


@manifest("version")
def a_later_version(m):
    m["version"] = 2


@manifest("world_size")
def no_world_size(m):
    del m["world_size"]


@manifest("world_size")
def world_size_of_nothing(m):
    m["world_size"] = 0


@manifest("world_size")
def world_size_beyond_reason(m):
    m["world_size"] = 2 ** 24 + 1


@manifest("parameters")
def no_parameters(m):
    del m["parameters"]


@manifest("state")
def an_unknown_state(m):
    m["state"] = "during_clip"


@manifest("rank_file")
def rank_files_in_another_directory(m):
    m["rank_file"] = "../dump/rank_{rank:05d}.h5"


@manifest("rank_file")
def a_rank_file_pattern_without_rank(m):
    m["rank_file"] = "rank.h5"


@manifest("rank_file")
def a_rank_file_pattern_with_two(m):
    m["rank_file"] = "rank_{rank}_{rank:05d}.h5"


@manifest("rank_file")
def a_rank_file_pattern_as_for_printf(m):
    m["rank_file"] = "rank_{rank:99999999999d}.h5"


@manifest("Banana(0)", "layers.0.weight", four=True)
def an_unknown_placement(m):
    m["parameters"][0]["placements"][0] = "Banana(0)"


@manifest("layers.0.weight")
def a_placement_too_few(m):
    m["parameters"][0]["placements"] = ["Shard(0)"]


@manifest("layers.0.weight")
def a_shard_of_a_dimension_that_is_not_there(m):
    m["parameters"][0]["placements"][1] = "Shard(2)"


@manifest("nowhere")
def an_unknown_mesh(m):
    m["parameters"][0]["mesh"] = "nowhere"


@manifest("nowhere")
def an_unknown_device_mesh(m):
    m["device_mesh"] = "nowhere"


@manifest("4", four=True)
def a_mesh_with_a_rank_outside_the_world(m):
    m["meshes"]["m"]["ranks"] = [[0, 1], [2, 4]]


@manifest("layers.1.bias", four=True)
def a_plain_tensor_on_a_rank_outside_the_world(m):
    m["parameters"][1]["ranks"] = [0, 1, 2, 4]


@manifest("layers.0.weight", four=True)
def ranks_outside_the_mesh(m):
    m["meshes"]["half"] = {"dim_names": ["dp", "tp"], "ranks": [[0, 1]]}
    m["parameters"][0] |= {"mesh": "half", "ranks": [0, 1, 2, 3]}


@manifest("2", "'m'", four=True)
def a_rank_twice_in_a_mesh(m):
    m["meshes"]["m"]["ranks"] = [[0, 1], [2, 2]]


@manifest("meshes")
def a_ragged_mesh(m):
    m["meshes"]["m"]["ranks"] = [[0, 1], [2]]


@manifest("meshes")
def a_mesh_of_text(m):
    m["meshes"]["m"]["ranks"] = [["0", "1"], ["2", "3"]]


@manifest("'m'")
def a_mesh_with_a_name_too_few(m):
    m["meshes"]["m"]["dim_names"] = ["dp"]


@manifest("layers.0.weight", four=True)
def another_shape(m):
    m["parameters"][0]["shape"] = [8, 8]


@manifest("layers.0.weight", four=True)
def another_type(m):
    m["parameters"][0]["dtype"] = "float64"


@manifest("float128")
def an_unknown_type(m):
    m["parameters"][0]["dtype"] = "float128"


@manifest("shape")
def a_shape_whose_product_overflows(m):
    m["parameters"][0]["shape"] = [2 ** 40, 2 ** 40]


@manifest("layers.0.weight")
def a_shape_beyond_every_file(m):
    m["parameters"][0]["shape"] = [2 ** 30, 2 ** 30]


@manifest("shape")
def a_negative_extent(m):
    m["parameters"][0]["shape"] = [8, -6]


@manifest("layers.0.weight")
def the_same_parameter_twice_on_a_rank(m):
    m["parameters"].append(dict(m["parameters"][0]))


@manifest("copies")
def unknown_copies(m):
    m["parameters"][1]["copies"] = "sometimes"


@manifest("ranks")
def a_plain_tensor_without_ranks(m):
    del m["parameters"][1]["ranks"]


@manifest("name")
def a_name_too_long(m):
    m["parameters"][1]["name"] = "x" * 5000


@manifest("flat")
def flat_without_ranges(m):
    m["parameters"][0]["placements"] = ["Shard(0)", "Flat()"]


@manifest("layers.2.absent", four=True)
def a_parameter_neither_present_nor_none(m):
    m["parameters"].append({**m["parameters"][1], "name": "layers.2.absent"})


@manifest("norm_type", four=True)
def p_is_zero(m):
    m["training"]["norm_type"] = 0


@manifest("norm_type", four=True)
def p_is_nan(m):
    m["training"]["norm_type"] = "nan"


@manifest("norm_type")
def p_is_text(m):
    m["training"]["norm_type"] = "two"


@manifest("max_grad_norm", four=True)
def a_negative_max_norm(m):
    m["training"]["max_grad_norm"] = -1.0


@manifest("max_grad_norm")
def max_norm_is_nan(m):
    m["training"]["max_grad_norm"] = "nan"


@manifest("dp_group_size")
def no_data_parallel_ranks(m):
    m["training"]["dp_group_size"] = 0


@manifest("num_label_tokens")
def negative_tokens(m):
    m["training"]["num_label_tokens"] = -1


@manifest("num_label_tokens")
def a_fraction_of_a_token(m):
    m["training"]["num_label_tokens"] = 1.5


@manifest("pp")
def pipelining_without_its_axis(m):
    m["training"]["pp_enabled"], m["device_mesh"] = True, "m"


@manifest("device_mesh")
def pipelining_without_a_device_mesh(m):
    m["training"]["pp_enabled"] = True


# Rank files -----------------------------------------------------------------------------------------------------------------------

@rank_file("layers.0.weight", "rank_00002.h5", four=True)
def a_shard_of_another_shape(file):
    del file["gradients/layers.0.weight"]
    file["gradients"].create_dataset("layers.0.weight", data=np.zeros((4, 2), np.float32))


@rank_file("layers.0.weight", "rank_00002.h5", four=True)
def a_shard_of_another_type(file):
    del file["gradients/layers.0.weight"]
    file["gradients"].create_dataset("layers.0.weight", data=np.zeros((4, 3), np.float64))


@rank_file("layers.0.weight", "rank_00002.h5")
def a_shard_with_another_type_s_name(file):
    file["gradients/layers.0.weight"].attrs["dtype"] = np.bytes_("bfloat16")


@rank_file("layers.1.bias", "rank_00002.h5", four=True)
def a_gradient_is_missing_on_one_rank(file):
    del file["gradients/layers.1.bias"]


@rank_file("layers.1.bias", "rank_00002.h5")
def a_gradient_is_there_and_none(file):
    file.create_dataset("none", data=np.array([b"layers.1.bias"], h5py.string_dtype("utf-8", 13)))


@rank_file("layers.0.weight", "rank_00002.h5")
def an_offset_that_contradicts_the_placements(file):
    file["gradients/layers.0.weight"].attrs["global_offset"] = np.array([0, 0], "<i8")


@rank_file("layers.0.weight", "rank_00002.h5")
def ranges_outside_the_tensor(file):
    file["gradients/layers.0.weight"].attrs["global_ranges"] = np.array([[0, 6, 10], [1, 0, 3]], "<i8")


@rank_file("layers.0.weight", "rank_00002.h5")
def an_offset_of_text(file):
    file["gradients/layers.0.weight"].attrs["global_offset"] = "4, 0"


@rank_file("rank_00002.h5")
def another_rank_s_attribute(file):
    file.attrs["rank"] = np.int64(1)


@rank_file("rank_00002.h5")
def another_job_s_world_size(file):
    file.attrs["world_size"] = np.int64(8)


@rank_file("rank_00002.h5")
def another_step(file):
    file.attrs["step"] = np.int64(99)


@rank_file("rank_00002.h5")
def no_format(file):
    del file.attrs["format"]


@rank_file("rank_00002.h5")
def no_gradients(file):
    del file["gradients"]


@rank_file("rank_00002.h5")
def both_layouts(file):
    file.create_group("packed")


@rank_file("layers.1.bias", "rank_00002.h5")
def a_soft_link(file):
    file.move("gradients/layers.1.bias", "gradients/other")
    file["gradients/layers.1.bias"] = h5py.SoftLink("/gradients/other")


@rank_file("layers.1.bias", "rank_00002.h5")
def an_external_link(file):
    del file["gradients/layers.1.bias"]
    file["gradients/layers.1.bias"] = h5py.ExternalLink("rank_00001.h5", "/gradients/layers.1.bias")


@rank_file("rank_00002.h5")
def gradients_are_an_external_link(file):
    del file["gradients"]
    file["gradients"] = h5py.ExternalLink("rank_00001.h5", "/gradients")


@rank_file("layers.1.bias", "rank_00002.h5")
def a_group_instead_of_a_dataset(file):
    del file["gradients/layers.1.bias"]
    file.create_group("gradients/layers.1.bias")


@rank_file("layers.1.bias", "rank_00002.h5")
def external_raw_storage(file):
    del file["gradients/layers.1.bias"]
    file.create_dataset("gradients/layers.1.bias", shape=(3,), dtype="<f4", external=[("/etc/passwd", 0, 12)])


@rank_file("layers.1.bias", "rank_00002.h5")
def a_virtual_dataset(file):
    del file["gradients/layers.1.bias"]
    layout = h5py.VirtualLayout(shape=(3,), dtype="<f4")
    layout[:] = h5py.VirtualSource("rank_00001.h5", "gradients/layers.1.bias", shape=(3,))
    file.create_virtual_dataset("gradients/layers.1.bias", layout)


@rank_file("layers.1.bias", "rank_00002.h5")
def a_filter_that_is_not_built_in(file):
    del file["gradients/layers.1.bias"]
    file.create_dataset("gradients/layers.1.bias", data=np.float32([1, 2, 3]), compression="lzf")


@rank_file("layers.1.bias", "rank_00002.h5")
def a_compound_type(file):
    del file["gradients/layers.1.bias"]
    file.create_dataset("gradients/layers.1.bias", data=np.zeros(3, [("a", "<f4")]))


@rank_file("scale_inv", "rank_00002.h5")
def scale_inv_of_a_float32(file):
    file["gradients/layers.1.bias"].attrs["scale_inv"] = np.float32(2)


@rank_file("rank_00002.h5", packed=True)
def a_packed_index_that_is_no_json(file):
    del file["packed/index"]
    file["packed"].create_dataset("index", data="{", dtype=h5py.string_dtype("utf-8"))


def packed_index(change):
    def edit(file):
        index = json.loads(file["packed/index"].asstr()[()])
        change(index)
        del file["packed/index"]
        file["packed"].create_dataset("index", data=json.dumps(index), dtype=h5py.string_dtype("utf-8"))
    return edit


for _name, _change in {
        "a packed shard beyond its dataset": lambda i: i["layers.1.bias"].update(offset=1 << 20),
        "a packed shard at 2^60": lambda i: i["layers.1.bias"].update(offset=1 << 60),
        "packed shards that overlap": lambda i: i["layers.1.bias"].update(offset=0),
        "a packed shard that is not aligned": lambda i: i["layers.1.bias"].update(offset=i["layers.1.bias"]["offset"] + 1),
        "a packed shard of another shape": lambda i: i["layers.1.bias"].update(shape=[2]),
        "a packed shard that is missing": lambda i: i.pop("layers.1.bias")}.items():
    _edit = packed_index(_change)
    _edit.__name__ = _name
    rank_file("rank_00002.h5", packed=True)(_edit)


@case("layers.0.weight", "rank_00002.h5", four=True)
def a_compressed_chunk_that_is_damaged(tool):
    dump = base()
    path = dump.write(tool.fresh("dump"), compression="gzip", chunks=True, checksums=False)
    with h5py.File(path / "rank_00002.h5") as file:
        chunk = file["gradients/layers.0.weight"].id.get_chunk_info(0)
    data = bytearray((path / "rank_00002.h5").read_bytes())
    for i in range(chunk.byte_offset, chunk.byte_offset + chunk.size):
        data[i] ^= 0x5A
    (path / "rank_00002.h5").write_bytes(data)
    return path


@case("layers.0.weight", "rank_00002.h5")
def a_chunk_whose_fletcher32_does_not_hold(tool):
    path = base().write(tool.fresh("dump"), fletcher32=True, chunks=True, checksums=False)
    with h5py.File(path / "rank_00002.h5") as file:
        chunk = file["gradients/layers.0.weight"].id.get_chunk_info(0)
    data = bytearray((path / "rank_00002.h5").read_bytes())
    data[chunk.byte_offset + 5] ^= 1
    (path / "rank_00002.h5").write_bytes(data)
    return path


@case("layers.0.weight", "rank_00002.h5")
def a_chunk_that_inflates_beyond_its_size(tool):
    path = base().write(tool.fresh("dump"), checksums=False)
    with h5py.File(path / "rank_00002.h5", "r+", libver=("earliest", "v110")) as file:
        del file["gradients/layers.0.weight"]
        dataset = file.create_dataset("gradients/layers.0.weight", shape=(4, 3), dtype="<f4", chunks=(4, 3),
                                      compression="gzip")
        dataset.attrs["dtype"] = np.bytes_("float32")
        dataset.id.write_direct_chunk((0, 0), zlib.compress(bytes(200 << 20), 9))
    return path


@case("layers.0.weight", "rank_00002.h5")
def a_chunk_that_inflates_to_too_little(tool):
    path = base().write(tool.fresh("dump"), checksums=False)
    with h5py.File(path / "rank_00002.h5", "r+", libver=("earliest", "v110")) as file:
        del file["gradients/layers.0.weight"]
        dataset = file.create_dataset("gradients/layers.0.weight", shape=(4, 3), dtype="<f4", chunks=(4, 3),
                                      compression="gzip")
        dataset.id.write_direct_chunk((0, 0), zlib.compress(bytes(20), 9))
    return path


@case("layers.0.weight", "rank_00002.h5")
def a_shard_that_was_never_written(tool):
    """Allocated late: HDF5 would read zeros."""
    def edit_file(rank, file):
        if rank == 2:
            del file["gradients/layers.0.weight"]
            file.create_dataset("gradients/layers.0.weight", shape=(4, 3), dtype="<f4")
    return base().write(tool.fresh("dump"), edit_file=edit_file)


@case("rank_00002.h5")
def contiguous_data_that_ends_after_the_file(tool):
    path = base().write(tool.fresh("dump"), checksums=False)
    file = path / "rank_00002.h5"
    with h5py.File(file) as opened:
        offset = opened["gradients/layers.0.weight"].id.get_offset()
    data = file.read_bytes()
    where = data.index(struct.pack("<QQ", offset, 48))
    file.write_bytes(data[:where] + struct.pack("<QQ", len(data) - 8, 48) + data[where + 16:])
    return path


@pytest.mark.parametrize("name, np", [(name, np) for name in CASES for np in (1, 4)
                                      if np == 1 or name in ON_FOUR or LONG])
def test_refused(tool, name, np):
    make, mentions = CASES[name]
    made = make(tool)
    path, arguments = made if isinstance(made, tuple) else (made, [])
    refused(np, 3, path, *arguments, out=tool.fresh("out"), mentions=mentions)


# Permissions and options ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("np_", [1, 4])
@pytest.mark.parametrize("which", ["manifest.json", "rank_00002.h5"])
def test_unreadable(stranger, which, np_):
    folder, how = stranger
    path, out = base().write(folder / "dump"), folder / "home" / "out"
    (path / which).chmod(0)
    result = run(np_, "clip", path, "-o", out, **how)
    assert result.code == 5, result
    assert len(result.error_lines) == 1 and which in result.err and result.err.count("\n") == 1, result
    assert not out.exists() and not (folder / "home" / "out.partial").exists() and result.seconds < 10


def test_the_graver_code_wins(stranger):
    """Bad input on process 0, a file without permission on process 3: 5 before 3, from every process, one message."""
    folder, how = stranger
    path = base().write(folder / "dump")
    (path / "rank_00000.h5").write_bytes(b"junk")
    (path / "rank_00003.h5").chmod(0)
    for _ in range(3):
        result = run(4, "clip", path, "-o", folder / "home" / "out", **how)
        assert result.code == 5 and "rank_00003.h5" in result.err, result
        assert len(result.error_lines) == 1 and result.err.count("\n") == 1, result


@pytest.mark.parametrize("np_", [1, 4])
def test_an_output_directory_that_may_not_be_written(stranger, np_):
    folder, how = stranger
    path = base().write(folder / "dump")
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0o555)
    result = run(np_, "clip", path, "-o", folder / "closed" / "out", **how)
    assert result.code == 5 and len(result.error_lines) == 1 and result.err.count("\n") == 1, result
    assert list((folder / "closed").iterdir()) == []


@pytest.mark.parametrize("np_", [1, 4])
@pytest.mark.parametrize("arguments", [["--norm-type", "0"], ["--norm-type", "nan"], ["--max-norm", "-1"]], ids=" ".join)
def test_impossible_numbers_on_the_command_line(tool, arguments, np_):
    refused(np_, 2, base().write(tool.fresh("dump")), *arguments, out=tool.fresh("out"), mentions=arguments)


def test_a_good_option_replaces_a_bad_recorded_number(tool):
    path = base(max_grad_norm=-1.0).write(tool.fresh("dump"))
    refused(1, 3, path, out=tool.fresh("out"), mentions=["max_grad_norm"])
    assert run(1, "clip", path, "-o", tool.fresh("out"), "--max-norm", "1").code == 0


def test_all_ranks_are_bad(tool):
    """On different processes at once: still one message."""
    path = base().write(tool.fresh("dump"))
    for rank in range(4):
        (path / f"rank_{rank:05d}.h5").write_bytes(b"junk")
    refused(4, 3, path, out=tool.fresh("out"))


def test_a_name_cannot_write_to_the_terminal(tool):
    def edit(m):
        m["parameters"][1]["name"] = "evil\x1b[2J\r\nname"
    result = refused(1, 3, base().write(tool.fresh("dump"), edit=edit), out=tool.fresh("out"), mentions=["evil", "name"])
    assert "\x1b" not in result.err


def test_norms_and_inspect_of_bad_dumps(tool):
    path = base().write(tool.fresh("dump"), edit=lambda m: m.update(world_size=-3))
    refused(1, 3, path, "norms", path)
    refused(1, 3, path, "inspect", path)
    refused(4, 3, path, "norms", path)
    path = base().write(tool.fresh("dump"))
    (path / "rank_00003.h5").unlink()
    refused(4, 3, path, "norms", path, mentions=["rank_00003.h5"])


@pytest.mark.parametrize("command", ["norms", "clip", "verify", "check", "merge", "tokens", "diff"])
def test_processes_that_read_different_manifests(tmp_path, command):
    """Two dumps under one name, as hosts with storage of their own have them: here as mpirun's own two parts."""
    dumps = [base().write(tmp_path / "a"), base(max_grad_norm=0.25).write(tmp_path / "b")]
    more = {"clip": ["-o", tmp_path / "out"], "merge": ["-o", tmp_path / "out"], "diff": [dumps[0]],
            "check": ["--baseline", tmp_path / "baseline.json"]}.get(command, [])
    parts = [["-np", 1, binary(), command, dump, *more] for dump in dumps]
    result = execute([*launcher(1)[:-2], *parts[0], ":", *parts[1]])
    assert result.code == 3 and len(result.error_lines) == 1, result
    assert "manifest.json" in result.err and "process 1" in result.err and "another manifest" in result.err, result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
