// The sets of loops for host memory, one for each instruction set: see kernels_cpu.inc. They are
// plain functions, since what a class or a template that other files share would bring along could
// be taken from the newest set.
#ifndef TF_ADASUM_OPS_CORE_KERNELS_CPU_H_
#define TF_ADASUM_OPS_CORE_KERNELS_CPU_H_

#include "kernels.h"

namespace adasum {

// Of one dtype; kernels.h says what they do.
struct Loops {
  int64_t item_bytes;
  bool squares_may_overflow;
  void (*dot3)(const void* a, const void* b, int64_t n, double scale_a, double scale_b,
               DotProducts* sums);
  double (*max_abs)(const void* a, int64_t n);
  bool (*all_finite)(const void* a, int64_t n);
  void (*combine)(const void* a, const void* b, const Coefficients& c, int64_t n, void* out);
  void (*average)(const void* a, const void* b, double weight_a, double weight_b, int64_t n,
                  void* out);
  void (*delta)(const void* value, const void* start, int64_t n, void* out);
  void (*apply)(const void* start, const void* change, int64_t n, void* out);
  void (*narrow)(const float* from, double scale, int64_t n, void* to);
  void (*widen)(const void* from, double scale, int64_t n, float* to);
};

struct LoopSet {
  Loops float16, bfloat16, float32, float64;
};

const LoopSet& PlainLoops();
#if defined(__x86_64__)
const LoopSet& Avx2Loops();    // with FMA and F16C
const LoopSet& Avx512Loops();  // F, VL, DQ and BW, with FMA and F16C
#endif

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_KERNELS_CPU_H_
