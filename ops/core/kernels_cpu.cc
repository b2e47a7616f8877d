#include "kernels_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "agreement.h"
#include "device.h"
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

const LoopSet& ChosenLoops() {
#if defined(__x86_64__)
  if (ChosenSimd() == Simd::kAvx512) return Avx512Loops();
  if (ChosenSimd() == Simd::kAvx2) return Avx2Loops();
#endif
  return PlainLoops();
}

// Little enough to stay in the first caches between what is done to it, and enough to be worth
// starting.
constexpr int64_t kPieceBytes = 16 << 10;
constexpr int64_t kMessageBytes = 256 << 10;

bool IsZero(const char* data, int64_t bytes) {
  return std::all_of(data, data + bytes, [](char byte) { return byte == 0; });
}

const char* At(const void* data, int64_t bytes) { return static_cast<const char*>(data) + bytes; }

class CpuKernels : public Kernels {
 public:
  explicit CpuKernels(const Loops& loops)
      : Kernels(loops.item_bytes, loops.squares_may_overflow, kPieceBytes, kMessageBytes),
        loops_(loops) {}

  void Dot3(const void* a, const void* b, int64_t n, double scale_a, double scale_b,
            DotProducts* sums) const override {
    loops_.dot3(a, b, n, scale_a, scale_b, sums);
  }

  void MaxAbs(const void* a, int64_t n, double* largest) const override {
    *largest = std::fmax(*largest, loops_.max_abs(a, n));
  }

  // Reads both once, in blocks that stay in the cache for what is asked of them.
  void Inspect(const void* value, const void* start, int64_t n, Inspection* found) const override {
    alignas(64) char block[kPieceBytes];
    Hasher starts;
    const int64_t most = kPieceBytes / item_bytes;
    for (int64_t begin = 0; begin < n; begin += most) {
      const int64_t size = std::min(most, n - begin), at = begin * item_bytes;
      const char* change = At(value, at);
      if (start != nullptr) {
        starts.Add(At(start, at), size * item_bytes);
        loops_.delta(change, At(start, at), size, block);
        change = block;
      }
      found->finite = found->finite && loops_.all_finite(change, size);
      found->zero = found->zero && IsZero(change, size * item_bytes);
    }
    found->start = starts.hash();
  }

  // Ends at the first bit that differs.
  void Compare(const void* a, const void* b, int64_t n, Comparison* found) const override {
    const int64_t bytes = n * item_bytes;
    found->differ = found->differ || std::memcmp(a, b, static_cast<size_t>(bytes)) != 0;
    if (found->differ || found->nonzero) return;
    found->nonzero = !IsZero(At(a, 0), bytes);
  }

  void Combine(const void* a, const void* b, const Coefficients& c, int64_t n,
               void* out) const override {
    loops_.combine(a, b, c, n, out);
  }

  void Average(const void* a, const void* b, double weight_a, double weight_b, int64_t n,
               void* out) const override {
    loops_.average(a, b, weight_a, weight_b, n, out);
  }

  void Delta(const void* value, const void* start, int64_t n, void* out) const override {
    loops_.delta(value, start, n, out);
  }

  void Apply(const void* start, const void* change, int64_t n, void* out) const override {
    loops_.apply(start, change, n, out);
  }

  void Narrow(const float* from, double scale, int64_t n, void* to) const override {
    loops_.narrow(from, scale, n, to);
  }

  void Widen(const void* from, double scale, int64_t n, float* to) const override {
    loops_.widen(from, scale, n, to);
  }

  void Copy(const void* from, int64_t n, void* to) const override {
    if (n > 0 && from != to) std::memcpy(to, from, static_cast<size_t>(n * item_bytes));
  }

  void Zero(int64_t n, void* to) const override {
    if (n > 0) std::memset(to, 0, static_cast<size_t>(n * item_bytes));
  }

 private:
  const Loops& loops_;
};

class Host : public Device {
 public:
  explicit Host(const LoopSet& loops)
      : float16_(loops.float16),
        bfloat16_(loops.bfloat16),
        float32_(loops.float32),
        float64_(loops.float64) {}

  const char* kind() const override { return "host"; }
  bool is_host() const override { return true; }

  const Kernels& kernels(DType dtype) override {
    switch (dtype) {
      case DType::kFloat16:
        return float16_;
      case DType::kBFloat16:
        return bfloat16_;
      case DType::kFloat32:
        return float32_;
      case DType::kFloat64:
        return float64_;
      default:
        ThrowNoArithmetic();
    }
  }

  char* Allocate(int64_t bytes) override {
    constexpr int64_t kAlignment = 64;
    const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<char*>(memory);
  }
  void Free(char* memory) override { std::free(memory); }

  void CopyIn(char* to, const void* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void CopyOut(void* to, const char* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  std::unique_ptr<Transport> Connect(Transport&) override { return nullptr; }

 private:
  const CpuKernels float16_, bfloat16_, float32_, float64_;
};

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

void ThrowNoArithmetic() {
  throw Error(
      ErrorKind::kInvalidArgument,
      "there is no arithmetic for this dtype; expected float16, bfloat16, float32 or float64");
}

Device& HostDevice() {
  static Host host(ChosenLoops());
  return host;
}

}  // namespace adasum
