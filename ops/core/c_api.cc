#include "c_api.h"

#include <pthread.h>

#include <algorithm>
#include <cfenv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "communicator.h"
#include "devices.h"
#include "error.h"
#include "faults.h"
#include "flights.h"
#include "partition.h"
#include "process.h"
#include "start_watch.h"
#include "transport_mpi.h"
#include "watchdog.h"

namespace {

using adasum::CheckMemory;
using adasum::Communicator;
using adasum::DataOf;
using adasum::DeviceCopies;
using adasum::DeviceOf;
using adasum::Error;
using adasum::ErrorKind;
using adasum::Flights;
using adasum::Given;
using adasum::Guard;
using adasum::MpiTransport;
using adasum::OptionsOf;
using adasum::Partition;
using adasum::PartitionPlace;
using adasum::Patience;
using adasum::ResultOf;
using adasum::SpecsOf;
using adasum::StartWatch;
using adasum::SyncArguments;
using adasum::TellOrthogonality;
using adasum::TensorSpec;
using adasum::TextOf;
using adasum::Transport;
using adasum::Watchdog;
using adasum::World;

thread_local std::string last_error;

// The process's place among the ranks, between adasum_init and adasum_shutdown. The communicator
// owns the transport.
std::shared_ptr<Communicator> world;
// One that adasum_shutdown could not leave.
std::shared_ptr<Communicator> not_left;
// Syncs beside training, from the first one on.
std::shared_ptr<Flights> world_flights;
// Of an optimizer whose state is divided among a host's ranks, from the first one on.
std::shared_ptr<Partition> world_partition;
std::mutex world_mutex;
// Held until a rank has left: whoever finalizes MPI in another thread has to wait for that.
std::mutex leaving_mutex;

// In a forked child: where its parent is, if that is a rank.
std::optional<adasum::Topology> parents;

adasum::Topology TopologyOf(const Communicator& communicator) {
  const std::shared_ptr<Transport> transport = communicator.transport();
  return adasum::Topology::Of(transport->rank(), transport->hosts());
}

// A forked child, such as one that reads data, is no rank, and has no watchdog's thread that could
// be waited for. What it has of the parent's it leaves as it is, but for the topology.
std::optional<adasum::Topology> before_fork;

void PrepareFork() {
  // MPI may fork while it is initialised.
  const std::unique_lock<std::mutex> lock(world_mutex, std::try_to_lock);
  before_fork.reset();
  if (lock.owns_lock() && world != nullptr) before_fork = TopologyOf(*world);
}

void LeaveToParent() {
  parents = before_fork;
  static_cast<void>(new std::shared_ptr<Communicator>(std::move(world)));
  static_cast<void>(new std::shared_ptr<Communicator>(std::move(not_left)));
  static_cast<void>(new std::shared_ptr<Flights>(std::move(world_flights)));
  static_cast<void>(new std::shared_ptr<Partition>(std::move(world_partition)));
  world = not_left = nullptr;
  world_flights = nullptr;
  world_partition = nullptr;
}

// Also where the ranks could not leave together: then this one ends.
std::shared_ptr<Communicator> WorldOrLeft() {
  std::lock_guard<std::mutex> lock(world_mutex);
  return world != nullptr ? world : not_left;
}

// Horovod and mpi4py finalize MPI where they have initialised it, and may do so before this process
// exits. From then on the watchdog could not call it.
void LeaveBeforeMpiEnds() {
  if (adasum_shutdown() == ADASUM_OK) return;
  std::fprintf(stderr, "tf_adasum: MPI is finalized on this rank, but %s\n", last_error.c_str());
  std::fflush(stderr);
  adasum::AbortMpi(EXIT_FAILURE);
}

bool IsOfAllRanks(const Communicator& communicator) {
  const int size = communicator.shrinkings() > 0 ? communicator.shrinking(0).old_size
                                                 : communicator.transport()->size();
  return size == adasum::MpiJobSize();
}

std::shared_ptr<Flights> WorldFlights() {
  // Not under world_mutex, since it waits for the other ranks: a thread that ends this process
  // after an error has to get at the rest meanwhile.
  static std::mutex creating_mutex;
  std::lock_guard<std::mutex> creating(creating_mutex);
  const std::shared_ptr<Communicator> communicator = World();
  {
    std::lock_guard<std::mutex> lock(world_mutex);
    if (world_flights != nullptr) return world_flights;
  }
  // Ranks that do something else instead get to know, before they are waited for in MPI.
  communicator->Barrier("first sync beside training");
  auto made = std::make_shared<Flights>(std::make_unique<Communicator>(
      static_cast<MpiTransport&>(*communicator->transport()).Duplicate(), communicator->watchdog(),
      Watchdog::kBeside));
  std::lock_guard<std::mutex> lock(world_mutex);
  world_flights = made;
  return made;
}

std::unique_ptr<Communicator> CommunicatorOf(std::shared_ptr<Transport> transport) {
  if (transport == nullptr) return nullptr;
  // Watched by itself: its ranks make calls of which the others know nothing.
  auto watchdog = std::make_shared<Watchdog>(transport, Patience::OfEnvironment(),
                                             [] { adasum::AbortMpi(EXIT_FAILURE); });
  return std::make_unique<Communicator>(std::move(transport), std::move(watchdog));
}

// Denormal numbers are kept, and results rounded to the nearest, while it lives. TensorFlow's
// threads take denormal numbers for zero, and which thread an op runs on differs from rank to rank.
// A new thread begins as the one that made it.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&callers_); }

