#include "gradclip/norm/addend_exchange.hpp"

#include <numeric>

namespace gradclip {
namespace {

std::size_t sum(std::span<const std::size_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

}  // namespace

AddendExchange::AddendExchange(Backend& backend, Communicator& comm)
    : backend_(backend),
      comm_(comm),
      works_on_device_(backend.describe().working_space == MemorySpace::device),
      travels_on_device_(works_on_device_ && comm.size() > 1 && comm.describe().device_memory),
      host_space_(works_on_device_ ? MemorySpace::pinned : MemorySpace::host) {}

std::byte* AddendExchange::outgoing(std::size_t bytes) {
  return host_outgoing_.of(bytes, backend_, host_space_).data;
}

Bytes AddendExchange::exchange(std::span<const std::size_t> send_counts, std::span<const std::size_t> receive_counts) {
  const Bytes send = host_outgoing_.of(sum(send_counts), backend_, host_space_);
  if (comm_.size() == 1) return works_on_device_ ? moved_to_device(device_incoming_, send) : send;
  if (travels_on_device_) {
    const Bytes device_receive = device_incoming_.of(sum(receive_counts), backend_, MemorySpace::device);
    const Bytes device_send = moved_to_device(device_outgoing_, send);
    comm_.all_to_all(device_send, send_counts, device_receive, receive_counts);
    return device_receive;
  }
  const Bytes receive = host_incoming_.of(sum(receive_counts), backend_, host_space_);
  comm_.all_to_all(send, send_counts, receive, receive_counts);
  return works_on_device_ ? moved_to_device(device_incoming_, receive) : receive;
}

Bytes AddendExchange::moved_to_device(Room& room, Bytes from) {
  const Bytes to = room.of(from.size, backend_, MemorySpace::device);
  backend_.move(from, to);
  // For the communicator, which works beside the backend; and the next round overwrites `from`.
  backend_.wait(UnusedMemory::keep);
  return to;
}

Bytes AddendExchange::Room::of(std::size_t bytes, Backend& backend, MemorySpace space) {
  if (bytes > buffer_.size()) {
    buffer_.reset();  // before there is another: a round holds as much as it may
    buffer_ = backend.allocate(bytes, space);
  }
  return {buffer_.data(), bytes, space};
}

}  // namespace gradclip
