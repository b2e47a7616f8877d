#include "nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "agreement.h"
#include "error.h"

namespace adasum {
namespace nccl {

namespace {

constexpr int kBytes = 0;  // ncclInt8

std::atomic<const Api*> replaced{nullptr};

struct Found {
  Api api{};
  bool is_there = false;
  std::string why;
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

Found Search() {
  Found found;
  const char* named = std::getenv("TF_ADASUM_NCCL_LIBRARY");
  const char* name = named == nullptr || *named == 0 ? "libnccl.so.2" : named;
  // Never closed: its threads may run until the process ends.
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    found.why = error == nullptr ? name : error;
    return found;
  }
  Api& api = found.api;
  found.is_there = Find(library, "ncclGetUniqueId", &api.get_unique_id) &&
                   Find(library, "ncclCommInitRank", &api.comm_init_rank) &&
                   Find(library, "ncclCommDestroy", &api.comm_destroy) &&
                   Find(library, "ncclCommAbort", &api.comm_abort) &&
                   Find(library, "ncclSend", &api.send) &&
                   Find(library, "ncclRecv", &api.receive) &&
                   Find(library, "ncclGroupStart", &api.group_start) &&
                   Find(library, "ncclGroupEnd", &api.group_end) &&
                   Find(library, "ncclGetErrorString", &api.get_error_string);
  if (!found.is_there) found.why = std::string(name) + " is older than NCCL 2.7";
  return found;
}

// Messages in pieces, each of which is a group of what is sent and what is received.
class LinkTransfer : public Transfer {
 public:
  LinkTransfer(Accelerator& accelerator, std::vector<Accelerator::Event> pieces)
      : accelerator_(accelerator), pieces_(std::move(pieces)) {}

  void AwaitPiece(int64_t piece) override {
    for (; awaited_ <= piece; ++awaited_) {
      accelerator_.Wait(Accelerator::kCompute, pieces_[static_cast<size_t>(awaited_)]);
    }
  }
  void Await() override { AwaitPiece(static_cast<int64_t>(pieces_.size()) - 1); }

 private:
  Accelerator& accelerator_;
  const std::vector<Accelerator::Event> pieces_;
  int64_t awaited_ = 0;
};

}  // namespace

const Api* Load(std::string* why) {
  if (replaced.load() != nullptr) return replaced;
  static const Found found = Search();
  if (found.is_there) return &found.api;
  *why = found.why;
  return nullptr;
}

void Replace(const Api* api) { replaced = api; }

Links::Links(const Api& api, Transport& transport, Accelerator& accelerator)
    : api_(api), accelerator_(accelerator) {
  UniqueId ids[kStreams] = {};
  std::string problem;
  const auto attempt = [&](Result result, const char* what) {
    if (result == 0 || !problem.empty()) return;
    problem = std::string(what) + ": " + api_.get_error_string(result);
  };
  if (transport.rank() == 0) {
    for (UniqueId& id : ids) attempt(api_.get_unique_id(&id), "ncclGetUniqueId");
  }
  // Rank 0's word is what counts; a problem of its own is one for all.
  const std::string mine = transport.rank() == 0 && problem.empty()
                               ? std::string(reinterpret_cast<const char*>(ids), sizeof ids)
                               : problem;
  const std::string of_first = GatherTexts(transport, mine)[0];
  if (of_first.size() == sizeof ids) {
    std::memcpy(ids, of_first.data(), sizeof ids);
    accelerator_.Use();
    for (int i = 0; i < kStreams && problem.empty(); ++i) {
      attempt(api_.comm_init_rank(&communicators_[i], transport.size(), ids[i], transport.rank()),
              "ncclCommInitRank");
    }
  } else {
    problem = of_first;
  }
  const std::vector<std::string> all = GatherTexts(transport, problem);
  for (int r = 0; r < transport.size(); ++r) {
    if (all[r].empty()) continue;
    for (Communicator communicator : communicators_) {
      if (communicator != nullptr) api_.comm_abort(communicator);
    }
    throw Error(ErrorKind::kTransport,
                "NCCL does not work on rank " + std::to_string(r) + ": " + all[r]);
  }
}

Links::~Links() {
  for (Communicator communicator : communicators_) {
    if (communicator == nullptr) continue;
    failed_ ? api_.comm_abort(communicator) : api_.comm_destroy(communicator);
  }
}

std::unique_ptr<Transfer> Links::Start(const void* send, int64_t send_bytes, int to, void* receive,
                                       int64_t receive_bytes, int from, int64_t piece_bytes,
                                       Transport::Stream stream) {
  const bool odd = stream == Transport::kOddBuckets;
  const Accelerator::Stream lane = odd ? Accelerator::kOddCopies : Accelerator::kCopies;
  const Communicator communicator = communicators_[odd ? 1 : 0];
  accelerator_.Wait(lane, accelerator_.Record(Accelerator::kCompute));
  std::vector<Accelerator::Event> pieces;
  const auto bytes_of = [&](int64_t all, int64_t at) {
    return static_cast<size_t>(std::max<int64_t>(0, std::min(piece_bytes, all - at)));
  };
  for (int64_t at = 0; at < std::max(send_bytes, receive_bytes); at += piece_bytes) {
    Check(api_.group_start(), "ncclGroupStart");
    if (const size_t bytes = bytes_of(send_bytes, at); bytes > 0) {
      Check(api_.send(static_cast<const char*>(send) + at, bytes, kBytes, to, communicator,
                      accelerator_.Native(lane)),
            "ncclSend");
    }
    if (const size_t bytes = bytes_of(receive_bytes, at); bytes > 0) {
      Check(api_.receive(static_cast<char*>(receive) + at, bytes, kBytes, from, communicator,
                         accelerator_.Native(lane)),
            "ncclRecv");
    }
    Check(api_.group_end(), "ncclGroupEnd");
    pieces.push_back(accelerator_.Record(lane));
  }
  return std::make_unique<LinkTransfer>(accelerator_, std::move(pieces));
}

void Links::Check(Result result, const char* what) {
  if (result == 0) return;
  failed_ = true;
  throw Error(ErrorKind::kTransport, std::string(what) + ": " + api_.get_error_string(result));
}

}  // namespace nccl
}  // namespace adasum
