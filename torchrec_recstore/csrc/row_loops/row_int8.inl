// 8-bit rows; row_types.inl includes this file. A weight is code * scale + bias, as in FBGEMM's row-wise quantization.
//
// bias is the row's least weight, so that its code is 0, and the greatest weight has the code 255. The scale has 16
// significant bits. code * scale is then exact, and a row that is read and written back keeps its bits, unless its
// weights are more than a hundred times larger than their range.

// Returns the result of combine() over all lanes.
template <int apart, class V, class Combine, int... lanes>
RECSTORE_INLINE V folded(V v, const Combine& combine, std::integer_sequence<int, lanes...>) {
  return combine(v, RECSTORE_SHUFFLE(v, (lanes ^ apart)...));
}
template <class V, class Combine>
RECSTORE_INLINE auto combined(V v, const Combine& combine) {
  if constexpr (IsPair<V>::value) {
    return combined(each<typename V::Half>(combine, v.low, v.high), combine);
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
    if constexpr (kWidth == 16) v = folded<8>(v, combine, lanes);
    if constexpr (kWidth >= 8) v = folded<4>(v, combine, lanes);
    v = folded<2>(v, combine, lanes);
    return folded<1>(v, combine, lanes)[0];
  }
}

typedef uint8_t Codes __attribute__((vector_size(kLanes), may_alias));
// GCC 12 converts between 8 and 32 bits one lane at a time.
#ifdef RECSTORE_CODES_TO_INTS
using LoadedCodes = Codes;
RECSTORE_INLINE Lanes<int32_t> widened(Codes codes) { return RECSTORE_CODES_TO_INTS(codes); }
#else
using LoadedCodes = Lanes<uint8_t>;
RECSTORE_INLINE Lanes<int32_t> widened(LoadedCodes codes) {
  return each<Lanes<int32_t>>(
      [](Register<uint8_t> c) {
#ifdef RECSTORE_BYTES_TO_INTS
        return (Register<int32_t>)RECSTORE_BYTES_TO_INTS(c);
#else
        return __builtin_convertvector(c, Register<int32_t>);
#endif
      },
      codes);
}
#endif
// Returns the codes of numbers from 0 to 256 * kUnit. All numbers above 255 have the code 255.
RECSTORE_INLINE Codes codes_of(Lanes<int32_t> numbers) {
  const auto ints = each<Lanes<int32_t>>([](Register<int32_t> x) { return x >> 16; }, numbers);
#ifdef RECSTORE_INTS_TO_BYTES
  return (Codes)RECSTORE_INTS_TO_BYTES(ints);
#else
  int32_t lanes[kLanes];
  store_lanes(lanes, ints);
  Codes codes;
  for (int i = 0; i < kLanes; ++i) codes[i] = static_cast<uint8_t>(lanes[i] < 255 ? lanes[i] : 255);
  return codes;
#endif
}

// Returns x in all lanes. broadcast() adds it to zeros, an addition that the compiler must not leave out.
RECSTORE_INLINE Register<float> splat(float x) { return x - Register<float>{}; }

// The scale and the bias of a row.
struct Grid {
  float scale;
  float bias;
  float inverse;  // kUnit / scale, or 0

  // least, greatest: the least and the greatest weight, whose difference is finite.
  static RECSTORE_INLINE Grid of(float least, float greatest) {
    const float range = greatest - least, bias = least + 0.0f;  // no negative zero: the order of the lanes could tell
    if (range < 0x1p-100f) return {0.0f, bias, 0.0f};
    float scale = range * (1.0f / 255.0f);
    uint32_t number;
    __builtin_memcpy(&number, &scale, sizeof(number));
    number = (number + 0x80u) & ~0xFFu;
    __builtin_memcpy(&scale, &number, sizeof(scale));
    return {scale, bias, static_cast<float>(kUnit) / scale};
  }

  static constexpr int32_t kUnit = 1 << 16;  // codes are computed in units of 2**-16, and so are their random numbers
};

struct Int8Row {
  static constexpr bool kNarrow = true;
  static constexpr int kStoredTogether = recstore::kStoredTogether;

