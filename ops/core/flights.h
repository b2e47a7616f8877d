// Syncs that run beside training: a change of the weights is combined over the ranks while each
// goes on from its own weights, and comes to them one window late.
//
// start is what all ranks have agreed on so far. A rank that hands over its change D goes on from
// start + D. When the combined change R is there, start becomes start + R, and the rank's weights
// w, which have moved on in the meantime, become w + (R - D): what came after D is kept.
#ifndef TF_ADASUM_OPS_CORE_FLIGHTS_H_
#define TF_ADASUM_OPS_CORE_FLIGHTS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "communicator.h"
#include "sync.h"

namespace adasum {

class Flights {
 public:
  // The communicator is for the flights alone: other collectives, which the ranks make meanwhile,
  // would get in between at other places on other ranks.
  explicit Flights(std::unique_ptr<Communicator> communicator);
  // Collective like Communicator::Leave.
  ~Flights();

  // Finishes this process's flight of that number, if there is one, and writes new_values and
  // new_starts, which must not be null. Then starts the next one; or, with options.flush, does what
  // Communicator::Sync does with it. The result is the finished flight's and the flush's together.
  // Collective; every rank makes the same calls in the same order, whatever the numbers. The errors
  // of a flight are thrown by the call that finishes it.
  SyncResult Sync(int64_t number, const SyncTensors& tensors, const SyncOptions& options,
                  const std::string& name);

 private:
  struct Flight;

  void Work();
  void Enqueue(std::function<void()> task);
  void RunAndWait(const std::function<void()>& task);
  SyncResult Finish(Flight& flight, const SyncTensors& tensors);

  const std::unique_ptr<Communicator> communicator_;
  std::map<int64_t, std::shared_ptr<Flight>> flights_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ends_ = false;
  std::thread worker_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_FLIGHTS_H_
