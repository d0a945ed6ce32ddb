#include "gradclip/mesh/device_mesh.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "gradclip/base/error.hpp"

namespace gradclip {
namespace {

[[noreturn]] void refuse(const std::string& mesh, std::string found, std::string expected) {
  throw Error(
      ExitCode::bad_input,
      {.where = "mesh " + quoted(mesh), .found = std::move(found), .expected = std::move(expected), .advice = {}});
}

void check_names(const std::string& mesh, const std::vector<std::string>& names, std::size_t dimensions) {
  if (names.size() != dimensions) {
    refuse(mesh, fmt::format("{} dimension names for {} dimensions of ranks", names.size(), dimensions),
           "one name for each dimension");
  }
  std::unordered_map<std::string_view, std::size_t> seen;
  for (std::size_t d = 0; d < names.size(); ++d) {
    if (names[d].empty()) refuse(mesh, fmt::format("dimension {} has an empty name", d), "a name");
    const auto [first, is_new] = seen.emplace(names[d], d);
    if (!is_new) {
      refuse(mesh, fmt::format("dimensions {} and {} are both named {}", first->second, d, quoted(names[d])),
             "a different name for each dimension");
    }
  }
}

void check_shape(const std::string& mesh, const std::vector<std::int64_t>& shape, std::size_t ranks) {
  if (shape.empty()) refuse(mesh, "a mesh without dimensions", "at least one dimension");
  std::int64_t product = 1;
  bool fits = true;
  for (const std::int64_t extent : shape) {
    if (extent < 1) refuse(mesh, fmt::format("shape [{}]", fmt::join(shape, ", ")), "extents of at least 1");
    fits = fits && !__builtin_mul_overflow(product, extent, &product);
  }
  if (!fits || static_cast<std::uint64_t>(product) != ranks) {
    refuse(mesh, fmt::format("shape [{}] with {} ranks", fmt::join(shape, ", "), ranks),
           fits ? fmt::format("{} ranks", product) : "a shape whose product is the number of ranks");
  }
}

}  // namespace

DeviceMesh::DeviceMesh(std::string name, std::vector<std::string> dim_names, std::vector<std::int64_t> shape,
                       std::vector<std::int32_t> ranks)
    : name_(std::move(name)), dim_names_(std::move(dim_names)), shape_(std::move(shape)), ranks_(std::move(ranks)) {
  check_shape(name_, shape_, ranks_.size());
  check_names(name_, dim_names_, shape_.size());
  position_.reserve(ranks_.size());
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] < 0) refuse(name_, fmt::format("rank {}", ranks_[i]), "ranks of at least 0");
    const auto [first, is_new] = position_.emplace(ranks_[i], i);
    if (!is_new) {
      refuse(name_, fmt::format("rank {} stands twice, at positions {} and {}", ranks_[i], first->second, i),
             "each rank at most once");
    }
  }
}

std::optional<std::size_t> DeviceMesh::dimension(std::string_view dim_name) const noexcept {
  const auto found = std::find(dim_names_.begin(), dim_names_.end(), dim_name);
  if (found == dim_names_.end()) return std::nullopt;
  return static_cast<std::size_t>(found - dim_names_.begin());
}

Coordinate DeviceMesh::coordinate(std::int32_t rank) const {
  const auto found = position_.find(rank);
  GRADCLIP_CHECK(found != position_.end(), fmt::format("rank {} is not in mesh {}", rank, quoted(name_)));
  auto rest = static_cast<std::int64_t>(found->second);
  Coordinate coordinate(shape_.size());
  for (std::size_t d = shape_.size(); d-- > 0;) {
    coordinate[d] = rest % shape_[d];
    rest /= shape_[d];
  }
  return coordinate;
}

std::int32_t DeviceMesh::rank_at(std::span<const std::int64_t> coordinate) const {
  GRADCLIP_CHECK(coordinate.size() == shape_.size(), "a coordinate of another mesh");
  std::int64_t position = 0;
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    GRADCLIP_CHECK(coordinate[d] >= 0 && coordinate[d] < shape_[d], "a coordinate outside the mesh");
    position = position * shape_[d] + coordinate[d];
  }
  return ranks_[static_cast<std::size_t>(position)];
}

std::vector<std::int32_t> DeviceMesh::ranks_along(const std::vector<bool>& varies,
                                                  std::span<const std::int64_t> at) const {
  GRADCLIP_CHECK(varies.size() == shape_.size() && at.size() == shape_.size(), "a coordinate of another mesh");
  Coordinate coordinate(at.begin(), at.end());
  std::size_t count = 1;
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    if (!varies[d]) continue;
    coordinate[d] = 0;
    count *= static_cast<std::size_t>(shape_[d]);
  }
  std::vector<std::int32_t> result;
  result.reserve(count);
  while (result.size() < count) {
    result.push_back(rank_at(coordinate));
    for (std::size_t d = shape_.size(); d-- > 0;) {
      if (!varies[d]) continue;
      if (++coordinate[d] < shape_[d]) break;
      coordinate[d] = 0;
    }
  }
  return result;
}

}  // namespace gradclip
