#include "gradclip/dump/rank_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <system_error>
#include <utility>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/boxes.hpp"
#include "gradclip/dump/chunk_filters.hpp"
#include "gradclip/dump/chunk_reader.hpp"
#include "gradclip/dump/rank_file_state.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMaxGap = std::size_t{64} << 10;  // between pieces that one system call may read over
constexpr std::int64_t kMaxLabels = std::int64_t{1} << 31;

/// The file itself, symlinks resolved, which must lie in the dump's directory.
std::filesystem::path resolved(const std::filesystem::path& directory, const std::string& name, std::int32_t rank) {
  std::error_code error;
  const std::filesystem::path home = std::filesystem::canonical(directory, error);
  if (error) throw system_error(directory, "find it", error.value());
  std::filesystem::path path = std::filesystem::canonical(home / name, error);
  if (error.value() == ENOENT) {
    throw Error(ExitCode::bad_input, {.where = (directory / name).string(),
                                      .found = fmt::format("does not exist (the file of rank {})", rank),
                                      .expected = {},
                                      .advice = "the dump is incomplete; copy or record it again",
                                      .kind = "missing"});
  }
  if (error) throw system_error(home / name, "find it", error.value());
  const auto [end, unused] = std::mismatch(home.begin(), home.end(), path.begin(), path.end());
  if (end != home.end()) {
    throw Error(ExitCode::bad_input, {.where = (directory / name).string(),
                                      .found = "is a link out of the dump, to " + quoted(path.string()),
                                      .expected = "a file in the dump's directory",
                                      .advice = {}});
  }
  return path;
}

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

RankFile::State::State(const std::filesystem::path& directory, const Manifest& the_manifest, std::int32_t the_rank)
    : manifest(the_manifest),
      rank(the_rank),
      path(resolved(directory, the_manifest.rank_file_name(the_rank), the_rank)),
      id(next_id()),
      file(PosixFile::open_for_reading(path)),
      file_size(file.size()) {
  const auto lock = hdf5::lock_library();
  hdf5_file = hdf5::open_file(path);
  if (hdf5::user_block_size(hdf5_file, path.string()) != 0) {
    throw Error(ExitCode::bad_input, {.where = path.string(),
                                      .found = "begins with a user block",
                                      .expected = "a plain HDF5 file",
                                      .advice = "remove it with h5unjam"});
  }
  check_root_attributes();
  const auto kind = [&](const char* name) { return hdf5::link_kind(hdf5_file, name, where(name)); };
  if (kind("gradients") != hdf5::LinkKind::none) {
    gradients = hdf5::open_group(hdf5_file, "gradients", where("/gradients"));
  }
  if (kind("packed") != hdf5::LinkKind::none) packed = hdf5::open_group(hdf5_file, "packed", where("/packed"));
  if (gradients && packed) {
    throw Error(ExitCode::bad_input, {.where = path.string(),
                                      .found = "has both /gradients and /packed",
                                      .expected = "one of the two layouts",
                                      .advice = {}});
  }
}

RankFile::State::State(const Manifest& the_manifest, std::int32_t the_rank)
    : manifest(the_manifest), rank(the_rank), path(the_manifest.rank_file_name(the_rank)), id(next_id()) {}

void RankFile::State::check_root_attributes() const {
  const std::string here = path.string();
  const auto refuse = [&](const char* name, const std::string& found, const std::string& expected) {
    throw Error(ExitCode::bad_input, {.where = here,
                                      .found = fmt::format("its attribute '{}' is {}", name, found),
                                      .expected = expected,
                                      .advice = {}});
  };
  const auto format = hdf5::string_attribute(hdf5_file, "format", here);
  if (format != "gradclip.dump")
    refuse("format", format ? quoted(format->substr(0, 100)) : "missing", "'gradclip.dump'");
  const auto check = [&](const char* name, std::int64_t expected, const char* of) {
    const auto found = hdf5::integer_attribute(hdf5_file, name, here);
    if (found && found->values.size() == 1 && found->values[0] == expected) return;
    const bool one = found && found->values.size() == 1;
    refuse(name,
           one     ? std::to_string(found->values[0])
           : found ? "a list"
                   : "missing",
           fmt::format("{}{}", expected, of));
  };
  check("version", 1, "");
  check("rank", rank, " (by the file's name)");
  check("world_size", manifest.world_size, " (by the manifest)");
  if (manifest.step) check("step", *manifest.step, " (by the manifest)");
}

