#if defined(__x86_64__)
#define ADASUM_SIMD Avx512Kernels
#include "kernels_cpu.inc"
#endif
