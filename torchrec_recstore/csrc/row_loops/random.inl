// Random numbers of rows; row_types.inl includes this file.

#ifdef RECSTORE_MULTIPLY
// 64-bit lanes. The philox words are in their low halves, so that a product needs no shuffle. The high halves may hold
// anything.
constexpr int kWideLanes = kWidth / 2;
typedef uint64_t Wide __attribute__((vector_size(kWideLanes * sizeof(uint64_t)), may_alias));

inline Wide product(Wide a, uint64_t b) { return (Wide)RECSTORE_MULTIPLY(a, Wide{} + b); }

// The low halves of the lanes.
typedef uint32_t Words __attribute__((vector_size(kWideLanes * sizeof(uint32_t)), may_alias));

// The words of blocks of philox_blocks() (philox.h): those of the first part are `blocks`, and each part has the next
// ones. One part alone waits for each product, and more than two need more registers than there are without AVX-512.
template <int kParts>
RECSTORE_INLINE void philox_parts(uint64_t key, uint64_t id, Wide blocks, Wide (&c)[4][kParts]) {
  for (int part = 0; part < kParts; ++part) {
    c[0][part] = Wide{} + (id & 0xFFFFFFFFu);
    c[1][part] = Wide{} + (id >> 32);
    c[2][part] = blocks + static_cast<uint64_t>(part * kWideLanes);
    c[3][part] = Wide{};
  }
  Wide k0 = Wide{} + (key & 0xFFFFFFFFu), k1 = Wide{} + (key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int part = 0; part < kParts; ++part) {
      const Wide p0 = product(c[0][part], 0xD2511F53u), p1 = product(c[2][part], 0xCD9E8D57u);
      c[0][part] = (p1 >> 32) ^ c[1][part] ^ k0;
      c[1][part] = p1;
      c[2][part] = (p0 >> 32) ^ c[3][part] ^ k1;
      c[3][part] = p0;
    }
    k0 += uint64_t{0x9E3779B9u};
    k1 += uint64_t{0xBB67AE85u};
  }
}

// Writes the words of philox_blocks<kBlocks>(), (4, kBlocks).
template <int kBlocks>
inline void random_blocks(uint64_t key, uint64_t id, uint32_t block, uint32_t* out) {
  constexpr int kParts = 2;
  static_assert(kBlocks % (kParts * kWideLanes) == 0, "whole registers");
  Wide blocks{};
  for (int lane = 0; lane < kWideLanes; ++lane) blocks[lane] = static_cast<uint64_t>(lane);
  for (int begin = 0; begin < kBlocks; begin += kParts * kWideLanes) {
    Wide c[4][kParts];
    philox_parts(key, id, blocks + (uint64_t{block} + static_cast<uint64_t>(begin)), c);
    for (int word = 0; word < 4; ++word) {
      for (int part = 0; part < kParts; ++part) {
        const Words low = __builtin_convertvector(c[word][part], Words);
        __builtin_memcpy(out + word * kBlocks + begin + part * kWideLanes, &low, sizeof(low));
      }
    }
  }
}

constexpr int64_t kShortRun = 4 * kWideLanes, kLongRun = 2 * kShortRun;

