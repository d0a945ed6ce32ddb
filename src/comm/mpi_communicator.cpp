#include "gradclip/comm/mpi_communicator.hpp"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>
#include <utility>

namespace gradclip {
namespace {

/// How long a failing process waits for the others to reach their next collective before it ends them by force.
constexpr std::chrono::seconds kPatience{5};

/// MPI's counts are int; pieces stay well below.
constexpr std::size_t kPiece = std::size_t{1} << 30;

constexpr int kDataTag = 1;

void check(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw Error(ExitCode::resources, {.where = call,
                                    .found = std::string(text, static_cast<std::size_t>(length)),
                                    .expected = {},
                                    .advice = "a process or the network between processes has failed"});
}

#define GRADCLIP_MPI(call) check((call), #call)

std::byte* at(std::byte* base, std::size_t offset) {
  return base == nullptr ? nullptr : base + offset;
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(int* argc, char*** argv, HostBoard& board) : board_(board) {
    int provided = 0;
    GRADCLIP_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided));
    GRADCLIP_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    GRADCLIP_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
    GRADCLIP_MPI(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    GRADCLIP_MPI(MPI_Comm_rank(comm_, &process_));
    GRADCLIP_MPI(MPI_Comm_size(comm_, &size_));
    GRADCLIP_MPI(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, process_, MPI_INFO_NULL, &host_));
    GRADCLIP_MPI(MPI_Comm_size(host_, &on_this_host_));
    share_board();
  }

  ~MpiCommunicator() override {
    board_.unshare();
    MPI_Win_free(&shared_);
    MPI_Comm_free(&host_);
    MPI_Comm_free(&comm_);
    MPI_Finalize();
  }

  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  int process() const noexcept override { return process_; }
  int size() const noexcept override { return size_; }
  CommunicatorDescription describe() const override { return {"mpi", mpi_library_version(), on_this_host_}; }

  void broadcast(Bytes bytes, int root) override {
    const Waiting waiting(board_);
    enter(bytes, bytes);
    for (std::size_t done = 0; done < bytes.size; done += kPiece) {
      const auto count = static_cast<int>(std::min(kPiece, bytes.size - done));
      GRADCLIP_MPI(MPI_Bcast(at(bytes.data, done), count, MPI_BYTE, root, comm_));
    }
  }

  void all_gather(Bytes mine, std::span<const std::size_t> counts, Bytes all) override {
    const Waiting waiting(board_);
    enter(mine, all);
    GRADCLIP_CHECK(mine.size == counts[static_cast<std::size_t>(process_)], "all_gather: counts do not match");
    std::vector<int> int_counts, displacements;
    if (to_int(counts, all.size, int_counts, displacements)) {
      GRADCLIP_MPI(MPI_Allgatherv(mine.data, static_cast<int>(mine.size), MPI_BYTE, all.data, int_counts.data(),
                                  displacements.data(), MPI_BYTE, comm_));
      return;
    }
    std::vector<std::size_t> send_counts(counts.size(), mine.size);
    pairwise(mine.data, send_counts, /*same_for_all=*/true, all.data, counts);
  }

  void all_to_all(Bytes send, std::span<const std::size_t> send_counts, Bytes receive,
                  std::span<const std::size_t> receive_counts) override {
    const Waiting waiting(board_);
    enter(send, receive);
    // Every process must take the same road, so the largest volume anywhere decides.
    const unsigned long long mine = std::max(send.size, receive.size);
    unsigned long long largest = 0;
    GRADCLIP_MPI(MPI_Allreduce(&mine, &largest, 1, MPI_UNSIGNED_LONG_LONG, MPI_MAX, comm_));
    if (largest <= kPiece) {
      std::vector<int> send_ints, send_displacements, receive_ints, receive_displacements;
      to_int(send_counts, send.size, send_ints, send_displacements);
      to_int(receive_counts, receive.size, receive_ints, receive_displacements);
      GRADCLIP_MPI(MPI_Alltoallv(send.data, send_ints.data(), send_displacements.data(), MPI_BYTE, receive.data,
                                 receive_ints.data(), receive_displacements.data(), MPI_BYTE, comm_));
      return;
    }
    pairwise(send.data, send_counts, /*same_for_all=*/false, receive.data, receive_counts);
  }

  void barrier() override {
    const Waiting waiting(board_);
    agree_that_all_is_well();
    GRADCLIP_MPI(MPI_Barrier(comm_));
  }

