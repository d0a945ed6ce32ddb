#include "gradclip/dump/manifest_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <string_view>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/json_document.hpp"

namespace gradclip {
namespace {

/// A document that grows member by member.
class ManifestText {
 public:
  /// @param key  with its quotes
  void append(std::string_view key, std::string_view value) {
    if (text_.size() > 2) text_ += ",\n";
    text_.append(key).append(":").append(value);
  }
  /// With the checksum of all members so far. @param where  begins the message if they are no JSON
  [[nodiscard]] std::string finish(const std::string& where) && {
    const JsonStream unused{"parameters", [](const std::string&, std::size_t, nlohmann::json&&) {}};
    append("\"checksum\"", json_string(checksum_text(parse_json(text_ + "}", where, &unused).checksum)));
    return std::move(text_) + "}\n";
  }

 private:
  std::string text_ = "{\n";
};

std::string strings_text(const std::vector<std::string>& strings) {
  std::vector<std::string> quoted_strings;
  for (const std::string& one : strings) quoted_strings.push_back(json_string(one));
  return fmt::format("[{}]", fmt::join(quoted_strings, ","));
}

/// Ranks as the nested lists of their mesh.
std::string nested_text(std::span<const std::int32_t> ranks, std::span<const std::int64_t> shape) {
  if (shape.empty()) return fmt::to_string(ranks.front());
  const std::size_t part = ranks.size() / static_cast<std::size_t>(shape.front());
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < static_cast<std::size_t>(shape.front()); ++i) {
    parts.push_back(nested_text(ranks.subspan(i * part, part), shape.subspan(1)));
  }
  return fmt::format("[{}]", fmt::join(parts, ","));
}

}  // namespace

void refuse_changed_file(const std::filesystem::path& file, std::string found) {
  throw Error(ExitCode::bad_input, {.where = file.string(),
                                    .found = std::move(found),
                                    .expected = "a dump that nobody changes",
                                    .advice = "run again once it is complete"});
}

std::string manifest_text(const ManifestMembers& members) {
  ManifestText text;
  for (const auto& [key, value] : members) text.append(json_string(key), value);
  return std::move(text).finish(kManifestName);
}

std::string edited_manifest(const std::filesystem::path& input_directory, const Manifest& input,
                            ManifestMembers members) {
  const std::string input_text = read_manifest_text(input_directory);
  if (xxh3_64(input_text.data(), input_text.size()) != input.text_checksum) {
    refuse_changed_file(input_directory / kManifestName, "was replaced while the dump was read");
  }
  std::vector<bool> placed(members.size(), false);
  ManifestText text;
  for (const JsonMember& member : root_members(input_text)) {
    const std::string name = member.name();
    if (name == "checksum") continue;
    const auto change = std::find_if(members.begin(), members.end(), [&](const auto& m) { return m.first == name; });
    if (change == members.end()) {
      text.append(member.key, member.value);
      continue;
    }
    placed[static_cast<std::size_t>(change - members.begin())] = true;
    if (!change->second.empty()) text.append(member.key, change->second);
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!placed[i] && !members[i].second.empty()) text.append(json_string(members[i].first), members[i].second);
  }
  return std::move(text).finish((input_directory / kManifestName).string());
}

std::string files_text(const std::map<std::string, FileRecord>& files) {
  std::string text = "{";
  for (const auto& [name, record] : files) {
    text += text.size() > 1 ? ",\n" : "\n";
    text += fmt::format("{}:{{\"bytes\":{}", json_string(name), record.bytes);
    if (record.xxh3_64) text += fmt::format(",\"xxh3_64\":\"{}\"", checksum_text(*record.xxh3_64));
    text += '}';
  }
  return text + "}";
}

std::string parameter_text(const ParameterEntry& entry, const DeviceMesh* mesh) {
  std::string text = fmt::format(R"({{"name":{},"model_part":{},"shape":[{}],"dtype":"{}")", json_string(entry.name),
                                 entry.model_part, fmt::join(entry.shape, ","), name(entry.dtype));
  if (mesh != nullptr) {
    std::vector<std::string> placements;
    for (const Placement& placement : entry.placements) placements.push_back(to_string(placement));
    text += fmt::format(R"(,"mesh":{},"placements":{})", json_string(mesh->name()), strings_text(placements));
  } else {
    text += fmt::format(R"(,"mesh":null,"ranks":[{}],"copies":"{}")", fmt::join(entry.ranks, ","),
                        entry.copies == Copies::distinct ? "distinct" : "replicated");
  }
  if (entry.expert) text += fmt::format(R"(,"expert":{})", *entry.expert);
  if (entry.tied) text += R"(,"tied":)" + json_string(*entry.tied);
  if (entry.own_dataset) text += R"(,"dataset":)" + json_string(entry.dataset);
  if (entry.mesh_object != 0) text += fmt::format(R"(,"mesh_object":{})", entry.mesh_object);
  return text + "}";
}

std::string parameters_text(const std::vector<std::string>& entries) {
  return fmt::format("[\n{}]", fmt::join(entries, ",\n"));
}

std::string mesh_text(const DeviceMesh& mesh) {
  return fmt::format(R"({}:{{"dim_names":{},"ranks":{}}})", json_string(mesh.name()), strings_text(mesh.dim_names()),
                     nested_text(mesh.ranks(), mesh.shape()));
}

}  // namespace gradclip
