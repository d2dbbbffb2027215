// Reads and writes the weights of each row type; row_kernels.inl includes this file. All arithmetic is in float32.
//
// The bit operations give the same results as the F16C instructions, so that every instruction set gives the same bits:
// subnormals are kept, overflow gives infinity, and NaN stays NaN and becomes quiet.

// The conversions work on one register; each() extends them to all lanes.

using Floats = Register<float>;
using Bits = Register<uint32_t>;
using Halves = Register<uint16_t>;

RECSTORE_INLINE Bits bits(Floats v) { return (Bits)v; }
RECSTORE_INLINE Bits bits(uint32_t x) { return Bits{} + x; }
RECSTORE_INLINE Floats floats(Bits v) { return (Floats)v; }

#ifndef RECSTORE_HALF_TO_FLOAT
// After Fabian Giesen, "half to float done quick" (2012).
RECSTORE_INLINE Floats half_to_float(Halves half) {
  const Bits h = __builtin_convertvector(half, Bits), magnitude = h & 0x7FFFu;
  const Bits shifted = magnitude << 13;
  const Bits normal = shifted + (112u << 23);
  const Bits special = (shifted + (224u << 23)) | (magnitude > bits(0x7C00u) ? bits(0x400000u) : bits(0u));
  const Bits subnormal = bits(floats(shifted + (113u << 23)) - floats(bits(113u << 23)));
  const Bits value = magnitude >= bits(0x7C00u) ? special : magnitude < bits(0x400u) ? subnormal : normal;
  return floats(value | (h & 0x8000u) << 16);
}
// Rounds to nearest, ties to even.
RECSTORE_INLINE Halves float_to_half(Floats v) {
  const Bits f = bits(v) & 0x7FFFFFFFu;
  const Bits normal = (f + (0xFFFu - (112u << 23)) + (f >> 13 & 1u)) >> 13;
  const Bits magic = bits(126u << 23);  // the last bit of the sum has the value of the last bit of a subnormal half
  const Bits subnormal = bits(floats(f) + floats(magic)) - magic;
  const Bits special = f > bits(255u << 23) ? (f >> 13 & 0x3FFu) | 0x7E00u : bits(0x7C00u);
  const Bits value = f >= bits(143u << 23) ? special : f < bits(113u << 23) ? subnormal : normal;
  return __builtin_convertvector(value | (bits(v) >> 16 & 0x8000u), Halves);
}
#else
RECSTORE_INLINE Floats half_to_float(Halves half) { return (Floats)RECSTORE_HALF_TO_FLOAT(half); }
RECSTORE_INLINE Halves float_to_half(Floats v) { return (Halves)RECSTORE_FLOAT_TO_HALF(v); }
#endif

// Rounds up with the probability that makes the expected value exact: adds random bits below the last bit and
// truncates.
RECSTORE_INLINE Halves float_to_half(Floats v, Bits random) {
  const Bits f = bits(v) & 0x7FFFFFFFu, exponent = f >> 23;
  const Bits normal = (f - (112u << 23) + (random & 0x1FFFu)) >> 13;
  // For a subnormal half, 14 to 31 bits of the significand are cut off; smaller values become zero.
  const Bits cut = exponent < bits(95u) ? bits(31u) : 126u - (exponent > bits(112u) ? bits(112u) : exponent);
  const Bits significand = exponent < bits(95u) ? bits(0u) : (f & 0x7FFFFFu) | 0x800000u;
  const Bits subnormal = (significand + (random & ((1u << cut) - 1u))) >> cut;
  const Bits special = f > bits(255u << 23) ? (f >> 13 & 0x3FFu) | 0x7E00u : bits(0x7C00u);
  const Bits value = f >= bits(143u << 23) ? special : f < bits(113u << 23) ? subnormal : normal;
  return __builtin_convertvector(value | (bits(v) >> 16 & 0x8000u), Halves);
}

struct Float32Row {
  static constexpr bool kNarrow = false;
  typedef float Stored;
  template <int n>
  static RECSTORE_INLINE Lanes<float, n> load(const float* p) { return load_lanes<Lanes<float, n>>(p); }
  static RECSTORE_INLINE Vec load(const float* p, int64_t n) { return RECSTORE_ISA_NAMESPACE::load(p, n); }
  template <class Columns>
  static RECSTORE_INLINE int64_t floats(Columns columns) { return columns; }
};

