#include "gradclip/comm/communicator.hpp"

namespace gradclip {
namespace {

class SingleProcessCommunicator final : public Communicator {
 public:
  int process() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  CommunicatorDescription describe() const override { return {"single", "one process, no launcher", 1}; }

  void broadcast(Bytes, int) override {}
  void all_gather(Bytes mine, std::span<const std::size_t>, Bytes all) override { copy(mine, all); }
  void all_to_all(Bytes send, std::span<const std::size_t>, Bytes receive, std::span<const std::size_t>) override {
    copy(send, receive);
  }
  void barrier() override {}
  Agreement abort(ExitCode code, const std::string&) override { return {code, true}; }

 private:
  static void copy(Bytes from, Bytes to) {
    GRADCLIP_CHECK(from.space != MemorySpace::device && to.space != MemorySpace::device,
                   "the single-process communicator was given device memory");
    GRADCLIP_CHECK(from.size == to.size, "a collective of unequal sizes");
    if (from.size != 0) std::memcpy(to.data, from.data, from.size);
  }
};

}  // namespace

std::unique_ptr<Communicator> make_single_process_communicator() {
  return std::make_unique<SingleProcessCommunicator>();
}

std::string broadcast_string(Communicator& comm, std::string text, int root) {
  std::size_t size = text.size();
  comm.broadcast(bytes_of(std::span<std::size_t>(&size, 1)), root);
  text.resize(size);
  comm.broadcast(bytes_of(std::span<char>(text)), root);
  return text;
}

}  // namespace gradclip
