#include "dump_builder.hpp"

#include <hdf5.h>
#include <stdlib.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "file_content.hpp"
#include "gradclip/dump/manifest.hpp"

namespace gradclip::test {
namespace {

using nlohmann::json;

template <class Result>
Result ok(Result result) {
  if (result < 0) throw std::runtime_error("DumpBuilder: an HDF5 call failed");
  return result;
}

/// Closes any HDF5 identifier.
struct Id {
  hid_t id;
  explicit Id(hid_t the_id) : id(ok(the_id)) {}
  ~Id() { H5Idec_ref(id); }
  Id(const Id&) = delete;
  Id& operator=(const Id&) = delete;
  operator hid_t() const { return id; }
};

std::string hexadecimal(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// ---- element types

std::size_t bytes_of(const std::string& dtype) {
  if (dtype == "float64") return 8;
  if (dtype == "float32") return 4;
  if (dtype == "float16" || dtype == "bfloat16") return 2;
  if (dtype == "float8_e4m3fn" || dtype == "float8_e5m2") return 1;
  throw std::invalid_argument("unknown dtype " + dtype);
}

double small_float(unsigned bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
  const unsigned exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double sign = (bits >> (mantissa_bits + exponent_bits) & 1u) != 0 ? -1.0 : 1.0;
  const bool largest = exponent == (1u << exponent_bits) - 1;
  if (has_infinity && largest) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  if (!has_infinity && largest && mantissa == (1u << mantissa_bits) - 1)
    return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(1.0 + std::ldexp(mantissa, -mantissa_bits), static_cast<int>(exponent) - bias);
}

double decode_bits(const std::string& dtype, std::uint64_t bits) {
  if (dtype == "float64") return std::bit_cast<double>(bits);
  if (dtype == "float32") return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
  const auto small = static_cast<unsigned>(bits);
  if (dtype == "float16") return small_float(small, 5, 10, true);
  if (dtype == "bfloat16") return small_float(small, 8, 7, true);
  if (dtype == "float8_e5m2") return small_float(small, 5, 2, true);
  return small_float(small, 4, 3, false);
}

std::uint64_t encode_bits(const std::string& dtype, double value) {
  if (dtype == "float64") return std::bit_cast<std::uint64_t>(value);
  if (dtype == "float32") {
    const auto narrow = static_cast<float>(value);
    if (!std::isnan(value) && narrow != value) throw std::invalid_argument("not a float32: " + std::to_string(value));
    return std::bit_cast<std::uint32_t>(narrow);
  }
  static std::map<std::string, std::map<double, unsigned>> tables;
  auto& table = tables[dtype];
  if (std::isnan(value)) {
    if (dtype == "float16") return 0x7E00;
    if (dtype == "bfloat16") return 0x7FC0;
    return 0x7F;
  }
  if (value == 0) return std::signbit(value) ? 1ull << (8 * bytes_of(dtype) - 1) : 0;
  if (table.empty()) {
    for (unsigned bits = 0; bits < 1u << (8 * bytes_of(dtype)); ++bits) {
      const double number = decode_bits(dtype, bits);
      if (!std::isnan(number)) table.emplace(number, bits);
    }
  }
  const auto found = table.find(value);
  if (found == table.end()) throw std::invalid_argument("not a " + dtype + ": " + std::to_string(value));
  return found->second;
}

hid_t custom_float(std::size_t size, std::size_t sign, std::size_t exponent, std::size_t exponent_size,
                   std::size_t mantissa_size, std::size_t bias) {
  const hid_t type = ok(H5Tcopy(H5T_IEEE_F32LE));
  ok(H5Tset_fields(type, sign, exponent, exponent_size, 0, mantissa_size));
  ok(H5Tset_precision(type, 8 * size));
  ok(H5Tset_size(type, size));
  ok(H5Tset_ebias(type, bias));
  return type;
}

hid_t file_type(const std::string& dtype, Spelling spelling) {
  if (spelling == Spelling::opaque) {
    const hid_t type = ok(H5Tcreate(H5T_OPAQUE, bytes_of(dtype)));
    ok(H5Tset_tag(type, ""));
    return type;
  }
  if (dtype == "float64") return ok(H5Tcopy(H5T_IEEE_F64LE));
  if (dtype == "float32") return ok(H5Tcopy(H5T_IEEE_F32LE));
  if (dtype == "float16") return custom_float(2, 15, 10, 5, 10, 15);
  if (spelling == Spelling::custom_float && dtype == "bfloat16") return custom_float(2, 15, 7, 8, 7, 127);
  if (spelling == Spelling::custom_float && dtype == "float8_e5m2") return custom_float(1, 7, 2, 5, 2, 15);
  return ok(H5Tcopy(bytes_of(dtype) == 2 ? H5T_STD_U16LE : H5T_STD_U8LE));
}

// ---- attributes and datasets

hid_t string_type(std::size_t size, bool variable) {
  const hid_t type = ok(H5Tcopy(H5T_C_S1));
  ok(H5Tset_size(type, variable ? H5T_VARIABLE : std::max<std::size_t>(size, 1)));
  ok(H5Tset_cset(type, H5T_CSET_UTF8));
  ok(H5Tset_strpad(type, variable ? H5T_STR_NULLTERM : H5T_STR_NULLPAD));
  return type;
}

void write_attribute(hid_t object, const std::string& name, hid_t type, hid_t space, const void* data) {
  const Id attribute(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT));
  ok(H5Awrite(attribute, type, data));
}

void write_string(hid_t object, const std::string& name, const std::string& text, bool variable) {
  const Id type(string_type(text.size(), variable));
  const Id space(H5Screate(H5S_SCALAR));
  const char* pointer = text.c_str();
  write_attribute(object, name, type, space, variable ? static_cast<const void*>(&pointer) : text.c_str());
}

void write_integer(hid_t object, const std::string& name, std::int64_t value) {
  const Id space(H5Screate(H5S_SCALAR));
  write_attribute(object, name, H5T_STD_I64LE, space, &value);
}

void write_integers(hid_t object, const std::string& name, const std::vector<std::int64_t>& values,
                    std::size_t columns) {
  std::vector<hsize_t> shape{values.size() / columns};
  if (columns > 1) shape.push_back(columns);
  const Id space(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr));
  write_attribute(object, name, H5T_STD_I64LE, space, values.data());
}

void write_strings(hid_t location, const std::string& name, const std::vector<std::string>& texts, bool scalar,
                   bool variable) {
  std::size_t size = 1;
  for (const std::string& text : texts) size = std::max(size, text.size());
  const Id type(string_type(size, variable));
  const hsize_t count = texts.size();
  const Id space(scalar ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &count, nullptr));
  const Id properties(H5Pcreate(H5P_DATASET_CREATE));
  ok(H5Pset_obj_track_times(properties, false));
  const Id dataset(H5Dcreate2(location, name.c_str(), type, space, H5P_DEFAULT, properties, H5P_DEFAULT));
  std::vector<const char*> pointers;
  std::vector<char> bytes(size * texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    pointers.push_back(texts[i].c_str());
    std::memcpy(bytes.data() + i * size, texts[i].data(), texts[i].size());
  }
  ok(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT,
              variable ? static_cast<const void*>(pointers.data()) : bytes.data()));
}

