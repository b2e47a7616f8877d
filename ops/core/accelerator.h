// What a device with memory and a clock of its own is asked for: the little of CUDA that we use.
#ifndef TF_ADASUM_OPS_CORE_ACCELERATOR_H_
#define TF_ADASUM_OPS_CORE_ACCELERATOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "device_kernels.h"
#include "kernels.h"

namespace adasum {

class Accelerator {
 public:
  // What is asked for of one stream is done in that order, while the calling thread goes on.
  enum Stream { kCompute, kCopies, kOddCopies, kStreams };

  // A point in a stream.
  using Event = std::shared_ptr<void>;

  virtual ~Accelerator() = default;

  virtual const char* kind() const = 0;
  // Another text for each device of a host.
  virtual std::string name() const = 0;
  // Makes it the calling thread's.
  virtual void Use() const {}
  // The stream as others' libraries take it.
  virtual void* Native(Stream stream) = 0;

  // On the device. Throws std::bad_alloc.
  virtual char* Allocate(int64_t bytes) = 0;
  virtual void Free(char* memory) = 0;
  // On the host, for copies to and from the device. Throws std::bad_alloc.
  virtual char* AllocatePinned(int64_t bytes) = 0;
  virtual void FreePinned(char* memory) = 0;

  // One side is on the device, the other one pinned. Both stay what they are until it is done.
  void CopyIn(Stream stream, void* to, const void* from, int64_t bytes) {
    copied_bytes += bytes;
    StartCopyIn(stream, to, from, bytes);
  }
  void CopyOut(Stream stream, void* to, const void* from, int64_t bytes) {
    copied_bytes += bytes;
    StartCopyOut(stream, to, from, bytes);
  }
  // By all of this process, both ways.
  static inline std::atomic<int64_t> copied_bytes{0};

  // On kCompute. Everything that it names is on the device.
  virtual void Launch(const device::Launch& launch) = 0;

  virtual Event Record(Stream stream) = 0;
  // What is asked for of the stream from now on is done after the event.
  virtual void Wait(Stream stream, const Event& event) = 0;
  virtual bool HasHappened(const Event& event) = 0;
  // Returns after the event. Throws Error(kInternal) for what has gone wrong before it.
  virtual void Await(const Event& event) = 0;

 private:
  virtual void StartCopyIn(Stream stream, void* to, const void* from, int64_t bytes) = 0;
  virtual void StartCopyOut(Stream stream, void* to, const void* from, int64_t bytes) = 0;
};

// How the caller gives and takes back memory of the device, and the stream that its own work is in,
// so that ours comes after what is in it already, and before what is not.
struct AcceleratorUser {
  void* stream = nullptr;                                     // cudaStream_t
  void* (*allocate)(int64_t bytes, void* context) = nullptr;  // null: the device's own
  void (*free)(void* memory, void* context) = nullptr;
  void* context = nullptr;
};

bool HasCuda();     // whether this library was built with it
int CudaDevices();  // how many there are
// The calling thread's; -1 where there is none.
int CurrentCudaDevice();
// Throws Error(kState) where there is no such device, or this library was built without CUDA.
std::unique_ptr<Accelerator> MakeCudaAccelerator(const AcceleratorUser& user);

// For tests: memory that no other code can read or write, and streams that do what they are asked
// for as late as they may.
std::unique_ptr<Accelerator> MakeEmulatedAccelerator();
namespace emulated {
char* Allocate(int64_t bytes);
void Free(char* memory);
// Of the emulated device: where the same bytes can be read and written. Others as they are.
char* Reach(const void* memory);
// What takes a native stream: to do something in it, and to do all that is asked for so far.
void Ask(void* stream, std::function<void()> what);
void Run(void* stream);
}  // namespace emulated

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_ACCELERATOR_H_
