// Reads and writes the weights of each row type; row_kernels.inl includes this file. All arithmetic is in float32.
//
// The bit operations give the same results as the F16C instructions, so that every instruction set gives the same bits:
// subnormals are kept, overflow gives infinity, and NaN stays NaN and becomes quiet.

typedef uint16_t HalfVec __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(2), may_alias));
typedef uint16_t AlignedHalfVec __attribute__((vector_size(kLanes * sizeof(uint16_t)), may_alias));
typedef uint32_t BitsVec __attribute__((vector_size(kLanes * sizeof(uint32_t)), may_alias));

inline BitsVec bits(AlignedVec v) { return (BitsVec)v; }
inline BitsVec bits(uint32_t x) { return BitsVec{} + x; }
inline AlignedVec floats(BitsVec v) { return (AlignedVec)v; }

#ifndef RECSTORE_HALF_TO_FLOAT16
// After Fabian Giesen, "half to float done quick" (2012).
inline AlignedVec half_to_float(AlignedHalfVec half) {
  const BitsVec h = __builtin_convertvector(half, BitsVec), magnitude = h & 0x7FFFu;
  const BitsVec shifted = magnitude << 13;
  const BitsVec normal = shifted + (112u << 23);
  const BitsVec special = (shifted + (224u << 23)) | (magnitude > bits(0x7C00u) ? bits(0x400000u) : bits(0u));
  const BitsVec subnormal = bits(floats(shifted + (113u << 23)) - floats(bits(113u << 23)));
  const BitsVec value = magnitude >= bits(0x7C00u) ? special : magnitude < bits(0x400u) ? subnormal : normal;
  return floats(value | (h & 0x8000u) << 16);
}
// Rounds to nearest, ties to even.
inline AlignedHalfVec float_to_half(AlignedVec v) {
  const BitsVec f = bits(v) & 0x7FFFFFFFu;
  const BitsVec normal = (f + (0xFFFu - (112u << 23)) + (f >> 13 & 1u)) >> 13;
  const BitsVec magic = bits(126u << 23);  // the last bit of the sum has the value of the last bit of a subnormal half
  const BitsVec subnormal = bits(floats(f) + floats(magic)) - magic;
  const BitsVec special = f > bits(255u << 23) ? (f >> 13 & 0x3FFu) | 0x7E00u : bits(0x7C00u);
  const BitsVec value = f >= bits(143u << 23) ? special : f < bits(113u << 23) ? subnormal : normal;
  return __builtin_convertvector(value | (bits(v) >> 16 & 0x8000u), AlignedHalfVec);
}
#else
inline AlignedVec half_to_float(AlignedHalfVec half) { return RECSTORE_HALF_TO_FLOAT16(half); }
inline AlignedHalfVec float_to_half(AlignedVec v) { return RECSTORE_FLOAT_TO_HALF16(v); }
#endif

// Rounds up with the probability that makes the expected value exact: adds random bits below the last bit and
// truncates.
inline AlignedHalfVec float_to_half(AlignedVec v, BitsVec random) {
  const BitsVec f = bits(v) & 0x7FFFFFFFu, exponent = f >> 23;
  const BitsVec normal = (f - (112u << 23) + (random & 0x1FFFu)) >> 13;
  // For a subnormal half, 14 to 31 bits of the significand are cut off; smaller values become zero.
  const BitsVec cut = exponent < bits(95u) ? bits(31u) : 126u - (exponent > bits(112u) ? bits(112u) : exponent);
  const BitsVec significand = exponent < bits(95u) ? bits(0u) : (f & 0x7FFFFFu) | 0x800000u;
  const BitsVec subnormal = (significand + (random & ((1u << cut) - 1u))) >> cut;
  const BitsVec special = f > bits(255u << 23) ? (f >> 13 & 0x3FFu) | 0x7E00u : bits(0x7C00u);
  const BitsVec value = f >= bits(143u << 23) ? special : f < bits(113u << 23) ? subnormal : normal;
  return __builtin_convertvector(value | (bits(v) >> 16 & 0x8000u), AlignedHalfVec);
}

struct Float32Row {
  static constexpr bool kNarrow = false;
  typedef float Stored;
  static inline AlignedVec load(const float* p, int64_t n) { return n == kLanes ? RECSTORE_ISA_NAMESPACE::load(p) : load_part(p, n); }
  template <class Columns>
  static inline int64_t floats(Columns columns) { return columns; }
};

