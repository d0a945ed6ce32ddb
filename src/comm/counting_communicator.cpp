#include "gradclip/comm/counting_communicator.hpp"

namespace gradclip {

void CountingCommunicator::broadcast(Bytes bytes, int root) {
  inner_->broadcast(bytes, root);
  ++volume_.collectives;
  if (root == process()) {
    volume_.bytes_sent += bytes.size * (static_cast<std::uint64_t>(size()) - 1);
  } else {
    volume_.bytes_received += bytes.size;
  }
}

void CountingCommunicator::all_gather(Bytes mine, std::span<const std::size_t> counts, Bytes all) {
  inner_->all_gather(mine, counts, all);
  ++volume_.collectives;
  volume_.bytes_sent += mine.size * (static_cast<std::uint64_t>(size()) - 1);
  volume_.bytes_received += all.size - mine.size;
}

void CountingCommunicator::all_to_all(Bytes send, std::span<const std::size_t> send_counts, Bytes receive,
                                      std::span<const std::size_t> receive_counts) {
  inner_->all_to_all(send, send_counts, receive, receive_counts);
  ++volume_.collectives;
  const auto me = static_cast<std::size_t>(process());
  volume_.bytes_sent += send.size - send_counts[me];
  volume_.bytes_received += receive.size - receive_counts[me];
}

void CountingCommunicator::barrier() {
  inner_->barrier();
  ++volume_.collectives;
}

}  // namespace gradclip
