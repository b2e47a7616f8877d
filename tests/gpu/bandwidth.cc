// The kernels on a GPU beside a copy on the same one, in bytes read and written a second.
//
// Each row is the median of several rounds in which copy and kernels take turns, each for many
// launches in a row; bytes are counted from the definition: dot3 reads two vectors, combine, delta
// and apply read two and write one, a copy reads one and writes one.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/core/devices.h"

namespace {

using adasum::Coefficients;
using adasum::Device;
using adasum::DotProducts;
using adasum::DType;
using adasum::Kernels;

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Case {
  std::string name;
  double bytes;
  std::function<void()> run;  // asks for it once
  std::vector<double> seconds;
};

// Of one run, from many.
double Seconds(Device& device, const Case& of) {
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  const int times = of.bytes < 64e6 ? 50 : 10;
  of.run();
  device.Finish();
  Check(cudaEventRecord(begin, nullptr));
  for (int i = 0; i < times; ++i) {
    of.run();
    device.EndBatch();
  }
  Check(cudaEventRecord(end, nullptr));
  device.Finish();
  Check(cudaEventSynchronize(end));
  float milliseconds = 0;
  Check(cudaEventElapsedTime(&milliseconds, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return milliseconds / 1e3 / times;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Measure(Device& device, int64_t bytes) {
  char* a = device.Allocate(bytes);
  char* b = device.Allocate(bytes);
  char* c = device.Allocate(bytes);
  for (char* memory : {a, b, c}) Check(cudaMemset(memory, 0, static_cast<size_t>(bytes)));
  static DotProducts sums;
  std::vector<Case> cases;
  cases.push_back({"copy",
                   2.0 * static_cast<double>(bytes),
                   [=] {
                     Check(cudaMemcpyAsync(c, a, static_cast<size_t>(bytes),
                                           cudaMemcpyDeviceToDevice, nullptr));
                   },
                   {}});
  const struct {
    const char* name;
    DType dtype;
  } dtypes[] = {{"float16", DType::kFloat16},
                {"bfloat16", DType::kBFloat16},
                {"float32", DType::kFloat32},
                {"float64", DType::kFloat64}};
  for (const auto& [dtype_name, dtype] : dtypes) {
    const Kernels* kernels = &device.kernels(dtype);
    const int64_t n = bytes / kernels->item_bytes;
    const std::string suffix = std::string(" ") + dtype_name;
    const double two = 2.0 * static_cast<double>(bytes), three = 3.0 * static_cast<double>(bytes);
    const Coefficients half{1, 0.5, 1, 0.5, 1};
    cases.push_back({"dot3" + suffix, two, [=] { kernels->Dot3(a, b, n, 1, 1, &sums); }, {}});
    cases.push_back({"combine" + suffix, three, [=] { kernels->Combine(a, b, half, n, a); }, {}});
    cases.push_back({"delta" + suffix, three, [=] { kernels->Delta(a, b, n, c); }, {}});
    cases.push_back({"apply" + suffix, three, [=] { kernels->Apply(b, c, n, c); }, {}});
  }
  constexpr int kRounds = 7;
  for (int round = 0; round < kRounds; ++round) {
    for (Case& of : cases) of.seconds.push_back(Seconds(device, of));
  }
  const double copy = cases[0].bytes / Median(cases[0].seconds);
  for (const Case& of : cases) {
    const double rate = of.bytes / Median(of.seconds);
    std::printf("%8.2f MiB  %-18s %8.1f GB/s  %5.2f of a copy\n",
                static_cast<double>(bytes) / (1 << 20), of.name.c_str(), rate / 1e9, rate / copy);
  }
  for (char* memory : {a, b, c}) device.Free(memory);
}

// ResNet-50 has 161 tensors; here so many of mixed sizes are one launch of each kind.
void MeasureMany(Device& device) {
  constexpr int kTensors = 161;
  const Kernels& kernels = device.kernels(DType::kFloat32);
  std::vector<char*> a, b;
  std::vector<int64_t> counts;
  int64_t all = 0;
  for (int t = 0; t < kTensors; ++t) {
    counts.push_back(t % 3 == 0 ? 64 << (t % 6) : (t % 7 + 1) * 60'000);
    all += counts.back();
    for (auto* of : {&a, &b}) {
      of->push_back(device.Allocate(counts.back() * 4));
      Check(cudaMemset(of->back(), 0, static_cast<size_t>(counts.back() * 4)));
    }
  }
  std::vector<DotProducts> sums(kTensors);
  const auto measure = [&](const char* name, double bytes, const std::function<void()>& run) {
    const Case of{name, bytes, run, {}};
    std::vector<double> seconds;
    for (int round = 0; round < 7; ++round) seconds.push_back(Seconds(device, of));
    std::printf("%d tensors, %.1f MiB: %s %.1f us, %.1f GB/s\n", kTensors,
                static_cast<double>(all * 4) / (1 << 20), name, Median(seconds) * 1e6,
                bytes / Median(seconds) / 1e9);
  };
  const double bytes = static_cast<double>(all) * 4;
  measure("dot3", 2 * bytes, [&] {
    for (int t = 0; t < kTensors; ++t) kernels.Dot3(a[t], b[t], counts[t], 1, 1, &sums[t]);
  });
  measure("combine", 3 * bytes, [&] {
    for (int t = 0; t < kTensors; ++t) {
      kernels.Combine(a[t], b[t], {1, 0.5, 1, 0.5, 1}, counts[t], a[t]);
    }
  });
  for (int t = 0; t < kTensors; ++t) {
    device.Free(a[t]);
    device.Free(b[t]);
  }
}

}  // namespace

int main() {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, compute capability %d.%d\n", properties.name, properties.major,
              properties.minor);
  const std::unique_ptr<Device> device =
      adasum::MakeDevice({ADASUM_CUDA, nullptr, nullptr, nullptr, nullptr});
  for (const int64_t mib : {1, 16, 64, 256, 1024}) Measure(*device, mib << 20);
  MeasureMany(*device);
}
