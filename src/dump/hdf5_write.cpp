#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "gradclip/dump/hdf5_call.hpp"

namespace gradclip::hdf5 {
namespace {

constexpr std::size_t kLeastWriteCacheBytes = std::size_t{256} << 10;

constexpr std::uint64_t kMaxAttributeBytes = std::uint64_t{8} << 20;  // as many integers as are read of one

constexpr ExitCode kWriting = ExitCode::resources;

/// What a callback of the library may not throw through it.
struct Visit {
  const std::string& where;
  std::exception_ptr error;
};

template <class Function>
herr_t guarded(void* to, Function&& function) noexcept {
  auto& visit = *static_cast<Visit*>(to);
  try {
    function(visit);
    return 0;
  } catch (...) {
    visit.error = std::current_exception();
    return -1;
  }
}

herr_t check_link(hid_t, const char* name, const H5L_info_t* info, void* to) {
  return guarded(to, [&](const Visit& visit) {
    if (info->type != H5L_TYPE_HARD) refuse_link(kind_of(info->type), visit.where + "/" + printable(name));
  });
}

herr_t check_object(hid_t root, const char* name, const H5O_info_t* info, void* to) {
  return guarded(to, [&](const Visit& visit) {
    if (info->type != H5O_TYPE_DATASET) return;
    const std::string where = name == std::string_view(".") ? visit.where : visit.where + "/" + printable(name);
    const Handle dataset = owned(H5Dopen2(root, name, H5P_DEFAULT), where, "open it");
    const Handle properties = owned(H5Dget_create_plist(dataset.id()), where, "read the storage");
    refuse_foreign_storage(properties.id(), where);
  });
}

void check_visit(herr_t result, const Visit& visit) {
  if (visit.error) {
    H5Eclear2(H5E_DEFAULT);
    std::rethrow_exception(visit.error);
  }
  checked(result, visit.where, "list what is in it");
}

/// Nothing that is copied whole may lead out of the file.
void check_copyable(const Handle& from, const std::string& name, const std::string& where) {
  const LinkKind kind = link_kind(from, name, where);
  if (kind != LinkKind::hard) refuse_link(kind, where);
  const Handle object = owned(H5Oopen(from.id(), name.c_str(), H5P_DEFAULT), where, "open it");
  Visit visit{where, nullptr};
  if (H5Iget_type(object.id()) == H5I_GROUP) {
    check_visit(H5Lvisit(object.id(), H5_INDEX_NAME, H5_ITER_INC, check_link, &visit), visit);
  }
  check_visit(H5Ovisit2(object.id(), H5_INDEX_NAME, H5_ITER_INC, check_object, &visit, H5O_INFO_BASIC), visit);
}

/// Contiguous, allocated so that data can be written by position, never filled, without times. Made once: properties
/// are what costs most in creating a dataset.
hid_t contiguous_properties(const std::string& where) {
  static const hid_t properties = [&] {
    const hid_t made = checked(H5Pcreate(H5P_DATASET_CREATE), where, "set the storage", kWriting);
    checked(H5Pset_obj_track_times(made, false), where, "set the storage", kWriting);
    checked(H5Pset_alloc_time(made, H5D_ALLOC_TIME_EARLY), where, "set the storage", kWriting);
    checked(H5Pset_fill_time(made, H5D_FILL_TIME_NEVER), where, "set the storage", kWriting);
    return made;
  }();
  return properties;
}

/// The same storage, filters and fill value as `like`. What a chunk has beyond the dataset's edge is filled, so that it
/// is the same in every run.
Handle chunked_properties(const Dataset& like, const std::string& where) {
  Handle properties = owned(H5Dget_create_plist(like.handle.id()), where, "read the storage", kWriting);
  checked(H5Pset_obj_track_times(properties.id(), false), where, "set the storage", kWriting);
  checked(H5Pset_fill_time(properties.id(), H5D_FILL_TIME_IFSET), where, "set the storage", kWriting);
  return properties;
}

/// As the format stores a gradient's elements; what HDF5 has no type for as its bits.
hid_t stored_type(DType dtype, const std::string& where) {
  switch (dtype) {
    case DType::float64:
      return H5T_IEEE_F64LE;
    case DType::float32:
      return H5T_IEEE_F32LE;
    case DType::float16: {
      static const hid_t half = [&] {
        const hid_t made = checked(H5Tcopy(H5T_IEEE_F32LE), where, "make the element type", kWriting);
        checked(H5Tset_fields(made, 15, 10, 5, 0, 10), where, "make the element type", kWriting);
        checked(H5Tset_size(made, 2), where, "make the element type", kWriting);
        checked(H5Tset_ebias(made, 15), where, "make the element type", kWriting);
        return made;
      }();
      return half;
    }
    case DType::bfloat16:
      return H5T_STD_U16LE;
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      break;
  }
  return H5T_STD_U8LE;
}

/// A string type of exactly this length.
Handle text_type(std::size_t size, const std::string& where) {
  Handle type = owned(H5Tcopy(H5T_C_S1), where, "make a string type", kWriting);
  checked(H5Tset_size(type.id(), std::max<std::size_t>(size, 1)), where, "make a string type", kWriting);
  checked(H5Tset_strpad(type.id(), H5T_STR_NULLPAD), where, "make a string type", kWriting);
  checked(H5Tset_cset(type.id(), H5T_CSET_UTF8), where, "make a string type", kWriting);
  return type;
}

void write_scalar_attribute(const Handle& object, const char* name, hid_t stored, hid_t type, const void* value,
                            const std::string& where) {
  const Handle space = owned(H5Screate(H5S_SCALAR), where, "create an attribute", kWriting);
  const Handle attribute = owned(H5Acreate2(object.id(), name, stored, space.id(), H5P_DEFAULT, H5P_DEFAULT), where,
                                 "create an attribute", kWriting);
  checked(H5Awrite(attribute.id(), type, value), where, "write an attribute", kWriting);
}

bool refers_to_objects(hid_t type) {
  return H5Tdetect_class(type, H5T_REFERENCE) > 0;
}

[[noreturn]] void refuse_large_attribute(std::uint64_t count, std::size_t size, const std::string& where) {
  throw Error(ExitCode::bad_input, {.where = where,
                                    .found = fmt::format("declares {} elements of {} bytes", count, size),
                                    .expected = fmt::format("at most {} bytes", kMaxAttributeBytes),
                                    .advice = "remove it from the dump"});
}

void copy_attribute(const Handle& from, const Handle& to, const std::string& name, const std::string& where) {
  const std::string here = where + ", attribute " + quoted(name);
  const Handle attribute = owned(H5Aopen(from.id(), name.c_str(), H5P_DEFAULT), here, "open it");
  const Handle stored_type = owned(H5Aget_type(attribute.id()), here, "read its type");
  const Handle type = owned(H5Tcopy(stored_type.id()), here, "read its type");  // no longer a committed one
  const Handle space = owned(H5Aget_space(attribute.id()), here, "read its shape");
  if (refers_to_objects(type.id())) {
    throw Error(ExitCode::bad_input, {.where = here,
                                      .found = "refers to other objects of the file",
                                      .expected = "an attribute that can be copied",
                                      .advice = "remove it from the dump"});
  }
  const auto count =
      static_cast<std::uint64_t>(checked(H5Sget_simple_extent_npoints(space.id()), here, "read its shape"));
  const std::size_t size = H5Tget_size(type.id());
  if (size == 0 || count > kMaxAttributeBytes / size) refuse_large_attribute(count, size, here);
  const Handle copy = owned(H5Acreate2(to.id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT), here,
                            "create it", kWriting);
  if (count == 0) return;
  const bool variable = H5Tdetect_class(type.id(), H5T_VLEN) > 0 || H5Tis_variable_str(type.id()) > 0;
  std::vector<std::byte> bytes(count * size);
  checked(H5Aread(attribute.id(), type.id(), bytes.data()), here, "read it");
  const herr_t written = H5Awrite(copy.id(), type.id(), bytes.data());
  if (variable) H5Dvlen_reclaim(type.id(), space.id(), H5P_DEFAULT, bytes.data());
  checked(written, here, "write it", kWriting);
}

std::uint64_t address_of(const Handle& object, const std::string& where) {
  H5O_info_t info;
  checked(H5Oget_info2(object.id(), &info, H5O_INFO_BASIC), where, "look at the object", kWriting);
  return info.addr;
}

/// Where a contiguous dataset's bytes begin in the file; empty if nothing was allocated.
std::optional<std::uint64_t> data_offset(const Handle& dataset) {
  const haddr_t offset = H5Dget_offset(dataset.id());
  H5Eclear2(H5E_DEFAULT);
  return offset == HADDR_UNDEF ? std::nullopt : std::optional<std::uint64_t>(offset);
}

}  // namespace

Handle access_properties(std::uint64_t cache_bytes, const std::string& where) {
  Handle properties = owned(H5Pcreate(H5P_DATASET_ACCESS), where, "set the chunk cache");
  checked(H5Pset_chunk_cache(properties.id(), 12421, cache_bytes, 1.0), where, "set the chunk cache");
  return properties;
}

Handle create_file(const std::filesystem::path& path, std::uint64_t link_bytes) {
  const auto lock = lock_library();
  const Handle access = owned(H5Pcreate(H5P_FILE_ACCESS), path.string(), "create it", kWriting);
  limit_metadata_cache(access, kLeastWriteCacheBytes + 2 * link_bytes, path.string());
  return owned(H5Fcreate(path.c_str(), H5F_ACC_EXCL, H5P_DEFAULT, access.id()), path.string(), "create it", kWriting);
}

Handle reopen_file(const std::filesystem::path& path) {
  const auto lock = lock_library();
  const Handle access = owned(H5Pcreate(H5P_FILE_ACCESS), path.string(), "open it", kWriting);
  limit_metadata_cache(access, kLeastWriteCacheBytes, path.string());
  return owned(H5Fopen(path.c_str(), H5F_ACC_RDWR, access.id()), path.string(), "open it", kWriting);
}

Handle create_group(const Handle& location, const std::string& name, const std::string& where) {
  const auto lock = lock_library();
  return owned(H5Gcreate2(location.id(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), where, "create it",
               kWriting);
}

Dataset create_dataset_like(const Handle& location, const std::string& name, const Dataset& like,
                            const std::string& where) {
  const auto lock = lock_library();
  Handle properties;
  if (like.storage != Storage::contiguous) properties = chunked_properties(like, where);
  const hid_t creation = properties ? properties.id() : contiguous_properties(where);
  const Handle stored_type = owned(H5Dget_type(like.handle.id()), where, "read the element type");
  const Handle type = owned(H5Tcopy(stored_type.id()), where, "read the element type");  // no longer a committed one
  const Handle space = owned(H5Dget_space(like.handle.id()), where, "read the shape");
  Dataset dataset;
  dataset.handle =
      owned(H5Dcreate2(location.id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT, creation, H5P_DEFAULT), where,
            "create it", kWriting);
  dataset.shape = like.shape;
  dataset.type = like.type;
  dataset.storage = like.storage;
  dataset.chunk = like.chunk;
  if (dataset.storage == Storage::contiguous) dataset.offset = data_offset(dataset.handle);
  dataset.address = address_of(dataset.handle, where);
  return dataset;
}

namespace {

Dataset create_contiguous(const Handle& location, const std::string& name, hid_t type,
                          const std::vector<std::int64_t>& shape, const std::string& where) {
  const std::vector<hsize_t> extents(shape.begin(), shape.end());
  const Handle space =
      owned(extents.empty() ? H5Screate(H5S_SCALAR)
                            : H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr),
            where, "create it", kWriting);
  Dataset dataset;
  dataset.handle = owned(
      H5Dcreate2(location.id(), name.c_str(), type, space.id(), H5P_DEFAULT, contiguous_properties(where), H5P_DEFAULT),
      where, "create it", kWriting);
  dataset.shape = shape;
  dataset.offset = data_offset(dataset.handle);
  dataset.address = address_of(dataset.handle, where);
  return dataset;
}

}  // namespace

Dataset create_gradient(const Handle& location, const std::string& name, DType dtype,
                        const std::vector<std::int64_t>& shape, const std::string& where) {
  const auto lock = lock_library();
  Dataset dataset = create_contiguous(location, name, stored_type(dtype, where), shape, where);
  write_text_attribute(dataset.handle, "dtype", std::string(gradclip::name(dtype)), where);
  return dataset;
}

Dataset create_labels(const Handle& location, const std::string& name, const std::vector<std::int64_t>& shape,
                      const std::string& where) {
  const auto lock = lock_library();
  return create_contiguous(location, name, H5T_STD_I64LE, shape, where);
}

Handle reopen_dataset(const Handle& location, const std::string& name, std::uint64_t cache_bytes,
                      const std::string& where) {
  const auto lock = lock_library();
  Handle access;  // making it costs as much as opening the dataset
  if (cache_bytes != 0) access = access_properties(cache_bytes, where);
  return owned(H5Dopen2(location.id(), name.c_str(), access ? access.id() : H5P_DEFAULT), where, "open it", kWriting);
}

Handle reopen_object(const Handle& file, std::uint64_t address, const std::string& where) {
  const auto lock = lock_library();
  return owned(H5Oopen_by_addr(file.id(), address), where, "open it", kWriting);
}

void write_box(const Handle& dataset, std::span<const std::uint64_t> start, std::span<const std::uint64_t> count,
               const void* from, const std::string& where) {
  const auto lock = lock_library();
  const Handle type = owned(H5Dget_type(dataset.id()), where, "read the element type", kWriting);
  if (start.empty()) {
    checked(H5Dwrite(dataset.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, from), where, "write the data", kWriting);
    return;
  }
  const std::vector<hsize_t> first(start.begin(), start.end());
  const std::vector<hsize_t> length(count.begin(), count.end());
  const Handle space = owned(H5Dget_space(dataset.id()), where, "read the shape", kWriting);
  checked(H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, first.data(), nullptr, length.data(), nullptr), where,
          "select a part", kWriting);
  const Handle memory = owned(H5Screate_simple(static_cast<int>(length.size()), length.data(), nullptr), where,
                              "select a part", kWriting);
  checked(H5Dwrite(dataset.id(), type.id(), memory.id(), space.id(), H5P_DEFAULT, from), where, "write the data",
          kWriting);
}

