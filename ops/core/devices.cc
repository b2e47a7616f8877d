#include "devices.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "accelerator.h"
#include "error.h"
#include "queued_device.h"

namespace adasum {

std::unique_ptr<Device> MakeDevice(const AdasumDevice& given) {
  if (given.memory == ADASUM_EMULATED) {
    return std::make_unique<QueuedDevice>(MakeEmulatedAccelerator());
  }
  if (given.memory != ADASUM_CUDA) {
    throw Error(ErrorKind::kInvalidArgument,
                "`memory` must be 0 (host), 1 (CUDA) or 2 (emulated). Received: " +
                    std::to_string(given.memory));
  }
  if ((given.allocate == nullptr) != (given.free == nullptr)) {
    throw Error(ErrorKind::kInvalidArgument, "`allocate` and `free` go together");
  }
  return std::make_unique<QueuedDevice>(
      MakeCudaAccelerator({given.stream, given.allocate, given.free, given.context}));
}

Device& DeviceOf(const AdasumDevice* given) {
  if (given == nullptr || given->memory == ADASUM_HOST) return HostDevice();
  using Key =
      std::tuple<int32_t, int, void*, void* (*)(int64_t, void*), void (*)(void*, void*), void*>;
  // Never given back, since what they need may be gone by the end of the process.
  static auto* const devices = new std::map<Key, std::unique_ptr<Device>>();
  static std::mutex mutex;
  const int number = given->memory == ADASUM_CUDA ? CurrentCudaDevice() : 0;
  const Key key{given->memory, number, given->stream, given->allocate, given->free, given->context};
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = (*devices)[key];
  if (device == nullptr) device = MakeDevice(*given);
  return *device;
}

OnDevice::OnDevice(Device& device, const std::vector<TensorSpec>& specs,
                   const std::vector<const void*>& data)
    : device_(device), specs_(specs) {
  for (size_t t = 0; t < specs.size(); ++t) {
    buffers_.emplace_back(device);
    memory_.push_back(buffers_.back().Reserve(specs[t].bytes()));
    device.CopyIn(static_cast<char*>(memory_.back()), data[t], specs[t].bytes());
  }
}

void OnDevice::CopyOut(void* const* to) const {
  for (size_t t = 0; t < specs_.size(); ++t) {
    device_.CopyOut(to[t], static_cast<const char*>(memory_[t]), specs_[t].bytes());
  }
}

DeviceCopies::DeviceCopies(Device& device, const std::vector<TensorSpec>& specs)
    : device_(device), specs_(specs) {}

std::vector<const void*> DeviceCopies::Fetch(const std::vector<const void*>& data) {
  if (device_.is_host()) return data;
  std::vector<const void*> fetched;
  for (size_t t = 0; t < specs_.size(); ++t) {
    char* memory = buffers_.emplace_back().Reserve(specs_[t].bytes());
    device_.CopyOut(memory, static_cast<const char*>(data[t]), specs_[t].bytes());
    memory_.push_back(memory);
    fetched.push_back(memory);
  }
  return fetched;
}

void* const* DeviceCopies::OutputsFor(void* const* outputs) {
  return device_.is_host() ? outputs : memory_.data();
}

void DeviceCopies::Return(void* const* outputs) {
  if (device_.is_host()) return;
  for (size_t t = 0; t < specs_.size(); ++t) {
    device_.CopyIn(static_cast<char*>(outputs[t]), memory_[t], specs_[t].bytes());
  }
}

void* DeviceCopies::GatheredFor(void* to, int64_t rows) {
  if (device_.is_host() || to == nullptr) return to;
  gathered_bytes_ = rows * specs_[0].item_bytes;
  for (int i = 1; i < specs_[0].rank; ++i) gathered_bytes_ *= specs_[0].dims[i];
  return gathered_.Reserve(gathered_bytes_);
}

void DeviceCopies::ReturnGathered(void* to) {
  if (device_.is_host() || to == nullptr || gathered_bytes_ == 0) return;
  device_.CopyIn(static_cast<char*>(to), gathered_.Reserve(gathered_bytes_), gathered_bytes_);
}

}  // namespace adasum
