// Where the tensors of one call lie in the fusion buffer, and which part of which tensor a range of
// it holds.
//
// Recursive halving cuts the buffer without regard to tensors, Adasum works per tensor (the paper's
// section 4.4.3): every loop over a range of the buffer is therefore a loop over parts.
#ifndef TF_ADASUM_OPS_CORE_LAYOUT_H_
#define TF_ADASUM_OPS_CORE_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace adasum {

// A half-open range of elements of the fusion buffer.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

class Layout {
 public:
  explicit Layout(const std::vector<int64_t>& counts) : offsets_(counts.size() + 1, 0) {
    for (size_t i = 0; i < counts.size(); ++i) offsets_[i + 1] = offsets_[i] + counts[i];
  }

  int64_t tensors() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t size() const { return offsets_.back(); }
  Range whole() const { return {0, size()}; }
  int64_t offset(int64_t tensor) const { return offsets_[tensor]; }

  // Calls visit(tensor, part) for each tensor that has elements in the range, in order.
  template <typename Visit>
  void ForEachPart(Range range, Visit visit) const {
    if (range.size() <= 0) return;
    auto after = std::upper_bound(offsets_.begin(), offsets_.end(), range.begin);
    for (int64_t t = after - offsets_.begin() - 1; t < tensors() && offsets_[t] < range.end; ++t) {
      const Range part{std::max(range.begin, offsets_[t]), std::min(range.end, offsets_[t + 1])};
      if (part.size() > 0) visit(t, part);
    }
  }

 private:
  std::vector<int64_t> offsets_;  // the first element of each tensor; last, the buffer's size
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_LAYOUT_H_
