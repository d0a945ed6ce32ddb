#pragma once
// Numbers as places: scales with their ticks, classes of colour, and numbers as labels. Inside this room.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace gradclip {

/// "0.00123", "1.5e-9", "nan"
[[nodiscard]] std::string short_number(double number, int digits = 4);
/// "12.30 %", "0 %", "1.4e-5 %", "nan"
[[nodiscard]] std::string percentage(double share);
/// The shortest that reads back to the same bits.
[[nodiscard]] std::string exact_number(double number);
/// "1,234,567" of what is whole, else as short_number().
[[nodiscard]] std::string count_number(double number);

/// "2⁻¹⁴"
[[nodiscard]] std::string power_text(std::int64_t exponent);

/// Numbers from low to high along a line. Logarithmic where they span more than a factor of 50.
struct Axis {
  double low = 0.0;
  double high = 1.0;
  bool logarithmic = false;

  /// 0 at low, 1 at high; what is below or above stays at the end. @pre not NaN
  [[nodiscard]] double place(double number) const;
  /// Round numbers within the axis, about `wanted` of them.
  [[nodiscard]] std::vector<double> ticks(std::size_t wanted) const;
};

/// An axis for what is finite of the numbers: from 0 to a round number where it is linear; from the decade below the
/// smallest positive one to a decade above the largest where it is logarithmic.
[[nodiscard]] Axis axis_for(std::span<const double> numbers);

/// How many classes of colour a scale has: css classes s0 to s6, d0 to d6.
inline constexpr std::size_t kColourClasses = 7;

/// The class of a number between the lowest and the highest finite one. Logarithmic where all are positive and span
/// more than a factor of 50. Empty for what is not finite.
class ColourScale {
 public:
  explicit ColourScale(std::span<const double> numbers);

  [[nodiscard]] std::optional<std::size_t> class_of(double number) const;
  [[nodiscard]] double low() const noexcept { return low_; }
  [[nodiscard]] double high() const noexcept { return high_; }
  [[nodiscard]] bool logarithmic() const noexcept { return logarithmic_; }

 private:
  double low_ = 0.0;
  double high_ = 0.0;
  double lowest_positive_ = 0.0;
  bool logarithmic_ = false;
};

}  // namespace gradclip
