#include "gradclip/dump/hdf5.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "gradclip/dump/hdf5_call.hpp"

namespace gradclip::hdf5 {
namespace {

constexpr std::size_t kReadCacheBytes = std::size_t{32} << 10;

constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 62;

herr_t keep_first_text(unsigned, const H5E_error2_t* entry, void* to) {
  auto& text = *static_cast<std::string*>(to);
  if (text.empty() && entry->desc != nullptr) text = entry->desc;
  return 0;
}

std::vector<Filter> filters_of(const Handle& properties, const std::string& where) {
  const int count = checked(H5Pget_nfilters(properties.id()), where, "read the filters");
  std::vector<Filter> filters;
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0;
    unsigned configuration = 0;
    std::vector<unsigned> parameters(64);
    std::size_t parameter_count = parameters.size();
    char name[256] = "";
    const H5Z_filter_t id = checked(H5Pget_filter2(properties.id(), static_cast<unsigned>(i), &flags, &parameter_count,
                                                   parameters.data(), sizeof name, name, &configuration),
                                    where, "read the filters");
    name[sizeof name - 1] = '\0';
    parameters.resize(std::min(parameter_count, parameters.size()));
    if (checked(H5Zfilter_avail(id), where, "look for a filter") == 0) {
      H5Eclear2(H5E_DEFAULT);
      throw Error(ExitCode::bad_input,
                  {.where = where,
                   .found = fmt::format("needs the HDF5 filter {}{}, which is not available", id,
                                        name[0] == '\0' ? "" : " (" + quoted(std::string_view(name)) + ")"),
                   .expected = "deflate, shuffle or fletcher32, or a filter that is installed",
                   .advice = "set HDF5_PLUGIN_PATH to the folder that holds the filter's plugin"});
    }
    filters.push_back({id, name, std::move(parameters)});
  }
  return filters;
}

LinkTarget target_of(const H5L_info_t& info) {
  const LinkKind kind = kind_of(info.type);
  return {kind, kind == LinkKind::hard ? info.u.address : 0};
}

void require_hard_link(const Handle& location, const std::string& name, const std::string& where) {
  const LinkKind kind = link_kind(location, name, where);
  if (kind != LinkKind::hard) refuse_link(kind, where);
}

/// What was opened, which has to be a dataset.
Handle require_dataset(hid_t id, const std::string& where) {
  Handle object = owned(id, where, "open it");
  if (H5Iget_type(object.id()) == H5I_DATASET) return object;
  throw Error(ExitCode::bad_input,
              {.where = where, .found = "is not a dataset", .expected = "a dataset", .advice = {}});
}

/// Only chunks can grow: the library makes no other dataset that may, so the file is damaged.
void refuse_extendible(const Handle& space, const std::vector<std::int64_t>& shape, const std::string& where) {
  std::vector<hsize_t> most(shape.size());
  checked(H5Sget_simple_extent_dims(space.id(), nullptr, most.data()), where, "read the shape");
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (most[d] == static_cast<hsize_t>(shape[d])) continue;
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = fmt::format("is not chunked and yet may grow in dimension {}", d),
                                      .expected = "a largest shape that is its shape",
                                      .advice = "the file is damaged; copy or record it again"});
  }
}

void read_chunking(const Handle& properties, const Handle& space, Dataset& dataset, const std::string& where) {
  std::vector<hsize_t> chunk(std::max<std::size_t>(dataset.shape.size(), 1));
  const int dimensions = checked(H5Pget_chunk(properties.id(), static_cast<int>(chunk.size()), chunk.data()), where,
                                 "read the chunk shape");
  if (dimensions != static_cast<int>(dataset.shape.size())) {
    throw Error(ExitCode::bad_input,
                {.where = where, .found = "has chunks of another rank than its shape", .expected = {}, .advice = {}});
  }
  dataset.chunk.assign(chunk.begin(), chunk.end());
  dataset.filters = filters_of(properties, where);
  std::uint64_t expected = 1;
  for (std::size_t d = 0; d < dataset.chunk.size(); ++d) {
    const auto extent = static_cast<std::uint64_t>(dataset.shape[d]);
    if (dataset.chunk[d] == 0) {
      throw Error(ExitCode::bad_input, {.where = where, .found = "has empty chunks", .expected = {}, .advice = {}});
    }
    expected *= extent / dataset.chunk[d] + (extent % dataset.chunk[d] != 0 ? 1 : 0);
  }
  hsize_t written = 0;
  checked(H5Dget_num_chunks(dataset.handle.id(), space.id(), &written), where, "count the chunks");
  dataset.chunks = expected;
  dataset.chunks_written = written;
}

