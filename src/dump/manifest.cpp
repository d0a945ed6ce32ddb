#include "gradclip/dump/manifest.hpp"

#include <fmt/format.h>
#include <re2/re2.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

std::string where_of(const ParameterEntry& parameter, std::int32_t rank) {
  return "parameter " + quoted(parameter.name) + " on rank " + std::to_string(rank);
}

constexpr std::string_view kUnfinished = "unfinished";

[[noreturn]] void refuse_directory(const std::filesystem::path& directory, std::string found, std::string advice,
                                   std::string_view kind = {}) {
  throw Error(ExitCode::bad_input, {.where = directory.string(),
                                    .found = std::move(found),
                                    .expected = "a dump directory with a manifest.json",
                                    .advice = std::move(advice),
                                    .kind = kind});
}

/// Why a directory has no manifest, as far as its other files tell.
[[noreturn]] void explain_missing_manifest(const std::filesystem::path& directory) {
  std::error_code error;
  const auto status = std::filesystem::status(directory, error);
  if (status.type() == std::filesystem::file_type::not_found) refuse_directory(directory, "does not exist", "");
  if (error) throw system_error(directory, "look into it", error.value());
  if (status.type() != std::filesystem::file_type::directory) refuse_directory(directory, "is not a directory", "");

  std::size_t fragments = 0;
  std::size_t rank_files = 0;
  std::size_t temporary = 0;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string file = entry->path().filename().string();
    if (file.ends_with(".tmp")) {
      ++temporary;
    } else if (file.starts_with("rank_") && file.ends_with(".json")) {
      ++fragments;
    } else if (file.ends_with(".h5")) {
      ++rank_files;
    }
  }
  if (error) throw system_error(directory, "list", error.value());
  if (fragments != 0) {
    refuse_directory(directory, fmt::format("holds the fragments of {} ranks that were not assembled yet", fragments),
                     "run `python gradclip_record.py assemble DIR` on it", kUnfinished);
  }
  if (rank_files + temporary != 0) {
    refuse_directory(directory,
                     fmt::format("is an unfinished dump: {} rank files, {} temporary files, no manifest.json",
                                 rank_files, temporary),
                     "recording ended before the manifest was written; record again", kUnfinished);
  }
  refuse_directory(directory, "has no manifest.json", "");
}

}  // namespace

std::string read_manifest_text(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kManifestName;
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) {
    if (error && error.value() == EACCES) throw system_error(path, "open", error.value());
    explain_missing_manifest(directory);
  }
  const PosixFile file = PosixFile::open_for_reading(path);
  const std::uint64_t size = file.size();
  if (size > kMaxJsonBytes) {
    throw Error(ExitCode::bad_input, {.where = path.string(),
                                      .found = fmt::format("has {} bytes", size),
                                      .expected = fmt::format("at most {}", kMaxJsonBytes),
                                      .advice = {}});
  }
  std::string text(size, '\0');
  file.read(0, text.data(), size);
  return text;
}

std::string link_name(const std::string& name) {
  std::string link;
  link.reserve(name.size());
  for (const char c : name) {
    if (c == '%') {
      link += "%25";
    } else if (c == '/') {
      link += "%2F";
    } else if (c == '.' && link.empty()) {
      link += "%2E";
    } else {
      link += c;
    }
  }
  return link;
}

std::string_view name(GradientState state) noexcept {
  switch (state) {
    case GradientState::before_scale:
      return "before_scale";
    case GradientState::before_clip:
      return "before_clip";
    case GradientState::after_clip:
      return "after_clip";
  }
  return "";
}

std::string_view name(Synchronisation sync) noexcept {
  switch (sync) {
    case Synchronisation::deferred:
      return "deferred";
    case Synchronisation::every:
      return "every";
    case Synchronisation::schedule:
      return "schedule";
  }
  return "";
}

std::optional<Synchronisation> parse_synchronisation(std::string_view text) noexcept {
  for (const auto sync : {Synchronisation::deferred, Synchronisation::every, Synchronisation::schedule}) {
    if (text == name(sync)) return sync;
  }
  return std::nullopt;
}

bool ParameterEntry::has_partial() const noexcept {
  return std::any_of(layout().begin(), layout().end(),
                     [](const Placement& placement) { return placement.kind == Placement::Kind::partial; });
}

