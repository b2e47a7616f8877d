#include "fusion.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

namespace adasum {

int64_t TensorSpec::count() const {
  int64_t product = 1;
  for (int i = 0; i < rank; ++i) product *= dims[i];
  return product;
}

int64_t Buffer::Aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

char* Buffer::Reserve(int64_t bytes) {
  if (bytes <= capacity_) return data_.get();
  const int64_t rounded = Aligned(bytes);
  data_.reset();
  capacity_ = 0;
  data_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(rounded))));
  if (data_ == nullptr) throw std::bad_alloc();
  capacity_ = rounded;
  return data_.get();
}

void Buffer::Free::operator()(char* data) const { std::free(data); }

Fusion::Fusion(const std::vector<TensorSpec>& tensors, Op op, int64_t begin)
    : op_(op), tensors_(static_cast<int64_t>(tensors.size())), end_(begin) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    std::vector<int64_t> members, counts;
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].dtype != dtype) continue;
      members.push_back(static_cast<int64_t>(t));
      counts.push_back(tensors[t].count());
    }
    if (members.empty()) continue;
    const Kernels& kernels = CpuKernels(dtype);
    groups_.push_back({kernels, std::move(members), Layout(counts), end_});
    end_ = Buffer::Aligned(end_ + groups_.back().layout.size() * kernels.item_bytes);
  }
}

int64_t Fusion::scratch_bytes() const {
  int64_t bytes = 0;
  for (const Group& group : groups_) {
    bytes = std::max(bytes, (group.layout.size() + 1) / 2 * group.kernels.item_bytes);
  }
  return bytes;
}

void Fusion::ForEach(char* buffer, const Visit& visit) const {
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.members.size(); ++i) {
      const int64_t at = group.layout.offset(i), count = group.layout.offset(i + 1) - at;
      if (count == 0) continue;
      visit(group.kernels, group.members[i], count,
            buffer + group.begin + at * group.kernels.item_bytes);
    }
  }
}

Report Fusion::Reduce(Transport& transport, char* buffer, char* scratch) const {
  Report all;
  for (const Group& group : groups_) {
    const Report part =
        AllreduceRvh(transport, group.kernels, group.layout, op_, buffer + group.begin, scratch);
    all.all_equal = all.all_equal && part.all_equal;
    all.any_nonzero = all.any_nonzero || part.any_nonzero;
    if (part.orthogonality.empty()) continue;
    all.orthogonality.resize(tensors_);
    for (size_t i = 0; i < group.members.size(); ++i) {
      all.orthogonality[group.members[i]] = part.orthogonality[i];
    }
  }
  return all;
}

}  // namespace adasum
