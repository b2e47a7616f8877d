// The arithmetic on long vectors, one table of functions per dtype: the other thing, beside the
// transport, that an algorithm is written against.
#ifndef TF_ADASUM_OPS_CORE_KERNELS_H_
#define TF_ADASUM_OPS_CORE_KERNELS_H_

#include <cstdint>

#include "adasum.h"

namespace adasum {

enum class DType : int32_t { kOther = 0, kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3, kFloat64 = 4 };

// Every function takes n elements; sums are accumulated in float64 for every dtype (the paper's
// section 4.4.1), in an order that depends on n alone.
struct Kernels {
  int64_t item_bytes;
  // Whether squares of this dtype's values may leave the range of float64.
  bool squares_may_overflow;

  // Adds the products of a * scale_a and b * scale_b to sums.
  void (*dot3)(const void* a, const void* b, int64_t n, double scale_a, double scale_b,
               DotProducts* sums);
  // The largest magnitude that is a number.
  double (*max_abs)(const void* a, int64_t n);
  // Whether no element is infinite or NaN.
  bool (*all_finite)(const void* a, int64_t n);
  // out = what Coefficients says. out may be a or b.
  void (*combine)(const void* a, const void* b, const Coefficients& c, int64_t n, void* out);
  // out = a * weight_a + b * weight_b, for weights whose sum is 1: where a and b are equal, out is
  // too.
  void (*average)(const void* a, const void* b, double weight_a, double weight_b, int64_t n,
                  void* out);
  // out = value - start
  void (*delta)(const void* value, const void* start, int64_t n, void* out);
  // out = start + change. out may be start.
  void (*apply)(const void* start, const void* change, int64_t n, void* out);
};

// The kernels for host memory. Throws Error(kInvalidArgument) for kOther.
const Kernels& CpuKernels(DType dtype);

// "avx512", "avx2" or "plain": the instruction set that the kernels for host memory use. The best
// that the processor has, unless the environment's TF_ADASUM_SIMD names a lower one.
const char* CpuSimd();

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_KERNELS_H_
