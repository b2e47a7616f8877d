#include <cmath>

#include "error.h"
#include "half.h"
#include "kernels.h"

namespace adasum {

namespace {

// Independent accumulators hide the latency of an addition and let the compiler use vector
// registers; their number is fixed, so that the order of the sum, and with it every bit of the
// result, is the same on every processor.
constexpr int kLanes = 8;

template <typename T>
double Load(const T& x) {
  return static_cast<double>(x);
}

struct Sums {
  double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};

  void Add(int lane, double x, double y) {
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  }
};

template <typename T>
void Dot3(const void* a_void, const void* b_void, int64_t n, double scale_a, double scale_b,
          DotProducts* result) {
  const T* a = static_cast<const T*>(a_void);
  const T* b = static_cast<const T*>(b_void);
  Sums sums;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sums.Add(lane, Load(a[i + lane]) * scale_a, Load(b[i + lane]) * scale_b);
    }
  }
  for (; i < n; ++i) sums.Add(0, Load(a[i]) * scale_a, Load(b[i]) * scale_b);
  for (int lane = 0; lane < kLanes; ++lane) {
    result->ab += sums.ab[lane];
    result->aa += sums.aa[lane];
    result->bb += sums.bb[lane];
  }
}

template <typename T>
double MaxAbs(const void* a_void, int64_t n) {
  const T* a = static_cast<const T*>(a_void);
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(Load(a[i])));
  return largest;
}

template <typename T>
bool AllFinite(const void* a_void, int64_t n) {
  const T* a = static_cast<const T*>(a_void);
  // x - x is 0 for every finite number and NaN for the others, and NaN stays in a sum.
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += Load(a[i + lane]) - Load(a[i + lane]);
  }
  for (; i < n; ++i) lanes[0] += Load(a[i]) - Load(a[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum == 0;
}

template <typename T>
void Combine(const void* a_void, const void* b_void, const Coefficients& c, int64_t n,
             void* out_void) {
  const T* a = static_cast<const T*>(a_void);
  const T* b = static_cast<const T*>(b_void);
  T* out = static_cast<T*>(out_void);
  const Coefficients k = c;
  for (int64_t i = 0; i < n; ++i) {
    out[i] =
        static_cast<T>(Load(a[i]) * k.scale_a * k.factor_a + Load(b[i]) * k.scale_b * k.factor_b);
  }
}

template <typename T>
void Average(const void* a_void, const void* b_void, double weight_a, double weight_b, int64_t n,
             void* out_void) {
  const T* a = static_cast<const T*>(a_void);
  const T* b = static_cast<const T*>(b_void);
  T* out = static_cast<T*>(out_void);
  for (int64_t i = 0; i < n; ++i) {
    const double x = Load(a[i]), y = Load(b[i]);
    out[i] = static_cast<T>(x == y ? x : x * weight_a + y * weight_b);
  }
}

// The difference of two float64 values is what float64 gives; for the narrower types it is exact in
// float64 up to one rounding to the type itself.
template <typename T>
void Delta(const void* value_void, const void* start_void, int64_t n, void* out_void) {
  const T* value = static_cast<const T*>(value_void);
  const T* start = static_cast<const T*>(start_void);
  T* out = static_cast<T*>(out_void);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(Load(value[i]) - Load(start[i]));
}

template <typename T>
void Apply(const void* start_void, const void* change_void, int64_t n, void* out_void) {
  const T* start = static_cast<const T*>(start_void);
  const T* change = static_cast<const T*>(change_void);
  T* out = static_cast<T*>(out_void);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(Load(start[i]) + Load(change[i]));
}

template <typename T>
constexpr Kernels Table(bool squares_may_overflow) {
  return {sizeof(T),  squares_may_overflow, Dot3<T>,  MaxAbs<T>, AllFinite<T>,
          Combine<T>, Average<T>,           Delta<T>, Apply<T>};
}

constexpr Kernels kFloat16 = Table<Float16>(false);
constexpr Kernels kBFloat16 = Table<BFloat16>(false);
constexpr Kernels kFloat32 = Table<float>(false);
constexpr Kernels kFloat64 = Table<double>(true);

}  // namespace

const Kernels& CpuKernels(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return kFloat16;
    case DType::kBFloat16:
      return kBFloat16;
    case DType::kFloat32:
      return kFloat32;
    case DType::kFloat64:
      return kFloat64;
    default:
      throw Error(
          ErrorKind::kInvalidArgument,
          "there is no arithmetic for this dtype; expected float16, bfloat16, float32 or float64");
  }
}

}  // namespace adasum
