#include <cuda_runtime.h>

#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "accelerator.h"
#include "error.h"

namespace adasum {

namespace {

using device::Block;
using device::Finding;
using device::Kind;
using device::Operation;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error(ErrorKind::kInternal, std::string("CUDA: ") + what + ": " + cudaGetErrorName(error) +
                                        ", " + cudaGetErrorString(error));
}

template <Kind kKind, typename T>
__global__ void __launch_bounds__(device::kThreads)
    MapBlocks(const Operation* __restrict__ operations, const Block* __restrict__ of_block) {
  const Block block = of_block[blockIdx.x];
  device::MapThread<kKind, T>(operations[block.operation], block, static_cast<int>(threadIdx.x));
}

template <Kind kKind, typename T>
__global__ void __launch_bounds__(device::kThreads)
    FindBlocks(const Operation* __restrict__ operations, const Block* __restrict__ of_block,
               Finding* findings) {
  __shared__ Finding of_thread[device::kThreads];
  const Block block = of_block[blockIdx.x];
  const int thread = static_cast<int>(threadIdx.x);
  of_thread[thread] = device::FindThread<kKind, T>(operations[block.operation], block, thread);
  for (int distance = device::kThreads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    device::FoldThread<kKind>(of_thread, thread, distance);
  }
  if (thread == 0) findings[blockIdx.x] = of_thread[0];
}

// Events that are not in use. Making one takes longer than recording it.
class Events {
 public:
  ~Events() {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }

  cudaEvent_t Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
    cudaEvent_t event;
    Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    return event;
  }

  void Return(cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

class Cuda : public Accelerator {
 public:
  explicit Cuda(const AcceleratorUser& user)
      : user_(user),
        device_(CurrentCudaDevice()),
        compute_(static_cast<cudaStream_t>(user.stream)),
        events_(std::make_shared<Events>()) {
    if (device_ < 0) {
      throw Error(ErrorKind::kState, "there is no GPU that CUDA could use in this process");
    }
    for (cudaStream_t* stream : {&copies_, &odd_copies_}) {
      Check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "a stream");
    }
  }

  ~Cuda() override {
    cudaStreamDestroy(copies_);
    cudaStreamDestroy(odd_copies_);
  }

  const char* kind() const override { return "CUDA"; }

  std::string name() const override {
    char bus[32] = "";
    Check(cudaDeviceGetPCIBusId(bus, sizeof bus, device_), "the name of a GPU");
    return bus;
  }

  // Threads of the caller's may have another device.
  void Use() const override { Check(cudaSetDevice(device_), "the choice of a GPU"); }

  void* Native(Stream stream) override { return StreamOf(stream); }

  char* Allocate(int64_t bytes) override {
    if (user_.allocate != nullptr) {
      void* memory = user_.allocate(bytes, user_.context);
      if (memory == nullptr) throw std::bad_alloc();
      return static_cast<char*>(memory);
    }
    Use();
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // it has been dealt with
      throw std::bad_alloc();
    }
    Check(error, "memory");
    return static_cast<char*>(memory);
  }

  void Free(char* memory) override {
    if (user_.free != nullptr) {
      user_.free(memory, user_.context);
    } else {
      cudaFree(memory);
    }
  }

  char* AllocatePinned(int64_t bytes) override {
    Use();
    void* memory = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    Check(error, "pinned memory");
    return static_cast<char*>(memory);
  }

  void FreePinned(char* memory) override { cudaFreeHost(memory); }

  void Launch(const device::Launch& launch) override {
    Use();
    device::WithKindAndDType(launch, [&](auto kind, auto item) {
      constexpr Kind kKind = decltype(kind)::value;
      using T = decltype(item);
      const auto blocks = static_cast<unsigned>(launch.blocks);
      if constexpr (kKind >= Kind::kFirstOfMaps) {
        MapBlocks<kKind, T>
            <<<blocks, device::kThreads, 0, compute_>>>(launch.operations, launch.of_block);
      } else {
        FindBlocks<kKind, T><<<blocks, device::kThreads, 0, compute_>>>(
            launch.operations, launch.of_block, launch.findings);
      }
    });
    Check(cudaGetLastError(), "a kernel");
  }

  Event Record(Stream stream) override {
    Use();
    cudaEvent_t event = events_->Take();
    Event recorded(event,
                   [events = events_](void* of) { events->Return(static_cast<cudaEvent_t>(of)); });
    Check(cudaEventRecord(event, StreamOf(stream)), "an event");
    return recorded;
  }

  void Wait(Stream stream, const Event& event) override {
    Use();
    Check(cudaStreamWaitEvent(StreamOf(stream), static_cast<cudaEvent_t>(event.get()), 0),
          "an order of streams");
  }

  bool HasHappened(const Event& event) override {
    const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event.get()));
    if (error == cudaErrorNotReady) return false;
    Check(error, "work on the GPU");
    return true;
  }

  void Await(const Event& event) override {
    Check(cudaEventSynchronize(static_cast<cudaEvent_t>(event.get())), "work on the GPU");
  }

 private:
  void StartCopyIn(Stream stream, void* to, const void* from, int64_t bytes) override {
    Copy(stream, to, from, bytes, cudaMemcpyHostToDevice);
  }

  void StartCopyOut(Stream stream, void* to, const void* from, int64_t bytes) override {
    Copy(stream, to, from, bytes, cudaMemcpyDeviceToHost);
  }

  cudaStream_t StreamOf(Stream stream) const {
    return stream == kCompute ? compute_ : stream == kCopies ? copies_ : odd_copies_;
  }

  void Copy(Stream stream, void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    Use();
    Check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, StreamOf(stream)), "a copy");
  }

  const AcceleratorUser user_;
  const int device_;
  const cudaStream_t compute_;
  cudaStream_t copies_ = nullptr;
  cudaStream_t odd_copies_ = nullptr;
  const std::shared_ptr<Events> events_;
};

}  // namespace

bool HasCuda() { return true; }

int CudaDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

int CurrentCudaDevice() {
  int device = -1;
  if (cudaGetDevice(&device) == cudaSuccess) return device;
  cudaGetLastError();
  return -1;
}

std::unique_ptr<Accelerator> MakeCudaAccelerator(const AcceleratorUser& user) {
  return std::make_unique<Cuda>(user);
}

}  // namespace adasum
