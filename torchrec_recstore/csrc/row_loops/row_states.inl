// The optimizer state of a row, as row_steps.inl reads and writes it; row_loops.inl includes this file. A state has the
// type of StateType (config.h).
//
// element(i, columns) and square(i, columns) are the element-wise state with the number i: load(d, n) returns its
// columns from d on, and store(d, v, n) writes them. row() is the row-wise state, which is a square.

struct Float32State {
  using Aside = RowAside<float>;
  static constexpr int64_t floats(int64_t numbers) { return numbers; }

  struct Element {
    RECSTORE_INLINE Vec load(int64_t d, int64_t n) const { return RECSTORE_ISA_NAMESPACE::load(numbers + d, n); }
    RECSTORE_INLINE void store(int64_t d, Vec v, int64_t n) const { RECSTORE_ISA_NAMESPACE::store(numbers + d, v, n); }
    float* numbers;
  };

  // Two pointers, so that it is passed in registers.
  class Of {
   public:
    RECSTORE_INLINE Of(const UpdateArgs&, int64_t, float* numbers, Aside& aside)
        : numbers_(numbers), row_(&aside.state) {}
    template <class Columns>
    RECSTORE_INLINE Element element(int64_t i, Columns columns) const {
      return {numbers_ + i * columns};
    }
    template <class Columns>
    RECSTORE_INLINE Element square(int64_t i, Columns columns) const {
      return element(i, columns);
    }
    RECSTORE_INLINE float row() const { return *row_; }
    RECSTORE_INLINE void set_row(float m) const { *row_ = m; }
    // All element-wise states as float32, (states, columns), for a user-defined optimizer; narrow() stores them.
    template <class Columns>
    RECSTORE_INLINE float* widened(const UpdateArgs&, Columns) const {
      return numbers_;
    }
    template <class Columns>
    RECSTORE_INLINE void narrow(const UpdateArgs&, Columns, const float*) const {}

   private:
    float* const numbers_;
    float* const row_;
  };
};

// Rounds up with the probability that makes the expected value exact. A finite number that is too large becomes the
// largest finite one.
RECSTORE_INLINE Halves float_to_state(Floats v, Bits random) {
  const Bits f = bits(v) & 0x7FFFFFFFu;
  const Bits normal = (f - (112u << 23) + (random & 0x1FFFu)) >> 13;
  // A subnormal half is a whole number of units of 2**-24. The bits of that number are those of the half, also if the
  // number is rounded up to 1024, which is the least normal half.
  const Bits least = bits(113u << 23);
  const Floats units = floats(f < least ? f : least) * 0x1p24f;
  const Floats below_one = __builtin_convertvector((Register<int32_t>)(random >> 8), Floats) * 0x1p-24f;
  const Bits subnormal = (Bits) __builtin_convertvector(units + below_one, Register<int32_t>);
  const Bits value = f < least ? subnormal : normal;
  const Bits finite = value < bits(0x7BFFu) ? value : bits(0x7BFFu);
  const Bits special = f > bits(255u << 23) ? bits(0x7E00u) : bits(0x7C00u);
  return __builtin_convertvector((f >= bits(255u << 23) ? special : finite) | (bits(v) >> 16 & 0x8000u), Halves);
}

struct Float16State {
  using Aside = RowAside<uint16_t>;
  static constexpr int64_t floats(int64_t numbers) { return (numbers + 1) / 2; }

  template <bool is_square>
  static RECSTORE_INLINE Floats widen(Halves v) {
    const Floats x = half_to_float(v);
    return is_square ? x * x : x;  // the product is exact
  }

  template <bool is_square>
  class Element {
   public:
    RECSTORE_INLINE Element(uint16_t* numbers, uint32_t first) : numbers_(numbers), first_(first) {}
    RECSTORE_INLINE Vec load(int64_t d, int64_t n) const {
      return each<Vec>([](Halves v) { return widen<is_square>(v); }, load_lanes<Lanes<uint16_t>>(numbers_ + d, n));
    }
    RECSTORE_INLINE void store(int64_t d, Vec v, int64_t n) const {
      if (is_square) v = square_root(v);
      const uint32_t first = first_ + static_cast<uint32_t>(d) * kTerm;
      // GCC calls it for each register otherwise.
      const auto rounded = [=](Floats x, Bits term)
                               __attribute__((always_inline)) { return float_to_state(x, scrambled(term + first)); };
      store_lanes(numbers_ + d, each<Lanes<uint16_t>>(rounded, v, load_lanes<Lanes<uint32_t>>(kTerms.lanes)), n);
    }

