#pragma once
// Gradient accumulation replayed: dumps of one step's microbatches become the gradient that the step clips, as FSDP2
// makes it, by synchronisation windows.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "gradclip/backend/backend.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/training/microbatches.hpp"
#include "gradclip/training/reduction_plan.hpp"

namespace gradclip {

struct AccumulateOptions {
  std::optional<Synchronisation> sync;  ///< empty: as recorded, else deferred
  AccumulationTypes types;
};

/// What the replay works with.
struct AccumulateRun {
  const MicrobatchDumps& dumps;  ///< ordered
  Communicator& comm;
  Backend& backend;
  std::size_t threads = 1;
  std::uint64_t memory = 0;                          ///< bytes of the backend's working space to work in
  std::function<void(std::uint64_t)> progress;       ///< called with bytes of input as they are read; may be empty
  std::size_t memory_budget = std::size_t{1} << 30;  ///< bytes of host memory of this process
};

struct AccumulateResult {
  std::vector<bool> ends;             ///< by microbatch: whether a window ends there
  std::uint64_t reduced = 0;          ///< parameters that were averaged or added over ranks
  std::uint64_t bytes = 0;            ///< of gradients in the output, in all rank files
  std::vector<DType> reduce_dtypes;   ///< that were taken, each once
  std::vector<DType> storage_dtypes;  ///< likewise
  bool labelled = false;              ///< whether the output has labels
  std::vector<Finding> findings;      ///< flag_findings(), and `labels-incomplete`: ranks whose labels were left out

  [[nodiscard]] std::uint64_t windows() const noexcept;
};

/// For every rank and window: its gradients added up in the reduce type (GradientAccumulator), then reduced over the
/// ranks where the gradient is Partial and its parameter is not (ReductionPlan), each collective in float64, divided
/// once and rounded to the reduce type; each rank keeps what its parameter's placements give it, rounded to the storage
/// type, and added there to what the windows before it left. Nothing is divided by the number of microbatches. A rank's
/// labels of all microbatches are kept, in their order, unless it has none of some. Collective; the same bytes for any
/// number of processes, threads, any backend and memory. Errors: Error(bad_input): as synchronisation_windows(),
/// plan_reduction() and the input's. Nothing is left of the output.
AccumulateResult accumulate_microbatches(const AccumulateRun& run, const AccumulateOptions& options,
                                         DumpWriter& writer);

}  // namespace gradclip
