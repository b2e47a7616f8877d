// Calls the C API with any arguments: SECONDS [SEED [FIRST_CASE]]. Right ones must be taken, and
// wrong ones refused with a text. Built for a sanitizer, which sees what goes wrong besides.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "fuzz.h"

namespace core_test {

namespace {

constexpr unsigned kMostSeconds = 60;

char case_text[100];

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", case_text, what.c_str());
  std::_Exit(1);
}

void EndHangingCase(int) {
  constexpr char kText[] = ": does not end\n";
  static_cast<void>(!write(STDERR_FILENO, case_text, std::strlen(case_text)));
  static_cast<void>(!write(STDERR_FILENO, kText, sizeof kText - 1));
  _exit(1);
}

std::map<std::string, int64_t> counts;

// code: what a call returned. Any of these will do.
void Expect(const char* call, int code, const std::vector<int>& wanted) {
  ++counts[std::string(call) + (code == ADASUM_OK ? "" : ", refused")];
  const std::string text = adasum_last_error();
  bool is_wanted = false;
  for (const int want : wanted) is_wanted = is_wanted || code == want;
  if (!is_wanted) {
    Fail(std::string(call) + " returned " + std::to_string(code) + " instead of " +
         std::to_string(wanted[0]) + "; the last error: " + text);
  }
  if (code != ADASUM_OK && text.empty()) Fail(std::string(call) + " failed without a text");
}

void ExpectSame(const char* call, const void* a, const void* b, int64_t bytes) {
  if (bytes > 0 && std::memcmp(a, b, bytes) != 0) Fail(std::string(call) + " gave other bytes");
}

bool HasOther(const std::vector<Shape>& shapes) {
  for (const Shape& shape : shapes) {
    if (shape.dtype == ADASUM_OTHER) return true;
  }
  return false;
}

// One flaw in one of two calls.
bool WantsFlaw(Random& random) { return random.OneIn(2); }

void Simulate(Random& random) {
  Memory memory;
  int ranks = static_cast<int>(random.Between(1, 6));
  const std::vector<Shape> shapes = RandomShapes(random, random.OneIn(20));
  std::vector<AdasumTensor> inputs;
  std::vector<void*> outputs;
  std::vector<int64_t> of_rank;
  std::vector<TensorList> lists;
  bool refused = HasOther(shapes), disagrees = false;
  const int flawed = WantsFlaw(random) ? static_cast<int>(random.Below(ranks)) : -1;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<Shape> own = shapes;
    if (rank == flawed && ranks > 1 && random.OneIn(2)) {
      own = RandomShapes(random, false);
      disagrees = !(own == shapes);
    }
    TensorList list = MakeTensors(random, memory, own, Content::kAny);
    if (rank == flawed && !disagrees) {
      refused |= random.OneIn(2) ? BreakTensors(random, memory, list)
                                 : BreakOutputs(random, list.outputs, list);
    }
    // The lists are one array, so what can be missing is all of them.
    const bool whole = list.tensors != nullptr && list.outputs != nullptr;
    for (size_t t = 0; t < own.size(); ++t) {
      inputs.push_back(whole ? list.tensors[t] : AdasumTensor{});
      outputs.push_back(whole ? list.outputs[t] : nullptr);
    }
    of_rank.push_back(list.count);
    lists.push_back(list);
  }
  AdasumReduceOptions options = RandomOptions(random);
  AdasumReduceOptions* given = &options;
  std::vector<int32_t> hosts;
  for (int rank = 0; rank < ranks; ++rank) {
    hosts.push_back(random.Of<int32_t>({0, 0, 1, 2, -1, INT32_MAX, INT32_MIN}));
  }
  int64_t* of_ranks = memory.Copy(of_rank);
  const int right_ranks = ranks;
  if (WantsFlaw(random) && random.OneIn(4)) {
    refused = true;
    switch (random.Below(5)) {
      case 0:
        ranks = random.Of<int>({0, -1, 1025, INT32_MAX, INT32_MIN});
        break;
      case 1:
        of_ranks = nullptr;
        break;
      case 2:
        of_ranks[random.Below(ranks)] = random.Of<int64_t>({-1, INT64_MIN});
        break;
      case 3:
        given = nullptr;
        break;
      default:
        BreakOptions(random, options);
    }
  }
  const int code = adasum_simulate(ranks, random.OneIn(2) ? nullptr : memory.Copy(hosts),
                                   memory.Copy(inputs), memory.Copy(outputs), of_ranks, given);
  if (refused) {
    Expect("simulate", code, {ADASUM_INVALID_ARGUMENT, ADASUM_DISAGREEMENT});
  } else {
    Expect("simulate", code, {disagrees ? ADASUM_DISAGREEMENT : ADASUM_OK});
  }
  if (code != ADASUM_OK) return;
  for (int rank = 1; rank < right_ranks; ++rank) {
    for (size_t t = 0; t < shapes.size(); ++t) {
      ExpectSame("simulate", lists[0].outputs[t], lists[rank].outputs[t], shapes[t].bytes());
    }
  }
}

