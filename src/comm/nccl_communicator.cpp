#include "gradclip/comm/nccl_communicator.hpp"

#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <thread>
#include <utility>

#include "gradclip/cuda_runtime/cuda_runtime.hpp"

namespace gradclip {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kTimeoutVariable[] = "GRADCLIP_NCCL_TIMEOUT";
constexpr std::chrono::seconds kDefaultTimeout{600};
constexpr unsigned kLongestTimeout = 86'400;

/// How long the end of a communicator that never failed may take before it is an abort.
constexpr std::chrono::seconds kPatienceAtTheEnd{10};

constexpr char kAdvice[] = "set NCCL_DEBUG=INFO to see what NCCL says, or use --device cpu";

bool has_failed(ncclResult_t status) noexcept {
  return status != ncclSuccess && status != ncclInProgress;
}

/// What a status means, without the advice that NCCL adds to some, and the first line of what it says of the last
/// failure: the others are where in NCCL it was.
std::string text_of(ncclResult_t status) {
  const std::string_view name(ncclGetErrorString(status));
  std::string text = fmt::format("{} ({})", name.substr(0, name.find(" (run with")), static_cast<int>(status));
  const char* last = ncclGetLastError(nullptr);
  const std::string_view more = last == nullptr ? std::string_view() : std::string_view(last);
  const std::string_view line = more.substr(0, more.find('\n'));
  if (!line.empty()) text += fmt::format(": {}", line);
  return text;
}

[[noreturn]] void throw_failure(const std::string& what, std::string found, std::string expected = {}) {
  throw Error(
      ExitCode::resources,
      {.where = "NCCL, " + what, .found = std::move(found), .expected = std::move(expected), .advice = kAdvice});
}

std::chrono::seconds timeout_from_environment() {
  const char* variable = std::getenv(kTimeoutVariable);
  if (variable == nullptr) return kDefaultTimeout;
  const std::string_view text(variable);
  unsigned seconds = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (failure != std::errc() || end != text.data() + text.size() || seconds < 1 || seconds > kLongestTimeout) {
    throw Error(ExitCode::usage, {.where = fmt::format("environment variable {}", kTimeoutVariable),
                                  .found = quoted(text),
                                  .expected = fmt::format("whole seconds from 1 to {}", kLongestTimeout),
                                  .advice = fmt::format("unset it for {} s", kDefaultTimeout.count())});
  }
  return std::chrono::seconds(seconds);
}

/// Between two looks at something that is under way: short at first, so that small collectives do not wait for a
/// timer, then long enough to leave the core to NCCL's own threads.
class Pause {
 public:
  void operator()() {
    std::this_thread::sleep_for(length_);
    length_ = std::min<std::chrono::microseconds>(length_ * 2, std::chrono::milliseconds(1));
  }

 private:
  std::chrono::microseconds length_{5};
};

/// Owns a communicator of NCCL that never blocks: what it is asked for goes on while state() is ncclInProgress.
class NcclHandle {
 public:
  NcclHandle() = default;
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  /// In the orderly way, which waits for the peers on this host, as long as that takes no longer than is decent: in a
  /// run that fails they may be gone.
  ~NcclHandle() {
    if (comm_ == nullptr) return;
    const auto deadline = Clock::now() + kPatienceAtTheEnd;
    Pause pause;
    ncclResult_t status = ncclCommFinalize(comm_);
    while (status == ncclInProgress && Clock::now() < deadline) {
      pause();
      status = state();
    }
    if (status == ncclSuccess) {
      static_cast<void>(ncclCommDestroy(comm_));
    } else {
      abort();
    }
  }

  [[nodiscard]] ncclComm_t get() const noexcept { return comm_; }
  [[nodiscard]] ncclComm_t* put() noexcept { return &comm_; }

  [[nodiscard]] ncclResult_t state() const noexcept {
    ncclResult_t asynchronous = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &asynchronous);
    return asked == ncclSuccess ? asynchronous : asked;
  }

  /// Ends what is under way on this side; the communicator is never touched again.
  void abort() noexcept {
    if (comm_ != nullptr) static_cast<void>(ncclCommAbort(std::exchange(comm_, nullptr)));
  }

