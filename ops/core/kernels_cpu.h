// The sets of kernels for host memory, one for each instruction set: see kernels_cpu.inc.
#ifndef TF_ADASUM_OPS_CORE_KERNELS_CPU_H_
#define TF_ADASUM_OPS_CORE_KERNELS_CPU_H_

#include "kernels.h"

namespace adasum {

struct KernelSet {
  Kernels float16, bfloat16, float32, float64;
};

const KernelSet& PlainKernels();
#if defined(__x86_64__)
const KernelSet& Avx2Kernels();    // with FMA and F16C
const KernelSet& Avx512Kernels();  // F, VL, DQ and BW, with FMA and F16C
#endif

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_KERNELS_CPU_H_
