// Reads and writes the weights of each row type; row_loops.inl includes this file. All arithmetic is in float32.
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
  static constexpr int kStoredTogether = 1;
  // Reads n columns of one row.
  struct Reader {
    template <class Columns>
    RECSTORE_INLINE Reader(const float* row, Columns) : weights(row) {}
    template <int n>
    RECSTORE_INLINE Lanes<float, n> load(int64_t column) const {
      return load_lanes<Lanes<float, n>>(weights + column);
    }
    RECSTORE_INLINE Vec load(int64_t column, int64_t n) const {
      return RECSTORE_ISA_NAMESPACE::load(weights + column, n);
    }
    const float* weights;
  };
  template <class Columns>
  static RECSTORE_INLINE int64_t floats(Columns columns) {
    return columns;
  }
};

// The common part of both 16-bit types. Type has widen(Halves) and narrow(Floats[, random bits]).
template <class Type>
struct NarrowRow {
  static constexpr bool kNarrow = true;
  static constexpr int kStoredTogether = 1;
  struct Reader {
    template <class Columns>
    RECSTORE_INLINE Reader(const float* row, Columns) : weights(reinterpret_cast<const uint16_t*>(row)) {}
    template <int n>
    RECSTORE_INLINE Lanes<float, n> load(int64_t column) const {
      return each<Lanes<float, n>>([](Halves v) { return Type::widen(v); },
                                   load_lanes<Lanes<uint16_t, n>>(weights + column));
    }
    RECSTORE_INLINE Vec load(int64_t column, int64_t n) const {
      return each<Vec>([](Halves v) { return Type::widen(v); }, load_lanes<Lanes<uint16_t>>(weights + column, n));
    }
    const uint16_t* weights;
  };
  // Stores a row, rounded to nearest.
  template <class Columns>
  static inline void write(Columns columns, const float* values, float* row) {
    auto* out = reinterpret_cast<uint16_t*>(row);
    for_each_run(columns, [&](int64_t d, auto n) {
      store_lanes(out + d, each<Lanes<uint16_t>>([](Floats x) { return Type::narrow(x); }, load(values + d, n)), n);
    });
  }
  // Stores a row, rounded with the random numbers of its columns.
  template <class Columns>
  static inline void write(Columns columns, const float* values, const uint32_t* random, float* row) {
    auto* out = reinterpret_cast<uint16_t*>(row);
    for_each_run(columns, [&](int64_t d, auto n) {
      const auto numbers = load_lanes<Lanes<uint32_t>>(random + d, n);
      store_lanes(
          out + d,
          each<Lanes<uint16_t>>([](Floats x, Bits r) { return Type::narrow(x, r); }, load(values + d, n), numbers), n);
    });
  }
  template <class Columns>
  static RECSTORE_INLINE int64_t floats(Columns columns) {
    return (columns + 1) / 2;
  }
};

struct Float16Row : NarrowRow<Float16Row> {
  static RECSTORE_INLINE Floats widen(Halves v) { return half_to_float(v); }
  static RECSTORE_INLINE Halves narrow(Floats v) { return float_to_half(v); }
  static RECSTORE_INLINE Halves narrow(Floats v, Bits random) { return float_to_half(v, random); }
};

struct Bfloat16Row : NarrowRow<Bfloat16Row> {
  static RECSTORE_INLINE Floats widen(Halves v) {
#ifdef RECSTORE_BFLOAT16_TO_FLOAT
    return (Floats)RECSTORE_BFLOAT16_TO_FLOAT(v);
#else
    return RECSTORE_ISA_NAMESPACE::floats(__builtin_convertvector(v, Bits) << 16);
#endif
  }
  static RECSTORE_INLINE Halves narrow(Floats v) { return truncated(v, 0x7FFFu + (bits(v) >> 16 & 1u)); }
  static RECSTORE_INLINE Halves narrow(Floats v, Bits random) { return truncated(v, random & 0xFFFFu); }

 private:
  // Adds to the bits of v numbers of 16 bits, and truncates. NaN becomes quiet.
  static RECSTORE_INLINE Halves truncated(Floats v, Bits addend) {
#ifdef RECSTORE_FLOAT_TO_BFLOAT16
    return (Halves)RECSTORE_FLOAT_TO_BFLOAT16(v, addend);
#else
    const Bits f = bits(v), quiet = f >> 16 | 0x40u, rounded = (f + addend) >> 16;
    return __builtin_convertvector((f & 0x7FFFFFFFu) > bits(255u << 23) ? quiet : rounded, Halves);
#endif
  }
};

#include "row_loops/random.inl"
#include "row_loops/row_int8.inl"

