#pragma once
// The road of Partial addends from the processes that read them to those that combine them.

#include <cstddef>
#include <span>

#include "gradclip/backend/backend.hpp"
#include "gradclip/comm/communicator.hpp"

namespace gradclip {

/// Exchanges bytes in rounds. Where chunks are worked on in device memory and the communicator takes it, the bytes go
/// to the device first and from device to device; else through host memory, and to the device where they arrive. One
/// process exchanges nothing. The memory of one round serves the next: what it holds at most, host and device, is twice
/// the most that one round brought.
class AddendExchange {
 public:
  /// What an addend's bytes begin at a multiple of, so that no element of the next one is misaligned.
  static constexpr std::size_t kAlignment = 64;

  AddendExchange(Backend& backend, Communicator& comm);

  /// Memory to read what this process sends into. The last round's content is gone.
  [[nodiscard]] std::byte* outgoing(std::size_t bytes);

  /// Sends what outgoing() holds, send_counts[i] bytes to process i, one after another. Collective.
  /// @return what arrived, in process order, in the backend's working space, until the next round
  [[nodiscard]] Bytes exchange(std::span<const std::size_t> send_counts, std::span<const std::size_t> receive_counts);

 private:
  /// Memory that is kept from round to round.
  class Room {
   public:
    [[nodiscard]] Bytes of(std::size_t bytes, Backend& backend, MemorySpace space);

   private:
    Buffer buffer_;
  };

  [[nodiscard]] Bytes moved_to_device(Room& room, Bytes from);

  Backend& backend_;
  Communicator& comm_;
  bool works_on_device_;
  bool travels_on_device_;
  MemorySpace host_space_;
  Room host_outgoing_, host_incoming_, device_outgoing_, device_incoming_;
};

}  // namespace gradclip
