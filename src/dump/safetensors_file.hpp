#pragma once
// The safetensors format: 8 bytes of length, a JSON header, the tensors' bytes one after another.

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gradclip/base/dtype.hpp"

namespace gradclip {

struct SafetensorsEntry {
  std::string name;  ///< unique, valid UTF-8
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;
};

/// Everything of a file but the tensors' bytes.
struct SafetensorsLayout {
  std::string head;                    ///< length and header, padded with spaces to a multiple of 8
  std::vector<std::uint64_t> offsets;  ///< of each entry's first byte in the file
  std::uint64_t bytes = 0;             ///< of the whole file
};

/// The format allows no gaps between tensors: the types with the largest elements come first, so that each begins at a
/// multiple of its element's size; else they keep the entries' order.
/// @param metadata  the header's __metadata__, text by text  @param where  begins every message
/// Errors: Error(bad_input) for a tensor called __metadata__, and for a header of more than 100,000,000 bytes, which
/// the format's own reader refuses.
[[nodiscard]] SafetensorsLayout safetensors_layout(const std::vector<SafetensorsEntry>& entries,
                                                   const std::vector<std::pair<std::string, std::string>>& metadata,
                                                   const std::string& where);

/// Whether the file, not a link to one, begins as the format says.
[[nodiscard]] bool is_safetensors_file(const std::filesystem::path& path);

}  // namespace gradclip
