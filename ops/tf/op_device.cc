#include "ops/tf/op_device.h"

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#ifdef ADASUM_HAS_CUDA
#include "xla/stream_executor/stream.h"
#endif

namespace tf_adasum {

#ifdef ADASUM_HAS_CUDA

namespace {

// TensorFlow takes nearly all of a GPU's memory when it starts, so what the core needs is had from
// TensorFlow. Its allocators live as long as the process.
tensorflow::Allocator* AllocatorOf(void* context) {
  return static_cast<tensorflow::Allocator*>(context);
}

void* Allocate(int64_t bytes, void* context) {
  constexpr size_t kAlignment = 256;
  return AllocatorOf(context)->AllocateRaw(kAlignment, static_cast<size_t>(bytes));
}

void Free(void* memory, void* context) { AllocatorOf(context)->DeallocateRaw(memory); }

}  // namespace

OpDevice::OpDevice(tensorflow::OpKernelContext* ctx) {
  if (ctx->op_device_context() == nullptr || ctx->op_device_context()->stream() == nullptr) return;
  device_ = {ADASUM_CUDA, ctx->op_device_context()->stream()->platform_specific_handle().stream,
             Allocate, Free, ctx->device()->GetAllocator(tensorflow::AllocatorAttributes())};
}

#else

OpDevice::OpDevice(tensorflow::OpKernelContext*) {}

#endif

}  // namespace tf_adasum
