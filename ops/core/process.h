// This process's place among the ranks, as the C API's functions share it.
#ifndef TF_ADASUM_OPS_CORE_PROCESS_H_
#define TF_ADASUM_OPS_CORE_PROCESS_H_

#include <functional>
#include <memory>

#include "communicator.h"
#include "partition.h"

namespace adasum {

// Between adasum_init and adasum_shutdown. Throws Error(kState).
std::shared_ptr<Communicator> World();
// Made by the first call, which is collective.
std::shared_ptr<Partition> WorldPartition();

// Does the body of a function of the C API: what it throws becomes an AdasumStatus, and the text of
// adasum_last_error.
int Guard(const std::function<void()>& body);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_PROCESS_H_