// Writes low + width * u for kRun columns from `first` on, a multiple of kShortRun. u has 24 bits, which fit a float
// exactly, so that the value is the same on every processor.
template <int64_t kRun>
inline void draw_uniform(uint64_t key, uint64_t id, int64_t first, float low, float width, float* out) {
  constexpr int kParts = kRun / kShortRun;
  // The next lane has a block of the second half, so that words of one block lie side by side after RECSTORE_UNPACK_LOW
  // and RECSTORE_UNPACK_HIGH, which interleave the 64-bit lanes within each 128 bits.
  Wide blocks{};
  for (int lane = 0; lane < kWideLanes; ++lane) {
    blocks[lane] = static_cast<uint64_t>(lane / 2 + lane % 2 * (kWideLanes / 2));
  }
  Wide c[4][kParts];
  philox_parts(key, id, blocks + static_cast<uint64_t>(first / 4), c);
  for (int part = 0; part < kParts; ++part) {
    const Wide words01 = (c[0][part] & 0xFFFFFFFFu) | c[1][part] << 32,
               words23 = (c[2][part] & 0xFFFFFFFFu) | c[3][part] << 32;
    const auto store = [&](Register<uint32_t> words, int half) {
      const auto fraction = __builtin_convertvector((Register<int32_t>)(words >> 8), Register<float>) * 0x1p-24f;
      store_lanes(out + (2 * part + half) * kWidth, low + width * fraction);
    };
    store((Register<uint32_t>)RECSTORE_UNPACK_LOW(words01, words23), 0);
    store((Register<uint32_t>)RECSTORE_UNPACK_HIGH(words01, words23), 1);
  }
}
#else
// The compiler vectorises philox_blocks() for NEON, but multiplies lanes of 64 bits one at a time.
template <int kBlocks>
inline void random_blocks(uint64_t key, uint64_t id, uint32_t block, uint32_t* out) {
  philox_blocks<kBlocks>(key, id, block, reinterpret_cast<uint32_t (*)[kBlocks]>(out));
}

constexpr int64_t kShortRun = 16, kLongRun = 64;

template <int64_t kRun>
inline void draw_uniform(uint64_t key, uint64_t id, int64_t first, float low, float width, float* out) {
  uint32_t words[4][kRun / 4];
  philox_blocks<kRun / 4>(key, id, static_cast<uint32_t>(first / 4), words);
  for (int block = 0; block < kRun / 4; ++block) {
    for (int w = 0; w < 4; ++w) {
      out[block * 4 + w] = low + width * (static_cast<float>(static_cast<int32_t>(words[w][block] >> 8)) * 0x1p-24f);
    }
  }
}
#endif

constexpr int64_t kRandomRun = 64;  // columns for which a call of random_blocks() draws numbers

// Draws 32 bits for each column of one row. A number depends only on the key, the id and the global column.
inline void random_numbers(uint64_t key, int64_t id, int64_t column_begin, int64_t columns, uint32_t* out) {
  const int64_t column_end = column_begin + columns;
  for (int64_t first = column_begin / kRandomRun * kRandomRun; first < column_end; first += kRandomRun) {
    const auto draw = [=](uint32_t* to) {
      random_blocks<16>(key, static_cast<uint64_t>(id), static_cast<uint32_t>(first / 4), to);
    };
    if (first >= column_begin && first + kRandomRun <= column_end) {
      draw(out + (first - column_begin));
      continue;
    }
    uint32_t numbers[kRandomRun];
    draw(numbers);
    const int64_t begin = first > column_begin ? first : column_begin;
    const int64_t end = first + kRandomRun < column_end ? first + kRandomRun : column_end;
    __builtin_memcpy(out + (begin - column_begin), numbers + (begin - first),
                     static_cast<size_t>(end - begin) * sizeof(uint32_t));
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

// Draws 16 bits for each column of one row, by splitmix32. A number depends only on the key, the id and the global
// column.
class RandomHalves {
 public:
  RECSTORE_INLINE RandomHalves(uint64_t key, int64_t id, int64_t column_begin)
      : first_(static_cast<uint32_t>(mix(key ^ static_cast<uint64_t>(id))) +
               static_cast<uint32_t>(column_begin) * kTerm) {}

  // The numbers of the columns from d on.
  RECSTORE_INLINE Lanes<int32_t> at(int64_t d) const {
    const uint32_t first = first_ + static_cast<uint32_t>(d) * kTerm;
    return each<Lanes<int32_t>>([=](Bits term) { return (Register<int32_t>)(scrambled(term + first) >> 16); },
                                load_lanes<Lanes<uint32_t>>(kTerms.lanes));
  }

 private:
  const uint32_t first_;
};
