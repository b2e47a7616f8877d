// What the CPU kernels and the XLA custom calls share: calling the core's C API, and its errors as
// TensorFlow's.
#ifndef TF_ADASUM_OPS_TF_CALLS_H_
#define TF_ADASUM_OPS_TF_CALLS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ops/core/c_api.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace tf_adasum {

// The status that a code of the C API stands for, with the calling thread's last error text.
absl::Status ToStatus(int code);

// The ops' attributes "op", "algorithm" and "fusion_threshold" (without a name), and "root_rank".
AdasumReduceOptions ReadReduce(tensorflow::OpKernelConstruction* ctx);
int ReadRoot(tensorflow::OpKernelConstruction* ctx);
// "wire_dtype", as an AdasumDType.
int ReadWire(tensorflow::OpKernelConstruction* ctx);

// adasum_sync, and what a user has to be told of its result.
absl::Status Sync(const AdasumSyncTensors& tensors, const AdasumSyncOptions& options,
                  AdasumSyncResult* result, double* orthogonality);

// The same of adasum_partition_sync.
absl::Status PartitionSync(const AdasumSyncTensors& tensors, const int32_t* owner_of,
                           const AdasumSyncOptions& options, AdasumSyncResult* result,
                           double* orthogonality);

// The attributes "owner_of", "lane", "names" and "fusion_threshold" of an op of tensors that have
// owners; "lane" may be missing.
class Owners {
 public:
  explicit Owners(tensorflow::OpKernelConstruction* ctx);

  int count() const { return static_cast<int>(owner_of_.size()); }
  const int32_t* data() const { return owner_of_.data(); }
  bool is_mine(int tensor) const { return owner_of_[tensor] == lane_; }
  int mine() const;
  const std::string& name(int tensor) const { return names_[tensor]; }
  int64_t threshold() const { return threshold_; }

 private:
  std::vector<int32_t> owner_of_;
  std::vector<std::string> names_;
  int32_t lane_ = -1;
  int64_t threshold_ = -1;
};

// Tensors as the C API takes them. It must not be copied, since the views point into it.
class TensorViews {
 public:
  explicit TensorViews(size_t count) {
    dims_.reserve(count);
    dtype_names_.reserve(count);
    names_.reserve(count);
  }
  TensorViews(const TensorViews&) = delete;

  // name, which may be empty, is compared over the ranks.
  void Add(const void* data, absl::Span<const int64_t> dims, tensorflow::DataType dtype,
           const std::string& name = "");

  const AdasumTensor* data() const { return views_.data(); }
  int64_t size() const { return static_cast<int64_t>(views_.size()); }

 private:
  std::vector<std::vector<int64_t>> dims_;
  std::vector<std::string> dtype_names_;
  std::vector<std::string> names_;
  std::vector<AdasumTensor> views_;
};

// Parts the names of variables where XLA takes them as one text.
constexpr char kBetweenXlaNames = '\n';

// What an op refuses before it calls the core: values that are no plain bytes, ...
absl::Status CheckMovable(tensorflow::DataType dtype);
// ... a start that is not like its variable, ...
absl::Status CheckStart(int index, tensorflow::DataType dtype, const tensorflow::TensorShape& shape,
                        tensorflow::DataType start_dtype,
                        const tensorflow::TensorShape& start_shape);
// ... a variable that is given twice.
absl::Status GivenTwice();

}  // namespace tf_adasum

#endif  // TF_ADASUM_OPS_TF_CALLS_H_
