#include "gradclip/mesh/placement.hpp"

#include "expectations.hpp"
#include "targets.hpp"

namespace gradclip::fuzz {

void placement(std::string_view text) {
  constexpr std::size_t kDimensions = 4;
  reads([&] {
    const Placement read = parse_placement(text, kDimensions);
    require(read.dim >= 0 && read.dim < static_cast<std::int64_t>(kDimensions), "the dimension is the tensor's");
    require(parse_placement(to_string(read), kDimensions) == read, "what is printed reads back");
  });
}

}  // namespace gradclip::fuzz
