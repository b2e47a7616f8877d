// Messages from and into the memory of a device.
//
// The message layer reads and writes that memory itself, as a CUDA-aware MPI does; or NCCL does, in
// streams of the device; or what is sent goes through memory of the host, piece by piece, so that
// copies, messages and arithmetic overlap.
#ifndef TF_ADASUM_OPS_CORE_DEVICE_TRANSPORT_H_
#define TF_ADASUM_OPS_CORE_DEVICE_TRANSPORT_H_

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "nccl.h"
#include "queued_device.h"
#include "transport.h"

namespace adasum {

class DeviceTransport : public Transport {
 public:
  // Both must outlive it.
  DeviceTransport(Transport& transport, QueuedDevice& device);
  ~DeviceTransport() override;

  bool shares_memory() const override { return false; }
  HostMemory* host_memory() override { return nullptr; }

  void SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                   int64_t receive_bytes, int from, Stream stream) override;
  int64_t SendReceiveUpTo(const void* send, int64_t send_bytes, int to, void* receive,
                          int64_t capacity, int from) override;
  std::unique_ptr<Transfer> Start(const void* send, int64_t send_bytes, int to, void* receive,
                                  int64_t receive_bytes, int from, int64_t piece_bytes,
                                  Stream stream) override;
  void Connect() override;

 private:
  enum class Way { kUnknown, kDirect, kNccl, kStaged };
  class StagedTransfer;

  // Memory of the host for pieces on their way.
  struct Staging {
    char* memory;
    int64_t bytes;
    Accelerator::Event last_use;
  };
  Staging TakeStaging(int64_t bytes);
  void ReturnStaging(Staging staging);

  std::string Choose() const;
  void SendWhatIsReady();

  Transport& transport_;
  QueuedDevice& device_;
  Accelerator& accelerator_;
  Way way_ = Way::kUnknown;
  std::unique_ptr<nccl::Links> links_;
  std::vector<Staging> free_;
  std::list<StagedTransfer*> sending_;  // in the order of their beginning
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_DEVICE_TRANSPORT_H_
