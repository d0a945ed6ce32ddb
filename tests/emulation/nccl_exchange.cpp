#include "nccl_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "memory.hpp"
#include "settings.hpp"

namespace emulation {
namespace {

/// MPI's counts are int.
constexpr std::size_t kPiece = std::size_t{1} << 30;

/// MPI is for the main thread, as programs ask for MPI_THREAD_FUNNELED. Others wait for it to come by.
bool may_call_mpi() {
  int on_main_thread = 0;
  check_mpi(MPI_Is_thread_main(&on_main_thread));
  return on_main_thread != 0;
}

std::vector<Operation>& abandoned() {
  static auto* const all = new std::vector<Operation>;
  return *all;
}

}  // namespace

void check_mpi(int status) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  report("MPI: " + std::string(text, static_cast<std::size_t>(length)));
}

Exchange::Exchange(std::shared_ptr<NcclCommunicator> communicator, Operation operation, bool hangs)
    : communicator_(std::move(communicator)), operation_(std::move(operation)), hangs_(hangs) {
  ++communicator_->unfinished_;
}

Exchange::~Exchange() {
  --communicator_->unfinished_;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (requests_.empty() || finalized != 0) return;
  // Given up while MPI still knows the buffers: they stay until the process ends.
  for (Request& request : requests_) {
    if (request.handle == MPI_REQUEST_NULL) continue;
    if (!request.transfer->is_send) MPI_Cancel(&request.handle);
    MPI_Request_free(&request.handle);
  }
  abandoned().push_back(std::move(operation_));
}

void Exchange::post(Transfer& transfer) {
  transfer.staged.resize(transfer.bytes);
  if (transfer.is_send && transfer.bytes != 0) {
    std::memcpy(transfer.staged.data(), transfer.address, transfer.bytes);
  }
  if (transfer.peer == communicator_->rank()) {
    if (transfer.is_send) {
      communicator_->to_self_[transfer.tag] = transfer.staged;
    } else {
      from_self_.push_back(&transfer);
    }
    return;
  }
  std::size_t done = 0;
  do {  // an empty message is a message
    const std::size_t bytes = std::min(kPiece, transfer.bytes - done);
    Request request{MPI_REQUEST_NULL, &transfer, bytes};
    std::byte* const piece = transfer.staged.data() + done;
    check_mpi(transfer.is_send ? MPI_Isend(piece, static_cast<int>(bytes), MPI_BYTE, transfer.peer, transfer.tag,
                                           communicator_->mpi_, &request.handle)
                               : MPI_Irecv(piece, static_cast<int>(bytes), MPI_BYTE, transfer.peer, transfer.tag,
                                           communicator_->mpi_, &request.handle));
    requests_.push_back(request);
    done += bytes;
  } while (done < transfer.bytes);
}

bool Exchange::take_from_self(Transfer& transfer) {
  const auto sent = communicator_->to_self_.find(transfer.tag);
  if (sent == communicator_->to_self_.end()) return false;
  if (sent->second.size() != transfer.bytes) report("ncclSend and ncclRecv of one process to itself differ in size");
  transfer.staged = std::move(sent->second);
  communicator_->to_self_.erase(sent);
  return true;
}

bool Exchange::through() {
  std::erase_if(from_self_, [&](Transfer* transfer) { return take_from_self(*transfer); });
  for (Request& request : requests_) {
    if (request.handle == MPI_REQUEST_NULL) continue;
    int done = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&request.handle, &done, &status));
    if (done == 0 || request.transfer->is_send) continue;
    int received = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &received));
    if (static_cast<std::size_t>(received) != request.bytes) {
      report("ncclRecv of " + std::to_string(request.bytes) + " bytes from rank " +
             std::to_string(request.transfer->peer) + " met an ncclSend of " + std::to_string(received));
    }
  }
  std::erase_if(requests_, [](const Request& request) { return request.handle == MPI_REQUEST_NULL; });
  return requests_.empty() && from_self_.empty();
}

void Exchange::deliver() {
  for (Transfer& transfer : operation_.transfers) {
    if (transfer.is_send || transfer.address == nullptr || transfer.bytes == 0) continue;
    if (!is_allocated(transfer.address)) report("an ncclRecv arrives in memory that has been freed");
    std::memcpy(transfer.address, transfer.staged.data(), transfer.bytes);
  }
  if (operation_.finish) operation_.finish(operation_.transfers);
}

bool Exchange::step() {
  if (communicator_->aborted()) return true;
  if (hangs_) return false;
  if (communicator_->mpi_ != MPI_COMM_NULL && !may_call_mpi()) return false;
  if (!std::exchange(posted_, true)) {
    for (Transfer& transfer : operation_.transfers) post(transfer);
  }
  if (!through()) return false;
  deliver();
  return true;
}

}  // namespace emulation
