#include "c_api.h"

#include <pthread.h>

#include <algorithm>
#include <cfenv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerator.h"
#include "arguments.h"
#include "communicator.h"
#include "devices.h"
#include "error.h"
#include "faults.h"
#include "flights.h"
#include "nccl.h"
#include "start_watch.h"
#include "transport_mpi.h"
#include "transport_threads.h"
#include "watchdog.h"

namespace {

using adasum::CheckMemory;
using adasum::Communicator;
using adasum::DataOf;
using adasum::Device;
using adasum::DeviceCopies;
using adasum::DeviceOf;
using adasum::Error;
using adasum::ErrorKind;
using adasum::Flights;
using adasum::Given;
using adasum::MpiTransport;
using adasum::OptionsOf;
using adasum::Patience;
using adasum::ReduceOptions;
using adasum::SpecsOf;
using adasum::StartWatch;
using adasum::TensorSpec;
using adasum::TextOf;
using adasum::Transport;
using adasum::Watchdog;
using adasum::WireOf;

thread_local std::string last_error;

// The process's place among the ranks, between adasum_init and adasum_shutdown. The communicator
// owns the transport.
std::shared_ptr<Communicator> world;
// One that adasum_shutdown could not leave.
std::shared_ptr<Communicator> not_left;
// Syncs beside training, from the first one on.
std::shared_ptr<Flights> world_flights;
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
  world = not_left = nullptr;
  world_flights = nullptr;
}

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

template <typename Body>
int Guard(Body body) {
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

}  // namespace

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
    {
      std::lock_guard<std::mutex> lock(world_mutex);
      flights = std::move(world_flights);
      world_flights = nullptr;
      leaving = std::move(world);
      world = nullptr;
    }
    if (leaving == nullptr) return;
    try {
      leaving->Leave();
    } catch (...) {
      // Its end would wait for ranks that may not come.
      static_cast<void>(new std::shared_ptr<Flights>(std::move(flights)));
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

int adasum_sync(const AdasumSyncTensors* t, const AdasumSyncOptions* o, AdasumSyncResult* result,
                double* orthogonality) {
  return Guard([&] {
    const std::shared_ptr<Communicator> all = World();
    Given(t, "tensors");
    Given(o, "options");
    Given(result, "result");
    const adasum::SyncOptions options{
        OptionsOf(o->reduce, *all->transport(), DeviceOf(o->reduce.device)),
        o->pending != 0,
        o->flush != 0,
        o->raise_nonfinite != 0,
        o->skips_in_a_row,
        WireOf(*o, t->values, t->count)};
    const std::vector<TensorSpec> specs = SpecsOf(t->values, t->count, "tensor");
    const std::vector<TensorSpec> states = SpecsOf(t->states, t->state_count, "averaged state");
    CheckMemory(specs, t->starts, "starts");
    CheckMemory(specs, t->new_values, "new_values");
    CheckMemory(states, t->new_states, "new_states");
    const bool is_flight = o->flight >= 0;
    if (is_flight && !options.reduce.device->is_host()) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a sync beside training takes tensors in the host's memory only");
    }
    if (options.wire.is_narrow() && !options.reduce.device->is_host()) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`wire_dtype` is for tensors in the host's memory, not yet for those on a GPU");
    }
    if (is_flight && options.wire.is_narrow()) {
      throw Error(ErrorKind::kInvalidArgument, "a sync beside training has no `wire_dtype`");
    }
    if (is_flight && !states.empty()) {
      throw Error(ErrorKind::kInvalidArgument, "a sync beside training takes no states");
    }
    if (t->new_starts != nullptr || is_flight || options.flush) {
      CheckMemory(specs, t->new_starts, "new_starts");
    }
    const std::vector<const void*> values = DataOf(t->values, t->count);
    const std::vector<const void*> state_data = DataOf(t->states, t->state_count);
    const adasum::SyncTensors tensors{
        specs,         values.data(), t->starts,         t->new_values,
        t->new_starts, states,        state_data.data(), t->new_states};
    const std::string name = TextOf(o->reduce.name);
    const adasum::SyncResult done = is_flight
                                        ? WorldFlights()->Sync(o->flight, tensors, options, name)
                                        : all->Sync(tensors, options, name);
    *result = {done.syncs, done.skipped, done.report.identical(), done.scale.exponent,
               done.scale.good};
    if (orthogonality == nullptr) return;
    const std::vector<double>& known = done.report.orthogonality;
    for (int64_t i = 0; i < t->count; ++i) {
      orthogonality[i] = known.empty() ? std::numeric_limits<double>::quiet_NaN() : known[i];
    }
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

int adasum_simulate(int ranks, const int32_t* host_of, const AdasumTensor* inputs,
                    void* const* outputs, const int64_t* counts,
                    const AdasumReduceOptions* options) {
  return Guard([&] {
    // What ranks exchange messages through takes memory that grows with their square.
    constexpr int kMostRanks = 1024;
    if (ranks < 1 || ranks > kMostRanks) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a simulation needs at least one rank, and at most " +
                      std::to_string(kMostRanks) + ". Received: " + std::to_string(ranks));
    }
    const AdasumReduceOptions& given = Given(options, "options");
    Given(counts, "counts");
    std::vector<std::vector<TensorSpec>> specs;
    std::vector<int64_t> first_tensors;
    int64_t tensors = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      first_tensors.push_back(tensors);
      specs.push_back(SpecsOf(inputs + tensors, counts[rank], "tensor"));
      if (counts[rank] > 0)
        CheckMemory(specs[rank], &Given(outputs, "outputs") + tensors, "outputs");
      tensors += counts[rank];
    }
    std::vector<int> hosts(ranks, 0);
    if (host_of != nullptr) std::copy_n(host_of, ranks, hosts.begin());
    const bool on_device = given.device != nullptr && given.device->memory != ADASUM_HOST;
    if (on_device && given.device->memory != ADASUM_EMULATED) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a simulation's tensors are in the host's memory, or the emulated device's");
    }
    adasum::ThreadWorld threads_world(hosts, adasum::SharedMemoryIsWanted(), on_device);
    std::mutex error_mutex;
    std::exception_ptr first_error;
    const auto fail = [&](bool abort) {
      {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (first_error == nullptr) first_error = std::current_exception();
      }
      if (abort) threads_world.Abort();
    };
    const auto run = [&](int rank) {
      try {
        const int64_t first = first_tensors[rank];
        const std::vector<const void*> data = DataOf(inputs + first, counts[rank]);
        // Each rank has a device of its own, which lives as long as what is there.
        std::unique_ptr<Device> device;
        if (on_device) device = adasum::MakeDevice(*given.device);
        Communicator communicator(threads_world.Join(rank));
        Device& where = device == nullptr ? adasum::HostDevice() : *device;
        const ReduceOptions reduce = OptionsOf(given, *communicator.transport(), where);
        if (!on_device) {
          communicator.Allreduce(specs[rank], data.data(), outputs + first, reduce,
                                 TextOf(given.name));
          return;
        }
        adasum::OnDevice tensors(where, specs[rank], data);
        communicator.Allreduce(specs[rank], tensors.data(), tensors.memory(), reduce,
                               TextOf(given.name));
        tensors.CopyOut(outputs + first);
      } catch (const Error& error) {
        // A disagreement comes to every rank by itself, after messages that an abort would cut off.
        fail(error.kind() != ErrorKind::kDisagreement);
      } catch (...) {
        fail(true);
      }
    };
    std::vector<std::thread> threads;
    try {
      for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
    } catch (const std::system_error&) {
      fail(true);
    }
    for (std::thread& thread : threads) thread.join();
    if (first_error != nullptr) std::rethrow_exception(first_error);
  });
}

