#include "gradclip/verify/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <list>
#include <map>
#include <set>

#include "gradclip/base/worker_pool.hpp"
#include "gradclip/norm/findings.hpp"
#include "gradclip/norm/partial.hpp"
#include "gradclip/norm/rank_view.hpp"
#include "gradclip/norm/replicas.hpp"
#include "gradclip/norm/shard_sums.hpp"
#include "gradclip/verify/check_helper.hpp"
#include "gradclip/verify/rank_check.hpp"
#include "gradclip/verify/reduction_hints.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kRanksPerCheck = 4096;  // whose results lie side by side

bool is_rank_file(const Manifest& manifest, const std::string& name) {
  const std::size_t begin = manifest.rank_file_pattern.find('{');
  std::int32_t rank = -1;
  if (begin >= name.size()) return false;
  std::from_chars(name.data() + begin, name.data() + name.size(), rank);
  return rank >= 0 && rank < manifest.world_size && manifest.rank_file_name(rank) == name;
}

/// What lies in the directory beside the manifest and the rank files, and looks like a part of a dump.
void check_directory(const DumpReader& dump, std::vector<Fault>& faults) {
  const Manifest& manifest = dump.manifest();
  const auto extra = [&](std::string name, std::string message) {
    faults.push_back({"extra", -1, std::nullopt, std::move(name), std::move(message)});
  };
  std::error_code error;
  for (std::filesystem::directory_iterator entry(dump.directory(), error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name == kManifestName || is_rank_file(manifest, name)) continue;
    if (name.ends_with(".tmp")) {
      extra(name, "is a temporary file that a recorder or a copy left behind");
    } else if (name.starts_with("rank_") && name.ends_with(".json")) {
      extra(name, "is a recorder's fragment, which the manifest has taken the place of");
    } else if (name.ends_with(".h5")) {
      extra(name,
            fmt::format("is no rank's file: the manifest has {} ranks, from {} to {}", manifest.world_size,
                        quoted(manifest.rank_file_name(0)), quoted(manifest.rank_file_name(manifest.world_size - 1))));
    }
  }
  if (error) {
    throw Error(ExitCode::resources,
                {.where = dump.directory().string(), .found = "cannot be listed: " + error.message()});
  }
  for (const auto& [name, record] : manifest.files) {
    if (is_rank_file(manifest, name)) continue;
    faults.push_back(
        {"manifest", -1, std::nullopt, name, "the manifest has a size and a checksum of it, but it is no rank's file"});
  }
}

/// What all processes know after every rank file was checked.
struct Structure {
  std::vector<Fault> faults;
  std::set<std::int32_t> unreadable;  ///< ranks of which nothing can be worked on
  std::set<ShardName> unusable;       ///< shards of other ranks

  [[nodiscard]] bool lacks(std::size_t parameter, std::int32_t rank) const {
    return unreadable.count(rank) != 0 || unusable.count({static_cast<std::uint32_t>(parameter), rank}) != 0;
  }
  [[nodiscard]] bool complete() const noexcept { return unreadable.empty() && unusable.empty(); }
};

class Verifier {
 public:
  Verifier(Run& run, const VerifyOptions& options) : run_(run), options_(options), manifest_(run.dump.manifest()) {
    for (const ParameterEntry& entry : manifest_.parameters) {
      factors_.expert.push_back(manifest_.is_expert(entry, options.ep_axis_name));
    }
    factors_.of.resize(manifest_.parameters.size());
  }

  Verification verify() {
    check_files();
    leave_out();
    measure();
    std::vector<Finding> all = manifest_findings(options_.problems);
    for (std::vector<Finding> part :
         {std::move(missing_), findings_of(manifest_, std::move(structure_.faults)), std::move(findings_)}) {
      std::move(part.begin(), part.end(), std::back_inserter(all));
    }
    sort_by_severity(all);
    verification_.findings = std::move(all);
    return std::move(verification_);
  }

 private:
  // ---- files and shards

