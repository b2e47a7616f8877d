#include "rvh.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace adasum {

namespace {

class Rvh {
 public:
  Rvh(Transport& transport, const Kernels& kernels, const Layout& layout, Op op, void* buffer,
      void* scratch)
      : transport_(transport),
        kernels_(kernels),
        layout_(layout),
        op_(op),
        x_(static_cast<char*>(buffer)),
        received_(static_cast<char*>(scratch)) {
    leaves_ = 1;
    while (leaves_ * 2 <= transport.size()) leaves_ *= 2;
    pairs_ = transport.size() - leaves_;
  }

  Report Run() {
    const int rank = transport_.rank();
    const Range x = layout_.whole();
    if (rank >= 2 * pairs_) {
      leaf_ = rank - pairs_;
      Tree(x, 1);
    } else {
      leaf_ = rank / 2;
      RunPaired(x);
    }
    if (op_ == Op::kAdasum && transport_.size() > 1) report_.orthogonality = Orthogonality();
    return report_;
  }

 private:
  // The two halves of a range, seen from one of the two neighbours that share it.
  struct Halves {
    Range mine;
    Range theirs;
  };

  // The ranks over which the dot products of a level are summed, and how many ranks stand behind
  // either side.
  struct Group {
    std::vector<int> ranks;
    int position;
    int behind_a;
    int behind_b;
  };

  // A rank that shares its leaf with its neighbour: the even one of the two goes on into the tree
  // with the result.
  void RunPaired(Range x) {
    const bool left = transport_.rank() % 2 == 0;
    const int nghr = left ? transport_.rank() + 1 : transport_.rank() - 1;
    const Group pair{{2 * leaf_, 2 * leaf_ + 1}, left ? 0 : 1, 1, 1};
    const Halves halves = HalveAndCombine(x, left, nghr, pair);
    const int64_t norms_bytes = static_cast<int64_t>(norms_.size() * sizeof(Norms));
    if (left) {
      transport_.Receive(At(halves.theirs), Bytes(halves.theirs), nghr);
      Tree(x, 1);
      transport_.Send(At(x), Bytes(x), nghr);
      transport_.Send(norms_.data(), norms_bytes, nghr);
    } else {
      transport_.Send(At(halves.mine), Bytes(halves.mine), nghr);
      transport_.Receive(At(x), Bytes(x), nghr);
      transport_.Receive(norms_.data(), norms_bytes, nghr);
    }
  }

  // Algorithm 1, with ranks counted as leaves of the tree. Its line numbers stand at the right.
  void Tree(Range x, int d) {
    if (d >= leaves_) return;
    const bool left = leaf_ / d % 2 == 0;                                       // 2
    const int nghr = RankOfLeaf(left ? leaf_ + d : leaf_ - d);                  // 3, 8
    const Halves halves = HalveAndCombine(x, left, nghr, GroupOfLevel(2 * d));  // 4-18
    Tree(halves.mine, 2 * d);                                                   // 19
    transport_.SendReceive(At(halves.mine), Bytes(halves.mine), nghr,           // 22
                           At(halves.theirs), Bytes(halves.theirs), nghr);      // 23, 24
  }

  // Lines 1 to 18: leaves the combined half in place and returns which one it is.
  Halves HalveAndCombine(Range x, bool left, int nghr, const Group& group) {
    const int64_t mid = x.begin + x.size() / 2;  // 1
    const Halves halves =
        left ? Halves{{x.begin, mid}, {mid, x.end}} : Halves{{mid, x.end}, {x.begin, mid}};
    transport_.SendReceive(At(halves.theirs), Bytes(halves.theirs), nghr,  // 4, 9
                           received_, Bytes(halves.mine), nghr);           // 6, 10
    const char* own = At(halves.mine);
    const char* a = left ? own : received_;  // 5, 10
    const char* b = left ? received_ : own;  // 6, 11
    Combine(halves.mine, a, b, group);       // 15-18
    return halves;
  }

