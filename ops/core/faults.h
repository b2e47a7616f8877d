// Places where tests make a rank fail: by a signal, by waiting, by an exception. In normal use a
// place is one look at a pointer that is null.
#ifndef TF_ADASUM_OPS_CORE_FAULTS_H_
#define TF_ADASUM_OPS_CORE_FAULTS_H_

#include <atomic>

namespace adasum {

// Called with the name of the place, by the thread that is there.
using FaultHook = void (*)(const char* place);

inline std::atomic<FaultHook> fault_hook{nullptr};

inline void FaultPlace(const char* place) {
  if (const FaultHook hook = fault_hook.load(std::memory_order_relaxed)) hook(place);
}

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_FAULTS_H_
