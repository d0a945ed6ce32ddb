#include "nccl_communicator.hpp"

#include <unistd.h>

#include <functional>
#include <string_view>
#include <utility>

#include "ledger.hpp"
#include "nccl_exchange.hpp"
#include "settings.hpp"

namespace emulation {
namespace {

std::uint64_t this_host() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return std::hash<std::string_view>()(name);
}

std::string& last_failure() {
  static auto* const text = new std::string;
  return *text;
}

bool mpi_works() {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

}  // namespace

ncclResult_t nccl_failure(ncclResult_t error, const std::string& text) {
  last_failure() = text;
  return error;
}

const std::string& last_nccl_failure() {
  return last_failure();
}

NcclCommunicator::NcclCommunicator(int size, int rank, int device, bool blocking)
    : size_(size),
      rank_(rank),
      device_(device),
      blocking_(blocking),
      sends_(static_cast<std::size_t>(size)),
      receives_(static_cast<std::size_t>(size)) {}

NcclCommunicator::~NcclCommunicator() {
  // After an abort a peer may still be about to use it.
  if (mpi_ != MPI_COMM_NULL && !aborted_ && mpi_works()) MPI_Comm_free(&mpi_);
}

void NcclCommunicator::connect(const ncclUniqueId& id) {
  if (size_ == 1) return;
  self_ = {std::hash<std::string_view>()({id.internal, sizeof id.internal}), this_host(), rank_, device_};
  members_.resize(static_cast<std::size_t>(size_));
  check_mpi(MPI_Comm_idup(MPI_COMM_WORLD, &mpi_, &request_));
  phase_ = Phase::duplicating;
}

ncclResult_t NcclCommunicator::check_members() {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    if (member.id != self_.id) {
      return nccl_failure(ncclInvalidUsage, "the processes have not all been given one unique id");
    }
    if (member.rank != static_cast<int>(i)) {
      return nccl_failure(ncclInvalidUsage, "only NCCL ranks equal to those of MPI_COMM_WORLD are emulated");
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (member.host != members_[j].host || member.device != members_[j].device) continue;
      return nccl_failure(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(i) + " and rank " +
                                                std::to_string(j) + " both on CUDA device " +
                                                std::to_string(member.device));
    }
  }
  return ncclSuccess;
}

ncclResult_t NcclCommunicator::progress() {
  if (failed_) return *failed_;
  int done = 1;
  if (request_ != MPI_REQUEST_NULL) check_mpi(MPI_Test(&request_, &done, MPI_STATUS_IGNORE));
  if (done == 0) return ncclInProgress;
  switch (phase_) {
    case Phase::duplicating:
      check_mpi(MPI_Comm_set_errhandler(mpi_, MPI_ERRORS_RETURN));
      check_mpi(
          MPI_Iallgather(&self_, sizeof self_, MPI_BYTE, members_.data(), sizeof self_, MPI_BYTE, mpi_, &request_));
      phase_ = Phase::gathering;
      return ncclInProgress;
    case Phase::gathering:
      phase_ = Phase::ready;
      if (const ncclResult_t checked = check_members(); checked != ncclSuccess) failed_ = checked;
      return failed_.value_or(ncclSuccess);
    case Phase::ready:
      if (deferred_.empty()) return ncclSuccess;
      if (!std::exchange(asked_, true)) return ncclInProgress;
      release_deferred();
      return ncclSuccess;
    case Phase::finalizing:
      release_deferred();
      if (unfinished_ != 0) return ncclInProgress;
      phase_ = Phase::finalized;
      if (size_ == 1) return ncclSuccess;
      check_mpi(MPI_Ibarrier(mpi_, &request_));
      return ncclInProgress;
    case Phase::finalized:
      return ncclSuccess;
  }
  return ncclInternalError;
}

void NcclCommunicator::issue(const std::shared_ptr<Stream>& stream, Operation operation) {
  deferred_.emplace_back(stream, std::move(operation));
  asked_ = false;
  if (blocking_) release_deferred();
}

void NcclCommunicator::release_deferred() {
  for (auto& [stream, operation] : std::exchange(deferred_, {})) {
    if (count_call("ncclHang", 0)) hangs_ = true;  // and with it all that the device has to do afterwards
    const auto exchange = std::make_shared<Exchange>(shared_from_this(), std::move(operation), hangs_);
    enqueue(stream, [exchange] { return exchange->step(); });
  }
}

void NcclCommunicator::finalize() {
  if (phase_ == Phase::ready) phase_ = Phase::finalizing;
}

void NcclCommunicator::abort() {
  aborted_ = true;
  deferred_.clear();
}

void NcclCommunicator::let_go() {
  static auto* const pending = new std::vector<std::shared_ptr<NcclCommunicator>>;
  if (request_ != MPI_REQUEST_NULL) pending->push_back(shared_from_this());
}

}  // namespace emulation
