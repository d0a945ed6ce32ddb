#pragma once
// What an Error says and which exit code it stands for.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "gradclip/base/error.hpp"

namespace gradclip::test {

/// Runs `action`, which has to throw an Error of that code whose message holds every one of `parts`.
template <class Action>
void expect_error(ExitCode code, const std::vector<std::string>& parts, Action&& action) {
  try {
    action();
    ADD_FAILURE() << "no error, expected one with '" << (parts.empty() ? "" : parts[0]) << "'";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& part : parts) EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
  }
}

}  // namespace gradclip::test
