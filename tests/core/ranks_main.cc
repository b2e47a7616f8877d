// Runs the core's collectives on ranks that are threads, and holds every result against its
// definition: SECONDS [SEED [FIRST_CASE]]. Built for a sanitizer, which sees what results do not
// show; and for a GPU, where with DEVICE=cuda in the environment all tensors of reductions are
// there. Otherwise those of some cases are on the emulated device.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <string>
#include <thread>

#include "fake_nccl.h"
#include "ops/core/devices.h"
#include "steps.h"

namespace core_test {

namespace {

constexpr int kMostRanks = 9;
// A case takes much less than a second; but a machine may be busy.
constexpr unsigned kMostSeconds = 60;

// The watchdogs look all the time, and then do not tell: nobody answers.
constexpr adasum::Patience kPatience{0.04, 0};

char case_text[200];

void EndHangingCase(int) {
  constexpr char kText[] = "does not end\n";
  static_cast<void>(!write(STDERR_FILENO, case_text, std::strlen(case_text)));
  static_cast<void>(!write(STDERR_FILENO, kText, sizeof kText - 1));
  _exit(1);
}

bool UsesCuda() {
  static const char* const device = std::getenv("DEVICE");
  return device != nullptr && std::strcmp(device, "cuda") == 0;
}

std::unique_ptr<adasum::Device> MakeDevice() {
  return adasum::MakeDevice(
      {UsesCuda() ? ADASUM_CUDA : ADASUM_EMULATED, nullptr, nullptr, nullptr, nullptr});
}

World RandomWorld(Random& random, uint64_t number) {
  World world{{}, number / kMostRanks % 2 == 0, UsesCuda() || random.OneIn(3)};
  const int ranks = static_cast<int>(number % kMostRanks) + 1;
  const int64_t hosts = random.OneIn(2) ? 1 : random.Between(1, ranks);
  // One block of ranks after the other, or in any order.
  const bool blocks = random.OneIn(2);
  const int64_t block = (ranks + hosts - 1) / hosts;
  for (int rank = 0; rank < ranks; ++rank) {
    world.host_of.push_back(static_cast<int>(blocks ? rank / block : random.Below(hosts)));
  }
  return world;
}

std::unique_ptr<Step> RandomStep(Random& random, const World& world, int64_t number) {
  switch (random.Below(world.size() > 1 ? 12 : 10)) {
    case 0:
    case 1:
      return MakeBroadcast(random, world);
    case 2:
      return MakeAllgather(random, world);
    case 3:
    case 4:
      return MakeSync(random, world);
    case 5:
      return MakeUnevenSyncs(random, world);
    case 6:
      return MakeFlights(random, world, number);
    case 7:
      return MakeRefused(random, world);
    case 8:
      return MakePartition(random, world);
    case 10:
    case 11:
      return MakeDisagreement(random, world);
    default:
      return MakeAllreduce(random, world);
  }
}

using Counts = std::map<std::string, int64_t>;

void RunCase(uint64_t seed, uint64_t number, Counts& counts) {
  Random random(seed, number);
  const World world = RandomWorld(random, number);
  std::string hosts;
  for (const int host : world.host_of) hosts += " " + std::to_string(host);
  std::snprintf(case_text, sizeof case_text,
                "seed %llu, case %llu: hosts%s, %s: ", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(number), hosts.c_str(),
                world.on_device      ? "device"
                : world.share_memory ? "shared memory"
                                     : "messages");
  alarm(kMostSeconds);
  std::vector<std::unique_ptr<Step>> steps;
  const int64_t length = random.Between(1, 5);
  for (int64_t i = 0; i < length; ++i) steps.push_back(RandomStep(random, world, i));
  const bool aborts = world.size() > 1 && random.OneIn(6);
  if (aborts) steps.push_back(MakeAbort(random, world));

  // Messages from and into the emulated device's memory, by NCCL, or through the host's.
  const int64_t way = random.Below(3);
  const bool reads_devices = world.on_device && !UsesCuda() && way == 0;
  if (world.on_device && !UsesCuda()) {
    setenv("TF_ADASUM_DEVICE_TRANSPORT", way == 0 ? "direct" : way == 1 ? "nccl" : "staged", 1);
  }
  adasum::ThreadWorld joined(world.host_of, world.share_memory, reads_devices);
  adasum::ThreadWorld beside(world.host_of, world.share_memory);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const char* step_name = "joining";
      try {
        // What is there is given back before.
        std::unique_ptr<adasum::Device> device;
        if (world.on_device) device = MakeDevice();
        const std::shared_ptr<adasum::Transport> transport = joined.Join(rank);
        const auto watchdog = std::make_shared<adasum::Watchdog>(transport, kPatience, [] {});
        adasum::Communicator communicator(transport, watchdog);
        adasum::Flights flights(std::make_unique<adasum::Communicator>(beside.Join(rank), watchdog,
                                                                       adasum::Watchdog::kBeside));
        adasum::Device& where = device == nullptr ? adasum::HostDevice() : *device;
        Place place{rank, joined, communicator, flights, where};
        for (const auto& step : steps) {
          step_name = step->name();
          step->Run(place);
        }
        if (!aborts) communicator.Leave();
      } catch (const std::exception& error) {
        Fail("rank " + std::to_string(rank) + ", " + step_name + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& step : steps) {
    step->Check();
    ++counts[step->name()];
  }
  alarm(0);
}

}  // namespace

void Fail(const std::string& what) {
  std::fprintf(stderr, "%s%s\n", case_text, what.c_str());
  std::_Exit(1);
}

void Require(bool is_right, const std::string& what) {
  if (!is_right) Fail(what);
}

}  // namespace core_test

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  uint64_t number = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
  signal(SIGALRM, core_test::EndHangingCase);
  if (!core_test::UsesCuda()) adasum::nccl::Replace(&core_test::FakeNccl());
  core_test::Counts counts;
  const auto start = Clock::now();
  do {
    core_test::RunCase(seed, number++, counts);
  } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
  std::printf("seed %llu: %llu cases", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(number));
  for (const auto& [name, count] : counts) {
    std::printf(", %s %lld", name.c_str(), static_cast<long long>(count));
  }
  std::printf("\n");
}