// The common part of both 16-bit types. Type has widen(Halves) and narrow(Floats[, random bits]).
template <class Type>
struct NarrowRow {
  static constexpr bool kNarrow = true;
  typedef uint16_t Stored;
  template <int n>
  static RECSTORE_INLINE Lanes<float, n> load(const uint16_t* p) {
    return each<Lanes<float, n>>([](Halves v) { return Type::widen(v); }, load_lanes<Lanes<uint16_t, n>>(p));
  }
  static RECSTORE_INLINE Vec load(const uint16_t* p, int64_t n) {
    return each<Vec>([](Halves v) { return Type::widen(v); }, load_lanes<Lanes<uint16_t>>(p, n));
  }
  // Rounds to nearest.
  static RECSTORE_INLINE void store(uint16_t* p, Vec v, int64_t n) {
    store_lanes(p, each<Lanes<uint16_t>>([](Floats x) { return Type::narrow(x); }, v), n);
  }
  // Rounds stochastically.
  static RECSTORE_INLINE void store(uint16_t* p, Vec v, Lanes<uint32_t> random, int64_t n) {
    store_lanes(p, each<Lanes<uint16_t>>([](Floats x, Bits r) { return Type::narrow(x, r); }, v, random), n);
  }
  template <class Columns>
  static RECSTORE_INLINE int64_t floats(Columns columns) { return (columns + 1) / 2; }
};

struct Float16Row : NarrowRow<Float16Row> {
  static RECSTORE_INLINE Floats widen(Halves v) { return half_to_float(v); }
  static RECSTORE_INLINE Halves narrow(Floats v) { return float_to_half(v); }
  static RECSTORE_INLINE Halves narrow(Floats v, Bits random) { return float_to_half(v, random); }
};

struct Bfloat16Row : NarrowRow<Bfloat16Row> {
  static RECSTORE_INLINE Floats widen(Halves v) { return RECSTORE_ISA_NAMESPACE::floats(__builtin_convertvector(v, Bits) << 16); }
  static RECSTORE_INLINE Halves narrow(Floats v) { return narrow(v, 0x7FFFu + (bits(v) >> 16 & 1u)); }
  static RECSTORE_INLINE Halves narrow(Floats v, Bits random) {
    const Bits f = bits(v), quiet = f >> 16 | 0x40u;
    const Bits rounded = (f + (random & 0xFFFFu)) >> 16;
    return __builtin_convertvector((f & 0x7FFFFFFFu) > bits(255u << 23) ? quiet : rounded, Halves);
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
  for_each_run(columns, [&](int64_t d, auto n) { store(out + d, Row::load(stored<Row>(row) + d, n), n); });
}

// Stores a row of 16-bit weights, rounded to nearest.
template <class Row, class Columns>
inline void narrow_row(Columns columns, const float* values, float* row) {
  auto* out = reinterpret_cast<uint16_t*>(row);
  for_each_run(columns, [&](int64_t d, auto n) { Row::store(out + d, load(values + d, n), n); });
}

void widen(RowType type, const float* row, int64_t columns, float* out) {
  with_row_type(type, [&](auto kind) { widen_row<decltype(kind)>(columns, row, out); });
}

void narrow(RowType type, const float* values, int64_t columns, float* row) {
  with_row_type(type, [&](auto kind) {
    if constexpr (decltype(kind)::kNarrow) {
      narrow_row<decltype(kind)>(columns, values, row);
    } else {
      __builtin_memcpy(row, values, static_cast<size_t>(columns) * sizeof(float));
    }
  });
}

// Writes random words for the columns of one row. A word depends only on the key, the id and the global column.
__attribute__((noinline)) void random_words(uint64_t key, int64_t id, int64_t column_begin, int64_t columns, uint32_t* out) {
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

// Stores the updated row of the id at a position, rounded stochastically.
template <class Row>
__attribute__((noinline)) void narrow_row_randomly(const UpdateArgs& a, int64_t position, const float* values, float* row) {
  const StochasticRounding& rounding = a.rounding;
  const int64_t columns = a.rows.columns;
  random_words(rounding.key, rounding.routing->raw_id(a.batch->ids[position]), rounding.column_begin, columns, a.random);
  auto* out = reinterpret_cast<uint16_t*>(row);
  for_each_run(columns, [&](int64_t d, auto n) {
    Row::store(out + d, load(values + d, n), load_lanes<Lanes<uint32_t>>(a.random + d, n), n);
  });
}
