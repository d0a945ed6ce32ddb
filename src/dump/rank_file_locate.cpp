#include <fmt/format.h>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/rank_file_state.hpp"
#include "gradclip/dump/recorded_layout.hpp"
#include "gradclip/dump/stored_type.hpp"

namespace gradclip {
namespace {

/// A group's links are read all at once when more of them than this are asked for: the library takes some 10 us to find
/// one of many thousands, and 1 us to list it.
constexpr std::size_t kMostSingleLookups = 16;

std::vector<DimensionRange> ranges_of(const hdf5::IntegerList& list, const std::string& where) {
  if (list.shape.size() != 2 || list.shape[1] != 3) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = "its global_ranges are not of the shape [n, 3]",
                                      .expected = "rows of dimension, begin, end",
                                      .advice = {}});
  }
  std::vector<DimensionRange> ranges;
  for (std::size_t i = 0; i < list.values.size(); i += 3) {
    ranges.push_back({list.values[i], {list.values[i + 1], list.values[i + 2]}});
  }
  return ranges;
}

void check_dtype(DType found, DType expected, const std::string& where) {
  if (found == expected) return;
  throw Error(ExitCode::bad_input, {.where = where,
                                    .found = "is of type " + std::string(name(found)),
                                    .expected = std::string(name(expected)) + " (by the manifest)",
                                    .advice = {},
                                    .kind = "dtype"});
}

void check_scale(const std::optional<float>& scale, DType dtype, const std::string& where) {
  if (!scale || size_of(dtype) == 1) return;
  throw Error(ExitCode::bad_input, {.where = where,
                                    .found = "has a scale_inv although it is of type " + std::string(name(dtype)),
                                    .expected = "scale_inv only with float8",
                                    .advice = {},
                                    .kind = "dtype"});
}

void take_slice(RecordedLayout&& recorded, StoredShard& shard) {
  shard.layout = std::move(recorded.layout);
  shard.own_slice = recorded.own_slice;
}

}  // namespace

void RankFile::State::check_storage(const hdf5::Dataset& dataset, const std::string& where) const {
  const std::uint64_t bytes = dataset.elements() * dataset.type.size;
  if (dataset.chunks_written < dataset.chunks && !packed) {
    throw Error(ExitCode::bad_input,
                {.where = where,
                 .found = fmt::format("{} of its {} chunks were written", dataset.chunks_written, dataset.chunks),
                 .expected = {},
                 .advice = "the recorder ended too early; record again",
                 .kind = "unfinished"});
  }
  if (bytes == 0 || dataset.storage != hdf5::Storage::contiguous) return;
  if (!dataset.offset || dataset.stored_bytes < bytes) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = fmt::format("{} of its {} bytes were written",
                                                           dataset.offset ? dataset.stored_bytes : 0, bytes),
                                      .expected = {},
                                      .advice = "the recorder ended too early; record again",
                                      .kind = "unfinished"});
  }
  if (*dataset.offset > file_size || bytes > file_size - *dataset.offset) {
    throw Error(ExitCode::bad_input, {.where = where,
                                      .found = fmt::format("needs bytes {} to {} of the file, which ends at {}",
                                                           *dataset.offset, *dataset.offset + bytes, file_size),
                                      .expected = {},
                                      .advice = "the file is truncated; copy or record it again",
                                      .kind = "unfinished"});
  }
}

void RankFile::State::load_none() {
  if (none) return;
  const auto lock = hdf5::lock_library();
  std::unordered_set<std::string> names;
  const std::string here = where("/none");
  if (hdf5::link_kind(hdf5_file, "none", here) != hdf5::LinkKind::none) {
    const hdf5::Dataset dataset = hdf5::open_dataset(hdf5_file, "none", here);
    check_storage(dataset, here);
    for (std::string& name : hdf5::read_strings(dataset, here)) names.insert(std::move(name));
  }
  none = std::move(names);
}

