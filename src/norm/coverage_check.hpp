#pragma once
// Whether the shards that count are their tensors, each element once.

#include <cstdint>
#include <map>
#include <vector>

#include "gradclip/comm/communicator.hpp"
#include "gradclip/mesh/coverage.hpp"
#include "gradclip/stream/task_list.hpp"

namespace gradclip {

/// Slices that follow from the placements cover their tensor by construction. Looked at is what has its place from
/// elsewhere: ranges of a Flat parameter, and shards of which the recorder's own word decides.
class CoverageCheck {
 public:
  CoverageCheck(const Manifest& manifest, const std::vector<bool>& expert) : manifest_(manifest), expert_(expert) {}

  /// Of this process's recorded ranks, each once.
  void add(const ShardTask& task);

  /// Parameters of which elements are held twice or by nobody, as far as no gradient is None: ascending, the same on
  /// every process. Collective.
  [[nodiscard]] std::vector<std::uint32_t> uncovered(Communicator& comm) const;

 private:
  /// What all shards of the parameter are to be together.
  [[nodiscard]] Coverage expected(const ParameterEntry& entry) const;

  const Manifest& manifest_;
  const std::vector<bool>& expert_;
  /// Of Flat parameters the shards themselves; of others by how much they differ from those of the placements.
  std::map<std::uint32_t, Coverage> held_;
};

}  // namespace gradclip
