#include "gradclip/training/step_labels.hpp"

#include <algorithm>
#include <memory>

namespace gradclip {

StepLabels::StepLabels(const MicrobatchDumps& dumps, std::int32_t rank) : dumps_(dumps), rank_(rank) {
  std::size_t with_labels = 0;
  for (std::size_t d = 0; d < dumps.size(); ++d) {
    const std::vector<StoredLabels> labels = dumps[d]->rank_file(rank)->labels();
    with_labels += labels.empty() ? 0 : 1;
    for (std::size_t k = 0; k < labels.size(); ++k) {
      shapes_.push_back(labels[k]);
      places_.push_back({d, k});
    }
  }
  incomplete_ = with_labels != 0 && with_labels != dumps.size();
  if (!incomplete_) return;
  shapes_.clear();
  places_.clear();
}

void StepLabels::write(const PosixFile& file, const std::vector<std::uint64_t>& offsets) const {
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 16;  // labels that are held at a time
  std::vector<std::int64_t> piece;
  for (std::size_t k = 0; k < places_.size(); ++k) {
    const std::shared_ptr<const RankFile> from = dumps_[places_[k].dump]->rank_file(rank_);
    for (std::uint64_t first = 0; first < shapes_[k].elements(); first += kPiece) {
      piece.resize(std::min(kPiece, shapes_[k].elements() - first));
      from->read_labels(places_[k].microbatch, first, piece.size(), piece.data());
      file.write(offsets[k] + first * sizeof(std::int64_t), piece.data(), piece.size() * sizeof(std::int64_t));
    }
  }
}

}  // namespace gradclip
