#include "gradclip/training/microbatches.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

[[noreturn]] void refuse_dump(const DumpReader& dump, std::string found, std::string expected,
                              std::string advice = {}) {
  throw Error(ExitCode::bad_input, {.where = "microbatch " + quoted(dump.directory().string()),
                                    .found = std::move(found),
                                    .expected = std::move(expected),
                                    .advice = std::move(advice)});
}

bool same_mesh(const Manifest& a, const ParameterEntry& of_a, const Manifest& b, const ParameterEntry& of_b) {
  if (of_a.mesh.has_value() != of_b.mesh.has_value()) return false;
  if (!of_a.mesh) return of_a.ranks == of_b.ranks && of_a.copies == of_b.copies;
  const DeviceMesh &x = a.meshes[*of_a.mesh], &y = b.meshes[*of_b.mesh];
  return x.ranks() == y.ranks() && x.shape() == y.shape() && x.dim_names() == y.dim_names();
}

void require_same_parameters(const DumpReader& first, const DumpReader& other) {
  const Manifest &a = first.manifest(), &b = other.manifest();
  if (a.parameters.size() != b.parameters.size()) {
    refuse_dump(other, fmt::format("{} parameters", b.parameters.size()),
                fmt::format("{}, as in the first", a.parameters.size()));
  }
  for (std::size_t p = 0; p < a.parameters.size(); ++p) {
    const ParameterEntry &x = a.parameters[p], &y = b.parameters[p];
    // FSDP2 has a weight that is used twice summed in the reduce type in a window's first backward, in the compute type
    // in the others: where the reduce type is stated, a microbatch's own type does not choose it.
    const bool types_fit = x.dtype == y.dtype || x.reduce_dtype.has_value();
    if (x.name == y.name && x.dataset == y.dataset && x.shape == y.shape && types_fit && x.placements == y.placements &&
        x.layout() == y.layout() && x.flat_ranges == y.flat_ranges && x.reduce_dtype == y.reduce_dtype &&
        x.storage_dtype == y.storage_dtype && same_mesh(a, x, b, y)) {
      continue;
    }
    refuse_dump(other, fmt::format("as parameter {} {}", p, quoted(y.name)),
                fmt::format("{} with the first's shape, types, mesh and placements", quoted(x.name)));
  }
}

void require_same_job(const DumpReader& first, const DumpReader& other) {
  const Manifest &a = first.manifest(), &b = other.manifest();
  if (a.world_size != b.world_size) {
    refuse_dump(other, fmt::format("{} ranks", b.world_size), fmt::format("{}, as in the first", a.world_size));
  }
  if (a.step != b.step) refuse_dump(other, "another step", "the first's");
  if (a.state != b.state) refuse_dump(other, fmt::format("the state {}", name(b.state)), std::string(name(a.state)));
  if (!(a.accumulation == b.accumulation)) refuse_dump(other, "another \"accumulation\"", "the first's");
  require_same_parameters(first, other);
}

const MicrobatchRecord& record_of(const DumpReader& dump) {
  return *dump.manifest().microbatch;
}

/// Where each schedule step ends. Without a number a microbatch is a schedule step of its own.
std::vector<bool> schedule_ends(const MicrobatchDumps& dumps) {
  std::vector<bool> ends(dumps.size(), true);
  for (std::size_t k = 1; k < dumps.size(); ++k) {
    const auto before = record_of(*dumps[k - 1]).schedule_step, here = record_of(*dumps[k]).schedule_step;
    if (!before || !here) continue;
    ends[k - 1] = *here != *before;
    if (*here == *before || *here == *before + 1) continue;
    refuse_dump(*dumps[k], fmt::format("schedule step {} after {}: one is cut off", *here, *before),
                fmt::format("{0}, or {0} + 1", *before),
                "a reduction ends every schedule step: record all microbatches of each, in their order");
  }
  return ends;
}

std::vector<bool> ends_by_rule(const MicrobatchDumps& dumps, Synchronisation sync) {
  if (sync == Synchronisation::schedule) return schedule_ends(dumps);
  std::vector<bool> ends(dumps.size(), sync == Synchronisation::every);
  ends.back() = true;
  return ends;
}