  class Reader {
   public:
    template <class Columns>
    RECSTORE_INLINE Reader(const float* row, Columns columns)
        : codes_(reinterpret_cast<const uint8_t*>(row)),
          scale_(splat(grid(row, columns)[0])),
          bias_(splat(grid(row, columns)[1])) {}
    template <int n>
    RECSTORE_INLINE Lanes<float, n> load(int64_t column) const {
      if constexpr (n > kLanes) {
        return {load<n / 2>(column), load<n / 2>(column + n / 2)};
      } else {
        return load(column, n);
      }
    }
    RECSTORE_INLINE Vec load(int64_t column, int64_t n) const {
      const auto weights = [this](Register<int32_t> c) {
        return __builtin_convertvector(c, Register<float>) * scale_ + bias_;
      };
      return each<Vec>(weights, widened(load_lanes<LoadedCodes>(codes_ + column, n)));
    }

   private:
    const uint8_t* codes_;
    const Register<float> scale_, bias_;
  };

  template <class Columns>
  static RECSTORE_INLINE int64_t floats(Columns columns) {
    return (columns + 3) / 4 + kGridFloats;
  }

  // Stores a row, rounded to nearest. Its weights are all NaN if one of them is not finite or is larger than 2**126. A
  // row is constant if its range is below 2**-100.
  template <class Columns>
  static inline void write(Columns columns, const float* values, float* row) {
    write_codes(columns, values, row,
                [](int64_t) { return each<Lanes<int32_t>>([] { return Register<int32_t>{} + Grid::kUnit / 2; }); });
  }
  // Stores a row, rounded with the random numbers of its columns.
  template <class Columns>
  static inline void write(Columns columns, const float* values, const RandomHalves& random, float* row) {
    write_codes(columns, values, row, [&](int64_t d) { return random.at(d); });
  }

 private:
  template <class Columns>
  static RECSTORE_INLINE const float* grid(const float* row, Columns columns) {
    return row + floats(columns) - kGridFloats;
  }

  // Numbers(d) returns the numbers below kUnit that are added before truncation.
  template <class Columns, class Numbers>
  static RECSTORE_INLINE void write_codes(Columns columns, const float* values, float* row, const Numbers& numbers) {
    const auto least_of = [](auto a, auto b) { return a < b ? a : b; };
    const auto greatest_of = [](auto a, auto b) { return a > b ? a : b; };
    Vec least = each<Vec>([=] { return splat(values[0]); }), greatest = least;
    auto size = Lanes<int32_t>{};  // the bits of the largest absolute weight
    for_each_run(columns, [&](int64_t d, auto n) {
      const Vec v = load_filled(values + d, n);
      least = each<Vec>(least_of, v, least);
      greatest = each<Vec>(greatest_of, v, greatest);
      size = each<Lanes<int32_t>>(
          [&](Register<float> x, Register<int32_t> s) { return greatest_of((Register<int32_t>)x & 0x7FFFFFFF, s); }, v,
          size);
    });
    auto* codes = reinterpret_cast<uint8_t*>(row);
    float* end = const_cast<float*>(grid(row, columns));
    constexpr int32_t kLargest = 253 << 23;  // the bits of 2**126: larger ranges could overflow
    if (combined(size, greatest_of) > kLargest) {
      __builtin_memset(codes, 255, static_cast<size_t>(columns));
      end[0] = end[1] = __builtin_nanf("");
      return;
    }
    const Grid grid = Grid::of(combined(least, least_of), combined(greatest, greatest_of));
    const auto bias = splat(grid.bias), inverse = splat(grid.inverse);
    for_each_run(columns, [&](int64_t d, auto n) {
      const auto number = [&](Register<float> x, Register<int32_t> r) {
        return __builtin_convertvector((x - bias) * inverse, Register<int32_t>) + r;
      };
      store_lanes(codes + d, codes_of(each<Lanes<int32_t>>(number, load_filled(values + d, n), numbers(d))), n);
    });
    end[0] = grid.scale;
    end[1] = grid.bias;
  }

  // Loads n numbers, and fills the other lanes with the first of them.
  static RECSTORE_INLINE Vec load_filled(const float* values, int64_t n) {
    if (n == kLanes) return RECSTORE_ISA_NAMESPACE::load(values);
    float lanes[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = values[i < n ? i : 0];
    return RECSTORE_ISA_NAMESPACE::load(lanes);
  }
};
