// Changes of float32 weights in half the bytes (the paper's section 4.4.1): as float16, scaled by a
// power of two that is the same on all ranks, or as bfloat16.
//
// A change that leaves float16's range at a scale, on its way or in the end, is reduced again at
// half the scale, so nothing is lost; all ranks see the same numbers, so they do so together. What
// rounding drops on a rank may be kept for its next change.
#ifndef TF_ADASUM_OPS_CORE_WIRE_H_
#define TF_ADASUM_OPS_CORE_WIRE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "fusion.h"

namespace adasum {

// The power of two that changes are multiplied by. Kept by the caller from one sync to the next;
// equal on all ranks.
struct Scale {
  int64_t exponent = 0;
  int64_t good = 0;  // reductions since it was changed

  // So many, and it is doubled.
  static constexpr int64_t kGrowsAfter = 200;
};

struct Wire {
  DType dtype = DType::kOther;  // kFloat16 or kBFloat16; kOther: nothing is narrowed
  Scale scale;
  // For each tensor what was dropped the last time, which this time replaces; null where that is
  // not kept. Not looked at for tensors that are not float32.
  float* const* residuals = nullptr;

  bool is_narrow() const { return dtype != DType::kOther; }
};

// The changes of one sync as they are sent, in memory of their own, where their reduction replaces
// them: nothing else is written before it is known that all of them are finite.
class NarrowChanges {
 public:
  NarrowChanges(Device& device, const std::vector<TensorSpec>& specs, const Wire& wire);

  // What is sent: the tensors as they are on the wire.
  const std::vector<TensorSpec>& specs() const { return wire_specs_; }
  char* of(int64_t t) const { return memory_[static_cast<size_t>(t)]; }

  // From value - start, or from the value where start is null, and the residual. zeros: no change.
  // Returns whether all is finite.
  bool Fill(int64_t t, const void* value, const void* start, int64_t exponent, bool zeros);
  // After the reduction: whether all is finite.
  bool IsFinite(int64_t t) const;
  // Writes start + result to new_value; or the result, where start is null. keeps_residual: not
  // where the rank's change counted as zero.
  void Land(int64_t t, const void* value, const void* start, int64_t exponent, bool keeps_residual,
            void* new_value) const;

 private:
  bool is_narrow(int64_t t) const {
    return specs_[static_cast<size_t>(t)].dtype == DType::kFloat32;
  }
  int64_t Count(int64_t t) const { return specs_[static_cast<size_t>(t)].count(); }
  const Kernels& KernelsOf(int64_t t) const {
    return device_.kernels(wire_specs_[static_cast<size_t>(t)].dtype);
  }
  // A block of the change from element `begin` on, with the residual.
  void Change(int64_t t, const void* value, const void* start, int64_t begin, int64_t count,
              float* to) const;

  Device& device_;
  const std::vector<TensorSpec>& specs_;
  const Wire wire_;
  std::vector<TensorSpec> wire_specs_;
  std::vector<Buffer> buffers_;
  std::vector<char*> memory_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_WIRE_H_
