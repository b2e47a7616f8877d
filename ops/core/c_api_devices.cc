// The C API's functions for memory of devices, and what is counted of it.

#include <string>

#include "accelerator.h"
#include "arguments.h"
#include "c_api.h"
#include "devices.h"
#include "error.h"
#include "nccl.h"
#include "process.h"
#include "transport_mpi.h"

using adasum::Device;
using adasum::DeviceOf;
using adasum::Error;
using adasum::ErrorKind;
using adasum::Given;
using adasum::Guard;

int adasum_device_allocate(const AdasumDevice* device, int64_t bytes, void** memory) {
  return Guard([&] {
    if (bytes < 0) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`bytes` must not be negative. Received: " + std::to_string(bytes));
    }
    Given(memory, "memory") = DeviceOf(device).Allocate(bytes);
  });
}

int adasum_device_free(const AdasumDevice* device, void* memory) {
  return Guard([&] { DeviceOf(device).Free(&Given(static_cast<char*>(memory), "memory")); });
}

int adasum_device_copy(const AdasumDevice* device, void* to, const void* from, int64_t bytes,
                       int32_t to_device) {
  return Guard([&] {
    if (bytes < 0) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`bytes` must not be negative. Received: " + std::to_string(bytes));
    }
    if (bytes == 0) return;
    Device& on = DeviceOf(device);
    char* into = &Given(static_cast<char*>(to), "to");
    const char* out_of = &Given(static_cast<const char*>(from), "from");
    to_device != 0 ? on.CopyIn(into, out_of, bytes) : on.CopyOut(into, out_of, bytes);
  });
}

int64_t adasum_sent_bytes(void) { return adasum::Transport::sent_bytes; }

int64_t adasum_device_copied_bytes(void) { return adasum::Accelerator::copied_bytes; }

int adasum_has_cuda(void) { return adasum::HasCuda() ? 1 : 0; }

int adasum_cuda_devices(void) { return adasum::CudaDevices(); }

const char* adasum_nccl_problem(void) {
  thread_local std::string problem;
  problem.clear();
  adasum::nccl::Load(&problem);
  return problem.c_str();
}

int adasum_mpi_reads_cuda(void) { return adasum::MpiReadsCuda() ? 1 : 0; }
