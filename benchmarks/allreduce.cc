// Latency of an allreduce of many tensors over MPI: the core's algorithms beside MPI_Allreduce(SUM)
// and a memory copy of as many bytes. The worker of fig4_allreduce_latency.py and two_hosts.py.
//
//   cmake --build build/cmake-* --target allreduce_benchmark
//   mpirun -np 4 build/cmake-*/allreduce_benchmark --bytes 4096,65536 --contenders rvh,mpi,memcpy
//
// A round runs every contender once, in an order that changes from round to round, each after a
// barrier. The time of an operation is that of the rank for which it took longest. Rank 0 prints a
// line of JSON for each size: the median over the rounds, and the quartiles, in seconds.

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "ops/core/c_api.h"

namespace {

struct Options {
  std::vector<int64_t> bytes;  // of all tensors together
  std::vector<std::string> contenders;
  int64_t tensors = 64;
  double seconds = 2;  // for each size, about
  int64_t least_rounds = 5;
  int64_t most_rounds = 5000;
  int64_t fusion_threshold = -1;  // the default
};

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "allreduce_benchmark: %s\n", message.c_str());
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

void Check(int status) {
  if (status != ADASUM_OK) Fail(adasum_last_error());
}

int Rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

// Tensors side by side with a gap between, so that they are no contiguous buffer to those who take
// them as tensors. Who wants one takes the first bytes of the same memory.
class Memory {
 public:
  Memory(int64_t bytes, int64_t tensors) : bytes_(bytes), each_(bytes / tensors) {
    for (std::vector<float>* memory : {&input_, &output_}) {
      memory->resize((bytes + tensors * kGap) / sizeof(float));
    }
    std::minstd_rand random(1 + Rank());
    for (float& x : input_) x = static_cast<float>(random()) / random.max() - 0.5f;
    dims_ = each_ / static_cast<int64_t>(sizeof(float));
    for (int64_t i = 0; i < tensors; ++i) {
      const int64_t at = i * (each_ + kGap) / static_cast<int64_t>(sizeof(float));
      inputs_.push_back(
          {&input_[at], &dims_, sizeof(float), "float32", nullptr, 1, ADASUM_FLOAT32});
      outputs_.push_back(&output_[at]);
    }
  }
  Memory(const Memory&) = delete;

  void Adasum(int op, int algorithm, int64_t fusion_threshold) {
    const AdasumReduceOptions options{op, algorithm, fusion_threshold, "", nullptr};
    Check(adasum_allreduce(inputs_.data(), outputs_.data(), static_cast<int64_t>(inputs_.size()),
                           &options));
  }

  void Mpi() {
    MPI_Allreduce(input_.data(), output_.data(), static_cast<int>(bytes_ / sizeof(float)),
                  MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }

  // Zeros, since a sum that is summed again and again would overflow.
  void MpiInPlace() {
    in_place_.resize(bytes_ / sizeof(float));
    MPI_Allreduce(MPI_IN_PLACE, in_place_.data(), static_cast<int>(in_place_.size()), MPI_FLOAT,
                  MPI_SUM, MPI_COMM_WORLD);
  }

  void Memcpy() { std::memcpy(output_.data(), input_.data(), bytes_); }

  // Fails unless the tensors of the last result are the same, and not all zero, on all ranks.
  void CheckResult(const std::string& contender) {
    double mine[2] = {0, 0};
    for (void* tensor : outputs_) {
      const float* values = static_cast<const float*>(tensor);
      for (int64_t i = 0; i < dims_; ++i) mine[0] += (i % 7 + 1) * static_cast<double>(values[i]);
    }
    mine[1] = -mine[0];
    double largest[2];
    MPI_Allreduce(mine, largest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    const bool equal = largest[0] == -largest[1] && largest[0] != 0;
    if (!equal) Fail(contender + ": the ranks' results differ, or are zero");
  }

  void ClearOutput() { std::fill(output_.begin(), output_.end(), 0.0f); }

 private:
  static constexpr int64_t kGap = 64;
  const int64_t bytes_;
  const int64_t each_;
  int64_t dims_ = 0;
  std::vector<float> input_, output_, in_place_;
  std::vector<AdasumTensor> inputs_;
  std::vector<void*> outputs_;
};

struct Contender {
  std::string name;
  std::function<void(Memory&)> run;
  bool has_result;  // in the tensors, to be checked
};

std::vector<Contender> Contenders(const Options& options) {
  const int64_t threshold = options.fusion_threshold;
  const auto ours = [=](const char* name, int op, int algorithm) {
    return Contender{name, [=](Memory& m) { m.Adasum(op, algorithm, threshold); }, true};
  };
  const std::vector<Contender> known = {
      ours("rvh", ADASUM_OP_ADASUM, ADASUM_RVH),
      ours("ring", ADASUM_OP_ADASUM, ADASUM_RING),
      ours("hierarchical", ADASUM_OP_ADASUM, ADASUM_HIERARCHICAL),
      ours("hierarchical_sum", ADASUM_OP_ADASUM, ADASUM_HIERARCHICAL_SUM),
      ours("sum", ADASUM_OP_SUM, ADASUM_RVH),
      {"mpi", [](Memory& m) { m.Mpi(); }, true},
      {"mpi_in_place", [](Memory& m) { m.MpiInPlace(); }, false},
      {"memcpy", [](Memory& m) { m.Memcpy(); }, false},
  };
  std::vector<Contender> chosen;
  for (const std::string& name : options.contenders) {
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](const Contender& each) { return each.name == name; });
    if (found == known.end()) Fail("no contender is called " + name);
    chosen.push_back(*found);
  }
  return chosen;
}

