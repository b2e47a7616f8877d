// Which processes of this host are still there.
#ifndef TF_ADASUM_OPS_CORE_LIVES_H_
#define TF_ADASUM_OPS_CORE_LIVES_H_

#include <cstdint>
#include <vector>

namespace adasum {

// A process in a way that no other one has, as its host's processes tell each other.
struct Process {
  int32_t id = 0;
  int32_t rank = 0;
  uint64_t started = 0;  // since the host did

  static Process Own(int rank);
};

// Processes that are looked after, with the kernel's help: it knows at once.
class Lives {
 public:
  // Those that this process cannot see, in containers of their own, count as living.
  explicit Lives(const std::vector<Process>& processes);
  Lives(const Lives&) = delete;
  Lives& operator=(const Lives&) = delete;
  ~Lives();

  // The ranks whose processes have ended. May be called by any thread.
  std::vector<int> Ended() const;

 private:
  struct Life {
    int rank;
    int descriptor;
  };
  std::vector<Life> lives_;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_LIVES_H_
