// The fusion buffer (the paper's section 4.4.3): the tensors of one call side by side, so that they
// are exchanged in a few large messages, each still reduced by itself.
#ifndef TF_ADASUM_OPS_CORE_FUSION_H_
#define TF_ADASUM_OPS_CORE_FUSION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "combine.h"
#include "device.h"
#include "kernels.h"
#include "layout.h"

namespace adasum {

// What a collective needs to know of a tensor. The pointers are the caller's, for the length of the
// call.
struct TensorSpec {
  DType dtype;
  const char* dtype_name;
  int64_t item_bytes;
  const int64_t* dims;
  int rank;
  const char* name;  // compared over the ranks and shown in errors; may be empty

  int64_t count() const;
  int64_t bytes() const { return count() * item_bytes; }
};

// A device's memory that keeps its size between calls. Aligned for vector instructions.
class Buffer {
 public:
  static constexpr int64_t kAlignment = 64;
  static int64_t Aligned(int64_t bytes);  // rounded up

  explicit Buffer(Device& device = HostDevice()) : device_(&device) {}
  Buffer(Buffer&& other) noexcept;
  ~Buffer();

  char* Reserve(int64_t bytes);

 private:
  Device* const device_;
  char* data_ = nullptr;
  int64_t capacity_ = 0;
};

// Tensors that are reduced together: of one dtype, with one op, side by side.
struct Bucket {
  const Kernels& kernels;
  Op op;
  Layout layout;
  std::vector<int64_t> tensors;  // for each tensor of the layout, its number in the call
  // With owners: the part of each, which holds its tensors.
  std::vector<Range> of_owner = {};

  int64_t bytes() const { return layout.size() * kernels.item_bytes; }
};

// The size of a bucket that TF_ADASUM_FUSION_THRESHOLD or HOROVOD_FUSION_THRESHOLD in the
// environment names, in bytes; nothing where they are not set. Throws Error(kInvalidArgument) for
// anything else than a number of bytes.
std::optional<int64_t> FusionThresholdOfEnvironment();

// The tensors of one call in buckets of whole tensors. A bucket has at most threshold bytes, unless
// a single tensor has more.
class Fusion {
 public:
  Fusion(Device& device, int64_t threshold) : device_(device), threshold_(threshold) {}

  // Numbers the tensors on from those added before. Those without elements are in no bucket.
  void Add(const std::vector<TensorSpec>& tensors, Op op);
  // The same where each tensor belongs to one of so many owners: in a bucket an owner's tensors lie
  // side by side, and the owners have about as many bytes each.
  void Add(const std::vector<TensorSpec>& tensors, Op op, const std::vector<int>& owner_of,
           int owners);

  const std::vector<Bucket>& buckets() const { return buckets_; }
  Device& device() const { return device_; }
  int64_t tensors() const { return tensors_; }
  // Of all buckets one after the other, each aligned.
  int64_t bytes() const { return bytes_; }

 private:
  Bucket& Close(const Kernels& kernels, Op op, std::vector<int64_t>& members,
                std::vector<int64_t>& counts);

  Device& device_;
  const int64_t threshold_;
  int64_t tensors_ = 0;
  int64_t bytes_ = 0;
  std::vector<Bucket> buckets_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_FUSION_H_
