// Random numbers of rows; row_types.inl includes this file.

// 64-bit lanes. The philox words are in their low halves, so that a product needs no shuffle. The high halves may hold
// anything.
constexpr int kWideLanes = kWidth >= 8 ? 4 : 2;
typedef uint64_t Wide __attribute__((vector_size(kWideLanes * sizeof(uint64_t)), may_alias));

inline Wide product(Wide a, uint64_t b) {
#ifdef RECSTORE_MULTIPLY
  return (Wide)RECSTORE_MULTIPLY(a, Wide{} + b);
#else
  return (a & 0xFFFFFFFFu) * b;
#endif
}

// The low halves of the lanes.
typedef uint32_t Words __attribute__((vector_size(kWideLanes * sizeof(uint32_t)), may_alias));

// Calls put(i, words) with the words of philox_blocks<kBlocks>() (philox.h) from number i on; they are (4, kBlocks).
template <int kBlocks, class Put>
inline void random_blocks(uint64_t key, uint64_t id, uint32_t block, const Put& put) {
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
      put(word * kBlocks + part * kWideLanes, __builtin_convertvector(words[word][part], Words));
    }
  }
}

constexpr int64_t kRandomRun = 64;  // columns for which a call of draw() draws numbers

// Draws 32 bits for each column of a run.
inline void draw(uint64_t key, int64_t id, int64_t run, uint32_t* out) {
  random_blocks<16>(key, static_cast<uint64_t>(id), static_cast<uint32_t>(16 * run), [&](int i, Words words) {
    __builtin_memcpy(out + i, &words, sizeof(words));
  });
}
// Draws 16 bits for each column of a run. Column c and column c + 32 get the same two bytes in opposite order: each
// number is uniform, and the high byte of one is the low byte of the other.
inline void draw(uint64_t key, int64_t id, int64_t run, uint16_t* out) {
  random_blocks<4>(key, static_cast<uint64_t>(id), static_cast<uint32_t>(4 * run), [&](int i, Words words) {
    const Words swapped = (words & 0x00FF00FFu) << 8 | (words >> 8 & 0x00FF00FFu);
    __builtin_memcpy(out + 2 * i, &words, sizeof(words));
    __builtin_memcpy(out + kRandomRun / 2 + 2 * i, &swapped, sizeof(swapped));
  });
}

// Writes random numbers for the columns of one row. A number depends only on the key, the id and the global column.
template <class Random>
inline void random_numbers(uint64_t key, int64_t id, int64_t column_begin, int64_t columns, Random* out) {
  const int64_t column_end = column_begin + columns;
  for (int64_t first = column_begin / kRandomRun * kRandomRun; first < column_end; first += kRandomRun) {
    const int64_t run = first / kRandomRun;
    if (first >= column_begin && first + kRandomRun <= column_end) {
      draw(key, id, run, out + (first - column_begin));
      continue;
    }
    Random numbers[kRandomRun];
    draw(key, id, run, numbers);
    const int64_t begin = first > column_begin ? first : column_begin;
    const int64_t end = first + kRandomRun < column_end ? first + kRandomRun : column_end;
    __builtin_memcpy(out + (begin - column_begin), numbers + (begin - first), static_cast<size_t>(end - begin) * sizeof(Random));
  }
}