Dataset described(Handle handle, const std::string& where) {
  Dataset dataset;
  dataset.handle = std::move(handle);
  const hid_t id = dataset.handle.id();
  // Only contiguous data of this very file has an offset; asking for it is far cheaper than for the creation
  // properties. Before anything else, because the library opens other files to tell the shape of some virtual datasets.
  Handle properties;
  if (const haddr_t offset = H5Dget_offset(id); offset != HADDR_UNDEF) {
    dataset.offset = offset;
  } else {
    H5Eclear2(H5E_DEFAULT);
    properties = owned(H5Dget_create_plist(id), where, "read the storage");
    refuse_foreign_storage(properties.id(), where);
    const H5D_layout_t layout = H5Pget_layout(properties.id());
    if (layout == H5D_CHUNKED) dataset.storage = Storage::chunked;
    if (layout == H5D_COMPACT) dataset.storage = Storage::compact;
  }
  H5O_info_t info;
  checked(H5Oget_info2(id, &info, H5O_INFO_BASIC), where, "look at the object");
  if (info.rc != 1) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = fmt::format("the object has {} names in the file", info.rc),
                                      .expected = "one name for each object",
                                      .advice = {}});
  }
  dataset.address = info.addr;
  const Handle space = owned(H5Dget_space(id), where, "read the shape");
  dataset.shape = extents(space, where);
  if (dataset.storage != Storage::chunked) refuse_extendible(space, dataset.shape, where);
  const Handle type = owned(H5Dget_type(id), where, "read the element type");
  dataset.type = element_type(type, where);
  if (dataset.elements() > std::numeric_limits<std::int64_t>::max() / dataset.type.size) {
    throw Error(ExitCode::bad_input,
                {.where = where, .found = "declares 2^63 bytes or more", .expected = {}, .advice = {}});
  }
  dataset.stored_bytes = H5Dget_storage_size(id);
  if (dataset.storage == Storage::chunked) read_chunking(properties, space, dataset, where);
  return dataset;
}

}  // namespace

// ---- errors

std::string take_error_text() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_first_text, &text);
  H5Eclear2(H5E_DEFAULT);
  // "file write failed: time = ..., errno = 28, error message = 'No space left on device', buf = 0x..., ...": what the
  // system said is all that there is to learn.
  constexpr std::string_view kSystem = "error message = '";
  if (const std::size_t begin = text.find(kSystem); begin != std::string::npos) {
    const std::size_t reason = begin + kSystem.size();
    return text.substr(0, text.find(": time")) + ": " + text.substr(reason, text.find('\'', reason) - reason);
  }
  return text.empty() ? "no further explanation" : text;
}

void fail(ExitCode code, const std::string& where, const std::string& doing) {
  throw Error(
      code,
      {.where = where, .found = "cannot " + doing + ": HDF5: " + take_error_text(), .expected = {}, .advice = {}});
}

LinkKind kind_of(H5L_type_t type) noexcept {
  switch (type) {
    case H5L_TYPE_HARD:
      return LinkKind::hard;
    case H5L_TYPE_SOFT:
      return LinkKind::soft;
    case H5L_TYPE_EXTERNAL:
      return LinkKind::external;
    default:
      return LinkKind::other;
  }
}

void refuse_link(LinkKind kind, const std::string& where) {
  const char* found = kind == LinkKind::none       ? "does not exist"
                      : kind == LinkKind::soft     ? "is a soft link"
                      : kind == LinkKind::external ? "is an external link"
                                                   : "is a link of an unknown kind";
  throw Error(ExitCode::bad_input,
              {.where = where, .found = found, .expected = "an object of this file", .advice = {}});
}

void refuse_foreign_storage(hid_t properties, const std::string& where) {
  if (H5Pget_layout(properties) == H5D_VIRTUAL) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = "is a virtual dataset, made of parts of other files",
                                      .expected = "data in this file",
                                      .advice = {}});
  }
  if (checked(H5Pget_external_count(properties), where, "read the storage") > 0) {
    throw Error(
        ExitCode::bad_input,
        {.where = where, .found = "keeps its data in an external file", .expected = "data in this file", .advice = {}});
  }
}

std::vector<std::int64_t> extents(const Handle& space, const std::string& where) {
  const H5S_class_t type = H5Sget_simple_extent_type(space.id());
  if (type == H5S_SCALAR) return {};
  if (type != H5S_SIMPLE) {
    throw Error(ExitCode::bad_input,
                {.where = where, .found = "has no elements at all (a null dataspace)", .expected = {}, .advice = {}});
  }
  const int rank = checked(H5Sget_simple_extent_ndims(space.id()), where, "read the shape");
  std::vector<hsize_t> sizes(static_cast<std::size_t>(rank));
  checked(H5Sget_simple_extent_dims(space.id(), sizes.data(), nullptr), where, "read the shape");
  std::uint64_t product = 1;
  for (const hsize_t size : sizes) {
    if (size != 0 && (__builtin_mul_overflow(product, std::uint64_t{size}, &product) || product >= kMaxElements)) {
      throw Error(ExitCode::bad_input,
                  {.where = where, .found = "declares 2^62 elements or more", .expected = {}, .advice = {}});
    }
  }
  return {sizes.begin(), sizes.end()};
}

