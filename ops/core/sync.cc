#include "sync.h"

#include <functional>
#include <optional>

#include "agreement.h"
#include "call.h"
#include "error.h"
#include "small.h"

namespace adasum {

namespace {

// What a rank tells the others while they agree on the call.
constexpr uint64_t kPending = 1;     // it has a change to bring
constexpr uint64_t kGoesOn = 2;      // it does not flush: more calls will come
constexpr uint64_t kSkips = 4;       // its change is not finite, and counts as zero
constexpr uint64_t kNonfinite = 8;   // its change is not finite, and that is an error
constexpr uint64_t kOverflows = 16;  // its change does not fit the wire at this scale

// At this one all float32 numbers fit float16.
constexpr int64_t kLeastExponent = -120, kLargestExponent = 120;

constexpr int64_t kNoTensor = -1;

}  // namespace

class SyncCall::State {
 public:
  State(const SyncTensors& tensors, const SyncOptions& options, const std::string& name,
        bool keeps_starts)
      : tensors_(tensors),
        options_(options),
        name_(name),
        keeps_starts_(keeps_starts),
        device_(*options.reduce.device),
        deltas_(device_, options.reduce.fusion_threshold),
        states_(device_, options.reduce.fusion_threshold),
        inputs_{options.pending, tensors.values, tensors.starts, tensors.states} {
    result_.scale = options.wire.scale;
    if (options.wire.is_narrow()) {
      CheckReducible(tensors.specs);
      narrow_.emplace(device_, tensors.specs, options.wire);
    }
    deltas_.Add(narrow_ ? narrow_->specs() : tensors.specs, options.reduce.op);
    states_.Add(tensors.state_specs, Op::kAverage);
  }

  bool Round(Transport& transport, Transport& bulk, Workspace& workspace,
             SayingBuffers& saying_buffers) {
    touched_ = false;
    reduced_ = false;
    // From what all ranks have come to, also where a round is done again.
    scale_ = result_.scale;
    while (true) {
      const Attempt attempt = TryRound(transport, bulk, workspace, saying_buffers);
      if (attempt != Attempt::kOverflows) return attempt == Attempt::kAgain;
      if (scale_.exponent == kLeastExponent) {
        throw Error(ErrorKind::kInvalidArgument,
                    "the change of the weights since the last sync does not fit `wire_dtype`");
      }
      scale_ = {scale_.exponent - 1, 0};
    }
  }

  void EndRound() {
    result_.skipped = result_.skipped || counts_as_zero_;
    if (!reduced_) return;
    NoteGoodScale();
    if (result_.syncs++ == 0) result_.report = report_;
    if (keeps_starts_) Keep(tensors_.specs, tensors_.new_values, tensors_.new_starts);
    inputs_ = {false, tensors_.new_values, tensors_.new_values, tensors_.new_states};
    if (keeps_starts_) inputs_.starts = tensors_.new_starts;
  }

  bool untouched() const { return !touched_; }

  void GoBack() {
    if (inputs_.starts == nullptr) return;
    Keep(tensors_.specs, inputs_.starts, tensors_.new_values);
    Keep(tensors_.specs, inputs_.starts, tensors_.new_starts);
    Keep(tensors_.state_specs, inputs_.states, tensors_.new_states);
    inputs_ = {false, tensors_.new_values, inputs_.starts, tensors_.new_states};
  }

  const SyncResult& result() const { return result_; }

 private:
  void NoteGoodScale() {
    // Only float16 lacks small numbers.
    if (options_.wire.dtype == DType::kFloat16 && ++scale_.good >= Scale::kGrowsAfter &&
        scale_.exponent < kLargestExponent) {
      scale_ = {scale_.exponent + 1, 0};
    }
    result_.scale = scale_;
  }

  enum class Attempt { kLast, kAgain, kOverflows };

