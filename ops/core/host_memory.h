// Memory that the ranks of one host share. A rank reads the others' vectors where they lie, and a
// counter in memory is all that has to be sent: no exchange inside a host copies anything.
//
// Every rank has a segment of its own, which the others map. It counts what it has done, and they
// wait for the counts. The ranks of a host do the same things in the same order, so a count says
// which of them is done. Counts wrap around; they are compared by their difference.
#ifndef TF_ADASUM_OPS_CORE_HOST_MEMORY_H_
#define TF_ADASUM_OPS_CORE_HOST_MEMORY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace adasum {

// False where TF_ADASUM_SHARED_MEMORY is 0 in the environment.
bool SharedMemoryIsWanted();

// One segment of each member, as this process sees them, for as long as this lives.
class Segments {
 public:
  virtual ~Segments() = default;
  char* operator[](int member) const { return addresses_[member]; }

 protected:
  std::vector<char*> addresses_;
};

class HostMemory {
 public:
  // What a member counts.
  enum Counter {
    kCalls,    // calls that it has told of
    kFilled,   // buckets that it has put into its segment
    kSums,     // sums of a few numbers that it has brought its share of
    kDone,     // buckets of which it has made its part of the result
    kEmptied,  // buckets of which it has read the whole result
    kCounters
  };

  // What a member can tell the others at the start of a call.
  static constexpr int64_t kTellBytes = 64;

  // Collective: gives each member a new segment of so many bytes, filled with zeros. Throws on all
  // members if one of them gets none.
  using Map = std::function<std::unique_ptr<Segments>(int64_t bytes)>;
  // Called now and then while a member waits; may throw, to end the waiting.
  using CheckOthers = std::function<void()>;

  HostMemory(int member, int members, Map map, CheckOthers check_others);

  // For a thread that shares its core with others: it sleeps as soon as it has to wait.
  void SleepAtOnce() { spins_ = 0; }

  int member() const { return member_; }
  int members() const { return members_; }

  // Collective: makes the members' memory at least this large. What it held is lost if it grows.
  void Reserve(int64_t bytes);
  int64_t capacity() const { return capacity_; }
  char* Of(int member) const { return (*data_)[member]; }

  // Tells the members something of at most kTellBytes, and returns when all have told. What they
  // told stays readable until the next but one call.
  void Tell(const void* something, int64_t bytes);
  const char* ToldBy(int member) const;

  // Makes the other members' waiting end with Error(kRankLost), whether or not they wait already.
  void Revoke();

  void Post(Counter counter, uint32_t count);
  void Await(int member, Counter counter, uint32_t count);
  void AwaitAll(Counter counter, uint32_t count);

 private:
  struct Control;
  Control& control(int member) const;
  void CheckRevoked() const;

  const int member_;
  const int members_;
  const Map map_;
  const CheckOthers check_others_;
  int spins_;  // how often a count is looked at before the thread sleeps
  std::unique_ptr<Segments> controls_;
  std::unique_ptr<Segments> data_;
  int64_t capacity_ = 0;
  uint32_t calls_ = 0;
};

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_HOST_MEMORY_H_
