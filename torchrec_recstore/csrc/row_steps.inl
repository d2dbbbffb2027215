// The update of one row by each optimizer; row_kernels.inl includes this file. torchrec_recstore/optim.py has the
// formulas.
//
// run(args, columns, w, states, g, meta) updates the weights w (columns,), the element-wise states, which follow each
// other, and the row-wise state in meta, with the summed gradient g. It may overwrite args.scratch, which may contain
// g.

template <class Columns, class Step>  // step(weights, gradient, column, lanes) returns the new weights
inline void for_each_vec(Columns columns, float* w, const float* g, const Step& step) {
  for_each_run(columns, [&](int64_t d, auto n) { store(w + d, step(load(w + d, n), load(g + d, n), d, n), n); });
}

template <class Columns>
inline float sum_of_squares(Columns columns, const float* x) {
  Vec squares{};
  for_each_run(columns, [&](int64_t d, auto n) {
    const Vec v = load(x + d, n);
    squares += v * v;
  });
  return reduce(squares);
}
template <class Columns>
inline float norm(Columns columns, const float* x) { return __builtin_sqrtf(sum_of_squares(columns, x)); }

template <class Columns>
inline void scale(Columns columns, const float* from, float factor, float* to) {
  const Vec f = broadcast(factor);
  for_each_run(columns, [&](int64_t d, auto n) { store(to + d, load(from + d, n) * f, n); });
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
    const Vec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const bool decays = a.scalars.weight_decay != 0.0f;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t, auto) {
      if (decays) gv += decay * wv;
      return wv - lr * gv;
    });
  }
};

struct MomentumSgdStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const Vec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const Vec momentum = broadcast(a.scalars.momentum);
    float* buffer = states;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec b = momentum * load(buffer + d, n) + (gv + decay * wv);
      store(buffer + d, b, n);
      return wv - lr * b;
    });
  }
};

struct AdagradStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const Vec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const Vec eps = broadcast(a.scalars.eps);
    const bool decays = a.scalars.weight_decay != 0.0f;
    float* state = states;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      if (decays) gv += decay * wv;
      const Vec m = load(state + d, n) + gv * gv;
      store(state + d, m, n);
      return wv - lr * gv / (square_root(m) + eps);
    });
  }
};

struct RowWiseAdagradStep {
  static constexpr int64_t kElementStates = 0;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float*, const float* g, RowMeta& meta) {
    const Vec decay = broadcast(a.scalars.weight_decay);
    const bool decays = a.scalars.weight_decay != 0.0f;
    Vec squares{};
    for_each_run(columns, [&](int64_t d, auto n) {
      Vec gv = load(g + d, n);
      if (decays) gv += decay * load(w + d, n);
      squares += gv * gv;
    });
    meta.state += reduce(squares) / static_cast<float>(columns);
    const Vec multiplier = broadcast(a.scalars.learning_rate / (__builtin_sqrtf(meta.state) + a.scalars.eps));
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t, auto) {
      if (decays) gv += decay * wv;
      return wv - multiplier * gv;
    });
  }
};

inline Vec average(const float* state, Vec value, float beta, float one_minus_beta, int64_t n) {
  return broadcast(beta) * load(state, n) + broadcast(one_minus_beta) * value;
}

struct AdamStep {
  static constexpr int64_t kElementStates = 2;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    const Vec rate = broadcast(s.adam_rate), bias2 = broadcast(s.bias2), eps = broadcast(s.eps);
    const Vec keep = broadcast(s.decay_factor);
    float *first = states, *second = first + columns;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      const Vec v = average(second + d, gv * gv, s.beta2, s.one_minus_beta2, n);
      store(first + d, m, n);
      store(second + d, v, n);
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
    const Vec rate = broadcast(s.adam_rate), keep = broadcast(s.decay_factor);
    const Vec divisor = broadcast(row_wise_divisor(a, columns, g, meta));
    float* first = states;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      store(first + d, m, n);
      return keep * wv - rate * m / divisor;
    });
  }
};

