#include <fmt/format.h>

#include "gradclip/dump/hdf5_call.hpp"

namespace gradclip::hdf5 {
namespace {

constexpr hssize_t kMaxAttributeElements = 1 << 20;
constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;

std::string trimmed(const char* data, std::size_t size, H5T_str_t padding) {
  std::string text(data, size);
  if (padding == H5T_STR_SPACEPAD) {
    text.erase(text.find_last_not_of(' ') + 1);
  } else if (const auto end = text.find('\0'); end != std::string::npos) {
    text.erase(end);
  }
  return text;
}

/// All strings of an attribute or dataset. @param read  (memory type, buffer) -> status
template <class Read>
std::vector<std::string> strings(const Handle& type, const Handle& space, const std::string& where, Read&& read) {
  if (H5Tget_class(type.id()) != H5T_STRING) {
    throw Error(ExitCode::bad_input,
                {.where = where, .found = "does not hold strings", .expected = "strings", .advice = {}});
  }
  const auto count =
      static_cast<std::uint64_t>(checked(H5Sget_simple_extent_npoints(space.id()), where, "read the shape"));
  const bool variable = checked(H5Tis_variable_str(type.id()), where, "read the string type") > 0;
  const std::size_t size = variable ? sizeof(char*) : H5Tget_size(type.id());
  if (size == 0 || count > kMaxTextBytes / size) {
    throw Error(ExitCode::bad_input,
                {.where = where, .found = "declares more than 1 GiB of text", .expected = {}, .advice = {}});
  }
  std::vector<std::string> result;
  result.reserve(count);
  if (variable) {
    std::vector<char*> pointers(count, nullptr);
    if (count != 0) checked(read(type.id(), pointers.data()), where, "read the strings");
    for (const char* pointer : pointers) result.emplace_back(pointer == nullptr ? "" : pointer);
    if (count != 0) H5Dvlen_reclaim(type.id(), space.id(), H5P_DEFAULT, pointers.data());
  } else {
    std::vector<char> bytes(count * size);
    if (count != 0) checked(read(type.id(), bytes.data()), where, "read the strings");
    for (std::uint64_t i = 0; i < count; ++i) {
      result.push_back(trimmed(bytes.data() + i * size, size, H5Tget_strpad(type.id())));
    }
  }
  return result;
}

struct Attribute {
  Handle handle, type, space;
  std::string where;
  hssize_t count;
};

std::optional<Attribute> open_attribute(const Handle& object, const char* name, const std::string& where) {
  const htri_t exists = H5Aexists(object.id(), name);
  if (checked(exists, where, "look for attributes") == 0) return std::nullopt;
  Attribute result;
  result.where = where + ", attribute '" + name + "'";
  result.handle = owned(H5Aopen(object.id(), name, H5P_DEFAULT), result.where, "open it");
  result.type = owned(H5Aget_type(result.handle.id()), result.where, "read its type");
  result.space = owned(H5Aget_space(result.handle.id()), result.where, "read its shape");
  result.count = checked(H5Sget_simple_extent_npoints(result.space.id()), result.where, "read its shape");
  return result;
}

[[noreturn]] void refuse_attribute(const Attribute& attribute, const char* expected) {
  throw Error(ExitCode::bad_input, {.where = attribute.where,
                                    .found = fmt::format("is {} x {}", attribute.count,
                                                         describe(element_type(attribute.type, attribute.where))),
                                    .expected = expected,
                                    .advice = {}});
}

}  // namespace

// ---- attributes

std::optional<std::string> string_attribute(const Handle& object, const char* name, const std::string& where) {
  const auto lock = lock_library();
  const auto attribute = open_attribute(object, name, where);
  if (!attribute) return std::nullopt;
  if (attribute->count != 1 || H5Tget_class(attribute->type.id()) != H5T_STRING)
    refuse_attribute(*attribute, "one string");
  return strings(attribute->type, attribute->space, attribute->where,
                 [&](hid_t type, void* to) { return H5Aread(attribute->handle.id(), type, to); })[0];
}

std::optional<double> number_attribute(const Handle& object, const char* name, const std::string& where) {
  const auto lock = lock_library();
  const auto attribute = open_attribute(object, name, where);
  if (!attribute) return std::nullopt;
  const H5T_class_t type = H5Tget_class(attribute->type.id());
  if (attribute->count != 1 || (type != H5T_FLOAT && type != H5T_INTEGER)) refuse_attribute(*attribute, "one number");
  double value = 0;
  checked(H5Aread(attribute->handle.id(), H5T_NATIVE_DOUBLE, &value), attribute->where, "read it");
  return value;
}

std::optional<std::uint64_t> unsigned_attribute(const Handle& object, const char* name, const std::string& where) {
  const auto lock = lock_library();
  const auto attribute = open_attribute(object, name, where);
  if (!attribute) return std::nullopt;
  if (attribute->count != 1 || H5Tget_class(attribute->type.id()) != H5T_INTEGER ||
      H5Tget_sign(attribute->type.id()) != H5T_SGN_NONE) {
    refuse_attribute(*attribute, "one unsigned integer");
  }
  std::uint64_t value = 0;
  checked(H5Aread(attribute->handle.id(), H5T_NATIVE_UINT64, &value), attribute->where, "read it");
  return value;
}

std::optional<IntegerList> integer_attribute(const Handle& object, const char* name, const std::string& where) {
  const auto lock = lock_library();
  const auto attribute = open_attribute(object, name, where);
  if (!attribute) return std::nullopt;
  if (attribute->count > kMaxAttributeElements || H5Tget_class(attribute->type.id()) != H5T_INTEGER) {
    refuse_attribute(*attribute, "integers");
  }
  IntegerList list;
  list.shape = extents(attribute->space, attribute->where);
  list.values.resize(static_cast<std::size_t>(attribute->count));
  if (!list.values.empty()) {
    checked(H5Aread(attribute->handle.id(), H5T_NATIVE_INT64, list.values.data()), attribute->where, "read it");
  }
  return list;
}

// ---- data

std::vector<std::string> read_strings(const Dataset& dataset, const std::string& where) {
  const auto lock = lock_library();
  const Handle type = owned(H5Dget_type(dataset.handle.id()), where, "read the element type");
  const Handle space = owned(H5Dget_space(dataset.handle.id()), where, "read the shape");
  return strings(type, space, where, [&](hid_t memory_type, void* to) {
    return H5Dread(dataset.handle.id(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, to);
  });
}

void read_box(const Dataset& dataset, std::span<const std::uint64_t> start, std::span<const std::uint64_t> count,
              void* to, const std::string& where) {
  const auto lock = lock_library();
  const Handle type = owned(H5Dget_type(dataset.handle.id()), where, "read the element type");
  if (start.empty()) {
    checked(H5Dread(dataset.handle.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, to), where, "read the data");
    return;
  }
  const std::vector<hsize_t> first(start.begin(), start.end());
  const std::vector<hsize_t> length(count.begin(), count.end());
  const Handle space = owned(H5Dget_space(dataset.handle.id()), where, "read the shape");
  checked(H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, first.data(), nullptr, length.data(), nullptr), where,
          "select a part");
  const Handle memory =
      owned(H5Screate_simple(static_cast<int>(length.size()), length.data(), nullptr), where, "select a part");
  checked(H5Dread(dataset.handle.id(), type.id(), memory.id(), space.id(), H5P_DEFAULT, to), where, "read the data");
}

// Not H5Dget_chunk_info_by_coord: it looks through all chunks for each.
StoredChunk read_stored_chunk(const Dataset& dataset, std::span<const std::uint64_t> start, std::uint64_t most_bytes,
                              const std::string& where) {
  const auto lock = lock_library();
  const std::vector<hsize_t> first(start.begin(), start.end());
  hsize_t bytes = 0;
  checked(H5Dget_chunk_storage_size(dataset.handle.id(), first.data(), &bytes), where, "find a chunk");
  if (bytes == 0 || bytes > most_bytes) {
    throw Error(ExitCode::bad_input,
                {.where = where,
                 .found = bytes == 0 ? "one of its chunks was never written"
                                     : fmt::format("one of its chunks claims to have {} bytes", bytes),
                 .expected = bytes == 0 ? std::string() : fmt::format("at most the {} of the file", most_bytes),
                 .advice = "the file is incomplete or damaged; copy or record it again"});
  }
  StoredChunk chunk;
  chunk.bytes.resize(bytes);
  checked(H5Dread_chunk(dataset.handle.id(), H5P_DEFAULT, first.data(), &chunk.skipped_filters, chunk.bytes.data()),
          where, "read a chunk");
  return chunk;
}

}  // namespace gradclip::hdf5