// ---- reading

void RankFile::State::read_dataset(const hdf5::Dataset& dataset, std::uint64_t first, std::uint64_t count,
                                   std::byte* to, const std::string& where) const {
  if (count == 0) return;
  const std::size_t size = dataset.type.size;
  if (dataset.storage == hdf5::Storage::contiguous) {
    file.read(*dataset.offset + first * size, to, count * size);
  } else if (dataset.storage == hdf5::Storage::chunked && filters_are_built_in(dataset.filters)) {
    read_chunked(dataset, file_size, id, first, count, to, where);
  } else {
    for (const Box& box : boxes_of_range(dataset.shape, first, count)) {
      hdf5::read_box(dataset, box.start, box.count, to, where);
      to += box.elements() * size;
    }
  }
}

RankFile::State::OpenDataset RankFile::State::filtered_dataset(const StoredShard& shard) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (packed) return packed_dataset(shard.dtype);
  if (last_opened.first != shard.dataset) {
    const std::string here = where(shard.dataset);
    const hdf5::LinkTarget link = look_up(shard.dataset.substr(std::string_view("/gradients/").size()), here);
    last_opened = {shard.dataset, std::make_shared<const hdf5::Dataset>(hdf5::open_dataset(gradients, link, here))};
  }
  return last_opened.second;
}

RankFile::RankFile(const std::filesystem::path& directory, const Manifest& manifest, std::int32_t rank)
    : state_(std::make_unique<State>(directory, manifest, rank)) {}
RankFile::RankFile(const Manifest& manifest, std::int32_t rank) : state_(std::make_unique<State>(manifest, rank)) {}
RankFile::~RankFile() = default;

std::int32_t RankFile::rank() const noexcept {
  return state_->rank;
}
const std::filesystem::path& RankFile::path() const noexcept {
  return state_->path;
}
bool RankFile::packed() const noexcept {
  return static_cast<bool>(state_->packed);
}

const StoredShard& RankFile::locate(std::size_t parameter) const {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  auto& located = state_->located[parameter];
  if (!located) located = state_->find(parameter);
  return *located;
}

void RankFile::leave_out(std::size_t parameter) const {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  state_->located[parameter] = state_->none_shard(parameter);
}

std::vector<std::string> RankFile::surplus() const {
  State& state = *state_;
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.hdf5_file) return {};
  std::unordered_set<std::string_view> datasets, names;
  for (const ParameterEntry& entry : state.manifest.parameters) {
    if (!state.manifest.holds(entry, state.rank)) continue;
    datasets.insert(entry.dataset);
    names.insert(entry.recorded_name());
  }
  for (const ParameterEntry& entry : state.manifest.refused) {
    if (entry.dataset.empty()) return {};  // it may be any of them
    datasets.insert(entry.dataset);
    names.insert(entry.recorded_name());
  }
  std::vector<std::string> surplus;
  if (state.gradients) {
    for (const std::string& link : hdf5::link_names(state.gradients, state.where("/gradients"))) {
      if (datasets.count(link) == 0) surplus.push_back("/gradients/" + link);
    }
  }
  const auto append_names = [&](const char* within, const auto& found, const auto& name_of) {
    std::vector<std::string> unknown;
    for (const auto& one : found) {
      if (names.count(name_of(one)) == 0) unknown.push_back(fmt::format("{}, {}", within, name_of(one)));
    }
    std::sort(unknown.begin(), unknown.end());
    surplus.insert(surplus.end(), unknown.begin(), unknown.end());
  };
  if (state.packed) {
    state.load_index();
    append_names("/packed/index", *state.index, [](const auto& entry) -> const std::string& { return entry.first; });
  }
  state.load_none();
  append_names("/none", *state.none, [](const auto& name) -> const std::string& { return name; });
  return surplus;
}

