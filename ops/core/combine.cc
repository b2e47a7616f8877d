#include "combine.h"

#include <algorithm>
#include <cmath>

namespace adasum {

// Calls visit(pieces) for those between two multiples of piece_bytes, one such distance after the
// other: what is done to many pieces at a time a GPU does as one.
template <typename Do>
void Combiner::ForEachBatch(Range range, Do visit) const {
  const int64_t size = std::max<int64_t>(piece_bytes_ / kernels_.item_bytes, 1);
  const int64_t origin = work_->range.begin;
  int64_t last = -1;
  batch_.clear();
  for (size_t i = 0; i < work_->parts.size(); ++i) {
    const Range part = work_->parts[i].range;
    const int64_t end = std::min(part.end, range.end);
    for (int64_t begin = std::max(part.begin, range.begin); begin < end;) {
      const int64_t number = (begin - origin) / size;
      const int64_t left = size - (begin - origin) % size;
      const Range piece{begin, begin + std::min(end - begin, left)};
      if (number != last && !batch_.empty()) {
        visit(batch_);
        batch_.clear();
      }
      last = number;
      batch_.push_back({i, piece});
      begin = piece.end;
    }
  }
  if (!batch_.empty()) visit(batch_);
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
  ForEachBatch(work_->range, [&](const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      if (before) before(piece.range);
    }
    for (const auto& [part, piece] : pieces) {
      const int64_t at = Offset(piece.begin);
      for (size_t p = 0; p < pairs_.size(); ++p) {
        const size_t i = Index(p, part);
        const double scale_a = exponents.empty() ? 1 : std::ldexp(1.0, -exponents[i].a);
        const double scale_b = exponents.empty() ? 1 : std::ldexp(1.0, -exponents[i].b);
        kernels_.Dot3(pairs_[p].a + at, pairs_[p].b + at, piece.size(), scale_a, scale_b, &dots[i]);
      }
    }
  });
  device_.Finish();
  static_assert(sizeof(DotProducts) == 3 * sizeof(double));
  if (over_ranks) over_ranks(Reduction::kSum, &dots.data()->ab, 3 * dots.size());
}

// Works the sums out once more with both sides of each tensor scaled to a largest magnitude near 1.
void Combiner::Rescale(const OverRanks& over_ranks) {
  std::vector<double> largest(2 * dots_.size(), 0.0);
  ForEachBatch(work_->range, [&](const std::vector<Piece>& pieces) {
    for (const auto& [part, piece] : pieces) {
      const int64_t at = Offset(piece.begin);
      for (size_t p = 0; p < pairs_.size(); ++p) {
        double* of_pair = &largest[2 * Index(p, part)];
        kernels_.MaxAbs(pairs_[p].a + at, piece.size(), &of_pair[0]);
        kernels_.MaxAbs(pairs_[p].b + at, piece.size(), &of_pair[1]);
      }
    }
  });
  device_.Finish();
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
  ForEachBatch(range, [&](const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      if (before && op_ != Op::kAdasum) before(piece.range);
    }
    // Without dot products: whether the bits are equal.
    if (op_ != Op::kAdasum) ComparePieces(pieces);
    for (const Piece& piece : pieces) CombinePiece(piece);
    for (const Piece& piece : pieces) {
      if (after) after(piece.range);
    }
  });
}

void Combiner::ComparePieces(const std::vector<Piece>& pieces) {
  for (const auto& [part, piece] : pieces) {
    const int64_t at = Offset(piece.begin);
    for (const Pair& pair : pairs_) {
      kernels_.Compare(pair.a + at, pair.b + at, piece.size(), &sides_);
    }
  }
}

void Combiner::CombinePiece(const Piece& piece) {
  const int64_t at = Offset(piece.range.begin), n = piece.range.size();
  for (size_t p = 0; p < pairs_.size(); ++p) {
    const Pair& pair = pairs_[p];
    const char *a = pair.a + at, *b = pair.b + at;
    switch (op_) {
      case Op::kAdasum:
        kernels_.Combine(a, b, coefficients_[Index(p, piece.part)], n, pair.out + at);
        break;
      case Op::kSum:
        kernels_.Combine(a, b, Coefficients{}, n, pair.out + at);
        break;
      case Op::kAverage: {
        // Weighed by the ranks behind the sides, so that no intermediate value is larger than an
        // input.
        const double all = pair.behind_a + pair.behind_b;
        kernels_.Average(a, b, pair.behind_a / all, pair.behind_b / all, n, pair.out + at);
        break;
      }
    }
  }
}

}  // namespace adasum
