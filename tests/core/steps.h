// The collective calls of a test: each is drawn at random, made by the thread of every rank, and
// checked when all of them are done.
#ifndef TF_ADASUM_TESTS_CORE_STEPS_H_
#define TF_ADASUM_TESTS_CORE_STEPS_H_

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ops/core/communicator.h"
#include "ops/core/error.h"
#include "ops/core/flights.h"
#include "ops/core/transport_threads.h"
#include "values.h"

namespace core_test {

struct World {
  std::vector<int> host_of;
  bool share_memory;
  bool on_device = false;  // the tensors of reductions
  int size() const { return static_cast<int>(host_of.size()); }
  size_t hosts() const { return std::set<int>(host_of.begin(), host_of.end()).size(); }
};

// Where a rank's thread stands.
struct Place {
  int rank;
  adasum::ThreadWorld& world;
  adasum::Communicator& communicator;
  adasum::Flights& flights;
  adasum::Device& device;  // where the tensors of reductions are
};

class Step {
 public:
  virtual ~Step() = default;
  virtual const char* name() const = 0;
  virtual void Run(Place& place) = 0;
  virtual void Check() const = 0;
};

std::unique_ptr<Step> MakeAllreduce(Random& random, const World& world);
std::unique_ptr<Step> MakeBroadcast(Random& random, const World& world);
std::unique_ptr<Step> MakeAllgather(Random& random, const World& world);
std::unique_ptr<Step> MakeSync(Random& random, const World& world);
// Ranks that come to their last sync at different times.
std::unique_ptr<Step> MakeUnevenSyncs(Random& random, const World& world);
// number: one that no other step has.
std::unique_ptr<Step> MakeFlights(Random& random, const World& world, int64_t number);
// A partitioned optimizer's step; of its own communicators.
std::unique_ptr<Step> MakePartition(Random& random, const World& world);
// Ranks that make different calls; for two or more.
std::unique_ptr<Step> MakeDisagreement(Random& random, const World& world);
// What is wrong on all ranks alike.
std::unique_ptr<Step> MakeRefused(Random& random, const World& world);
// One rank fails: nothing can come after it. For two or more.
std::unique_ptr<Step> MakeAbort(Random& random, const World& world);

// Ends the program, with what is to be known to have the same again.
[[noreturn]] void Fail(const std::string& what);
void Require(bool is_right, const std::string& what);

template <typename Call>
void ExpectError(adasum::ErrorKind kind, const std::string& what, Call call) {
  try {
    call();
  } catch (const adasum::Error& error) {
    Require(error.kind() == kind && error.what()[0] != 0, what + " ended with: " + error.what());
    return;
  }
  Fail(what + " was no error");
}

adasum::ReduceOptions RandomReduceOptions(Random& random);
// Holds one rank's result of a reduction against the definition. added: of what was added to the
// result before it was rounded, the norm.
void CheckReduced(const adasum::ReduceOptions& options, const World& world,
                  const std::vector<Vector>& of_rank, const Vector& got, adasum::DType dtype,
                  double added, const std::string& what);

}  // namespace core_test

#endif  // TF_ADASUM_TESTS_CORE_STEPS_H_
