#include "gradclip/dump/output_file.hpp"

#include <algorithm>

namespace gradclip {
namespace {

constexpr std::uint64_t kWriteBackBytes = std::uint64_t{8} << 20;

}  // namespace

void OutputFile::write(std::uint64_t offset, const void* from, std::size_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  file_.write(offset, from, count);
  if (written_end_ == written_begin_) written_begin_ = written_end_ = offset;
  written_begin_ = std::min(written_begin_, offset);
  written_end_ = std::max(written_end_, offset + count);
  if (written_end_ - written_begin_ < kWriteBackBytes) return;
  file_.start_write_back(written_begin_, written_end_ - written_begin_);
  written_begin_ = written_end_;
}

}  // namespace gradclip