 private:
  std::fenv_t callers_;
};

}  // namespace

namespace adasum {

std::shared_ptr<Communicator> World() {
  std::lock_guard<std::mutex> lock(world_mutex);
  if (parents) {
    throw Error(ErrorKind::kState,
                "a process that a rank has forked is no rank itself, and cannot call a collective");
  }
  if (world == nullptr) {
    throw Error(ErrorKind::kState, "tf_adasum is not initialized: call tf_adasum.init() first");
  }
  return world;
}

std::shared_ptr<Partition> WorldPartition() {
  // As for the flights.
  static std::mutex creating_mutex;
  std::lock_guard<std::mutex> creating(creating_mutex);
  const std::shared_ptr<Communicator> communicator = World();
  {
    std::lock_guard<std::mutex> lock(world_mutex);
    if (world_partition != nullptr) return world_partition;
  }
  communicator->Barrier("first use of `partition_state`");
  const auto& all = static_cast<MpiTransport&>(*communicator->transport());
  const PartitionPlace place = PartitionPlace::Of(all.rank(), all.hosts());
  auto host = CommunicatorOf(all.Part(all.hosts().host_of[all.rank()]));
  auto lane = CommunicatorOf(all.Part(place.lane < place.lanes ? place.lane : -1));
  const bool all_lanes = place.lanes * static_cast<int>(all.hosts().ranks.size()) == all.size();
  auto made = std::make_shared<Partition>(std::move(host), std::move(lane), all_lanes,
                                          MpiThreadLevel() == "MULTIPLE");
  std::lock_guard<std::mutex> lock(world_mutex);
  world_partition = made;
  return made;
}

int Guard(const std::function<void()>& body) {
  const DefaultArithmetic arithmetic;
  try {
    body();
    return ADASUM_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return static_cast<int>(error.kind());
  } catch (const std::bad_alloc&) {
    last_error = "out of memory for the fusion buffer or for the result";
    return ADASUM_INTERNAL;
  } catch (const std::exception& error) {
    last_error = error.what();
    return ADASUM_INTERNAL;
  }
}

}  // namespace adasum

int adasum_init(const void* comm) {
  return Guard([&] {
    std::lock_guard<std::mutex> lock(world_mutex);
    if (world != nullptr) {
      throw Error(ErrorKind::kState, "tf_adasum is already initialized: call shutdown() first");
    }
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(PrepareFork, nullptr, LeaveToParent); });
    const Patience patience = Patience::OfEnvironment();
    const StartWatch watch(patience.warning);
    std::shared_ptr<Transport> transport = MpiTransport::Create(comm);
    static std::once_flag after_mpi_begins;
    std::call_once(after_mpi_begins, [] { adasum::BeforeMpiEnds(LeaveBeforeMpiEnds); });
    const auto end_job = [] { adasum::AbortMpi(EXIT_FAILURE); };
    not_left = nullptr;
    world = std::make_shared<Communicator>(
        transport, std::make_shared<Watchdog>(transport, patience, end_job));
  });
}

