#include "transport_mpi.h"

#include <mpi.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "error.h"
#include "host_memory_mmap.h"
#include "launcher.h"

// Open MPI's extensions: ULFM, which lets the living go on without the dead.
#if defined(OMPI_MAJOR_VERSION) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

// An extension of Open MPI and MPICH, which others lack.
extern "C" __attribute__((weak)) int MPIX_Query_cuda_support(void);

namespace adasum {

namespace {

#if defined(OMPI_HAVE_MPI_EXT_FTMPI)

constexpr bool kHasUlfm = true;
constexpr int kProcessFailed = MPIX_ERR_PROC_FAILED, kRevoked = MPIX_ERR_REVOKED;
constexpr int kFaultToleranceKey = MPIX_FT;

int CommRevoke(MPI_Comm comm) { return MPIX_Comm_revoke(comm); }
int CommAgree(MPI_Comm comm, int* flag) { return MPIX_Comm_agree(comm, flag); }
int CommShrink(MPI_Comm comm, MPI_Comm* living) { return MPIX_Comm_shrink(comm, living); }
int CommFailed(MPI_Comm comm, MPI_Group* failed) { return MPIX_Comm_get_failed(comm, failed); }
int CommIsRevoked(MPI_Comm comm, int* flag) { return MPIX_Comm_is_revoked(comm, flag); }

#else

constexpr bool kHasUlfm = false;
constexpr int kProcessFailed = -1, kRevoked = -1, kFaultToleranceKey = MPI_KEYVAL_INVALID;

int CommRevoke(MPI_Comm) { return MPI_ERR_UNSUPPORTED_OPERATION; }
int CommAgree(MPI_Comm, int*) { return MPI_ERR_UNSUPPORTED_OPERATION; }
int CommShrink(MPI_Comm, MPI_Comm*) { return MPI_ERR_UNSUPPORTED_OPERATION; }
int CommFailed(MPI_Comm, MPI_Group*) { return MPI_ERR_UNSUPPORTED_OPERATION; }
int CommIsRevoked(MPI_Comm, int*) { return MPI_ERR_UNSUPPORTED_OPERATION; }

#endif

// Of notes, beside the streams'.
constexpr int kNoteTag = 100;

// MPI counts are int. One chunk stays well below 2^31 bytes, so a message of any size is a list of
// chunks.
constexpr int64_t kChunkBytes = int64_t{1} << 30;

bool finalize_is_ours = false;
// From when MPI_Finalize begins, in whatever thread: MPI says so only when it has ended.
std::atomic<bool> ending{false};

void Check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  int error_class = code;
  MPI_Error_class(code, &error_class);
  if (error_class == kProcessFailed || error_class == kRevoked) {
    throw Error(ErrorKind::kRankLost, "a rank has died");
  }
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(ErrorKind::kTransport, std::string(call) + " failed: " + std::string(text, length));
}

bool Initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}

bool Finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

void EnsureInitialized() {
  if (ending || Finalized()) {
    throw Error(ErrorKind::kState,
                "MPI is already finalized in this process; it cannot be used again");
  }
  if (!Initialized()) {
    int provided = MPI_THREAD_SINGLE;
    Check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    finalize_is_ours = true;
  }
  int level = MPI_THREAD_SINGLE;
  Check(MPI_Query_thread(&level), "MPI_Query_thread");
  // TensorFlow runs ops on threads of its own, so the calls come from changing threads, one at a
  // time.
  if (level < MPI_THREAD_SERIALIZED) {
    throw Error(
        ErrorKind::kState,
        "MPI was initialised with thread level " + MpiThreadLevel() +
            ", tf_adasum needs SERIALIZED or MULTIPLE: initialise tf_adasum first, or ask for "
            "MPI_THREAD_MULTIPLE where MPI is initialised (mpi4py: "
            "mpi4py.rc.thread_level = 'multiple' before importing mpi4py.MPI)");
  }
}

