#pragma once
// A rank's check as the bytes of a pipe.

#include <optional>
#include <string>
#include <string_view>

#include "gradclip/dump/manifest.hpp"
#include "gradclip/verify/packing.hpp"
#include "gradclip/verify/rank_check.hpp"

namespace gradclip {

/// What came of a check in another process.
struct CheckReply {
  ExitCode code = ExitCode::done;  ///< of the error that ended it
  ErrorText error;                 ///< its kind is empty
  RankCheck check;                 ///< if the code is done
};

void put(std::string& to, const Fault& fault);
[[nodiscard]] Fault take_fault(Taker& taker);

[[nodiscard]] std::string packed(const CheckReply& reply);

/// Empty for what packed() never makes of this manifest: the other process may have run on after a file had damaged its
/// memory.
[[nodiscard]] std::optional<CheckReply> unpacked_reply(std::string_view bytes, const Manifest& manifest,
                                                       std::int32_t rank);

}  // namespace gradclip
