// The arithmetic on long vectors, for one dtype in one kind of memory: the other thing, beside the
// transport, that an algorithm is written against.
#ifndef TF_ADASUM_OPS_CORE_KERNELS_H_
#define TF_ADASUM_OPS_CORE_KERNELS_H_

#include <cstdint>

#include "adasum.h"

namespace adasum {

enum class DType : int32_t { kOther = 0, kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3, kFloat64 = 4 };

// What a rank has to know of the change of a tensor, or of some of its elements.
struct Inspection {
  bool finite = true;  // no element of the change is infinite or NaN
  bool zero = true;    // all of them are 0
  uint64_t start = 0;  // a checksum of the tensor that the change begins at
};

// Whether two vectors have the same bits, and whether there are others than zeros.
struct Comparison {
  bool differ = false;
  bool nonzero = false;
};

// Every function takes n elements; sums are accumulated in float64 for every dtype (the paper's
// section 4.4.1), in an order that depends on n alone.
//
// Things may be done later: in the order in which they are asked for, but for those of one kind
// between two calls of Device::EndBatch, whose order is any. What a pointer to a result leads to is
// updated by Device::Finish at the latest.
class Kernels {
 public:
  const int64_t item_bytes;
  // Whether squares of this dtype's values may leave the range of float64.
  const bool squares_may_overflow;
  // So much is best worked on at a time, from one thing that is done to it to the next.
  const int64_t piece_bytes;
  // Of a message, so that it runs at full speed and others overlap with the arithmetic.
  const int64_t message_bytes;

  // Adds the products of a * scale_a and b * scale_b to sums.
  virtual void Dot3(const void* a, const void* b, int64_t n, double scale_a, double scale_b,
                    DotProducts* sums) const = 0;
  // Makes largest at least the largest magnitude that is a number.
  virtual void MaxAbs(const void* a, int64_t n, double* largest) const = 0;
  // Of the change from start to value, or, where start is null, of value. found is new.
  virtual void Inspect(const void* value, const void* start, int64_t n,
                       Inspection* found) const = 0;
  // Adds to what is found already.
  virtual void Compare(const void* a, const void* b, int64_t n, Comparison* found) const = 0;
  // out = what Coefficients says. out may be a or b.
  virtual void Combine(const void* a, const void* b, const Coefficients& c, int64_t n,
                       void* out) const = 0;
  // out = a * weight_a + b * weight_b, for weights whose sum is 1: where a and b are equal, out is
  // too.
  virtual void Average(const void* a, const void* b, double weight_a, double weight_b, int64_t n,
                       void* out) const = 0;
  // out = value - start
  virtual void Delta(const void* value, const void* start, int64_t n, void* out) const = 0;
  // out = start + change. out may be start.
  virtual void Apply(const void* start, const void* change, int64_t n, void* out) const = 0;
  // to = from * scale, rounded to this dtype once, and back: for float16 and bfloat16.
  virtual void Narrow(const float* from, double scale, int64_t n, void* to) const = 0;
  virtual void Widen(const void* from, double scale, int64_t n, float* to) const = 0;
  virtual void Copy(const void* from, int64_t n, void* to) const = 0;
  virtual void Zero(int64_t n, void* to) const = 0;

 protected:
  Kernels(int64_t item_bytes_of_dtype, bool may_overflow, int64_t best_piece, int64_t best_message)
      : item_bytes(item_bytes_of_dtype),
        squares_may_overflow(may_overflow),
        piece_bytes(best_piece),
        message_bytes(best_message) {}
  ~Kernels() = default;
};

// For kOther: Error(kInvalidArgument).
[[noreturn]] void ThrowNoArithmetic();

// "avx512", "avx2" or "plain": the instruction set that the kernels for host memory use. The best
// that the processor has, unless the environment's TF_ADASUM_SIMD names a lower one.
const char* CpuSimd();

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_KERNELS_H_