struct Place {
  int rank;
  int size;
};

Place PlaceIn(MPI_Comm comm) {
  Place place{};
  Check(MPI_Comm_rank(comm, &place.rank), "MPI_Comm_rank");
  Check(MPI_Comm_size(comm, &place.size), "MPI_Comm_size");
  return place;
}

// What tells this host, and the container on it, from others: names alone may be given twice.
struct HostIdentity {
  std::array<char, 256> name{};
  std::array<char, 40> start{};  // of the kernel
  uint64_t processes = 0;        // the space that their numbers are from

  static HostIdentity Own() {
    HostIdentity own;
    gethostname(own.name.data(), own.name.size() - 1);
    std::ifstream("/proc/sys/kernel/random/boot_id").get(own.start.data(), own.start.size());
    struct stat space{};
    if (stat("/proc/self/ns/pid", &space) == 0) own.processes = space.st_ino;
    return own;
  }
  bool operator<(const HostIdentity& other) const {
    return std::tie(name, start, processes) < std::tie(other.name, other.start, other.processes);
  }
};

// Each rank's host, as the number of one of the host's ranks. MPI goes by what the launcher calls
// the host: where Slurm has another name for it than its own, Open MPI 5 takes each rank for one on
// a host of its own.
std::vector<int> FindHosts(MPI_Comm comm, MPI_Comm local) {
  const Place world = PlaceIn(comm);
  int first = world.rank;
  Check(MPI_Bcast(&first, 1, MPI_INT, 0, local), "MPI_Bcast");
  std::vector<int> host_of(world.size);
  Check(MPI_Allgather(&first, 1, MPI_INT, host_of.data(), 1, MPI_INT, comm), "MPI_Allgather");
  const HostIdentity own = HostIdentity::Own();
  std::vector<HostIdentity> identities(world.size);
  Check(MPI_Allgather(&own, sizeof own, MPI_BYTE, identities.data(), sizeof own, MPI_BYTE, comm),
        "MPI_Allgather");
  std::map<HostIdentity, int> known;
  for (int rank = 0; rank < world.size; ++rank) {
    const int same = host_of[known.emplace(identities[rank], rank).first->second];
    const int mpis = host_of[rank];
    std::replace(host_of.begin(), host_of.end(), mpis, same);
  }
  return host_of;
}

// The processes of all ranks.
std::vector<Process> FindProcesses(MPI_Comm comm) {
  const Place world = PlaceIn(comm);
  const Process own = Process::Own(world.rank);
  std::vector<Process> processes(world.size);
  Check(MPI_Allgather(&own, sizeof own, MPI_BYTE, processes.data(), sizeof own, MPI_BYTE, comm),
        "MPI_Allgather");
  return processes;
}

// For tests of several hosts on one: so many ranks of a host are taken for a host of their own.
void Divide(std::vector<int>* host_of) {
  const char* text = std::getenv("TF_ADASUM_RANKS_PER_HOST");
  const int ranks = text == nullptr ? 0 : std::atoi(text);
  if (ranks <= 0) return;
  std::map<int, int> seen;
  std::map<std::pair<int, int>, int> parts;
  for (size_t rank = 0; rank < host_of->size(); ++rank) {
    int& host = (*host_of)[rank];
    host = parts.emplace(std::pair{host, seen[host]++ / ranks}, rank).first->second;
  }
}

Hosts FindHosts(MPI_Comm comm) {
  MPI_Comm local;
  Check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, PlaceIn(comm).rank, MPI_INFO_NULL, &local),
        "MPI_Comm_split_type");
  std::vector<int> host_of = FindHosts(comm, local);
  MPI_Comm_free(&local);
  Divide(&host_of);
  return Hosts::From(host_of);
}

