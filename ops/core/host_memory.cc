#include "host_memory.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "error.h"

namespace adasum {

namespace {

// Between two looks at whether the others are still there, in nanoseconds.
constexpr int64_t kSleep = 50'000'000;

// A core for each member: then a count comes within microseconds, and looking at it is the fastest
// way to see it. Otherwise the core is better given to the one that is waited for.
constexpr int kSpinsWithCore = 20'000;
constexpr int kSpinsWithoutCore = 20;

int Cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Shared between processes, so not FUTEX_PRIVATE_FLAG.
void SleepWhileEqual(const std::atomic<uint32_t>* word, uint32_t value) {
  const timespec timeout{0, kSleep};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void WakeAll(const std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool Reached(uint32_t count, uint32_t wanted) { return static_cast<int32_t>(count - wanted) >= 0; }

}  // namespace

bool SharedMemoryIsWanted() {
  const char* wanted = std::getenv("TF_ADASUM_SHARED_MEMORY");
  return wanted == nullptr || std::string(wanted) != "0";
}

struct HostMemory::Control {
  struct alignas(64) Count {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
  };
  Count counts[kCounters];
  std::atomic<uint32_t> revoked;
  alignas(64) char told[2][kTellBytes];
};

HostMemory::HostMemory(int member, int members, Map map, CheckOthers check_others)
    : member_(member),
      members_(members),
      map_(std::move(map)),
      check_others_(std::move(check_others)),
      spins_(members <= Cores() ? kSpinsWithCore : kSpinsWithoutCore),
      controls_(map_(sizeof(Control))) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
}

HostMemory::Control& HostMemory::control(int member) const {
  // A segment of zeros is a Control without a count.
  return *std::launder(reinterpret_cast<Control*>((*controls_)[member]));
}

void HostMemory::Reserve(int64_t bytes) {
  if (bytes <= capacity_) return;
  data_ = map_(bytes);
  capacity_ = bytes;
}

void HostMemory::Tell(const void* something, int64_t bytes) {
  // Whoever has told of the call before this one has read what was told in the one before that.
  ++calls_;
  std::memcpy(control(member_).told[calls_ % 2], something, static_cast<size_t>(bytes));
  Post(kCalls, calls_);
  AwaitAll(kCalls, calls_);
}

const char* HostMemory::ToldBy(int member) const { return control(member).told[calls_ % 2]; }

void HostMemory::Revoke() {
  Control& own = control(member_);
  own.revoked.store(1);
  for (Control::Count& count : own.counts) WakeAll(&count.value);
}

void HostMemory::CheckRevoked() const {
  for (int member = 0; member < members_; ++member) {
    if (control(member).revoked.load() == 0) continue;
    throw Error(ErrorKind::kRankLost, "a rank has given up because another one has died");
  }
}

void HostMemory::Post(Counter counter, uint32_t count) {
  Control::Count& own = control(member_).counts[counter];
  own.value.store(count);
  if (own.sleepers.load() != 0) WakeAll(&own.value);
}

void HostMemory::Await(int member, Counter counter, uint32_t count) {
  Control::Count& theirs = control(member).counts[counter];
  for (int spin = 0; spin < spins_; ++spin) {
    if (Reached(theirs.value.load(std::memory_order_acquire), count)) return;
    Pause();
  }
  // Announced before the last look, so that either the count is seen here or the sleeper there.
  theirs.sleepers.fetch_add(1);
  while (true) {
    const uint32_t value = theirs.value.load();
    if (Reached(value, count)) break;
    SleepWhileEqual(&theirs.value, value);
    try {
      CheckRevoked();
      check_others_();
    } catch (...) {
      theirs.sleepers.fetch_sub(1);
      throw;
    }
  }
  theirs.sleepers.fetch_sub(1);
}

void HostMemory::AwaitAll(Counter counter, uint32_t count) {
  for (int member = 0; member < members_; ++member) {
    if (member != member_) Await(member, counter, count);
  }
}

}  // namespace adasum
