#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/boxes.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/dump/output_file.hpp"
#include "gradclip/dump/rank_file_state.hpp"
#include "gradclip/dump/read_back.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kMostAllocatedGap = std::uint64_t{8} << 20;  // between datasets
constexpr std::uint64_t kUnitBytes = std::uint64_t{64} << 20;        // most that waits for HDF5 in one rank file
constexpr std::array<std::string_view, 1> kChecksumAttribute{"xxh3_64"};

/// Where one parameter's elements go, and how far they have come.
struct Target {
  std::string link;  // of the dataset, in its group
  std::vector<std::int64_t> shape;
  std::uint64_t elements = 0;
  std::size_t size = 0;                      // of an element
  std::uint64_t address = 0;                 // of the dataset (not packed)
  std::optional<std::uint64_t> file_offset;  // empty: written through HDF5
  std::uint64_t dataset_offset = 0;          // elements before the shard (packed)
  std::uint64_t unit = 0;                    // elements handed to HDF5 at once
  std::uint64_t done = 0;                    // elements hashed
  std::optional<Checksum> checksum;          // while it is under way
  std::uint64_t digest = 0;
};

/// Whole rows of chunks at once, so that the library deflates each chunk once and in one order, however the pieces are
/// cut.
std::uint64_t unit_elements(const hdf5::Dataset& dataset) {
  if (dataset.storage != hdf5::Storage::chunked) return std::max<std::uint64_t>(dataset.elements(), 1);
  std::uint64_t row = dataset.type.size;
  for (std::size_t d = 1; d < dataset.shape.size(); ++d) row *= static_cast<std::uint64_t>(dataset.shape[d]);
  row = std::max<std::uint64_t>(row, 1);
  const std::uint64_t rows = std::clamp<std::uint64_t>(kUnitBytes / row, 1, dataset.chunk[0]);
  return std::max<std::uint64_t>(rows * row / dataset.type.size, 1);
}

}  // namespace

struct RankFileWriter::State {
  State(std::filesystem::path the_path, std::shared_ptr<const RankFile> the_input, RankFile::State& the_source,
        const Manifest& the_manifest)
      : path(std::move(the_path)), input(std::move(the_input)), source(the_source), manifest(the_manifest) {}

  std::filesystem::path path;
  std::shared_ptr<const RankFile> input;
  RankFile::State& source;  // of input
  const Manifest& manifest;
  hdf5::Handle hdf5_file;
  hdf5::Handle group;  // gradients or packed
  std::optional<OutputFile> file;
  std::vector<std::pair<std::size_t, const StoredShard*>> shards;  // of the input, None left out
  std::vector<std::size_t> order;                                  // parameters as they lie in the file
  std::unordered_map<std::size_t, Target> targets;
  std::unordered_map<std::string, hdf5::Dataset> packed;  // by link
  bool finished = false;

  std::mutex mutex;
  std::condition_variable turn;
  std::exception_ptr cause;  // of cancellation; null: none

  // Those written through HDF5, one after another.
  std::vector<std::size_t> filtered;  // parameters
  std::size_t next_filtered = 0;
  hdf5::Handle open_dataset;
  std::vector<std::byte> pending;

  void create();
  void copy_root();
  void create_gradients();
  void create_gradient(std::size_t parameter);
  void create_packed();
  void copy_unknown_packed(const std::string& name, const PackedShard& entry);
  void copy_surplus(const hdf5::Handle& from, const std::string& group_path, const std::set<std::string>& known);
  void add_target(std::size_t parameter, Target target);
  void allocate() const;

  void write_contiguous(Target& target, std::uint64_t first, std::uint64_t count, const std::byte* from);
  void write_filtered(Target& target, std::size_t parameter, std::uint64_t first, std::uint64_t count,
                      const std::byte* from);
  void hand_over(const Target& target, std::uint64_t elements, std::uint64_t first);
  template <class Condition>
  void wait_for_turn(Condition&& is_mine);
  void hash(Target& target, std::uint64_t count, const std::byte* from);
  void write_checksums();
  [[nodiscard]] std::string where(const std::string& within) const { return path.string() + ", " + within; }
};

// ---- creation

