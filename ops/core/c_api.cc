#include "c_api.h"

#include <pthread.h>

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "communicator.h"
#include "error.h"
#include "faults.h"
#include "flights.h"
#include "start_watch.h"
#include "transport_mpi.h"
#include "transport_threads.h"
#include "watchdog.h"

namespace {

using adasum::Algorithm;
using adasum::Communicator;
using adasum::DType;
using adasum::Error;
using adasum::ErrorKind;
using adasum::Flights;
using adasum::MpiTransport;
using adasum::Op;
using adasum::Patience;
using adasum::ReduceOptions;
using adasum::StartWatch;
using adasum::TensorSpec;
using adasum::Transport;
using adasum::Watchdog;

thread_local std::string last_error;

// The process's place among the ranks, between adasum_init and adasum_shutdown. The communicator
// owns the transport.
std::shared_ptr<Communicator> world;
// Syncs beside training, from the first one on.
std::shared_ptr<Flights> world_flights;
std::mutex world_mutex;

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
  static_cast<void>(new std::shared_ptr<Flights>(std::move(world_flights)));
  world = nullptr;
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

Op ToOp(int op) {
  if (op < ADASUM_OP_ADASUM || op > ADASUM_OP_AVERAGE) {
    throw Error(ErrorKind::kInvalidArgument,
                "`op` must be 0 (Adasum), 1 (Sum) or 2 (Average). Received: " + std::to_string(op));
  }
  return static_cast<Op>(op);
}

ReduceOptions ToOptions(const AdasumReduceOptions& given, const Transport& transport) {
  if (given.algorithm < ADASUM_RVH || given.algorithm > ADASUM_HIERARCHICAL_SUM) {
    throw Error(ErrorKind::kInvalidArgument,
                "`algorithm` must be 0 (rvh), 1 (ring), 2 (hierarchical) or 3 (hierarchical_sum). "
                "Received: " +
                    std::to_string(given.algorithm));
  }
  if (given.fusion_threshold < -1) {
    throw Error(ErrorKind::kInvalidArgument,
                "`fusion_threshold` must be a number of bytes, or -1 for the default. Received: " +
                    std::to_string(given.fusion_threshold));
  }
  int64_t threshold = given.fusion_threshold;
  if (threshold < 0) {
    threshold =
        adasum::FusionThresholdOfEnvironment().value_or(adasum::DefaultFusionThreshold(transport));
  }
  return {ToOp(given.op), static_cast<Algorithm>(given.algorithm), threshold};
}

std::vector<TensorSpec> Specs(const AdasumTensor* tensors, int64_t count) {
  std::vector<TensorSpec> specs;
  specs.reserve(static_cast<size_t>(count));
  for (int64_t t = 0; t < count; ++t) {
    const AdasumTensor& tensor = tensors[t];
    specs.push_back({static_cast<DType>(tensor.dtype), tensor.dtype_name, tensor.item_bytes,
                     tensor.dims, tensor.rank, tensor.name == nullptr ? "" : tensor.name});
  }
  return specs;
}

std::vector<const void*> Data(const AdasumTensor* tensors, int64_t count) {
  std::vector<const void*> data;
  data.reserve(static_cast<size_t>(count));
  for (int64_t t = 0; t < count; ++t) data.push_back(tensors[t].data);
  return data;
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
    const auto end_job = [] { adasum::AbortMpi(EXIT_FAILURE); };
    world = std::make_shared<Communicator>(
        transport, std::make_shared<Watchdog>(transport, patience, end_job));
  });
}

int adasum_shutdown(void) {
  return Guard([&] {
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
      throw;
    }
  });
}

void adasum_finalize(void) { adasum::FinalizeMpi(); }

int adasum_is_initialized(void) {
  std::lock_guard<std::mutex> lock(world_mutex);
  return world != nullptr || parents.has_value();
}

int adasum_topology(AdasumTopology* topology) {
  return Guard([&] {
    const adasum::Topology t = parents ? *parents : TopologyOf(*World());
    *topology = {t.rank, t.size, t.local_rank, t.local_size, t.cross_rank, t.cross_size};
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
    *shrinking = {found.old_rank, found.old_size, found.new_rank, found.new_size,
                  static_cast<int32_t>(found.lost.size())};
    for (int32_t i = 0; i < std::min(max_lost, shrinking->lost_count); ++i) lost[i] = found.lost[i];
  });
}

