#pragma once
// What a process's collectives carry, counted: for reports, and for the formulas of docs/scale.md.

#include <cstdint>

#include "gradclip/comm/communicator.hpp"

namespace gradclip {

/// Of one process. Bytes that processes hand to one another; what a process keeps for itself, and what the library adds
/// (headers, what it forwards, the agreement before each collective), is not in it.
struct CommunicationVolume {
  std::uint64_t collectives = 0;
  std::uint64_t bytes_sent = 0;  ///< a gathered or broadcast byte once for each process that gets it
  std::uint64_t bytes_received = 0;
};

/// Passes everything on and counts it.
class CountingCommunicator final : public Communicator {
 public:
  /// @param inner  outlives this
  explicit CountingCommunicator(Communicator& inner) : inner_(&inner) {}

  /// From now on passes on to another one of the same processes. The counts stay.
  void pass_on_to(Communicator& inner) noexcept { inner_ = &inner; }
  [[nodiscard]] const CommunicationVolume& volume() const noexcept { return volume_; }

  int process() const noexcept override { return inner_->process(); }
  int size() const noexcept override { return inner_->size(); }
  CommunicatorDescription describe() const override { return inner_->describe(); }
  void broadcast(Bytes bytes, int root) override;
  void all_gather(Bytes mine, std::span<const std::size_t> counts, Bytes all) override;
  void all_to_all(Bytes send, std::span<const std::size_t> send_counts, Bytes receive,
                  std::span<const std::size_t> receive_counts) override;
  void barrier() override;
  Agreement abort(ExitCode code, const std::string& message) override { return inner_->abort(code, message); }

 private:
  Communicator* inner_;
  CommunicationVolume volume_;
};

}  // namespace gradclip
