// The C API's functions for a partitioned optimizer.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "arguments.h"
#include "c_api.h"
#include "error.h"
#include "process.h"

namespace {

using adasum::CheckMemory;
using adasum::DataOf;
using adasum::Error;
using adasum::ErrorKind;
using adasum::Given;
using adasum::Guard;
using adasum::OptionsOf;
using adasum::PartitionPlace;
using adasum::SpecsOf;
using adasum::TensorSpec;
using adasum::TextOf;
using adasum::Transport;
using adasum::World;
using adasum::WorldPartition;

PartitionPlace OwnPlace() {
  const std::shared_ptr<Transport> all = World()->transport();
  return PartitionPlace::Of(all->rank(), all->hosts());
}

std::vector<int> OwnersOf(const int32_t* owner_of, int64_t count) {
  const int lanes = OwnPlace().lanes;
  if (count > 0) Given(owner_of, "owner_of");
  for (int64_t t = 0; t < count; ++t) {
    if (owner_of[t] >= 0 && owner_of[t] < lanes) continue;
    throw Error(ErrorKind::kInvalidArgument,
                "`owner_of` must be from 0 to " + std::to_string(lanes - 1) + ". Received: " +
                    std::to_string(owner_of[t]) + " for tensor " + std::to_string(t));
  }
  return std::vector<int>(owner_of, owner_of + count);
}

// Of the tensors that this rank owns.
void CheckMine(const std::vector<TensorSpec>& specs, const std::vector<int>& owner_of,
               const void* const* memory, const char* name) {
  const int lane = OwnPlace().lane;
  if (!specs.empty()) Given(memory, name);
  for (size_t t = 0; t < specs.size(); ++t) {
    if (owner_of[t] == lane && specs[t].bytes() > 0 && memory[t] == nullptr) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`" + std::string(name) + "` must have memory for tensor " + std::to_string(t));
    }
  }
}

int64_t ThresholdOf(int64_t fusion_threshold) {
  AdasumReduceOptions options{};
  options.fusion_threshold = fusion_threshold;
  return OptionsOf(options, *World()->transport()).fusion_threshold;
}

}  // namespace

int adasum_partition(AdasumPartition* partition) {
  return Guard([&] {
    const PartitionPlace place = OwnPlace();
    Given(partition, "partition") = {place.lanes, place.lane};
  });
}

int adasum_host_sum(const double* numbers, double* sums, int64_t count, const char* name) {
  return Guard([&] {
    if (count < 1) {
      throw Error(ErrorKind::kInvalidArgument,
                  "`count` must be positive. Received: " + std::to_string(count));
    }
    WorldPartition()->HostSum(&Given(numbers, "numbers"), &Given(sums, "sums"), count,
                              TextOf(name));
  });
}

int adasum_reduce_to_owners(const AdasumTensor* tensors, void* const* outputs,
                            const int32_t* owner_of, int64_t count, int64_t fusion_threshold,
                            const char* name) {
  return Guard([&] {
    const std::vector<TensorSpec> specs = SpecsOf(tensors, count, "tensor");
    const std::vector<int> owners = OwnersOf(owner_of, count);
    CheckMine(specs, owners, outputs, "outputs");
    WorldPartition()->ReduceToOwners(specs, DataOf(tensors, count).data(), outputs, owners,
                                     ThresholdOf(fusion_threshold), TextOf(name));
  });
}

int adasum_share_from_owners(const AdasumTensor* tensors, void* const* outputs,
                             const int32_t* owner_of, int64_t count, int64_t fusion_threshold,
                             const char* name) {
  return Guard([&] {
    const std::vector<TensorSpec> specs = SpecsOf(tensors, count, "tensor");
    const std::vector<int> owners = OwnersOf(owner_of, count);
    CheckMemory(specs, outputs, "outputs");
    const int lane = OwnPlace().lane;
    for (int64_t t = 0; t < count; ++t) {
      if (owners[t] != lane || outputs[t] == tensors[t].data || specs[t].bytes() == 0) continue;
      std::memcpy(outputs[t], tensors[t].data, static_cast<size_t>(specs[t].bytes()));
    }
    WorldPartition()->ShareFromOwners(specs, outputs, owners, ThresholdOf(fusion_threshold),
                                      TextOf(name));
  });
}

int adasum_partition_sync(const AdasumSyncTensors* t, const int32_t* owner_of,
                          const AdasumSyncOptions* o, AdasumSyncResult* result,
                          double* orthogonality) {
  return Guard([&] {
    Given(t, "tensors");
    Given(o, "options");
    Given(result, "result");
    if (t->state_count != 0 || o->flight >= 0 || o->wire_dtype != ADASUM_OTHER) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a sync of a partitioned optimizer has no states, no flight and no wire dtype");
    }
    const std::vector<TensorSpec> specs = SpecsOf(t->values, t->count, "tensor");
    const std::vector<int> owners = OwnersOf(owner_of, t->count);
    CheckMemory(specs, t->new_values, "new_values");
    CheckMine(specs, owners, t->starts, "starts");
    CheckMine(specs, owners, t->new_starts, "new_starts");
    adasum::SyncOptions options{OptionsOf(o->reduce, *World()->transport()), o->pending != 0,
                                o->flush != 0, o->raise_nonfinite != 0, o->skips_in_a_row};
    const std::vector<const void*> values = DataOf(t->values, t->count);
    const adasum::SyncTensors tensors{specs, values.data(), t->starts, t->new_values, t->new_starts,
                                      {},    nullptr,       nullptr};
    const adasum::SyncResult done =
        WorldPartition()->Sync(tensors, owners, options, TextOf(o->reduce.name));
    *result = {done.syncs, done.skipped, done.report.identical(), 0, 0};
    if (orthogonality != nullptr) {
      std::copy_n(done.report.orthogonality.begin(), t->count, orthogonality);
    }
  });
}