 private:
  ncclComm_t comm_ = nullptr;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Communicator& base, const ncclUniqueId& id, std::chrono::seconds timeout)
      : base_(base), timeout_(timeout) {
    GRADCLIP_CUDA(cudaGetDevice(&device_));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // a peer that dies while all are being connected must not hold this process for ever
    finish("setting up", ncclCommInitRankConfig(nccl_.put(), base.size(), id, base.process(), &config));
  }

  [[nodiscard]] int process() const noexcept override { return base_.process(); }
  [[nodiscard]] int size() const noexcept override { return base_.size(); }

  [[nodiscard]] CommunicatorDescription describe() const override {
    CommunicatorDescription description = base_.describe();
    description.name = "nccl";
    description.detail = fmt::format("{} over {} devices", nccl_library_version(), size());
    description.device_memory = true;
    return description;
  }

  void broadcast(Bytes bytes, int root) override {
    if (bytes.space != MemorySpace::device) return base_.broadcast(bytes, root);
    std::vector<Bytes> send(processes()), receive(processes());
    if (process() == root) {
      for (int i = 0; i < size(); ++i) {
        if (i != root) send[static_cast<std::size_t>(i)] = bytes;
      }
    } else {
      receive[static_cast<std::size_t>(root)] = bytes;
    }
    exchange("broadcast", send, receive);
  }

  void all_gather(Bytes mine, std::span<const std::size_t> counts, Bytes all) override {
    if (!are_on_device(mine, all)) return base_.all_gather(mine, counts, all);
    GRADCLIP_CHECK(counts.size() == processes() && mine.size == counts[static_cast<std::size_t>(process())],
                   "all_gather: counts do not match");
    exchange("all_gather", std::vector<Bytes>(processes(), mine), parts(all, counts));
  }

  void all_to_all(Bytes send, std::span<const std::size_t> send_counts, Bytes receive,
                  std::span<const std::size_t> receive_counts) override {
    if (!are_on_device(send, receive)) return base_.all_to_all(send, send_counts, receive, receive_counts);
    exchange("all_to_all", parts(send, send_counts), parts(receive, receive_counts));
  }

  void barrier() override { base_.barrier(); }

  Agreement abort(ExitCode code, const std::string& message) override { return base_.abort(code, message); }

 private:
  [[nodiscard]] std::size_t processes() const noexcept { return static_cast<std::size_t>(size()); }

  static bool are_on_device(Bytes a, Bytes b) {
    const bool on_device = a.space == MemorySpace::device;
    GRADCLIP_CHECK(on_device == (b.space == MemorySpace::device), "a collective from device to host memory");
    return on_device;
  }

  /// Cut in process order.
  [[nodiscard]] std::vector<Bytes> parts(Bytes whole, std::span<const std::size_t> counts) const {
    GRADCLIP_CHECK(
        counts.size() == processes() && std::accumulate(counts.begin(), counts.end(), std::size_t{0}) == whole.size,
        "a collective whose counts are not those of its bytes");
    std::vector<Bytes> cut;
    std::size_t at = 0;
    for (const std::size_t count : counts) {
      cut.push_back(whole.subspan(at, count));
      at += count;
    }
    return cut;
  }

  /// Every collective there is: send[i] goes to process i, receive[i] comes from it. Both sides leave out empty ones.
  void exchange(const std::string& name, const std::vector<Bytes>& send, const std::vector<Bytes>& receive) {
    const Bytes own = send[static_cast<std::size_t>(process())], to = receive[static_cast<std::size_t>(process())];
    GRADCLIP_CHECK(to.size == 0 || to.size == own.size, "a collective of unequal sizes");
    base_.barrier();  // here a peer that failed is heard of; from now on everybody is under way
    if (nccl_.get() == nullptr) throw_failure(name, "NCCL was aborted after an earlier failure");
    cuda::use_device(device_);
    if (to.size != 0 && to.data != own.data) {
      GRADCLIP_CUDA(cudaMemcpyAsync(to.data, own.data, to.size, cudaMemcpyDeviceToDevice, stream_.get()));
    }

    std::size_t bytes = 0;
    ncclResult_t status = ncclGroupStart();
    for (int i = 0; i < size(); ++i) {
      if (i == process()) continue;
      const Bytes out = send[static_cast<std::size_t>(i)], in = receive[static_cast<std::size_t>(i)];
      if (out.size != 0 && !has_failed(status)) {
        status = ncclSend(out.data, out.size, ncclUint8, i, nccl_.get(), stream_.get());
      }
      if (in.size != 0 && !has_failed(status)) {
        status = ncclRecv(in.data, in.size, ncclUint8, i, nccl_.get(), stream_.get());
      }
      bytes += out.size + in.size;
    }
    const ncclResult_t ended = ncclGroupEnd();  // after a failure too: a group left open would swallow the next calls
    finish(fmt::format("{} of {} bytes", name, bytes), has_failed(status) ? status : ended);
  }

  /// Returns when NCCL has handed over to the stream what it was asked for, and the stream is through with it.
  void finish(const std::string& what, ncclResult_t status) {
    const auto deadline = Clock::now() + timeout_;
    Pause pause;
    if (!has_failed(status)) status = nccl_.state();
    while (true) {
      if (has_failed(status)) give_up(what, text_of(status));
      const bool through = status == ncclSuccess && stream_is_through();
      // After the stream too: kernels that NCCL called off end as if all were well.
      status = nccl_.state();
      if (through && status == ncclSuccess) return;
      if (has_failed(status)) continue;
      if (Clock::now() >= deadline) {
        give_up(what, fmt::format("not done after {} s", timeout_.count()),
                fmt::format("every process and the links between devices to be alive (raise {} for slow ones)",
                            kTimeoutVariable));
      }
      pause();
    }
  }

  bool stream_is_through() {
    const cudaError_t status = cudaStreamQuery(stream_.get());
    if (status == cudaErrorNotReady) {
      cuda::check_quietly(status);
      return false;
    }
    if (status != cudaSuccess) nccl_.abort();
    cuda::check(status, "cudaStreamQuery");
    return true;
  }

  [[noreturn]] void give_up(const std::string& what, std::string found, std::string expected = {}) {
    nccl_.abort();
    throw_failure(what, std::move(found), std::move(expected));
  }

  Communicator& base_;
  std::chrono::seconds timeout_;
  int device_ = 0;
  cuda::Stream stream_;  // outlives the communicator that works on it
  NcclHandle nccl_;
};