void RankFile::State::load_index() {
  if (index) return;
  const auto lock = hdf5::lock_library();
  const std::string here = where("/packed/index");
  const hdf5::Dataset dataset = hdf5::open_dataset(packed, "index", here);
  check_storage(dataset, here);
  const std::vector<std::string> texts = hdf5::read_strings(dataset, here);
  if (texts.size() != 1) {
    throw Error(
        ExitCode::bad_input,
        {.where = here, .found = fmt::format("holds {} strings", texts.size()), .expected = "one", .advice = {}});
  }
  index = parse_packed_index(texts[0], here);
}

const RankFile::State::OpenDataset& RankFile::State::packed_dataset(DType dtype) {
  OpenDataset& dataset = packed_datasets[static_cast<std::size_t>(dtype)];
  if (dataset) return dataset;
  const std::string link(name(dtype));
  const std::string here = where("/packed/" + link);
  auto opened = std::make_shared<hdf5::Dataset>(hdf5::open_dataset(packed, link, here));
  check_dtype(stored_dtype(opened->type, hdf5::string_attribute(opened->handle, "dtype", here), here), dtype, here);
  if (opened->shape.size() != 1) {
    throw Error(ExitCode::bad_input, {.where = here,
                                      .found = fmt::format("has {} dimensions", opened->shape.size()),
                                      .expected = "one dimension",
                                      .advice = {}});
  }
  check_storage(*opened, here);
  dataset = std::move(opened);
  return dataset;
}

std::unique_ptr<const StoredShard> RankFile::State::find(std::size_t parameter) {
  const ParameterEntry& entry = manifest.parameters.at(parameter);
  GRADCLIP_CHECK(manifest.holds(entry, rank), "a parameter that the rank does not hold");
  if (!hdf5_file) return none_shard(parameter);
  const std::string dataset = packed ? "/packed/index" : "/gradients/" + entry.dataset;
  const std::string here =
      fmt::format("{}, {} (parameter {}, rank {})", path.string(), printable(dataset), quoted(entry.name), rank);
  load_none();
  const bool is_none = none->count(entry.recorded_name()) != 0;
  const PackedShard* packed_entry = nullptr;
  hdf5::LinkTarget link;
  bool present = false;
  if (packed) {
    load_index();
    if (const auto found = index->find(entry.recorded_name()); found != index->end()) packed_entry = &found->second;
    present = packed_entry != nullptr;
  } else if (gradients) {
    link = look_up(entry.dataset, here);
    present = link.kind != hdf5::LinkKind::none;
  }
  if (present && is_none) {
    throw Error(ExitCode::bad_input, {.where = here,
                                      .found = "is there, and is listed in /none too",
                                      .expected = "one of the two",
                                      .advice = {},
                                      .kind = "extra"});
  }
  if (!present && !is_none) {
    throw Error(ExitCode::bad_input, {.where = here,
                                      .found = "is missing, and is not listed in /none",
                                      .expected = "a gradient, as the manifest gives the parameter to this rank",
                                      .advice = "the recording is incomplete; record again",
                                      .kind = "missing"});
  }
  if (is_none) return none_shard(parameter);
  return packed_entry != nullptr ? find_packed(parameter, *packed_entry, here) : find_dataset(parameter, link, here);
}

std::unique_ptr<const StoredShard> RankFile::State::none_shard(std::size_t parameter) const {
  const ParameterEntry& entry = manifest.parameters.at(parameter);
  auto shard = std::make_unique<StoredShard>();
  shard->none = true;
  shard->dtype = entry.dtype;
  shard->dataset = packed ? "/packed/index" : "/gradients/" + entry.dataset;
  return shard;
}

hdf5::LinkTarget RankFile::State::look_up(const std::string& dataset, const std::string& here) {
  const bool is_path = dataset.find('/') != std::string::npos;
  if (is_path || (!links && ++looked_up <= kMostSingleLookups)) return hdf5::link_target(gradients, dataset, here);
  if (!links) links = hdf5::link_targets(gradients, where("/gradients"));
  const auto found = links->find(dataset);
  return found == links->end() ? hdf5::LinkTarget{} : found->second;
}

