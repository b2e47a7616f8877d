// Who did not come? A thread that looks how long this rank's collectives take, asks the other ranks
// where they are when one takes too long, tells the user, and ends the job in the end.
//
// It works while the main thread waits in MPI, and answers for a rank whose main thread computes.
// Ranks number their calls; as all make the same ones in the same order, a rank whose number is
// lower than that of a call that others wait in is missing there.
#ifndef TF_ADASUM_OPS_CORE_WATCHDOG_H_
#define TF_ADASUM_OPS_CORE_WATCHDOG_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "transport.h"

namespace adasum {

// In seconds; 0 for never.
struct Patience {
  double warning = 60;
  double abort = 1800;

  // TF_ADASUM_STALL_WARNING_SECONDS and TF_ADASUM_STALL_ABORT_SECONDS. Throws
  // Error(kInvalidArgument) where they are no such numbers.
  static Patience OfEnvironment();
};

// A number of seconds, 0 or more, from the environment. Throws Error(kInvalidArgument).
double SecondsOfEnvironment(const char* variable, double unset);

// Does something that waits for all processes. Ends this one after so many seconds, 0 for never.
void WithinSeconds(double seconds, const std::string& what, const std::function<void()>& body);

class Watchdog {
 public:
  // Ranks make the calls of each lane in the same order.
  enum Lane { kTraining, kBeside, kLanes };

  // end_job: ends all processes; does not return.
  Watchdog(std::shared_ptr<Transport> transport, const Patience& patience,
           std::function<void()> end_job);
  ~Watchdog();

  // While it lives, this rank is in a call.
  class Call {
   public:
    Call(Watchdog* watchdog, Lane lane, const char* kind, const std::string& name);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call();

   private:
    Watchdog* const watchdog_;
    const Lane lane_;
  };

  // After ranks have been lost: whom to ask from now on.
  void Follow(std::shared_ptr<Transport> transport);

  // For a rank that is about to end: lets the others know.
  void IsEnding();
  // The same, and whether there is another one that is not.
  bool OthersGoOn();

 private:
  struct Progress {  // of a lane
    uint64_t begun = 0;
    uint64_t ended = 0;
    double since = 0;  // the last of the two
    const char* kind = "";
    std::string name;
  };
  struct Note;
  struct Waiting;  // what is known of a call that takes long

  void Work();
  void Answer(Transport& transport);
  void Look(Transport& transport);
  void LookForTheDead(Transport& transport);
  Note Own(int rank) const;
  void Ask(Transport& transport);
  void Report(Transport& transport, Lane lane, const Progress& progress);
  bool IsSpokesman(int rank, Lane lane, uint64_t call) const;
  static bool IsFirst(Transport& transport);
  std::string Missing(Transport& transport, Lane lane, uint64_t call) const;
  [[noreturn]] void End(const std::string& why);

  const Patience patience_;
  const std::function<void()> end_job_;
  mutable std::mutex mutex_;  // of the following
  std::shared_ptr<Transport> transport_;
  Progress lanes_[kLanes];
  bool ends_ = false;
  bool is_ending_ = false;  // this rank
  std::condition_variable changed_;

  // The thread's own.
  std::vector<Note> answers_;  // of the other ranks, to the last question
  uint64_t question_ = 0;
  std::set<int> ending_;  // other ranks that have said so
  std::vector<Waiting> waiting_;
  double dead_since_ = 0;

  std::mutex working_mutex_;  // held while the thread uses the transport
  std::thread thread_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_WATCHDOG_H_
