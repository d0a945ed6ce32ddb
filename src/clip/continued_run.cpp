#include "gradclip/clip/continued_run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdint>

#include "gradclip/dump/checksum.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/dump/posix_file.hpp"

namespace gradclip {
namespace {

void add(Checksum& checksum, const std::string& text) {
  checksum.update(text.data(), text.size());
  checksum.update("\n", 1);
}

std::string text_of(const ScaleFactors& factors) {
  return fmt::format("{:a} {:a} {:a} {:a} {:a} {} {} {} {} {}", factors.numbers[0], factors.numbers[1],
                     factors.coefficient, factors.normalizer, factors.scale_inv, static_cast<int>(factors.steps[0]),
                     static_cast<int>(factors.steps[1]), static_cast<int>(factors.clip), factors.zero_nonfinite,
                     factors.reference_in_float64);
}

/// Not its bytes, which every run reads: who changes them changes its time.
std::string text_of_file(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) throw system_error(path, "stat", errno);
  return fmt::format("{} {} {}", status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
}

}  // namespace

std::string run_identity(const DumpReader& input, const FactorsOf& factors_of, const std::vector<bool>& expert,
                         const std::string& record) {
  Checksum checksum;
  add(checksum, record);
  const Manifest& manifest = input.manifest();
  add(checksum, checksum_text(manifest.text_checksum));
  // What differs between ranks, the coefficient, stands in the record.
  for (std::size_t p = 0; p < manifest.parameters.size(); ++p) {
    add(checksum, text_of(factors_of(p, 0)) + (expert[p] ? " expert" : ""));
  }
  for (std::int32_t rank = 0; rank < manifest.world_size; ++rank) {
    add(checksum, text_of_file(input.directory() / manifest.rank_file_name(rank)));
  }
  return "clip " + checksum_text(checksum.digest()) + "\n";
}

// Integers in decimal; a float64 by its bits.

std::string note_of(const TensorStatistics& s) {
  const auto bits = [](double value) { return std::bit_cast<std::uint64_t>(value); };
  const auto word = [](std::int32_t value) { return static_cast<std::uint64_t>(static_cast<std::uint32_t>(value)); };
  const std::array<std::uint64_t, 14> words{s.elements,
                                            s.zeros,
                                            s.subnormals,
                                            s.nan,
                                            s.posinf,
                                            s.neginf,
                                            bits(s.max_abs),
                                            bits(s.min_abs),
                                            bits(s.powers.sum),
                                            word(s.powers.exponent),
                                            bits(s.signed_sum.sum),
                                            word(s.signed_sum.exponent),
                                            s.first_nonfinite,
                                            word(s.first_nonfinite_rank)};
  return fmt::format("{}", fmt::join(words, " "));
}

std::optional<TensorStatistics> noted_statistics(const std::string& note) {
  std::array<std::uint64_t, 14> words{};
  const char* at = note.data();
  const char* const end = at + note.size();
  for (std::uint64_t& word : words) {
    const auto [next, error] = std::from_chars(at, end, word);
    if (error != std::errc()) return std::nullopt;
    at = next != end ? next + 1 : next;
  }
  if (at != end) return std::nullopt;
  const auto number = [&](std::size_t i) { return std::bit_cast<double>(words[i]); };
  const auto integer = [&](std::size_t i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(words[i])); };
  TensorStatistics s;
  s.elements = words[0];
  s.zeros = words[1];
  s.subnormals = words[2];
  s.nan = words[3];
  s.posinf = words[4];
  s.neginf = words[5];
  s.max_abs = number(6);
  s.min_abs = number(7);
  s.powers = {number(8), integer(9)};
  s.signed_sum = {number(10), integer(11)};
  s.first_nonfinite = words[12];
  s.first_nonfinite_rank = integer(13);
  return s;
}

}  // namespace gradclip
