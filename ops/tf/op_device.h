// Which device an op runs on, as the core wants to know it.
#ifndef TF_ADASUM_OPS_TF_OP_DEVICE_H_
#define TF_ADASUM_OPS_TF_OP_DEVICE_H_

#include "ops/core/c_api.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_adasum {

class OpDevice {
 public:
  explicit OpDevice(tensorflow::OpKernelContext* ctx);

  // Null for the host. As long as this lives.
  const AdasumDevice* get() const { return device_.memory == ADASUM_HOST ? nullptr : &device_; }

 private:
  AdasumDevice device_{};
};

}  // namespace tf_adasum

#endif  // TF_ADASUM_OPS_TF_OP_DEVICE_H_
