// Memory that the processes of one host share.
#ifndef TF_ADASUM_OPS_CORE_HOST_MEMORY_MMAP_H_
#define TF_ADASUM_OPS_CORE_HOST_MEMORY_MMAP_H_

#include <memory>

#include "transport.h"

namespace adasum {

// Collective over all ranks. Returns, on all ranks alike, whether the ranks of every host share
// memory; memory is then set, except for a rank that is alone. They do not where a process cannot
// map another's memory (containers of their own), or where TF_ADASUM_SHARED_MEMORY is 0.
// check_others: as HostMemory's.
bool ShareHostMemory(Transport& transport, HostMemory::CheckOthers check_others,
                     std::unique_ptr<HostMemory>* memory);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_HOST_MEMORY_MMAP_H_
