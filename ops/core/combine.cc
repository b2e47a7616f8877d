#include "combine.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace adasum {

// Calls visit(number of the part, piece).
template <typename Do>
void Combiner::ForEachPiece(Range range, Do visit) const {
  const int64_t size = piece_bytes_ / kernels_.item_bytes, origin = work_->range.begin;
  for (size_t i = 0; i < work_->parts.size(); ++i) {
    const Range part = work_->parts[i].range;
    const int64_t end = std::min(part.end, range.end);
    for (int64_t begin = std::max(part.begin, range.begin); begin < end;) {
      const Range piece{begin, std::min(end, origin + ((begin - origin) / size + 1) * size)};
      visit(i, piece);
      begin = piece.end;
    }
  }
}

void Combiner::Measure(const Work& work, const std::vector<Pair>& pairs,
                       const OverRanks& over_ranks, const Visit& before) {
  work_ = &work;
  pairs_ = pairs;
  if (op_ != Op::kAdasum) return;
  ComputeDots({}, over_ranks, before, dots_);
  coefficients_.resize(dots_.size());
  bool rescale = false;
  for (size_t i = 0; i < dots_.size(); ++i) {
    const DotProducts& dots = dots_[i];
    coefficients_[i] = AdasumCoefficients(dots);
    rescale = rescale || (kernels_.squares_may_overflow && OutOfRange(dots));
    all_equal_ = all_equal_ && dots.ab == dots.aa && dots.ab == dots.bb;
    any_nonzero_ = any_nonzero_ || dots.aa != 0;
  }
  // All ranks see the same sums, so all of them or none take this way.
  if (rescale) Rescale(over_ranks);
  NoteNorms();
}

void Combiner::ComputeDots(const std::vector<Exponents>& exponents, const OverRanks& over_ranks,
                           const Visit& before, std::vector<DotProducts>& dots) const {
  dots.assign(pairs_.size() * work_->all_rows, DotProducts{});
  ForEachPiece(work_->range, [&](size_t part, Range piece) {
    if (before) before(piece);
    const int64_t at = Offset(piece.begin);
    for (size_t p = 0; p < pairs_.size(); ++p) {
      const size_t i = Index(p, part);
      const double scale_a = exponents.empty() ? 1 : std::ldexp(1.0, -exponents[i].a);
      const double scale_b = exponents.empty() ? 1 : std::ldexp(1.0, -exponents[i].b);
      kernels_.dot3(pairs_[p].a + at, pairs_[p].b + at, piece.size(), scale_a, scale_b, &dots[i]);
    }
  });
  static_assert(sizeof(DotProducts) == 3 * sizeof(double));
  if (over_ranks) over_ranks(Reduction::kSum, &dots.data()->ab, 3 * dots.size());
}

// Works the sums out once more with both sides of each tensor scaled to a largest magnitude near 1.
void Combiner::Rescale(const OverRanks& over_ranks) {
  std::vector<double> largest(2 * dots_.size(), 0.0);
  ForEachPiece(work_->range, [&](size_t part, Range piece) {
    const int64_t at = Offset(piece.begin);
    for (size_t p = 0; p < pairs_.size(); ++p) {
      double* of_pair = &largest[2 * Index(p, part)];
      of_pair[0] = std::fmax(of_pair[0], kernels_.max_abs(pairs_[p].a + at, piece.size()));
      of_pair[1] = std::fmax(of_pair[1], kernels_.max_abs(pairs_[p].b + at, piece.size()));
    }
  });
  if (over_ranks) over_ranks(Reduction::kMax, largest.data(), largest.size());
  std::vector<Exponents> exponents(dots_.size());
  for (size_t i = 0; i < exponents.size(); ++i) {
    exponents[i] = {ScaleExponent(largest[2 * i]), ScaleExponent(largest[2 * i + 1])};
  }
  std::vector<DotProducts> scaled;
  ComputeDots(exponents, over_ranks, {}, scaled);
  for (size_t i = 0; i < scaled.size(); ++i) {
    if (!OutOfRange(dots_[i])) continue;
    const auto [a, b] = exponents[i];
    coefficients_[i] = AdasumCoefficients(scaled[i], a, b);
    // Only for the norms, where they can be represented.
    dots_[i] = {std::ldexp(scaled[i].ab, a + b), std::ldexp(scaled[i].aa, 2 * a),
                std::ldexp(scaled[i].bb, 2 * b)};
  }
}

void Combiner::NoteNorms() {
  norms_.resize(dots_.size());
  for (size_t i = 0; i < dots_.size(); ++i) {
    const DotProducts& v = dots_[i];
    const Coefficients& c = coefficients_[i];
    const double a = c.scale_a * c.factor_a * c.scale, b = c.scale_b * c.factor_b * c.scale;
    norms_[i] = {v.aa, v.bb, a * a * v.aa + 2 * a * b * v.ab + b * b * v.bb};
  }
}

void Combiner::Combine(Range range, const Visit& before, const Visit& after) {
  ForEachPiece(range, [&](size_t part, Range piece) {
    if (before && op_ != Op::kAdasum) before(piece);
    const int64_t at = Offset(piece.begin);
    for (size_t p = 0; p < pairs_.size(); ++p) {
      const Pair& pair = pairs_[p];
      const char *a = pair.a + at, *b = pair.b + at;
      switch (op_) {
        case Op::kAdasum:
          kernels_.combine(a, b, coefficients_[Index(p, part)], piece.size(), pair.out + at);
          break;
        case Op::kSum:
          NoteEqual(pair, at, piece.size() * kernels_.item_bytes);
          kernels_.combine(a, b, Coefficients{}, piece.size(), pair.out + at);
          break;
        case Op::kAverage: {
          NoteEqual(pair, at, piece.size() * kernels_.item_bytes);
          // Weighed by the ranks behind the sides, so that no intermediate value is larger than an
          // input.
          const double all = pair.behind_a + pair.behind_b;
          kernels_.average(a, b, pair.behind_a / all, pair.behind_b / all, piece.size(),
                           pair.out + at);
          break;
        }
      }
    }
    if (after) after(piece);
  });
}

// Without dot products: whether the bits are equal, which ends at the first that differs.
void Combiner::NoteEqual(const Pair& pair, int64_t at, int64_t bytes) {
  const char *a = pair.a + at, *b = pair.b + at;
  all_equal_ = all_equal_ && std::memcmp(a, b, static_cast<size_t>(bytes)) == 0;
  if (!all_equal_ || any_nonzero_) return;
  any_nonzero_ = std::any_of(a, a + bytes, [](char byte) { return byte != 0; });
}

}  // namespace adasum