  Agreement abort(ExitCode code, const std::string& message) override {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    Status mine = status_of(code);
    Status agreed{};
    MPI_Request request = MPI_REQUEST_NULL;
    int done = 0;
    bool sound = MPI_Iallreduce(&mine, &agreed, 1, MPI_2INT, MPI_MAXLOC, comm_, &request) == MPI_SUCCESS;
    while (sound && !done && std::chrono::steady_clock::now() < deadline) {
      sound = MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS;
      if (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (done) {
      // From now on this process knows why the run ends, whatever ends it.
      const bool speaks = board_.agree_on_voice();
      return {agreed.code(), speaks && agreed.process == process_};
    }
    if (board_.claim_voice()) std::fprintf(stderr, "gradclip: error: %s\n", message.c_str());
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, static_cast<int>(code));
    std::_Exit(static_cast<int>(code));
  }

 private:
  /// As long as a collective is under way.
  class Waiting {
   public:
    explicit Waiting(HostBoard& board) : board_(board) { board_.note_waiting(true); }
    ~Waiting() { board_.note_waiting(false); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    HostBoard& board_;
  };

  /// The host's first process has the memory, all of them see it.
  void share_board() {
    int place = 0;
    GRADCLIP_MPI(MPI_Comm_rank(host_, &place));
    HostBoardMemory* memory = nullptr;
    const MPI_Aint bytes = place == 0 ? static_cast<MPI_Aint>(sizeof(HostBoardMemory)) : 0;
    GRADCLIP_MPI(MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, host_, &memory, &shared_));
    MPI_Aint size = 0;
    int unit = 0;
    GRADCLIP_MPI(MPI_Win_shared_query(shared_, 0, &size, &unit, &memory));
    if (place == 0) new (memory) HostBoardMemory{};
    GRADCLIP_MPI(MPI_Barrier(host_));
    board_.share(*memory, place, process_);
  }

  /// What each process says before a collective: MPI_MAXLOC takes the gravest, the lowest process at a tie.
  struct Status {
    int gravity = 0;
    int process = 0;

    [[nodiscard]] ExitCode code() const noexcept { return kByGravity[gravity]; }
  };
  static constexpr ExitCode kByGravity[] = {ExitCode::done,      ExitCode::findings,  ExitCode::usage,
                                            ExitCode::nonfinite, ExitCode::bad_input, ExitCode::resources,
                                            ExitCode::bug};

  [[nodiscard]] Status status_of(ExitCode code) const noexcept {
    const auto* place = std::find(std::begin(kByGravity), std::end(kByGravity), code);
    return {static_cast<int>(place - std::begin(kByGravity)), process_};
  }

  void agree_that_all_is_well() {
    const Status mine{0, process_};
    Status agreed{};
    // Not MPI_Allreduce: a process in abort() posts the nonblocking form, and MPI matches only like with like.
    MPI_Request request = MPI_REQUEST_NULL;
    GRADCLIP_MPI(MPI_Iallreduce(&mine, &agreed, 1, MPI_2INT, MPI_MAXLOC, comm_, &request));
    GRADCLIP_MPI(MPI_Wait(&request, MPI_STATUS_IGNORE));
    if (agreed.gravity == 0) return;
    board_.agree_on_voice();  // it is the peer's
    throw PeerFailed{agreed.code()};
  }

  void enter(Bytes a, Bytes b) {
    GRADCLIP_CHECK(a.space != MemorySpace::device && b.space != MemorySpace::device,
                   "the MPI communicator was given device memory");
    agree_that_all_is_well();
  }

  static bool to_int(std::span<const std::size_t> counts, std::size_t total, std::vector<int>& ints,
                     std::vector<int>& displacements) {
    if (total > kPiece) return false;
    int offset = 0;
    for (const std::size_t count : counts) {
      ints.push_back(static_cast<int>(count));
      displacements.push_back(offset);
      offset += static_cast<int>(count);
    }
    return true;
  }

  /// Each process exchanges with each other one in turn, in pieces that fit an int.
  void pairwise(std::byte* send, std::span<const std::size_t> send_counts, bool same_for_all, std::byte* receive,
                std::span<const std::size_t> receive_counts) {
    std::vector<std::size_t> send_offsets(send_counts.size(), 0), receive_offsets(receive_counts.size(), 0);
    for (std::size_t i = 1; i < send_counts.size(); ++i) {
      send_offsets[i] = same_for_all ? 0 : send_offsets[i - 1] + send_counts[i - 1];
      receive_offsets[i] = receive_offsets[i - 1] + receive_counts[i - 1];
    }
    for (int step = 0; step < size_; ++step) {
      const auto to = static_cast<std::size_t>((process_ + step) % size_);
      const auto from = static_cast<std::size_t>((process_ - step + size_) % size_);
      std::size_t sent = 0, received = 0;
      while (sent < send_counts[to] || received < receive_counts[from]) {
        const std::size_t out = std::min(kPiece, send_counts[to] - sent);
        const std::size_t in = std::min(kPiece, receive_counts[from] - received);
        // Both sides cut the same count into the same pieces; a side that is through stands aside.
        GRADCLIP_MPI(MPI_Sendrecv(at(send, send_offsets[to] + sent), static_cast<int>(out), MPI_BYTE,
                                  out != 0 ? static_cast<int>(to) : MPI_PROC_NULL, kDataTag,
                                  at(receive, receive_offsets[from] + received), static_cast<int>(in), MPI_BYTE,
                                  in != 0 ? static_cast<int>(from) : MPI_PROC_NULL, kDataTag, comm_,
                                  MPI_STATUS_IGNORE));
        sent += out;
        received += in;
      }
    }
  }

  HostBoard& board_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Comm host_ = MPI_COMM_NULL;
  MPI_Win shared_ = MPI_WIN_NULL;  // where the board is
  int process_ = 0;
  int size_ = 1;
  int on_this_host_ = 1;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(int* argc, char*** argv, HostBoard& board) {
  return std::make_unique<MpiCommunicator>(argc, argv, board);
}

std::string mpi_library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "unknown";
  const std::string version(text, static_cast<std::size_t>(length));
  return version.substr(0, version.find_first_of(",\n"));
}

}  // namespace gradclip
