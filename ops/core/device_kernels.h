// The arithmetic on long vectors as a GPU does it: a launch works on the operations of one kind for
// many tensors, in blocks of threads that each take a piece of one tensor. What a block finds out,
// such as sums, the host adds up in the blocks' order, so the bits are the same each time.
//
// Written so that it is C++ for the host, too: accelerator_emulated.cc runs the same bodies, with
// loops for the blocks and threads.
//
// As on the CPU, values are combined in float64 whatever the dtype, and without fused
// multiply-adds, so that all but the order of sums is the same to the bit.
#ifndef TF_ADASUM_OPS_CORE_DEVICE_KERNELS_H_
#define TF_ADASUM_OPS_CORE_DEVICE_KERNELS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace adasum {
namespace device {

constexpr int kThreads = 256;
constexpr int64_t kBlockBytes = 64 << 10;  // of each operand of a block
constexpr int64_t kVectorBytes = 16;       // what a thread reads at a time

enum class Kind : int32_t {
  kDot3,
  kMaxAbs,
  kInspect,
  kCompare,
  kFirstOfMaps,
  kCombine = kFirstOfMaps,
  kAverage,
  kDelta,  // the combination with factors 1 and -1
  kApply,  // and that with 1 and 1
  kCopy,
  kZero  // a copy of nothing
};

// On n elements of vectors. What a kind does not need is null or 0.
struct Operation {
  const void* a;
  const void* b;
  void* out;
  int64_t n;
  Coefficients c;  // also the scales of dot3, and the weights of average as factors
};

// What a block of threads works on.
struct Block {
  int32_t operation;
  int32_t piece;  // so many times kBlockBytes from its beginning
};

// What a block finds out: sums or a maximum, as doubles; or counts and a checksum.
struct Finding {
  uint64_t words[3];
};

struct Launch {
  Kind kind;
  DType dtype;
  int32_t blocks;
  const Operation* operations;
  const Block* of_block;
  Finding* findings;  // of each block; not for maps
};

template <typename T>
ADASUM_ALWAYS_INLINE double Load(T value) {
  return static_cast<double>(value);
}

template <typename T>
ADASUM_ALWAYS_INLINE T Store(double value) {
  return T(static_cast<std::conditional_t<std::is_same_v<T, double>, double, float>>(value));
}

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kItems = kVectorBytes / sizeof(T);
  T items[kItems];
};

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 2, uint16_t,
                                std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// The elements that one block works on.
struct Piece {
  int64_t begin;
  int64_t end;
};

template <typename T>
ADASUM_ALWAYS_INLINE Piece PieceOf(const Operation& operation, const Block& block) {
  constexpr int64_t kItems = kBlockBytes / static_cast<int64_t>(sizeof(T));
  const int64_t begin = block.piece * kItems;
  return {begin, begin + kItems < operation.n ? begin + kItems : operation.n};
}

ADASUM_ALWAYS_INLINE bool IsAligned(const Operation& operation) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(operation.a) |
                        reinterpret_cast<uintptr_t>(operation.b) |
                        reinterpret_cast<uintptr_t>(operation.out);
  return all % kVectorBytes == 0;
}

// Calls visit(i, a[i], b[i]) for a thread's elements: vectors where the memory allows it, and what
// is left one by one. Operands that are null are read as zeros.
template <typename T, typename Visit>
ADASUM_ALWAYS_INLINE void VisitElements(const Operation& operation, Piece piece, int thread,
                                        const Visit& visit) {
  using V = Vector<T>;
  const T* a = static_cast<const T*>(operation.a);
  const T* b = static_cast<const T*>(operation.b);
  int64_t begin = piece.begin;
  if (IsAligned(operation)) {
    const int64_t vectors = (piece.end - piece.begin) / V::kItems;
    for (int64_t v = thread; v < vectors; v += kThreads) {
      const int64_t at = piece.begin + v * V::kItems;
      V x{}, y{};
      if (a != nullptr) x = *reinterpret_cast<const V*>(a + at);
      if (b != nullptr) y = *reinterpret_cast<const V*>(b + at);
      for (int i = 0; i < V::kItems; ++i) visit(at + i, x.items[i], y.items[i]);
    }
    begin += vectors * V::kItems;
  }
  for (int64_t i = begin + thread; i < piece.end; i += kThreads) {
    visit(i, a == nullptr ? T{} : a[i], b == nullptr ? T{} : b[i]);
  }
}