void RankFileWriter::State::create() {
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    if (!manifest.holds(manifest.parameters[p], source.rank)) continue;
    const StoredShard& shard = input->locate(p);
    if (!shard.none) shards.emplace_back(p, &shard);
  }
  const std::lock_guard<std::mutex> guard(source.mutex);  // always before the library's lock
  std::uint64_t link_bytes = 0;
  for (const auto& [parameter, shard] : shards) link_bytes += hdf5::link_bytes(manifest.parameters[parameter].dataset);
  hdf5_file = hdf5::create_file(path, link_bytes);
  file.emplace(PosixFile::open_for_writing(path, false));
  copy_root();
  if (source.packed) {
    create_packed();
  } else if (source.gradients) {
    create_gradients();
  }
  allocate();
}

/// Everything but the gradients, as it is.
void RankFileWriter::State::copy_root() {
  hdf5::copy_attributes(source.hdf5_file, hdf5_file, {}, source.path.string());
  copy_surplus(source.hdf5_file, "", {"gradients", "packed"});
}

void RankFileWriter::State::copy_surplus(const hdf5::Handle& from, const std::string& group_path,
                                         const std::set<std::string>& known) {
  for (const std::string& name : hdf5::link_names(from, source.where(group_path))) {
    if (known.count(name) != 0) continue;
    hdf5::copy_object(from, name, group ? group : hdf5_file, source.where(group_path + "/" + printable(name)));
  }
}

void RankFileWriter::State::create_gradients() {
  group = hdf5::create_group(hdf5_file, "gradients", where("/gradients"));
  hdf5::copy_attributes(source.gradients, group, {}, source.where("/gradients"));
  std::set<std::string> known;
  for (const auto& [parameter, shard] : shards) {
    known.insert(manifest.parameters[parameter].dataset);
    create_gradient(parameter);
  }
  copy_surplus(source.gradients, "/gradients", known);
}

void RankFileWriter::State::create_gradient(std::size_t parameter) {
  const std::string& link = manifest.parameters[parameter].dataset;
  const std::string here = where("/gradients/" + printable(link));
  const std::string there = source.where("/gradients/" + printable(link));
  const hdf5::Dataset like = hdf5::open_dataset(source.gradients, source.look_up(link, there), there);
  const hdf5::Dataset made = hdf5::create_dataset_like(group, link, like, here);
  hdf5::copy_attributes(like.handle, made.handle, kChecksumAttribute, here);
  hdf5::write_unsigned_attribute(made.handle, "xxh3_64", 0, here);
  Target target;
  target.link = link;
  target.address = made.address;
  target.shape = made.shape;
  target.elements = made.elements();
  target.size = made.type.size;
  if (made.storage == hdf5::Storage::contiguous) {
    target.file_offset = made.offset.value_or(0);
  } else {
    target.unit = unit_elements(made);
  }
  add_target(parameter, std::move(target));
}

void RankFileWriter::State::create_packed() {
  group = hdf5::create_group(hdf5_file, "packed", where("/packed"));
  hdf5::copy_attributes(source.packed, group, {}, source.where("/packed"));
  std::set<std::string> known{"index"};
  std::set<std::string> names;
  for (const auto& [parameter, shard] : shards) {
    const std::string link(name(shard->dtype));
    if (known.insert(link).second) {
      const hdf5::Dataset& like = *source.packed_dataset(shard->dtype);
      hdf5::Dataset made = hdf5::create_dataset_like(group, link, like, where("/packed/" + link));
      hdf5::copy_attributes(like.handle, made.handle, {}, where("/packed/" + link));
      packed.emplace(link, std::move(made));
    }
    const hdf5::Dataset& made = packed.at(link);
    Target target;
    target.link = link;
    target.shape = made.shape;
    target.elements = shard->elements;
    target.size = size_of(shard->dtype);
    target.dataset_offset = shard->dataset_offset;
    if (made.storage == hdf5::Storage::contiguous) {
      target.file_offset = made.offset.value_or(0) + shard->dataset_offset * target.size;
    } else {
      target.unit = unit_elements(made);
    }
    add_target(parameter, std::move(target));
    names.insert(manifest.parameters[parameter].recorded_name());
  }
  copy_surplus(source.packed, "/packed", known);
  source.load_index();
  for (const auto& [name, entry] : *source.index) {
    if (names.count(name) == 0) copy_unknown_packed(name, entry);
  }
}

