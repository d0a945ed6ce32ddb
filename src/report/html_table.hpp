#pragma once
// A table whose rows are data in the page: the script shows a page of them at a time, sorted and searched, so that ten
// thousand rows cost no more than a hundred. Inside this room.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradclip/report/html_markup.hpp"

namespace gradclip {

class TableData {
 public:
  /// How the script shows and orders a column: name in a font of fixed width; status with a class of its value.
  enum class Kind : std::uint8_t { name, text, status, number, count, share };

  /// @param noun  of its rows: "parameters"
  explicit TableData(std::string_view noun) : noun_(noun) {}

  void column(std::string_view label, Kind kind, std::string_view meaning = {});

  TableData& row();
  TableData& cell(std::string_view text);
  TableData& cell(const std::string& text) { return cell(std::string_view(text)); }
  TableData& cell(const char* text) { return cell(std::string_view(text)); }
  TableData& cell(double number);
  TableData& cell(std::uint64_t count);
  TableData& cell(bool) = delete;
  template <class Value>
  TableData& cell(const std::optional<Value>& value) {
    return value ? cell(*value) : put("null");
  }

  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }
  void write(Markup& html) const;

 private:
  TableData& put(std::string_view json);

  std::string noun_;
  std::string columns_;  // JSON, without brackets
  std::string data_;
  std::size_t rows_ = 0;
  bool first_cell_ = true;
  bool has_text_ = false;  ///< there is something to search
};

}  // namespace gradclip
