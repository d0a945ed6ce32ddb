#include "gradclip/dump/new_rank_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/hdf5.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/read_back.hpp"

namespace gradclip {

struct NewRankFile::State {
  std::filesystem::path path;
  std::vector<std::string> links;
  std::vector<std::uint64_t> addresses;  // of the datasets, as objects
  std::vector<std::uint64_t> offsets;    // of their data
  std::vector<std::uint64_t> bytes;
  std::vector<std::uint64_t> label_offsets;
  std::uint64_t begin = 0, end = 0;  // of all data in the file; end 0: none yet

  /// @return where it begins
  std::uint64_t place(const std::optional<std::uint64_t>& offset, std::uint64_t size) {
    if (!offset) return 0;
    begin = end == 0 ? *offset : std::min(begin, *offset);
    end = std::max(end, *offset + size);
    return *offset;
  }

  [[nodiscard]] std::string where(const std::string& link) const {
    return path.string() + ", /gradients/" + printable(link);
  }
};

NewRankFile::NewRankFile(std::filesystem::path path, const NewRankFileHead& head,
                         const std::vector<NewGradient>& gradients, const std::vector<std::string>& none,
                         const std::vector<StoredLabels>& labels)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.path = std::move(path);
  const std::string here = state.path.string();
  const auto lock = hdf5::lock_library();
  std::uint64_t link_bytes = 0;
  for (const NewGradient& gradient : gradients) link_bytes += hdf5::link_bytes(gradient.dataset);
  hdf5::Handle file = hdf5::create_file(state.path, link_bytes);
  hdf5::write_text_attribute(file, "format", "gradclip.dump", here);
  hdf5::write_integer_attribute(file, "version", 1, here);
  hdf5::write_integer_attribute(file, "rank", head.rank, here);
  hdf5::write_integer_attribute(file, "world_size", head.world_size, here);
  if (head.step) hdf5::write_integer_attribute(file, "step", *head.step, here);
  hdf5::Handle gradients_group = hdf5::create_group(file, "gradients", here + ", /gradients");
  for (const NewGradient& gradient : gradients) {
    const std::string where = state.where(gradient.dataset);
    const hdf5::Dataset made =
        hdf5::create_gradient(gradients_group, gradient.dataset, gradient.dtype, gradient.shape, where);
    if (gradient.scale_inv) hdf5::write_float_attribute(made.handle, "scale_inv", *gradient.scale_inv, where);
    hdf5::write_unsigned_attribute(made.handle, "xxh3_64", 0, where);
    state.links.push_back(gradient.dataset);
    state.addresses.push_back(made.address);
    state.bytes.push_back(made.elements() * size_of(gradient.dtype));
    state.offsets.push_back(state.place(made.offset, state.bytes.back()));
  }
  if (!none.empty()) hdf5::create_texts(file, "none", none, here + ", /none");
  if (!labels.empty()) {
    const hdf5::Handle group = hdf5::create_group(file, "labels", here + ", /labels");
    for (std::size_t k = 0; k < labels.size(); ++k) {
      const hdf5::Dataset made = hdf5::create_labels(group, std::to_string(k), {labels[k].batch, labels[k].sequence},
                                                     fmt::format("{}, /labels/{}", here, k));
      state.label_offsets.push_back(state.place(made.offset, labels[k].elements() * sizeof(std::int64_t)));
    }
  }
  gradients_group.close(here);
  file.close(here);
  if (state.end > state.begin) {
    PosixFile::open_for_writing(state.path, false).allocate(state.begin, state.end - state.begin);
  }
}

NewRankFile::~NewRankFile() = default;
NewRankFile::NewRankFile(NewRankFile&&) noexcept = default;
NewRankFile& NewRankFile::operator=(NewRankFile&&) noexcept = default;

const std::filesystem::path& NewRankFile::path() const noexcept {
  return state_->path;
}

const std::vector<std::uint64_t>& NewRankFile::offsets() const noexcept {
  return state_->offsets;
}

const std::vector<std::uint64_t>& NewRankFile::label_offsets() const noexcept {
  return state_->label_offsets;
}

FileRecord NewRankFile::finish(std::span<const std::uint64_t> checksums, bool read_back) {
  State& state = *state_;
  GRADCLIP_CHECK(checksums.size() == state.links.size(), "one checksum for each gradient");
  hdf5::Handle made = hdf5::reopen_file(state.path);
  for (std::size_t i = 0; i < checksums.size(); ++i) {
    const hdf5::Handle dataset = hdf5::reopen_object(made, state.addresses[i], state.where(state.links[i]));
    hdf5::write_unsigned_attribute(dataset, "xxh3_64", checksums[i], state.where(state.links[i]));
  }
  made.close(state.path.string());
  const FileChecksum checksum = checksum_of_file(state.path);
  const PosixFile file = PosixFile::open_for_writing(state.path, false);
  file.sync();
  const FileRecord record{.bytes = checksum.bytes, .xxh3_64 = checksum.xxh3_64};
  if (read_back) {
    require_written(state.path, record);
    for (std::size_t i = 0; i < checksums.size(); ++i) {
      require_written(file, state.offsets[i], state.bytes[i], "/gradients/" + printable(state.links[i]), checksums[i]);
    }
  }
  return record;
}

}  // namespace gradclip