  void Combine(Range range, const char* a, const char* b, const Group& group) {
    if (op_ == Op::kAdasum) {
      CombineParts(range, a, b, AdasumCoefficients(range, a, b, group));
      return;
    }
    NoteEqual(range, a, b);
    if (op_ == Op::kSum) {
      kernels_.combine(a, b, Coefficients{}, range.size(), At(range));
      return;
    }
    // Weighed by the ranks behind the sides, so that no intermediate value is larger than an input.
    const double all = group.behind_a + group.behind_b;
    kernels_.average(a, b, group.behind_a / all, group.behind_b / all, range.size(), At(range));
  }

  // Without dot products: whether the bits are equal, which ends at the first that differs.
  void NoteEqual(Range range, const char* a, const char* b) {
    report_.all_equal =
        report_.all_equal && std::memcmp(a, b, static_cast<size_t>(Bytes(range))) == 0;
    if (!report_.all_equal || report_.any_nonzero) return;
    report_.any_nonzero = std::any_of(a, a + Bytes(range), [](char byte) { return byte != 0; });
  }

  std::vector<Coefficients> AdasumCoefficients(Range range, const char* a, const char* b,
                                               const Group& group) {
    std::vector<DotProducts> v = Dots(range, a, b, group, {});
    std::vector<Coefficients> coefficients;
    coefficients.reserve(v.size());
    bool rescale = false;
    for (const DotProducts& dots : v) {
      coefficients.push_back(adasum::AdasumCoefficients(dots));
      rescale = rescale || (kernels_.squares_may_overflow && OutOfRange(dots));
      report_.all_equal = report_.all_equal && dots.ab == dots.aa && dots.ab == dots.bb;
      report_.any_nonzero = report_.any_nonzero || dots.aa != 0;
    }
    // All members of the group see the same sums, so all of them or none take this way.
    if (rescale) Rescale(range, a, b, group, v, coefficients);
    NoteNorms(v, coefficients, group);
    return coefficients;
  }

  // Squared norms of a tensor: of the whole vector that this rank holds a part of, and summed over
  // the ranks whose vectors went into it.
  struct Norms {
    double combined;
    double inputs;
  };

  void NoteNorms(const std::vector<DotProducts>& v, const std::vector<Coefficients>& coefficients,
                 const Group& group) {
    norms_.resize(v.size());
    for (size_t t = 0; t < v.size(); ++t) {
      const double a = coefficients[t].factor_a, b = coefficients[t].factor_b;
      norms_[t].combined = a * a * v[t].aa + 2 * a * b * v[t].ab + b * b * v[t].bb;
      norms_[t].inputs =
          v[t].inputs + (group.behind_a == 1 ? v[t].aa : 0) + (group.behind_b == 1 ? v[t].bb : 0);
    }
  }

  std::vector<double> Orthogonality() const {
    std::vector<double> ratios;
    for (const Norms& norms : norms_) ratios.push_back(norms.combined / norms.inputs);
    return ratios;
  }

  // Exponents by which the two sides of a tensor are scaled before squaring.
  struct Exponents {
    int a;
    int b;
  };

  std::vector<DotProducts> Dots(Range range, const char* a, const char* b, const Group& group,
                                const std::vector<Exponents>& exponents) {
    constexpr int kSums = 4;
    std::vector<double> sums(kSums * layout_.tensors(), 0.0);
    // The ranks of a side know the same sum of norms, so each brings its share.
    const double share = 2.0 / static_cast<double>(group.ranks.size());
    for (size_t t = 0; t < norms_.size(); ++t) sums[kSums * t + 3] = norms_[t].inputs * share;
    layout_.ForEachPart(range, [&](int64_t tensor, Range part) {
      const Exponents e = exponents.empty() ? Exponents{0, 0} : exponents[tensor];
      const int64_t at = (part.begin - range.begin) * kernels_.item_bytes;
      DotProducts dots;
      kernels_.dot3(a + at, b + at, part.size(), std::ldexp(1.0, -e.a), std::ldexp(1.0, -e.b),
                    &dots);  // 15
      sums[kSums * tensor] = dots.ab;
      sums[kSums * tensor + 1] = dots.aa;
      sums[kSums * tensor + 2] = dots.bb;
    });
    GroupAllreduce(transport_, group.ranks, group.position, Reduction::kSum, sums);  // 16, 17
    std::vector<DotProducts> v(layout_.tensors());
    for (size_t t = 0; t < v.size(); ++t) {
      const double* of_t = &sums[kSums * t];
      v[t] = {of_t[0], of_t[1], of_t[2], of_t[3]};
    }
    return v;
  }

