// Over the start of a job, while its processes meet: a process that does not come would keep the
// others waiting in MPI_Init.
#ifndef TF_ADASUM_OPS_CORE_START_WATCH_H_
#define TF_ADASUM_OPS_CORE_START_WATCH_H_

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace adasum {

// While it lives, the job starts. Processes of one host find each other by sockets that have names
// but no files, and vanish with them.
class StartWatch {
 public:
  // Throws Error(kInvalidArgument) where TF_ADASUM_START_ABORT_SECONDS is no number of seconds.
  // warning: after how many seconds to say who is missing; 0 for never.
  explicit StartWatch(double warning);
  StartWatch(const StartWatch&) = delete;
  StartWatch& operator=(const StartWatch&) = delete;
  ~StartWatch();

 private:
  void Watch();
  bool WaitsUntil(double seconds);
  std::string Missing() const;
  bool IsSpokesman() const;

  const double warning_;
  const double abort_;
  int socket_ = -1;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_START_WATCH_H_
