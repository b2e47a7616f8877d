// NCCL, where it is found when it is first wanted: messages between GPUs that wait in streams, not
// in threads of the host.
#ifndef TF_ADASUM_OPS_CORE_NCCL_H_
#define TF_ADASUM_OPS_CORE_NCCL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "accelerator.h"
#include "transport.h"

namespace adasum {
namespace nccl {

struct UniqueId {
  char bytes[128];
};
using Communicator = void*;
using Result = int;  // 0 is success

// What is used of its interface, which is the same since 2.7.
struct Api {
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank)(Communicator* made, int ranks, UniqueId id, int rank);
  Result (*comm_destroy)(Communicator communicator);
  Result (*comm_abort)(Communicator communicator);
  Result (*send)(const void* from, size_t count, int dtype, int to, Communicator communicator,
                 void* stream);
  Result (*receive)(void* to, size_t count, int dtype, int from, Communicator communicator,
                    void* stream);
  Result (*group_start)();
  Result (*group_end)();
  const char* (*get_error_string)(Result result);
};

// The library that TF_ADASUM_NCCL_LIBRARY names, or libnccl.so.2. Null where there is none, with
// the reason.
const Api* Load(std::string* why);
// For tests: what Load returns from now on.
void Replace(const Api* api);

// Links between all ranks of a transport. Messages of each stream have streams of their own on the
// device, so that those of one bucket do not wait for those of another.
class Links {
 public:
  // Collective. Throws Error(kTransport) on all ranks where NCCL fails on one.
  Links(const Api& api, Transport& transport, Accelerator& accelerator);
  Links(const Links&) = delete;
  ~Links();

  // As Transport::Start. Waiting for a message makes the compute stream wait, and not the thread.
  std::unique_ptr<Transfer> Start(const void* send, int64_t send_bytes, int to, void* receive,
                                  int64_t receive_bytes, int from, int64_t piece_bytes,
                                  Transport::Stream stream);

 private:
  static constexpr int kStreams = 2;

  void Check(Result result, const char* what);

  const Api& api_;
  Accelerator& accelerator_;
  Communicator communicators_[kStreams] = {};
  bool failed_ = false;
};

}  // namespace nccl
}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_NCCL_H_