// Calls work(Row) with the struct for the type, so that work is compiled for each type.
template <class Work>
auto with_row_type(RowType type, const Work& work) {
  switch (type) {
    case RowType::kFloat16: return work(Float16Row{});
    case RowType::kBfloat16: return work(Bfloat16Row{});
    case RowType::kInt8: return work(Int8Row{});
    default: return work(Float32Row{});
  }
}

template <class Row, class Columns>
inline void widen_row(Columns columns, const float* row, float* out) {
  const typename Row::Reader reader(row, columns);
  for_each_run(columns, [&](int64_t d, auto n) { store(out + d, reader.load(d, n), n); });
}

void widen(RowType type, const float* row, int64_t columns, float* out) {
  with_row_type(type, [&](auto kind) { widen_row<decltype(kind)>(columns, row, out); });
}

void narrow(RowType type, const float* values, int64_t columns, float* row) {
  with_row_type(type, [&](auto kind) {
    if constexpr (decltype(kind)::kNarrow) {
      decltype(kind)::write(columns, values, row);
    } else {
      __builtin_memcpy(row, values, static_cast<size_t>(columns) * sizeof(float));
    }
  });
}

// Stores the updated row of the id at a position, rounded stochastically.
template <class Row, class Columns>
__attribute__((noinline)) void write_randomly(const UpdateArgs& a, Columns columns, int64_t position,
                                              const float* values, float* row) {
  const StochasticRounding& rounding = a.rounding;
  const int64_t id = rounding.routing->raw_id(a.batch->ids[position]);
  if constexpr (std::is_same_v<Row, Int8Row>) {
    Row::write(columns, values, RandomHalves(rounding.key, id, rounding.column_begin), row);
  } else {
    random_numbers(rounding.key, id, rounding.column_begin, columns, a.random);
    Row::write(columns, values, a.random, row);
  }
}

// A row of any type, which is known at run time only. Loops that are compiled for it serve all types: those of rare
// optimizers, because of the time that the compiler takes.
struct AnyRow {
  static constexpr bool kNarrow = true;
  static constexpr int kStoredTogether = 1;
};

// Stores the updated row of the id at a position.
template <class Row, class Columns>
RECSTORE_INLINE void write_updated(const UpdateArgs& a, Columns columns, int64_t position, const float* values,
                                   float* row) {
  if (!a.rounding.of_weights) {
    Row::write(columns, values, row);
  } else {
    write_randomly<Row>(a, columns, position, values, row);
  }
}

// The weights of the rows that a loop updates, in float32: those of float32 rows in place, and those of a narrow type
// in a.weights. Narrow rows are stored kStoredTogether at a time, where this makes the processor overlap the long
// chains of instructions that each row needs.
template <class Row, class Columns>
class UpdatedRows {
 public:
  RECSTORE_INLINE UpdatedRows(const UpdateArgs& a, Columns columns) : a_(a), columns_(columns) {}

  // Returns the weights of the next row.
  RECSTORE_INLINE float* weights_of(float* row) const {
    if constexpr (!Row::kNarrow) {
      return row;
    } else if constexpr (std::is_same_v<Row, AnyRow>) {
      if (a_.rows.type == RowType::kFloat32) return row;
      widen(a_.rows.type, row, columns_, a_.weights);
      return a_.weights;
    } else {
      float* weights = a_.weights + count_ * padded();
      widen_row<Row>(columns_, row, weights);
      return weights;
    }
  }
  // Adds the next row, which is that of the id at the position.
  RECSTORE_INLINE void add(int64_t position, float* row) {
    if constexpr (!Row::kNarrow) return;
    if constexpr (Row::kStoredTogether == 1) {
      write(position, a_.weights, row);
    } else {
      added_[count_++] = {position, row};
      if (count_ == Row::kStoredTogether) store();
    }
  }
  // Stores the rows that are not stored yet.
  __attribute__((noinline)) void store() {
    for (int i = 0; i < count_; ++i) write(added_[i].position, a_.weights + i * padded(), added_[i].row);
    count_ = 0;
  }

 private:
  struct Added {
    int64_t position;
    float* row;
  };

  int64_t padded() const { return (columns_ + kLanes - 1) / kLanes * kLanes; }

  RECSTORE_INLINE void write(int64_t position, const float* values, float* row) const {
    if constexpr (std::is_same_v<Row, AnyRow>) {
      with_row_type(a_.rows.type, [&](auto kind) {
        if constexpr (decltype(kind)::kNarrow) write_updated<decltype(kind)>(a_, columns_, position, values, row);
      });
    } else if constexpr (Row::kNarrow) {
      write_updated<Row>(a_, columns_, position, values, row);
    }
  }

  const UpdateArgs& a_;
  const Columns columns_;
  int count_ = 0;
  Added added_[Row::kStoredTogether];
};