/// The recorded positions of microbatches whose flag is on.
std::vector<std::int64_t> where_on(const MicrobatchDumps& dumps, std::optional<bool> MicrobatchRecord::*flag) {
  std::vector<std::int64_t> on;
  for (const auto& dump : dumps) {
    if ((record_of(*dump).*flag).value_or(false)) on.push_back(record_of(*dump).index);
  }
  return on;
}

bool is_recorded(const MicrobatchDumps& dumps, std::optional<bool> MicrobatchRecord::*flag) {
  return std::any_of(dumps.begin(), dumps.end(),
                     [&](const auto& dump) { return (record_of(*dump).*flag).has_value(); });
}

Finding flag_finding(const char* kind, std::string message) {
  return {.kind = kind, .parameter = {}, .ranks = {}, .index = {}, .value = {}, .message = std::move(message)};
}

}  // namespace

void order_microbatches(MicrobatchDumps& dumps) {
  std::vector<const DumpReader*> by_index(dumps.size(), nullptr);
  for (const std::unique_ptr<DumpReader>& dump : dumps) {
    const auto& microbatch = dump->manifest().microbatch;
    if (!microbatch) refuse_dump(*dump, "no \"microbatch\" in its manifest", "the gradients of one microbatch");
    if (microbatch->count != static_cast<std::int64_t>(dumps.size())) {
      refuse_dump(*dump, fmt::format("microbatch {} of {}", microbatch->index, microbatch->count),
                  fmt::format("one of the {} that are given: a window that does not end in a reduction is no gradient",
                              dumps.size()));
    }
    const DumpReader*& place = by_index.at(static_cast<std::size_t>(microbatch->index));
    if (place != nullptr) {
      refuse_dump(*dump, fmt::format("microbatch {}, as {}", microbatch->index, quoted(place->directory().string())),
                  "each microbatch once");
    }
    place = dump.get();
    if (dump != dumps.front()) require_same_job(*dumps.front(), *dump);
  }
  std::sort(dumps.begin(), dumps.end(),
            [](const auto& a, const auto& b) { return record_of(*a).index < record_of(*b).index; });
}

std::vector<bool> synchronisation_windows(const MicrobatchDumps& dumps, std::optional<Synchronisation> sync) {
  if (sync) return ends_by_rule(dumps, *sync);
  const AccumulationRecord& recorded = dumps.front()->manifest().accumulation;
  std::vector<bool> ends = ends_by_rule(dumps, recorded.sync.value_or(Synchronisation::deferred));
  for (std::size_t k = 0; k < dumps.size(); ++k) ends[k] = record_of(*dumps[k]).synchronised.value_or(ends[k]);
  if (!ends.back()) {
    refuse_dump(*dumps.back(), "the step's last microbatch with \"synchronised\": false",
                "a reduction after it: a window that never ends in one is no gradient",
                "if there was one, --sync says where windows end");
  }
  return ends;
}

std::vector<Finding> flag_findings(const MicrobatchDumps& dumps) {
  std::vector<Finding> findings;
  const std::vector<std::int64_t> first = where_on(dumps, &MicrobatchRecord::first_microbatch);
  if (is_recorded(dumps, &MicrobatchRecord::first_microbatch) && first != std::vector<std::int64_t>{0}) {
    findings.push_back(flag_finding(
        "fp8-cache",
        first.empty()
            ? std::string(
                  "the first-microbatch flag is on for none: cached FP8 weights may be those of an earlier step")
            : fmt::format("the first-microbatch flag is on for microbatch {}, not for the first alone: FP8 weights are "
                          "cached where it is on, and reused where it is off",
                          fmt::join(first, ", "))));
  }
  const std::int64_t last = record_of(*dumps.back()).index;
  const std::vector<std::int64_t> steps = where_on(dumps, &MicrobatchRecord::optimizer_step);
  const bool expected =
      steps.empty() ? record_of(*dumps.back()).optimizer_step.value_or(true) : steps == std::vector<std::int64_t>{last};
  if (!expected) {
    findings.push_back(
        flag_finding("sync-window",
                     fmt::format("the optimizer-step flag is on for {}, not for the last microbatch ({}) alone",
                                 steps.empty() ? "none" : fmt::format("microbatch {}", fmt::join(steps, ", ")), last)));
  }
  return findings;
}

}  // namespace gradclip