   private:
    uint16_t* const numbers_;
    const uint32_t first_;  // the random number of column 0, before it is scrambled
  };

  class Of {
   public:
    RECSTORE_INLINE Of(const UpdateArgs& a, int64_t position, float* numbers, Aside& aside)
        : numbers_(reinterpret_cast<uint16_t*>(numbers)), row_(&aside.state), first_(first_of(a, position)) {}
    template <class Columns>
    RECSTORE_INLINE Element<false> element(int64_t i, Columns columns) const {
      return {numbers_ + i * columns, first(i)};
    }
    template <class Columns>
    RECSTORE_INLINE Element<true> square(int64_t i, Columns columns) const {
      return {numbers_ + i * columns, first(i)};
    }
    RECSTORE_INLINE float row() const {
      const float x = half_to_float(Halves{} + *row_)[0];
      return x * x;
    }
    RECSTORE_INLINE void set_row(float m) const {
      *row_ = float_to_state(splat(__builtin_sqrtf(m)), scrambled(Bits{} + (first_ - kApart)))[0];
    }
    template <class Columns>
    RECSTORE_INLINE float* widened(const UpdateArgs& a, Columns columns) const {
      for_each_state(a, columns, [&](const auto& state, float* out) {
        for_each_run(columns, [&](int64_t d, auto n) { RECSTORE_ISA_NAMESPACE::store(out + d, state.load(d, n), n); });
      });
      return a.states;
    }
    template <class Columns>
    RECSTORE_INLINE void narrow(const UpdateArgs& a, Columns columns, const float*) const {
      for_each_state(a, columns, [&](const auto& state, const float* in) {
        for_each_run(columns, [&](int64_t d, auto n) { state.store(d, RECSTORE_ISA_NAMESPACE::load(in + d, n), n); });
      });
    }

   private:
    // Calls work(state, numbers) for each element-wise state of a user-defined optimizer.
    template <class Columns, class Work>
    RECSTORE_INLINE void for_each_state(const UpdateArgs& a, Columns columns, const Work& work) const {
      for (int64_t i = 0; i < a.user->element_states; ++i) {
        float* numbers = a.states + i * columns;
        a.user->states[static_cast<size_t>(i)].is_square ? work(square(i, columns), numbers)
                                                         : work(element(i, columns), numbers);
      }
    }
    // A row has fewer than 2**24 columns, so that the states of a row use different terms of the sequence.
    static constexpr uint32_t kApart = (1u << 28) * kTerm;
    RECSTORE_INLINE uint32_t first(int64_t i) const { return first_ + static_cast<uint32_t>(i) * kApart; }
    static RECSTORE_INLINE uint32_t first_of(const UpdateArgs& a, int64_t position) {
      const StochasticRounding& rounding = a.rounding;
      const auto id = static_cast<uint64_t>(rounding.routing->raw_id(a.batch->ids[position]));
      // The weights of 8-bit rows are rounded with the other half of this number.
      return static_cast<uint32_t>(mix(rounding.key ^ id) >> 32) + static_cast<uint32_t>(rounding.column_begin) * kTerm;
    }

    uint16_t* const numbers_;
    uint16_t* const row_;
    const uint32_t first_;  // the random number of column 0 of the state 0, before it is scrambled
  };
};

void read_state(const uint16_t* state, int64_t n, bool is_square, float* out) {
  for_each_run(n, [&](int64_t d, auto k) {
    const auto halves = load_lanes<Lanes<uint16_t>>(state + d, k);
    const auto widened = is_square ? each<Vec>([](Halves v) { return Float16State::widen<true>(v); }, halves)
                                   : each<Vec>([](Halves v) { return Float16State::widen<false>(v); }, halves);
    store(out + d, widened, k);
  });
}

void write_state(const float* values, int64_t n, bool is_square, uint16_t* state) {
  const auto rounded = [](Floats x) {
    const Halves half = float_to_half(x);
    const Halves magnitude = half & static_cast<uint16_t>(0x7FFF);
    const Bits f = bits(x) & 0x7FFFFFFFu;
    const Bits overflows = (Bits)(f < bits(255u << 23)) & (Bits)(f > bits(0x477FE000u));  // finite, above 65504
    const Halves saturates = __builtin_convertvector(overflows, Halves);
    return (saturates & (static_cast<uint16_t>(0x7BFF) | (half ^ magnitude))) | (~saturates & half);
  };
  for_each_run(n, [&](int64_t d, auto k) {
    const Vec v = load(values + d, k);
    store_lanes(state + d, each<Lanes<uint16_t>>(rounded, is_square ? square_root(v) : v), k);
  });
}