  // Works the sums out once more with both sides of each tensor scaled to a largest magnitude
  // near 1.
  void Rescale(Range range, const char* a, const char* b, const Group& group,
               std::vector<DotProducts>& plain, std::vector<Coefficients>& coefficients) {
    std::vector<double> largest(2 * layout_.tensors(), 0.0);
    layout_.ForEachPart(range, [&](int64_t tensor, Range part) {
      const int64_t at = (part.begin - range.begin) * kernels_.item_bytes;
      largest[2 * tensor] = kernels_.max_abs(a + at, part.size());
      largest[2 * tensor + 1] = kernels_.max_abs(b + at, part.size());
    });
    GroupAllreduce(transport_, group.ranks, group.position, Reduction::kMax, largest);
    std::vector<Exponents> exponents(layout_.tensors());
    for (size_t t = 0; t < exponents.size(); ++t) {
      exponents[t] = {ScaleExponent(largest[2 * t]), ScaleExponent(largest[2 * t + 1])};
    }
    const std::vector<DotProducts> v = Dots(range, a, b, group, exponents);
    for (size_t t = 0; t < v.size(); ++t) {
      if (OutOfRange(plain[t])) {
        coefficients[t] = adasum::AdasumCoefficients(v[t], exponents[t].a, exponents[t].b);
        plain[t] = v[t];
      }
    }
  }

  void CombineParts(Range range, const char* a, const char* b,
                    const std::vector<Coefficients>& coefficients) {
    layout_.ForEachPart(range, [&](int64_t tensor, Range part) {
      const int64_t at = (part.begin - range.begin) * kernels_.item_bytes;
      kernels_.combine(a + at, b + at, coefficients[tensor], part.size(), At(part));  // 18
    });
  }

  // Line 16: the leaves floor(leaf / d') d' + i for i in 0 ... d' - 1.
  Group GroupOfLevel(int members) const {
    const int first = leaf_ / members * members;
    Group group{std::vector<int>(members), leaf_ - first, 0, 0};
    for (int i = 0; i < members; ++i) {
      group.ranks[i] = RankOfLeaf(first + i);
      (i < members / 2 ? group.behind_a : group.behind_b) += first + i < pairs_ ? 2 : 1;
    }
    return group;
  }

  int RankOfLeaf(int leaf) const { return leaf < pairs_ ? 2 * leaf : leaf + pairs_; }
  char* At(Range range) const { return x_ + range.begin * kernels_.item_bytes; }
  int64_t Bytes(Range range) const { return range.size() * kernels_.item_bytes; }

  Transport& transport_;
  const Kernels& kernels_;
  const Layout& layout_;
  const Op op_;
  char* const x_;
  char* const received_;
  int leaves_;                // p
  int pairs_;                 // r
  int leaf_ = 0;              // this rank's leaf
  std::vector<Norms> norms_;  // empty until this rank's first pair
  Report report_;
};

}  // namespace

Report AllreduceRvh(Transport& transport, const Kernels& kernels, const Layout& layout, Op op,
                    void* buffer, void* scratch) {
  return Rvh(transport, kernels, layout, op, buffer, scratch).Run();
}

}  // namespace adasum
