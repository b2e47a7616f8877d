#include "fusion.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <string>
#include <utility>

#include "error.h"

namespace adasum {

namespace {

// Bounds what the sums of dot products of a bucket take, however small its tensors are.
constexpr size_t kMostTensors = 1024;

}  // namespace

std::optional<int64_t> FusionThresholdOfEnvironment() {
  for (const char* name : {"TF_ADASUM_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"}) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == 0) continue;
    char* end = nullptr;
    errno = 0;
    const long long bytes = std::strtoll(text, &end, 10);
    if (*end != 0 || errno != 0 || bytes < 0) {
      throw Error(ErrorKind::kInvalidArgument,
                  std::string(name) + " must be a number of bytes. Received: '" + text + "'");
    }
    return bytes;
  }
  return std::nullopt;
}

int64_t TensorSpec::count() const {
  int64_t product = 1;
  for (int i = 0; i < rank; ++i) product *= dims[i];
  return product;
}

int64_t Buffer::Aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)) {}

Buffer::~Buffer() {
  if (data_ != nullptr) device_->Free(data_);
}

char* Buffer::Reserve(int64_t bytes) {
  if (bytes <= capacity_) return data_;
  if (data_ != nullptr) device_->Free(data_);
  data_ = nullptr;
  capacity_ = 0;
  data_ = device_->Allocate(Aligned(bytes));
  capacity_ = Aligned(bytes);
  return data_;
}

void Fusion::Add(const std::vector<TensorSpec>& tensors, Op op) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    const auto is_of_dtype = [&](const TensorSpec& tensor) { return tensor.dtype == dtype; };
    if (std::none_of(tensors.begin(), tensors.end(), is_of_dtype)) continue;
    std::vector<int64_t> members, counts;
    members.reserve(tensors.size());
    counts.reserve(tensors.size());
    int64_t bytes = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      const TensorSpec& tensor = tensors[t];
      const int64_t count = tensor.dtype == dtype ? tensor.count() : 0;
      if (count == 0) continue;
      const bool is_full = bytes + tensor.bytes() > threshold_ || members.size() == kMostTensors;
      if (is_full && !members.empty()) {
        Close(device_.kernels(dtype), op, members, counts);
        bytes = 0;
      }
      members.push_back(tensors_ + static_cast<int64_t>(t));
      counts.push_back(count);
      bytes += tensor.bytes();
    }
    if (!members.empty()) Close(device_.kernels(dtype), op, members, counts);
  }
  tensors_ += static_cast<int64_t>(tensors.size());
}

void Fusion::Add(const std::vector<TensorSpec>& tensors, Op op, const std::vector<int>& owner_of,
                 int owners) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    std::vector<std::deque<int64_t>> waiting(owners);
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].dtype == dtype && tensors[t].count() > 0) {
        waiting[owner_of[t]].push_back(static_cast<int64_t>(t));
      }
    }
    while (true) {
      std::vector<int64_t> members, counts;
      std::vector<Range> of_owner;
      int64_t elements = 0;
      for (std::deque<int64_t>& own : waiting) {
        const int64_t begin = elements;
        int64_t bytes = 0;
        for (size_t taken = 0; !own.empty() && taken < kMostTensors / owners + 1; ++taken) {
          const TensorSpec& tensor = tensors[own.front()];
          if (taken > 0 && bytes + tensor.bytes() > threshold_ / owners) break;
          members.push_back(tensors_ + own.front());
          counts.push_back(tensor.count());
          bytes += tensor.bytes();
          elements += tensor.count();
          own.pop_front();
        }
        of_owner.push_back({begin, elements});
      }
      if (members.empty()) break;
      Close(device_.kernels(dtype), op, members, counts).of_owner = std::move(of_owner);
    }
  }
  tensors_ += static_cast<int64_t>(tensors.size());
}

Bucket& Fusion::Close(const Kernels& kernels, Op op, std::vector<int64_t>& members,
                      std::vector<int64_t>& counts) {
  buckets_.push_back({kernels, op, Layout(counts), std::move(members)});
  bytes_ += Buffer::Aligned(buckets_.back().bytes());
  members.clear();
  counts.clear();
  return buckets_.back();
}

}  // namespace adasum
