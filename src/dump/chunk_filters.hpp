#pragma once
// Undoing HDF5's built-in filters. Done here rather than by the library so that several threads can, outside of the
// library's lock, and because the library lets a chunk inflate to any size, whatever the file declares.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "gradclip/dump/hdf5.hpp"

namespace gradclip {

/// Whether every filter is deflate, shuffle or fletcher32.
[[nodiscard]] bool filters_are_built_in(std::span<const hdf5::Filter> filters) noexcept;

/// The content of a chunk, exactly `chunk_bytes` long.
/// @param stored           as it lies in the file
/// @param skipped_filters  bit i: filter i was not applied to this chunk
/// Errors: Error(bad_input) for a chunk that inflates to more or less than its declared size, that is damaged, or whose
/// checksum is wrong.
[[nodiscard]] std::vector<std::byte> decode_chunk(std::vector<std::byte> stored, std::span<const hdf5::Filter> filters,
                                                  unsigned skipped_filters, std::size_t element_size,
                                                  std::size_t chunk_bytes, const std::string& where);

}  // namespace gradclip