void create_text_like(const Handle& location, const std::string& name, const Dataset& like, const std::string& text,
                      const std::string& where) {
  const auto lock = lock_library();
  const Handle stored_type = owned(H5Dget_type(like.handle.id()), where, "read the string type");
  const Handle type = owned(H5Tcopy(stored_type.id()), where, "read the string type");
  const bool variable = H5Tis_variable_str(type.id()) > 0;
  if (!variable) checked(H5Tset_size(type.id(), text.size() + 1), where, "set the string's length", kWriting);
  const Handle space = owned(H5Dget_space(like.handle.id()), where, "read the shape");
  const Handle properties = owned(H5Pcreate(H5P_DATASET_CREATE), where, "set the storage", kWriting);
  checked(H5Pset_obj_track_times(properties.id(), false), where, "set the storage", kWriting);
  const Handle dataset =
      owned(H5Dcreate2(location.id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT, properties.id(), H5P_DEFAULT),
            where, "create it", kWriting);
  const char* pointer = text.c_str();
  checked(H5Dwrite(dataset.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT,
                   variable ? static_cast<const void*>(&pointer) : text.c_str()),
          where, "write the text", kWriting);
  copy_attributes(like.handle, dataset, {}, where);
}

void copy_attributes(const Handle& from, const Handle& to, std::span<const std::string_view> except,
                     const std::string& where) {
  const auto lock = lock_library();
  std::vector<std::string> names;
  const auto append = [](hid_t, const char* name, const H5A_info_t*, void* to_names) -> herr_t {
    static_cast<std::vector<std::string>*>(to_names)->emplace_back(name);
    return 0;
  };
  checked(H5Aiterate2(from.id(), H5_INDEX_NAME, H5_ITER_INC, nullptr, append, &names), where, "list the attributes");
  for (const std::string& name : names) {
    if (std::find(except.begin(), except.end(), name) == except.end()) copy_attribute(from, to, name, where);
  }
}

