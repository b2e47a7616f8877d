// The operator for one pair of vectors (the paper's equation 5), as the two factors that it puts on
// them:
//
//   Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b
//
// Everything here is scalar work in float64. The vectors are seen only through three sums, so they
// may lie in pieces on many ranks and in any memory.
#ifndef TF_ADASUM_OPS_CORE_ADASUM_H_
#define TF_ADASUM_OPS_CORE_ADASUM_H_

#include <algorithm>
#include <cmath>

namespace adasum {

// The three sums, of a times 2^-exponent_a and b times 2^-exponent_b.
struct DotProducts {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};

// Combine computes ((a * scale_a) * factor_a + (b * scale_b) * factor_b) * scale. The scales are
// powers of two, and 1 except where the squares of float64 values would leave the range of float64.
struct Coefficients {
  double scale_a = 1;
  double factor_a = 1;
  double scale_b = 1;
  double factor_b = 1;
  double scale = 1;
};

// A zero vector is neutral: its own factor does not matter, and a.b = 0 leaves the other one at 1.
inline Coefficients AdasumCoefficients(const DotProducts& v) {
  Coefficients c;
  if (v.aa != 0) c.factor_a = 1 - v.ab / (2 * v.aa);
  if (v.bb != 0) c.factor_b = 1 - v.ab / (2 * v.bb);
  return c;
}

// Whether the sums came from squares that may have overflowed or underflowed. Only float64 input
// can get here: the squares of the narrower types fit with room to spare for any number of
// elements.
inline bool OutOfRange(const DotProducts& v) {
  constexpr double kSmall = 1e-280, kLarge = 1e280;
  const auto safe = [=](double norm) { return norm >= kSmall && norm <= kLarge; };
  return !safe(v.aa) || !safe(v.bb);
}

// The exponent that brings a vector with this largest magnitude near 1. Clamped so that 2^-exponent
// is finite also for denormal numbers.
inline int ScaleExponent(double max_abs) {
  if (max_abs == 0 || !std::isfinite(max_abs)) return 0;
  return std::clamp(std::ilogb(max_abs), -1020, 1020);
}

// The same from sums of scaled vectors. The factors are those of the scaled vectors for a result
// that is scaled as the larger of the two, and is brought back at the end: so nothing on the way is
// too large where the result is not, and only the end rounds to a denormal number.
inline Coefficients AdasumCoefficients(const DotProducts& v, int exponent_a, int exponent_b) {
  if (v.ab == 0) return {};  // one of them is zero, or they are orthogonal
  const int exponent = std::max(exponent_a, exponent_b);
  const double of_a = std::ldexp(1.0, exponent_a - exponent);
  const double of_b = std::ldexp(1.0, exponent_b - exponent);
  return {std::ldexp(1.0, -exponent_a), of_a - v.ab / (2 * v.aa) * of_b,
          std::ldexp(1.0, -exponent_b), of_b - v.ab / (2 * v.bb) * of_a, std::ldexp(1.0, exponent)};
}

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_ADASUM_H_