// out[i] = map(a[i], b[i]) for a thread's elements.
template <typename T, typename Map>
ADASUM_ALWAYS_INLINE void MapElements(const Operation& operation, Piece piece, int thread,
                                      const Map& map) {
  using V = Vector<T>;
  const T* a = static_cast<const T*>(operation.a);
  const T* b = static_cast<const T*>(operation.b);
  T* out = static_cast<T*>(operation.out);
  int64_t begin = piece.begin;
  if (IsAligned(operation)) {
    const int64_t vectors = (piece.end - piece.begin) / V::kItems;
    for (int64_t v = thread; v < vectors; v += kThreads) {
      const int64_t at = piece.begin + v * V::kItems;
      V x{}, y{}, z;
      if (a != nullptr) x = *reinterpret_cast<const V*>(a + at);
      if (b != nullptr) y = *reinterpret_cast<const V*>(b + at);
      for (int i = 0; i < V::kItems; ++i) z.items[i] = map(x.items[i], y.items[i]);
      *reinterpret_cast<V*>(out + at) = z;
    }
    begin += vectors * V::kItems;
  }
  for (int64_t i = begin + thread; i < piece.end; i += kThreads) {
    out[i] = map(a == nullptr ? T{} : a[i], b == nullptr ? T{} : b[i]);
  }
}

// The maps.

template <Kind kKind, typename T>
ADASUM_ALWAYS_INLINE void MapThread(const Operation& operation, const Block& block, int thread) {
  const Piece piece = PieceOf<T>(operation, block);
  const Coefficients c = operation.c;
  if constexpr (kKind == Kind::kCombine && std::is_same_v<T, double>) {
    MapElements<T>(operation, piece, thread, [c](T x, T y) {
      return (x * c.scale_a * c.factor_a + y * c.scale_b * c.factor_b) * c.scale;
    });
  } else if constexpr (kKind == Kind::kCombine) {
    MapElements<T>(operation, piece, thread,
                   [c](T x, T y) { return Store<T>(Load(x) * c.factor_a + Load(y) * c.factor_b); });
  } else if constexpr (kKind == Kind::kAverage) {
    MapElements<T>(operation, piece, thread, [c](T x, T y) {
      const double a = Load(x), b = Load(y);
      return a == b ? x : Store<T>(a * c.factor_a + b * c.factor_b);
    });
  } else {
    MapElements<T>(operation, piece, thread, [](T x, T) { return x; });  // zeros where a is null
  }
}

// What threads find out, and how two findings become one.

template <typename T>
ADASUM_ALWAYS_INLINE bool IsFinite(T value) {
  const double wide = Load(value);
  return wide - wide == 0;
}

