#pragma once
// Gradient accumulation replayed: dumps of one step's microbatches become the gradient that the step clips, as FSDP2
// with deferred synchronisation makes it (one reduction, at the last microbatch).

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/dump/dump_writer.hpp"

namespace gradclip {

struct AccumulateOptions {
  std::optional<DType> reduce_dtype;   ///< empty: float32, or float64 for float64 gradients
  std::optional<DType> storage_dtype;  ///< empty: the reduce type
};

struct AccumulateResult {
  std::uint64_t microbatches = 0;
  std::uint64_t reduced = 0;  ///< parameters that were averaged or added over ranks
  std::uint64_t bytes = 0;    ///< of gradients in the output, in all rank files
};

/// In the order of their recorded index. Errors: Error(bad_input) naming the dump and what does not fit: no microbatch,
/// an index that is missing or stands twice, another number of dumps than microbatches, other parameters, meshes,
/// placements, step or world size than the first's.
void order_microbatches(std::vector<std::unique_ptr<DumpReader>>& dumps);

/// For every rank: its gradients of all microbatches added up in the reduce type (GradientAccumulator), then reduced
/// over the ranks of each mesh dimension where the gradient is Partial(avg) or Partial(sum) and its parameter is not,
/// the last dimension first, each time in float64 and rounded to the reduce type; each rank keeps what its parameter's
/// placements give it, rounded to the storage type. Nothing is divided by the number of microbatches. Collective.
/// @param dumps     ordered
/// @param progress  called with bytes of input as they are read; may be empty
/// Errors: Error(bad_input) for placements that no window ends in: Flat, another reduction, plain tensors whose ranks
/// were to be reduced. Nothing is left of the output.
AccumulateResult accumulate_microbatches(const std::vector<std::unique_ptr<DumpReader>>& dumps, Communicator& comm,
                                         Backend& backend, const AccumulateOptions& options, std::size_t threads,
                                         DumpWriter& writer, const std::function<void(std::uint64_t)>& progress);

}  // namespace gradclip
