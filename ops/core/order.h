// In which order many vectors become one.
//
// The tree is that of the paper's Algorithm 1 over the vectors' order. For a number of vectors that
// is no power of two, with p the largest power of two below it and r = number - p, vectors (0, 1),
// ..., (2r - 2, 2r - 1) are combined first; the p results are the leaves. So 3 give ((0, 1), 2) and
// 6 give (((0, 1), (2, 3)), (4, 5)). The line is the paper's section 4.2.3: (((0, 1), 2), 3).
#ifndef TF_ADASUM_OPS_CORE_ORDER_H_
#define TF_ADASUM_OPS_CORE_ORDER_H_

#include <vector>

namespace adasum {

enum class Order { kTree, kLine };

// The largest power of two that is not above the number.
inline int LeavesOfTree(int vectors) {
  int leaves = 1;
  while (leaves * 2 <= vectors) leaves *= 2;
  return leaves;
}

// Two places in a list of vectors; the combination takes the first one's place.
struct Step {
  int a;
  int b;
};

// The steps that lead to one vector in place 0: those of one level do not depend on each other.
inline std::vector<std::vector<Step>> Levels(Order order, int vectors) {
  std::vector<std::vector<Step>> levels;
  if (order == Order::kLine) {
    for (int i = 1; i < vectors; ++i) levels.push_back({{0, i}});
    return levels;
  }
  const int leaves = LeavesOfTree(vectors), pairs = vectors - leaves;
  std::vector<int> places;
  std::vector<Step> level;
  for (int leaf = 0; leaf < leaves; ++leaf) {
    places.push_back(leaf < pairs ? 2 * leaf : leaf + pairs);
    if (leaf < pairs) level.push_back({2 * leaf, 2 * leaf + 1});
  }
  if (!level.empty()) levels.push_back(level);
  for (; places.size() > 1;) {
    level.clear();
    std::vector<int> next;
    for (size_t i = 0; i < places.size(); i += 2) {
      level.push_back({places[i], places[i + 1]});
      next.push_back(places[i]);
    }
    levels.push_back(level);
    places = next;
  }
  return levels;
}

}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_ORDER_H_