// Of a world of one rank, until adasum_shutdown.
class World {
 public:
  void Call(Random& random) {
    if (random.OneIn(2000)) Restart(random);
    switch (random.Below(12)) {
      case 0:
      case 1:
        return Broadcast(random);
      case 2:
      case 3:
        return Allgather(random);
      case 4:
        return Others(random);
      case 5:
      case 6:
      case 7:
        return Sync(random, -1 - random.Below(2) * INT64_MAX);
      case 8:
      case 9:
        return Sync(random, random.Of<int64_t>({0, 1, 77, INT64_MAX}));
      default:
        return Allreduce(random);
    }
  }

  void Restart(Random& random) {
    Expect("shutdown", adasum_shutdown(), {ADASUM_OK});
    const std::vector<int> wanted{ADASUM_STATE};
    AdasumTopology topology;
    Expect("topology before init", adasum_topology(&topology), wanted);
    Expect("barrier before init", adasum_barrier(random.OneIn(2) ? nullptr : ""), wanted);
    Expect("allreduce before init", adasum_allreduce(nullptr, nullptr, 0, nullptr), wanted);
    Expect("sync before init", adasum_sync(nullptr, nullptr, nullptr, nullptr), wanted);
    Expect("shutdown", adasum_shutdown(), {ADASUM_OK});
    Expect("init", adasum_init(nullptr), {ADASUM_OK});
    Expect("init twice", adasum_init(nullptr), wanted);
    under_way_.clear();
  }

 private:
  void Allreduce(Random& random) {
    Memory memory;
    TensorList list =
        MakeTensors(random, memory, RandomShapes(random, random.OneIn(20)), Content::kAny);
    bool refused = HasOther(list.shapes);
    AdasumReduceOptions options = RandomOptions(random), *given = &options;
    if (WantsFlaw(random)) refused |= Break(random, memory, list, list.outputs, given);
    const int code = adasum_allreduce(list.tensors, list.outputs, list.count, given);
    Expect("allreduce", code, {refused ? ADASUM_INVALID_ARGUMENT : ADASUM_OK});
    if (refused) return;
    for (int64_t t = 0; t < list.count; ++t) {
      ExpectSame("allreduce", list.outputs[t], list.tensors[t].data, list.shapes[t].bytes());
    }
  }

  static bool Break(Random& random, Memory& memory, TensorList& list, void**& outputs,
                    AdasumReduceOptions*& options) {
    switch (random.Below(4)) {
      case 0:
        if (random.OneIn(4)) {
          options = nullptr;
        } else {
          BreakOptions(random, *options);
        }
        return true;
      case 1:
        return BreakOutputs(random, outputs, list);
      default:
        return BreakTensors(random, memory, list);
    }
  }

