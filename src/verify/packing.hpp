#pragma once
// Numbers and texts as bytes for another process of the same program. Inside this room.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "gradclip/base/error.hpp"

namespace gradclip {

inline void put(std::string& to, std::int64_t number) {
  char bytes[sizeof number];
  std::memcpy(bytes, &number, sizeof number);
  to.append(bytes, sizeof number);
}

inline void put(std::string& to, std::string_view text) {
  put(to, static_cast<std::int64_t>(text.size()));
  to += text;
}

/// Takes apart what put() made, in its order. Errors: Error(bug) where the bytes end early.
class Taker {
 public:
  explicit Taker(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] bool done() const noexcept { return bytes_.empty(); }
  std::int64_t number() {
    std::int64_t number = 0;
    GRADCLIP_CHECK(bytes_.size() >= sizeof number, "what another process sent ends early");
    std::memcpy(&number, bytes_.data(), sizeof number);
    bytes_.remove_prefix(sizeof number);
    return number;
  }
  std::string text() {
    const auto size = static_cast<std::uint64_t>(number());
    GRADCLIP_CHECK(size <= bytes_.size(), "what another process sent ends early");
    std::string text(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return text;
  }

 private:
  std::string_view bytes_;
};

}  // namespace gradclip
