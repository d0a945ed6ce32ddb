#pragma once
// A named n-dimensional array of recorded ranks: what torch.distributed.device_mesh.DeviceMesh holds in .mesh and
// .mesh_dim_names.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gradclip {

/// Position in a mesh, one entry per mesh dimension.
using Coordinate = std::vector<std::int64_t>;

class DeviceMesh {
 public:
  /// @param shape  extent of each dimension, at least one of them and all >= 1; its product is ranks.size().
  /// @param ranks  recorded ranks in row-major order, each >= 0 and at most once.
  /// Errors: Error(bad_input) naming the mesh, for a rank that stands twice, an empty or duplicate dimension name, or a
  /// shape that does not fit.
  DeviceMesh(std::string name, std::vector<std::string> dim_names, std::vector<std::int64_t> shape,
             std::vector<std::int32_t> ranks);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::vector<std::string>& dim_names() const noexcept { return dim_names_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  /// In row-major order of the coordinates (not necessarily ascending).
  [[nodiscard]] const std::vector<std::int32_t>& ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::size_t dimensions() const noexcept { return shape_.size(); }

  /// Position of the dimension with that name.
  [[nodiscard]] std::optional<std::size_t> dimension(std::string_view dim_name) const noexcept;
  [[nodiscard]] bool contains(std::int32_t rank) const noexcept { return position_.count(rank) != 0; }
  /// @pre contains(rank)
  [[nodiscard]] Coordinate coordinate(std::int32_t rank) const;
  /// @pre coordinate within shape
  [[nodiscard]] std::int32_t rank_at(std::span<const std::int64_t> coordinate) const;

  /// The recorded ranks whose coordinates equal `at` in every dimension where varies[d] is false, in row-major order of
  /// the varying coordinates. Contains the rank at `at`.
  [[nodiscard]] std::vector<std::int32_t> ranks_along(const std::vector<bool>& varies,
                                                      std::span<const std::int64_t> at) const;

 private:
  std::string name_;
  std::vector<std::string> dim_names_;
  std::vector<std::int64_t> shape_;
  std::vector<std::int32_t> ranks_;
  std::unordered_map<std::int32_t, std::size_t> position_;
};

}  // namespace gradclip