int adasum_device_allocate(const AdasumDevice* device, int64_t bytes, void** memory) {
  return Guard([&] {
    if (bytes < 0) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`bytes` must not be negative. Received: " + std::to_string(bytes));
    }
    Given(memory, "memory") = DeviceOf(device).Allocate(bytes);
  });
}

int adasum_device_free(const AdasumDevice* device, void* memory) {
  return Guard([&] { DeviceOf(device).Free(&Given(static_cast<char*>(memory), "memory")); });
}

int adasum_device_copy(const AdasumDevice* device, void* to, const void* from, int64_t bytes,
                       int32_t to_device) {
  return Guard([&] {
    if (bytes < 0) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`bytes` must not be negative. Received: " + std::to_string(bytes));
    }
    if (bytes == 0) return;
    Device& on = DeviceOf(device);
    char* into = &Given(static_cast<char*>(to), "to");
    const char* out_of = &Given(static_cast<const char*>(from), "from");
    to_device != 0 ? on.CopyIn(into, out_of, bytes) : on.CopyOut(into, out_of, bytes);
  });
}

int64_t adasum_sent_bytes(void) { return adasum::Transport::sent_bytes; }

int64_t adasum_device_copied_bytes(void) { return adasum::Accelerator::copied_bytes; }

int adasum_has_cuda(void) { return adasum::HasCuda() ? 1 : 0; }

int adasum_cuda_devices(void) { return adasum::CudaDevices(); }

const char* adasum_nccl_problem(void) {
  thread_local std::string problem;
  problem.clear();
  adasum::nccl::Load(&problem);
  return problem.c_str();
}

int adasum_mpi_reads_cuda(void) { return adasum::MpiReadsCuda() ? 1 : 0; }
