// The fusion buffer (the paper's section 4.4.3): the tensors of one call side by side, so that they
// are exchanged in a few large messages, each still reduced by itself.
#ifndef TF_ADASUM_OPS_CORE_FUSION_H_
#define TF_ADASUM_OPS_CORE_FUSION_H_

#include <cstdint>
#include <functional>
#include <memory>
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
  const char* name;  // compared over the ranks and shown in errors; may be empty

  int64_t count() const;
  int64_t bytes() const { return count() * item_bytes; }
};

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

// The tensors of one call that are reduced with one op, and where they lie from `begin` in the
// fusion buffer. One buffer holds one dtype: a call with several is as many reductions, in DType's
// order.
class Fusion {
 public:
  Fusion(const std::vector<TensorSpec>& tensors, Op op, int64_t begin);

  int64_t end() const { return end_; }
  int64_t scratch_bytes() const;

  // Calls visit for each tensor that has elements, with its number in the call and its place in the
  // buffer.
  using Visit = std::function<void(const Kernels&, int64_t tensor, int64_t count, char* place)>;
  void ForEach(char* buffer, const Visit& visit) const;

  // Reduces in place. The report's orthogonality is in the order of the call.
  Report Reduce(Transport& transport, char* buffer, char* scratch) const;

 private:
  struct Group {
    const Kernels& kernels;
    std::vector<int64_t> members;
    Layout layout;
    int64_t begin;  // bytes
  };

  const Op op_;
  const int64_t tensors_;
  std::vector<Group> groups_;
  int64_t end_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_FUSION_H_
