#include "transport_mpi.h"

#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "error.h"
#include "host_memory_mmap.h"

namespace adasum {

namespace {

// MPI counts are int. One chunk stays well below 2^31 bytes, so a message of any size is a list of
// chunks.
constexpr int64_t kChunkBytes = int64_t{1} << 30;

bool finalize_is_ours = false;

void Check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
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
  if (Finalized()) {
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

// Each rank's host, as the number of the host's first rank.
std::vector<int> FindHosts(MPI_Comm comm, MPI_Comm local) {
  const Place world = PlaceIn(comm);
  int first = world.rank;
  Check(MPI_Bcast(&first, 1, MPI_INT, 0, local), "MPI_Bcast");
  std::vector<int> host_of(world.size);
  Check(MPI_Allgather(&first, 1, MPI_INT, host_of.data(), 1, MPI_INT, comm), "MPI_Allgather");
  return host_of;
}

struct Found {
  Topology topology;
  Hosts hosts;
};

Found FindTopology(MPI_Comm comm) {
  MPI_Comm local, cross;
  const Place world = PlaceIn(comm);
  Check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, world.rank, MPI_INFO_NULL, &local),
        "MPI_Comm_split_type");
  const Place in_host = PlaceIn(local);
  Check(MPI_Comm_split(comm, in_host.rank, world.rank, &cross), "MPI_Comm_split");
  const Place across = PlaceIn(cross);
  const std::vector<int> host_of = FindHosts(comm, local);
  MPI_Comm_free(&local);
  MPI_Comm_free(&cross);
  return {{world.rank, world.size, in_host.rank, in_host.size, across.rank, across.size},
          Hosts::From(host_of)};
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
              int64_t receive_bytes, int from, int64_t piece_bytes, int tag) {
    ForEachChunk(receive_bytes, piece_bytes, [&](int64_t at, int bytes) {
      requests_.emplace_back();
      Check(MPI_Irecv(static_cast<char*>(receive) + at, bytes, MPI_BYTE, from, tag, comm,
                      &requests_.back()),
            "MPI_Irecv");
    });
    ForEachChunk(send_bytes, piece_bytes, [&](int64_t at, int bytes) {
      requests_.emplace_back();
      Check(MPI_Isend(static_cast<const char*>(send) + at, bytes, MPI_BYTE, to, tag, comm,
                      &requests_.back()),
            "MPI_Isend");
    });
  }

  // After an error the messages cannot be waited for. Their memory is the communicator's, which
  // outlives them.
  ~MpiTransfer() override {
    for (MPI_Request& request : requests_) {
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
  }

  void AwaitPiece(int64_t piece) override {
    Check(MPI_Wait(&requests_[piece], MPI_STATUS_IGNORE), "MPI_Wait");
  }

  void Await() override {
    Check(MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE),
          "MPI_Waitall");
  }

 private:
  std::vector<MPI_Request> requests_;  // those of the pieces to receive, then those to send
};

}  // namespace

struct MpiTransport::Handle {
  MPI_Comm comm = MPI_COMM_NULL;
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
  auto handle = std::make_unique<Handle>();
  Check(MPI_Comm_dup(user, &handle->comm), "MPI_Comm_dup");
  Check(MPI_Comm_set_errhandler(handle->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  Found found = FindTopology(handle->comm);
  auto transport = std::unique_ptr<MpiTransport>(
      new MpiTransport(found.topology, std::move(found.hosts), std::move(handle)));
  transport->shares_memory_ = ShareHostMemory(*transport, &transport->host_memory_);
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

MpiTransport::MpiTransport(const Topology& topology, Hosts hosts, std::unique_ptr<Handle> handle)
    : Transport(topology.rank, std::move(hosts)), topology_(topology), handle_(std::move(handle)) {}

MpiTransport::~MpiTransport() {
  if (!Finalized()) MPI_Comm_free(&handle_->comm);
}

void MpiTransport::SendReceive(const void* send, int64_t send_bytes, int to, void* receive,
                               int64_t receive_bytes, int from, Stream stream) {
  MpiTransfer(handle_->comm, send, send_bytes, to, receive, receive_bytes, from, kChunkBytes,
              stream)
      .Await();
}

int64_t MpiTransport::SendReceiveUpTo(const void* send, int64_t send_bytes, int to, void* receive,
                                      int64_t capacity, int from) {
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
  return std::make_unique<MpiTransfer>(handle_->comm, send, send_bytes, to, receive, receive_bytes,
                                       from, piece_bytes, stream);
}

int MpiJobSize() {
  if (!Initialized() || Finalized()) return 1;
  return PlaceIn(MPI_COMM_WORLD).size;
}

void AbortMpi(int exit_code) {
  if (Initialized() && !Finalized()) MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

void FinalizeMpi() {
  if (finalize_is_ours && !Finalized()) MPI_Finalize();
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
