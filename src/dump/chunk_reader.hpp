#pragma once
// Reading chunked datasets without HDF5's own pipeline: chunks are read through the library as they are stored, and
// decoded here, by several threads at once.

#include <cstdint>
#include <string>

#include "gradclip/dump/hdf5.hpp"

namespace gradclip {

/// Reads elements [first, first + count) of the row-major dataset. Recently decoded chunks are kept in a small cache of
/// the process, so that pieces in order decode each chunk once.
/// @param file_id  a number that no other open file has
/// @pre filters_are_built_in(dataset.filters), dataset.storage is chunked, first + count <= dataset.elements()
/// Errors: Error(bad_input) for chunks that are missing or longer than the file, and as decode_chunk().
void read_chunked(const hdf5::Dataset& dataset, std::uint64_t file_size, std::uint64_t file_id, std::uint64_t first,
                  std::uint64_t count, std::byte* to, const std::string& where);

}  // namespace gradclip