std::vector<std::int32_t> Manifest::holders(const ParameterEntry& parameter) const {
  std::vector<std::int32_t> ranks = parameter.mesh ? meshes[*parameter.mesh].ranks() : parameter.ranks;
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

bool Manifest::holds(const ParameterEntry& parameter, std::int32_t rank) const {
  if (parameter.mesh) return meshes[*parameter.mesh].contains(rank);
  return std::binary_search(parameter.ranks.begin(), parameter.ranks.end(), rank);
}

std::string Manifest::rank_file_name(std::int32_t rank) const {
  const std::size_t open = rank_file_pattern.find('{');
  const std::size_t close = rank_file_pattern.find('}');
  const std::size_t colon = rank_file_pattern.find(':', open);
  const int width = colon < close ? std::stoi(rank_file_pattern.substr(colon + 1)) : 0;
  return rank_file_pattern.substr(0, open) + fmt::format("{:0{}d}", rank, width) + rank_file_pattern.substr(close + 1);
}

bool Manifest::is_expert(const ParameterEntry& parameter, const std::string& ep_axis_name) const {
  static const re2::RE2 grouped_experts(R"((^|\.)mlp\.experts\.(gate_up_linear|down_linear)\.(weight|bias)\d+)");
  if (parameter.expert.value_or(false)) return true;
  if (parameter.mesh && !ep_axis_name.empty() && meshes[*parameter.mesh].dimension(ep_axis_name)) return true;
  return re2::RE2::PartialMatch(parameter.name, grouped_experts);
}

ShardLayout Manifest::layout(const ParameterEntry& parameter, std::int32_t rank) const {
  if (!parameter.mesh) return whole_layout(parameter.shape);
  const DeviceMesh& mesh = meshes[*parameter.mesh];
  std::optional<IndexRange> flat;
  if (const auto range = parameter.flat_ranges.find(rank); range != parameter.flat_ranges.end()) flat = range->second;
  return shard_layout(parameter.shape, mesh, parameter.layout(), mesh.coordinate(rank), flat,
                      where_of(parameter, rank));
}

ShardRole Manifest::role(const ParameterEntry& parameter, std::int32_t rank, bool expert) const {
  if (parameter.mesh) {
    const DeviceMesh& mesh = meshes[*parameter.mesh];
    return shard_role(mesh, parameter.layout(), mesh.coordinate(rank));
  }
  if (parameter.is_distinct(expert)) return {.counted = true, .copies = {rank}, .addends = {rank}};
  return {.counted = rank == parameter.ranks.front(), .copies = parameter.ranks, .addends = {rank}};
}

Manifest read_manifest(const std::filesystem::path& directory) {
  return parse_manifest(read_manifest_text(directory), (directory / kManifestName).string());
}

ManifestReading examine_manifest(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kManifestName;
  std::string text;
  try {
    text = read_manifest_text(directory);
  } catch (const Error& error) {
    std::error_code unknown;
    const bool no_dump = error.text().kind.empty() && !std::filesystem::exists(symlink_status(path, unknown));
    if (error.code() != ExitCode::bad_input || no_dump) throw;
    ManifestReading reading{std::nullopt, {error.text()}};
    if (reading.problems[0].kind.empty()) reading.problems[0].kind = "manifest";
    return reading;
  }
  return examine_manifest(text, path.string());
}

std::string rewritten_manifest(const std::filesystem::path& input_directory, const Manifest& input,
                               const ManifestChanges& changes) {
  return edited_manifest(input_directory, input,
                         {{"state", json_string(name(changes.state))},
                          {"files", files_text(changes.files)},
                          {"clip", changes.clip_record}});
}

std::string json_number(double value) {
  if (std::isnan(value)) return "\"nan\"";
  if (std::isinf(value)) return value > 0 ? "\"inf\"" : "\"-inf\"";
  char scientific[64];
  const auto end = std::to_chars(scientific, scientific + sizeof scientific, value, std::chars_format::scientific).ptr;
  const std::string_view text(scientific, static_cast<std::size_t>(end - scientific));
  const std::size_t e = text.find('e');
  const int exponent = std::stoi(std::string(text.substr(e + 1)));
  if (exponent < -4 || exponent >= 16) return std::string(text);
  char fixed[64];
  const auto fixed_end = std::to_chars(fixed, fixed + sizeof fixed, value, std::chars_format::fixed).ptr;
  std::string result(fixed, fixed_end);
  if (result.find('.') == std::string::npos) result += ".0";
  return result;
}

}  // namespace gradclip