using Times = std::map<std::string, std::vector<double>>;  // seconds of each round

void Round(const std::vector<Contender>& contenders, const std::vector<int>& order, Memory& memory,
           Times* times) {
  for (const int i : order) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    contenders[i].run(memory);
    if (times != nullptr) (*times)[contenders[i].name].push_back(MPI_Wtime() - begin);
  }
}

// Seconds of a round, on rank 0, told to all ranks.
double SecondsOf(const std::function<void()>& round) {
  double seconds = MPI_Wtime();
  round();
  seconds = MPI_Wtime() - seconds;
  MPI_Bcast(&seconds, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  return seconds;
}

// How many rounds fill the time that there is; the same number on all ranks.
int64_t Rounds(const Options& options, const std::function<void()>& round) {
  double each = SecondsOf(round);
  if (each < options.seconds / 10) each = SecondsOf(round);  // now with warm caches
  return std::clamp(static_cast<int64_t>(options.seconds / each), options.least_rounds,
                    options.most_rounds);
}

double Quantile(std::vector<double> sorted, double q) {
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
}

void Print(int64_t bytes, int64_t rounds, const Times& times) {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  std::printf("{\"bytes\": %lld, \"ranks\": %d, \"rounds\": %lld, \"seconds\": {",
              static_cast<long long>(bytes), ranks, static_cast<long long>(rounds));
  const char* comma = "";
  for (auto [name, seconds] : times) {
    std::sort(seconds.begin(), seconds.end());
    std::printf("%s\"%s\": {\"median\": %.9g, \"quartiles\": [%.9g, %.9g]}", comma, name.c_str(),
                Quantile(seconds, 0.5), Quantile(seconds, 0.25), Quantile(seconds, 0.75));
    comma = ", ";
  }
  std::printf("}}\n");
  std::fflush(stdout);
}

void Measure(const Options& options, const std::vector<Contender>& contenders, int64_t bytes) {
  Memory memory(bytes, options.tensors);
  for (const Contender& each : contenders) {
    memory.ClearOutput();
    each.run(memory);
    if (each.has_result) memory.CheckResult(each.name);
  }
  std::mt19937 random(bytes);  // the same on all ranks
  std::vector<int> order(contenders.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  Times times;
  const auto round = [&](Times* kept) {
    std::shuffle(order.begin(), order.end(), random);
    Round(contenders, order, memory, kept);
  };
  const int64_t rounds = Rounds(options, [&] { round(nullptr); });
  for (int64_t i = 0; i < rounds / 10; ++i) round(nullptr);
  for (int64_t i = 0; i < rounds; ++i) round(&times);
  Times slowest;
  for (const auto& [name, mine] : times) {
    slowest[name].resize(mine.size());
    MPI_Reduce(mine.data(), slowest[name].data(), static_cast<int>(mine.size()), MPI_DOUBLE,
               MPI_MAX, 0, MPI_COMM_WORLD);
  }
  if (Rank() == 0) Print(bytes, rounds, slowest);
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

Options Parse(int argc, char** argv) {
  Options options;
  const std::map<std::string, std::function<void(const std::string&)>> known = {
      {"--bytes",
       [&](const std::string& value) {
         for (const std::string& each : Split(value)) options.bytes.push_back(std::stoll(each));
       }},
      {"--contenders", [&](const std::string& value) { options.contenders = Split(value); }},
      {"--tensors", [&](const std::string& value) { options.tensors = std::stoll(value); }},
      {"--seconds", [&](const std::string& value) { options.seconds = std::stod(value); }},
      {"--least-rounds",
       [&](const std::string& value) { options.least_rounds = std::stoll(value); }},
      {"--most-rounds", [&](const std::string& value) { options.most_rounds = std::stoll(value); }},
      {"--fusion-threshold",
       [&](const std::string& value) { options.fusion_threshold = std::stoll(value); }},
  };
  for (int i = 1; i < argc; i += 2) {
    const auto found = known.find(argv[i]);
    if (found == known.end() || i + 1 == argc) {
      Fail(std::string(argv[i]) + " is no option, or lacks a value");
    }
    found->second(argv[i + 1]);
  }
  for (const int64_t bytes : options.bytes) {
    if (bytes % (options.tensors * static_cast<int64_t>(sizeof(float))) != 0) {
      Fail("--bytes has to be a multiple of 4 bytes for each tensor");
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  // As the core asks for when it is the one to initialize MPI.
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  const Options options = Parse(argc, argv);
  const std::vector<Contender> contenders = Contenders(options);
  Check(adasum_init(nullptr));
  for (const int64_t bytes : options.bytes) Measure(options, contenders, bytes);
  Check(adasum_shutdown());
  MPI_Finalize();
  return 0;
}
