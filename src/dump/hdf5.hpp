#pragma once
// The HDF5 library behind checked calls and owners. Inside this room; nobody else knows that rank files are HDF5.
//
// Every function takes the process-wide lock (the library is not thread-safe), turns the library's error stack into the
// text of an Error(bad_input) that begins with `where`, and prints nothing.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gradclip/base/dtype.hpp"

namespace gradclip::hdf5 {

/// An HDF5 identifier that closes itself.
class Handle {
 public:
  Handle() = default;
  explicit Handle(std::int64_t id) noexcept : id_(id) {}
  ~Handle();
  Handle(Handle&& other) noexcept;
  Handle& operator=(Handle&& other) noexcept;

  [[nodiscard]] std::int64_t id() const noexcept { return id_; }
  [[nodiscard]] explicit operator bool() const noexcept { return id_ >= 0; }
  /// Closes with a check, which matters for files that were written.
  void close(const std::string& where);

 private:
  std::int64_t id_ = -1;
};

/// Held across several calls that belong together; recursive.
[[nodiscard]] std::unique_lock<std::recursive_mutex> lock_library();

/// "1.10.8"
[[nodiscard]] std::string library_version();

// ---- what a file holds

/// An element type by its fields, never by its identity.
struct ElementType {
  enum class Class : std::uint8_t { floating, integer, opaque, string, other };
  Class type_class = Class::other;
  std::size_t size = 0;
  bool little_endian = true;
  bool is_signed = false;      // integer
  std::size_t precision = 0;   // integer, floating: significant bits
  std::size_t bit_offset = 0;  // integer, floating
  std::size_t sign_position = 0, exponent_position = 0, exponent_size = 0, mantissa_position = 0, mantissa_size = 0;
  std::size_t exponent_bias = 0;
  bool implied_one = false;  // floating: the mantissa's leading bit is not stored
};
/// For messages: "32-bit little-endian float (exponent 8, mantissa 23)".
[[nodiscard]] std::string describe(const ElementType& type);

enum class LinkKind : std::uint8_t { none, hard, soft, external, other };
enum class Storage : std::uint8_t { contiguous, compact, chunked };

struct Filter {
  int id;
  std::string name;
  std::vector<unsigned> parameters;
};

struct Dataset {
  Handle handle;
  std::vector<std::int64_t> shape;
  ElementType type;
  Storage storage = Storage::contiguous;
  std::optional<std::uint64_t> offset;  ///< contiguous: of the first byte in the file; empty if nothing was allocated
  std::uint64_t stored_bytes = 0;       ///< allocated in the file
  std::vector<std::uint64_t> chunk;     ///< chunked: extents of one chunk
  std::vector<Filter> filters;          ///< in the order of writing
  std::uint64_t chunks = 0;             ///< chunked: how many it takes
  std::uint64_t chunks_written = 0;
  std::uint64_t address = 0;  ///< of the object: two links to one object share it

