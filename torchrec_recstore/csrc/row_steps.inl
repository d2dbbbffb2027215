// The update of one row by each optimizer; row_kernels.inl includes this file. torchrec_recstore/optim.py has the
// formulas.
//
// run(args, columns, w, states, g, meta) updates the weights w (columns,), the element-wise states, which follow each
// other, and the row-wise state in meta, with the summed gradient g. It may overwrite args.scratch, which may contain
// g.

inline AlignedVec load_n(const float* p, int64_t n) { return n == kLanes ? load(p) : load_part(p, n); }
inline void store_n(float* p, AlignedVec v, int64_t n) { n == kLanes ? store(p, v) : store_part(p, v, n); }

template <class Columns, class Step>  // step(weights, gradient, column, lanes) returns the new weights
inline void for_each_vec(Columns columns, float* w, const float* g, const Step& step) {
  int64_t d = 0;
  for (; d + kLanes <= columns; d += kLanes) store(w + d, step(load(w + d), load(g + d), d, int64_t{kLanes}));
  if (d < columns) store_part(w + d, step(load_part(w + d, columns - d), load_part(g + d, columns - d), d, columns - d), columns - d);
}

template <class Columns>
inline float sum_of_squares(Columns columns, const float* x) {
  AlignedVec squares{};
  for (int64_t d = 0; d < columns; d += kLanes) {
    const int64_t n = columns - d < kLanes ? columns - d : kLanes;
    const AlignedVec v = load_n(x + d, n);
    squares += v * v;
  }
  return reduce(squares);
}
template <class Columns>
inline float norm(Columns columns, const float* x) { return __builtin_sqrtf(sum_of_squares(columns, x)); }

template <class Columns>
inline void scale(Columns columns, const float* from, float factor, float* to) {
  const AlignedVec f = broadcast(factor);
  for (int64_t d = 0; d < columns; d += kLanes) {
    const int64_t n = columns - d < kLanes ? columns - d : kLanes;
    store_n(to + d, load_n(from + d, n) * f, n);
  }
}

// Clips the gradient by its norm, and applies decoupled weight decay for Adagrad. Returns the gradient.
template <class Columns>
inline const float* before_step(const UpdateArgs& a, Columns columns, float* w, const float* g) {
  const float bound = a.scalars.max_gradient_norm;
  if (bound > 0.0f) {
    const float length = norm(columns, g);
    if (length > bound) {
      scale(columns, g, bound / length, a.scratch);
      g = a.scratch;
    }
  }
  if (a.scalars.decouple) scale(columns, w, a.scalars.decay_factor, w);
  return g;
}

// Bounds the norm of the weights.
template <class Columns>
inline void after_step(const UpdateArgs& a, Columns columns, float* w) {
  const float bound = a.scalars.max_norm;
  if (bound <= 0.0f) return;
  const float length = norm(columns, w);
  if (length > bound) scale(columns, w, bound / length, w);
}

struct SgdStep {
  static constexpr int64_t kElementStates = 0;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float*, const float* g, RowMeta&) {
    const AlignedVec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const bool decays = a.scalars.weight_decay != 0.0f;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t, int64_t) {
      if (decays) gv += decay * wv;
      return wv - lr * gv;
    });
  }
};

struct MomentumSgdStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const AlignedVec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const AlignedVec momentum = broadcast(a.scalars.momentum);
    float* buffer = states;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      const AlignedVec b = momentum * load_n(buffer + d, n) + (gv + decay * wv);
      store_n(buffer + d, b, n);
      return wv - lr * b;
    });
  }
};

struct AdagradStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const AlignedVec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const AlignedVec eps = broadcast(a.scalars.eps);
    const bool decays = a.scalars.weight_decay != 0.0f;
    float* state = states;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      if (decays) gv += decay * wv;
      const AlignedVec m = load_n(state + d, n) + gv * gv;
      store_n(state + d, m, n);
      return wv - lr * gv / (square_root(m) + eps);
    });
  }
};

struct RowWiseAdagradStep {
  static constexpr int64_t kElementStates = 0;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float*, const float* g, RowMeta& meta) {
    const AlignedVec decay = broadcast(a.scalars.weight_decay);
    const bool decays = a.scalars.weight_decay != 0.0f;
    AlignedVec squares{};
    for (int64_t d = 0; d < columns; d += kLanes) {
      const int64_t n = columns - d < kLanes ? columns - d : kLanes;
      AlignedVec gv = load_n(g + d, n);
      if (decays) gv += decay * load_n(w + d, n);
      squares += gv * gv;
    }
    meta.state += reduce(squares) / static_cast<float>(columns);
    const AlignedVec multiplier = broadcast(a.scalars.learning_rate / (__builtin_sqrtf(meta.state) + a.scalars.eps));
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t, int64_t) {
      if (decays) gv += decay * wv;
      return wv - multiplier * gv;
    });
  }
};

inline AlignedVec average(const float* state, AlignedVec value, float beta, float one_minus_beta, int64_t n) {
  return broadcast(beta) * load_n(state, n) + broadcast(one_minus_beta) * value;
}

struct AdamStep {
  static constexpr int64_t kElementStates = 2;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    const AlignedVec rate = broadcast(s.adam_rate), bias2 = broadcast(s.bias2), eps = broadcast(s.eps);
    const AlignedVec keep = broadcast(s.decay_factor);
    float *first = states, *second = first + columns;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      const AlignedVec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      const AlignedVec v = average(second + d, gv * gv, s.beta2, s.one_minus_beta2, n);
      store_n(first + d, m, n);
      store_n(second + d, v, n);
      return keep * wv - rate * m / (square_root(v * bias2) + eps);
    });
  }
};

