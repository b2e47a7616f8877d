// The core's kernels beside memcpy and a STREAM triad: bandwidth in GB/s, medians over interleaved
// rounds.
//
//   cmake --build build/cmake-* --target kernels_benchmark && build/cmake-*/kernels_benchmark
//
// Bytes are counted as the program sees them: what is read and what is written, each once.
// TF_ADASUM_SIMD chooses a lower instruction set (plain, avx2).

#include "ops/core/kernels.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ops/core/device.h"

namespace {

using adasum::Coefficients;
using adasum::DotProducts;
using adasum::DType;
using adasum::Kernels;

struct Case {
  std::string name;
  double bytes;  // read and written in one call
  std::function<void()> run;
  std::vector<double> seconds = {};

  double gigabytes_per_second() {
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
    return bytes / seconds[seconds.size() / 2] / 1e9;
  }
};

double Seconds(const std::function<void()>& run, int times) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) run();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return took.count() / times;
}

volatile double sink;  // keeps the compiler from dropping sums that nobody reads

void AddKernels(const char* dtype_name, DType dtype, char* a, char* b, char* c, int64_t bytes,
                std::vector<Case>* cases) {
  const Kernels& kernels = adasum::HostDevice().kernels(dtype);
  const int64_t n = bytes / kernels.item_bytes;
  const std::string suffix = std::string(" ") + dtype_name;
  cases->push_back({"dot3" + suffix, 2.0 * bytes, [=, &kernels] {
                      DotProducts sums;
                      kernels.Dot3(a, b, n, 1, 1, &sums);
                      sink = sums.ab + sums.aa + sums.bb;
                    }});
  // In place, as RVH does it.
  cases->push_back({"combine" + suffix, 3.0 * bytes,
                    [=, &kernels] { kernels.Combine(a, b, Coefficients{1, 0.5, 1, 0.5}, n, a); }});
  cases->push_back({"delta" + suffix, 3.0 * bytes, [=, &kernels] { kernels.Delta(a, b, n, c); }});
  cases->push_back({"apply" + suffix, 3.0 * bytes, [=, &kernels] { kernels.Apply(b, c, n, c); }});
}

void Measure(const char* where, int64_t bytes, int rounds, int times) {
  // Zeros are as fast as other numbers, and stay what they are in every kernel.
  std::vector<char> memory(3 * bytes + 192, 0);
  char* a = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  char* b = a + bytes;
  char* c = b + bytes;
  std::vector<Case> cases;
  cases.push_back({"memcpy", 2.0 * bytes, [=] { std::memcpy(c, a, bytes); }});
  cases.push_back({"triad float64", 3.0 * bytes, [=] {
                     const double* x = reinterpret_cast<const double*>(a);
                     const double* y = reinterpret_cast<const double*>(b);
                     double* z = reinterpret_cast<double*>(c);
                     for (int64_t i = 0; i < bytes / 8; ++i) z[i] = x[i] + 3.0 * y[i];
                   }});
  AddKernels("float32", DType::kFloat32, a, b, c, bytes, &cases);
  AddKernels("float64", DType::kFloat64, a, b, c, bytes, &cases);
  AddKernels("float16", DType::kFloat16, a, b, c, bytes, &cases);
  AddKernels("bfloat16", DType::kBFloat16, a, b, c, bytes, &cases);
  for (int round = -2; round < rounds; ++round) {
    for (Case& each : cases) {
      const double seconds = Seconds(each.run, times);
      if (round >= 0) each.seconds.push_back(seconds);
    }
  }
  const double triad = cases[1].gigabytes_per_second();
  std::printf("%s, %lld KiB an operand\n", where, static_cast<long long>(bytes / 1024));
  for (Case& each : cases) {
    const double rate = each.gigabytes_per_second();
    std::printf("  %-18s %7.1f GB/s %6.2f of the triad\n", each.name.c_str(), rate, rate / triad);
  }
}

}  // namespace

int main() {
  std::printf("instruction set: %s\n", adasum::CpuSimd());
  Measure("in L2", 128 << 10, 21, 200);
  Measure("out of cache", int64_t{128} << 20, 7, 1);
  return 0;
}
