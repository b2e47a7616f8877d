#if defined(__x86_64__)
#define ADASUM_SIMD Avx2Loops
#include "kernels_cpu.inc"
#endif