  void Sync(Random& random, int64_t flight) {
    Memory memory;
    const bool is_flight = flight >= 0;
    const auto known = under_way_.find(flight);
    std::vector<Shape> shapes = RandomShapes(random, random.OneIn(20));
    bool refused = HasOther(shapes);
    if (known != under_way_.end()) {
      if (!random.OneIn(4)) shapes = known->second;
      refused = !(shapes == known->second);
    }
    // What is under way is reduced by a later call.
    const Content content = is_flight || random.OneIn(2) ? Content::kSmall : Content::kAny;
    TensorList values = MakeTensors(random, memory, shapes, content);
    TensorList starts = MakeTensors(random, memory, shapes, content);
    std::vector<void*> read_starts;
    for (int64_t t = 0; t < starts.count; ++t) {
      read_starts.push_back(const_cast<void*>(starts.tensors[t].data));
    }
    std::vector<Shape> state_shapes;
    if (random.OneIn(is_flight ? 20 : 2)) state_shapes = RandomShapes(random, random.OneIn(20));
    refused |= HasOther(state_shapes) || (is_flight && !state_shapes.empty());
    TensorList states = MakeTensors(random, memory, state_shapes, Content::kAny);
    AdasumSyncOptions options{RandomOptions(random),
                              static_cast<int32_t>(random.Below(2)),
                              random.Of<int32_t>({0, 0, 1, -1}),
                              static_cast<int32_t>(random.Below(2)),
                              random.Of<int64_t>({0, 0, 1, 2, 100, -1, INT64_MAX, INT64_MIN}),
                              flight};
    AdasumSyncOptions* given = &options;
    AdasumSyncResult result, *result_to = &result;
    void** read = memory.Copy(read_starts);
    AdasumReduceOptions* reduce = &options.reduce;
    if (random.OneIn(3)) {
      switch (random.Below(7)) {
        case 0:
          refused |= BreakOutputs(random, read, starts);
          break;
        case 1:
          // Starts need not be written but for a flush or a flight.
          if (is_flight || options.flush) refused |= BreakOutputs(random, starts.outputs, starts);
          break;
        case 2:
          refused |= BreakTensors(random, memory, states);
          break;
        case 3:
          refused |= BreakOutputs(random, states.outputs, states);
          break;
        case 4:
          result_to = nullptr;
          refused = true;
          break;
        default:
          refused |= Break(random, memory, values, values.outputs, reduce);
          if (reduce == nullptr) given = nullptr;
      }
    } else if (!is_flight && !options.flush && random.OneIn(4)) {
      starts.outputs = nullptr;
    }
    std::vector<double> orthogonality(shapes.size());
    const AdasumSyncTensors tensors{values.count,   values.tensors, read,           values.outputs,
                                    starts.outputs, states.count,   states.tensors, states.outputs};
    const int code = adasum_sync(random.OneIn(100) ? (refused = true, nullptr) : &tensors, given,
                                 result_to, random.OneIn(2) ? nullptr : orthogonality.data());
    const char* name = is_flight ? "sync beside training" : "sync";
    if (refused) {
      Expect(name, code, {ADASUM_INVALID_ARGUMENT});
    } else if (content == Content::kSmall) {
      Expect(name, code, {ADASUM_OK});
    } else {
      // A change of any bits is hardly ever finite.
      Expect(name, code, {ADASUM_OK, ADASUM_INVALID_ARGUMENT});
    }
    if (code != ADASUM_OK || !is_flight) return;
    under_way_.erase(flight);
    if (!options.flush) under_way_[flight] = shapes;
  }

  void Broadcast(Random& random) {
    Memory memory;
    TensorList list = MakeTensors(random, memory, RandomShapes(random, true), Content::kAny);
    int root = 0, changed = 0;
    bool refused = false;
    if (WantsFlaw(random)) {
      if (random.OneIn(3)) {
        root = random.Of<int>({-1, 1, INT32_MAX, INT32_MIN});
        refused = true;
      } else {
        refused = random.OneIn(3) ? BreakOutputs(random, list.outputs, list)
                                  : BreakTensors(random, memory, list);
      }
    }
    const int code = adasum_broadcast(list.tensors, list.outputs, list.count, root,
                                      random.OneIn(2) ? nullptr : "name",
                                      random.OneIn(2) ? nullptr : &changed, nullptr);
    Expect("broadcast", code, {refused ? ADASUM_INVALID_ARGUMENT : ADASUM_OK});
    if (refused) return;
    if (changed) Fail("broadcast changed what root has");
    for (int64_t t = 0; t < list.count; ++t) {
      ExpectSame("broadcast", list.outputs[t], list.tensors[t].data, list.shapes[t].bytes());
    }
  }