  Attempt TryRound(Transport& transport, Transport& bulk, Workspace& workspace,
                   SayingBuffers& saying_buffers) {
    is_small_ = IsSmall(transport, device_, deltas_.bytes() + states_.bytes());
    const Place place{transport, bulk, workspace, saying_buffers};
    const Ends delta_ends = DeltaEnds(), state_ends = StateEnds();
    AllreduceCall deltas = Prepare(place, deltas_, delta_ends);
    const Agreed agreed = Agree(place, deltas);
    if (agreed.flags & kOverflows) return Attempt::kOverflows;
    const bool again = options_.flush && (agreed.flags & kGoesOn);
    const Attempt done = again ? Attempt::kAgain : Attempt::kLast;
    if (!(agreed.flags & kPending)) {
      KeepValues();
      return done;
    }
    report_ = Reduce(place, deltas_, delta_ends, &deltas, agreed.said, 0);
    if (narrow_ && !LandNarrow()) return Attempt::kOverflows;
    // What goes with a change that is not finite is likely not finite either, and must not get
    // into the other ranks' mean.
    if (!(agreed.flags & kSkips)) {
      AllreduceCall states = Prepare(place, states_, state_ends);
      Reduce(place, states_, state_ends, &states, agreed.said, deltas_.bytes());
    } else {
      Keep(tensors_.state_specs, inputs_.states, tensors_.new_states);
    }
    reduced_ = true;
    return done;
  }

  struct Place {
    Transport& transport;
    Transport& bulk;
    Workspace& workspace;
    SayingBuffers& saying_buffers;
  };

  // Where this rank stands: after a first round of a flush, that is where the round has brought it.
  struct Inputs {
    bool pending;
    const void* const* values;
    const void* const* starts;
    const void* const* states;
  };

  // What a rank has to know of its change before it can tell the others.
  struct Findings {
    int64_t bad = kNoTensor;  // the first tensor whose delta is not finite
    bool zero = true;         // all of them are
    uint64_t starts = 0;      // their checksum
  };

  // The change of the values' elements from byte `at` on.
  void Delta(const Kernels& kernels, int64_t t, int64_t at, int64_t count, char* to) const {
    const char* value = At(inputs_.values[t], at);
    if (inputs_.starts == nullptr) {
      kernels.Copy(value, count, to);
    } else {
      kernels.Delta(value, At(inputs_.starts[t], at), count, to);
    }
  }

  static const char* At(const void* data, int64_t bytes) {
    return static_cast<const char*>(data) + bytes;
  }

  // Tells the others of this rank's change, and all of it where that is little.
  Agreed Agree(const Place& place, AllreduceCall& deltas) {
    const Findings found = Inspect();
    const bool is_bad = found.bad != kNoTensor;
    // A change that is not finite counts as zero, all of it.
    counts_as_zero_ = is_bad;
    const bool is_error = is_bad && (options_.raise_nonfinite ||
                                     options_.skips_in_a_row >= SyncOptions::kMaxSkipsInARow - 1);
    // One that counts as zero fits in any case.
    const bool overflows = narrow_ && !FillNarrow();
    const bool pending = inputs_.pending || (!is_bad && !found.zero);
    const uint64_t own = (pending ? kPending : 0) | (options_.flush ? 0 : kGoesOn) |
                         (is_bad ? kSkips : 0) | (is_error ? kNonfinite : 0) |
                         (overflows ? kOverflows : 0);
    Call call(CallKind::kSync, name_);
    call.With(options_.reduce).With(tensors_.specs).WithStates(tensors_.state_specs);
    if (narrow_) call.WithWire(options_.wire.dtype, scale_.exponent);
    // Deltas from different starts would add up to different weights without anybody noticing.
    std::function<uint64_t(size_t)> start_of;
    if (inputs_.starts != nullptr) {
      start_of = [this](size_t t) { return inspections_[t].start; };
    }
    call.WithStarts(found.starts, start_of);
    Saying saying;
    if (is_small_) {
      saying = {deltas_.bytes() + states_.bytes(), [this](char* to) {
                  Fill(deltas_, DeltaEnds(), to);
                  Fill(states_, StateEnds(), to + deltas_.bytes());
                }};
    }
    if (!is_small_) deltas.Prepare();
    Agreed agreed = adasum::Agree(place.transport, place.saying_buffers, call, own, saying);
    CheckReducible(tensors_.specs);
    CheckReducible(tensors_.state_specs);
    if (agreed.flags & kNonfinite) ThrowNonfinite(place.transport, is_error, found.bad);
    return agreed;
  }

