#pragma once
// A block of a global tensor put together from the pieces that recorded ranks hold of it.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gradclip/analysis/block_exchange.hpp"
#include "gradclip/analysis/difference.hpp"

namespace gradclip {

/// One side of a block with its pieces. Borrowed.
struct BlockSide {
  DumpReader& dump;
  const ComparedTensor& tensor;
  const std::vector<ComparedPiece>& pieces;
  std::uint64_t elements = 0;
  const std::function<void(std::uint64_t)>& progress;
  bool as_stored = false;  ///< float8 as its bits, not as what they are worth
};

/// Numbers of a block in global order. Its memory serves one block after another.
struct BlockValues {
  DType dtype = DType::float32;  ///< float64 where addends were combined, float32 for float8 (unless as stored)
  std::vector<std::byte> bytes;
  std::vector<std::uint8_t> none;  ///< 1 where the gradient is None; empty: nowhere
  double smallest_normal = 0.0;    ///< of the recorded type, for float8 with its largest scale_inv

  /// From element `first` on.
  [[nodiscard]] ElementView view(std::uint64_t first) const noexcept {
    return {bytes.data() + first * size_of(dtype), dtype, none.empty() ? nullptr : none.data() + first,
            smallest_normal};
  }
};

/// Puts blocks together. One thread at a time.
class BlockAssembly {
 public:
  /// The counted copy, or copy number `copy`; addends of Partial dimensions combined in coordinate order in float64, a
  /// None addend being 0 for sum and avg. With copy empty, the first copy that is not None, element by element.
  /// @pre the pieces of the copies that are asked for have their values
  /// Errors: Error(bad_input) for elements that no rank or several ranks hold, and for a None addend of max, min,
  /// product; as RankFile::read.
  void assemble(const BlockSide& side, std::optional<std::uint32_t> copy, BlockValues& values);

  /// One addend of it, not combined.
  void assemble_addend(const BlockSide& side, std::uint32_t addend, std::optional<std::uint32_t> copy,
                       BlockValues& values);

  /// The piece's elements as stored: as they arrived, or read into memory that the next call uses again.
  [[nodiscard]] const std::byte* stored(const BlockSide& side, const ComparedPiece& piece);

 private:
  struct Level {
    std::vector<double> values;
    std::vector<std::uint8_t> none;
  };

  void check_cover(const BlockSide& side, std::span<const ComparedPiece* const> pieces);
  void reduce(const BlockSide& side, std::optional<std::uint32_t> copy, std::size_t level, std::uint32_t group,
              Level& result);

  std::vector<std::byte> scratch_;
  std::vector<std::uint8_t> covered_;
  BlockValues addend_;
};

/// Elements of one type, `count` of them, as what they are worth there. @pre to is float32 for float8, else dtype
void copy_values(const std::byte* stored, DType dtype, float scale_inv, std::uint64_t count, std::byte* to);

}  // namespace gradclip
