#pragma once
// What reads text that nobody vouches for, as functions of that text: for libFuzzer (libfuzzer_entry.cpp) and for the
// replay of the corpus (corpus_test.cpp). Each returns where the text was read or refused as the header of its reader
// says; anything else, a broken promise about what was read included, ends the process.

#include <string>
#include <string_view>

namespace gradclip::fuzz {

void manifest(std::string_view text);
void packed_index(std::string_view text);
void placement(std::string_view text);
void name_map(std::string_view text);
void baseline(std::string_view text);
void report(std::string_view text);
void config(std::string_view text);
void model(std::string_view text);

struct Target {
  const char* name;  ///< of the function, and of its folder in the corpus
  void (*function)(std::string_view text);
};

inline constexpr Target kTargets[] = {
    {"manifest", manifest},   {"packed_index", packed_index},
    {"placement", placement}, {"name_map", name_map},
    {"baseline", baseline},   {"report", report},
    {"config", config},       {"model", model},
};

}  // namespace gradclip::fuzz
