#include <cmath>
#include <utility>

#include "expected.h"
#include "placed.h"
#include "steps.h"

namespace core_test {

using adasum::Algorithm;
using adasum::DType;
using adasum::Op;
using adasum::ReduceOptions;

namespace {

// A power of two by which all vectors can be multiplied without that a result leaves the dtype's
// normal numbers; squares of float64 do.
int RandomExponent(Random& random, DType dtype) {
  const int largest = dtype == DType::kFloat16 ? 6 : dtype == DType::kFloat64 ? 1000 : 100;
  return random.OneIn(3) ? static_cast<int>(random.Between(-1, 1)) * largest : 0;
}

class Allreduce : public Step {
 public:
  Allreduce(Random& random, const World& world)
      : world_(world), options_(RandomReduceOptions(random)), in_place_(random.OneIn(3)) {
    inputs_.resize(world.size());
    const DType one_dtype = RandomDType(random);
    const bool mixed = random.OneIn(2);
    std::vector<Dims> shapes = RandomShapes(random, 6);
    if (random.OneIn(40)) {
      // More than a bucket takes, whatever their size.
      shapes.assign(1100, {3});
      options_.fusion_threshold = 4 << 20;
    }
    for (const Dims& dims : shapes) {
      const DType dtype = mixed ? RandomDType(random) : one_dtype;
      exponents_.push_back(RandomExponent(random, dtype));
      vectors_.push_back(RandomVectors(random, world.size(), CountOf(dims)));
      for (int rank = 0; rank < world.size(); ++rank) {
        const Vector values = Scaled(vectors_.back()[rank], std::ldexp(1.0, exponents_.back()));
        inputs_[rank].push_back(Tensor::Of(dtype, dims, values));
      }
    }
    given_ = inputs_;
    for (const Tensors& tensors : inputs_) outputs_.push_back(LikeOf(tensors));
  }

  const char* name() const override { return "allreduce"; }

  void Run(Place& place) override {
    Tensors& inputs = inputs_[place.rank];
    Tensors& outputs = in_place_ ? inputs : outputs_[place.rank];
    ReduceOptions options = options_;
    options.device = &place.device;
    Placed from(place.device, inputs), to(place.device, outputs);
    Placed& written = in_place_ ? from : to;
    place.communicator.Allreduce(SpecsOf(inputs), from.read(), written.write(), options,
                                 "allreduce");
    written.Return();
    if (in_place_) outputs_[place.rank] = inputs;
  }

  void Check() const override {
    for (int rank = 0; rank < world_.size(); ++rank) {
      Require(SameBytes(outputs_[rank], outputs_[0]), "the ranks' bits differ");
      Require(in_place_ || SameBytes(inputs_[rank], given_[rank]), "inputs have changed");
    }
    for (size_t t = 0; t < vectors_.size(); ++t) {
      const Tensor& output = outputs_[0][t];
      const Vector got = Scaled(output.Values(), std::ldexp(1.0, -exponents_[t]));
      CheckReduced(options_, world_, vectors_[t], got, output.dtype, 0,
                   "tensor " + std::to_string(t));
    }
  }

 private:
  const World& world_;
  ReduceOptions options_;
  const bool in_place_;
  std::vector<int> exponents_;                // of each tensor
  std::vector<std::vector<Vector>> vectors_;  // of each tensor, then rank
  std::vector<Tensors> inputs_, given_, outputs_;
};

// Any bytes, of any type.
Tensor RandomBytes(Random& random, Dims dims) {
  const bool is_other = random.OneIn(2);
  const DType dtype = is_other ? DType::kOther : RandomDType(random);
  const int64_t item_bytes = is_other ? random.Of<int64_t>({1, 3, 8, 16}) : ItemBytes(dtype);
  return Tensor::OfBytes(dtype, std::move(dims), item_bytes, random);
}

class Broadcast : public Step {
 public:
  Broadcast(Random& random, const World& world)
      : world_(world),
        root_(static_cast<int>(random.Below(world.size()))),
        in_place_(random.OneIn(2)) {
    Tensors of_root;
    for (const Dims& dims : RandomShapes(random, 4)) of_root.push_back(RandomBytes(random, dims));
    for (int rank = 0; rank < world.size(); ++rank) {
      inputs_.push_back(of_root);
      if (rank == root_ || random.OneIn(2)) continue;
      for (Tensor& tensor : inputs_.back()) {
        if (!tensor.data.empty()) tensor.data[random.Below(tensor.data.size())] ^= 4;
      }
    }
    given_ = inputs_;
    for (const Tensors& tensors : inputs_) outputs_.push_back(LikeOf(tensors));
    changed_.resize(world.size());
  }