  Findings Inspect() {
    inspections_.assign(tensors_.specs.size(), Inspection{});
    for (size_t t = 0; t < tensors_.specs.size(); ++t) {
      const TensorSpec& spec = tensors_.specs[t];
      // What has no arithmetic is refused once the ranks have agreed.
      if (spec.dtype == DType::kOther || spec.count() == 0) continue;
      const void* start = inputs_.starts == nullptr ? nullptr : inputs_.starts[t];
      device_.kernels(spec.dtype).Inspect(inputs_.values[t], start, spec.count(), &inspections_[t]);
    }
    device_.Finish();
    Findings found;
    for (size_t t = 0; t < inspections_.size(); ++t) {
      const Inspection& of_tensor = inspections_[t];
      if (!of_tensor.finite && found.bad == kNoTensor) found.bad = static_cast<int64_t>(t);
      found.zero = found.zero && of_tensor.zero;
    }
    found.starts =
        inputs_.starts == nullptr ? tensors_.starts_checksum : StartsChecksum(inspections_);
    return found;
  }

  // Returns whether all is finite at this scale.
  bool FillNarrow() {
    bool fits = true;
    for (size_t t = 0; t < tensors_.specs.size(); ++t) {
      const void* start = inputs_.starts == nullptr ? nullptr : inputs_.starts[t];
      fits = narrow_->Fill(static_cast<int64_t>(t), inputs_.values[t], start, scale_.exponent,
                           counts_as_zero_) &&
             fits;
    }
    return fits;
  }

  // Writes the results, if all are finite: all ranks have the same, so they do so together.
  bool LandNarrow() {
    const auto count = static_cast<int64_t>(tensors_.specs.size());
    for (int64_t t = 0; t < count; ++t) {
      if (!narrow_->IsFinite(t)) return false;
    }
    touched_ = true;
    for (int64_t t = 0; t < count; ++t) {
      const void* start = inputs_.starts == nullptr ? nullptr : inputs_.starts[t];
      // A round of a flush in which this rank brings nothing is one of changes that are zero, and
      // brings what was dropped before.
      narrow_->Land(t, inputs_.values[t], start, scale_.exponent, !counts_as_zero_,
                    tensors_.new_values[t]);
      if (tensors_.new_starts == nullptr || keeps_starts_) continue;
      device_.kernels(tensors_.specs[t].dtype)
          .Copy(tensors_.new_values[t], tensors_.specs[t].count(), tensors_.new_starts[t]);
    }
    return true;
  }

  Report Reduce(const Place& place, const Fusion& fusion, const Ends& ends, AllreduceCall* call,
                const std::vector<const char*>& said, int64_t said_at) {
    if (!is_small_) return call->Run();
    std::vector<const char*> of_rank;
    for (const char* of : said) of_rank.push_back(of + said_at);
    return ReduceHere(place.transport, place.workspace, fusion, options_.reduce.algorithm, of_rank,
                      ends);
  }

  AllreduceCall Prepare(const Place& place, const Fusion& fusion, const Ends& ends) {
    return AllreduceCall(place.bulk, place.workspace, fusion, options_.reduce.algorithm, ends);
  }

  // Writes as it goes: a change is read before anything that was read for it is written.
  Ends DeltaEnds() {
    if (narrow_) {
      return {[this](const Kernels& kernels, int64_t t, int64_t begin, int64_t count, char* to) {
                kernels.Copy(narrow_->of(t) + begin * kernels.item_bytes, count, to);
              },
              [this](const Kernels& kernels, int64_t t, int64_t begin, int64_t count,
                     const char* from) {
                kernels.Copy(from, count, narrow_->of(t) + begin * kernels.item_bytes);
              }};
    }
    const auto fill = [this](const Kernels& kernels, int64_t t, int64_t begin, int64_t count,
                             char* to) {
      const int64_t at = begin * kernels.item_bytes;
      if (counts_as_zero_) {
        kernels.Zero(count, to);
      } else {
        Delta(kernels, t, at, count, to);
      }
    };
    const auto emit = [this](const Kernels& kernels, int64_t t, int64_t begin, int64_t count,
                             const char* from) {
      touched_ = true;
      const int64_t at = begin * kernels.item_bytes;
      char* value = static_cast<char*>(tensors_.new_values[t]) + at;
      if (inputs_.starts == nullptr) {
        kernels.Copy(from, count, value);
      } else {
        kernels.Apply(At(inputs_.starts[t], at), from, count, value);
      }
      if (tensors_.new_starts == nullptr || keeps_starts_) return;
      kernels.Copy(value, count, static_cast<char*>(tensors_.new_starts[t]) + at);
    };
    return {fill, emit};
  }