hid_t creation_properties(const StorageSpec& storage, const std::vector<std::int64_t>& shape) {
  const hid_t properties = ok(H5Pcreate(H5P_DATASET_CREATE));
  ok(H5Pset_obj_track_times(properties, false));
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (storage.chunk.empty() || shape.empty() || empty) return properties;
  std::vector<hsize_t> chunk;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const auto wanted = storage.chunk[std::min(d, storage.chunk.size() - 1)];
    chunk.push_back(std::min<hsize_t>(wanted, static_cast<hsize_t>(shape[d])));
  }
  ok(H5Pset_chunk(properties, static_cast<int>(chunk.size()), chunk.data()));
  if (storage.shuffle) ok(H5Pset_shuffle(properties));
  if (storage.deflate >= 0) ok(H5Pset_deflate(properties, static_cast<unsigned>(storage.deflate)));
  if (storage.fletcher32) ok(H5Pset_fletcher32(properties));
  return properties;
}

hid_t create_dataset(hid_t location, const std::string& name, hid_t type, const std::vector<std::int64_t>& shape,
                     const StorageSpec& storage, const void* data) {
  const std::vector<hsize_t> extents(shape.begin(), shape.end());
  const Id space(shape.empty() ? H5Screate(H5S_SCALAR)
                               : H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr));
  const Id properties(creation_properties(storage, shape));
  const hid_t dataset = ok(H5Dcreate2(location, name.c_str(), type, space, H5P_DEFAULT, properties, H5P_DEFAULT));
  if (std::find(shape.begin(), shape.end(), 0) == shape.end()) {
    ok(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data));
  }
  return dataset;
}