  const char* name() const override { return "broadcast"; }

  void Run(Place& place) override {
    Tensors& inputs = inputs_[place.rank];
    Tensors& outputs = in_place_ ? inputs : outputs_[place.rank];
    changed_[place.rank] = place.communicator.Broadcast(SpecsOf(inputs), Read(inputs).data(),
                                                        Write(outputs).data(), root_, "");
    if (in_place_) outputs_[place.rank] = inputs;
  }

  void Check() const override {
    for (int rank = 0; rank < world_.size(); ++rank) {
      Require(SameBytes(outputs_[rank], given_[root_]), "a rank has other bytes than root");
      Require(changed_[rank] == !SameBytes(given_[rank], given_[root_]), "changed is wrong");
    }
  }

 private:
  const World& world_;
  const int root_;
  const bool in_place_;
  std::vector<Tensors> inputs_, given_, outputs_;
  std::vector<char> changed_;  // not bool: each rank writes its own
};

class Allgather : public Step {
 public:
  Allgather(Random& random, const World& world) : world_(world) {
    const Dims rest = random.Of<Dims>({{}, {3}, {1, 2}, {0}, {2, 0, 5}});
    const Tensor model = RandomBytes(random, {1});
    for (int rank = 0; rank < world.size(); ++rank) {
      Dims dims{random.OneIn(4) ? 0 : random.Below(random.OneIn(9) ? 5000 : 20)};
      dims.insert(dims.end(), rest.begin(), rest.end());
      inputs_.push_back(Tensor::OfBytes(model.dtype, dims, model.item_bytes, random));
    }
    rows_.resize(world.size());
    gathered_.resize(world.size());
  }

  const char* name() const override { return "allgather"; }

  void Run(Place& place) override {
    const Tensor& input = inputs_[place.rank];
    const int64_t row_bytes =
        CountOf({input.dims.begin() + 1, input.dims.end()}) * input.item_bytes;
    std::vector<char>& gathered = gathered_[place.rank];
    const auto allocate = [&](int64_t rows) {
      rows_[place.rank] = rows;
      gathered.resize(rows * row_bytes);
      return gathered.data();
    };
    place.communicator.Allgather(input.Spec(), input.data.data(), allocate, "");
  }

  void Check() const override {
    std::vector<char> all;
    int64_t rows = 0;
    for (const Tensor& input : inputs_) {
      all.insert(all.end(), input.data.begin(), input.data.end());
      rows += input.dims[0];
    }
    for (int rank = 0; rank < world_.size(); ++rank) {
      Require(rows_[rank] == rows && gathered_[rank] == all, "what was gathered is wrong");
    }
  }

 private:
  const World& world_;
  Tensors inputs_;  // of each rank
  std::vector<int64_t> rows_;
  std::vector<std::vector<char>> gathered_;
};

}  // namespace

ReduceOptions RandomReduceOptions(Random& random) {
  return {static_cast<Op>(random.OneIn(2) ? 0 : random.Below(3)),
          static_cast<Algorithm>(random.Below(4)),
          random.Of<int64_t>({0, 64, 5000, 64 << 10, 4 << 20, INT64_MAX})};
}

void CheckReduced(const ReduceOptions& options, const World& world,
                  const std::vector<Vector>& of_rank, const Vector& got, DType dtype, double added,
                  const std::string& what) {
  const Vector want = Expected(options.op, options.algorithm, world.host_of, of_rank);
  Require(got.size() == want.size(), what + " has another size");
  double norms = added;
  for (const Vector& vector : of_rank) norms += Norm(vector);
  // A rounding at every level of at most as many as there are ranks, which grows a little on its
  // way.
  const double allowed = 8 * world.size() * Precision(dtype) * norms;
  const double error = Norm(Difference(got, want));
  Require(error <= allowed,
          what + ", " + NameOf(dtype) + ", op " + std::to_string(static_cast<int>(options.op)) +
              ", algorithm " + std::to_string(static_cast<int>(options.algorithm)) +
              ", buckets of " + std::to_string(options.fusion_threshold) + ": the error is " +
              std::to_string(error) + " and may be " + std::to_string(allowed));
}

std::unique_ptr<Step> MakeAllreduce(Random& random, const World& world) {
  return std::make_unique<Allreduce>(random, world);
}

std::unique_ptr<Step> MakeBroadcast(Random& random, const World& world) {
  return std::make_unique<Broadcast>(random, world);
}

std::unique_ptr<Step> MakeAllgather(Random& random, const World& world) {
  return std::make_unique<Allgather>(random, world);
}

}  // namespace core_test
