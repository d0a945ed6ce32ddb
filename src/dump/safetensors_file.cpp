#include "gradclip/dump/safetensors_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <system_error>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kMostHeaderBytes = 100'000'000;
constexpr std::string_view kMetadata = "__metadata__";

std::string_view safetensors_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::float64:
      return "F64";
    case DType::float32:
      return "F32";
    case DType::float16:
      return "F16";
    case DType::bfloat16:
      return "BF16";
    case DType::float8_e4m3fn:
      return "F8_E4M3";
    case DType::float8_e5m2:
      return "F8_E5M2";
  }
  return {};
}

std::uint64_t bytes_of_entry(const SafetensorsEntry& entry) {
  std::uint64_t elements = 1;
  for (const std::int64_t extent : entry.shape) elements *= static_cast<std::uint64_t>(extent);
  return elements * size_of(entry.dtype);
}

}  // namespace

SafetensorsLayout safetensors_layout(const std::vector<SafetensorsEntry>& entries,
                                     const std::vector<std::pair<std::string, std::string>>& metadata,
                                     const std::string& where) {
  std::vector<std::size_t> order(entries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return size_of(entries[x].dtype) > size_of(entries[y].dtype); });

  std::string header = fmt::format("{{{}:{{", json_string(kMetadata));
  std::string_view comma;
  for (const auto& [key, value] : metadata) {
    header += fmt::format("{}{}:{}", comma, json_string(key), json_string(value));
    comma = ",";
  }
  header += '}';
  SafetensorsLayout layout;
  layout.offsets.resize(entries.size());
  std::uint64_t begin = 0;
  for (const std::size_t i : order) {
    const SafetensorsEntry& entry = entries[i];
    if (entry.name == kMetadata) {
      throw Error(ExitCode::bad_input, {.where = where + ", parameter " + quoted(entry.name),
                                        .found = "a name that the safetensors format keeps for itself",
                                        .expected = "another name",
                                        .advice = "merge it into a dump"});
    }
    const std::uint64_t end = begin + bytes_of_entry(entry);
    header += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json_string(entry.name),
                          safetensors_name(entry.dtype), fmt::join(entry.shape, ","), begin, end);
    layout.offsets[i] = begin;
    begin = end;
  }
  header += '}';
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  if (header.size() > kMostHeaderBytes) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = fmt::format("a safetensors header of {} bytes", header.size()),
                                      .expected = fmt::format("at most {}", kMostHeaderBytes),
                                      .advice = "merge into a dump, or fewer parameters with --only"});
  }
  for (std::size_t i = 0; i < kLengthBytes; ++i) layout.head += static_cast<char>(header.size() >> (8 * i) & 0xFFU);
  layout.head += header;
  for (std::uint64_t& offset : layout.offsets) offset += layout.head.size();
  layout.bytes = layout.head.size() + begin;
  return layout;
}

bool is_safetensors_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(std::filesystem::symlink_status(path, error))) return false;
  try {
    const PosixFile file = PosixFile::open_for_reading(path);
    std::array<unsigned char, kLengthBytes + 1> head{};
    if (file.read_some(0, head.data(), head.size()) != head.size()) return false;
    std::uint64_t length = 0;
    for (std::size_t i = kLengthBytes; i-- > 0;) length = length << 8U | head[i];
    return head[kLengthBytes] == '{' && length <= file.size() - kLengthBytes;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace gradclip