  Ends StateEnds() {
    const auto fill = [this](const Kernels& kernels, int64_t t, int64_t begin, int64_t count,
                             char* to) {
      kernels.Copy(At(inputs_.states[t], begin * kernels.item_bytes), count, to);
    };
    const auto emit = [this](const Kernels& kernels, int64_t t, int64_t begin, int64_t count,
                             const char* from) {
      touched_ = true;
      kernels.Copy(from, count,
                   static_cast<char*>(tensors_.new_states[t]) + begin * kernels.item_bytes);
    };
    return {fill, emit};
  }

  [[noreturn]] void ThrowNonfinite(Transport& transport, bool mine, int64_t bad) {
    std::string own;
    if (mine) {
      own = "tensor " + std::to_string(bad) + " of rank " + std::to_string(transport.rank());
      const std::string name(tensors_.specs[bad].name);
      if (!name.empty()) own += " (" + name + ")";
    }
    std::string where;
    for (const std::string& text : GatherTexts(transport, own)) {
      if (!text.empty()) where += (where.empty() ? "" : ", ") + text;
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

  // Nobody had anything to bring.
  void KeepValues() {
    Keep(tensors_.specs, inputs_.values, tensors_.new_starts);
    Keep(tensors_.specs, inputs_.values, tensors_.new_values);
    Keep(tensors_.state_specs, inputs_.states, tensors_.new_states);
  }

  void Keep(const std::vector<TensorSpec>& specs, const void* const* from, void* const* to) const {
    device_.EndBatch();
    for (size_t t = 0; to != nullptr && t < specs.size(); ++t) {
      if (from[t] == to[t] || specs[t].bytes() == 0) continue;
      device_.kernels(specs[t].dtype).Copy(from[t], specs[t].count(), to[t]);
    }
    device_.Finish();
  }

  const SyncTensors& tensors_;
  const SyncOptions& options_;
  const std::string& name_;
  const bool keeps_starts_;
  Device& device_;
  std::optional<NarrowChanges> narrow_;
  Scale scale_;  // while a round is done
  Fusion deltas_;
  Fusion states_;
  Inputs inputs_;
  std::vector<Inspection> inspections_;  // of each tensor
  bool is_small_ = false;
  bool counts_as_zero_ = false;
  bool touched_ = false;
  bool reduced_ = false;
  Report report_;
  SyncResult result_;
};

uint64_t StartsChecksum(const std::vector<Inspection>& inspections) {
  Hasher hasher;
  for (const Inspection& of_tensor : inspections) hasher.Add(of_tensor.start);
  return hasher.hash();
}

SyncCall::SyncCall(const SyncTensors& tensors, const SyncOptions& options, const std::string& name,
                   bool keeps_starts)
    : state_(std::make_unique<State>(tensors, options, name, keeps_starts)) {}

SyncCall::~SyncCall() = default;

bool SyncCall::Round(Transport& transport, Transport& bulk, Workspace& workspace,
                     SayingBuffers& saying_buffers) {
  return state_->Round(transport, bulk, workspace, saying_buffers);
}

void SyncCall::EndRound() { state_->EndRound(); }

bool SyncCall::untouched() const { return state_->untouched(); }

void SyncCall::GoBack() { state_->GoBack(); }

const SyncResult& SyncCall::result() const { return state_->result(); }

}  // namespace adasum
