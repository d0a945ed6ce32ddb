#pragma once
// --only where it leaves nothing to do.

namespace gradclip {

/// Errors: Error(usage): --only matches no parameter.
[[noreturn]] void refuse_unmatched_only();

}  // namespace gradclip
