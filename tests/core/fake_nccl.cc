#include "fake_nccl.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace core_test {

namespace {

namespace nccl = adasum::nccl;
namespace emulated = adasum::emulated;

struct Member {
  uint64_t id;
  int rank;
};

using Bytes = std::vector<char>;

// Messages by communicator, sender and receiver.
std::mutex mutex;
std::condition_variable changed;
std::map<std::tuple<uint64_t, int, int>, std::deque<Bytes>> messages;
uint64_t last_id = 0;

thread_local std::vector<std::function<void()>> sends, receives;
thread_local std::vector<void*> streams;

nccl::Result GetUniqueId(nccl::UniqueId* id) {
  std::lock_guard<std::mutex> lock(mutex);
  ++last_id;
  std::memcpy(id->bytes, &last_id, sizeof last_id);
  return 0;
}

nccl::Result CommInitRank(nccl::Communicator* made, int, nccl::UniqueId id, int rank) {
  auto* member = new Member{0, rank};
  std::memcpy(&member->id, id.bytes, sizeof member->id);
  *made = member;
  return 0;
}

nccl::Result CommDestroy(nccl::Communicator communicator) {
  delete static_cast<Member*>(communicator);
  return 0;
}

nccl::Result Send(const void* from, size_t count, int, int to, nccl::Communicator communicator,
                  void* stream) {
  const Member member = *static_cast<Member*>(communicator);
  sends.push_back([=] {
    emulated::Ask(stream, [=] {
      const char* data = emulated::Reach(from);
      std::lock_guard<std::mutex> lock(mutex);
      messages[{member.id, member.rank, to}].emplace_back(data, data + count);
      changed.notify_all();
    });
  });
  streams.push_back(stream);
  return 0;
}

nccl::Result Receive(void* to, size_t count, int, int from, nccl::Communicator communicator,
                     void* stream) {
  const Member member = *static_cast<Member*>(communicator);
  receives.push_back([=] {
    emulated::Ask(stream, [=] {
      std::unique_lock<std::mutex> lock(mutex);
      std::deque<Bytes>& coming = messages[{member.id, from, member.rank}];
      changed.wait(lock, [&] { return !coming.empty(); });
      if (coming.front().size() == count)
        std::memcpy(emulated::Reach(to), coming.front().data(), count);
      coming.pop_front();
    });
  });
  return 0;
}

nccl::Result GroupStart() { return 0; }

nccl::Result GroupEnd() {
  for (const auto& send : sends) send();
  for (void* stream : streams) emulated::Run(stream);
  for (const auto& receive : receives) receive();
  sends.clear();
  streams.clear();
  receives.clear();
  return 0;
}

const char* GetErrorString(nccl::Result) { return "a failure"; }

}  // namespace

const nccl::Api& FakeNccl() {
  static const nccl::Api api{GetUniqueId, CommInitRank, CommDestroy, CommDestroy,   Send,
                             Receive,     GroupStart,   GroupEnd,    GetErrorString};
  return api;
}

}  // namespace core_test
