// The C API's functions for ranks that are threads of this process.

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "arguments.h"
#include "c_api.h"
#include "communicator.h"
#include "devices.h"
#include "error.h"
#include "process.h"
#include "transport_threads.h"

namespace {

using adasum::CheckMemory;
using adasum::Communicator;
using adasum::DataOf;
using adasum::Device;
using adasum::Error;
using adasum::ErrorKind;
using adasum::Given;
using adasum::Guard;
using adasum::OptionsOf;
using adasum::ReduceOptions;
using adasum::ResultOf;
using adasum::SpecsOf;
using adasum::SyncArguments;
using adasum::TensorSpec;
using adasum::TextOf;
using adasum::ThreadWorld;
using adasum::Transport;

void CheckSimulatedRanks(int ranks) {
  // What ranks exchange messages through takes memory that grows with their square.
  constexpr int kMostRanks = 1024;
  if (ranks >= 1 && ranks <= kMostRanks) return;
  throw Error(ErrorKind::kInvalidArgument, "a simulation needs at least one rank, and at most " +
                                               std::to_string(kMostRanks) +
                                               ". Received: " + std::to_string(ranks));
}

std::vector<int> HostsOf(int ranks, const int32_t* host_of) {
  std::vector<int> hosts(ranks, 0);
  if (host_of != nullptr) std::copy_n(host_of, ranks, hosts.begin());
  return hosts;
}

// Does body on a thread for each rank. Throws what the first one that failed threw.
void OnThreads(ThreadWorld& threads_world,
               const std::function<void(int, std::unique_ptr<Transport>)>& body) {
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
      body(rank, threads_world.Join(rank));
    } catch (const Error& error) {
      // A disagreement comes to every rank by itself, after messages that an abort would cut off.
      fail(error.kind() != ErrorKind::kDisagreement);
    } catch (...) {
      fail(true);
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < threads_world.size(); ++rank) threads.emplace_back(run, rank);
  } catch (const std::system_error&) {
    fail(true);
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

}  // namespace

int adasum_simulate(int ranks, const int32_t* host_of, const AdasumTensor* inputs,
                    void* const* outputs, const int64_t* counts,
                    const AdasumReduceOptions* options) {
  return Guard([&] {
    CheckSimulatedRanks(ranks);
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
    const bool on_device = given.device != nullptr && given.device->memory != ADASUM_HOST;
    if (on_device && given.device->memory != ADASUM_EMULATED) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a simulation's tensors are in the host's memory, or the emulated device's");
    }
    ThreadWorld threads_world(HostsOf(ranks, host_of), adasum::SharedMemoryIsWanted(), on_device);
    OnThreads(threads_world, [&](int rank, std::unique_ptr<Transport> transport) {
      const int64_t first = first_tensors[rank];
      const std::vector<const void*> data = DataOf(inputs + first, counts[rank]);
      // Each rank has a device of its own, which lives as long as what is there.
      std::unique_ptr<Device> device;
      if (on_device) device = adasum::MakeDevice(*given.device);
      Communicator communicator(std::move(transport));
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
    });
  });
}

int adasum_simulate_sync(int ranks, const int32_t* host_of, const AdasumSyncTensors* tensors,
                         const AdasumSyncOptions* options, AdasumSyncResult* results,
                         double* orthogonality, int64_t* sent_bytes) {
  return Guard([&] {
    CheckSimulatedRanks(ranks);
    Given(tensors, "tensors");
    Given(options, "options");
    Given(results, "results");
    for (int rank = 0; rank < ranks; ++rank) {
      const AdasumDevice* device = options[rank].reduce.device;
      if (options[rank].flight >= 0 || (device != nullptr && device->memory != ADASUM_HOST)) {
        throw Error(ErrorKind::kInvalidArgument,
                    "a simulated sync has no `flight`, and takes tensors in the host's memory");
      }
    }
    ThreadWorld threads_world(HostsOf(ranks, host_of), adasum::SharedMemoryIsWanted());
    OnThreads(threads_world, [&](int rank, std::unique_ptr<Transport> transport) {
      Communicator communicator(std::move(transport));
      const SyncArguments given(tensors + rank, options + rank, *communicator.transport());
      const adasum::SyncResult done = communicator.Sync(given.tensors, given.options, given.name);
      results[rank] = ResultOf(done);
      if (rank == 0) TellOrthogonality(done.report, tensors[rank].count, orthogonality);
    });
    if (sent_bytes != nullptr) *sent_bytes = threads_world.sent_bytes();
  });
}