void write_unsigned_attribute(const Handle& object, const char* name, std::uint64_t value, const std::string& where) {
  const auto lock = lock_library();
  Handle attribute;
  if (checked(H5Aexists(object.id(), name), where, "look for attributes", kWriting) > 0) {
    attribute = owned(H5Aopen(object.id(), name, H5P_DEFAULT), where, "open an attribute", kWriting);
  } else {
    const Handle space = owned(H5Screate(H5S_SCALAR), where, "create an attribute", kWriting);
    attribute = owned(H5Acreate2(object.id(), name, H5T_STD_U64LE, space.id(), H5P_DEFAULT, H5P_DEFAULT), where,
                      "create an attribute", kWriting);
  }
  checked(H5Awrite(attribute.id(), H5T_NATIVE_UINT64, &value), where, "write an attribute", kWriting);
}

void write_text_attribute(const Handle& object, const char* name, const std::string& text, const std::string& where) {
  const auto lock = lock_library();
  const Handle type = text_type(text.size(), where);
  write_scalar_attribute(object, name, type.id(), type.id(), text.c_str(), where);
}

void write_integer_attribute(const Handle& object, const char* name, std::int64_t value, const std::string& where) {
  const auto lock = lock_library();
  write_scalar_attribute(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value, where);
}

void write_float_attribute(const Handle& object, const char* name, float value, const std::string& where) {
  const auto lock = lock_library();
  write_scalar_attribute(object, name, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, &value, where);
}

void create_texts(const Handle& location, const std::string& name, std::span<const std::string> texts,
                  const std::string& where) {
  const auto lock = lock_library();
  std::size_t longest = 1;
  for (const std::string& text : texts) longest = std::max(longest, text.size());
  std::vector<char> bytes(texts.size() * longest, '\0');
  for (std::size_t i = 0; i < texts.size(); ++i) texts[i].copy(bytes.data() + i * longest, longest);
  const Handle type = text_type(longest, where);
  const hsize_t count = texts.size();
  const Handle space = owned(H5Screate_simple(1, &count, nullptr), where, "create it", kWriting);
  const Handle dataset = owned(H5Dcreate2(location.id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT,
                                          contiguous_properties(where), H5P_DEFAULT),
                               where, "create it", kWriting);
  checked(H5Dwrite(dataset.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()), where, "write the text",
          kWriting);
}

void copy_object(const Handle& from, const std::string& name, const Handle& to, const std::string& where) {
  const auto lock = lock_library();
  check_copyable(from, name, where);
  checked(H5Ocopy(from.id(), name.c_str(), to.id(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), where, "copy it",
          kWriting);
}

}  // namespace gradclip::hdf5
