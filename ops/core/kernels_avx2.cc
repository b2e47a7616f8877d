#if defined(__x86_64__)
#define ADASUM_SIMD Avx2Kernels
#include "kernels_cpu.inc"
#endif
