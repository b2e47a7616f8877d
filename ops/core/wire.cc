#include "wire.h"

#include <algorithm>
#include <cmath>

namespace adasum {

namespace {

constexpr int64_t kBlock = 4096;  // elements

const char* At(const void* data, int64_t bytes) { return static_cast<const char*>(data) + bytes; }

}  // namespace

NarrowChanges::NarrowChanges(Device& device, const std::vector<TensorSpec>& specs, const Wire& wire)
    : device_(device), specs_(specs), wire_(wire), wire_specs_(specs) {
  const Kernels& wide = device.kernels(wire.dtype);
  for (TensorSpec& spec : wire_specs_) {
    if (spec.dtype == DType::kFloat32) {
      spec.dtype = wire.dtype;
      spec.item_bytes = wide.item_bytes;
      spec.dtype_name = wire.dtype == DType::kFloat16 ? "float16" : "bfloat16";
    }
    memory_.push_back(buffers_.emplace_back(device).Reserve(spec.bytes()));
  }
}

void NarrowChanges::Change(int64_t t, const void* value, const void* start, int64_t begin,
                           int64_t count, float* to) const {
  const Kernels& kernels = device_.kernels(DType::kFloat32);
  const int64_t at = begin * kernels.item_bytes;
  if (start == nullptr) {
    kernels.Copy(At(value, at), count, to);
  } else {
    kernels.Delta(At(value, at), At(start, at), count, to);
  }
  const float* residual = wire_.residuals == nullptr ? nullptr : wire_.residuals[t];
  if (residual != nullptr) kernels.Apply(to, residual + begin, count, to);
}

bool NarrowChanges::Fill(int64_t t, const void* value, const void* start, int64_t exponent,
                         bool zeros) {
  const Kernels& kernels = KernelsOf(t);
  char* to = of(t);
  const int64_t count = Count(t);
  if (zeros) {
    kernels.Zero(count, to);
    return true;
  }
  if (!is_narrow(t)) {
    start == nullptr ? kernels.Copy(value, count, to) : kernels.Delta(value, start, count, to);
    return true;
  }
  const double scale = std::ldexp(1.0, static_cast<int>(exponent));
  float block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    Change(t, value, start, begin, size, block);
    kernels.Narrow(block, scale, size, to + begin * kernels.item_bytes);
  }
  return IsFinite(t);
}

bool NarrowChanges::IsFinite(int64_t t) const {
  Inspection found;
  KernelsOf(t).Inspect(of(t), nullptr, Count(t), &found);
  return found.finite;
}

void NarrowChanges::Land(int64_t t, const void* value, const void* start, int64_t exponent,
                         bool keeps_residual, void* new_value) const {
  if (!is_narrow(t)) {
    const Kernels& kernels = KernelsOf(t);
    start == nullptr ? kernels.Copy(of(t), Count(t), new_value)
                     : kernels.Apply(start, of(t), Count(t), new_value);
    return;
  }
  const Kernels &narrow = device_.kernels(wire_.dtype), &wide = device_.kernels(DType::kFloat32);
  const double scale = std::ldexp(1.0, static_cast<int>(exponent)), back = 1 / scale;
  float* residual = wire_.residuals == nullptr || !keeps_residual ? nullptr : wire_.residuals[t];
  float change[kBlock], sent[kBlock];
  char wire[kBlock * 2];
  const int64_t count = Count(t);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin), at = begin * wide.item_bytes;
    if (residual != nullptr) {
      // What was sent is gone, but not what it was made of.
      Change(t, value, start, begin, size, change);
      narrow.Narrow(change, scale, size, wire);
      narrow.Widen(wire, back, size, sent);
      wide.Delta(change, sent, size, residual + begin);
    }
    narrow.Widen(of(t) + begin * narrow.item_bytes, back, size, change);
    char* to = static_cast<char*>(new_value) + at;
    if (start == nullptr) {
      wide.Copy(change, size, to);
    } else {
      wide.Apply(At(start, at), change, size, to);
    }
  }
}

}  // namespace adasum
