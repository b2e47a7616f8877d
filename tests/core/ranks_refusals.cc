#include <atomic>
#include <new>
#include <thread>
#include <utility>

#include "steps.h"

namespace core_test {

using adasum::Algorithm;
using adasum::DType;
using adasum::ErrorKind;
using adasum::Op;

namespace {

enum class Kind { kAllreduce, kSync, kBroadcast, kAllgather, kBarrier };

// One rank's call, of few tensors.
struct Arguments {
  Kind kind;
  adasum::ReduceOptions options;
  std::string name;
  int root = 0;
  Tensors tensors;
  double starts = 0.5;

  // Whether the results' memory is as it was.
  bool Call(adasum::Communicator& communicator) const {
    const std::vector<adasum::TensorSpec> specs = SpecsOf(tensors);
    const std::vector<const void*> inputs = Read(tensors);
    Tensors outputs = LikeOf(tensors), more_outputs = outputs;
    const Tensors before = outputs;
    switch (kind) {
      case Kind::kAllreduce:
        communicator.Allreduce(specs, inputs.data(), Write(outputs).data(), options, name);
        break;
      case Kind::kSync: {
        Tensors all_starts;
        for (const Tensor& tensor : tensors) {
          all_starts.push_back(
              Tensor::Of(tensor.dtype, tensor.dims, Vector(CountOf(tensor.dims), starts)));
        }
        const std::vector<const void*> read = Read(all_starts);
        const std::vector<void*> new_values = Write(outputs), new_starts = Write(more_outputs);
        const adasum::SyncTensors sync{
            specs, inputs.data(), read.data(), new_values.data(), new_starts.data(),
            {},    nullptr,       nullptr};
        communicator.Sync(sync, {options, true, false, false, 0}, name);
        break;
      }
      case Kind::kBroadcast:
        communicator.Broadcast(specs, inputs.data(), Write(outputs).data(), root, name);
        break;
      case Kind::kAllgather:
        communicator.Allgather(
            specs[0], inputs[0], [](int64_t) -> void* { throw std::bad_alloc(); }, name);
        break;
      case Kind::kBarrier:
        communicator.Barrier(name);
        break;
    }
    return SameBytes(outputs, before) && SameBytes(more_outputs, before);
  }
};

Arguments RandomArguments(Random& random) {
  Arguments arguments{
      static_cast<Kind>(random.Below(5)), RandomReduceOptions(random), "name", 0, {}, 0.5};
  const DType dtype = RandomDType(random);
  const int64_t size = random.OneIn(4) ? 30'000 : random.Between(1, 9);
  for (int64_t t = random.Between(1, 3); t > 0; --t) {
    arguments.tensors.push_back(Tensor::Of(dtype, {size, 2}, Vector(2 * size, 0.25)));
  }
  return arguments;
}

// The same with one difference that counts.
Arguments Changed(Random& random, Arguments arguments) {
  const Kind kind = arguments.kind;
  const bool reduces = kind == Kind::kAllreduce || kind == Kind::kSync;
  Tensor& tensor = arguments.tensors.back();
  while (true) {
    switch (random.Below(11)) {
      case 0:
        arguments.name += random.OneIn(2) ? "x" : std::string(2000, 'x');
        return arguments;
      case 1:
        arguments.kind = static_cast<Kind>((static_cast<int>(kind) + random.Between(1, 4)) % 5);
        return arguments;
      case 2:
        if (!reduces) continue;
        arguments.options.op = static_cast<Op>((static_cast<int>(arguments.options.op) + 1) % 3);
        return arguments;
      case 3:
        if (!reduces) continue;
        arguments.options.algorithm =
            static_cast<Algorithm>((static_cast<int>(arguments.options.algorithm) + 1) % 4);
        return arguments;
      case 4:
        if (!reduces) continue;
        arguments.options.fusion_threshold ^= 1;
        return arguments;
      case 5:
        if (kind != Kind::kBroadcast) continue;
        arguments.root = 1;
        return arguments;
      case 6:
        if (kind != Kind::kSync) continue;
        arguments.starts = 0.75;
        return arguments;
      case 7:
        if (kind == Kind::kBarrier || (kind == Kind::kAllgather && arguments.tensors.size() > 1)) {
          continue;
        }
        tensor = Tensor::Of(tensor.dtype == DType::kFloat64 ? DType::kFloat32 : DType::kFloat64,
                            tensor.dims, tensor.Values());
        return arguments;
      case 8:
        if (kind == Kind::kBarrier || (kind == Kind::kAllgather && arguments.tensors.size() > 1)) {
          continue;
        }
        tensor = Tensor::Of(tensor.dtype, {CountOf(tensor.dims)}, tensor.Values());
        return arguments;
      case 9:
        if (kind == Kind::kBarrier || kind == Kind::kAllgather) continue;
        arguments.tensors.push_back(tensor);
        return arguments;
      case 10:
        if (kind == Kind::kBarrier || (kind == Kind::kAllgather && arguments.tensors.size() > 1)) {
          continue;
        }
        tensor.name = "another name";
        return arguments;
    }
  }
}

class Disagreement : public Step {
 public:
  Disagreement(Random& random, const World& world) : arguments_(world.size()) {
    const Arguments common = RandomArguments(random);
    const Arguments other = Changed(random, common);
    for (Arguments& arguments : arguments_) arguments = random.OneIn(3) ? other : common;
    arguments_[random.Below(world.size() - 1)] = common;
    arguments_.back() = other;
  }

