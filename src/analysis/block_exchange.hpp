#pragma once
// Ranges of global tensors on their way from the recorded ranks' files to the processes that compare them.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gradclip/analysis/compared_pair.hpp"
#include "gradclip/analysis/global_runs.hpp"
#include "gradclip/comm/communicator.hpp"
#include "gradclip/dump/dump_reader.hpp"
#include "gradclip/stream/work_plan.hpp"

namespace gradclip {

/// Two dumps and what they are compared with, or one that is merged. Borrowed; built by the composition root.
struct DiffRun {
  std::array<DumpReader*, 2> dumps;  ///< A, B; B is null where there is one alone, and then pairs have no b
  Communicator& comm;
  std::size_t threads = 1;
  std::size_t memory_budget = std::size_t{1} << 30;  ///< bytes of each process, the same in all
  std::function<void(std::uint64_t)> progress;  ///< called with bytes that were read, from any thread; may be empty
};

/// Elements [begin, begin + elements) of a pair's global tensors: a multiple of what is summed at once, but for the
/// end.
struct Block {
  std::size_t pair = 0;
  std::uint64_t begin = 0;
  std::uint64_t elements = 0;
  int owner = 0;                     ///< the process that compares it
  std::uint64_t summed_at_once = 0;  ///< elements, kChunkElements at most
};

/// What a recorded rank holds of a block. Trivially copyable: it travels.
struct PieceHeader {
  std::uint32_t block = 0;  ///< index into the round
  std::uint32_t side = 0;
  std::int32_t rank = 0;
  std::uint32_t copy = 0;
  std::uint32_t addend = 0;
  std::uint32_t runs = 0;
  float scale_inv = 1.0F;
  std::uint32_t none = 0;  ///< 1: the gradient is None
  std::uint64_t elements = 0;
  std::uint64_t fingerprint = 0;  ///< of bytes and scale_inv, where there are copies
};

struct ComparedPiece {
  PieceHeader header;
  std::vector<StridedRun> runs;      ///< from the block's begin
  std::uint64_t first = 0;           ///< in the local shard, where this process has it
  const std::byte* bytes = nullptr;  ///< in memory; null: to be read by this process, None, or a fingerprint only
};

/// The pieces of one block by side, by addend, then copy, then rank.
using BlockPieces = std::array<std::vector<ComparedPiece>, 2>;

/// Those of a side that are of the addend, and of the copy if one is named.
[[nodiscard]] std::span<const ComparedPiece> pieces_of(const std::vector<ComparedPiece>& pieces, std::uint32_t addend,
                                                       std::optional<std::uint32_t> copy);

/// Whether every copy among a side's pieces is what the counted copy is, as far as fingerprints tell.
[[nodiscard]] bool copies_agree(const std::vector<ComparedPiece>& pieces);

/// Rounds of blocks, the same on every process.
class BlockExchange {
 public:
  /// @param all_copies  whether copies come with their values; else with a fingerprint, but for the one that counts
  BlockExchange(DiffRun& run, const std::vector<ComparedPair>& pairs, bool all_copies);

  /// Blocks of these pairs, in order, cut into rounds of bounded memory: visit(round) for each. Collective.
  void for_each_round(std::span<const std::size_t> pairs,
                      const std::function<void(std::span<const Block>)>& visit) const;

  /// The pieces of this process's blocks, by block of the round (empty for others'). What this process does not read
  /// itself has arrived; what it does is left where it lies, unless it lies in more rank files than can be open at
  /// once: then it was read file by file, since block by block each file would be opened for each block. What is in
  /// memory is valid until the next call. Collective.
  [[nodiscard]] std::vector<BlockPieces> collect(std::span<const Block> round);

 private:
  struct Outgoing {
    int to = 0;
    ComparedPiece piece;
    std::byte* at = nullptr;  ///< where its bytes are to be read to
  };
  /// A rank file that this process reads.
  struct Source {
    std::uint32_t side = 0;
    std::int32_t rank = 0;
    bool keep = false;  ///< its pieces of this process's blocks are read into memory
    std::vector<Outgoing> outgoing = {};
    std::vector<std::byte> kept = {};
  };

  [[nodiscard]] const ComparedTensor& tensor(const Block& block, std::uint32_t side) const {
    return side == 0 ? *pairs_[block.pair].a : *pairs_[block.pair].b;
  }
  /// How many elements of the pair are summed at once, so that a block may be as few: a chunk, or a part of one where
  /// there are many copies or addends. The budget has no say in it, since rounding follows from it.
  [[nodiscard]] std::uint64_t summed_elements(const ComparedPair& pair) const;
  [[nodiscard]] std::uint64_t block_elements(const ComparedPair& pair) const;
  [[nodiscard]] std::size_t bytes_per_element(const ComparedPair& pair) const;
  [[nodiscard]] std::size_t pieces_per_block(const ComparedPair& pair, std::uint64_t elements) const;
  [[nodiscard]] int owner(const ComparedPair& pair, std::uint64_t begin, std::uint64_t elements) const;
  std::shared_ptr<const RankFile> describe(std::span<const Block> round, Source& source) const;
  void describe_tensor(std::span<const Block> round, std::size_t first, std::size_t last, const RankFile& file,
                       Source& source) const;
  void read_what_stays(std::span<const Block> round, const RankFile& file, Source& source) const;
  [[nodiscard]] std::size_t bytes_of_piece(std::span<const Block> round, const ComparedPiece& piece) const;
  void read(std::span<const Block> round, const RankFile& file, Outgoing& outgoing,
            std::vector<std::byte>& scratch) const;
  void receive(std::span<const Block> round, std::span<const std::size_t> send_counts,
               std::vector<BlockPieces>& pieces);

  DiffRun& run_;
  const std::vector<ComparedPair>& pairs_;
  bool all_copies_;
  std::vector<WorkPlan> plans_;  // by side
  std::vector<Source> sources_;
  std::vector<std::byte> sent_, arrived_;
};

}  // namespace gradclip
