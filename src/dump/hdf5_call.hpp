#pragma once
// The one include of hdf5.h, and the checks that every call goes through. For hdf5.cpp, hdf5_values.cpp and
// hdf5_write.cpp only.

#include <hdf5.h>

#include <string>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/hdf5.hpp"

namespace gradclip::hdf5 {

/// What the innermost entry of the library's error stack says; clears the stack.
[[nodiscard]] std::string take_error_text();

[[noreturn]] void fail(ExitCode code, const std::string& where, const std::string& doing);

template <class Result>
Result checked(Result result, const std::string& where, const char* doing, ExitCode code = ExitCode::bad_input) {
  if (result < 0) fail(code, where, doing);
  return result;
}

/// The same for calls that make an identifier.
[[nodiscard]] inline Handle owned(hid_t id, const std::string& where, const char* doing,
                                  ExitCode code = ExitCode::bad_input) {
  return Handle(checked(id, where, doing, code));
}

/// Extents of a dataspace, whose product is below 2^62. Errors: a null dataspace; more elements.
[[nodiscard]] std::vector<std::int64_t> extents(const Handle& space, const std::string& where);
[[nodiscard]] ElementType element_type(const Handle& type, const std::string& where);

/// Errors of a dataset's creation properties: external storage, virtual datasets.
void refuse_foreign_storage(hid_t properties, const std::string& where);
[[noreturn]] void refuse_link(LinkKind kind, const std::string& where);
[[nodiscard]] LinkKind kind_of(H5L_type_t type) noexcept;

/// A metadata cache of this size for good. Whenever a dataset is closed the library goes over all of the cache, so that
/// with the default, which grows, each dataset of many costs more than the one before.
void limit_metadata_cache(const Handle& access, std::size_t bytes, const std::string& where);

/// A chunk cache that holds one row of chunks, so that pieces in order neither inflate nor deflate a chunk twice.
[[nodiscard]] Handle access_properties(std::uint64_t cache_bytes, const std::string& where);

}  // namespace gradclip::hdf5