ElementType element_type(const Handle& type, const std::string& where) {
  ElementType result;
  result.size = H5Tget_size(type.id());
  if (result.size == 0) fail(ExitCode::bad_input, where, "read the element type");
  const H5T_class_t type_class = H5Tget_class(type.id());
  if (type_class == H5T_INTEGER || type_class == H5T_FLOAT) {
    result.little_endian = H5Tget_order(type.id()) == H5T_ORDER_LE;
    result.precision = H5Tget_precision(type.id());
    result.bit_offset = static_cast<std::size_t>(checked(H5Tget_offset(type.id()), where, "read the element type"));
  }
  switch (type_class) {
    case H5T_INTEGER:
      result.type_class = ElementType::Class::integer;
      result.is_signed = H5Tget_sign(type.id()) != H5T_SGN_NONE;
      break;
    case H5T_FLOAT:
      result.type_class = ElementType::Class::floating;
      checked(H5Tget_fields(type.id(), &result.sign_position, &result.exponent_position, &result.exponent_size,
                            &result.mantissa_position, &result.mantissa_size),
              where, "read the element type");
      result.exponent_bias = H5Tget_ebias(type.id());
      result.implied_one = H5Tget_norm(type.id()) == H5T_NORM_IMPLIED;
      break;
    case H5T_OPAQUE:
      result.type_class = ElementType::Class::opaque;
      break;
    case H5T_STRING:
      result.type_class = ElementType::Class::string;
      break;
    default:
      result.type_class = ElementType::Class::other;
      break;
  }
  return result;
}

// ---- handles

std::unique_lock<std::recursive_mutex> lock_library() {
  static std::recursive_mutex mutex;
  std::unique_lock<std::recursive_mutex> lock(mutex);
  thread_local bool quiet = false;
  if (!quiet) {
    // At exit the library would close once more what it could not close for want of space, and crash.
    H5dont_atexit();
    H5open();
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
    quiet = true;
  }
  return lock;
}

Handle::~Handle() {
  if (id_ < 0) return;
  const auto lock = lock_library();
  if (H5Idec_ref(id_) < 0) H5Eclear2(H5E_DEFAULT);
}

Handle::Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)) {}

Handle& Handle::operator=(Handle&& other) noexcept {
  std::swap(id_, other.id_);
  return *this;
}

void Handle::close(const std::string& where) {
  if (id_ < 0) return;
  const auto lock = lock_library();
  checked(H5Idec_ref(std::exchange(id_, -1)), where, "close it", ExitCode::resources);
}

std::string library_version() {
  const auto lock = lock_library();
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  H5get_libversion(&major, &minor, &release);
  return fmt::format("{}.{}.{}", major, minor, release);
}

std::string describe(const ElementType& type) {
  const auto bits = [&] {
    return fmt::format("{}-bit {}", type.size * 8,
                       type.size == 1       ? ""
                       : type.little_endian ? "little-endian "
                                            : "big-endian ");
  };
  switch (type.type_class) {
    case ElementType::Class::floating:
      return fmt::format("{}float (exponent {}, mantissa {} bits)", bits(), type.exponent_size, type.mantissa_size);
    case ElementType::Class::integer:
      return bits() + (type.is_signed ? "signed integer" : "unsigned integer");
    case ElementType::Class::opaque:
      return fmt::format("{} opaque bytes", type.size);
    case ElementType::Class::string:
      return "string";
    case ElementType::Class::other:
      break;
  }
  return "compound or other type";
}

std::uint64_t Dataset::elements() const noexcept {
  std::uint64_t product = 1;
  for (const std::int64_t extent : shape) product *= static_cast<std::uint64_t>(extent);
  return product;
}

// ---- files, groups, datasets

void limit_metadata_cache(const Handle& access, std::size_t bytes, const std::string& where) {
  H5AC_cache_config_t config{};
  config.version = H5AC__CURR_CACHE_CONFIG_VERSION;
  checked(H5Pget_mdc_config(access.id(), &config), where, "set the metadata cache");
  config.set_initial_size = true;
  config.initial_size = config.min_size = config.max_size = bytes;
  config.incr_mode = H5C_incr__off;
  config.flash_incr_mode = H5C_flash_incr__off;
  config.decr_mode = H5C_decr__off;
  checked(H5Pset_mdc_config(access.id(), &config), where, "set the metadata cache");
}