/// A part of a packed dataset that no parameter of the manifest claims.
void RankFileWriter::State::copy_unknown_packed(const std::string& unknown, const PackedShard& entry) {
  const auto made = packed.find(std::string(name(entry.dtype)));
  if (made == packed.end() || entry.elements == 0) return;  // the dataset was copied whole
  const hdf5::Dataset& dataset = *source.packed_dataset(entry.dtype);
  if (made->second.storage != hdf5::Storage::contiguous || entry.offset > dataset.elements() ||
      entry.elements > dataset.elements() - entry.offset) {
    throw Error(ExitCode::bad_input,
                {.where = source.where("/packed/index"),
                 .found = "the entry " + quoted(unknown) + " belongs to no parameter and cannot be kept",
                 .expected = "entries of parameters that the manifest gives to this rank",
                 .advice = {}});
  }
  const std::size_t size = size_of(entry.dtype);
  std::vector<std::byte> block(std::min<std::uint64_t>(entry.elements * size, std::uint64_t{1} << 20));
  for (std::uint64_t at = 0; at < entry.elements * size; at += block.size()) {
    const std::size_t count = std::min<std::uint64_t>(block.size(), entry.elements * size - at);
    source.file.read(*dataset.offset + entry.offset * size + at, block.data(), count);
    file->write(*made->second.offset + entry.offset * size + at, block.data(), count);
  }
}

void RankFileWriter::State::add_target(std::size_t parameter, Target target) {
  order.push_back(parameter);
  if (!target.file_offset && target.elements != 0) filtered.push_back(parameter);
  if (target.elements == 0) target.digest = xxh3_64(nullptr, 0);
  targets.emplace(parameter, std::move(target));
}

void RankFileWriter::State::allocate() const {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  for (const std::size_t parameter : order) {
    const Target& target = targets.at(parameter);
    if (!target.file_offset || target.elements == 0) continue;
    const std::uint64_t bytes = target.elements * target.size;
    if (*target.file_offset < end || *target.file_offset - end > kMostAllocatedGap) {
      file->allocate(begin, end - begin);
      begin = *target.file_offset;
    }
    end = *target.file_offset + bytes;
  }
  file->allocate(begin, end - begin);
}

// ---- writing

template <class Condition>
void RankFileWriter::State::wait_for_turn(Condition&& is_mine) {
  std::unique_lock<std::mutex> lock(mutex);
  turn.wait(lock, [&] { return cause || is_mine(); });
  if (cause) std::rethrow_exception(cause);
}

/// Only the thread whose turn it is comes here; `done` is what the others look at.
void RankFileWriter::State::hash(Target& target, std::uint64_t count, const std::byte* from) {
  if (!target.checksum) target.checksum.emplace();
  target.checksum->update(from, count * target.size);
  const bool complete = target.done + count == target.elements;
  if (complete) {
    target.digest = target.checksum->digest();
    target.checksum.reset();
  }
}

void RankFileWriter::State::write_contiguous(Target& target, std::uint64_t first, std::uint64_t count,
                                             const std::byte* from) {
  file->write(*target.file_offset + first * target.size, from, count * target.size);
  wait_for_turn([&] { return target.done == first; });
  hash(target, count, from);
  const std::lock_guard<std::mutex> lock(mutex);
  target.done += count;
  turn.notify_all();
}

void RankFileWriter::State::write_filtered(Target& target, std::size_t parameter, std::uint64_t first,
                                           std::uint64_t count, const std::byte* from) {
  wait_for_turn([&] { return filtered[next_filtered] == parameter && target.done == first; });
  hash(target, count, from);
  const std::string here = where(target.link);
  if (!open_dataset) {
    open_dataset = hdf5::reopen_dataset(group, target.link, kUnitBytes, here);
  }
  std::uint64_t handed = first - pending.size() / target.size;
  pending.insert(pending.end(), from, from + count * target.size);
  const bool complete = first + count == target.elements;
  while (pending.size() >= target.unit * target.size || (complete && !pending.empty())) {
    const std::uint64_t elements = std::min<std::uint64_t>(target.unit, pending.size() / target.size);
    hand_over(target, elements, handed);
    pending.erase(pending.begin(), pending.begin() + static_cast<std::ptrdiff_t>(elements * target.size));
    handed += elements;
  }
  if (complete) open_dataset.close(here);
  const std::lock_guard<std::mutex> lock(mutex);
  target.done += count;
  if (complete) ++next_filtered;
  turn.notify_all();
}

