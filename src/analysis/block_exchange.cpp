#include "gradclip/analysis/block_exchange.hpp"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "gradclip/backend/reduction.hpp"
#include "gradclip/base/worker_pool.hpp"

namespace gradclip {
namespace {

constexpr std::uint64_t kMostChunksPerBlock = 2;  // both sides of a block stay in a core's second-level cache
constexpr std::size_t kMostUnitBytes = std::size_t{4} << 20;  // what a block has at least, with all copies and addends
constexpr std::uint64_t kFewestElements = 1024;               // less is slower to find than to read
constexpr std::size_t kPieceBytes = 256;                      // a described piece takes no more
constexpr std::size_t kParameterBytes = 512;  // more rounds would locate the shards of all parameters more often

/// Bytes that one round may bring to all processes together.
std::size_t round_bytes(std::size_t memory_budget) {
  return std::clamp<std::size_t>(memory_budget / 8, std::size_t{16} << 20, std::size_t{256} << 20);
}

std::tuple<std::uint32_t, std::uint32_t, std::int32_t> order_of(const ComparedPiece& piece) {
  return {piece.header.addend, piece.header.copy, piece.header.rank};
}

}  // namespace

std::span<const ComparedPiece> pieces_of(const std::vector<ComparedPiece>& pieces, std::uint32_t addend,
                                         std::optional<std::uint32_t> copy) {
  const auto key = [](const ComparedPiece& piece) { return std::pair(piece.header.addend, piece.header.copy); };
  const std::pair first{addend, copy.value_or(0)};
  const std::pair last{addend, copy.value_or(std::numeric_limits<std::uint32_t>::max())};
  const auto begin = std::lower_bound(pieces.begin(), pieces.end(), first,
                                      [&](const ComparedPiece& piece, const auto& of) { return key(piece) < of; });
  const auto end = std::upper_bound(begin, pieces.end(), last,
                                    [&](const auto& of, const ComparedPiece& piece) { return of < key(piece); });
  return {begin, end};
}

bool copies_agree(const std::vector<ComparedPiece>& pieces) {
  std::map<std::pair<std::uint32_t, std::uint32_t>, const ComparedPiece*> counted;  // by addend and where they begin
  for (const ComparedPiece& piece : pieces) {
    if (piece.header.copy == 0) counted[{piece.header.addend, piece.runs.front().offset}] = &piece;
  }
  return std::all_of(pieces.begin(), pieces.end(), [&](const ComparedPiece& piece) {
    if (piece.header.copy == 0) return true;
    const auto found = counted.find({piece.header.addend, piece.runs.front().offset});
    if (found == counted.end() || found->second->runs != piece.runs) return false;
    const PieceHeader& other = found->second->header;
    return other.none == piece.header.none && (other.none != 0 || other.fingerprint == piece.header.fingerprint);
  });
}

BlockExchange::BlockExchange(DiffRun& run, const std::vector<ComparedPair>& pairs, bool all_copies)
    : run_(run), pairs_(pairs), all_copies_(all_copies) {
  for (const DumpReader* dump : run.dumps) {
    if (dump != nullptr) plans_.push_back(plan_work(dump->manifest(), run.comm.size()));
  }
  for (std::uint32_t side = 0; side < plans_.size(); ++side) {
    const std::span<const std::int32_t> ranks = plans_[side].ranks(run.comm.process());
    const bool keep = ranks.size() > run.dumps[side]->capacity();
    for (const std::int32_t rank : ranks) sources_.push_back({.side = side, .rank = rank, .keep = keep});
  }
}

std::uint64_t BlockExchange::summed_elements(const ComparedPair& pair) const {
  const std::uint64_t most = std::bit_floor(kMostUnitBytes / bytes_per_element(pair));
  return std::clamp<std::uint64_t>(most, kFewestElements, kChunkElements);
}

std::size_t BlockExchange::bytes_per_element(const ComparedPair& pair) const {
  const auto side = [this](const std::optional<ComparedTensor>& tensor) {
    return tensor ? size_of(tensor->dtype) * tensor->addends * (all_copies_ ? tensor->copies : 1) : 0;
  };
  return side(pair.a) + side(pair.b);
}

std::uint64_t BlockExchange::block_elements(const ComparedPair& pair) const {
  const std::uint64_t unit = summed_elements(pair);
  const std::size_t most = round_bytes(run_.memory_budget) / 4 / (bytes_per_element(pair) * unit);
  return unit * std::clamp<std::uint64_t>(most, 1, kMostChunksPerBlock * kChunkElements / unit);
}

/// An estimate: of its shards a block meets those of its part of the tensor, as if they were rows.
std::size_t BlockExchange::pieces_per_block(const ComparedPair& pair, std::uint64_t elements) const {
  const auto side = [&](const std::optional<ComparedTensor>& tensor, const DumpReader* dump) -> std::size_t {
    if (!tensor || dump == nullptr) return 0;
    const ParameterEntry& entry = dump->manifest().parameters[tensor->parameter];
    const std::size_t holders = entry.mesh ? dump->manifest().meshes[*entry.mesh].ranks().size() : entry.ranks.size();
    const std::size_t alike = std::size_t{tensor->copies} * tensor->addends;
    const std::size_t shards = std::max<std::size_t>(1, holders / std::max<std::size_t>(1, alike));
    const std::uint64_t blocks = std::max<std::uint64_t>(1, pair.a->elements / elements);
    return alike * (shards / blocks + 1);
  };
  return side(pair.a, run_.dumps[0]) + side(pair.b, run_.dumps[1]);
}

int BlockExchange::owner(const ComparedPair& pair, std::uint64_t begin, std::uint64_t elements) const {
  // In the middle: the ends of a block may belong to neighbours.
  const std::int32_t rank = likely_holder(run_.dumps[0]->manifest(), *pair.a, begin + elements / 2);
  return plans_[0].process_of(rank);
}

void BlockExchange::for_each_round(std::span<const std::size_t> pairs,
                                   const std::function<void(std::span<const Block>)>& visit) const {
  const std::size_t most_bytes = round_bytes(run_.memory_budget);
  const std::size_t most_described = most_bytes + kParameterBytes * pairs.size();
  std::vector<Block> round;
  std::size_t bytes = 0, descriptions = 0;
  const auto finish = [&] {
    if (!round.empty()) visit(round);
    round.clear();
    bytes = descriptions = 0;
  };
  for (const std::size_t index : pairs) {
    const ComparedPair& pair = pairs_[index];
    const std::uint64_t most = block_elements(pair);
    const std::size_t pieces = pieces_per_block(pair, most);
    for (std::uint64_t begin = 0; begin < pair.a->elements; begin += most) {
      const std::uint64_t elements = std::min(most, pair.a->elements - begin);
      round.push_back({index, begin, elements, owner(pair, begin, elements), summed_elements(pair)});
      bytes += elements * bytes_per_element(pair);
      descriptions += sizeof(Block) + pieces * kPieceBytes;
      if (bytes >= most_bytes || descriptions >= most_described) finish();
    }
  }
  finish();
}

std::vector<BlockPieces> BlockExchange::collect(std::span<const Block> round) {
  const int me = run_.comm.process();
  parallel_for(sources_.size(), run_.threads, [&](std::size_t i, std::size_t) {
    Source& source = sources_[i];
    source.outgoing.clear();
    std::vector<std::byte>().swap(source.kept);
    // The same one for both: another worker's may take its place among the open ones in between.
    if (const std::shared_ptr<const RankFile> file = describe(round, source)) read_what_stays(round, *file, source);
  });
  std::vector<std::size_t> send_counts(static_cast<std::size_t>(run_.comm.size()), 0);
  std::vector<Outgoing*> travellers;
  for (Source& source : sources_) {
    for (Outgoing& each : source.outgoing) {
      const std::size_t bytes = each.to == me ? 0 : bytes_of_piece(round, each.piece);
      if (bytes == 0) continue;
      send_counts[static_cast<std::size_t>(each.to)] += bytes;
      travellers.push_back(&each);
    }
  }
  sent_.resize(std::accumulate(send_counts.begin(), send_counts.end(), std::size_t{0}));
  std::vector<std::byte*> next;  // place, for each process
  std::byte* begin = sent_.data();
  for (const std::size_t count : send_counts) next.push_back(std::exchange(begin, begin + count));
  for (Outgoing* each : travellers) {
    std::byte*& place = next[static_cast<std::size_t>(each->to)];
    each->at = std::exchange(place, place + bytes_of_piece(round, each->piece));
  }
  std::vector<std::vector<std::byte>> no_scratch(run_.threads);
  parallel_for(travellers.size(), run_.threads, [&](std::size_t i, std::size_t worker) {
    const PieceHeader& header = travellers[i]->piece.header;
    read(round, *run_.dumps[header.side]->rank_file(header.rank), *travellers[i], no_scratch[worker]);
  });
  std::vector<BlockPieces> pieces(round.size());
  receive(round, send_counts, pieces);
  parallel_for(pieces.size(), run_.threads, [&](std::size_t i, std::size_t) {
    for (std::vector<ComparedPiece>& side : pieces[i]) {
      std::sort(side.begin(), side.end(),
                [](const ComparedPiece& x, const ComparedPiece& y) { return order_of(x) < order_of(y); });
    }
  });
  return pieces;
}

/// What does not travel, where it is kept in memory or compared by its fingerprint.
void BlockExchange::read_what_stays(std::span<const Block> round, const RankFile& file, Source& source) const {
  const int me = run_.comm.process();
  const auto kept_bytes = [&](const Outgoing& each) {
    return source.keep && each.to == me ? bytes_of_piece(round, each.piece) : 0;
  };
  std::size_t kept = 0;
  for (const Outgoing& each : source.outgoing) kept += kept_bytes(each);
  source.kept.resize(kept);
  std::byte* at = source.kept.data();
  std::vector<std::byte> scratch;
  for (Outgoing& each : source.outgoing) {
    if (each.piece.header.none != 0) continue;
    const std::size_t bytes = kept_bytes(each);
    const bool travels = each.to != me && bytes_of_piece(round, each.piece) > 0;
    const bool hashed = !all_copies_ && tensor(round[each.piece.header.block], source.side).copies > 1;
    if (travels || (bytes == 0 && !hashed)) continue;
    if (bytes > 0) each.at = std::exchange(at, at + bytes);
    read(round, file, each, scratch);
    each.piece.bytes = each.at;
  }
}

/// What the rank holds of every block of the round. @return its file; null where it holds nothing
std::shared_ptr<const RankFile> BlockExchange::describe(std::span<const Block> round, Source& source) const {
  DumpReader& dump = *run_.dumps[source.side];
  const Manifest& manifest = dump.manifest();
  std::shared_ptr<const RankFile> file;
  for (std::size_t first = 0, last = 0; first < round.size(); first = last) {
    while (last < round.size() && round[last].pair == round[first].pair) ++last;
    const ParameterEntry& entry = manifest.parameters[tensor(round[first], source.side).parameter];
    if (!manifest.holds(entry, source.rank)) continue;
    if (!file) file = dump.rank_file(source.rank);
    describe_tensor(round, first, last, *file, source);
  }
  return file;
}

/// What the rank holds of blocks [first, last) of the round, which are one pair's.
void BlockExchange::describe_tensor(std::span<const Block> round, std::size_t first, std::size_t last,
                                    const RankFile& file, Source& source) const {
  const Manifest& manifest = run_.dumps[source.side]->manifest();
  const ComparedTensor& of = tensor(round[first], source.side);
  const ParameterEntry& entry = manifest.parameters[of.parameter];
  const ShardPart part = shard_part(manifest, of, file.rank());
  const StoredShard& shard = file.locate(of.parameter);
  const ShardLayout none_layout = shard.none ? manifest.layout(entry, file.rank()) : ShardLayout();
  const ShardLayout& layout = shard.none ? none_layout : shard.layout;
  const GlobalExtent extent = global_extent(layout, entry.shape);
  for (std::size_t i = first; i < last; ++i) {
    const Block& block = round[i];
    // The part of the block that may lie in the rank's own tensor.
    const std::uint64_t begin = std::max(block.begin, part.begin + extent.begin);
    const std::uint64_t end = std::min(block.begin + block.elements, part.begin + extent.end);
    if (begin >= end) continue;
    const std::uint64_t from = elements_before(layout, entry.shape, begin - part.begin);
    const std::uint64_t to = elements_before(layout, entry.shape, end - part.begin);
    if (from == to) continue;
    Outgoing& out = source.outgoing.emplace_back();
    ComparedPiece& piece = out.piece;
    piece.first = from;
    piece.runs = global_runs(layout, entry.shape, from, to, begin - part.begin);
    for (StridedRun& run : piece.runs) run.offset += static_cast<std::uint32_t>(begin - block.begin);
    piece.header = {static_cast<std::uint32_t>(i),
                    source.side,
                    file.rank(),
                    part.copy,
                    part.addend,
                    static_cast<std::uint32_t>(piece.runs.size()),
                    shard.none ? 1.0F : shard.scale_inv.value_or(1.0F),
                    shard.none ? 1u : 0u,
                    to - from,
                    0};
    out.to = block.owner;
  }
}

/// Bytes that travel with the piece.
std::size_t BlockExchange::bytes_of_piece(std::span<const Block> round, const ComparedPiece& piece) const {
  if (piece.header.none != 0 || (piece.header.copy != 0 && !all_copies_)) return 0;
  return piece.header.elements * size_of(tensor(round[piece.header.block], piece.header.side).dtype);
}

void BlockExchange::read(std::span<const Block> round, const RankFile& file, Outgoing& outgoing,
                         std::vector<std::byte>& scratch) const {
  PieceHeader& header = outgoing.piece.header;
  const ComparedTensor& of = tensor(round[header.block], header.side);
  const std::size_t bytes = header.elements * size_of(of.dtype);
  std::byte* to = outgoing.at;
  if (to == nullptr) {
    scratch.resize(std::max(scratch.size(), bytes));
    to = scratch.data();
  }
  file.read(file.locate(of.parameter), outgoing.piece.first, header.elements, to);
  if (outgoing.at != nullptr && run_.progress) run_.progress(bytes);
  if (of.copies > 1 && !all_copies_) {
    header.fingerprint = XXH3_64bits_withSeed(to, bytes, std::bit_cast<std::uint32_t>(header.scale_inv));
  }
}

void BlockExchange::receive(std::span<const Block> round, std::span<const std::size_t> send_counts,
                            std::vector<BlockPieces>& pieces) {
  const int me = run_.comm.process();
  const auto processes = static_cast<std::size_t>(run_.comm.size());
  std::vector<std::vector<PieceHeader>> headers(processes);
  std::vector<std::vector<StridedRun>> runs(processes);
  for (Source& source : sources_) {
    for (Outgoing& each : source.outgoing) {
      if (each.to == me) {
        const PieceHeader header = each.piece.header;
        pieces[header.block][header.side].push_back(std::move(each.piece));
        continue;
      }
      const auto to = static_cast<std::size_t>(each.to);
      headers[to].push_back(each.piece.header);
      runs[to].insert(runs[to].end(), each.piece.runs.begin(), each.piece.runs.end());
    }
  }
  if (processes == 1) return;
  const auto their_headers = exchange_values(run_.comm, std::move(headers));
  const auto their_runs = exchange_values(run_.comm, std::move(runs));
  std::vector<std::size_t> receive_counts(processes, 0);
  ComparedPiece piece;
  for (std::size_t from = 0; from < processes; ++from) {
    for (const PieceHeader& header : their_headers[from]) {
      piece.header = header;
      receive_counts[from] += bytes_of_piece(round, piece);
    }
  }
  std::size_t total = 0;
  for (const std::size_t count : receive_counts) total += count;
  arrived_.resize(total);
  run_.comm.all_to_all(bytes_of(std::span<const std::byte>(sent_)), send_counts,
                       bytes_of(std::span<std::byte>(arrived_)), receive_counts);
  const std::byte* at = arrived_.data();
  for (std::size_t from = 0; from < processes; ++from) {
    auto run = their_runs[from].begin();
    for (const PieceHeader& header : their_headers[from]) {
      ComparedPiece arrived{header, {run, run + header.runs}, 0, nullptr};
      run += header.runs;
      if (const std::size_t bytes = bytes_of_piece(round, arrived); bytes > 0) {
        arrived.bytes = at;
        at += bytes;
      }
      pieces[header.block][header.side].push_back(std::move(arrived));
    }
  }
}

}  // namespace gradclip
