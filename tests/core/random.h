// Random numbers that are the same with every compiler.
#ifndef TF_ADASUM_TESTS_CORE_RANDOM_H_
#define TF_ADASUM_TESTS_CORE_RANDOM_H_

#include <cstdint>
#include <vector>

namespace core_test {

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  // Those of one of many cases.
  Random(uint64_t seed, uint64_t number) : Random(seed) { state_ = Next() ^ Random(number).Next(); }

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t Below(int64_t n) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(n)); }
  int64_t Between(int64_t first, int64_t last) { return first + Below(last - first + 1); }
  bool OneIn(int64_t n) { return Below(n) == 0; }
  template <typename T>
  const T& Of(const std::vector<T>& choices) {
    return choices[Below(static_cast<int64_t>(choices.size()))];
  }

 private:
  uint64_t state_;
};

}  // namespace core_test

#endif  // TF_ADASUM_TESTS_CORE_RANDOM_H_
