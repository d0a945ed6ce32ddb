#include "gradclip/analysis/merge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "gradclip/analysis/block_values.hpp"
#include "gradclip/analysis/diverged_copies.hpp"
#include "gradclip/base/dispatch.hpp"
#include "gradclip/base/element.hpp"
#include "gradclip/base/worker_pool.hpp"
#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/output_file.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kHashedAtOnce = std::size_t{256} << 10;

/// What a person should hear of some of a tensor's elements. Trivially copyable: it travels.
struct Oddities {
  std::uint64_t tensor = 0;
  std::uint64_t none = 0;      ///< written as 0
  std::uint64_t overflow = 0;  ///< combined values that are finite and are not in the written type
  std::uint64_t values = 0;    ///< of a tied weight: hash of its elements and their places
};

struct TensorChecksum {
  std::uint64_t tensor = 0;
  std::uint64_t xxh3_64 = 0;
};

/// Combined values as elements of a type. @return how many became infinite or NaN
std::uint64_t round_values(const BlockValues& values, std::uint64_t count, DType dtype, std::vector<std::byte>& to) {
  to.resize(count * size_of(dtype));
  std::uint64_t overflows = 0;
  with_dtype(dtype, [&]<DType D>() {
    for (std::uint64_t i = 0; i < count; ++i) {
      std::uint64_t bits;
      std::memcpy(&bits, values.bytes.data() + i * sizeof bits, sizeof bits);
      const BitsOf<D> rounded = convert_element<D, DType::float64>(bits, 1.0F);
      overflows += is_finite<DType::float64>(bits) && !is_finite<D>(rounded) ? 1 : 0;
      std::memcpy(to.data() + i * sizeof rounded, &rounded, sizeof rounded);
    }
  });
  return overflows;
}

/// The finaliser of SplitMix64.
std::uint64_t mixed(std::uint64_t bits) noexcept {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

/// A sum over elements, so that it does not matter how a tensor is cut into blocks.
std::uint64_t hash_of_values(const std::byte* values, std::uint64_t count, std::size_t size, std::uint64_t position) {
  std::uint64_t hash = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, values + i * size, size);
    hash += mixed(mixed(position + i + 1) + bits);
  }
  return hash;
}

