#include "sync.h"

#include <algorithm>
#include <cstring>

#include "agreement.h"
#include "call.h"
#include "error.h"

namespace adasum {

namespace {

// What a rank tells the others while they agree on the call.
constexpr uint64_t kPending = 1;    // it has a change to bring
constexpr uint64_t kGoesOn = 2;     // it does not flush: more calls will come
constexpr uint64_t kSkips = 4;      // its change is not finite, and counts as zero
constexpr uint64_t kNonfinite = 8;  // its change is not finite, and that is an error

constexpr int64_t kNoTensor = -1;

class SyncCall {
 public:
  SyncCall(Transport& transport, Buffer& fusion_buffer, Buffer& receive_buffer,
           const SyncTensors& tensors, const SyncOptions& options, const std::string& name)
      : transport_(transport),
        tensors_(tensors),
        options_(options),
        name_(name),
        deltas_(tensors.specs, options.op, 0),
        states_(tensors.state_specs, Op::kAverage, deltas_.end()),
        buffer_(fusion_buffer.Reserve(states_.end())),
        scratch_(
            receive_buffer.Reserve(std::max(deltas_.scratch_bytes(), states_.scratch_bytes()))) {}

  SyncResult Run() {
    Inputs inputs{options_.pending, tensors_.values, tensors_.starts, tensors_.states};
    while (true) {
      const uint64_t flags = Agree(inputs);
      if (!(flags & kPending)) {
        KeepValues(inputs);
        return result_;
      }
      const Report report = deltas_.Reduce(transport_, buffer_, scratch_);
      // What goes with a change that is not finite is likely not finite either, and must not get
      // into the other ranks' mean.
      const bool averages = !(flags & kSkips);
      if (averages) states_.Reduce(transport_, buffer_, scratch_);
      Write(inputs);
      if (result_.syncs++ == 0) result_.report = report;
      if (!options_.flush || !(flags & kGoesOn)) return result_;
      inputs = {false, tensors_.new_values, tensors_.new_values, tensors_.new_states};
    }
  }

 private:
  // Where this rank stands: after a first round of a flush, that is where the round has brought it.
  struct Inputs {
    bool pending;
    const void* const* values;
    const void* const* starts;
    const void* const* states;
  };

  static size_t Bytes(const Kernels& kernels, int64_t count) {
    return static_cast<size_t>(count * kernels.item_bytes);
  }

  static bool IsZero(const char* data, size_t bytes) {
    return std::all_of(data, data + bytes, [](char byte) { return byte == 0; });
  }

  // Fills the buffer and returns the flags of all ranks.
  uint64_t Agree(const Inputs& inputs) {
    const Deltas deltas = FillDeltas(inputs);
    const bool is_bad = deltas.bad != kNoTensor;
    result_.skipped = result_.skipped || is_bad;
    const bool is_error = is_bad && (options_.raise_nonfinite ||
                                     options_.skips_in_a_row + 1 >= SyncOptions::kMaxSkipsInARow);
    const bool pending = inputs.pending || !deltas.zero;
    const uint64_t own = (pending ? kPending : 0) | (options_.flush ? 0 : kGoesOn) |
                         (is_bad ? kSkips : 0) | (is_error ? kNonfinite : 0);
    Call call(CallKind::kSync, name_);
    call.With(options_.op).With(tensors_.specs).WithStates(tensors_.state_specs);
    // Deltas from different starts would add up to different weights without anybody noticing.
    call.WithStarts(inputs.starts);
    const uint64_t flags = adasum::Agree(transport_, call, own);
    CheckReducible(tensors_.specs);
    CheckReducible(tensors_.state_specs);
    if (flags & kNonfinite) ThrowNonfinite(is_error, deltas.bad);
    states_.ForEach(buffer_, [&](const Kernels& kernels, int64_t t, int64_t count, char* place) {
      std::memcpy(place, inputs.states[t], Bytes(kernels, count));
    });
    return flags;
  }

  struct Deltas {
    int64_t bad = kNoTensor;  // the first tensor whose delta is not finite; then all are made zero
    bool zero = true;         // all of them are, as computed
  };

  Deltas FillDeltas(const Inputs& inputs) {
    Deltas deltas;
    deltas_.ForEach(buffer_, [&](const Kernels& kernels, int64_t t, int64_t count, char* place) {
      kernels.delta(inputs.values[t], inputs.starts[t], count, place);
      if (deltas.bad == kNoTensor && !kernels.all_finite(place, count)) deltas.bad = t;
      deltas.zero = deltas.zero && IsZero(place, Bytes(kernels, count));
    });
    if (deltas.bad != kNoTensor) std::memset(buffer_, 0, static_cast<size_t>(deltas_.end()));
    return deltas;
  }

  [[noreturn]] void ThrowNonfinite(bool mine, int64_t bad) {
    const std::string own = mine ? "tensor " + std::to_string(bad) : "";
    std::string where;
    int rank = 0;
    for (const std::string& text : GatherTexts(transport_, own)) {
      if (!text.empty()) {
        where += (where.empty() ? "" : ", ") + text + " of rank " + std::to_string(rank);
      }
      ++rank;
    }
    std::string often;
    if (!options_.raise_nonfinite) {
      often = ", the " + std::to_string(SyncOptions::kMaxSkipsInARow) +
              "rd time in a row; what the rank's optimizer keeps is likely lost";
    }
    throw Error(ErrorKind::kInvalidArgument,
                "the change of the weights since the last sync holds "
                "NaN or infinity in " +
                    where + often);
  }

  void Write(const Inputs& inputs) {
    deltas_.ForEach(buffer_, [&](const Kernels& kernels, int64_t t, int64_t count, char* place) {
      kernels.apply(inputs.starts[t], place, count, tensors_.new_values[t]);
      if (tensors_.new_starts == nullptr) return;
      std::memcpy(tensors_.new_starts[t], tensors_.new_values[t], Bytes(kernels, count));
    });
    states_.ForEach(buffer_, [&](const Kernels& kernels, int64_t t, int64_t count, char* place) {
      std::memcpy(tensors_.new_states[t], place, Bytes(kernels, count));
    });
  }

  // Nobody had anything to bring.
  void KeepValues(const Inputs& inputs) {
    const auto keep = [](const std::vector<TensorSpec>& specs, const void* const* from,
                         void* const* to) {
      for (size_t t = 0; to != nullptr && t < specs.size(); ++t) {
        if (from[t] == to[t] || specs[t].bytes() == 0) continue;
        std::memcpy(to[t], from[t], static_cast<size_t>(specs[t].bytes()));
      }
    };
    keep(tensors_.specs, inputs.values, tensors_.new_starts);
    keep(tensors_.specs, inputs.values, tensors_.new_values);
    keep(tensors_.state_specs, inputs.states, tensors_.new_states);
  }

  Transport& transport_;
  const SyncTensors& tensors_;
  const SyncOptions& options_;
  const std::string& name_;
  const Fusion deltas_;
  const Fusion states_;
  char* const buffer_;
  char* const scratch_;
  SyncResult result_;
};

}  // namespace

SyncResult SyncRanks(Transport& transport, Buffer& fusion_buffer, Buffer& receive_buffer,
                     const SyncTensors& tensors, const SyncOptions& options,
                     const std::string& name) {
  return SyncCall(transport, fusion_buffer, receive_buffer, tensors, options, name).Run();
}

}  // namespace adasum