std::unique_ptr<const StoredShard> RankFile::State::find_dataset(std::size_t parameter, const hdf5::LinkTarget& link,
                                                                 const std::string& here) {
  const ParameterEntry& entry = manifest.parameters[parameter];
  const auto lock = hdf5::lock_library();
  const hdf5::Dataset dataset = hdf5::open_dataset(gradients, link, here);
  const auto [other, is_new] = parameter_at.emplace(dataset.address, parameter);
  if (!is_new && other->second != parameter) {
    throw Error(ExitCode::bad_input,
                {.where = here,
                 .found = "is the same object as " + quoted(manifest.parameters[other->second].dataset),
                 .expected = "one name for each object",
                 .advice = {}});
  }
  auto shard = std::make_unique<StoredShard>();
  shard->dtype = stored_dtype(dataset.type, hdf5::string_attribute(dataset.handle, "dtype", here), here);
  check_dtype(shard->dtype, entry.dtype, here);
  RecordedSlice slice{dataset.shape, std::nullopt, std::nullopt};
  if (auto offset = hdf5::integer_attribute(dataset.handle, "global_offset", here)) {
    slice.global_offset = std::move(offset->values);
  }
  if (const auto ranges = hdf5::integer_attribute(dataset.handle, "global_ranges", here)) {
    slice.global_ranges = ranges_of(*ranges, here);
  }
  take_slice(recorded_layout(manifest, entry, rank, slice, here), *shard);
  shard->elements = dataset.elements();
  shard->xxh3_64 = hdf5::unsigned_attribute(dataset.handle, "xxh3_64", here);
  if (const auto scale = hdf5::number_attribute(dataset.handle, "scale_inv", here)) {
    shard->scale_inv = static_cast<float>(*scale);
  }
  check_scale(shard->scale_inv, shard->dtype, here);
  shard->dataset = "/gradients/" + entry.dataset;
  check_storage(dataset, here);
  if (dataset.storage == hdf5::Storage::contiguous) shard->file_offset = dataset.offset.value_or(0);
  return shard;
}

std::unique_ptr<const StoredShard> RankFile::State::find_packed(std::size_t parameter, const PackedShard& packed_entry,
                                                                const std::string& here) {
  const ParameterEntry& entry = manifest.parameters[parameter];
  check_dtype(packed_entry.dtype, entry.dtype, here);
  const OpenDataset& dataset = packed_dataset(packed_entry.dtype);
  const std::uint64_t length = dataset->elements();
  if (packed_entry.offset > length || packed_entry.elements > length - packed_entry.offset) {
    throw Error(ExitCode::bad_input,
                {.where = here,
                 .found = fmt::format("elements {} to {} of /packed/{}, which has {}", packed_entry.offset,
                                      packed_entry.offset + packed_entry.elements, name(packed_entry.dtype), length),
                 .expected = "a part of it",
                 .advice = {},
                 .kind = "shape"});
  }
  auto shard = std::make_unique<StoredShard>();
  shard->dtype = packed_entry.dtype;
  const RecordedSlice slice{packed_entry.shape, packed_entry.global_offset, packed_entry.global_ranges};
  take_slice(recorded_layout(manifest, entry, rank, slice, here), *shard);
  shard->elements = packed_entry.elements;
  shard->dataset_offset = packed_entry.offset;
  shard->xxh3_64 = packed_entry.xxh3_64;
  shard->scale_inv = packed_entry.scale_inv;
  check_scale(shard->scale_inv, shard->dtype, here);
  shard->dataset = "/packed/" + std::string(name(packed_entry.dtype));
  if (dataset->storage == hdf5::Storage::contiguous) {
    shard->file_offset = dataset->offset.value_or(0) + packed_entry.offset * size_of(packed_entry.dtype);
  }
  return shard;
}

}  // namespace gradclip
