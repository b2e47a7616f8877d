// A device whose kernels are launched for many tensors at a time.
//
// What the algorithms ask for, tensor by tensor, becomes a row in a table as long as it is of one
// kind and dtype, and one launch once something else is asked for.
#ifndef TF_ADASUM_OPS_CORE_QUEUED_DEVICE_H_
#define TF_ADASUM_OPS_CORE_QUEUED_DEVICE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "accelerator.h"
#include "device.h"

namespace adasum {

class QueuedDevice : public Device {
 public:
  explicit QueuedDevice(std::shared_ptr<Accelerator> accelerator);
  ~QueuedDevice() override;

  const char* kind() const override { return accelerator_->kind(); }
  const Kernels& kernels(DType dtype) override;
  char* Allocate(int64_t bytes) override { return accelerator_->Allocate(bytes); }
  void Free(char* memory) override;
  void EndBatch() override;
  void Finish() override;
  void Cancel() override;
  void CopyIn(char* to, const void* from, int64_t bytes) override;
  void CopyOut(void* to, const char* from, int64_t bytes) override;
  std::unique_ptr<Transport> Connect(Transport& transport) override;

  Accelerator& accelerator() { return *accelerator_; }

 private:
  class QueuedKernels;
  // Where what is found out about an operation goes: as its kind says, or nowhere.
  union Receiver {
    DotProducts* sums;
    double* largest;
    Inspection* inspection;
    Comparison* comparison;
  };
  // What blocks have found out, or will have.
  struct Pending {
    device::Kind kind;
    std::vector<Receiver> receivers;  // of each operation
    std::vector<device::Block> blocks;
    const device::Finding* findings;  // pinned
  };
  // Tables and findings, on the host and on the device: the same offsets in both.
  struct Arena {
    char* pinned = nullptr;
    char* on_device = nullptr;
    int64_t capacity = 0;
    int64_t used = 0;
  };

  void Add(device::Kind kind, DType dtype, const device::Operation& operation, Receiver receiver);
  int64_t Take(int64_t bytes);
  static void Deliver(const Pending& pending);

  const std::shared_ptr<Accelerator> accelerator_;
  std::vector<std::unique_ptr<QueuedKernels>> kernels_;
  // The batch.
  device::Kind kind_ = device::Kind::kCopy;
  DType dtype_ = DType::kOther;
  std::vector<device::Operation> operations_;
  std::vector<device::Block> blocks_;
  std::vector<Receiver> receivers_;

  std::vector<Pending> pending_;
  Arena arena_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_QUEUED_DEVICE_H_