json nested(const std::vector<std::int64_t>& shape, const std::vector<std::int32_t>& ranks, std::size_t depth,
            std::size_t& next) {
  json list = json::array();
  for (std::int64_t i = 0; i < shape[depth]; ++i) {
    list.push_back(depth + 1 == shape.size() ? json(ranks.at(next++)) : nested(shape, ranks, depth + 1, next));
  }
  return list;
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  if (!stream.flush()) throw std::runtime_error("DumpBuilder: cannot write " + path.string());
}

std::vector<std::int64_t> rows_of(const ShardLayout& layout) {
  std::vector<std::int64_t> rows;
  for (std::size_t d = 0; d < layout.ranges().size(); ++d) {
    for (const IndexRange& range : layout.ranges()[d]) {
      rows.insert(rows.end(), {static_cast<std::int64_t>(d), range.begin, range.end});
    }
  }
  return rows;
}

}  // namespace

// ---- one rank's file

class RankFileBuilder {
 public:
  RankFileBuilder(const DumpBuilder& dump, const Manifest& manifest, std::int32_t rank)
      : dump_(dump), storage_(dump.storage_), manifest_(manifest), rank_(rank) {}

  void write(const std::filesystem::path& path) {
    const Id access(H5Pcreate(H5P_FILE_ACCESS));
    const Id file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access));
    write_string(file, "format", "gradclip.dump", storage_.variable_strings);
    write_integer(file, "version", 1);
    write_integer(file, "rank", rank_);
    write_integer(file, "world_size", manifest_.world_size);
    write_integer(file, "step", manifest_.step.value_or(0));
    write_attributes(file, "");
    const Id group(H5Gcreate2(file, storage_.packed ? "packed" : "gradients", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    std::vector<std::string> none;
    for (std::size_t p = 0; p < manifest_.parameters.size(); ++p) {
      const ParameterEntry& entry = manifest_.parameters[p];
      if (!manifest_.holds(entry, rank_)) continue;
      const auto local = dump_.locals_.find({rank_, entry.name});
      if (local == dump_.locals_.end() && dump_.tensors_.count(entry.name) == 0) continue;
      if (local != dump_.locals_.end() && local->second.none) {
        none.push_back(entry.recorded_name());
      } else {
        write_shard(group, p, local == dump_.locals_.end() ? nullptr : &local->second.values,
                    local == dump_.locals_.end() ? std::nullopt : local->second.shape);
      }
    }
    if (storage_.packed) write_packed(group);
    if (!none.empty()) write_strings(file, "none", none, false, storage_.variable_strings);
    write_labels(file);
    if (dump_.unknown_objects_) {
      const Id extra(H5Gcreate2(file, "extra", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
      write_string(extra, "why", "kept", true);
      write_strings(extra, "notes", {"first", "second"}, false, true);
    }
  }

 private:
  struct Packed {
    std::vector<std::byte> bytes;
  };

  std::vector<double> cut(const ParameterEntry& entry, const ShardLayout& layout) const {
    const std::vector<double>& whole = dump_.tensors_.at(entry.name);
    if (whole.size() != entry.elements) throw std::invalid_argument("tensor " + entry.name + " has the wrong size");
    std::vector<double> values;
    for (std::uint64_t i = 0; i < layout.elements(); ++i) {
      const auto index = layout.global_index(i);
      std::size_t position = 0;
      for (std::size_t d = 0; d < index.size(); ++d) {
        position = position * static_cast<std::size_t>(entry.shape[d]) + static_cast<std::size_t>(index[d]);
      }
      values.push_back(whole.at(position));
    }
    return values;
  }

  void write_shard(hid_t group, std::size_t parameter, const std::vector<double>* given,
                   const std::optional<std::vector<std::int64_t>>& given_shape) {
    const ParameterEntry& entry = manifest_.parameters[parameter];
    const std::string dtype(name(entry.dtype));
    const ShardLayout layout = manifest_.layout(entry, rank_);
    const std::vector<std::int64_t> shape = given_shape.value_or(layout.local_shape());
    const std::vector<std::byte> bytes = encode(dtype, given != nullptr ? *given : cut(entry, layout));
    std::uint64_t elements = 1;
    for (const std::int64_t extent : shape) elements *= static_cast<std::uint64_t>(extent);
    if (bytes.size() != elements * bytes_of(dtype)) {
      throw std::invalid_argument("rank " + std::to_string(rank_) + " of " + entry.name +
                                  " has the wrong number of values");
    }
    const std::uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
    const bool slices = storage_.recorded_slices && entry.mesh && elements != 0 && !shape.empty() && !layout.flat();
    if (storage_.packed) {
      auto& packed = packed_[dtype].bytes;
      packed.resize((packed.size() + 63) / 64 * 64);
      json item{{"dtype", dtype}, {"offset", packed.size() / bytes_of(dtype)}, {"shape", shape}};
      if (storage_.checksums) item["xxh3_64"] = hexadecimal(hash);
      if (slices && layout.is_block()) item["global_offset"] = layout.offset();
      if (const auto scale = dump_.scale_inv_.find({rank_, entry.name}); scale != dump_.scale_inv_.end()) {
        item["scale_inv"] = scale->second;
      }
      index_[entry.recorded_name()] = std::move(item);
      packed.insert(packed.end(), bytes.begin(), bytes.end());
      return;
    }
    const Id type(file_type(dtype, storage_.spelling));
    const Id dataset(create_dataset(group, entry.dataset, type, shape, storage_, bytes.data()));
    write_string(dataset, "dtype", dtype, storage_.variable_strings);
    if (slices && layout.is_block()) write_integers(dataset, "global_offset", layout.offset(), 1);
    if (slices && !layout.is_block()) write_integers(dataset, "global_ranges", rows_of(layout), 3);
    const Id scalar(H5Screate(H5S_SCALAR));
    if (storage_.checksums) write_attribute(dataset, "xxh3_64", H5T_STD_U64LE, scalar, &hash);
    if (const auto scale = dump_.scale_inv_.find({rank_, entry.name}); scale != dump_.scale_inv_.end()) {
      write_attribute(dataset, "scale_inv", H5T_IEEE_F32LE, scalar, &scale->second);
    }
    write_attributes(dataset, entry.name);
  }

  void write_packed(hid_t group) {
    for (const auto& [dtype, packed] : packed_) {
      const Id type(file_type(dtype, storage_.spelling));
      const std::vector<std::int64_t> shape{static_cast<std::int64_t>(packed.bytes.size() / bytes_of(dtype))};
      const Id dataset(create_dataset(group, dtype, type, shape, storage_, packed.bytes.data()));
      write_string(dataset, "dtype", dtype, storage_.variable_strings);
    }
    write_strings(group, "index", {index_.dump()}, true, storage_.variable_strings);
  }

  void write_labels(hid_t file) {
    const auto found = dump_.labels_.find(rank_);
    if (found == dump_.labels_.end()) return;
    const Id group(H5Gcreate2(file, "labels", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    for (std::size_t k = 0; k < found->second.size(); ++k) {
      const auto& block = found->second[k];
      const Id dataset(create_dataset(group, std::to_string(k), H5T_STD_I64LE, {block.batch, block.sequence}, storage_,
                                      block.values.data()));
    }
  }

  void write_attributes(hid_t object, const std::string& name) {
    const auto found = dump_.attributes_.find({rank_, name});
    if (found == dump_.attributes_.end()) return;
    for (const auto& [key, value] : found->second) write_string(object, key, value, storage_.variable_strings);
  }

  const DumpBuilder& dump_;
  const StorageSpec& storage_;
  const Manifest& manifest_;
  std::int32_t rank_;
  std::map<std::string, Packed> packed_;
  json index_ = json::object();
};

// ---- the dump

DumpBuilder::DumpBuilder(std::filesystem::path directory, std::int32_t world_size)
    : directory_(std::move(directory)), world_size_(world_size) {}

DumpBuilder& DumpBuilder::mesh(std::string name, std::vector<std::string> dim_names, std::vector<std::int64_t> shape,
                               std::vector<std::int32_t> ranks) {
  meshes_.push_back({std::move(name), std::move(dim_names), std::move(shape), std::move(ranks)});
  return *this;
}

DumpBuilder& DumpBuilder::parameter(ParameterSpec spec) {
  if (spec.mesh.empty() && spec.ranks.empty()) {
    for (std::int32_t rank = 0; rank < world_size_; ++rank) spec.ranks.push_back(rank);
  }
  parameters_.push_back(std::move(spec));
  return *this;
}

DumpBuilder& DumpBuilder::local(std::int32_t rank, const std::string& name, std::vector<double> values,
                                std::optional<std::vector<std::int64_t>> shape) {
  locals_[{rank, name}] = {false, std::move(values), std::move(shape)};
  return *this;
}

DumpBuilder& DumpBuilder::none(std::int32_t rank, const std::string& name) {
  locals_[{rank, name}] = {true, {}, std::nullopt};
  return *this;
}

DumpBuilder& DumpBuilder::tensor(const std::string& name, std::vector<double> values) {
  tensors_[name] = std::move(values);
  return *this;
}

DumpBuilder& DumpBuilder::training(const std::string& key, const std::string& value) {
  training_[key] = value;
  return *this;
}

DumpBuilder& DumpBuilder::member(const std::string& key, const std::string& value) {
  members_[key] = value;
  return *this;
}

DumpBuilder& DumpBuilder::labels(std::int32_t rank, std::int64_t batch, std::int64_t sequence,
                                 std::vector<std::int64_t> values) {
  labels_[rank].push_back({batch, sequence, std::move(values)});
  return *this;
}

DumpBuilder& DumpBuilder::attribute(std::int32_t rank, const std::string& name, const std::string& key,
                                    const std::string& value) {
  attributes_[{rank, name}][key] = value;
  return *this;
}

DumpBuilder& DumpBuilder::scale_inv(std::int32_t rank, const std::string& name, float value) {
  scale_inv_[{rank, name}] = value;
  return *this;
}

DumpBuilder& DumpBuilder::unknown_objects() {
  unknown_objects_ = true;
  return *this;
}

DumpBuilder& DumpBuilder::storage(StorageSpec spec) {
  storage_ = std::move(spec);
  return *this;
}

std::string DumpBuilder::manifest_text() const {
  json root{{"format", "gradclip.dump"},
            {"version", 1},
            {"world_size", world_size_},
            {"rank_file", "rank_{rank:05d}.h5"},
            {"step", 1},
            {"microbatch", nullptr},
            {"state", "before_scale"},
            {"producer", {{"name", "test"}}},
            {"device_mesh", nullptr},
            {"moe_mesh", nullptr}};
  root["meshes"] = json::object();
  for (const Mesh& mesh : meshes_) {
    std::size_t next = 0;
    root["meshes"][mesh.name] = {{"dim_names", mesh.dim_names}, {"ranks", nested(mesh.shape, mesh.ranks, 0, next)}};
  }
  root["parameters"] = json::array();
  for (const ParameterSpec& spec : parameters_) {
    json entry{{"name", spec.name}, {"model_part", spec.model_part}, {"shape", spec.shape}, {"dtype", spec.dtype}};
    if (spec.mesh.empty()) {
      entry["mesh"] = nullptr;
      entry["ranks"] = spec.ranks;
    } else {
      entry["mesh"] = spec.mesh;
      entry["placements"] = spec.placements;
    }
    if (!spec.copies.empty()) entry["copies"] = spec.copies;
    if (spec.expert) entry["expert"] = *spec.expert;
    if (!spec.tied.empty()) entry["tied"] = spec.tied;
    if (!spec.dataset.empty()) entry["dataset"] = spec.dataset;
    if (!spec.gradient_placements.empty()) entry["gradient_placements"] = spec.gradient_placements;
    for (const auto& [rank, range] : spec.flat_ranges) {
      entry["flat_ranges"][std::to_string(rank)] = {range.first, range.second};
    }
    root["parameters"].push_back(std::move(entry));
  }
  root["training"] = json::object();
  for (const auto& [key, value] : training_) root["training"][key] = json::parse(value);
  for (const auto& [key, value] : members_) root[key] = json::parse(value);
  return root.dump();
}

std::filesystem::path DumpBuilder::write() const {
  std::filesystem::create_directories(directory_);
  json root = json::parse(manifest_text());
  const Manifest manifest = parse_manifest(root.dump(), "DumpBuilder's manifest");
  for (std::int32_t rank = 0; rank < world_size_; ++rank) {
    const std::string file = manifest.rank_file_name(rank);
    RankFileBuilder(*this, manifest, rank).write(directory_ / file);
    if (!storage_.checksums) continue;
    const std::string content = file_content(directory_ / file);
    root["files"][file] = {{"bytes", content.size()},
                           {"xxh3_64", hexadecimal(XXH3_64bits(content.data(), content.size()))}};
  }
  const std::string text = root.dump();
  if (storage_.checksums) root["checksum"] = hexadecimal(XXH3_64bits(text.data(), text.size()));
  write_file(directory_ / kManifestName, root.dump(1) + "\n");
  return directory_;
}

std::vector<std::byte> encode(const std::string& dtype, const std::vector<double>& values) {
  const std::size_t size = bytes_of(dtype);
  std::vector<std::byte> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t bits = encode_bits(dtype, values[i]);
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}

std::vector<double> decode(const std::string& dtype, const std::vector<std::byte>& bytes) {
  const std::size_t size = bytes_of(dtype);
  std::vector<double> values;
  for (std::size_t at = 0; at + size <= bytes.size(); at += size) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, bytes.data() + at, size);
    values.push_back(decode_bits(dtype, bits));
  }
  return values;
}

std::vector<double> wide_spread(std::int64_t elements, unsigned seed) {
  std::vector<double> values;
  unsigned state = seed;
  for (std::int64_t i = 0; i < elements; ++i) {
    state = state * 1664525u + 1013904223u;
    const int exponent = static_cast<int>(state >> 20 & 63u) - 40;
    values.push_back(std::ldexp(static_cast<double>(static_cast<int>(state >> 8 & 0xFFu) - 128), exponent));
  }
  return values;
}

}  // namespace gradclip::test