// w -= lr * |w| / |u| * u, where direction(weights, gradient, column, lanes) returns u.
template <class Columns, class Direction>
inline void step_along(const UpdateArgs& a, Columns columns, float* w, const float* g, const Direction& direction) {
  Vec squares{};
  for_each_run(columns, [&](int64_t d, auto n) {
    store(a.scratch + d, direction(load(w + d, n), load(g + d, n), d, n), n);
    const Vec u = load(a.scratch + d, n);  // lanes after the end of the row are zeros
    squares += u * u;
  });
  const float weights = norm(columns, w), update = __builtin_sqrtf(reduce(squares));
  const float ratio = weights > 0.0f && update > 0.0f ? weights / update : 1.0f;
  const Vec rate = broadcast(a.scalars.learning_rate * ratio);
  for_each_vec(columns, w, a.scratch, [&](Vec wv, Vec u, int64_t, auto) { return wv - rate * u; });
}

struct LambStep {
  static constexpr int64_t kElementStates = 2;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    const Vec bias1 = broadcast(s.bias1), bias2 = broadcast(s.bias2), eps = broadcast(s.eps);
    const Vec decay = broadcast(s.weight_decay);
    float *first = states, *second = first + columns;
    step_along(a, columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      const Vec v = average(second + d, gv * gv, s.beta2, s.one_minus_beta2, n);
      store(first + d, m, n);
      store(second + d, v, n);
      return m * bias1 / (square_root(v * bias2) + eps) + decay * wv;
    });
  }
};

struct PartialRowWiseLambStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta& meta) {
    const StepScalars& s = a.scalars;
    const Vec bias1 = broadcast(s.bias1), decay = broadcast(s.weight_decay);
    const Vec divisor = broadcast(row_wise_divisor(a, columns, g, meta));
    float* first = states;
    step_along(a, columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first + d, gv, s.beta1, s.one_minus_beta1, n);
      store(first + d, m, n);
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
    const Vec rate = broadcast(s.learning_rate * ratio), decay = broadcast(s.weight_decay);
    const Vec momentum = broadcast(s.momentum);
    float* buffer = states;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec b = momentum * load(buffer + d, n) + rate * (gv + decay * wv);
      store(buffer + d, b, n);
      return wv - b;
    });
  }
};

struct RmsPropStep {
  static constexpr int64_t kElementStates = 1;
  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    const StepScalars& s = a.scalars;
    const Vec lr = broadcast(s.learning_rate), decay = broadcast(s.weight_decay), eps = broadcast(s.eps);
    float* state = states;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      gv += decay * wv;
      const Vec v = average(state + d, gv * gv, s.alpha, s.one_minus_alpha, n);
      store(state + d, v, n);
      return wv - lr * gv / (square_root(v) + eps);
    });
  }
};

struct FtrlStep {
  static constexpr int64_t kElementStates = 2;

  template <bool is_root>
  static inline Vec power(Vec v, float lr_power) {
    if (is_root) return square_root(v);
    return each<Vec>([=](Register<float> x) {
      for (int i = 0; i < kWidth; ++i) x[i] = __builtin_powf(x[i], -lr_power);
      return x;
    }, v);
  }

  template <class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g, RowMeta&) {
    // The usual power is compiled separately, because a call of powf() in the loop would need the stack.
    a.scalars.lr_power == -0.5f ? step<true>(a, columns, w, states, g) : step<false>(a, columns, w, states, g);
  }

 private:
  template <bool is_root, class Columns>
  static __attribute__((noinline)) void step(const UpdateArgs& a, Columns columns, float* w, float* states, const float* g) {
    const StepScalars& s = a.scalars;
    if (s.learning_rate == 0.0f) return;  // the formula divides by the learning rate, and a warm-up may begin at zero
    const Vec lr = broadcast(s.learning_rate), l1 = broadcast(s.l1), l2 = broadcast(s.l2), beta = broadcast(s.beta);
    const Vec zero{};
    float *accumulator = states, *linear = accumulator + columns;
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto k) {
      const Vec before = load(accumulator + d, k), n = before + gv * gv;
      const Vec root = power<is_root>(n, s.lr_power);
      const Vec sigma = (root - power<is_root>(before, s.lr_power)) / lr;
      const Vec z = load(linear + d, k) + gv - sigma * wv;
      store(accumulator + d, n, k);
      store(linear + d, z, k);
      const Vec size = select(z < zero, -z, z);
      const Vec excess = select(z < zero, z + l1, z - l1);
      const Vec solved = select(size > l1, -excess / ((beta + root) / lr + l2), zero);
      return select(n > zero, solved, wv);  // an element without a gradient so far keeps its initial weight
    });
  }
};
