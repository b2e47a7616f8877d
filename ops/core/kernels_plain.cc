#define ADASUM_SIMD PlainKernels
#include "kernels_cpu.inc"