  void Allgather(Random& random) {
    Memory memory;
    std::vector<Shape> shapes = RandomShapes(random, true);
    if (shapes.empty()) shapes = {{ADASUM_OTHER, 1, {3}}};
    shapes.resize(1);
    TensorList list = MakeTensors(random, memory, shapes, Content::kAny);
    struct Context {
      char* place;
      int64_t rows;
    } context{static_cast<char*>(list.outputs[0]), -1};
    AdasumAllocate allocate = [](int64_t rows, void* of) -> void* {
      static_cast<Context*>(of)->rows = rows;
      return static_cast<Context*>(of)->place;
    };
    const AdasumTensor* tensor = list.tensors;
    std::vector<int> wanted{ADASUM_OK};
    if (shapes[0].dims.empty()) wanted = {ADASUM_INVALID_ARGUMENT};
    if (WantsFlaw(random)) {
      switch (random.Below(4)) {
        case 0:
          allocate = nullptr;
          wanted = {ADASUM_INVALID_ARGUMENT};
          break;
        case 1:
          context.place = nullptr;  // it gives up
          if (shapes[0].bytes() > 0 && !shapes[0].dims.empty()) wanted = {ADASUM_INTERNAL};
          break;
        default:
          if (BreakTensors(random, memory, list) && list.count == 1) {
            wanted = {ADASUM_INVALID_ARGUMENT};
          }
          tensor = list.tensors;
      }
    }
    const int code =
        adasum_allgather(tensor, allocate, &context, random.OneIn(2) ? nullptr : "name", nullptr);
    Expect("allgather", code, wanted);
    if (code != ADASUM_OK) return;
    if (context.rows != shapes[0].dims[0]) Fail("allgather asked for other rows");
    ExpectSame("allgather", context.place, tensor->data, shapes[0].bytes());
  }

  void Others(Random& random) {
    AdasumTopology topology;
    AdasumShrinking shrinking;
    int32_t lost[2];
    const std::vector<int> ok{ADASUM_OK}, invalid{ADASUM_INVALID_ARGUMENT};
    Expect("barrier", adasum_barrier(random.Of<const char*>({nullptr, "", "name"})), ok);
    Expect("topology", adasum_topology(&topology), ok);
    Expect("topology of null", adasum_topology(nullptr), invalid);
    const int64_t index = random.Of<int64_t>({0, 1, -1, INT64_MAX, INT64_MIN});
    Expect("shrinking", adasum_shrinking(index, &shrinking, lost, 2), invalid);
    Expect("go on", adasum_go_on_without_the_dead(), ok);
    if (topology.size != 1 || adasum_shrinkings() != 0 || adasum_job_size() != 1 ||
        adasum_is_initialized() != 1 || adasum_shares_memory() < 0) {
      Fail("this is not one rank alone");
    }
    for (const char* text :
         {adasum_mpi_built_for(), adasum_mpi_running(), adasum_mpi_thread_level(), adasum_simd()}) {
      if (text == nullptr || *text == 0) Fail("a text is empty");
    }
  }

  std::map<int64_t, std::vector<Shape>> under_way_;  // by number
};

void RunCase(uint64_t seed, uint64_t number, World& world) {
  Random random(seed, number);
  std::snprintf(case_text, sizeof case_text, "seed %llu, case %llu",
                static_cast<unsigned long long>(seed), static_cast<unsigned long long>(number));
  alarm(kMostSeconds);
  if (random.OneIn(3)) {
    Simulate(random);
  } else {
    world.Call(random);
  }
}

}  // namespace

}  // namespace core_test

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  uint64_t number = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
  signal(SIGALRM, core_test::EndHangingCase);
  core_test::Random random(seed);
  core_test::World world;
  world.Restart(random);
  const auto start = Clock::now();
  do {
    core_test::RunCase(seed, number++, world);
  } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
  adasum_shutdown();
  adasum_finalize();
  std::printf("seed %llu: %llu cases", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(number));
  for (const auto& [name, count] : core_test::counts) {
    std::printf("; %s %lld", name.c_str(), static_cast<long long>(count));
  }
  std::printf("\n");
}