// The others' processes on this rank's host.
std::vector<Process> Neighbours(int rank, const Hosts& hosts,
                                const std::vector<Process>& processes) {
  std::vector<Process> neighbours;
  for (const int other : hosts.ranks[hosts.host_of[rank]]) {
    if (other == rank) continue;
    neighbours.push_back(processes[other]);
    neighbours.back().rank = other;
  }
  return neighbours;
}

// A message of at most chunk_bytes after the other, as post(at, bytes).
template <typename Post>
void ForEachChunk(int64_t bytes, int64_t chunk_bytes, Post post) {
  for (int64_t at = 0; at < bytes; at += chunk_bytes) {
    post(at, static_cast<int>(std::min(chunk_bytes, bytes - at)));
  }
}

class MpiTransfer : public Transfer {
 public:
  MpiTransfer(MPI_Comm comm, const void* send, int64_t send_bytes, int to, void* receive,
              int64_t receive_bytes, int from, int64_t piece_bytes, int tag)
      : comm_(comm) {
    ForEachChunk(receive_bytes, piece_bytes, [&](int64_t at, int bytes) {
      requests_.emplace_back(MPI_REQUEST_NULL);
      Check(MPI_Irecv(static_cast<char*>(receive) + at, bytes, MPI_BYTE, from, tag, comm,
                      &requests_.back()),
            "MPI_Irecv");
    });
    ForEachChunk(send_bytes, piece_bytes, [&](int64_t at, int bytes) {
      requests_.emplace_back(MPI_REQUEST_NULL);
      Check(MPI_Isend(static_cast<const char*>(send) + at, bytes, MPI_BYTE, to, tag, comm,
                      &requests_.back()),
            "MPI_Isend");
    });
  }

  ~MpiTransfer() override {
    if (AllNull()) return;
    // An error has come before the end. What is under way reads and writes memory that may soon be
    // somebody else's, so it has to end too: a revocation ends it.
    CommRevoke(comm_);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (kHasUlfm && !AllNull() && std::chrono::steady_clock::now() < limit) {
      for (MPI_Request& request : requests_) {
        int done = 0;
        if (request != MPI_REQUEST_NULL) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      }
    }
    for (MPI_Request& request : requests_) {
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
  }

  void AwaitPiece(int64_t piece) override {
    Check(MPI_Wait(&requests_[piece], MPI_STATUS_IGNORE), "MPI_Wait");
  }

  void Await() override {
    // One after the other: of all of them together MPI tells less when one fails.
    for (MPI_Request& request : requests_) {
      Check(MPI_Wait(&request, MPI_STATUS_IGNORE), "MPI_Wait");
    }
  }

 private:
  bool AllNull() const {
    return std::all_of(requests_.begin(), requests_.end(),
                       [](MPI_Request request) { return request == MPI_REQUEST_NULL; });
  }

  const MPI_Comm comm_;
  std::vector<MPI_Request> requests_;  // those of the pieces to receive, then those to send
};

}  // namespace

struct MpiTransport::Handle {
  explicit Handle(MPI_Comm user) {
    Check(MPI_Comm_dup(user, &comm), "MPI_Comm_dup");
    Own();
  }
  struct Made {
    MPI_Comm comm;
  };
  explicit Handle(Made made) : comm(made.comm) { Own(); }

  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<MPI_Request> notes;  // being sent
  std::vector<std::vector<char>> note_texts;