  void check_files() {
    const int me = run_.comm.process();
    const std::span<const std::int32_t> ranks = run_.plan.ranks(me);
    std::vector<Fault> faults;
    std::vector<std::int32_t> missing, unreadable;
    std::vector<ShardName> unusable, none;
    std::vector<OddShard> odd;
    struct Counts {
      std::uint64_t files, file_checksums, files_compared, shards, shard_checksums;
    } counts{};
    if (me == 0) check_directory(run_.dump, faults);
    for (std::size_t first = 0; first < ranks.size(); first += kRanksPerCheck) {
      std::vector<RankCheck> checks(std::min(kRanksPerCheck, ranks.size() - first));
      check_ranks(ranks.subspan(first, checks.size()), checks);
      for (std::size_t i = 0; i < checks.size(); ++i) {
        RankCheck& check = checks[i];
        std::move(check.faults.begin(), check.faults.end(), std::back_inserter(faults));
        if (check.missing) missing.push_back(ranks[first + i]);
        if (!check.readable) unreadable.push_back(ranks[first + i]);
        unusable.insert(unusable.end(), check.unusable.begin(), check.unusable.end());
        odd.insert(odd.end(), check.odd.begin(), check.odd.end());
        none.insert(none.end(), check.none.begin(), check.none.end());
        counts.files += check.readable ? 1 : 0;
        counts.file_checksums += check.file_checksum ? 1 : 0;
        counts.files_compared += check.file_compared ? 1 : 0;
        counts.shards += check.shards;
        counts.shard_checksums += check.shard_checksums;
      }
    }
    for (const Counts& theirs : gather_value(run_.comm, counts)) {
      verification_.files += theirs.files;
      verification_.file_checksums += theirs.file_checksums;
      verification_.files_compared += theirs.files_compared;
      verification_.shards += theirs.shards;
      verification_.shard_checksums += theirs.shard_checksums;
    }
    structure_.faults = gather_faults(run_.comm, faults);
    report_missing(gather_values(run_.comm, std::span<const std::int32_t>(missing)));
    for (const std::int32_t rank : gather_values(run_.comm, std::span<const std::int32_t>(unreadable))) {
      structure_.unreadable.insert(structure_.unreadable.end(), rank);
    }
    const auto all_unusable = gather_values(run_.comm, std::span<const ShardName>(unusable));
    structure_.unusable = {all_unusable.begin(), all_unusable.end()};
    compare_sizes(gather_values(run_.comm, std::span<const OddShard>(odd)));
    require_addends(gather_values(run_.comm, std::span<const ShardName>(none)));
  }

  void check_ranks(std::span<const std::int32_t> ranks, std::vector<RankCheck>& checks) {
    std::list<CheckHelper> helpers;
    std::vector<CheckHelper*> helper_of;
    const std::size_t workers = options_.isolate ? std::min(options_.threads, kMostHelpers) : options_.threads;
    for (std::size_t worker = 0; options_.isolate && worker < workers; ++worker) {
      helper_of.push_back(&helpers.emplace_back(run_.dump));
    }
    parallel_for(checks.size(), workers, [&](std::size_t index, std::size_t worker) {
      checks[index] = options_.isolate ? helper_of[worker]->check(ranks[index]) : check_rank(run_.dump, ranks[index]);
    });
  }

  /// One for all: without its rank files a manifest is one mishap, not thousands.
  void report_missing(std::vector<std::int32_t> ranks) {
    if (ranks.empty()) return;
    const std::string first = manifest_.rank_file_name(ranks.front());
    const std::string found = ranks.size() == 1
                                  ? first + " does not exist"
                                  : fmt::format("{} rank files do not exist, the first is {}", ranks.size(), first);
    missing_.push_back({.kind = "missing",
                        .parameter = {},
                        .ranks = std::move(ranks),
                        .index = {},
                        .value = {},
                        .message = found + "; the dump is incomplete, copy or record it again"});
  }

  void refuse(std::size_t parameter, std::int32_t rank, std::string kind, std::string message) {
    structure_.faults.push_back({std::move(kind), rank, parameter, {}, std::move(message)});
    structure_.unusable.insert({static_cast<std::uint32_t>(parameter), rank});
  }

