#pragma once
// A dump in four lines, for tests:
//
//   DumpBuilder dump(directory, 2);
//   dump.mesh("tp", {"tp"}, {2}, {0, 1});
//   dump.parameter({.name = "w", .shape = {4}, .mesh = "tp", .placements = {"Shard(0)"}}).tensor("w", {1, 2, 3, 4});
//   dump.write();
//
// Rank files are made with HDF5's own functions, not with the room that is tested.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "temporary_directory.hpp"

namespace gradclip::test {

struct ParameterSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  std::string dtype = "float32";
  std::string mesh = {};  ///< empty: a plain tensor
  std::vector<std::string> placements = {};
  std::vector<std::int32_t> ranks = {};  ///< plain tensors; empty: all ranks
  std::string copies = {};               ///< empty: undeclared
  std::optional<bool> expert = {};
  std::string tied = {};
  std::vector<std::string> gradient_placements = {};
  std::map<std::int32_t, std::pair<std::int64_t, std::int64_t>> flat_ranges = {};
  std::int64_t model_part = 0;
  std::string dataset = {};
};

/// How types that HDF5 does not know are stored.
enum class Spelling { raw_bits, custom_float, opaque };

struct StorageSpec {
  bool packed = false;
  std::vector<std::uint64_t> chunk =
      {};            ///< clipped to each dataset's shape, the last extent repeated; empty: contiguous
  int deflate = -1;  ///< level; -1: no deflate
  bool shuffle = false;
  bool fletcher32 = false;
  Spelling spelling = Spelling::raw_bits;
  bool checksums = true;        ///< of shards, files and manifest
  bool recorded_slices = true;  ///< global_offset, global_ranges
  bool variable_strings = false;
};

class DumpBuilder {
 public:
  DumpBuilder(std::filesystem::path directory, std::int32_t world_size);

  DumpBuilder& mesh(std::string name, std::vector<std::string> dim_names, std::vector<std::int64_t> shape,
                    std::vector<std::int32_t> ranks);
  DumpBuilder& parameter(ParameterSpec spec);
  /// A rank's local gradient. Values must be exactly representable in the parameter's type (or NaN, infinite).
  /// The shape is the layout's unless it is given.
  DumpBuilder& local(std::int32_t rank, const std::string& name, std::vector<double> values,
                     std::optional<std::vector<std::int64_t>> shape = std::nullopt);
  DumpBuilder& none(std::int32_t rank, const std::string& name);
  /// Cuts a global tensor (row-major) into the shards of all ranks that hold it; later calls of local() or none() win.
  DumpBuilder& tensor(const std::string& name, std::vector<double> values);
  /// @param value  JSON text: training("max_grad_norm", "1.0")
  DumpBuilder& training(const std::string& key, const std::string& value);
  /// A member of the manifest itself, as JSON text: state, step, microbatch, device_mesh, moe_mesh, unknown keys.
  DumpBuilder& member(const std::string& key, const std::string& value);
  DumpBuilder& labels(std::int32_t rank, std::int64_t batch, std::int64_t sequence, std::vector<std::int64_t> values);
  /// A string attribute of a rank's dataset, of its file (empty name).
  DumpBuilder& attribute(std::int32_t rank, const std::string& name, const std::string& key, const std::string& value);
  DumpBuilder& scale_inv(std::int32_t rank, const std::string& name, float value);
  /// An object that the format does not know: /extra/notes in every rank file.
  DumpBuilder& unknown_objects();
  DumpBuilder& storage(StorageSpec spec);

  /// Makes the directory and all files. @return the directory
  std::filesystem::path write() const;

  /// The manifest's text without "files" and "checksum".
  [[nodiscard]] std::string manifest_text() const;

 private:
  struct Mesh {
    std::string name;
    std::vector<std::string> dim_names;
    std::vector<std::int64_t> shape;
    std::vector<std::int32_t> ranks;
  };
  struct Local {
    bool none = false;
    std::vector<double> values;
    std::optional<std::vector<std::int64_t>> shape;
  };
  struct Labels {
    std::int64_t batch, sequence;
    std::vector<std::int64_t> values;
  };
  friend class RankFileBuilder;

  std::filesystem::path directory_;
  std::int32_t world_size_;
  std::vector<Mesh> meshes_;
  std::vector<ParameterSpec> parameters_;
  std::map<std::pair<std::int32_t, std::string>, Local> locals_;
  std::map<std::string, std::vector<double>> tensors_;
  std::map<std::string, std::string> training_;
  std::map<std::string, std::string> members_;
  std::map<std::int32_t, std::vector<Labels>> labels_;
  std::map<std::pair<std::int32_t, std::string>, std::map<std::string, std::string>> attributes_;
  std::map<std::pair<std::int32_t, std::string>, float> scale_inv_;
  bool unknown_objects_ = false;
  StorageSpec storage_;
};

/// Values in the little-endian bytes of a type (PyTorch's name of it). Throws std::invalid_argument for a value that
/// the type cannot represent exactly.
[[nodiscard]] std::vector<std::byte> encode(const std::string& dtype, const std::vector<double>& values);
/// The inverse.
[[nodiscard]] std::vector<double> decode(const std::string& dtype, const std::vector<std::byte>& bytes);

/// Numbers of many magnitudes and of both signs, so that the order of a sum shows: multiples of 2^-40, up to 2^30.
[[nodiscard]] std::vector<double> wide_spread(std::int64_t elements, unsigned seed);

}  // namespace gradclip::test