 private:
  void Own() { Check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler"); }
};

std::unique_ptr<MpiTransport> MpiTransport::Create(const void* communicator) {
  EnsureInitialized();
  const MPI_Comm user =
      communicator == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(communicator);
  if (user == MPI_COMM_NULL) {
    throw Error(ErrorKind::kInvalidArgument,
                "`comm` must be a communicator that this rank belongs to. Received: MPI_COMM_NULL");
  }
  int inter = 0;
  Check(MPI_Comm_test_inter(user, &inter), "MPI_Comm_test_inter");
  if (inter) {
    throw Error(ErrorKind::kInvalidArgument,
                "`comm` must be an intracommunicator. Received: an intercommunicator");
  }
  auto handle = std::make_unique<Handle>(user);
  const MPI_Comm comm = handle->comm;
  auto transport = std::unique_ptr<MpiTransport>(new MpiTransport(
      PlaceIn(comm).rank, FindHosts(comm), FindProcesses(comm), std::move(handle)));
  transport->ShareMemory();
  return transport;
}

std::unique_ptr<MpiTransport> MpiTransport::Duplicate() const {
  int level = MPI_THREAD_SINGLE;
  Check(MPI_Query_thread(&level), "MPI_Query_thread");
  if (level < MPI_THREAD_MULTIPLE) {
    throw Error(ErrorKind::kState,
                "a sync beside training needs an MPI that several threads may call "
                "(MPI_THREAD_MULTIPLE); this one was initialised with thread level " +
                    MpiThreadLevel());
  }
  std::unique_ptr<MpiTransport> duplicate = Create(&handle_->comm);
  if (duplicate->host_memory_ != nullptr) duplicate->host_memory_->SleepAtOnce();
  return duplicate;
}

std::unique_ptr<MpiTransport> MpiTransport::Part(int part) const {
  MPI_Comm comm = MPI_COMM_NULL;
  Check(MPI_Comm_split(handle_->comm, part < 0 ? MPI_UNDEFINED : part, rank(), &comm),
        "MPI_Comm_split");
  if (part < 0) return nullptr;
  std::unique_ptr<MpiTransport> transport = Create(&comm);
  MPI_Comm_free(&comm);
  return transport;
}

MpiTransport::MpiTransport(int rank, Hosts hosts, std::vector<Process> processes,
                           std::unique_ptr<Handle> handle)
    : Transport(rank, std::move(hosts)),
      processes_(std::move(processes)),
      handle_(std::move(handle)),
      lives_(std::make_unique<Lives>(Neighbours(rank, this->hosts(), processes_))) {}

MpiTransport::~MpiTransport() {
  if (Finalized()) return;
  for (MPI_Request& note : handle_->notes) MPI_Request_free(&note);
  MPI_Comm_free(&handle_->comm);
}

void MpiTransport::ShareMemory() {
  shares_memory_ = ShareHostMemory(*this, [this] { CheckOthers(); }, &host_memory_);
}

// Without fault tolerance there is nothing better to do than to wait for the launcher, which ends
// all of them, or for the watchdog.
void MpiTransport::CheckOthers() {
  if (!fault_tolerant()) return;
  int flag = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, kNoteTag, handle_->comm, &flag, MPI_STATUS_IGNORE);  // lets MPI work
  Check(CommIsRevoked(handle_->comm, &flag), "MPIX_Comm_is_revoked");
  if (flag != 0 || !lives_->Ended().empty()) throw Error(ErrorKind::kRankLost, "a rank has died");
}

void MpiTransport::SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                               int64_t receive_bytes, int from, Stream stream) {
  sent_bytes += send_bytes;
  MpiTransfer(handle_->comm, send, send_bytes, to, receive, receive_bytes, from, kChunkBytes,
              stream)
      .Await();
}

int64_t MpiTransport::SendReceiveUpTo(const void* send, int64_t send_bytes, int to, void* receive,
                                      int64_t capacity, int from) {
  sent_bytes += send_bytes;
  MPI_Status status;
  int count = 0;
  Check(MPI_Sendrecv(send, static_cast<int>(send_bytes), MPI_BYTE, to, kControl, receive,
                     static_cast<int>(capacity), MPI_BYTE, from, kControl, handle_->comm, &status),
        "MPI_Sendrecv");
  Check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
  return count;
}

std::unique_ptr<Transfer> MpiTransport::Start(const void* send, int64_t send_bytes, int to,
                                              void* receive, int64_t receive_bytes, int from,
                                              int64_t piece_bytes, Stream stream) {
  sent_bytes += send_bytes;
  return std::make_unique<MpiTransfer>(handle_->comm, send, send_bytes, to, receive, receive_bytes,
                                       from, piece_bytes, stream);
}

