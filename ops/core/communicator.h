// The collectives that users call, over one transport: checks, fusion buffer, then the algorithm.
#ifndef TF_ADASUM_OPS_CORE_COMMUNICATOR_H_
#define TF_ADASUM_OPS_CORE_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "agreement.h"
#include "allreduce.h"
#include "fusion.h"
#include "sync.h"
#include "transport.h"
#include "watchdog.h"

namespace adasum {

// How a communicator came to have fewer ranks.
struct Shrinking {
  std::vector<int> lost;  // ranks, by the numbers before
  int old_rank;
  int old_size;
  int new_rank;
  int new_size;
};

class Communicator {
 public:
  // watchdog may be null.
  explicit Communicator(std::shared_ptr<Transport> transport,
                        std::shared_ptr<Watchdog> watchdog = nullptr,
                        Watchdog::Lane lane = Watchdog::kTraining);

  const std::shared_ptr<Watchdog>& watchdog() const { return watchdog_; }

  // The one in use now: another one after ranks were lost.
  std::shared_ptr<Transport> transport() const;

  // From now on the ranks that live go on without those that die: a collective then ends with the
  // same outcome on all that live, and is made again without the dead. Throws Error(kState) where
  // the transport cannot do that. Must be done on all ranks before the same call.
  void GoOnWithoutTheDead();
  // How often that has happened, and what became of the ranks; may be called at any time.
  int64_t shrinkings() const;
  Shrinking shrinking(int64_t index) const;

  // Each throws Error(kDisagreement) on every rank unless all ranks pass the same kind of call,
  // name, options, and number, dtypes and shapes of tensors; and Error(kRankLost) where a rank has
  // died and the others do not go on without it.

  void Allreduce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                 void* const* outputs, const ReduceOptions& options, const std::string& name);
  // values - starts is reduced, starts + result written to new_values and, where not null, to
  // new_starts. Nothing is written where an error is thrown by the first reduction. Where a rank is
  // lost before anything is written, the others' changes are reduced; later, all go back to the
  // starts.
  SyncResult Sync(const SyncTensors& tensors, const SyncOptions& options, const std::string& name);
  // Returns whether any bit of this rank's tensors was different from root's. Where root is lost,
  // the next rank after it that lives takes its place.
  bool Broadcast(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                 void* const* outputs, int root, const std::string& name);
  void Allgather(const TensorSpec& tensor, const void* input,
                 const std::function<void*(int64_t)>& allocate, const std::string& name);
  void Barrier(const std::string& name);
  // For the ranks of one host, each of which owns some of the tensors: owner_of[t] is a rank. The
  // sum over the ranks, for its owner alone: outputs of other tensors may be null.
  void ReduceToOwners(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                      void* const* outputs, const std::vector<int>& owner_of,
                      int64_t fusion_threshold, const std::string& name);
  // Copies what their owners have to every rank, in place.
  void ShareFromOwners(const std::vector<TensorSpec>& tensors, void* const* values,
                       const std::vector<int>& owner_of, int64_t fusion_threshold,
                       const std::string& name);
  // Every rank's text, by rank.
  std::vector<std::string> Gather(const std::string& text, const std::string& name);
  // The last call: so that a rank that leaves while the others go on is an error, not a hang.
  void Leave();

 private:
  enum class Outcome {
    kDone,
    kLostBefore,
    kLostAfter
  };  // a rank, before or after something was
      // written

  // Does body on all ranks alike. What it throws because a rank has died it throws on as
  // Error(kRankLost); or, where the ranks go on without, they do, and body is to be done again.
  Outcome Attempt(
      const std::function<void()>& body,
      const std::function<bool()>& untouched = [] { return true; });
  void UntilDone(const std::function<void()>& body);
  Outcome AttemptTogether(const std::function<void()>& body,
                          const std::function<bool()>& untouched);
  void Shrink(const std::string& problem);
  bool goes_on() const { return goes_on_ && current_->size() > 1; }
  void RunHalf(Halves half, const std::vector<TensorSpec>& tensors, const Ends& ends,
               const std::vector<int>& owner_of, int64_t fusion_threshold, const std::string& name);
  bool BroadcastOnce(const std::vector<TensorSpec>& tensors, const void* const* inputs,
                     void* const* outputs, int root, const std::string& name);
  void AllgatherOnce(const TensorSpec& tensor, const void* input,
                     const std::function<void*(int64_t)>& allocate, const std::string& name);

  // What calls with tensors on one device need.
  struct OnDevice {
    explicit OnDevice(Device& device) : workspace(device) {}
    Workspace workspace;
    std::unique_ptr<Transport> transport;  // null on the host
  };
  OnDevice& On(Device& device);
  Transport& Bulk(Device& device);

  // What belongs to a transport. Messages to one that ranks were lost of may still come in, so it
  // stays.
  struct Retired {
    std::shared_ptr<Transport> transport;
    std::map<Device*, OnDevice> devices;
    std::unique_ptr<SayingBuffers> saying_buffers;
  };

  const std::shared_ptr<Watchdog> watchdog_;
  const Watchdog::Lane lane_;
  std::mutex mutex_;  // one collective at a time
  std::shared_ptr<Transport> current_;
  std::map<Device*, OnDevice> devices_;
  std::unique_ptr<SayingBuffers> saying_buffers_;
  bool goes_on_ = false;
  std::vector<Retired> retired_;

  mutable std::mutex state_mutex_;  // of what is asked for meanwhile
  std::shared_ptr<Transport> transport_;
  std::vector<Shrinking> shrinkings_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_COMMUNICATOR_H_
