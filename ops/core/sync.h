// Bringing ranks together that trained on their own (the paper's Figure 3): the change of the
// weights since the last sync, the delta, is reduced, and every rank goes on from start + result.
#ifndef TF_ADASUM_OPS_CORE_SYNC_H_
#define TF_ADASUM_OPS_CORE_SYNC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agreement.h"
#include "allreduce.h"
#include "fusion.h"
#include "transport.h"
#include "wire.h"

namespace adasum {

// What a sync reads and writes. Where memory is written it may be the memory that was read.
struct SyncTensors {
  std::vector<TensorSpec> specs;  // of values and starts
  const void* const* values;
  // Equal on all ranks. Null where the values are changes already, and so are the new values.
  const void* const* starts;
  void* const* new_values;
  void* const* new_starts;  // may be null unless flush
  std::vector<TensorSpec> state_specs;
  const void* const* states;  // averaged over the ranks
  void* const* new_states;
  uint64_t starts_checksum = 0;  // where the starts are null
};

struct SyncOptions {
  ReduceOptions reduce;
  // Whether this rank took steps. If not, it has a change to bring only if that is not zero.
  bool pending;
  // Whether to go on syncing, with a change of zero, until every rank flushes: what a rank does
  // that has come to an end of its steps, so that ranks with more steps are not left alone.
  bool flush;
  // What becomes of a change that is not finite: an error on every rank; or this rank counts as one
  // without a change, and it is an error once that has happened kMaxSkipsInARow times in a row.
  bool raise_nonfinite;
  int64_t skips_in_a_row;
  // How float32 changes are sent; kOther for as they are. See wire.h.
  Wire wire = {};
  static constexpr int64_t kMaxSkipsInARow = 3;
};

struct SyncResult {
  int64_t syncs = 0;     // reductions done
  bool skipped = false;  // this rank's change was not finite
  Scale scale;           // of the wire, for the next sync
  Report report;         // of the first of the reductions; about specs alone
};

// Of all starts, from what was found in each tensor; 0 for those without elements.
uint64_t StartsChecksum(const std::vector<Inspection>& inspections);

// A sync, round by round. Keeps references to what it is given.
class SyncCall {
 public:
  // keeps_starts: so that GoBack is possible, the starts are not written before the end of a round.
  SyncCall(const SyncTensors& tensors, const SyncOptions& options, const std::string& name,
           bool keeps_starts);
  ~SyncCall();

  // Collective. transport: for what the ranks tell each other; bulk: for what is on the tensors'
  // device, which the workspace is on too. Returns whether there is another round. Throws
  // Error(kDisagreement) on every rank where ranks differ in op, name, tensors or the contents of
  // the starts, and Error(kInvalidArgument) on every rank for a change that is not finite and may
  // not be skipped; then nothing is written in this round.
  bool Round(Transport& transport, Transport& bulk, Workspace& workspace,
             SayingBuffers& saying_buffers);
  // After each round that has come to its end on all ranks.
  void EndRound();
  // Whether the round has not written anything yet, so that it can be done again.
  bool untouched() const;
  // After a round that has not come to its end: the values become the starts. What the states have
  // become they stay.
  void GoBack();

  const SyncResult& result() const;

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_SYNC_H_