/// Every process's text, in process order.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& mine) {
  const std::vector<std::size_t> sizes = gather_value(comm, mine.size());
  const std::vector<char> letters = gather_values(comm, std::span<const char>(mine));
  std::vector<std::string> texts;
  const char* at = letters.data();
  for (const std::size_t size : sizes) {
    texts.emplace_back(at, size);
    at += size;
  }
  return texts;
}

/// Why these processes cannot use NCCL; empty if they can.
std::string obstacle(const std::vector<std::string>& devices) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].empty()) return fmt::format("process {} has no CUDA device", i);
  }
  for (std::size_t i = 1; i < devices.size(); ++i) {
    const auto same = std::find(devices.begin(), devices.begin() + static_cast<std::ptrdiff_t>(i), devices[i]);
    const auto first = static_cast<std::size_t>(same - devices.begin());
    if (first != i) return fmt::format("processes {} and {} share one device", first, i);
  }
  return {};
}

}  // namespace

ChosenCommunicator try_nccl_communicator(Communicator& base, const std::string& device_identity) {
  if (base.size() == 1) return {.communicator = nullptr, .reason = "one process"};
  std::string reason = obstacle(gather_texts(base, device_identity));
  if (!reason.empty()) return {.communicator = nullptr, .reason = std::move(reason)};

  const std::chrono::seconds timeout = timeout_from_environment();
  ncclUniqueId id{};
  if (base.process() == 0) {
    const ncclResult_t status = ncclGetUniqueId(&id);
    if (status != ncclSuccess) throw_failure("setting up", text_of(status));
  }
  base.broadcast(bytes_of(std::span<ncclUniqueId>(&id, 1)), 0);
  return {.communicator = std::make_unique<NcclCommunicator>(base, id, timeout),
          .reason = "every process has a device of its own"};
}

std::string nccl_library_version() {
  int code = 0;
  if (ncclGetVersion(&code) != ncclSuccess) return "NCCL of an unknown version";
  // The code has two digits for the minor version since 2.9.
  const int major = code < 10'000 ? code / 1000 : code / 10'000;
  const int minor = code < 10'000 ? code % 1000 / 100 : code % 10'000 / 100;
  return fmt::format("NCCL {}.{}.{}", major, minor, code % 100);
}

}  // namespace gradclip
