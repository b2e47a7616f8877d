// Messages between hosts so small that it is cheapest to send all of them to all ranks while these
// agree on the call, and to work the whole result out on each rank. Where all ranks share memory,
// it was never faster than to share the work.
#ifndef TF_ADASUM_OPS_CORE_SMALL_H_
#define TF_ADASUM_OPS_CORE_SMALL_H_

#include <cstdint>
#include <vector>

#include "allreduce.h"
#include "fusion.h"
#include "transport.h"

namespace adasum {

// Whether a call with these tensors is small. Equal on all ranks.
bool IsSmall(Transport& transport, const Device& device, int64_t bytes);

// Puts the tensors where ReduceHere wants them: the buckets one after the other, each aligned.
void Fill(const Fusion& fusion, const Ends& ends, char* to);

// of_rank[r] holds rank r's tensors as Fill has put them. Returns what
// Allreduce would, up to the order of sums.
Report ReduceHere(const Transport& transport, Workspace& workspace, const Fusion& fusion,
                  Algorithm algorithm, const std::vector<const char*>& of_rank, const Ends& ends);

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_SMALL_H_