  /// Copies have the same number of elements, addends that of the placements: else nothing can be formed from them.
  void compare_sizes(const std::vector<OddShard>& odd) {
    std::map<std::uint32_t, std::map<std::int32_t, std::uint64_t>> by_parameter;
    for (const OddShard& shard : odd) {
      if (!structure_.lacks(shard.parameter, shard.rank)) by_parameter[shard.parameter][shard.rank] = shard.elements;
    }
    for (const auto& [p, sizes] : by_parameter) {
      const ParameterEntry& entry = manifest_.parameters[p];
      for (const auto& [rank, elements] : sizes) {
        const std::uint64_t placed = manifest_.layout(entry, rank).elements();
        if (entry.has_partial()) {
          refuse(p, rank, "placement",
                 fmt::format("the addend has {} elements; expected {}, as the placements give it", elements, placed));
        }
      }
      if (!entry.has_partial() && has_copies(manifest_, entry, factors_.expert[p])) compare_copies(p, sizes);
    }
  }

  void compare_copies(std::size_t p, const std::map<std::int32_t, std::uint64_t>& odd) {
    const ParameterEntry& entry = manifest_.parameters[p];
    const auto size_on = [&](std::int32_t rank) {
      const auto found = odd.find(rank);
      return found != odd.end() ? found->second : manifest_.layout(entry, rank).elements();
    };
    for (const std::int32_t rank : manifest_.holders(entry)) {
      if (!is_counted_copy(manifest_, entry, rank, factors_.expert[p])) continue;
      std::optional<std::pair<std::int32_t, std::uint64_t>> first;
      for (const std::int32_t copy : manifest_.role(entry, rank, factors_.expert[p]).copies) {
        if (structure_.lacks(p, copy)) continue;
        if (!first) {
          first = {copy, size_on(copy)};
        } else if (size_on(copy) != first->second) {
          refuse(p, copy, "placement",
                 fmt::format("the copy has {} elements; expected {}, as rank {}'s has", size_on(copy), first->second,
                             first->first));
        }
      }
    }
  }

  /// The maximum of addends of which one is missing is not known: then the parameter's values are not looked at.
  void require_addends(const std::vector<ShardName>& none) {
    std::set<std::uint32_t> incomplete;
    for (const ShardName& shard : none) {
      incomplete.insert(shard.parameter);
      structure_.faults.push_back({"missing",
                                   shard.rank,
                                   shard.parameter,
                                   {},
                                   "the gradient is None; expected an addend of its Partial placement"});
    }
    for (std::size_t p = 0; p < manifest_.parameters.size(); ++p) {
      const ParameterEntry& entry = manifest_.parameters[p];
      if (!needs_every_addend(entry)) continue;
      const std::vector<std::int32_t> holders = manifest_.holders(entry);
      const bool lacks =
          std::any_of(holders.begin(), holders.end(), [&](std::int32_t rank) { return structure_.lacks(p, rank); });
      if (!lacks && incomplete.count(static_cast<std::uint32_t>(p)) == 0) continue;
      for (const std::int32_t rank : holders) structure_.unusable.insert({static_cast<std::uint32_t>(p), rank});
    }
  }

  void leave_out() {
    const int me = run_.comm.process();
    const auto is_mine = [&](std::int32_t rank) { return run_.plan.process_of(rank) == me; };
    for (const std::int32_t rank : structure_.unreadable) {
      if (is_mine(rank)) run_.dump.leave_out(rank);
    }
    for (const ShardName& shard : structure_.unusable) {
      if (is_mine(shard.rank) && structure_.unreadable.count(shard.rank) == 0) {
        run_.dump.leave_out(shard.rank, shard.parameter);
      }
    }
  }

  // ---- values

  [[nodiscard]] bool is_whole(std::size_t p) const {
    if (structure_.complete()) return true;
    const std::vector<std::int32_t> holders = manifest_.holders(manifest_.parameters[p]);
    return std::none_of(holders.begin(), holders.end(), [&](std::int32_t rank) { return structure_.lacks(p, rank); });
  }