void RankFileWriter::State::hand_over(const Target& target, std::uint64_t elements, std::uint64_t first) {
  const std::byte* from = pending.data();
  for (const Box& box : boxes_of_range(target.shape, target.dataset_offset + first, elements)) {
    hdf5::write_box(open_dataset, box.start, box.count, from, where(target.link));
    from += box.elements() * target.size;
  }
}

void RankFileWriter::State::write_checksums() {
  const auto lock = hdf5::lock_library();
  if (source.packed) {
    std::unordered_map<std::string, std::uint64_t> checksums;
    for (const auto& [parameter, target] : targets) {
      checksums.emplace(manifest.parameters[parameter].recorded_name(), target.digest);
    }
    const std::string here = source.where("/packed/index");
    const hdf5::Dataset like = hdf5::open_dataset(source.packed, "index", here);
    const std::string text = hdf5::read_strings(like, here).at(0);
    hdf5::create_text_like(group, "index", like, rewritten_packed_index(text, checksums), where("/packed/index"));
    return;
  }
  for (const std::size_t parameter : order) {
    const Target& target = targets.at(parameter);
    const std::string here = where("/gradients/" + printable(target.link));
    const hdf5::Handle dataset = hdf5::reopen_object(group, target.address, here);
    hdf5::write_unsigned_attribute(dataset, "xxh3_64", target.digest, here);
  }
}

// ---- the interface

RankFileWriter::RankFileWriter(std::filesystem::path path, std::shared_ptr<const RankFile> input,
                               const Manifest& manifest) {
  RankFile::State& source = *input->state_;
  state_ = std::make_unique<State>(std::move(path), std::move(input), source, manifest);
  try {
    state_->create();
  } catch (...) {
    State& state = *state_;
    const bool created = static_cast<bool>(state.hdf5_file);
    const std::filesystem::path made = state.path;
    state_.reset();
    std::error_code ignored;
    if (created) std::filesystem::remove(made, ignored);
    rethrow_unless_given_up(made);
  }
}

RankFileWriter::~RankFileWriter() {
  if (!state_) return;
  const bool finished = state_->finished;
  const std::filesystem::path path = state_->path;
  state_.reset();
  std::error_code ignored;
  if (!finished) std::filesystem::remove(path, ignored);
}

void RankFileWriter::write(std::size_t parameter, std::uint64_t first, std::uint64_t count, const std::byte* from) {
  if (count == 0) return;
  State& state = *state_;
  const auto found = state.targets.find(parameter);
  GRADCLIP_CHECK(found != state.targets.end(), "a parameter that is not in the file");
  Target& target = found->second;
  GRADCLIP_CHECK(first <= target.elements && count <= target.elements - first, "a write outside of the shard");
  try {
    if (target.file_offset) {
      state.write_contiguous(target, first, count, from);
    } else {
      state.write_filtered(target, parameter, first, count, from);
    }
  } catch (...) {
    cancel(std::current_exception());  // whoever waits for this piece would wait for ever
    throw;
  }
}

void RankFileWriter::cancel(std::exception_ptr why) noexcept {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->cause) state_->cause = std::move(why);
  state_->turn.notify_all();
}

FileRecord RankFileWriter::finish(bool read_back) {
  State& state = *state_;
  for (const auto& [parameter, target] : state.targets) {
    GRADCLIP_CHECK(target.done == target.elements, "not every element of a shard was written");
  }
  try {
    state.write_checksums();
    const std::string here = state.path.string();
    state.packed.clear();
    state.group.close(here);
    state.hdf5_file.close(here);
    const FileChecksum checksum = checksum_of_file(state.path);
    state.file->sync();
    const FileRecord record{.bytes = checksum.bytes, .xxh3_64 = checksum.xxh3_64};
    if (read_back) require_written(record);
    state.finished = true;
    return record;
  } catch (const Error&) {
    rethrow_unless_given_up(state.path);
  }
}

void RankFileWriter::require_written(const FileRecord& record) const {
  try {
    gradclip::require_written(state_->path, record);
    const RankFile file(state_->path.parent_path(), state_->manifest, state_->source.rank);
    for (const auto& [parameter, target] : state_->targets) {
      gradclip::require_written(file, file.locate(parameter), target.digest);
    }
  } catch (const Error& error) {
    throw Error(ExitCode::resources, error.text());  // no input of the user's is bad
  }
}

}  // namespace gradclip
