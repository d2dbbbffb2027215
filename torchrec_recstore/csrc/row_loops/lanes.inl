// Sixteen lanes of numbers; row_loops.inl includes this file. The including file has defined RECSTORE_WIDTH, which is
// the number of 32-bit lanes of a register.
//
// GCC splits a vector that is wider than the registers, and passes its parts through the stack. Lanes<T> is therefore a
// vector that one register holds, or a pair of halves where the registers are narrower. An operation on a pair is the
// operation on each half, so that the parts stay in registers. All widths give the same bits.

#define RECSTORE_INLINE inline __attribute__((always_inline))

// GCC has __builtin_shufflevector from version 12 on, and Clang has nothing else.
#if defined(__clang__)
#define RECSTORE_SHUFFLE(v, ...) __builtin_shufflevector((v), (v), __VA_ARGS__)
#else
#define RECSTORE_SHUFFLE(v, ...) __builtin_shuffle((v), Register<int32_t>{__VA_ARGS__})
#endif

constexpr int kLanes = 16;
constexpr int kWidth = RECSTORE_WIDTH;

template <class T>
struct RegisterOf {
  typedef T Type __attribute__((vector_size(kWidth * sizeof(T)), may_alias));
};
// kWidth lanes. A register of a type smaller than 32 bits is only partly used.
template <class T>
using Register = typename RegisterOf<T>::Type;

template <class H>
struct Pair {
  using Half = H;
  Half low, high;

  friend RECSTORE_INLINE Pair operator-(Pair a) { return {-a.low, -a.high}; }
  friend RECSTORE_INLINE Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
  friend RECSTORE_INLINE Pair operator-(Pair a, Pair b) { return {a.low - b.low, a.high - b.high}; }
  friend RECSTORE_INLINE Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
  friend RECSTORE_INLINE Pair operator/(Pair a, Pair b) { return {a.low / b.low, a.high / b.high}; }
  friend RECSTORE_INLINE auto operator<(Pair a, Pair b) { return pair(a.low < b.low, a.high < b.high); }
  friend RECSTORE_INLINE auto operator>(Pair a, Pair b) { return pair(a.low > b.low, a.high > b.high); }
  RECSTORE_INLINE Pair& operator+=(Pair b) { return *this = *this + b; }
  RECSTORE_INLINE Pair& operator/=(Pair b) { return *this = *this / b; }

 private:
  template <class R>
  static RECSTORE_INLINE Pair<R> pair(R low, R high) {
    return {low, high};
  }
};

template <class T, int n>
struct LanesOf {
  using Type = Pair<typename LanesOf<T, n / 2>::Type>;
};
template <class T>
struct LanesOf<T, kWidth> {
  using Type = Register<T>;
};
template <class T, int n = kLanes>
using Lanes = typename LanesOf<T, n>::Type;

using Vec = Lanes<float>;

template <class V>
struct IsPair : std::false_type {};
template <class H>
struct IsPair<Pair<H>> : std::true_type {};

// Returns the lanes of type R that function(register, ...) computes register by register.
template <class R, class Function, class... V>
RECSTORE_INLINE R each(const Function& function, V... values) {
  if constexpr (IsPair<R>::value) {
    return {each<typename R::Half>(function, values.low...), each<typename R::Half>(function, values.high...)};
  } else {
    return function(values...);
  }
}

// Reads and writes all lanes; the pointers need no alignment.
template <class V, class T>
RECSTORE_INLINE V load_lanes(const T* p) {
  if constexpr (IsPair<V>::value) {
    using Half = typename V::Half;
    return {load_lanes<Half>(p), load_lanes<Half>(p + sizeof(Half) / sizeof(T))};
  } else {
    V v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
}
template <class T, class V>
RECSTORE_INLINE void store_lanes(T* p, V v) {
  if constexpr (IsPair<V>::value) {
    store_lanes(p, v.low);
    store_lanes(p + sizeof(v.low) / sizeof(T), v.high);
  } else {
    __builtin_memcpy(p, &v, sizeof(v));
  }
}

// Writes past the caches.
template <class V>
RECSTORE_INLINE void stream_lanes(float* p, V v) {
  if constexpr (IsPair<V>::value) {
    stream_lanes(p, v.low);
    stream_lanes(p + sizeof(v.low) / sizeof(float), v.high);
  } else {
    RECSTORE_STREAM(p, v);
  }
}

// Reads and writes the first n lanes. The lanes that are not read are zeros.
template <class V, class T>
RECSTORE_INLINE V load_lanes(const T* p, int64_t n) {
  if (n == kLanes) return load_lanes<V>(p);
  V v{};
  __builtin_memcpy(&v, p, static_cast<size_t>(n) * sizeof(T));
  return v;
}
template <class T, class V>
RECSTORE_INLINE void store_lanes(T* p, V v, int64_t n) {
  if (n == kLanes) return store_lanes(p, v);
  __builtin_memcpy(p, &v, static_cast<size_t>(n) * sizeof(T));
}

// Calls work(d, n) for runs of n columns that begin at column d. For whole runs, n is the compile-time constant kLanes.
template <class Columns, class Work>
RECSTORE_INLINE void for_each_run(Columns columns, const Work& work) {
  int64_t d = 0;
  for (; d + kLanes <= columns; d += kLanes) work(d, std::integral_constant<int64_t, kLanes>{});
  if (d < columns) work(d, columns - d);
}

RECSTORE_INLINE Vec load(const float* p, int64_t n = kLanes) { return load_lanes<Vec>(p, n); }
RECSTORE_INLINE void store(float* p, Vec v, int64_t n = kLanes) { store_lanes(p, v, n); }

template <class V = Vec>
RECSTORE_INLINE V broadcast(float x) {
  if constexpr (IsPair<V>::value) {
    return {broadcast<typename V::Half>(x), broadcast<typename V::Half>(x)};
  } else {
    return V{} + x;
  }
}

// Returns the lanes of a where the mask, which is the result of a comparison, is true, and else the lanes of b.
template <class Mask, class V>
RECSTORE_INLINE V select(Mask mask, V a, V b) {
  if constexpr (IsPair<V>::value) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  } else {
    return mask ? a : b;
  }
}

RECSTORE_INLINE Vec square_root(Vec v) {
  return each<Vec>(
      [](Register<float> x) {
        Register<float> r;
        for (int i = 0; i < kWidth; ++i) r[i] = __builtin_sqrtf(x[i]);
        return r;
      },
      v);
}

// Adds to each lane the lane that follows `apart` lanes later.
template <int apart, int... lanes>
RECSTORE_INLINE Register<float> fold(Register<float> v, std::integer_sequence<int, lanes...>) {
  return v + RECSTORE_SHUFFLE(v, (lanes % apart + apart)...);
}

// Returns the sum of the lanes. It adds lanes that are 8 apart first, then 4, 2 and 1.
RECSTORE_INLINE float reduce(Register<float> v) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
  if constexpr (kWidth == 16) v = fold<8>(v, lanes);
  if constexpr (kWidth >= 8) v = fold<4>(v, lanes);
  v = fold<2>(v, lanes);
  return v[0] + v[1];
}
template <class H>
RECSTORE_INLINE float reduce(Pair<H> v) {
  return reduce(v.low + v.high);
}