class Merger {
 public:
  Merger(DiffRun& run, const MergePlan& plan, MergedOutput& output)
      : run_(run), plan_(plan), tensors_(plan.tensors), output_(output), copies_(run.comm), odd_(tensors_.size()) {
    for (const MergedTensor& tensor : tensors_) {
      ComparedPair& pair = pairs_.emplace_back();
      pair.name = tensor.name;
      pair.a = tensor.tensor;
      pair.shape = tensor.tensor.shape;
    }
    hashed_.resize(tensors_.size());
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (has_stand_in(i)) hashed_[i] = hashed_[*tensors_[i].stand_in] = 1;
    }
  }

  void write() {
    const bool first = run_.comm.process() == 0;
    offsets_.assign(tensors_.size(), 0);
    if (first) offsets_ = output_.create(tensors_);
    run_.comm.broadcast(bytes_of(std::span<std::uint64_t>(offsets_)), 0);
    try {
      file_.emplace(PosixFile::open_for_writing(output_.file(), false));
      std::vector<std::size_t> written;
      for (std::size_t i = 0; i < tensors_.size(); ++i) {
        if (tensors_[i].written() || has_stand_in(i)) written.push_back(i);
      }
      // Where copies are not the same byte for byte, all of them are looked at, and the tensor is written once more.
      const std::set<std::size_t> suspects = write_blocks(written, /*all_copies=*/false);
      for (const std::size_t tensor : suspects) odd_[tensor] = {};
      if (!suspects.empty()) {
        static_cast<void>(write_blocks({suspects.begin(), suspects.end()}, /*all_copies=*/true));
      }
      // The others read what this one wrote. Alone, there is more to do while the device is at work.
      if (run_.comm.size() > 1) file_->sync();
      file_.reset();
    } catch (const Error&) {
      rethrow_unless_given_up(output_.file());
    }
    run_.comm.barrier();
    std::vector<std::uint64_t> checksums;
    if (output_.takes_checksums()) checksums = written_checksums();
    run_.dumps[0]->require_unchanged();
    run_.comm.barrier();  // nobody publishes what another process knows to be mixed
    if (first) output_.finish(tensors_, checksums);
    run_.comm.barrier();
  }

  /// Collective.
  [[nodiscard]] std::vector<Finding> findings() {
    std::vector<Oddities> mine;
    for (std::size_t i = 0; i < odd_.size(); ++i) {
      odd_[i].tensor = i;
      if (odd_[i].none != 0 || odd_[i].overflow != 0 || odd_[i].values != 0) mine.push_back(odd_[i]);
    }
    std::fill(odd_.begin(), odd_.end(), Oddities{});
    for (const Oddities& each : gather_values(run_.comm, std::span<const Oddities>(mine))) {
      odd_[each.tensor].none += each.none;
      odd_[each.tensor].overflow += each.overflow;
      odd_[each.tensor].values += each.values;
    }
    std::vector<NoneShard> my_none;
    for (const NoneShard& shard : plan_.none) {
      if (odd_[shard.parameter].none != 0) my_none.push_back(shard);
    }
    std::vector<std::vector<std::int32_t>> none_ranks(tensors_.size());
    for (const NoneShard& shard : gather_values(run_.comm, std::span<const NoneShard>(my_none))) {
      none_ranks[shard.parameter].push_back(shard.rank);
    }
    std::vector<CopyComparison::PairFinding> copies = copies_.findings(pairs_, /*two_dumps=*/false);
    auto copy = copies.begin();
    std::vector<Finding> findings;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      for (; copy != copies.end() && copy->pair == i; ++copy) findings.push_back(std::move(copy->finding));
      if (odd_[i].none != 0) {
        std::sort(none_ranks[i].begin(), none_ranks[i].end());
        findings.push_back({.kind = "partly-none",
                            .parameter = tensors_[i].name,
                            .ranks = std::move(none_ranks[i]),
                            .index = {},
                            .value = static_cast<double>(odd_[i].none),
                            .message = fmt::format("{} of {} elements are None, and are written as 0", odd_[i].none,
                                                   tensors_[i].tensor.elements)});
      }
      if (odd_[i].overflow != 0) {
        findings.push_back({.kind = "overflow",
                            .parameter = tensors_[i].name,
                            .ranks = {},
                            .index = {},
                            .value = static_cast<double>(odd_[i].overflow),
                            .message = fmt::format("{} of {} combined values are beyond {}", odd_[i].overflow,
                                                   tensors_[i].tensor.elements, name(tensors_[i].dtype))});
      }
      if (has_stand_in(i) && !holds_the_same(i)) {
        findings.push_back({.kind = "tied-differ",
                            .parameter = tensors_[i].name,
                            .ranks = holders_of(i),
                            .index = {},
                            .value = {},
                            .message = "another entry of the tied weight is written, which has other values"});
      }
    }
    return findings;
  }

 private:
  /// Whether the tensor has values and is not written for another one.
  [[nodiscard]] bool has_stand_in(std::size_t i) const { return tensors_[i].stand_in && !tensors_[i].none; }
  [[nodiscard]] std::vector<std::int32_t> holders_of(std::size_t i) const {
    const Manifest& manifest = run_.dumps[0]->manifest();
    return manifest.holders(manifest.parameters[tensors_[i].tensor.parameter]);
  }
  [[nodiscard]] bool holds_the_same(std::size_t i) const {
    const MergedTensor& written = tensors_[*tensors_[i].stand_in];
    return tensors_[i].tensor.shape == written.tensor.shape && tensors_[i].dtype == written.dtype &&
           odd_[i].values == odd_[*tensors_[i].stand_in].values;
  }

  /// One for each worker.
  struct Workspace {
    BlockAssembly assembly;
    BlockValues values;
    std::vector<std::byte> rounded;
  };

  /// Collective. @return the tensors that were not written as a whole because copies of them are not the same, byte for
  /// byte: on every process the same ones
  std::set<std::size_t> write_blocks(const std::vector<std::size_t>& tensors, bool all_copies) {
    BlockExchange exchange(run_, pairs_, all_copies);
    std::vector<Workspace> workspaces(run_.threads);
    std::vector<std::uint64_t> my_suspects;
    exchange.for_each_round(tensors, [&](std::span<const Block> round) {
      const std::vector<BlockPieces> pieces = exchange.collect(round);
      std::vector<std::size_t> mine;
      for (std::size_t i = 0; i < round.size(); ++i) {
        if (round[i].owner != run_.comm.process()) continue;
        if (all_copies || copies_agree(pieces[i][0])) {
          mine.push_back(i);
        } else {
          my_suspects.push_back(round[i].pair);
        }
      }
      if (all_copies) copies_.begin(round.size());
      std::vector<Oddities> odd(mine.size());
      parallel_for(mine.size(), run_.threads, [&](std::size_t index, std::size_t worker) {
        const std::size_t i = mine[index];
        odd[index] = write_block(round[i], pieces[i][0], all_copies, workspaces[worker]);
        if (!all_copies) return;
        const BlockSide side = side_of(round[i], pieces[i][0], /*as_stored=*/false);
        copies_.compare(i, round[i], 0, side, nullptr, workspaces[worker].assembly);
      });
      for (std::size_t index = 0; index < mine.size(); ++index) {
        Oddities& of_tensor = odd_[round[mine[index]].pair];
        of_tensor.none += odd[index].none;
        of_tensor.overflow += odd[index].overflow;
        of_tensor.values += odd[index].values;
      }
      if (all_copies) copies_.collect(round);
    });
    const std::vector<std::uint64_t> suspects = gather_values(run_.comm, std::span<const std::uint64_t>(my_suspects));
    return {suspects.begin(), suspects.end()};
  }

  [[nodiscard]] BlockSide side_of(const Block& block, const std::vector<ComparedPiece>& pieces, bool as_stored) const {
    return {*run_.dumps[0], tensors_[block.pair].tensor, pieces, block.elements, run_.progress, as_stored};
  }

  Oddities write_block(const Block& block, const std::vector<ComparedPiece>& pieces, bool all_copies,
                       Workspace& workspace) {
    const MergedTensor& tensor = tensors_[block.pair];
    const BlockValues& values = workspace.values;
    workspace.assembly.assemble(side_of(block, pieces, tensor.dtype == tensor.tensor.dtype),
                                all_copies ? std::nullopt : std::optional<std::uint32_t>(0), workspace.values);
    Oddities odd;
    odd.none = static_cast<std::uint64_t>(std::count(values.none.begin(), values.none.end(), 1));
    const std::byte* from = values.bytes.data();
    if (!tensor.tensor.steps.empty()) {
      odd.overflow = round_values(values, block.elements, tensor.dtype, workspace.rounded);
      from = workspace.rounded.data();
    }
    const std::size_t size = size_of(tensor.dtype);
    if (hashed_[block.pair] != 0) odd.values = hash_of_values(from, block.elements, size, block.begin);
    if (tensor.written()) file_->write(offset_of(block), from, block.elements * size);
    return odd;
  }

  [[nodiscard]] std::uint64_t offset_of(const Block& block) const {
    return offsets_[block.pair] + block.begin * size_of(tensors_[block.pair].dtype);
  }

  /// Of each tensor's bytes as they are in the file, 0 for those that are not written: each process reads a part of it.
  /// Collective.
  [[nodiscard]] std::vector<std::uint64_t> written_checksums() {
    std::uint64_t total = 0;
    for (const MergedTensor& tensor : tensors_) total += tensor.bytes();
    std::vector<std::size_t> mine;
    std::uint64_t before = 0;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const double middle = static_cast<double>(before) + static_cast<double>(tensors_[i].bytes()) / 2.0;
      const double share = total == 0 ? 0.0 : middle / static_cast<double>(total);
      const auto process = static_cast<int>(share * run_.comm.size());
      before += tensors_[i].bytes();
      if (std::min(process, run_.comm.size() - 1) == run_.comm.process() && tensors_[i].written()) mine.push_back(i);
    }
    std::vector<TensorChecksum> my_checksums(mine.size());
    try {
      const PosixFile file = PosixFile::open_for_reading(output_.file());
      std::vector<std::vector<std::byte>> buffers(run_.threads);
      parallel_for(mine.size(), run_.threads, [&](std::size_t index, std::size_t worker) {
        const std::size_t i = mine[index];
        std::vector<std::byte>& buffer = buffers[worker];
        buffer.resize(kHashedAtOnce);
        Checksum checksum;
        for (std::uint64_t at = 0; at < tensors_[i].bytes(); at += kHashedAtOnce) {
          const std::size_t count = std::min<std::uint64_t>(kHashedAtOnce, tensors_[i].bytes() - at);
          file.read(offsets_[i] + at, buffer.data(), count);
          checksum.update(buffer.data(), count);
        }
        my_checksums[index] = {i, checksum.digest()};
      });
    } catch (const Error&) {
      rethrow_unless_given_up(output_.file());
    }
    std::vector<std::uint64_t> checksums(tensors_.size(), 0);
    for (const TensorChecksum& each : gather_values(run_.comm, std::span<const TensorChecksum>(my_checksums))) {
      checksums[each.tensor] = each.xxh3_64;
    }
    return checksums;
  }

  DiffRun& run_;
  const MergePlan& plan_;
  const std::vector<MergedTensor>& tensors_;
  MergedOutput& output_;
  std::vector<ComparedPair> pairs_;  // one for each tensor
  CopyComparison copies_;
  std::vector<std::uint64_t> offsets_;
  std::optional<OutputFile> file_;
  std::vector<Oddities> odd_;  // by tensor
  std::vector<char> hashed_;   // by tensor: whether its values are compared with another one's
};

}  // namespace

MergeResult merge_dump(DiffRun& run, const NamePattern* only, MergedOutput& output) {
  MergePlan plan = plan_merge(run, only, output.format());
  MergeResult result;
  try {
    Merger merger(run, plan, output);
    merger.write();
    result.findings = merger.findings();
  } catch (...) {
    // The process that fails may be the last one alive: it removes what all of them have written.
    output.discard();
    throw;
  }
  result.tensors = std::move(plan.tensors);
  return result;
}

}  // namespace gradclip
