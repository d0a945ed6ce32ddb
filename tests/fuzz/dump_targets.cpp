#include <algorithm>

#include "expectations.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/dump/packed_index.hpp"
#include "targets.hpp"

namespace gradclip::fuzz {
namespace {

constexpr std::size_t kMostRanks = 8;  // of each parameter whose layout is asked for

void ask_for_layouts(const Manifest& manifest) {
  for (const ParameterEntry& entry : manifest.parameters) {
    const std::vector<std::int32_t> holders = manifest.holders(entry);
    for (std::size_t i = 0; i < std::min(holders.size(), kMostRanks); ++i) {
      require(holders[i] >= 0 && holders[i] < manifest.world_size, "holders are ranks");
      require(manifest.layout(entry, holders[i]).elements() <= entry.elements, "a shard is a part of its tensor");
      static_cast<void>(manifest.role(entry, holders[i], entry.expert.value_or(false)));
    }
  }
  require(manifest.rank_file_name(0).find('/') == std::string::npos, "rank files lie in the dump");
}

}  // namespace

void manifest(std::string_view text) {
  const std::string copy(text);
  const bool read = reads([&] { ask_for_layouts(parse_manifest(copy, "manifest.json")); });
  const ManifestReading reading = examine_manifest(copy, "manifest.json");
  require(read == (reading.manifest && reading.problems.empty()), "both ways to read a manifest agree");
}

void packed_index(std::string_view text) {
  reads([&] {
    for (const auto& [name, shard] : parse_packed_index(std::string(text), "index")) {
      require(shard.offset * size_of(shard.dtype) % kPackedAlignment == 0, "shards are aligned");
    }
  });
}

}  // namespace gradclip::fuzz