  const char* name() const override { return "disagreement"; }

  void Run(Place& place) override {
    ExpectError(ErrorKind::kDisagreement, "a disagreement",
                [&] { arguments_[place.rank].Call(place.communicator); });
  }

  void Check() const override {}

 private:
  std::vector<Arguments> arguments_;
};

class Refused : public Step {
 public:
  Refused(Random& random, const World& world) : arguments_(RandomArguments(random)) {
    switch (random.Below(4)) {
      case 0:
        arguments_.kind = Kind::kBroadcast;
        arguments_.root = random.Of<int>({-1, world.size(), INT32_MAX, INT32_MIN});
        break;
      case 1:
        arguments_.kind = Kind::kAllgather;
        arguments_.tensors = {Tensor::Of(DType::kFloat32, {}, {1.0})};
        break;
      default:
        arguments_.kind = random.OneIn(2) ? Kind::kSync : Kind::kAllreduce;
        // Moved, but not added.
        arguments_.tensors.push_back(Tensor::OfBytes(DType::kOther, {5}, 1, random));
    }
  }

  const char* name() const override { return "refused"; }

  void Run(Place& place) override {
    ExpectError(ErrorKind::kInvalidArgument, "what is to be refused",
                [&] { arguments_.Call(place.communicator); });
  }

  void Check() const override {}

 private:
  Arguments arguments_;
};

class Abort : public Step {
 public:
  Abort(Random& random, const World& world)
      : failing_(static_cast<int>(random.Below(world.size()))),
        in_the_call_(random.OneIn(2)),
        arguments_(RandomArguments(random)) {
    if (in_the_call_) arguments_.kind = Kind::kAllgather;
  }

  const char* name() const override { return "abort"; }

  void Run(Place& place) override {
    if (place.rank == failing_) {
      if (in_the_call_) {
        try {
          arguments_.Call(place.communicator);
        } catch (const std::bad_alloc&) {
        }
      }
      // All have come out of the calls before.
      while (arrived_ + 1 < place.world.size()) std::this_thread::yield();
      place.world.Abort();
      return;
    }
    ++arrived_;
    ExpectError(ErrorKind::kTransport, "a call after another rank's failure", [&] {
      const Tensor& tensor = arguments_.tensors[0];
      std::vector<char> gathered(tensor.data.size() * 9);
      if (in_the_call_) {
        place.communicator.Allgather(
            tensor.Spec(), tensor.data.data(), [&](int64_t) { return gathered.data(); },
            arguments_.name);
      } else {
        arguments_.Call(place.communicator);
      }
    });
  }

  void Check() const override {}

 private:
  const int failing_;
  const bool in_the_call_;
  Arguments arguments_;
  std::atomic<int> arrived_{0};
};

}  // namespace

std::unique_ptr<Step> MakeDisagreement(Random& random, const World& world) {
  return std::make_unique<Disagreement>(random, world);
}

std::unique_ptr<Step> MakeRefused(Random& random, const World& world) {
  return std::make_unique<Refused>(random, world);
}

std::unique_ptr<Step> MakeAbort(Random& random, const World& world) {
  return std::make_unique<Abort>(random, world);
}

}  // namespace core_test
