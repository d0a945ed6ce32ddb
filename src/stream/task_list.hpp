#pragma once
// The shards of some parameters on some recorded ranks, located and ready for the stream.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "gradclip/stream/shard_stream.hpp"

namespace gradclip {

/// What happens to the elements of a parameter's shard on a recorded rank. A recorded scale_inv is added by
/// list_tasks().
using FactorsOf = std::function<ScaleFactors(std::size_t parameter, std::int32_t rank)>;

/// Parameters [begin, end).
struct ParameterRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// A recorded rank's shard whose gradient was None.
struct NoneShard {
  std::size_t parameter = 0;
  std::int32_t rank = 0;
};

struct TaskList {
  std::vector<ShardTask> tasks;       ///< rank-major, in manifest order within a rank
  std::vector<ScaleFactors> factors;  ///< one per task
  std::vector<NoneShard> none;
};

/// Opens the ranks' files and locates their shards of the parameters; also opens, and so checks, the file of a rank
/// that holds none of them. Errors: as RankFile.
/// @param ranks  ascending
/// @param model_part  only parameters of this one
[[nodiscard]] TaskList list_tasks(DumpReader& dump, ParameterRange parameters, std::span<const std::int32_t> ranks,
                                  const FactorsOf& factors_of, std::optional<std::int64_t> model_part = std::nullopt);

/// The same of one recorded rank.
[[nodiscard]] inline TaskList list_tasks(DumpReader& dump, ParameterRange parameters, std::int32_t rank,
                                         const FactorsOf& factors_of) {
  return list_tasks(dump, parameters, std::span(&rank, 1), factors_of);
}

/// Recorded ranks that a pass works on together: enough to keep every worker busy, few enough that their open files
/// stay far below any limit.
inline constexpr std::size_t kRanksPerBatch = 64;

}  // namespace gradclip
