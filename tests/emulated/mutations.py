#!/usr/bin/env python3
"""Plants defects in the CUDA backend and demands that the tests notice each of them.

  mutations.py plant --source SRC --output DIR
      Writes mutated copies of the sources: each defect lies dormant in them until the environment names it, so that one
      compilation serves all. A defect whose text is not found exactly once is an error: mutations do not rot.
  mutations.py check --mode plain|asan|tsan --test EXECUTABLE [--contracted EXECUTABLE] [--every] [NAME...]
      Runs the tests once without a defect, which must pass, and once with each defect that the mode has to catch, which
      must not. --every tries the other defects too and only tells whether they are caught.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

STATISTICS = "gradclip/backend/cuda/statistics.cu"
LANES = "gradclip/backend/cuda/lanes.hpp"
ELEMENTWISE = "gradclip/backend/cuda/elementwise.cu"
BACKEND = "gradclip/backend/cuda/cuda_backend.cpp"
MAGNITUDES = "gradclip/backend/cuda/magnitudes.hpp"
FILES = (STATISTICS, LANES, MAGNITUDES, ELEMENTWISE, BACKEND)

# Chosen at run time. `unlocked` stands for a lock that a defect leaves out.
PLANTED = """#pragma once
#include <cstdlib>
#include <mutex>
#include <string>
inline const std::string kPlanted = std::getenv("GRADCLIP_PLANTED") == nullptr ? "" : std::getenv("GRADCLIP_PLANTED");
inline const int kPlantedNumber = kPlanted.empty() ? 0 : std::stoi(kPlanted);
inline bool planted(int number) { return number == kPlantedNumber; }
inline std::mutex& unlocked() {
  thread_local std::mutex mine;
  return mine;
}
"""

SECONDS = 120  # for one run


@dataclasses.dataclass(frozen=True)
class Edit:
    file: str
    where: str  # text of the file that is there once, the part to replace in «»: an expression, or statements
    instead: str


@dataclasses.dataclass(frozen=True)
class Defect:
    name: str
    modes: str  # which have to catch it
    tests: str  # a filter of GoogleTest
    edits: tuple[Edit, ...]
    repeats: int = 1  # more where threads have to meet by chance


def defect(name, modes, tests, file, where, instead, *more, **others):
    return Defect(name, modes, tests, (Edit(file, where, instead), *more), **others)


def agreement(test, dtype):
    return f"*BackendAgreement.{test}/cuda_{dtype}"


def tables(test):
    return f"*BackendTables.{test}/cuda"


ONCE_32 = agreement("EachFunctionOnce", "float32")
ONCE_64 = agreement("EachFunctionOnce", "float64")
SMALL_32 = agreement("SeveralFactorsInOneTable", "float32")
SMALL_16 = agreement("SeveralFactorsInOneTable", "bfloat16")
SMALL_64 = agreement("SeveralFactorsInOneTable", "float64")
SMALL_8 = agreement("SeveralFactorsInOneTable", "float8_e4m3fn")
WHOLE_32 = agreement("StatisticsOfWholeChunks", "float32")
SCALE_16 = agreement("Scale", "bfloat16")
ACCUMULATE_32 = agreement("Accumulate", "float32")
ACCUMULATE_TABLES = tables("AccumulateAllTypesIntoAllTypes")
MOVES = tables("MovesBetweenAllSpaces")
SPANS = tables("SpansMayBeReusedWhenACallReturns")
THREADS = tables("ThreadsBeginTogether")

DEFECTS = (
    # Barriers and races
    defect("no barrier after the totals are cleared", "tsan", ONCE_32,
           STATISTICS, "infinity()));\n    «__syncthreads();»\n    Owned", ""),
    defect("no barrier before the totals are read", "tsan", ONCE_32,
           STATISTICS, "owned.subnormals);\n    «__syncthreads();»", ""),
    defect("no barrier before the totals are cleared again", "tsan", ONCE_64,
           STATISTICS, "terms = true;\n      }\n      «__syncthreads();»", ""),
    defect("every thread writes the sub-block's sums", "tsan plain", ONCE_32,
           STATISTICS, "if («thread == 0») {\n      totals.power", "true"),
    defect("counter without an atomic", "tsan", ONCE_32,
           LANES, "all != 0) «atomicAdd(total, all)»;", "*total += all"),
    defect("minimum of float64 without an atomic", "tsan", ONCE_64,
           LANES, "== 0) «atomicMin(total, mine)»;", "*total = mine < *total ? mine : *total"),
    defect("counter of NaN without an atomic", "tsan", ONCE_32,
           LANES, "«atomicAdd(value > 0 ? &totals.posinf : (value < 0 ? &totals.neginf : &totals.nan), 1u)»;",
           "*(value > 0 ? &totals.posinf : (value < 0 ? &totals.neginf : &totals.nan)) += 1"),
    # Order of sums
    defect("lanes of a thread folded by neighbours", "plain", SMALL_32,
           LANES, "«lanes[slot] += lanes[slot + kCount / 2]»;", "lanes[slot] = lanes[2 * slot] + lanes[2 * slot + 1]"),
    defect("lanes of threads folded in half a segment", "plain", SMALL_32,
           LANES, "lanes[slot], half, «kThreads»)", "kThreads / 2"),
    defect("lanes of threads folded from near to far", "plain", SMALL_32,
           LANES, "lanes[slot], «half», kThreads)", "kThreads / 2 / half"),
    defect("sub-blocks folded from near to far", "plain", WHOLE_32,
           STATISTICS, "__shfl_down_sync(kAllLanes, sum, «half», kCount)", "kCount / 2 / half"),
    defect("all lanes of a thread summed in one", "plain", SMALL_32,
           LANES, "      «owned.rotate();»", ""),
    # Which elements
    defect("a row of vectors too many", "plain asan", SMALL_32,
           LANES, "const int rows = «share.count / kRow»;\n  WordMagnitudes", "share.count / kRow + 1"),
    defect("a row of vectors of float64 too many", "plain asan", SMALL_64,
           LANES, "Geometry<kType, T>::kUnrolled;\n  const int rows = «share.count / kRow»;", "share.count / kRow + 1"),
    defect("short row dropped", "plain", SMALL_32, LANES, "return «rows»;", "rows + 1"),
    defect("vectors from any address", "asan", SMALL_32, LANES, "if («is_aligned(share.data)») {", "true"),
    defect("vectors from any address, scaled", "asan", SMALL_8,
           LANES, "if («is_aligned(share.data)») {", "changes || is_aligned(share.data)"),
    defect("sub-blocks run into the next", "plain", WHOLE_32,
           STATISTICS, "left < 0 ? 0 : («left < kElements ? left : kElements»)", "left"),
    defect("no doubts about NaN and infinities", "plain", SMALL_16,
           LANES, "if («largest >= Element<D>::kNonfinite» || has_small", "false"),
    defect("no doubts about NaN and infinities of float64", "plain", SMALL_64,
           LANES, "return has_small || «all != all» ? -1 : rows", "false"),
    defect("no doubts about subnormals", "plain", SMALL_32,
           LANES, "const bool has_small = «!kCountsSubnormals<D> && smallest < Element<D>::kSmallestNormal»;", "false"),
    defect("no doubts about subnormals of float64", "plain", SMALL_64,
           LANES, "return «has_small» || all != all ? -1 : rows", "false"),
    defect("no doubts about scale_inv", "plain", agreement("StatisticsForEveryNormAndFactor", "float8_e4m3fn"),
           LANES, "has_small || «!keeps_order<D>(scale_inv)»)", "false"),
    defect("doubtful rows kept when gathered again", "plain", SMALL_32,
           LANES, "if (row < 0) {\n      «owned.clear();»", ""),
    # Magnitudes by their bits
    defect("magnitudes without their highest bit", "plain", SMALL_16,
           MAGNITUDES, "magnitude = «word & unit(part) * kMagnitude»;", "word & unit(part) * (kMagnitude >> 1)"),
    defect("zero taken for the smallest magnitude", "plain", agreement("SeveralFactorsInOneTable", "float16"),
           MAGNITUDES, "less_one = «magnitude - unit(part)»;", "(magnitude == 0 ? 0 : magnitude - unit(part))"),
    defect("largest of a word's first element", "plain", SMALL_16,
           MAGNITUDES, "most = «here > most ? here : most»;", "part == 0 ? here : most"),
    defect("smallest of a word's first element", "plain", SMALL_16,
           MAGNITUDES, "least = «here < least ? here : least»;", "part == 0 ? here : least"),
    defect("the smallest magnitude less one", "plain", SMALL_32, MAGNITUDES, "return «least + 1»;", "least"),
    defect("zeros among the subnormals", "plain", agreement("SeveralFactorsInOneTable", "float16"),
           MAGNITUDES, "kCountsSubnormals<D> ? «small_ - zeros_» : 0", "small_"),
    defect("results in the order of types", "plain", tables("StatisticsOfAllTypes"),
           STATISTICS, "out[«chunk.position»] = result", "blockIdx.x"),
    defect("factors of the first chunk for all", "plain", SMALL_32,
           STATISTICS, "table.factors[«chunk.factors»]", "0u"),
    # Arithmetic
    defect("sums of float64 not taken again", "plain", SMALL_64,
           STATISTICS, "again = «!enough && (exponent != 0 || !terms)»;", "false"),
    defect("sums of float64 taken again without scaling", "plain", SMALL_64,
           STATISTICS, "if (again) «term.scaling = power_of_two(-exponent);»", ""),
    defect("sums that needed no scaling left as they are", "plain", SMALL_64,
           STATISTICS, "if («exponent != 0 && term.scaling == 1.0») scale_sums", "false"),
    defect("statistics without scale_inv", "plain", SMALL_8,
           STATISTICS, "changes, scaling, «factors.scale_inv», term", "1.0F"),
    defect("float8: half a table", "plain", SMALL_8, LANES, "bits < «256»;", "128"),
    defect("largest of a warp's first thread", "plain", SMALL_32,
           LANES, "most = «__reduce_max_sync(kAllLanes, mine)»;", "mine"),
    defect("last NaN instead of the first", "plain", SMALL_32,
           LANES, "«atomicMin(&totals.first_nonfinite, position);»", "atomicMax(&totals.first_nonfinite, position);"),
    defect("positions of NaN in the sub-block", "plain", WHOLE_32,
           STATISTICS, "Geometry<D, T>::kOwned,\n                       «static_cast<unsigned>(first)»", "0u"),
    defect("zeros taken for the smallest", "plain", SMALL_32,
           LANES, "    smallest = «!zero && magnitude < smallest»", "magnitude < smallest"),
    defect("doubts of a thread's first lane alone", "plain", SMALL_64,
           LANES, "all += «owned.sum[slot] - owned.sum[slot]»;", "slot == 0 ? owned.sum[slot] - owned.sum[slot] : 0.0"),
    defect("zeros counted for subnormals", "plain", agreement("SeveralFactorsInOneTable", "float16"),
           LANES, "subnormals += «!zero && is_subnormal<D>(bits)»;", "zero || is_subnormal<D>(bits)"),
    defect("largest of float64 from half a warp", "plain", SMALL_64,
           LANES, "mine = «other > mine ? other : mine»;", "half > 8 ? mine : (other > mine ? other : mine)"),
    defect("smallest of float64 from half a warp", "plain", SMALL_64,
           LANES, "mine = «other < mine ? other : mine»;", "half > 8 ? mine : (other < mine ? other : mine)"),
    defect("general terms not scaled", "plain", agreement("StatisticsForEveryNormAndFactor", "bfloat16"),
           STATISTICS, "const bool scales_first = «T == Terms::general && exact»;", "false"),
    defect("reference's terms scaled like exact ones", "plain", agreement("ReferenceTerms", "float64"),
           STATISTICS, "if («exact && unscaled») {", "unscaled"),
    defect("normalizer left out", "plain", agreement("ReferenceTerms", "float16"),
           STATISTICS, "request.order.p, «factors.normalizer», 1.0", "1.0"),
    defect("reference's terms always rounded", "plain", agreement("ReferenceTerms", "float16"),
           STATISTICS, "1.0, «factors.reference_in_float64»}", "false"),
    # Scaling
    defect("scale: head that is not aligned", "asan", SCALE_16,
           ELEMENTWISE,
           "const int head = «past == 0 ? 0 : (kVectorBytes - past) / static_cast<int>(sizeof(Bits))»;", "0"),
    defect("scale: a vector too many", "plain asan", SCALE_16, ELEMENTWISE, "vector < «whole»;", "whole + 1"),
    defect("scale: last element forgotten", "plain", SCALE_16,
           ELEMENTWISE, "const int rest = «count - whole * kCount»;", "count - whole * kCount - 1"),
    defect("scale: elements behind the vectors taken from their middle", "plain", SCALE_16,
           ELEMENTWISE, "i < begin ? i : «i + whole * kCount»", "i"),
    defect("scale: NaN loses its payload where nothing changes", "plain", SCALE_16,
           BACKEND, "chunk.count > 0 && «changes_bits(checked_factors(table, chunk))»", "true",
           Edit(ELEMENTWISE, "«scale_elements<D>(vector.element, factors);»\n        store",
                "for (auto& e : vector.element) e = Element<D>::round(Element<D>::widen(scale_element<D>(e, factors)));")),
    # Combining and accumulating
    defect("combine: begins with 0", "plain", ONCE_32,
           ELEMENTWISE, "combined = «rank == 0 ? value : combine_values(table.operation, combined, value)»;",
           "combine_values(table.operation, combined, value)"),
    defect("combine: ranks in another order", "plain", agreement("Combine", "float64"),
           ELEMENTWISE, "addends[«rank»].data", "table.ranks - 1 - rank"),
    defect("combine: factors of the first rank for all", "plain", tables("CombineAllTypes"),
           ELEMENTWISE, "table.addends.factors[addends[«rank»].factors]", "0"),
    defect("combine: factors of another rank's table", "plain", tables("CombineAllTypes"),
           BACKEND, "chunk.count, «first_factors[rank] + chunk.factors», static", "chunk.factors"),
    defect("combine: without scale_inv", "plain", agreement("Combine", "float8_e5m2"),
           ELEMENTWISE, "scale_element<D>(bits, factors), «factors.scale_inv»)", "1.0F"),
    defect("accumulate: only one side aligned", "asan", ACCUMULATE_32,
           ELEMENTWISE, "const bool aligned = «is_aligned(into) && is_aligned(from)»;", "is_aligned(into)"),
    defect("accumulate: only the other side aligned", "asan", ACCUMULATE_32,
           ELEMENTWISE, "const bool aligned = «is_aligned(into) && is_aligned(from)»;", "is_aligned(from)"),
    defect("accumulate: vectors assigned instead of added", "plain", ACCUMULATE_32,
           ELEMENTWISE, "if («add») sum = load_vector", "false"),
    defect("accumulate: assigned NaN loses its payload", "plain", ACCUMULATE_32,
           ELEMENTWISE, "return add ? add_elements<Into>(so_far, converted) : «converted»;",
           "Element<Into>::round(Element<Into>::widen(converted))"),
    defect("accumulate: without scale_inv", "plain", ACCUMULATE_32,
           ELEMENTWISE, "const float scale_inv = «table.factors[chunk.factors].scale_inv»;", "1.0F"),
    defect("accumulate: targets not sorted with their chunks", "plain", ACCUMULATE_TABLES,
           BACKEND, "sorted_targets.push_back(targets[«i»]);", "sorted_targets.size()"),
    defect("accumulate: targets of the first type for all", "plain", ACCUMULATE_TABLES,
           BACKEND, "uploaded.targets + («part.chunks - uploaded.chunks»)", "0"),
    # Streams and memory
    defect("wait() does nothing", "plain", MOVES, BACKEND, "override {\n    «lane().wait();»", ""),
    defect("a move to host memory overtakes what is under way", "plain", MOVES,
           BACKEND, "«if (pageable) mine.wait();»  // pinned", ""),
    defect("a move from host memory does not wait", "plain",
           tables("MovesFromAndToHostMemoryAreSeenByOtherThreads"),
           BACKEND, "mine.stream()));\n    «if (pageable) mine.wait();»", ""),
    defect("a move between pinned memories overtakes what is under way", "plain", MOVES,
           BACKEND, "«if (!pageable) mine.wait();»", ""),
    defect("a table's departure reused before it has left", "plain", SPANS, BACKEND, "«departure.copied.wait();»", ""),
    defect("a table's departure not recorded", "plain", SPANS,
           BACKEND, "«departure.copied.record(stream_.get());»", ""),
    defect("a table released before its launch", "plain asan", ONCE_32,
           BACKEND, "«cuda::launch_statistics(dtype, chunks, request, results, uploaded.lane->stream())»",
           "(device_release(uploaded.buffer.bytes), "
           "cuda::launch_statistics(dtype, chunks, request, results, uploaded.lane->stream()))"),
    defect("chunks not sorted by type", "plain", tables("StatisticsOfAllTypes"),
           BACKEND, "return «table.chunks[a].dtype < table.chunks[b].dtype»;", "false"),
    defect("arrays of a table not aligned", "asan", ACCUMULATE_TABLES,
           BACKEND, "bytes_.resize(«aligned(at + values.size_bytes())»);", "at + values.size_bytes() + 1"),
    defect("one departure for all tables", "plain", SPANS, BACKEND, "departures_[«next_++ % kTablesUnderWay»]", "0",
           Edit(BACKEND, "«departure.copied.wait();»", "")),
    defect("combine: results behind the first chunk's", "plain", tables("CombineAllTypes"),
           BACKEND, "out_by_type[type].push_back(out_of[«i»]);", "out_by_type[type].size()"),
    defect("combine: divisor left out", "plain", agreement("Combine", "float32"),
           BACKEND, "launch.divisor = «divisor»;", "1.0"),
    defect("one stream for all threads", "tsan", THREADS,
           BACKEND, "lanes_[«std::this_thread::get_id()»]", "std::thread::id()", repeats=20),
    defect("streams of threads found without the lock", "tsan", THREADS,
           BACKEND, "const std::lock_guard lock(«mutex_»);", "unlocked()", repeats=20),
)

CONTRACTION = Defect("contraction (fma) in the kernels' flags", "plain", ONCE_64, ())


# ----------------------------------------------------------------------------------------------------------------------
# Planting
# ----------------------------------------------------------------------------------------------------------------------


def locate(text, edit):
    """Where the part in «» lies in the text."""
    before, part, after = re.fullmatch("(.*)«(.*)»(.*)", edit.where, re.DOTALL).groups()
    found = text.count(before + part + after)
    if found != 1:
        sys.exit(f"{edit.file}: found {found} times instead of once:\n{edit.where}")
    begin = text.index(before + part + after) + len(before)
    return begin, begin + len(part)


def with_choice(part, choices):
    """`part`, or one of the choices where that defect is planted."""
    if not part.endswith(";"):
        return "(" + "".join(f"planted({number}) ? ({instead}) : " for number, instead in choices) + f"({part}))"
    ifs = "".join(f"if (planted({number})) {{ {instead} }} else " for number, instead in choices)
    return f"{{ {ifs}{{ {part} }} }}"


def plant(source, output):
    for file in FILES:
        text = (source / file.removeprefix("gradclip/")).read_text()
        choices = {}
        for number, each in enumerate(DEFECTS, 1):
            for edit in each.edits:
                if edit.file == file:
                    choices.setdefault(locate(text, edit), []).append((number, edit.instead))
        places = sorted(choices, reverse=True)
        for (begin, _), (_, end) in zip(places, places[1:]):
            if end > begin:
                sys.exit(f"{file}: two defects overlap at {text[begin:end]!r}")
        for begin, end in places:
            text = text[:begin] + with_choice(text[begin:end], choices[begin, end]) + text[end:]
        target = output / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'#include "planted.hpp"\n#line 1 "{target.name}"\n{text}')
    (output / "planted.hpp").write_text(PLANTED)


# ----------------------------------------------------------------------------------------------------------------------
# Checking
# ----------------------------------------------------------------------------------------------------------------------


def reason_of(output):
    """How a run that failed says why."""
    patterns = (
        r"ThreadSanitizer: (.*?) \(",
        r"AddressSanitizer: (\S+)",
        r"runtime error: (.*)",
        r"LeakSanitizer: (.*)",
        r"cuda emulation: (.*)",
        r"(?:\.cpp:\d+: Failure\n)(.*)",
    )
    for pattern in patterns:
        found = re.search(pattern, output)
        if found:
            return "test failed" if "Failure" in pattern else found.group(1)[:60]
    return ""


def run(executable, tests, number, repeats=1):
    environment = dict(os.environ)
    environment["GRADCLIP_PLANTED"] = str(number)
    environment["TSAN_OPTIONS"] = "halt_on_error=1 " + environment.get("TSAN_OPTIONS", "")
    command = [executable, "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_repeat={repeats}",
               f"--gtest_filter={tests}"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, "hangs"
    output = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode == 0:
        if re.search(r"\[==========\] 0 tests", output):
            sys.exit(f"no test is called {tests}")
        return True, ""
    reason = reason_of(output)
    if not reason:
        reason = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return False, reason


def has_fma():
    return re.search(r"^flags\s*:.*\bfma\b", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None


def check(mode, test, contracted, every, names, jobs):
    chosen = [(number, each, test) for number, each in enumerate(DEFECTS, 1)]
    if contracted and has_fma():
        chosen.append((0, CONTRACTION, contracted))
    chosen = [entry for entry in chosen if (every or mode in entry[1].modes.split())]
    chosen = [entry for entry in chosen if not names or any(name in entry[1].name for name in names)]
    if not chosen:
        sys.exit("no such defect")
    filters = sorted({each.tests for _, each, _ in chosen})

    start = time.monotonic()
    passes, reason = run(test, ":".join(filters), 0)
    if not passes:
        sys.exit(f"the tests fail without a defect: {reason}")
    print(f"{time.monotonic() - start:6.1f} s  {'passes':60}  (no defect)")

    def checked(entry):
        number, each, executable = entry
        begin = time.monotonic()
        return entry, *run(executable, each.tests, number, each.repeats), time.monotonic() - begin

    missed = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for (_, each, _), passes, reason, seconds in pool.map(checked, chosen):
            demanded = mode in each.modes.split()
            missed += passes and demanded
            verdict = ("MISSED" if demanded else "-") if passes else reason
            print(f"{seconds:6.1f} s  {verdict:60}  {each.name}", flush=True)
    print(f"{len(chosen)} defects in {time.monotonic() - start:.1f} s, {missed} missed")
    return 1 if missed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planting = commands.add_parser("plant")
    planting.add_argument("--source", type=pathlib.Path, required=True)
    planting.add_argument("--output", type=pathlib.Path, required=True)
    checking = commands.add_parser("check")
    checking.add_argument("--mode", choices=("plain", "asan", "tsan"), required=True)
    checking.add_argument("--test", required=True)
    checking.add_argument("--contracted")
    checking.add_argument("--every", action="store_true")
    checking.add_argument("--jobs", type=int, default=1)
    checking.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.command == "plant":
        return plant(arguments.source, arguments.output)
    return check(arguments.mode, arguments.test, arguments.contracted, arguments.every, arguments.names, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