// Mixes an element's bits with its place, so that a sum over all tells one tensor from another in
// whatever order it is made.
ADASUM_ALWAYS_INLINE uint64_t Mix(uint64_t bits, int64_t place) {
  uint64_t z = bits + static_cast<uint64_t>(place + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
  return z ^ (z >> 32);
}

template <Kind kKind, typename T>
ADASUM_ALWAYS_INLINE Finding FindThread(const Operation& operation, const Block& block,
                                        int thread) {
  const Piece piece = PieceOf<T>(operation, block);
  if constexpr (kKind == Kind::kDot3) {
    const Coefficients c = operation.c;
    double ab = 0, aa = 0, bb = 0;
    VisitElements<T>(operation, piece, thread, [&](int64_t, T x, T y) {
      double a = Load(x), b = Load(y);
      if constexpr (std::is_same_v<T, double>) {
        a *= c.scale_a;
        b *= c.scale_b;
      }
      ab += a * b;
      aa += a * a;
      bb += b * b;
    });
    return {{BitCast<uint64_t>(ab), BitCast<uint64_t>(aa), BitCast<uint64_t>(bb)}};
  } else if constexpr (kKind == Kind::kMaxAbs) {
    double largest = 0;
    VisitElements<T>(operation, piece, thread, [&](int64_t, T x, T) {
      const double value = Load(x), magnitude = value < 0 ? -value : value;
      if (magnitude > largest) largest = magnitude;  // not where it is no number
    });
    return {{BitCast<uint64_t>(largest), 0, 0}};
  } else if constexpr (kKind == Kind::kInspect) {
    uint64_t not_finite = 0, nonzero = 0, checksum = 0;
    VisitElements<T>(operation, piece, thread, [&](int64_t i, T value, T start) {
      // Without a start, the value is the change.
      const bool is_change = operation.b == nullptr;
      const T change = is_change ? value : Store<T>(Load(value) - Load(start));
      not_finite += IsFinite(change) ? 0 : 1;
      nonzero += BitCast<Bits<T>>(change) != 0 ? 1 : 0;
      if (!is_change) checksum += Mix(BitCast<Bits<T>>(start), i);
    });
    return {{not_finite, nonzero, checksum}};
  } else {  // kCompare
    uint64_t differ = 0, nonzero = 0;
    VisitElements<T>(operation, piece, thread, [&](int64_t, T x, T y) {
      differ += BitCast<Bits<T>>(x) != BitCast<Bits<T>>(y) ? 1 : 0;
      nonzero += BitCast<Bits<T>>(x) != 0 ? 1 : 0;
    });
    return {{differ, nonzero, 0}};
  }
}

template <Kind kKind>
ADASUM_ALWAYS_INLINE void AddTo(Finding& sum, const Finding& other) {
  for (int i = 0; i < 3; ++i) {
    if constexpr (kKind == Kind::kDot3 || kKind == Kind::kMaxAbs) {
      const double x = BitCast<double>(sum.words[i]), y = BitCast<double>(other.words[i]);
      const bool adds = kKind == Kind::kDot3;
      sum.words[i] = BitCast<uint64_t>(adds ? x + y : (y > x ? y : x));
    } else {
      sum.words[i] += other.words[i];
    }
  }
}

// A step of the sum over a block's threads; between two of them all threads have to be done.
template <Kind kKind>
ADASUM_ALWAYS_INLINE void FoldThread(Finding* of_thread, int thread, int distance) {
  if (thread < distance) AddTo<kKind>(of_thread[thread], of_thread[thread + distance]);
}

// Calls body(std::integral_constant<Kind, kind>(), T()) for a kernel and the type of its elements.
// Some kinds share a kernel, and where only bits count, dtypes of one size do.
template <Kind kKind, typename BFloat16OrBits, typename Body>
void WithDType(DType dtype, const Body& body) {
  using Constant = std::integral_constant<Kind, kKind>;
  switch (dtype) {
    case DType::kFloat16:
      return body(Constant(), Float16());
    case DType::kBFloat16:
      return body(Constant(), BFloat16OrBits());
    case DType::kFloat32:
      return body(Constant(), float());
    case DType::kFloat64:
      return body(Constant(), double());
    default:
      ThrowNoArithmetic();
  }
}

template <typename Body>
void WithKindAndDType(const Launch& launch, const Body& body) {
  switch (launch.kind) {
    case Kind::kDot3:
      return WithDType<Kind::kDot3, BFloat16>(launch.dtype, body);
    case Kind::kMaxAbs:
      // Other dtypes' squares are in range, so nobody asks.
      if (launch.dtype != DType::kFloat64) ThrowNoArithmetic();
      return body(std::integral_constant<Kind, Kind::kMaxAbs>(), double());
    case Kind::kInspect:
      return WithDType<Kind::kInspect, BFloat16>(launch.dtype, body);
    case Kind::kCompare:
      return WithDType<Kind::kCompare, Float16>(launch.dtype, body);
    case Kind::kCombine:
    case Kind::kDelta:
    case Kind::kApply:
      return WithDType<Kind::kCombine, BFloat16>(launch.dtype, body);
    case Kind::kAverage:
      return WithDType<Kind::kAverage, BFloat16>(launch.dtype, body);
    case Kind::kCopy:
    case Kind::kZero:
      return WithDType<Kind::kCopy, Float16>(launch.dtype, body);
  }
}

}  // namespace device
}  // namespace adasum

#endif  // TF_ADASUM_OPS_CORE_DEVICE_KERNELS_H_
