#include "kernels_cpu.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "error.h"

namespace adasum {

namespace {

enum class Simd { kPlain, kAvx2, kAvx512 };

Simd BestSimd() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return Simd::kPlain;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512bw")) {
    return Simd::kAvx2;
  }
  return Simd::kAvx512;
#else
  return Simd::kPlain;
#endif
}

// The best that the processor has, or a lower one that TF_ADASUM_SIMD asks for.
Simd ChooseSimd() {
  const Simd best = BestSimd();
  const char* wanted = std::getenv("TF_ADASUM_SIMD");
  const std::string name = wanted == nullptr ? "" : wanted;
  if (name == "plain") return Simd::kPlain;
  if (name == "avx2") return std::min(best, Simd::kAvx2);
  return best;
}

Simd ChosenSimd() {
  static const Simd chosen = ChooseSimd();
  return chosen;
}

const KernelSet& ChosenKernels() {
#if defined(__x86_64__)
  if (ChosenSimd() == Simd::kAvx512) return Avx512Kernels();
  if (ChosenSimd() == Simd::kAvx2) return Avx2Kernels();
#endif
  return PlainKernels();
}

}  // namespace

const char* CpuSimd() {
  switch (ChosenSimd()) {
    case Simd::kAvx512:
      return "avx512";
    case Simd::kAvx2:
      return "avx2";
    default:
      return "plain";
  }
}

const Kernels& CpuKernels(DType dtype) {
  static const KernelSet& set = ChosenKernels();
  switch (dtype) {
    case DType::kFloat16:
      return set.float16;
    case DType::kBFloat16:
      return set.bfloat16;
    case DType::kFloat32:
      return set.float32;
    case DType::kFloat64:
      return set.float64;
    default:
      throw Error(
          ErrorKind::kInvalidArgument,
          "there is no arithmetic for this dtype; expected float16, bfloat16, float32 or float64");
  }
}

}  // namespace adasum
