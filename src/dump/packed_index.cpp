#include "gradclip/dump/packed_index.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/json_document.hpp"

namespace gradclip {
namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 58;  // their bytes fit 2^62

std::vector<std::int64_t> integers(const JsonField& field, std::int64_t low) {
  std::vector<std::int64_t> result;
  for (std::size_t i = 0; i < field.array().size(); ++i) {
    result.push_back(field.element(i).integer(low, std::numeric_limits<std::int64_t>::max()));
  }
  return result;
}

std::uint64_t checked_elements(const JsonField& field, const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    empty = empty || extent == 0;
    if (extent != 0 && (__builtin_mul_overflow(product, extent, &product) || product > kMaxElements)) {
      field.fail("has too many elements", "at most 2^58");
    }
  }
  return empty ? 0 : static_cast<std::uint64_t>(product);
}

std::uint64_t checksum_of(const JsonField& field) {
  if (field.value().is_number_unsigned()) return field.value().get<std::uint64_t>();
  const auto checksum = parse_checksum(field.string());
  if (!checksum) field.fail("16 hexadecimal digits");
  return *checksum;
}

std::vector<DimensionRange> ranges_of(const JsonField& field) {
  std::vector<DimensionRange> ranges;
  for (std::size_t i = 0; i < field.array().size(); ++i) {
    const std::vector<std::int64_t> row = integers(field.element(i), 0);
    if (row.size() != 3) field.element(i).fail("[dimension, begin, end]");
    ranges.push_back({row[0], {row[1], row[2]}});
  }
  return ranges;
}

PackedShard shard_of(const JsonField& field) {
  PackedShard shard;
  const JsonField dtype = field.at("dtype");
  const auto parsed = parse_dtype(dtype.string());
  if (!parsed) dtype.fail("one of " + std::string(dtype_names()));
  shard.dtype = *parsed;
  shard.shape = integers(field.at("shape"), 0);
  shard.elements = checked_elements(field.at("shape"), shard.shape);
  const JsonField offset = field.at("offset");
  shard.offset = static_cast<std::uint64_t>(offset.integer(0, kMaxElements));
  if (shard.offset * size_of(shard.dtype) % kPackedAlignment != 0) {
    offset.fail(fmt::format("an offset that is a multiple of {} bytes", kPackedAlignment));
  }
  if (const auto checksum = field.find("xxh3_64")) shard.xxh3_64 = checksum_of(*checksum);
  if (const auto start = field.find("global_offset")) shard.global_offset = integers(*start, -1);
  if (const auto ranges = field.find("global_ranges")) shard.global_ranges = ranges_of(*ranges);
  if (const auto scale = field.find("scale_inv")) shard.scale_inv = static_cast<float>(scale->number());
  return shard;
}

void refuse_overlaps(const PackedIndex& index, const std::string& where) {
  std::array<std::vector<const PackedIndex::value_type*>, kDTypeCount> by_type;
  for (const auto& entry : index) {
    if (entry.second.elements != 0) by_type[static_cast<std::size_t>(entry.second.dtype)].push_back(&entry);
  }
  for (auto& entries : by_type) {
    std::sort(entries.begin(), entries.end(),
              [](const auto* a, const auto* b) { return a->second.offset < b->second.offset; });
    for (std::size_t i = 1; i < entries.size(); ++i) {
      const PackedShard& before = entries[i - 1]->second;
      if (before.offset + before.elements > entries[i]->second.offset) {
        throw Error(ExitCode::bad_input,
                    {.where = where,
                     .found = quoted(entries[i - 1]->first) + " and " + quoted(entries[i]->first) + " overlap",
                     .expected = "each shard to have elements of its own",
                     .advice = {}});
      }
    }
  }
}

}  // namespace

PackedIndex parse_packed_index(const std::string& text, const std::string& where) {
  PackedIndex index;
  const JsonStream stream{
      .array = "",
      .take = [&](const std::string& key, std::size_t,
                  nlohmann::json&& value) { index.emplace(key, shard_of(JsonField(value, where, key))); },
      .checksum = false};
  static_cast<void>(parse_json(text, where, &stream));
  refuse_overlaps(index, where);
  return index;
}

std::string rewritten_packed_index(const std::string& text,
                                   const std::unordered_map<std::string, std::uint64_t>& checksums) {
  std::string result = "{";
  for (const JsonMember& member : root_members(text)) {
    if (result.size() > 1) result += ',';
    result.append("\n").append(member.key).append(":{");
    const auto checksum = checksums.find(member.name());
    bool first = true;
    for (const JsonMember& inner : root_members(member.value)) {
      if (inner.name() == "xxh3_64" && checksum != checksums.end()) continue;
      result.append(first ? "" : ",").append(inner.key).append(":").append(inner.value);
      first = false;
    }
    if (checksum != checksums.end()) {
      result += fmt::format("{}\"xxh3_64\":\"{}\"", first ? "" : ",", checksum_text(checksum->second));
    }
    result += '}';
  }
  return result + "}\n";
}

}  // namespace gradclip
