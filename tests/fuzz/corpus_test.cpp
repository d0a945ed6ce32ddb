// The committed corpus, file by file, and mutations of it. A broken promise ends the process (expectations.hpp).

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "mutation.hpp"
#include "targets.hpp"

namespace gradclip::fuzz {
namespace {

std::vector<std::string> corpus_of(const std::string& target) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(GRADCLIP_CORPUS) / target)) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<std::string> texts;
  for (const std::filesystem::path& file : files) {
    std::ifstream in(file, std::ios::binary);
    texts.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return texts;
}

class Corpus : public testing::TestWithParam<Target> {};

TEST_P(Corpus, Replay) {
  const std::vector<std::string> texts = corpus_of(GetParam().name);
  ASSERT_FALSE(texts.empty());
  GetParam().function({});
  for (const std::string& text : texts) GetParam().function(text);
}

/// Time is what counts in a test that runs at every push: as many mutations as fit in half a second. With
/// GRADCLIP_FUZZ_EXECUTIONS=N in the environment: that many, however long they take.
TEST_P(Corpus, Mutations) {
  const std::vector<std::string> texts = corpus_of(GetParam().name);
  ASSERT_FALSE(texts.empty());
  const char* wanted = std::getenv("GRADCLIP_FUZZ_EXECUTIONS");
  const std::size_t most = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : 0;
  Mutator mutator(7);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  const auto goes_on = [&](std::size_t done) {
    return most != 0 ? done < most : done < 100 || std::chrono::steady_clock::now() < end;
  };
  std::size_t executions = 0;
  for (; goes_on(executions); ++executions) {
    const std::string& text = texts[executions % texts.size()];
    GetParam().function(mutator.mutated(text, texts[(executions / texts.size()) % texts.size()]));
  }
  RecordProperty("executions", std::to_string(executions));
}

INSTANTIATE_TEST_SUITE_P(Every, Corpus, testing::ValuesIn(kTargets),
                         [](const testing::TestParamInfo<Target>& target) { return std::string(target.param.name); });

}  // namespace
}  // namespace gradclip::fuzz
