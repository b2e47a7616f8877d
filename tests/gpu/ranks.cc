// Processes that reduce tensors on GPUs, or with DEVICE=emulated on the emulated device: each
// result against its definition, then how long a call takes. Started by mpirun; all may use one
// GPU.
#include <cuda_runtime.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ops/core/c_api.h"
#include "tests/core/expected.h"

namespace {

using adasum::Algorithm;
using adasum::DType;
using adasum::Op;
using core_test::Dims;
using core_test::Random;
using core_test::Tensor;
using core_test::Tensors;
using core_test::Vector;

AdasumDevice device{};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::_Exit(1);
}

void Check(int code) {
  if (code != ADASUM_OK) Fail(adasum_last_error());
}

class OnDevice {
 public:
  explicit OnDevice(Tensors& tensors) : tensors_(tensors) {
    for (Tensor& tensor : tensors) {
      const auto bytes = static_cast<int64_t>(tensor.data.size());
      void* memory = nullptr;
      Check(adasum_device_allocate(&device, std::max<int64_t>(bytes, 1), &memory));
      Check(adasum_device_copy(&device, memory, tensor.data.data(), bytes, 1));
      memory_.push_back(memory);
      views_.push_back(
          {memory, tensor.dims.data(), tensor.item_bytes, core_test::NameOf(tensor.dtype), "",
           static_cast<int32_t>(tensor.dims.size()), static_cast<int32_t>(tensor.dtype)});
    }
  }
  ~OnDevice() {
    for (void* memory : memory_) Check(adasum_device_free(&device, memory));
  }

  void Allreduce(Op op, Algorithm algorithm, int64_t threshold) {
    const AdasumReduceOptions options{static_cast<int32_t>(op), static_cast<int32_t>(algorithm),
                                      threshold, "test", &device};
    Check(adasum_allreduce(views_.data(), memory_.data(), static_cast<int64_t>(views_.size()),
                           &options));
  }

  void Return() {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      Tensor& tensor = tensors_[t];
      Check(adasum_device_copy(&device, tensor.data.data(), memory_[t],
                               static_cast<int64_t>(tensor.data.size()), 0));
    }
  }

 private:
  Tensors& tensors_;
  std::vector<void*> memory_;
  std::vector<AdasumTensor> views_;
};

void CheckAgainstDefinition(const AdasumTopology& here) {
  const std::vector<int> hosts(static_cast<size_t>(here.size), 0);
  int cases = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const Op op : {Op::kAdasum, Op::kSum, Op::kAverage}) {
      for (const Algorithm algorithm :
           {Algorithm::kRvh, Algorithm::kRing, Algorithm::kHierarchical}) {
        for (const int64_t threshold : {-1, 40'000}) {
          Random random(7, static_cast<uint64_t>(cases++));
          const std::vector<Dims> shapes{{1}, {3}, {0}, {1001}, {17, 23}, {}, {70'001}};
          std::vector<std::vector<Vector>> vectors;  // of each tensor, then rank
          Tensors own;
          for (const Dims& dims : shapes) {
            vectors.push_back(
                core_test::RandomVectors(random, here.size, core_test::CountOf(dims)));
            own.push_back(Tensor::Of(dtype, dims, vectors.back()[here.rank]));
          }
          OnDevice tensors(own);
          tensors.Allreduce(op, algorithm, threshold);
          tensors.Return();
          for (size_t t = 0; t < shapes.size(); ++t) {
            const Vector want = core_test::Expected(op, algorithm, hosts, vectors[t]);
            double norms = 0;
            for (const Vector& vector : vectors[t]) norms += core_test::Norm(vector);
            const double error = core_test::Norm(core_test::Difference(own[t].Values(), want));
            const double allowed = 4 * here.size * core_test::Precision(dtype) * (norms + 1e-300);
            if (!(error <= allowed)) {
              Fail("rank " + std::to_string(here.rank) + ", case " + std::to_string(cases) +
                   ", tensor " + std::to_string(t) + ": the error is " + std::to_string(error) +
                   " and may be " + std::to_string(allowed));
            }
          }
        }
      }
    }
  }
  if (here.rank == 0) std::printf("%d ranks: %d calls are right\n", here.size, cases);
}

void Measure(const AdasumTopology& here, int64_t mib) {
  const int64_t count = (mib << 20) / 4 / 8;
  Tensors own;
  for (int t = 0; t < 8; ++t) {
    own.push_back(Tensor::Of(DType::kFloat32, {count},
                             Vector(static_cast<size_t>(count), here.rank + t + 0.5)));
  }
  OnDevice tensors(own);
  std::vector<double> seconds;
  constexpr int kWarmUp = 3, kTimes = 11;
  const int64_t before = adasum_device_copied_bytes();
  for (int i = 0; i < kWarmUp + kTimes; ++i) {
    Check(adasum_barrier("before"));
    const auto begin = std::chrono::steady_clock::now();
    tensors.Allreduce(Op::kAdasum, Algorithm::kRvh, -1);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (i >= kWarmUp) seconds.push_back(took.count());
  }
  std::sort(seconds.begin(), seconds.end());
  const int64_t copied = (adasum_device_copied_bytes() - before) / (kWarmUp + kTimes);
  if (here.rank != 0) return;
  std::printf("%d ranks, %lld MiB: %.3f ms a call, %.3f MiB of it copied to or from the host\n",
              here.size, static_cast<long long>(mib), seconds[seconds.size() / 2] * 1e3,
              static_cast<double>(copied) / (1 << 20));
}

}  // namespace

int main(int argc, char** argv) {
  const char* kind = std::getenv("DEVICE");
  const bool emulated = kind != nullptr && std::strcmp(kind, "emulated") == 0;
  device.memory = emulated ? ADASUM_EMULATED : ADASUM_CUDA;
  Check(adasum_init(nullptr));
  AdasumTopology here{};
  Check(adasum_topology(&here));
  int gpus = 0;
  if (!emulated && cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) {
    cudaSetDevice(here.local_rank % gpus);
  }
  CheckAgainstDefinition(here);
  for (int i = 1; i < argc; ++i) Measure(here, std::atoll(argv[i]));
  Check(adasum_shutdown());
  adasum_finalize();
}
