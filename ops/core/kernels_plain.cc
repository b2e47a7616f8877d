#define ADASUM_SIMD PlainLoops
#include "kernels_cpu.inc"