  void measure() {
    ShardSums sums = sum_shards(run_, factors_, options_.order, /*by_object=*/false);
    const Absences absences(run_, factors_.expert, sums.none_shards);
    const FactorsOf unscaled = [](std::size_t, std::int32_t) { return ScaleFactors{}; };
    combine_partials(run_, unscaled, options_.order, absences, sums.parameters);

    report_nonfinite(manifest_, sums, /*zeroed=*/false, findings_);
    compare(sums);
    TensorStatistics total;
    const std::vector<bool> counted = counted_entries(manifest_);
    for (std::size_t p = 0; p < sums.parameters.size(); ++p) {
      if (counted[p]) add(total, sums.parameters[p], options_.order);
      if (!is_whole(p)) continue;
      report_coverage(manifest_, p, sums, factors_.expert[p], findings_);
      report_zeros(p, sums.parameters[p]);
    }
    if (structure_.complete() && options_.complete) {
      report_nothing_seen(total, findings_);
      if (options_.pipeline) {
        report_disagreement(
            reference_view(run_, factors_, options_.order, Numerics::exact, sums, absences, *options_.pipeline),
            findings_);
      }
    }
    report_undeclared(manifest_, factors_.expert, findings_);
  }

  void compare(const ShardSums& sums) {
    std::vector<Finding> tied;
    std::vector<Suspect> suspects = tied_suspects(run_, sums, factors_, options_.order, tied);
    suspects.insert(suspects.end(), sums.suspects.begin(), sums.suspects.end());
    std::vector<AbsentCopy> absent = sums.absent;
    for (AbsentCopy& copy : absent) copy.left_out = structure_.lacks(copy.parameter, copy.rank) ? 1 : 0;
    std::map<std::string, std::string> hints;
    for (const auto& [p, hint] : reduction_hints(run_, sums.suspects, sums.absent, factors_.expert)) {
      hints.emplace(manifest_.parameters[p].name, hint);
    }
    for (Finding& finding : compare_replicas(run_, suspects, absent, factors_.expert)) {
      const auto hint = hints.find(finding.parameter);
      if (finding.kind == "replicas-differ" && finding.value && hint != hints.end()) {
        finding.message += "; " + hint->second;
      }
      findings_.push_back(std::move(finding));
    }
    // Entries that are cut differently are told apart by their sums, which say nothing where a part is missing.
    if (structure_.complete()) std::move(tied.begin(), tied.end(), std::back_inserter(findings_));
  }

  void report_zeros(std::size_t p, const TensorStatistics& statistics) {
    if (statistics.elements == 0 || statistics.zeros != statistics.elements) return;
    const ParameterEntry& entry = manifest_.parameters[p];
    findings_.push_back(
        {.kind = "all-zero",
         .parameter = entry.name,
         .ranks = manifest_.holders(entry),
         .index = {},
         .value = static_cast<double>(statistics.elements),
         .message = fmt::format("all {} elements are 0: the parameter took no part in the step, or its gradient was "
                                "cleared before it was recorded",
                                statistics.elements)});
  }

  Run& run_;
  const VerifyOptions& options_;
  const Manifest& manifest_;
  ParameterFactors factors_;
  Structure structure_;
  std::vector<Finding> missing_, findings_;
  Verification verification_;
};

}  // namespace

Verification verify_dump(Run& run, const VerifyOptions& options) {
  return Verifier(run, options).verify();
}

std::vector<Finding> manifest_findings(std::span<const ErrorText> problems) {
  std::vector<Finding> findings;
  for (const ErrorText& problem : problems) {
    // The place in the document, without the path to it, which differs from machine to machine.
    std::string place = problem.where;
    const std::size_t begin = place.rfind(kManifestName);
    place = begin == std::string::npos ? std::string() : place.substr(begin);
    const Fault fault = fault_of(problem, -1, std::nullopt, place);
    findings.push_back(
        {.kind = fault.kind, .parameter = {}, .ranks = {}, .index = {}, .value = {}, .message = fault.message});
  }
  sort_by_severity(findings);
  return findings;
}

}  // namespace gradclip