int adasum_shutdown(void) {
  return Guard([&] {
    const std::lock_guard<std::mutex> until_left(leaving_mutex);
    std::shared_ptr<Communicator> leaving;
    std::shared_ptr<Flights> flights;
    std::shared_ptr<Partition> partition;
    {
      std::lock_guard<std::mutex> lock(world_mutex);
      flights = std::move(world_flights);
      world_flights = nullptr;
      partition = std::move(world_partition);
      world_partition = nullptr;
      leaving = std::move(world);
      world = nullptr;
    }
    if (leaving == nullptr) return;
    try {
      leaving->Leave();
    } catch (...) {
      // Its end would wait for ranks that may not come.
      static_cast<void>(new std::shared_ptr<Flights>(std::move(flights)));
      static_cast<void>(new std::shared_ptr<Partition>(std::move(partition)));
      std::lock_guard<std::mutex> lock(world_mutex);
      not_left = leaving;
      throw;
    }
  });
}

void adasum_finalize(void) {
  Guard([] {
    // A rank that has left no longer answers, and is watched by nobody.
    adasum::WithinSeconds(Patience::OfEnvironment().abort, "the end of MPI", adasum::FinalizeMpi);
  });
}

int adasum_is_initialized(void) {
  std::lock_guard<std::mutex> lock(world_mutex);
  return world != nullptr || parents.has_value();
}

int adasum_topology(AdasumTopology* topology) {
  return Guard([&] {
    const adasum::Topology t = parents ? *parents : TopologyOf(*World());
    Given(topology, "topology") = {t.rank,       t.size,       t.local_rank,
                                   t.local_size, t.cross_rank, t.cross_size};
  });
}

int adasum_go_on_without_the_dead(void) {
  return Guard([] { World()->GoOnWithoutTheDead(); });
}

int adasum_is_fault_tolerant(void) { return adasum::MpiIsFaultTolerant() ? 1 : 0; }

int64_t adasum_shrinkings(void) {
  std::lock_guard<std::mutex> lock(world_mutex);
  return world == nullptr ? 0 : world->shrinkings();
}

int adasum_shrinking(int64_t index, AdasumShrinking* shrinking, int32_t* lost, int32_t max_lost) {
  return Guard([&] {
    const std::shared_ptr<Communicator> all = World();
    if (index < 0 || index >= all->shrinkings()) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`index` must be one of " + std::to_string(all->shrinkings()) +
                      " shrinkings. Received: " + std::to_string(index));
    }
    const adasum::Shrinking found = all->shrinking(index);
    if (max_lost > 0) Given(lost, "lost");
    Given(shrinking, "shrinking") = {found.old_rank, found.old_size, found.new_rank, found.new_size,
                                     static_cast<int32_t>(found.lost.size())};
    for (int32_t i = 0; i < std::min(max_lost, shrinking->lost_count); ++i) lost[i] = found.lost[i];
  });
}

void adasum_set_fault_hook(void (*hook)(const char* place)) { adasum::fault_hook = hook; }

int adasum_job_size(void) { return adasum::MpiJobSize(); }

void adasum_is_ending(void) {
  const std::shared_ptr<Communicator> communicator = WorldOrLeft();
  if (communicator != nullptr) communicator->watchdog()->IsEnding();
}

void adasum_abort(int exit_code) {
  const std::shared_ptr<Communicator> communicator = WorldOrLeft();
  // With ULFM a status tells that the job failed, and an abort by the last rank that lives does
  // not; where all ranks abort at a time, the launcher may wait for itself.
  if (communicator != nullptr && adasum::MpiIsFaultTolerant() && IsOfAllRanks(*communicator) &&
      !communicator->watchdog()->OthersGoOn()) {
    std::_Exit(exit_code);
  }
  adasum::AbortMpi(exit_code);
}

