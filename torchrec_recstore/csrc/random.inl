// Random numbers of rows; row_types.inl includes this file.

#ifdef RECSTORE_MULTIPLY
// 64-bit lanes. The philox words are in their low halves, so that a product needs no shuffle. The high halves may hold
// anything.
constexpr int kWideLanes = kWidth >= 8 ? 4 : 2;
typedef uint64_t Wide __attribute__((vector_size(kWideLanes * sizeof(uint64_t)), may_alias));

inline Wide product(Wide a, uint64_t b) {
  return (Wide)RECSTORE_MULTIPLY(a, Wide{} + b);
}

// The low halves of the lanes.
typedef uint32_t Words __attribute__((vector_size(kWideLanes * sizeof(uint32_t)), may_alias));

// Writes the words of philox_blocks<kBlocks>() (philox.h), (4, kBlocks).
template <int kBlocks>
inline void random_blocks(uint64_t key, uint64_t id, uint32_t block, uint32_t* out) {
  constexpr int kParts = kBlocks / kWideLanes;
  Wide c0[kParts], c1[kParts], c2[kParts], c3[kParts];
  for (int part = 0; part < kParts; ++part) {
    c0[part] = Wide{} + (id & 0xFFFFFFFFu);
    c1[part] = Wide{} + (id >> 32);
    uint64_t blocks[kWideLanes];
    for (int lane = 0; lane < kWideLanes; ++lane) blocks[lane] = block + static_cast<uint32_t>(part * kWideLanes + lane);
    __builtin_memcpy(&c2[part], blocks, sizeof(blocks));
    c3[part] = Wide{};
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int part = 0; part < kParts; ++part) {
      const Wide p0 = product(c0[part], 0xD2511F53u), p1 = product(c2[part], 0xCD9E8D57u);
      c0[part] = (p1 >> 32) ^ c1[part] ^ (Wide{} + k0);
      c1[part] = p1;
      c2[part] = (p0 >> 32) ^ c3[part] ^ (Wide{} + k1);
      c3[part] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const Wide* const words[4] = {c0, c1, c2, c3};
  for (int word = 0; word < 4; ++word) {
    for (int part = 0; part < kParts; ++part) {
      const Words low = __builtin_convertvector(words[word][part], Words);
      __builtin_memcpy(out + word * kBlocks + part * kWideLanes, &low, sizeof(low));
    }
  }
}
#else
// The compiler vectorises philox_blocks() for NEON, but multiplies lanes of 64 bits one at a time.
template <int kBlocks>
inline void random_blocks(uint64_t key, uint64_t id, uint32_t block, uint32_t* out) {
  philox_blocks<kBlocks>(key, id, block, reinterpret_cast<uint32_t(*)[kBlocks]>(out));
}
#endif

constexpr int64_t kRandomRun = 64;  // columns for which a call of random_blocks() draws numbers

// Draws 32 bits for each column of one row. A number depends only on the key, the id and the global column.
inline void random_numbers(uint64_t key, int64_t id, int64_t column_begin, int64_t columns, uint32_t* out) {
  const int64_t column_end = column_begin + columns;
  for (int64_t first = column_begin / kRandomRun * kRandomRun; first < column_end; first += kRandomRun) {
    const auto draw = [=](uint32_t* to) { random_blocks<16>(key, static_cast<uint64_t>(id), static_cast<uint32_t>(first / 4), to); };
    if (first >= column_begin && first + kRandomRun <= column_end) {
      draw(out + (first - column_begin));
      continue;
    }
    uint32_t numbers[kRandomRun];
    draw(numbers);
    const int64_t begin = first > column_begin ? first : column_begin;
    const int64_t end = first + kRandomRun < column_end ? first + kRandomRun : column_end;
    __builtin_memcpy(out + (begin - column_begin), numbers + (begin - first), static_cast<size_t>(end - begin) * sizeof(uint32_t));
  }
}

// The terms of splitmix32's sequence for the columns of one run.
constexpr uint32_t kTerm = 0x9E3779B9u;  // 2**32 divided by the golden ratio
struct Terms {
  uint32_t lanes[kLanes] = {};
  constexpr Terms() {
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<uint32_t>(i) * kTerm;
  }
};
constexpr Terms kTerms;

// The sequence of splitmix32 before its last step, which leaves the high 16 bits as they are. Philox would take four
// times as many instructions, and the rounding of 8-bit rows and of states does not need its quality.
RECSTORE_INLINE Bits scrambled(Bits x) {
  x = (x ^ x >> 16) * 0x21F0AAADu;
  return (x ^ x >> 15) * 0x735A2D97u;
}

// Draws 16 bits for each column of one row, by splitmix32. A number depends only on the key, the id and the global column.
class RandomHalves {
 public:
  RECSTORE_INLINE RandomHalves(uint64_t key, int64_t id, int64_t column_begin)
      : first_(static_cast<uint32_t>(mix(key ^ static_cast<uint64_t>(id))) + static_cast<uint32_t>(column_begin) * kTerm) {}

  // The numbers of the columns from d on.
  RECSTORE_INLINE Lanes<int32_t> at(int64_t d) const {
    const uint32_t first = first_ + static_cast<uint32_t>(d) * kTerm;
    return each<Lanes<int32_t>>([=](Bits term) { return (Register<int32_t>)(scrambled(term + first) >> 16); },
                                load_lanes<Lanes<uint32_t>>(kTerms.lanes));
  }

 private:
  const uint32_t first_;
};
