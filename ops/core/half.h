// float16 and bfloat16 as storage formats: converted to float for arithmetic, rounded to nearest
// even on the way back.
#ifndef TF_ADASUM_OPS_CORE_HALF_H_
#define TF_ADASUM_OPS_CORE_HALF_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace adasum {

// Files compiled for different instruction sets include this. A copy of a function that is not
// inlined would be shared by all of them, and might have the newest one's instructions.
#ifdef __CUDACC__
#define ADASUM_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define ADASUM_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

template <typename To, typename From>
ADASUM_ALWAYS_INLINE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the sizes must match");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Float16 {
  uint16_t bits;

  Float16() = default;
  ADASUM_ALWAYS_INLINE explicit Float16(float value) : bits(Round(value)) {}
  ADASUM_ALWAYS_INLINE explicit Float16(double value) : bits(Round(static_cast<float>(value))) {}

  ADASUM_ALWAYS_INLINE explicit operator float() const {
#ifdef __CUDA_ARCH__
    return __half2float(BitCast<__half>(bits));  // an instruction, where the rest takes several
#else
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) return BitCast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // Moving the fields into place leaves the exponent's bias off by 112; the product mends it, for
    // denormals too.
    return BitCast<float>(sign | BitCast<uint32_t>(BitCast<float>(rest << 13) * 0x1p112f));
#endif
  }
  ADASUM_ALWAYS_INLINE explicit operator double() const { return static_cast<float>(*this); }

 private:
  ADASUM_ALWAYS_INLINE static uint16_t Round(float value) {
#ifdef __CUDA_ARCH__
    return BitCast<uint16_t>(__float2half_rn(value));
#else
    const uint32_t all = BitCast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>(all >> 16 & 0x8000u);
    const uint32_t magnitude = all & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or more
    if (magnitude < 0x38800000u) {
      // Denormal in float16: adding 0.5 lets the float addition do the rounding, in units of 2^-24.
      const float shifted = BitCast<float>(magnitude) + 0.5f;
      return sign | static_cast<uint16_t>(BitCast<uint32_t>(shifted) - 0x3f000000u);
    }
    const uint32_t odd = magnitude >> 13 & 1u;
    return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + odd) >> 13);
#endif
  }
};

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  ADASUM_ALWAYS_INLINE explicit BFloat16(float value) : bits(Round(value)) {}
  ADASUM_ALWAYS_INLINE explicit BFloat16(double value) : bits(Round(static_cast<float>(value))) {}

  ADASUM_ALWAYS_INLINE explicit operator float() const {
    return BitCast<float>(static_cast<uint32_t>(bits) << 16);
  }
  ADASUM_ALWAYS_INLINE explicit operator double() const { return static_cast<float>(*this); }

 private:
  ADASUM_ALWAYS_INLINE static uint16_t Round(float value) {
    const uint32_t all = BitCast<uint32_t>(value);
    if ((all & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(all >> 16 | 0x40u);  // NaN
    return static_cast<uint16_t>((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
  }
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_HALF_H_