Handle open_file(const std::filesystem::path& path) {
  const auto lock = lock_library();
  // A dataset is looked at once. Else the library keeps what it decoded of each, some 8 KiB, as long as the file is
  // open.
  const Handle access = owned(H5Pcreate(H5P_FILE_ACCESS), path.string(), "open it");
  checked(H5Pset_evict_on_close(access.id(), true), path.string(), "open it");
  limit_metadata_cache(access, kReadCacheBytes, path.string());
  const hid_t id = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.id());
  if (id >= 0) return Handle(id);
  const std::string text = take_error_text();
  std::string advice;
  std::string_view kind;
  // Whole phrases: the text of a truncated file has "sblock" in it.
  if (text.find("unable to lock") != std::string::npos || text.find("file locking") != std::string::npos) {
    advice = "another program may be writing it, or the file system has no locks: then set HDF5_USE_FILE_LOCKING=FALSE";
  } else if (text.find("consistency") != std::string::npos || text.find("already open") != std::string::npos) {
    advice = "its writer did not close it; if no program is writing it any more, `h5clear -s FILE` removes the mark";
    kind = "unfinished";
  } else if (text.find("truncated") != std::string::npos) {
    advice = "the file is incomplete; copy or record it again";
    kind = "unfinished";
  }
  throw Error(ExitCode::bad_input, {.where = path.string(),
                                    .found = "cannot be opened as an HDF5 file: " + text,
                                    .expected = {},
                                    .advice = advice,
                                    .kind = kind});
}

std::uint64_t user_block_size(const Handle& file, const std::string& where) {
  const auto lock = lock_library();
  const Handle properties = owned(H5Fget_create_plist(file.id()), where, "read the file's properties");
  hsize_t size = 0;
  checked(H5Pget_userblock(properties.id(), &size), where, "read the file's properties");
  return size;
}

LinkTarget link_target(const Handle& location, const std::string& name, const std::string& where) {
  const auto lock = lock_library();
  H5L_info_t info;
  if (H5Lget_info(location.id(), name.c_str(), &info, H5P_DEFAULT) >= 0) return target_of(info);
  H5Eclear2(H5E_DEFAULT);
  if (checked(H5Lexists(location.id(), name.c_str(), H5P_DEFAULT), where, "look for it") == 0) return {};
  fail(ExitCode::bad_input, where, "look at the link");
}

LinkKind link_kind(const Handle& location, const std::string& name, const std::string& where) {
  return link_target(location, name, where).kind;
}

std::vector<std::string> link_names(const Handle& group, const std::string& where) {
  const auto lock = lock_library();
  std::vector<std::string> names;
  const auto append = [](hid_t, const char* name, const H5L_info_t*, void* to) -> herr_t {
    static_cast<std::vector<std::string>*>(to)->emplace_back(name);
    return 0;
  };
  checked(H5Literate(group.id(), H5_INDEX_NAME, H5_ITER_INC, nullptr, append, &names), where, "list the links");
  return names;
}

LinkTargets link_targets(const Handle& group, const std::string& where) {
  const auto lock = lock_library();
  LinkTargets targets;
  const auto insert = [](hid_t, const char* name, const H5L_info_t* info, void* to) -> herr_t {
    static_cast<LinkTargets*>(to)->emplace(name, target_of(*info));
    return 0;
  };
  checked(H5Literate(group.id(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, insert, &targets), where, "list the links");
  return targets;
}

Handle open_group(const Handle& location, const std::string& name, const std::string& where) {
  const auto lock = lock_library();
  require_hard_link(location, name, where);
  Handle object = owned(H5Oopen(location.id(), name.c_str(), H5P_DEFAULT), where, "open it");
  if (H5Iget_type(object.id()) != H5I_GROUP) {
    throw Error(ExitCode::bad_input, {.where = where, .found = "is not a group", .expected = "a group", .advice = {}});
  }
  return object;
}

Dataset open_dataset(const Handle& location, const std::string& name, const std::string& where) {
  const auto lock = lock_library();
  require_hard_link(location, name, where);
  return described(require_dataset(H5Oopen(location.id(), name.c_str(), H5P_DEFAULT), where), where);
}

Dataset open_dataset(const Handle& file, const LinkTarget& link, const std::string& where) {
  const auto lock = lock_library();
  if (link.kind != LinkKind::hard) refuse_link(link.kind, where);
  return described(require_dataset(H5Oopen_by_addr(file.id(), link.address), where), where);
}

}  // namespace gradclip::hdf5
