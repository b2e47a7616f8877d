// Where the tensors of a call are: memory of one kind, and the arithmetic on it. On a GPU that is
// done later, while this thread goes on.
#ifndef TF_ADASUM_OPS_CORE_DEVICE_H_
#define TF_ADASUM_OPS_CORE_DEVICE_H_

#include <cstdint>
#include <memory>

#include "kernels.h"
#include "transport.h"

namespace adasum {

class Device {
 public:
  virtual ~Device() = default;

  // "host", "CUDA": equal on all ranks of a call, so compared and shown in errors.
  virtual const char* kind() const = 0;
  virtual bool is_host() const { return false; }

  // Throws Error(kInvalidArgument) for kOther.
  virtual const Kernels& kernels(DType dtype) = 0;

  // Aligned for vector instructions. Throws std::bad_alloc.
  virtual char* Allocate(int64_t bytes) = 0;
  virtual void Free(char* memory) = 0;

  // What follows may read what was written before, and write what was read.
  virtual void EndBatch() {}
  // Returns when everything is done that was asked for.
  virtual void Finish() {}
  // Forgets what was asked for and is not begun, and where results go: after an error.
  virtual void Cancel() {}

  // Bytes to and from the host's memory, which is done when they return.
  virtual void CopyIn(char* to, const void* from, int64_t bytes) = 0;
  virtual void CopyOut(void* to, const char* from, int64_t bytes) = 0;

  // A transport between the same ranks that sends this device's memory in the buckets' streams; for
  // kControl it is the one given, which must outlive it.
  virtual std::unique_ptr<Transport> Connect(Transport& transport) = 0;
};

// The host's memory, to which transports belong already: it is not connected.
Device& HostDevice();

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_DEVICE_H_
