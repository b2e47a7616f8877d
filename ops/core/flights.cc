#include "flights.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <future>
#include <utility>

#include "agreement.h"
#include "call.h"
#include "error.h"

namespace adasum {

namespace {

// Throws Error(kInvalidArgument) where a flight would not fit into the memory that it is to land
// in.
void CheckSame(const std::vector<TensorSpec>& flight, const std::vector<TensorSpec>& tensors) {
  const auto same = [](const TensorSpec& a, const TensorSpec& b) {
    return a.dtype == b.dtype && std::equal(a.dims, a.dims + a.rank, b.dims, b.dims + b.rank);
  };
  if (std::equal(flight.begin(), flight.end(), tensors.begin(), tensors.end(), same)) return;
  throw Error(ErrorKind::kInvalidArgument,
              "a sync beside training must have the tensors of the one of its number that is under "
              "way, of the same dtypes and shapes");
}

}  // namespace

// A change under way. It owns all that the worker reads and writes.
struct Flights::Flight {
  Flight(const SyncTensors& tensors, const SyncOptions& given, std::string call)
      : options(given), name(std::move(call)) {
    const size_t count = tensors.specs.size();
    dims.reserve(count);
    texts.reserve(2 * count);
    deltas.resize(count);
    reduced.resize(count);
    std::vector<Inspection> inspections(count);
    for (size_t t = 0; t < count; ++t) {
      const TensorSpec& spec = tensors.specs[t];
      dims.emplace_back(spec.dims, spec.dims + spec.rank);
      const std::string& dtype_name = texts.emplace_back(spec.dtype_name);
      const std::string& own_name = texts.emplace_back(spec.name);
      specs.push_back({spec.dtype, dtype_name.c_str(), spec.item_bytes, dims.back().data(),
                       spec.rank, own_name.c_str()});
      char* delta = deltas[t].Reserve(spec.bytes());
      from.push_back(delta);
      to.push_back(reduced[t].Reserve(spec.bytes()));
      if (spec.count() == 0) continue;
      const Kernels& kernels = HostDevice().kernels(spec.dtype);
      // The checksum has to be that of a rank which syncs without a flight.
      kernels.Inspect(tensors.new_values[t], tensors.new_starts[t], spec.count(), &inspections[t]);
      kernels.Delta(tensors.new_values[t], tensors.new_starts[t], spec.count(), delta);
    }
    starts_checksum = StartsChecksum(inspections);
  }

  SyncOptions options;
  std::string name;
  std::vector<std::vector<int64_t>> dims;
  std::vector<std::string> texts;
  std::vector<TensorSpec> specs;
  std::vector<Buffer> deltas, reduced;
  std::vector<const void*> from;
  std::vector<void*> to;
  uint64_t starts_checksum = 0;
  SyncResult result;
  std::promise<void> done;
};

Flights::Flights(std::unique_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)), worker_([this] { Work(); }) {}

Flights::~Flights() {
  Enqueue([this] {
    try {
      // So that a flight that other ranks have started and this one has not is an error there.
      communicator_->Leave();
    } catch (const Error&) {
      // Nobody is left here to be told.
    }
  });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

SyncResult Flights::Sync(int64_t number, const SyncTensors& tensors, const SyncOptions& options,
                         const std::string& name) {
  CheckReducible(tensors.specs);
  SyncResult finished;
  const auto known = flights_.find(number);
  if (known != flights_.end()) {
    const std::shared_ptr<Flight> flight = known->second;
    CheckSame(flight->specs, tensors.specs);
    flights_.erase(known);
    finished = Finish(*flight, tensors);
  } else {
    for (size_t t = 0; t < tensors.specs.size(); ++t) {
      const auto keep = [&](void* to, const void* from) {
        const int64_t bytes = tensors.specs[t].bytes();
        if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
      };
      keep(tensors.new_values[t], tensors.values[t]);
      keep(tensors.new_starts[t], tensors.starts[t]);
    }
  }
  if (!options.flush) {
    auto flight = std::make_shared<Flight>(tensors, options, name);
    flights_[number] = flight;
    Enqueue([this, flight] {
      try {
        const SyncTensors deltas{
            flight->specs, flight->from.data(),    nullptr, flight->to.data(), nullptr, {}, nullptr,
            nullptr,       flight->starts_checksum};
        flight->result = communicator_->Sync(deltas, flight->options, flight->name);
        flight->done.set_value();
      } catch (...) {
        flight->done.set_exception(std::current_exception());
      }
    });
    return finished;
  }
  SyncTensors current = tensors;
  const std::vector<const void*> values(tensors.new_values,
                                        tensors.new_values + tensors.specs.size());
  const std::vector<const void*> starts(tensors.new_starts,
                                        tensors.new_starts + tensors.specs.size());
  current.values = values.data();
  current.starts = starts.data();
  SyncResult result;
  RunAndWait([&] { result = communicator_->Sync(current, options, name); });
  if (result.syncs == 0) {
    result.report = finished.report;
  }
  result.syncs += finished.syncs;
  result.skipped = result.skipped || finished.skipped;
  return result;
}

SyncResult Flights::Finish(Flight& flight, const SyncTensors& tensors) {
  flight.done.get_future().get();
  for (size_t t = 0; t < flight.specs.size(); ++t) {
    const Kernels& kernels = HostDevice().kernels(flight.specs[t].dtype);
    const int64_t count = flight.specs[t].count();
    if (flight.result.skipped) {
      // Neither this rank's change nor what came after it is worth keeping.
      kernels.Apply(tensors.starts[t], flight.to[t], count, tensors.new_starts[t]);
      kernels.Copy(tensors.new_starts[t], count, tensors.new_values[t]);
      continue;
    }
    char* correction = flight.deltas[t].Reserve(flight.specs[t].bytes());
    kernels.Delta(flight.to[t], flight.from[t], count, correction);
    kernels.Apply(tensors.values[t], correction, count, tensors.new_values[t]);
    kernels.Apply(tensors.starts[t], flight.to[t], count, tensors.new_starts[t]);
  }
  return flight.result;
}

void Flights::Enqueue(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void Flights::RunAndWait(const std::function<void()>& task) {
  std::promise<void> done;
  Enqueue([&] {
    try {
      task();
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  });
  done.get_future().get();
}

void Flights::Work() {
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace adasum
