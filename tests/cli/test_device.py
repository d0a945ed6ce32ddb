"""The program on a device, emulated: that it ran there, that nothing else changes, and every way in which it can fail."""

import re

import numpy as np
import pytest

from conftest import DEVICE, LONG, close, number, refused, run, tree, without_run
from dump_builder import Dump

if DEVICE != "cuda":
    pytest.skip("needs the emulated program (GRADCLIP_TEST_DEVICE=cuda)", allow_module_level=True)

CPU = {"GRADCLIP_DEVICE": "cpu"}


def numbers(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture
def dump(tool):
    """Several blocks, model parts and types; copies, and addends that travel between processes."""
    made = Dump(4, max_grad_norm=0.5, num_label_tokens=1000, dp_group_size=3)
    made.mesh("m", ["dp", "tp"], [[0, 1], [2, 3]])
    for part in range(3):
        made.sharded(f"part{part}.big", numbers(part, (1200, 300)), "m", ["S(0)", "S(1)"], model_part=part)
        made.sharded(f"part{part}.half", numbers(10 + part, (70, 500), np.float16), "m", ["R", "S(1)"], model_part=part)
        made.local(f"part{part}.partial", [70_000], "m", ["Partial()", "Replicate()"],
                   {rank: numbers(20 + part + rank // 2, [70_000]) for rank in range(4)}, model_part=part)
    return made.write(tool.fresh("dump"))


def log_of(path):
    return [dict(pair.split("=", 1) for pair in line.split()) for line in path.read_text().splitlines()]


# What ran where ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("np_", [1, 3])
def test_every_kernel_ran_and_nothing_is_left_on_the_device(tool, dump, np_):
    log = tool.fresh("log")
    report, _, out = tool.clip(dump, np=np_, env={"GRADCLIP_EMULATION_LOG": str(log)})
    assert report["run"]["device"].startswith("cuda"), report["run"]
    processes = log_of(log)
    assert len(processes) == np_
    for process in processes:
        assert int(process["kernel"]) > 0 and int(process["copy"]) > 0, process
        for left in ("live_allocations", "live_pinned", "live_streams", "live_events", "unfinished"):
            assert process[left] == "0", (left, process)
    assert (sum(int(process.get("ncclSend", 0)) for process in processes) > 0) == (np_ > 1), processes
    on_cpu, _, cpu_out = tool.clip(dump, env=CPU)
    assert on_cpu["run"]["device"].startswith("cpu"), on_cpu["run"]
    assert tree(out) == tree(cpu_out)
    assert without_run(report) == without_run(on_cpu)


@pytest.mark.parametrize("arguments", [
    ["--numerics", "automodel"], ["--numerics", "torch"], ["--norm-type", "inf"], ["--norm-type", "1"],
    ["--offload"], ["--offload", "--memory-budget", "64M"], ["--device-memory-budget", "1M"],
    ["--device-memory-budget", "20M", "--threads", "3"], ["--threads", "1"], ["--nonfinite", "zero"]], ids=" ".join)
def test_no_option_makes_a_difference_between_devices(tool, dump, arguments):
    report, _, out = tool.clip(dump, *arguments)
    on_cpu, _, cpu_out = tool.clip(dump, *arguments, env=CPU)
    assert tree(out) == tree(cpu_out)
    assert without_run(report) == without_run(on_cpu)


def test_microbatches_are_accumulated_on_the_device(tool):
    """Two windows, the division around a float16 sum, several blocks: the CPU's bytes, with little memory too."""
    paths = []
    for k in range(2):
        made = Dump(2)
        made.more["microbatch"] = {"index": k, "count": 2}
        made.mesh("dp", ["dp_shard"], [0, 1])
        made.local("w", [500, 300], "dp", ["S(0)"], {rank: numbers(40 + 2 * k + rank, (500, 300)) for rank in range(2)},
                   gradient_placements=["P(avg)"], reduce_dtype="float16", storage_dtype="float32")
        paths.append(made.write(tool.fresh("microbatch")))

    def accumulated(*arguments, **env):
        out = tool.fresh("out")
        result = run(1, "accumulate", *paths, "-o", out, "--sync", "every", "--format", "json", *arguments, env=env)
        assert result.code == 0 and result.err == "", result
        return result.json()["run"]["device"], tree(out)
    log = tool.fresh("log")
    device, files = accumulated(GRADCLIP_EMULATION_LOG=str(log))
    assert device == "cuda" and int(log_of(log)[0]["kernel"]) > 0
    assert accumulated(**CPU) == ("cpu", files)
    assert accumulated("--threads", "3") == ("cuda", files)


def test_p_that_is_no_product_agrees_to_the_last_digits(tool, dump):
    report, on_cpu = tool.norms(dump, "--norm-type", "2.5"), tool.norms(dump, "--norm-type", "2.5", env=CPU)
    assert close(report["norm"]["total"], number(on_cpu["norm"]["total"]), relative=1e-14)


def test_shards_stay_on_the_device_within_the_budget(tool, dump):
    kept, _, _ = tool.clip(dump, "--device-memory-budget", "1G")
    streamed, _, _ = tool.clip(dump, "--device-memory-budget", "1M")
    shards = 3 * (1200 * 300 * 4 + 2 * 70 * 500 * 2 + 4 * 70_000 * 4)
    assert kept["run"]["device_memory_peak_bytes"] >= streamed["run"]["device_memory_peak_bytes"] + shards / 2


def test_offload_bounds_device_memory_by_the_largest_part(tool, dump):
    kept, _, _ = tool.clip(dump, "--threads", "1")
    parts, _, _ = tool.clip(dump, "--threads", "1", "--offload")
    bytes_of_part = 1200 * 300 * 4 + 2 * 70 * 500 * 2 + 4 * 70_000 * 4
    assert kept["run"]["device_memory_peak_bytes"] - parts["run"]["device_memory_peak_bytes"] >= 1.5 * bytes_of_part


def test_several_processes_on_one_device_leave_nccl_alone(tool, dump):
    report, _, out = tool.clip(dump, np=3, env={"GRADCLIP_EMULATION_DEVICES": "1"})
    assert report["run"]["communicator"].startswith("mpi"), report["run"]
    assert "one device" in report["run"]["communicator_reason"], report["run"]
    _, _, alone = tool.clip(dump)
    assert tree(out) == tree(alone)


# No device ---------------------------------------------------------------------------------------------------------------

NONE = {"none": "no NVIDIA driver is installed", "old": "the NVIDIA driver is too old: it supports CUDA 12.0",
        "stub": "is a stub", "no-device": "no CUDA device"}


@pytest.mark.parametrize("driver", NONE)
@pytest.mark.parametrize("np_", [1, 3])
def test_no_device_is_said_by_its_reason(tool, dump, driver, np_):
    env = {"GRADCLIP_EMULATION_DRIVER": driver}
    refused(np_, 5, dump, out=tool.fresh("out"), mentions=["--device cuda", NONE[driver]], env=env)
    report, _, _ = tool.clip(dump, np=np_, env={**env, "GRADCLIP_DEVICE": "auto"})
    assert report["run"]["device"].startswith("cpu") and NONE[driver] in report["run"]["device_reason"], report["run"]


def test_a_driver_that_fails_is_no_missing_device(tool, dump):
    for device in ("cuda", "auto"):
        refused(1, 5, dump, out=tool.fresh("out"), mentions=["cudaGetDeviceCount", "cudaErrorUnknown"],
                env={"GRADCLIP_EMULATION_DRIVER": "broken", "GRADCLIP_DEVICE": device})


# Failures ----------------------------------------------------------------------------------------------------------------

CALLS = ["cudaGetDeviceProperties", "cudaMemGetInfo", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags",
         "cudaEventRecord", "cudaHostAlloc", "cudaMallocAsync", "cudaMemcpyAsync", "cudaStreamSynchronize", "launch",
         "kernel", "copy"]
COLLECTIVES = ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclAsync"]


def fails_as_one(tool, dump, np_, failure, *args, within=20, **env):
    """One message, code 5, nothing left; or a success with the right bytes, where the failure was never met."""
    out = tool.fresh("out")
    result = run(np_, "clip", dump, "-o", out, *args, env={"GRADCLIP_EMULATION_FAIL": failure, **env})
    if result.code == 0:
        return True, out
    assert result.code == 5, result
    assert len(result.error_lines) == 1 and result.err.count("\n") == 1, result
    assert result.seconds < within, result
    assert not out.exists() and not out.with_name(out.name + ".partial").exists(), result
    return False, result


@pytest.mark.parametrize("np_", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_any_call_that_fails_ends_all_processes(tool, dump, call, np_):
    before = tree(dump)
    _, _, good = tool.clip(dump)
    failed = 0
    for nth in range(1, 40) if LONG else (1, 2, 4, 9) if np_ == 1 else (1, 4):
        where = f"@{np_ - 1}" if np_ > 1 else ""  # of three processes the last alone
        survived, result = fails_as_one(tool, dump, np_, f"{call}:{nth}{where}")
        if survived:
            assert tree(result) == tree(good), "a failure that was survived changed the result"
        else:
            failed += 1
            named = re.search(r"CUDA, \w+|launch of \w+", result.err)
            assert named, result
    assert failed > 0, f"{call} is never called"
    assert tree(dump) == before


def test_a_device_that_disappears_for_good(tool, dump):
    for call in ("cudaMemcpyAsync:4+", "cudaStreamSynchronize:2+:719", "launch:3+:719"):
        for np_ in (1, 3):
            survived, _ = fails_as_one(tool, dump, np_, call)
            assert not survived, call


@pytest.mark.parametrize("np_", [1, 3])
def test_out_of_device_memory_at_any_size(tool, dump, np_):
    """What does not fit is streamed; only where not even the slots of a worker fit is it an error."""
    _, _, good = tool.clip(dump)
    codes = []
    sizes = (1 << 10, 1 << 20, 4 << 20, 9 << 20, 12 << 20, 16 << 20, 32 << 20, 64 << 20)
    for memory in sizes if LONG or np_ == 1 else sizes[::3] + sizes[-1:]:
        out = tool.fresh("out")
        result = run(np_, "clip", dump, "-o", out, "--threads", "1", "--device-memory-budget", "1G",
                     env={"GRADCLIP_EMULATION_MEMORY": str(memory)})
        codes.append(result.code)
        if result.code == 0:
            assert tree(out) == tree(good)
            continue
        assert result.code == 5 and len(result.error_lines) == 1 and "cudaErrorMemoryAllocation" in result.err, result
        assert "--device-memory-budget" in result.err, result
        assert not out.exists() and not out.with_name(out.name + ".partial").exists(), result
    assert codes[0] == 5 and codes[-1] == 0 and codes == sorted(codes, reverse=True), codes


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_nccl_that_fails_ends_all_processes(tool, dump, call):
    for nth in (1, 2):
        survived, result = fails_as_one(tool, dump, 3, f"{call}:{nth}@{0 if call == 'ncclGetUniqueId' else 1}")
        if nth == 1:
            assert not survived, call
            assert "NCCL" in result.err, result


def test_a_nccl_that_hangs_is_given_up(tool, dump):
    survived, result = fails_as_one(tool, dump, 3, "ncclHang:1", within=30, GRADCLIP_NCCL_TIMEOUT="2")
    assert not survived and "NCCL" in result.err and "2 s" in result.err, result