void adasum_set_fault_hook(void (*hook)(const char* place)) { adasum::fault_hook = hook; }

int adasum_job_size(void) { return adasum::MpiJobSize(); }

void adasum_abort(int exit_code) { adasum::AbortMpi(exit_code); }

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
    all->Allreduce(Specs(inputs, count), Data(inputs, count).data(), outputs,
                   ToOptions(*options, *all->transport()), options->name);
  });
}

int adasum_sync(const AdasumSyncTensors* t, const AdasumSyncOptions* o, AdasumSyncResult* result,
                double* orthogonality) {
  return Guard([&] {
    const std::vector<const void*> values = Data(t->values, t->count);
    const std::vector<const void*> states = Data(t->states, t->state_count);
    const adasum::SyncTensors tensors{
        Specs(t->values, t->count),       values.data(), t->starts,    t->new_values, t->new_starts,
        Specs(t->states, t->state_count), states.data(), t->new_states};
    const adasum::SyncOptions options{ToOptions(o->reduce, *World()->transport()), o->pending != 0,
                                      o->flush != 0, o->raise_nonfinite != 0, o->skips_in_a_row};
    if (o->flight >= 0 && (t->state_count > 0 || t->new_starts == nullptr)) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a sync beside training takes no states, and writes the starts");
    }
    const adasum::SyncResult done =
        o->flight < 0 ? World()->Sync(tensors, options, o->reduce.name)
                      : WorldFlights()->Sync(o->flight, tensors, options, o->reduce.name);
    *result = {done.syncs, done.skipped, done.report.identical()};
    if (orthogonality == nullptr) return;
    const std::vector<double>& known = done.report.orthogonality;
    for (int64_t i = 0; i < t->count; ++i) {
      orthogonality[i] = known.empty() ? std::numeric_limits<double>::quiet_NaN() : known[i];
    }
  });
}

int adasum_broadcast(const AdasumTensor* tensors, void* const* outputs, int64_t count, int root,
                     const char* name, int* changed) {
  return Guard([&] {
    const bool differed =
        World()->Broadcast(Specs(tensors, count), Data(tensors, count).data(), outputs, root, name);
    if (changed != nullptr) *changed = differed ? 1 : 0;
  });
}

int adasum_allgather(const AdasumTensor* input, AdasumAllocate allocate, void* context,
                     const char* name) {
  return Guard([&] {
    World()->Allgather(
        Specs(input, 1)[0], input->data, [&](int64_t rows) { return allocate(rows, context); },
        name);
  });
}

int adasum_barrier(const char* name) {
  return Guard([&] { World()->Barrier(name); });
}

int adasum_simulate(int ranks, const int32_t* host_of, const AdasumTensor* inputs,
                    void* const* outputs, const int64_t* counts,
                    const AdasumReduceOptions* options) {
  return Guard([&] {
    if (ranks < 1) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a simulation needs at least one rank. Received: " + std::to_string(ranks));
    }
    std::vector<int> hosts(ranks, 0);
    if (host_of != nullptr) std::copy_n(host_of, ranks, hosts.begin());
    adasum::ThreadWorld threads_world(hosts, adasum::SharedMemoryIsWanted());
    std::mutex error_mutex;
    std::exception_ptr first_error;
    const auto fail = [&](bool abort) {
      {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (first_error == nullptr) first_error = std::current_exception();
      }
      if (abort) threads_world.Abort();
    };
    std::vector<std::thread> threads;
    int64_t first_tensor = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t count = counts[rank];
      threads.emplace_back([&, rank, count, first_tensor] {
        try {
          Communicator communicator(threads_world.Join(rank));
          const AdasumTensor* own = inputs + first_tensor;
          const ReduceOptions reduce = ToOptions(*options, *communicator.transport());
          communicator.Allreduce(Specs(own, count), Data(own, count).data(), outputs + first_tensor,
                                 reduce, options->name);
        } catch (const Error& error) {
          // A disagreement comes to every rank by itself, after messages that an abort would cut
          // off.
          fail(error.kind() != ErrorKind::kDisagreement);
        } catch (...) {
          fail(true);
        }
      });
      first_tensor += count;
    }
    for (std::thread& thread : threads) thread.join();
    if (first_error != nullptr) std::rethrow_exception(first_error);
  });
}