// Updates the row-wise second moment. Returns the divisor of the first moment.
template <class Columns>
inline float row_wise_divisor(const UpdateArgs& a, Columns columns, const float* g, RowMeta& meta) {
  const StepScalars& s = a.scalars;
  meta.state = s.beta2 * meta.state + s.one_minus_beta2 * (sum_of_squares(columns, g) / static_cast<float>(columns));
  return __builtin_sqrtf(meta.state * s.bias2) + s.eps;
}

struct PartialRowWiseAdamStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta& meta) {
    const StepScalars& s = a.scalars;
    const AlignedVec rate = broadcast(s.adam_rate), keep = broadcast(s.decay_factor);
    const AlignedVec divisor = broadcast(row_wise_divisor(a, columns, g, meta));
    float* first = states;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      const AlignedVec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      store_n(first + d, m, n);
      return keep * wv - rate * m / divisor;
    });
  }
};

// w -= lr * |w| / |u| * u, where direction(weights, gradient, column, lanes) returns u.
template <class Columns, class Direction>
inline void step_along(const UpdateArgs& a, Columns columns, float* w, const float* g, const Direction& direction) {
  AlignedVec squares{};
  for (int64_t d = 0; d < columns; d += kLanes) {
    const int64_t n = columns - d < kLanes ? columns - d : kLanes;
    store_n(a.scratch + d, direction(load_n(w + d, n), load_n(g + d, n), d, n), n);
    const AlignedVec u = load_n(a.scratch + d, n);  // lanes after the end of the row are zeros
    squares += u * u;
  }
  const float weights = norm(columns, w), update = __builtin_sqrtf(reduce(squares));
  const float ratio = weights > 0.0f && update > 0.0f ? weights / update : 1.0f;
  const AlignedVec rate = broadcast(a.scalars.learning_rate * ratio);
  for_each_vec(columns, w, a.scratch, [&](AlignedVec wv, AlignedVec u, int64_t, int64_t) { return wv - rate * u; });
}

struct LambStep {
  static constexpr int64_t kElementStates = 2;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    const AlignedVec bias1 = broadcast(s.bias1), bias2 = broadcast(s.bias2), eps = broadcast(s.eps);
    const AlignedVec decay = broadcast(s.weight_decay);
    float *first = states, *second = first + columns;
    step_along(a, columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      const AlignedVec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      const AlignedVec v = average(second + d, gv * gv, s.beta2, s.one_minus_beta2, n);
      store_n(first + d, m, n);
      store_n(second + d, v, n);
      return m * bias1 / (square_root(v * bias2) + eps) + decay * wv;
    });
  }
};

struct PartialRowWiseLambStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta& meta) {
    const StepScalars& s = a.scalars;
    const AlignedVec bias1 = broadcast(s.bias1), decay = broadcast(s.weight_decay);
    const AlignedVec divisor = broadcast(row_wise_divisor(a, columns, g, meta));
    float* first = states;
    step_along(a, columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      const AlignedVec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      store_n(first + d, m, n);
      return m * bias1 / divisor + decay * wv;
    });
  }
};

struct LarsSgdStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    const float weights = norm(columns, w), divisor = norm(columns, g) + s.weight_decay * weights;
    const float ratio = weights > 0.0f && divisor > 0.0f ? s.eta * weights / divisor : 1.0f;
    const AlignedVec rate = broadcast(s.learning_rate * ratio), decay = broadcast(s.weight_decay);
    const AlignedVec momentum = broadcast(s.momentum);
    float* buffer = states;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      const AlignedVec b = momentum * load_n(buffer + d, n) + rate * (gv + decay * wv);
      store_n(buffer + d, b, n);
      return wv - b;
    });
  }
};

struct RmsPropStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    const AlignedVec lr = broadcast(s.learning_rate), decay = broadcast(s.weight_decay), eps = broadcast(s.eps);
    float* state = states;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t n) {
      gv += decay * wv;
      const AlignedVec v = average(state + d, gv * gv, s.alpha, s.one_minus_alpha, n);
      store_n(state + d, v, n);
      return wv - lr * gv / (square_root(v) + eps);
    });
  }
};

struct FtrlStep {
  static constexpr int64_t kElementStates = 2;

  static inline AlignedVec power(AlignedVec v, float lr_power) {
    if (lr_power == -0.5f) return square_root(v);
    AlignedVec r;
    for (int i = 0; i < kLanes; ++i) r[i] = __builtin_powf(v[i], -lr_power);
    return r;
  }

  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    if (s.learning_rate == 0.0f) return;  // the formula divides by the learning rate, and a warm-up may begin at zero
    const AlignedVec lr = broadcast(s.learning_rate), l1 = broadcast(s.l1), l2 = broadcast(s.l2), beta = broadcast(s.beta);
    const AlignedVec zero{};
    float *accumulator = states, *linear = accumulator + columns;
    for_each_vec(columns, w, g, [&](AlignedVec wv, AlignedVec gv, int64_t d, int64_t k) {
      const AlignedVec before = load_n(accumulator + d, k), n = before + gv * gv;
      const AlignedVec root = power(n, s.lr_power);
      const AlignedVec sigma = (root - power(before, s.lr_power)) / lr;
      const AlignedVec z = load_n(linear + d, k) + gv - sigma * wv;
      store_n(accumulator + d, n, k);
      store_n(linear + d, z, k);
      const AlignedVec size = z < zero ? -z : z;
      const AlignedVec excess = z < zero ? z + l1 : z - l1;
      const AlignedVec solved = size > l1 ? -excess / ((beta + root) / lr + l2) : zero;
      return n > zero ? solved : wv;  // an element without a gradient so far keeps its initial weight
    });
  }
};
