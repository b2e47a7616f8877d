// Where the tensors of one bucket lie in the fusion buffer, and which part of which tensor a range
// of it holds.
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

// The elements of one tensor in a range. Never empty.
struct Part {
  int64_t tensor;
  Range range;
};

class Layout {
 public:
  explicit Layout(const std::vector<int64_t>& counts) : offsets_(counts.size() + 1, 0) {
    for (size_t i = 0; i < counts.size(); ++i) offsets_[i + 1] = offsets_[i] + counts[i];
  }

  int64_t tensors() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t size() const { return offsets_.back(); }
  Range whole() const { return {0, size()}; }
  Range tensor(int64_t t) const { return {offsets_[t], offsets_[t + 1]}; }
  bool is_whole(const Part& part) const { return part.range.size() == tensor(part.tensor).size(); }

  // Calls visit(part) for each tensor that has elements in the range, in order.
  template <typename Visit>
  void ForEachPart(Range range, Visit visit) const {
    if (range.size() <= 0) return;
    auto after = std::upper_bound(offsets_.begin(), offsets_.end(), range.begin);
    for (int64_t t = after - offsets_.begin() - 1; t < tensors() && offsets_[t] < range.end; ++t) {
      const Part part{t,
                      {std::max(range.begin, offsets_[t]), std::min(range.end, offsets_[t + 1])}};
      if (part.range.size() > 0) visit(part);
    }
  }

  std::vector<Part> Parts(Range range) const {
    std::vector<Part> parts;
    parts.reserve(static_cast<size_t>(tensors()));
    ForEachPart(range, [&](const Part& part) { parts.push_back(part); });
    return parts;
  }

  // The first element of the tensor that begins nearest to the given element, or the end.
  int64_t NearestTensor(int64_t element) const {
    const auto after = std::lower_bound(offsets_.begin(), offsets_.end(), element);
    if (after == offsets_.begin()) return 0;
    if (after == offsets_.end()) return size();
    return *after - element < element - *(after - 1) ? *after : *(after - 1);
  }

 private:
  std::vector<int64_t> offsets_;  // the first element of each tensor; last, the buffer's size
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_LAYOUT_H_
