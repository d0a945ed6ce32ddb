#include "gradclip/verify/rank_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/verify/checksums.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kReadBytes = std::size_t{4} << 20;

/// XXH3-64 of the shard's raw bytes.
std::uint64_t checksum_of(const RankFile& file, const StoredShard& shard, std::vector<std::byte>& buffer) {
  Checksum checksum;
  const std::size_t size = size_of(shard.dtype);
  const std::uint64_t most = kReadBytes / size;
  for (std::uint64_t first = 0; first < shard.elements; first += most) {
    const std::uint64_t count = std::min(most, shard.elements - first);
    buffer.resize(count * size);
    file.read(shard, first, count, buffer.data());
    checksum.update(buffer.data(), buffer.size());
  }
  return checksum.digest();
}

class RankChecker {
 public:
  RankChecker(DumpReader& dump, std::int32_t rank)
      : dump_(dump), manifest_(dump.manifest()), rank_(rank), name_(manifest_.rank_file_name(rank)) {}

  RankCheck check() {
    return result_with([&] { open_and_check(); });
  }

  RankCheck refuse(const ErrorText& why) {
    return result_with([&] { result_.faults.push_back(fault_of(why, rank_, std::nullopt, name_)); });
  }

 private:
  template <class Function>
  RankCheck result_with(const Function& look_inside) {
    const std::optional<std::string> difference = compare_file();
    if (exists_ && !unreadable_) look_inside();
    if (difference) {
      result_.faults.push_back({"checksum", rank_, std::nullopt, {}, name_ + " " + *difference + where_it_differs()});
    }
    return std::move(result_);
  }

  /// What bad input, or a file that may not be read, does to one part of the check.
  template <class Function>
  bool attempt(std::optional<std::size_t> parameter, const Function& function) {
    try {
      function();
      return true;
    } catch (const Error& error) {
      if (error.code() != ExitCode::bad_input && error.text().kind != kUnreadable) throw;
      result_.faults.push_back(fault_of(error.text(), rank_, parameter, parameter ? "" : name_));
      return false;
    }
  }

  /// How the file differs from the manifest's record of it.
  std::optional<std::string> compare_file() {
    std::error_code unknown;
    exists_ = std::filesystem::exists(dump_.directory() / name_, unknown);
    const auto record = manifest_.files.find(name_);
    result_.file_checksum = record != manifest_.files.end() && record->second.xxh3_64.has_value();
    result_.missing = !exists_;
    if (!exists_) return std::nullopt;
    std::optional<ErrorText> wrong;
    unreadable_ = !attempt(std::nullopt, [&] { wrong = check_whole_file(dump_.directory(), manifest_, rank_); });
    result_.file_compared = !unreadable_ && result_.file_checksum;
    vouched_ = result_.file_compared && !wrong;
    if (!wrong) return std::nullopt;
    return fmt::format("{}; expected {}", wrong->found, wrong->expected);
  }

  void open_and_check() {
    std::shared_ptr<const RankFile> file;
    result_.readable = attempt(std::nullopt, [&] {
      file = dump_.rank_file(rank_);
      for (std::string& surplus : file->surplus()) {
        result_.faults.push_back({"extra", rank_, std::nullopt, std::move(surplus),
                                  "stands in the rank file, but the manifest gives this rank no such parameter"});
      }
    });
    if (!result_.readable) return;
    check_labels(*file);
    for (std::size_t p = 0; p < manifest_.parameters.size(); ++p) {
      if (!manifest_.holds(manifest_.parameters[p], rank_)) continue;
      if (!attempt(p, [&] { check_shard(*file, p); })) {
        result_.unusable.push_back({static_cast<std::uint32_t>(p), rank_});
      }
    }
  }

  /// Their form. What is wrong with them leaves the gradients usable.
  void check_labels(const RankFile& file) {
    try {
      static_cast<void>(file.labels());
    } catch (const Error& error) {
      if (error.code() != ExitCode::bad_input) throw;
      Fault& fault = result_.faults.emplace_back(fault_of(error.text(), rank_, std::nullopt, {}));
      const std::string before = file.path().string() + ", ";
      fault.name = error.text().where.starts_with(before) ? error.text().where.substr(before.size()) : "/labels";
    }
  }

  void check_shard(const RankFile& file, std::size_t p) {
    const ParameterEntry& entry = manifest_.parameters[p];
    const StoredShard& shard = file.locate(p);
    if (shard.none) {
      if (needs_every_addend(entry)) result_.none.push_back({static_cast<std::uint32_t>(p), rank_});
      return;
    }
    ++result_.shards;
    result_.shard_checksums += shard.xxh3_64 ? 1 : 0;
    if (shard.elements != manifest_.layout(entry, rank_).elements()) {
      result_.odd.push_back({static_cast<std::uint32_t>(p), rank_, shard.elements});
    }
    const bool compares = !vouched_ && shard.xxh3_64;
    if (!compares && shard.file_offset) return;
    const std::uint64_t found = checksum_of(file, shard, buffer_);
    if (!compares) return;
    if (found == *shard.xxh3_64) {
      ++agreeing_;
    } else {
      ++differing_;
      result_.faults.push_back({"checksum",
                                rank_,
                                p,
                                {},
                                fmt::format("its bytes have the checksum {}; expected {} (recorded with them)",
                                            checksum_text(found), checksum_text(*shard.xxh3_64))});
    }
  }

  /// After the checksum of the whole file said that something was changed.
  [[nodiscard]] std::string where_it_differs() const {
    if (!result_.readable) return "; it was changed, cut or damaged after it was recorded";
    if (differing_ != 0) {
      return fmt::format("; {} of its {} gradients do not have their recorded checksums", differing_,
                         differing_ + agreeing_);
    }
    if (agreeing_ == 0) return "; its gradients have no checksums of their own that would say where";
    return fmt::format("; {} gradients have their recorded checksums{}", agreeing_,
                       result_.unusable.empty() ? ": the difference lies beside them" : ", others cannot be read");
  }

  DumpReader& dump_;
  const Manifest& manifest_;
  std::int32_t rank_;
  std::string name_;
  bool exists_ = false;
  bool unreadable_ = false;  ///< no file that bytes can be read from
  bool vouched_ = false;     ///< the whole file has its recorded checksum
  std::uint64_t agreeing_ = 0, differing_ = 0;
  std::vector<std::byte> buffer_;
  RankCheck result_;
};

}  // namespace

bool needs_every_addend(const ParameterEntry& parameter) {
  return std::any_of(parameter.layout().begin(), parameter.layout().end(), [](const Placement& placement) {
    return placement.kind == Placement::Kind::partial && placement.operation != PartialOperation::sum &&
           placement.operation != PartialOperation::avg;
  });
}

RankCheck check_rank(DumpReader& dump, std::int32_t rank) {
  return RankChecker(dump, rank).check();
}

RankCheck refused_rank(DumpReader& dump, std::int32_t rank, const ErrorText& why) {
  return RankChecker(dump, rank).refuse(why);
}

}  // namespace gradclip
