#pragma once
// Label tokens of a step, from the labels that its ranks recorded: what a token-weighted loss is divided by.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gradclip/base/finding.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {

inline constexpr std::int64_t kIgnoreIndex = -100;  ///< as PyTorch's cross_entropy and the reference have it

struct LabelCounts {
  std::uint64_t microbatches = 0;
  std::uint64_t sequences = 0;
  std::uint64_t elements = 0;
  std::uint64_t label_tokens = 0;  ///< labels other than the ignored one
  std::uint64_t tail_padding = 0;  ///< ignored labels after a sequence's last other one

  LabelCounts& operator+=(const LabelCounts& other) noexcept;
};

/// Counts the labels of rows that come in pieces of any length, in row-major order.
class LabelCounter {
 public:
  LabelCounter(std::int64_t sequence, std::int64_t ignore_index) noexcept
      : sequence_(static_cast<std::uint64_t>(sequence)), ignore_index_(ignore_index) {}

  void add(std::span<const std::int64_t> labels) noexcept;
  [[nodiscard]] std::uint64_t label_tokens() const noexcept { return label_tokens_; }
  [[nodiscard]] std::uint64_t tail_padding() const noexcept { return tail_padding_; }  ///< of whole rows

 private:
  std::uint64_t sequence_;
  std::int64_t ignore_index_;
  std::uint64_t column_ = 0;
  std::uint64_t run_ = 0;  // ignored labels since the last other one of the row
  std::uint64_t label_tokens_ = 0;
  std::uint64_t tail_padding_ = 0;
};

/// Reference: count_tail_padding(labels, ignore_label). Ignored labels at the end of each row, added up: those between
/// others do not count, a row of nothing else counts whole.
/// @param labels  row-major, of shape [batch, sequence]
/// Errors: Error(bad_input) for other than two dimensions, and for another number of labels than the shape has.
[[nodiscard]] std::uint64_t count_tail_padding(std::span<const std::int64_t> labels,
                                               std::span<const std::int64_t> shape,
                                               std::int64_t ignore_label = kIgnoreIndex);

struct LabelOptions {
  std::int64_t ignore_index = kIgnoreIndex;
  /// Dimensions of the device mesh along which ranks have sequences of their own; empty: dp, dp_replicate, dp_shard, as
  /// far as there are.
  std::vector<std::string> dp_axes;
  std::string pp_axis_name = "pp";
};

/// What one recorded rank holds.
struct RankLabels {
  std::int32_t rank = 0;
  std::uint64_t coordinate = 0;  ///< on the data-parallel axes, row-major
  bool counted = true;           ///< false: a copy of what a lower rank of the coordinate holds
  LabelCounts counts;
};

struct LabelTokens {
  std::int64_t ignore_index = kIgnoreIndex;
  std::vector<std::string> dp_axes;        ///< that were taken; empty without a mesh: every rank has its own
  std::uint64_t coordinates = 0;           ///< on these axes
  std::uint64_t coordinates_counted = 0;   ///< with labels
  std::uint64_t coordinates_short = 0;     ///< of these: with labels of fewer microbatches than others
  LabelCounts total;                       ///< microbatches: of the rank with most
  std::vector<LabelCounts> by_microbatch;  ///< of all coordinates
  std::vector<RankLabels> ranks;           ///< that hold labels, ascending
  std::vector<Finding> findings;

  /// Whether every coordinate has labels of every microbatch.
  [[nodiscard]] bool complete() const noexcept { return coordinates_counted == coordinates && coordinates_short == 0; }
};

/// Reference: num_label_tokens of the training recipe: labels other than the ignored one over all microbatches, once
/// for each data-parallel coordinate. There the lowest rank that holds labels counts; the others' have to be equal, and
/// every coordinate has to have labels of as many microbatches, else that is a finding. Collective; every process gets
/// the same result.
/// Errors: Error(bad_input) for labels that are damaged or on a rank outside the mesh, and where the mesh does not tell
/// which ranks hold the same sequences; Error(usage) for dp_axes that the mesh does not have.
[[nodiscard]] LabelTokens count_label_tokens(DumpReader& dump, Communicator& comm, const WorkPlan& plan,
                                             const LabelOptions& options);

}  // namespace gradclip