bool MpiTransport::fault_tolerant() const {
  static const bool answer = MpiIsFaultTolerant();
  return answer;
}

void MpiTransport::Revoke() {
  if (host_memory_ != nullptr) host_memory_->Revoke();
  CommRevoke(handle_->comm);
}

Transport::Vote MpiTransport::AskLiving(uint32_t flags) {
  int all = static_cast<int>(flags);
  const int code = CommAgree(handle_->comm, &all);
  return {static_cast<uint32_t>(all), code == MPI_SUCCESS};
}

std::unique_ptr<Transport> MpiTransport::Shrink(std::vector<int>* lost) {
  MPI_Comm current = handle_->comm;
  while (true) {
    MPI_Comm living = MPI_COMM_NULL;
    Check(CommShrink(current, &living), "MPIX_Comm_shrink");
    auto handle = std::make_unique<Handle>(Handle::Made{living});
    // Where the living are now: nothing is asked of them that another death could keep from coming.
    MPI_Group before, after;
    MPI_Comm_group(handle_->comm, &before);
    MPI_Comm_group(living, &after);
    const Place place = PlaceIn(living);
    std::vector<int> now(place.size), then(place.size);
    for (int r = 0; r < place.size; ++r) now[r] = r;
    MPI_Group_translate_ranks(after, place.size, now.data(), before, then.data());
    MPI_Group_free(&before);
    MPI_Group_free(&after);
    std::vector<int> host_of;
    std::vector<Process> processes;
    for (const int rank : then) {
      host_of.push_back(hosts().host_of[rank]);
      processes.push_back(processes_[rank]);
    }
    auto transport = std::unique_ptr<MpiTransport>(new MpiTransport(
        place.rank, Hosts::From(host_of), std::move(processes), std::move(handle)));
    bool done = true;
    try {
      transport->ShareMemory();
    } catch (const Error&) {
      transport->Revoke();
      done = false;
    }
    const Vote vote = transport->AskLiving(done ? 1 : 0);
    if (vote.all_live && vote.flags != 0) {
      lost->clear();
      for (int rank = 0; rank < size(); ++rank) {
        if (std::find(then.begin(), then.end(), rank) == then.end()) lost->push_back(rank);
      }
      return transport;
    }
    // Another one has died meanwhile.
    current = living;
    static_cast<void>(transport.release());  // messages may still come in
  }
}

