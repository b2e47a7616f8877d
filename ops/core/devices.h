// The devices that callers of the C API name, and tensors on them that go by way of the host.
#ifndef TF_ADASUM_OPS_CORE_DEVICES_H_
#define TF_ADASUM_OPS_CORE_DEVICES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "c_api.h"
#include "device.h"
#include "fusion.h"

namespace adasum {

// The same one for the same arguments, as long as the process lives; the host for null. Throws
// Error(kInvalidArgument) for an unknown one, and Error(kState) for one that is not there.
Device& DeviceOf(const AdasumDevice* given);
// Another one each time. Not for the host.
std::unique_ptr<Device> MakeDevice(const AdasumDevice& given);

// Copies of tensors on a device, made from the host's memory.
class OnDevice {
 public:
  OnDevice(Device& device, const std::vector<TensorSpec>& specs,
           const std::vector<const void*>& data);

  const void* const* data() const { return memory_.data(); }
  void* const* memory() const { return memory_.data(); }
  void CopyOut(void* const* to) const;

 private:
  Device& device_;
  const std::vector<TensorSpec>& specs_;
  std::vector<Buffer> buffers_;
  std::vector<void*> memory_;
};

// For collectives that work in the host's memory: copies there and back, or, for tensors that are
// there, nothing.
class DeviceCopies {
 public:
  DeviceCopies(Device& device, const std::vector<TensorSpec>& specs);

  std::vector<const void*> Fetch(const std::vector<const void*>& data);
  // Where results go for now.
  void* const* OutputsFor(void* const* outputs);
  void Return(void* const* outputs);
  // The same for an allgather, where `to` takes so many rows of the one tensor.
  void* GatheredFor(void* to, int64_t rows);
  void ReturnGathered(void* to);

 private:
  Device& device_;
  const std::vector<TensorSpec> specs_;
  std::vector<Buffer> buffers_;
  std::vector<void*> memory_;
  Buffer gathered_;
  int64_t gathered_bytes_ = 0;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_DEVICES_H_
