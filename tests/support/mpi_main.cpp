// The main of every multi-process GoogleTest binary: process 0 reports, all processes' failures count, nothing hangs.

#include <gtest/gtest.h>

#include <memory>

#include "gradclip/comm/mpi_communicator.hpp"
#include "mpi_environment.hpp"
#include "watchdog.hpp"

namespace {

std::unique_ptr<gradclip::Communicator> communicator;

/// The default printer's output once, from process 0; other processes only say what failed.
class FailuresOnly : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[process %d] %s:%d: %s\n", communicator->process(),
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(), result.message());
  }
};

}  // namespace

namespace gradclip::test {
Communicator& world() {
  return *communicator;
}
}  // namespace gradclip::test

int main(int argc, char** argv) {
  const gradclip::test::Watchdog watchdog(std::chrono::seconds(100));
  testing::InitGoogleTest(&argc, argv);
  static gradclip::HostBoard board;
  communicator = gradclip::make_mpi_communicator(&argc, &argv, board);
  if (communicator->process() != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly);
  }
  int failed = RUN_ALL_TESTS();
  for (const int theirs : gradclip::gather_value(*communicator, failed)) failed = failed != 0 ? failed : theirs;
  communicator.reset();
  return failed;
}