std::vector<int> MpiTransport::KnownToMpi() const {
  MPI_Group failed = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
  if (!fault_tolerant() || CommFailed(handle_->comm, &failed) != MPI_SUCCESS) return {};
  int count = 0;
  MPI_Group_size(failed, &count);
  std::vector<int> places(count), ranks(count);
  std::iota(places.begin(), places.end(), 0);
  MPI_Comm_group(handle_->comm, &all);
  MPI_Group_translate_ranks(failed, count, places.data(), all, ranks.data());
  MPI_Group_free(&all);
  MPI_Group_free(&failed);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::vector<int> MpiTransport::KnownLost() {
  std::vector<int> lost;
  const std::vector<int> ended = lives_->Ended(), known = KnownToMpi();
  std::set_union(ended.begin(), ended.end(), known.begin(), known.end(), std::back_inserter(lost));
  return lost;
}

std::vector<int> MpiTransport::LostUnnoticed() {
  std::vector<int> unnoticed;
  const std::vector<int> ended = lives_->Ended();
  if (ended.empty()) return {};
  const std::vector<int> known = KnownToMpi();
  std::set_difference(ended.begin(), ended.end(), known.begin(), known.end(),
                      std::back_inserter(unnoticed));
  return unnoticed;
}

void MpiTransport::SendNote(const void* note, int64_t bytes, int to) {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) return;
  for (size_t i = 0; i < handle_->notes.size();) {
    int done = 0;
    MPI_Test(&handle_->notes[i], &done, MPI_STATUS_IGNORE);
    if (!done) {
      ++i;
      continue;
    }
    handle_->notes.erase(handle_->notes.begin() + static_cast<int64_t>(i));
    handle_->note_texts.erase(handle_->note_texts.begin() + static_cast<int64_t>(i));
  }
  const char* text = static_cast<const char*>(note);
  handle_->note_texts.emplace_back(text, text + bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Isend(handle_->note_texts.back().data(), static_cast<int>(bytes), MPI_BYTE, to, kNoteTag,
            handle_->comm, &request);
  if (request == MPI_REQUEST_NULL) {
    handle_->note_texts.pop_back();
  } else {
    handle_->notes.push_back(request);
  }
}

bool MpiTransport::TakeNote(void* note, int64_t bytes) {
  int level = MPI_THREAD_SINGLE, there = 0;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) return false;
  MPI_Status status;
  if (MPI_Iprobe(MPI_ANY_SOURCE, kNoteTag, handle_->comm, &there, &status) != MPI_SUCCESS) {
    return false;
  }
  return there != 0 && MPI_Recv(note, static_cast<int>(bytes), MPI_BYTE, status.MPI_SOURCE,
                                kNoteTag, handle_->comm, MPI_STATUS_IGNORE) == MPI_SUCCESS;
}

bool MpiTransport::reads_device(const std::string& kind) const {
  return kind == "CUDA" && MpiReadsCuda();
}

bool MpiReadsCuda() {
#if !defined(OMPI_MAJOR_VERSION)
  // MPICH ends the process where it is asked before.
  if (!Initialized() || Finalized()) return false;
#endif
  return MPIX_Query_cuda_support != nullptr && MPIX_Query_cuda_support() == 1;
}

bool MpiIsFaultTolerant() {
  if (!kHasUlfm || !Initialized() || Finalized()) return false;
  void* value = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, kFaultToleranceKey, &value, &found);
  return found != 0 && *static_cast<int*>(value) != 0;
}

int MpiJobSize() {
  if (!Initialized() || Finalized()) return 1;
  return PlaceIn(MPI_COMM_WORLD).size;
}

void AbortMpi(int exit_code) {
  // Which waits for hosts that cannot be reached, and with ULFM now and then for itself.
  EndLauncherIfItStays();
  if (Initialized() && !Finalized()) MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

void FinalizeMpi() {
  if (finalize_is_ours && !Finalized() && !MpiIsFaultTolerant()) MPI_Finalize();
}

void BeforeMpiEnds(void (*action)()) {
  static void (*to_do)() = nullptr;
  to_do = action;
  // What MPI_COMM_SELF holds is deleted before anything else is done.
  const auto when_deleted = [](MPI_Comm, int, void*, void*) {
    ending = true;
    to_do();
    return int{MPI_SUCCESS};
  };
  int key = MPI_KEYVAL_INVALID;
  Check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, when_deleted, &key, nullptr),
        "MPI_Comm_create_keyval");
  Check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
}

std::string MpiBuiltFor() {
#if defined(OMPI_MAJOR_VERSION)
  return "Open MPI";
#elif defined(I_MPI_VERSION)
  return "Intel MPI";
#elif defined(MPICH_VERSION)
  return "MPICH";
#else
  return "MPI";
#endif
}

std::string MpiRunning() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text);
  return all.substr(0, all.find_first_of("\n\r"));
}

std::string MpiThreadLevel() {
  if (!Initialized() || Finalized()) return "none";
  int level = 0;
  MPI_Query_thread(&level);
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "SINGLE";
    case MPI_THREAD_FUNNELED:
      return "FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "SERIALIZED";
    default:
      return "MULTIPLE";
  }
}

}  // namespace adasum