void adasum_die_alone(void) {
  const std::shared_ptr<Communicator> communicator = WorldOrLeft();
  if (communicator != nullptr && communicator->watchdog()->OthersGoOn()) std::raise(SIGKILL);
  std::_Exit(EXIT_FAILURE);
}

const char* adasum_last_error(void) { return last_error.c_str(); }

const char* adasum_mpi_built_for(void) {
  static const std::string text = adasum::MpiBuiltFor();
  return text.c_str();
}

const char* adasum_mpi_running(void) {
  static const std::string text = adasum::MpiRunning();
  return text.c_str();
}

const char* adasum_mpi_thread_level(void) {
  thread_local std::string text;
  text = adasum::MpiThreadLevel();
  return text.c_str();
}

int adasum_shares_memory(void) {
  std::lock_guard<std::mutex> lock(world_mutex);
  return world == nullptr ? -1 : world->transport()->shares_memory();
}

const char* adasum_simd(void) { return adasum::CpuSimd(); }

int adasum_allreduce(const AdasumTensor* inputs, void* const* outputs, int64_t count,
                     const AdasumReduceOptions* options) {
  return Guard([&] {
    const std::shared_ptr<Communicator> all = World();
    const AdasumReduceOptions& given = Given(options, "options");
    const std::vector<TensorSpec> specs = SpecsOf(inputs, count, "tensor");
    CheckMemory(specs, outputs, "outputs");
    all->Allreduce(specs, DataOf(inputs, count).data(), outputs,
                   OptionsOf(given, *all->transport(), DeviceOf(given.device)), TextOf(given.name));
  });
}

int adasum_sync(const AdasumSyncTensors* tensors, const AdasumSyncOptions* options,
                AdasumSyncResult* result, double* orthogonality) {
  return Guard([&] {
    const std::shared_ptr<Communicator> all = World();
    Given(result, "result");
    const SyncArguments given(tensors, options, *all->transport());
    const adasum::SyncResult done =
        given.is_flight()
            ? WorldFlights()->Sync(options->flight, given.tensors, given.options, given.name)
            : all->Sync(given.tensors, given.options, given.name);
    *result = ResultOf(done);
    TellOrthogonality(done.report, tensors->count, orthogonality);
  });
}

int adasum_broadcast(const AdasumTensor* tensors, void* const* outputs, int64_t count, int root,
                     const char* name, int* changed, const AdasumDevice* device) {
  return Guard([&] {
    const std::shared_ptr<Communicator> all = World();
    const std::vector<TensorSpec> specs = SpecsOf(tensors, count, "tensor");
    CheckMemory(specs, outputs, "outputs");
    DeviceCopies copies(DeviceOf(device), specs);
    const std::vector<const void*> inputs = copies.Fetch(DataOf(tensors, count));
    const bool differed =
        all->Broadcast(specs, inputs.data(), copies.OutputsFor(outputs), root, TextOf(name));
    copies.Return(outputs);
    if (changed != nullptr) *changed = differed ? 1 : 0;
  });
}

int adasum_allgather(const AdasumTensor* input, AdasumAllocate allocate, void* context,
                     const char* name, const AdasumDevice* device) {
  return Guard([&] {
    const std::shared_ptr<Communicator> all = World();
    const TensorSpec spec = SpecsOf(input, 1, "tensor")[0];
    Given(allocate, "allocate");
    DeviceCopies copies(DeviceOf(device), {spec});
    const std::vector<const void*> inputs = copies.Fetch({input->data});
    void* to = nullptr;
    all->Allgather(
        spec, inputs[0],
        [&](int64_t rows) {
          to = allocate(rows, context);
          return copies.GatheredFor(to, rows);
        },
        TextOf(name));
    copies.ReturnGathered(to);
  });
}

int adasum_barrier(const char* name) {
  return Guard([&] { World()->Barrier(TextOf(name)); });
}
