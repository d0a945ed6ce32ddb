#include "gradclip/synth/model.hpp"

#include "expectations.hpp"
#include "targets.hpp"

namespace gradclip::fuzz {

void model(std::string_view text) {
  reads([&] { static_cast<void>(parse_model(std::string(text), "model")); });
}

}  // namespace gradclip::fuzz
