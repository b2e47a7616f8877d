// The collectives that users call, over one transport: checks, fusion buffer, then the algorithm.
#ifndef TF_ADASUM_OPS_CORE_COMMUNICATOR_H_
#define TF_ADASUM_OPS_CORE_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "rvh.h"
#include "transport.h"

namespace adasum {

// What a collective needs to know of a tensor. The pointers are the caller's, for the length of the
// call.
struct TensorSpec {
  DType dtype;
  const char* dtype_name;
  int64_t item_bytes;
  const int64_t* dims;
  int rank;

  int64_t count() const;
};

class Communicator {
 public:
  explicit Communicator(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  Transport& transport() { return *transport_; }

  // Each throws Error(kDisagreement) on every rank unless all ranks pass the same kind of call,
  // name, options, and number, dtypes and shapes of tensors.

  Report Allreduce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                   void* const* outputs, Op op, const std::string& name);
  // values - starts is reduced, starts + result written to new_values and, where not null, to
  // new_starts. The starts have to be equal on all ranks.
  Report Sync(const std::vector<TensorSpec>& tensors, const void* const* values,
              const void* const* starts, void* const* new_values, void* const* new_starts, Op op,
              const std::string& name);
  // Returns whether any bit of this rank's tensors was different from root's.
  bool Broadcast(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                 void* const* outputs, int root, const std::string& name);
  void Allgather(const TensorSpec& tensor, const void* input,
                 const std::function<void*(int64_t)>& allocate, const std::string& name);
  void Barrier(const std::string& name);
  // The last call: so that a rank that leaves while the others go on is an error, not a hang.
  void Leave();

 private:
  // Host memory that keeps its size between calls. Aligned for vector instructions.
  class Buffer {
   public:
    static constexpr int64_t kAlignment = 64;
    static int64_t Aligned(int64_t bytes);  // rounded up
    char* Reserve(int64_t bytes);

   private:
    struct Free {
      void operator()(char* data) const;
    };
    std::unique_ptr<char, Free> data_;
    int64_t capacity_ = 0;
  };

  // Moves one tensor between the caller's memory and its place in the fusion buffer.
  using Move = std::function<void(const Kernels&, int64_t tensor, int64_t count, char* fused)>;
  Report ReduceFused(const std::vector<TensorSpec>& tensors, Op op, const Move& fill,
                     const Move& empty);

  std::unique_ptr<Transport> transport_;
  std::mutex mutex_;
  Buffer fusion_buffer_;
  Buffer receive_buffer_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_COMMUNICATOR_H_