  [[nodiscard]] std::uint64_t elements() const noexcept;
};

/// Opens read-only. The message names the usual remedies for files that are locked or were not closed by their writer.
[[nodiscard]] Handle open_file(const std::filesystem::path& path);
[[nodiscard]] std::uint64_t user_block_size(const Handle& file, const std::string& where);
/// What a link leads to.
struct LinkTarget {
  LinkKind kind = LinkKind::none;
  std::uint64_t address = 0;  ///< hard: of the object in the file
};
[[nodiscard]] LinkTarget link_target(const Handle& location, const std::string& name, const std::string& where);
[[nodiscard]] LinkKind link_kind(const Handle& location, const std::string& name, const std::string& where);
/// Names of all links of a group in ascending order.
[[nodiscard]] std::vector<std::string> link_names(const Handle& group, const std::string& where);
using LinkTargets = std::unordered_map<std::string, LinkTarget>;
/// All links of a group by name.
[[nodiscard]] LinkTargets link_targets(const Handle& group, const std::string& where);
/// Errors: also for soft and external links, and for what is no group.
[[nodiscard]] Handle open_group(const Handle& location, const std::string& name, const std::string& where);
/// Errors: also for soft and external links, a second link to the same object, what is no dataset, external storage,
/// virtual datasets, more elements than 2^62, filters that are not available (named, with the advice to set
/// HDF5_PLUGIN_PATH).
[[nodiscard]] Dataset open_dataset(const Handle& location, const std::string& name, const std::string& where);
/// The same by a link that is known already; `file` is any handle of its file.
[[nodiscard]] Dataset open_dataset(const Handle& file, const LinkTarget& link, const std::string& where);

/// Attributes: empty if there is none of that name. Errors: another class of type, more than one element (or 2^20 for
/// lists). Strings of fixed and of variable length.
[[nodiscard]] std::optional<std::string> string_attribute(const Handle& object, const char* name,
                                                          const std::string& where);
[[nodiscard]] std::optional<double> number_attribute(const Handle& object, const char* name, const std::string& where);
[[nodiscard]] std::optional<std::uint64_t> unsigned_attribute(const Handle& object, const char* name,
                                                              const std::string& where);
struct IntegerList {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> values;
};
[[nodiscard]] std::optional<IntegerList> integer_attribute(const Handle& object, const char* name,
                                                           const std::string& where);

/// All strings of a dataset of fixed or variable length strings.
[[nodiscard]] std::vector<std::string> read_strings(const Dataset& dataset, const std::string& where);

/// A box of a dataset, in the file's own element type, row-major into `to`.
void read_box(const Dataset& dataset, std::span<const std::uint64_t> start, std::span<const std::uint64_t> count,
              void* to, const std::string& where);

/// One chunk as it lies in the file, its filters not undone.
struct StoredChunk {
  std::vector<std::byte> bytes;
  unsigned skipped_filters = 0;  ///< bit i: filter i was not applied
};
/// @param most_bytes  a chunk that claims to be longer is refused unread
[[nodiscard]] StoredChunk read_stored_chunk(const Dataset& dataset, std::span<const std::uint64_t> start,
                                            std::uint64_t most_bytes, const std::string& where);

// ---- making files (hdf5_write.cpp)

/// What a name takes among the names of its group, at most: zero-terminated and a multiple of 8.
[[nodiscard]] inline std::uint64_t link_bytes(const std::string& name) noexcept {
  return name.size() + 8;
}
/// A new file in the default, oldest format. Errors: Error(resources).
/// @param link_bytes  of all names that its groups will have. The library keeps them in one piece, which has to stay in
///                    the metadata cache: else it is written, and moved to the file's end, again and again.
[[nodiscard]] Handle create_file(const std::filesystem::path& path, std::uint64_t link_bytes);
/// One that was made and closed, opened again for writing. Errors: Error(resources).
[[nodiscard]] Handle reopen_file(const std::filesystem::path& path);
[[nodiscard]] Handle create_group(const Handle& location, const std::string& name, const std::string& where);
/// A dataset of the same type, shape, storage and filters as `like`; allocated early if contiguous, never filled,
/// without object times. @return with handle, offset, storage and address filled in.
[[nodiscard]] Dataset create_dataset_like(const Handle& location, const std::string& name, const Dataset& like,
                                          const std::string& where);
/// A contiguous dataset as the format stores a gradient of this type, with its attribute `dtype`; allocated early,
/// never filled, without object times. @return with handle, shape, offset and address filled in.
[[nodiscard]] Dataset create_gradient(const Handle& location, const std::string& name, DType dtype,
                                      const std::vector<std::int64_t>& shape, const std::string& where);
/// A contiguous dataset as the format stores labels: int64, likewise.
[[nodiscard]] Dataset create_labels(const Handle& location, const std::string& name,
                                    const std::vector<std::int64_t>& shape, const std::string& where);
/// An object that one of them made, opened again by its address: the library need not look for its name among many.
[[nodiscard]] Handle reopen_object(const Handle& file, std::uint64_t address, const std::string& where);
/// A dataset that one of them made, opened again for writing.
[[nodiscard]] Handle reopen_dataset(const Handle& location, const std::string& name, std::uint64_t cache_bytes,
                                    const std::string& where);
void write_box(const Handle& dataset, std::span<const std::uint64_t> start, std::span<const std::uint64_t> count,
               const void* from, const std::string& where);
/// Text as the single string of a dataset; of variable length if `like` is, else of the text's length.
void create_text_like(const Handle& location, const std::string& name, const Dataset& like, const std::string& text,
                      const std::string& where);
/// Copies all attributes, in ascending order of their names, except those named.
/// Errors: also for attributes that refer to other objects.
void copy_attributes(const Handle& from, const Handle& to, std::span<const std::string_view> except,
                     const std::string& where);
/// New attributes: text of a fixed length, a signed 64-bit integer, a float32.
void write_text_attribute(const Handle& object, const char* name, const std::string& text, const std::string& where);
void write_integer_attribute(const Handle& object, const char* name, std::int64_t value, const std::string& where);
void write_float_attribute(const Handle& object, const char* name, float value, const std::string& where);
/// A 1-D dataset of strings.
void create_texts(const Handle& location, const std::string& name, std::span<const std::string> texts,
                  const std::string& where);
/// Creates or overwrites an unsigned 64-bit scalar attribute.
void write_unsigned_attribute(const Handle& object, const char* name, std::uint64_t value, const std::string& where);
/// Copies an object and all below it. Errors: also for soft and external links, external storage and virtual datasets.
void copy_object(const Handle& from, const std::string& name, const Handle& to, const std::string& where);

}  // namespace gradclip::hdf5
