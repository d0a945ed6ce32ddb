#pragma once
// What the reports for programs are put together from. Inside this room.

#include <fmt/format.h>

#include <cstddef>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gradclip/base/finding.hpp"
#include "gradclip/dump/manifest.hpp"
#include "gradclip/report/report.hpp"

namespace gradclip {

/// The text as a JSON string with its quotes, everything beyond ASCII escaped.
[[nodiscard]] std::string json_text(std::string_view text);

/// Commas, line breaks and nesting; the caller names members in order.
class JsonWriter {
 public:
  enum class Layout : std::uint8_t { lines, one_line };

  explicit JsonWriter(std::ostream& out) : out_(out) {}

  void open(char bracket, Layout layout) {
    separate();
    out_ << bracket;
    levels_.push_back({bracket, layout, true});
  }
  void close() {
    const Level level = levels_.back();
    levels_.pop_back();
    if (level.layout == Layout::lines && !level.empty) new_line();
    out_ << (level.bracket == '{' ? '}' : ']');
    if (levels_.empty()) out_ << '\n';
  }
  void key(std::string_view name) {
    separate();
    out_ << json_text(name) << ": ";
    after_key_ = true;
  }

  void value(std::nullptr_t) { put("null"); }
  void value(bool boolean) { put(boolean ? "true" : "false"); }
  void value(double number) { put(json_number(number)); }
  void value(std::string_view text) { put(json_text(text)); }
  void value(const char* text) { value(std::string_view(text)); }
  void value(const std::string& text) { value(std::string_view(text)); }
  template <class Integer>
  requires std::is_integral_v<Integer>
  void value(Integer integer) { put(fmt::to_string(integer)); }
  void value(const ReportValue& any) {
    std::visit([this](const auto& of) { value(of); }, any);
  }
  template <class Value>
  void value(const std::optional<Value>& optional) {
    if (optional) {
      value(*optional);
    } else {
      value(nullptr);
    }
  }
  template <class Value>
  void value(const std::vector<Value>& values) {
    open('[', Layout::one_line);
    for (const Value& each : values) value(each);
    close();
  }

  template <class Value>
  void member(std::string_view name, const Value& of) {
    key(name);
    value(of);
  }
  void open_member(std::string_view name, char bracket, Layout layout) {
    key(name);
    open(bracket, layout);
  }

 private:
  struct Level {
    char bracket;
    Layout layout;
    bool empty;
  };

  void put(std::string_view text) {
    separate();
    out_ << text;
  }
  void separate() {
    if (after_key_) {
      after_key_ = false;
      return;
    }
    if (levels_.empty()) return;
    Level& level = levels_.back();
    if (!level.empty) out_ << (level.layout == Layout::lines ? "," : ", ");
    if (level.layout == Layout::lines) new_line();
    level.empty = false;
  }
  void new_line() {
    out_ << '\n';
    for (std::size_t i = 0; i < levels_.size(); ++i) out_ << "  ";
  }

  std::ostream& out_;
  std::vector<Level> levels_;
  bool after_key_ = false;
};

/// Members of the head and of every report, in their order.
void write_dump(JsonWriter& json, std::string_view key, const ReportDump& dump);
void write_run(JsonWriter& json, const ReportRun& run);
/// Index and count of a dump that is one microbatch.
void write_microbatch(JsonWriter& json, const std::optional<MicrobatchRecord>& microbatch);
void write_findings(JsonWriter& json, const std::vector<Finding>& findings, std::string_view key = "findings");

/// `diff`: rule, parameters, first_difference; and its table.
void write_diff(JsonWriter& json, const ReportDiff& diff);
void write_diff_csv(const ReportDiff& diff, std::ostream& out);

/// `check`: verdict, items, known findings, changes; and its table.
void write_check(JsonWriter& json, const Report& report);
void write_check_csv(const CheckResult& check, std::ostream& out);
/// `norms --histogram`: the member "histogram" of a parameter, a line of a view, or the norm; its columns of a CSV
/// file, each after a comma.
void write_histogram(JsonWriter& json, const ExponentHistogram& histogram);
[[nodiscard]] std::string histogram_csv_header();
[[nodiscard]] std::string histogram_csv(const ExponentHistogram& histogram);

/// `norms --sweep`: sweep, steps; and its table.
void write_sweep(JsonWriter& json, const ReportSweep& sweep);
void write_sweep_csv(const ReportSweep& sweep, std::ostream& out);
/// `merge`: format, bytes, parameters; and its table.
void write_merge(JsonWriter& json, const ReportMerge& merge);
void write_merge_csv(const ReportMerge& merge, std::ostream& out);
/// `tokens`: labels, microbatches, ranks; and its table.
void write_tokens(JsonWriter& json, const ReportTokens& tokens);
void write_tokens_csv(const ReportTokens& tokens, std::ostream& out);

/// `accumulate`: accumulated, output, microbatches; and its table.
void write_accumulate(JsonWriter& json, const Report& report);
void write_accumulate_csv(const ReportAccumulate& accumulated, std::ostream& out);

/// A cell of a CSV file (structured.hpp says how).
[[nodiscard]] std::string csv_text(std::string_view text);
[[nodiscard]] std::string csv_value(const ReportValue& value);  ///< empty for null
[[nodiscard]] std::string csv_number(double number);
[[nodiscard]] std::string csv_number(std::optional<double> number);

}  // namespace gradclip