// The common part of both 16-bit types. Type has widen(AlignedHalfVec) and narrow(AlignedVec[, random bits]).
template <class Type>
struct NarrowRow {
  static constexpr bool kNarrow = true;
  typedef uint16_t Stored;
  static inline AlignedVec load(const uint16_t* p, int64_t n) {
    AlignedHalfVec v{};
    if (n == kLanes) {
      v = *reinterpret_cast<const HalfVec*>(p);
    } else {
      __builtin_memcpy(&v, p, static_cast<size_t>(n) * sizeof(uint16_t));
    }
    return Type::widen(v);
  }
  static inline void store(uint16_t* p, AlignedHalfVec v, int64_t n) {
    if (n == kLanes) {
      *reinterpret_cast<HalfVec*>(p) = v;
    } else {
      __builtin_memcpy(p, &v, static_cast<size_t>(n) * sizeof(uint16_t));
    }
  }
  template <class Columns>
  static inline int64_t floats(Columns columns) { return (columns + 1) / 2; }
};

struct Float16Row : NarrowRow<Float16Row> {
  static inline AlignedVec widen(AlignedHalfVec v) { return half_to_float(v); }
  static inline AlignedHalfVec narrow(AlignedVec v) { return float_to_half(v); }
  static inline AlignedHalfVec narrow(AlignedVec v, BitsVec random) { return float_to_half(v, random); }
};

struct Bfloat16Row : NarrowRow<Bfloat16Row> {
  static inline AlignedVec widen(AlignedHalfVec v) { return RECSTORE_ISA_NAMESPACE::floats(__builtin_convertvector(v, BitsVec) << 16); }
  static inline AlignedHalfVec narrow(AlignedVec v) { return narrow(v, 0x7FFFu + (bits(v) >> 16 & 1u)); }
  static inline AlignedHalfVec narrow(AlignedVec v, BitsVec random) {
    const BitsVec f = bits(v), quiet = f >> 16 | 0x40u;
    const BitsVec rounded = (f + (random & 0xFFFFu)) >> 16;
    return __builtin_convertvector((f & 0x7FFFFFFFu) > bits(255u << 23) ? quiet : rounded, AlignedHalfVec);
  }
};

// Calls work(Row) with the struct for the type, so that work is compiled for each type.
template <class Work>
auto with_row_type(RowType type, const Work& work) {
  switch (type) {
    case RowType::kFloat16: return work(Float16Row{});
    case RowType::kBfloat16: return work(Bfloat16Row{});
    default: return work(Float32Row{});
  }
}

template <class Row>
inline const typename Row::Stored* stored(const float* row) { return reinterpret_cast<const typename Row::Stored*>(row); }

template <class Row, class Columns>
inline void widen_row(Columns columns, const float* row, float* out) {
  for (int64_t d = 0; d < columns; d += kLanes) {
    const int64_t n = columns - d < kLanes ? columns - d : kLanes;
    const AlignedVec v = Row::load(stored<Row>(row) + d, n);
    n == kLanes ? store(out + d, v) : store_part(out + d, v, n);
  }
}

// Stores a row of 16-bit weights. random: (columns,) words for stochastic rounding, or null to round to nearest.
template <class Row, class Columns>
inline void narrow_row(Columns columns, const float* values, const uint32_t* random, float* row) {
  auto* out = reinterpret_cast<uint16_t*>(row);
  for (int64_t d = 0; d < columns; d += kLanes) {
    const int64_t n = columns - d < kLanes ? columns - d : kLanes;
    const AlignedVec v = n == kLanes ? load(values + d) : load_part(values + d, n);
    if (random == nullptr) {
      Row::store(out + d, Row::narrow(v), n);
    } else {
      BitsVec r{};
      __builtin_memcpy(&r, random + d, static_cast<size_t>(n) * sizeof(uint32_t));
      Row::store(out + d, Row::narrow(v, r), n);
    }
  }
}

void widen(RowType type, const float* row, int64_t columns, float* out) {
  with_row_type(type, [&](auto kind) { widen_row<decltype(kind)>(columns, row, out); });
}

void narrow(RowType type, const float* values, int64_t columns, float* row) {
  with_row_type(type, [&](auto kind) {
    if constexpr (decltype(kind)::kNarrow) {
      narrow_row<decltype(kind)>(columns, values, nullptr, row);
    } else {
      __builtin_memcpy(row, values, static_cast<size_t>(columns) * sizeof(float));
    }
  });
}

// Writes random words for the columns of one row. A word depends only on the key, the id and the global column.
inline void random_words(uint64_t key, int64_t id, int64_t column_begin, int64_t columns, uint32_t* out) {
  constexpr int64_t kRun = 4 * kLanes;  // columns of one call of philox_blocks()
  uint32_t words[4][kLanes];
  const int64_t column_end = column_begin + columns;
  for (int64_t first = column_begin / kRun * kRun; first < column_end; first += kRun) {
    philox_blocks<kLanes>(key, static_cast<uint64_t>(id), static_cast<uint32_t>(first / 4), words);
    const int64_t begin = first > column_begin ? first : column_begin;
    const int64_t end = first + kRun < column_end ? first + kRun : column_end;
    __builtin_memcpy(out + (begin - column_begin), &words[0][0] + (begin - first), static_cast<size_t>(end - begin) * sizeof(uint32_t));
  }
}