void RankFile::read(const StoredShard& shard, std::uint64_t first, std::uint64_t count, std::byte* to) const {
  GRADCLIP_CHECK(!shard.none && first <= shard.elements && count <= shard.elements - first,
                 "a read outside of the shard");
  if (count == 0) return;
  const std::size_t size = size_of(shard.dtype);
  if (shard.file_offset) {
    state_->file.read(*shard.file_offset + first * size, to, count * size);
  } else {
    const auto dataset = state_->filtered_dataset(shard);
    state_->read_dataset(*dataset, shard.dataset_offset + first, count, to, state_->where(shard.dataset));
  }
}

void RankFile::read(const std::vector<Piece>& pieces) const {
  std::vector<std::byte> scratch;  // what lies between two pieces
  std::vector<PosixFile::Target> targets;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  const auto flush = [&] {
    if (!targets.empty()) state_->file.read(begin, std::exchange(targets, {}));
  };
  for (const Piece& piece : pieces) {
    const StoredShard& shard = *piece.shard;
    if (piece.count == 0 || !shard.file_offset) {
      read(shard, piece.first, piece.count, piece.to);
      continue;
    }
    GRADCLIP_CHECK(!shard.none && piece.first <= shard.elements && piece.count <= shard.elements - piece.first,
                   "a read outside of the shard");
    const std::size_t size = size_of(shard.dtype);
    const std::uint64_t offset = *shard.file_offset + piece.first * size;
    if (targets.empty() || offset < end || offset - end > kMaxGap) {
      flush();
      begin = offset;
    } else if (offset > end) {
      scratch.resize(kMaxGap);
      targets.push_back({scratch.data(), offset - end});
    }
    targets.push_back({piece.to, piece.count * size});
    end = offset + piece.count * size;
  }
  flush();
}

// ---- labels

hdf5::Dataset RankFile::State::open_labels(const hdf5::Handle& group, std::size_t microbatch) const {
  const std::string here = where(fmt::format("/labels/{}", microbatch));
  hdf5::Dataset dataset = hdf5::open_dataset(group, std::to_string(microbatch), here);
  const auto refuse = [&](const std::string& found) {
    throw Error(ExitCode::bad_input,
                {.where = here, .found = found, .expected = "little-endian int64 [batch, sequence]", .advice = {}});
  };
  const hdf5::ElementType& type = dataset.type;
  if (type.type_class != hdf5::ElementType::Class::integer || type.size != 8 || !type.is_signed ||
      !type.little_endian) {
    refuse("is stored as " + describe(type));
  }
  if (dataset.shape.size() != 2) refuse(fmt::format("has {} dimensions", dataset.shape.size()));
  if (dataset.elements() > static_cast<std::uint64_t>(kMaxLabels)) refuse("has more than 2^31 labels");
  check_storage(dataset, here);
  return dataset;
}

std::vector<StoredLabels> RankFile::labels() const {
  const State& state = *state_;
  std::vector<StoredLabels> microbatches;
  if (!state.hdf5_file) return microbatches;
  const auto lock = hdf5::lock_library();
  const std::string here = state.where("/labels");
  if (hdf5::link_kind(state.hdf5_file, "labels", here) == hdf5::LinkKind::none) return microbatches;
  const hdf5::Handle group = hdf5::open_group(state.hdf5_file, "labels", here);
  const std::size_t count = hdf5::link_names(group, here).size();
  for (std::size_t k = 0; k < count; ++k) {
    const hdf5::Dataset dataset = state.open_labels(group, k);
    microbatches.push_back({dataset.shape[0], dataset.shape[1]});
  }
  return microbatches;
}

void RankFile::read_labels(std::size_t microbatch, std::uint64_t first, std::uint64_t count, std::int64_t* to) const {
  const State& state = *state_;
  const auto lock = hdf5::lock_library();
  const hdf5::Handle group = hdf5::open_group(state.hdf5_file, "labels", state.where("/labels"));
  const hdf5::Dataset dataset = state.open_labels(group, microbatch);
  GRADCLIP_CHECK(first <= dataset.elements() && count <= dataset.elements() - first, "a read outside of the labels");
  state.read_dataset(dataset, first, count, reinterpret_cast<std::byte*>(to),
                     state.where(fmt::format("/labels/{}", microbatch)));
}

}  // namespace gradclip
