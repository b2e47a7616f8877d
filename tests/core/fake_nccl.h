// NCCL for the emulated device, with ranks that are threads of one process.
#ifndef TF_ADASUM_TESTS_CORE_FAKE_NCCL_H_
#define TF_ADASUM_TESTS_CORE_FAKE_NCCL_H_

#include "ops/core/nccl.h"

namespace core_test {

// What is sent is read when its group ends, in the order of its stream, and kept; what is received
// is written as late as the stream may. A rank that is alone waits for ever, as with NCCL.
const adasum::nccl::Api& FakeNccl();

}  // namespace core_test

#endif  // TF_ADASUM_TESTS_CORE_FAKE_NCCL_H_
