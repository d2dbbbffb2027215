// The update of one row by each optimizer; row_loops.inl includes this file. torchrec_recstore/optim.py has the
// formulas.
//
// run(args, columns, w, state, g) updates the weights w (columns,) and the optimizer state (row_states.inl) with the
// summed gradient g. It may overwrite args.scratch, which may contain g.

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
inline float norm(Columns columns, const float* x) {
  return __builtin_sqrtf(sum_of_squares(columns, x));
}

// Whether all numbers are finite: x - x is 0 if x is, and else NaN.
template <class Columns>
inline bool is_finite(Columns columns, const float* x) {
  Vec sum{};
  for_each_run(columns, [&](int64_t d, auto n) {
    const Vec v = load(x + d, n);
    sum += v - v;
  });
  return reduce(sum) == 0.0f;
}

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
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State, const float* g) {
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
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const Vec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const Vec momentum = broadcast(a.scalars.momentum);
    const auto buffer = state.element(0, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec b = momentum * buffer.load(d, n) + (gv + decay * wv);
      buffer.store(d, b, n);
      return wv - lr * b;
    });
  }
};

struct AdagradStep {
  static constexpr int64_t kElementStates = 1;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const Vec lr = broadcast(a.scalars.learning_rate), decay = broadcast(a.scalars.weight_decay);
    const Vec eps = broadcast(a.scalars.eps);
    const bool decays = a.scalars.weight_decay != 0.0f;
    const auto sum = state.square(0, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      if (decays) gv += decay * wv;
      const Vec m = sum.load(d, n) + gv * gv;
      sum.store(d, m, n);
      return wv - lr * gv / (square_root(m) + eps);
    });
  }
};

struct RowWiseAdagradStep {
  static constexpr int64_t kElementStates = 0;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const Vec decay = broadcast(a.scalars.weight_decay);
    const bool decays = a.scalars.weight_decay != 0.0f;
    Vec squares{};
    for_each_run(columns, [&](int64_t d, auto n) {
      Vec gv = load(g + d, n);
      if (decays) gv += decay * load(w + d, n);
      squares += gv * gv;
    });
    const float m = state.row() + reduce(squares) / static_cast<float>(columns);
    state.set_row(m);
    const Vec multiplier = broadcast(a.scalars.learning_rate / (__builtin_sqrtf(m) + a.scalars.eps));
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t, auto) {
      if (decays) gv += decay * wv;
      return wv - multiplier * gv;
    });
  }
};

// Returns the moving average of a state's column d. The caller stores it.
template <class Element, class N>
RECSTORE_INLINE Vec average(const Element& state, int64_t d, Vec value, float beta, float one_minus_beta, N n) {
  return broadcast(beta) * state.load(d, n) + broadcast(one_minus_beta) * value;
}

struct AdamStep {
  static constexpr int64_t kElementStates = 2;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const StepScalars& s = a.scalars;
    const Vec rate = broadcast(s.adam_rate), bias2 = broadcast(s.bias2), eps = broadcast(s.eps);
    const Vec keep = broadcast(s.decay_factor);
    const auto first = state.element(0, columns);
    const auto second = state.square(1, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first, d, gv, s.beta1, s.one_minus_beta1, n);
      const Vec v = average(second, d, gv * gv, s.beta2, s.one_minus_beta2, n);
      first.store(d, m, n);
      second.store(d, v, n);
      return keep * wv - rate * m / (square_root(v * bias2) + eps);
    });
  }
};

// Updates the row-wise second moment. Returns the divisor of the first moment.
template <class State, class Columns>
inline float row_wise_divisor(const UpdateArgs& a, Columns columns, const float* g, const State& state) {
  const StepScalars& s = a.scalars;
  const float v =
      s.beta2 * state.row() + s.one_minus_beta2 * (sum_of_squares(columns, g) / static_cast<float>(columns));
  state.set_row(v);
  return __builtin_sqrtf(v * s.bias2) + s.eps;
}

struct PartialRowWiseAdamStep {
  static constexpr int64_t kElementStates = 1;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const StepScalars& s = a.scalars;
    const Vec rate = broadcast(s.adam_rate), keep = broadcast(s.decay_factor);
    const Vec divisor = broadcast(row_wise_divisor(a, columns, g, state));
    const auto first = state.element(0, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first, d, gv, s.beta1, s.one_minus_beta1, n);
      first.store(d, m, n);
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
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const StepScalars& s = a.scalars;
    const Vec bias1 = broadcast(s.bias1), bias2 = broadcast(s.bias2), eps = broadcast(s.eps);
    const Vec decay = broadcast(s.weight_decay);
    const auto first = state.element(0, columns);
    const auto second = state.square(1, columns);
    step_along(a, columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first, d, gv, s.beta1, s.one_minus_beta1, n);
      const Vec v = average(second, d, gv * gv, s.beta2, s.one_minus_beta2, n);
      first.store(d, m, n);
      second.store(d, v, n);
      return m * bias1 / (square_root(v * bias2) + eps) + decay * wv;
    });
  }
};

struct PartialRowWiseLambStep {
  static constexpr int64_t kElementStates = 1;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const StepScalars& s = a.scalars;
    const Vec bias1 = broadcast(s.bias1), decay = broadcast(s.weight_decay);
    const Vec divisor = broadcast(row_wise_divisor(a, columns, g, state));
    const auto first = state.element(0, columns);
    step_along(a, columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec m = average(first, d, gv, s.beta1, s.one_minus_beta1, n);
      first.store(d, m, n);
      return m * bias1 / divisor + decay * wv;
    });
  }
};

struct LarsSgdStep {
  static constexpr int64_t kElementStates = 1;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const StepScalars& s = a.scalars;
    const float weights = norm(columns, w), divisor = norm(columns, g) + s.weight_decay * weights;
    const float ratio = weights > 0.0f && divisor > 0.0f ? s.eta * weights / divisor : 1.0f;
    const Vec rate = broadcast(s.learning_rate * ratio), decay = broadcast(s.weight_decay);
    const Vec momentum = broadcast(s.momentum);
    const auto buffer = state.element(0, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      const Vec b = momentum * buffer.load(d, n) + rate * (gv + decay * wv);
      buffer.store(d, b, n);
      return wv - b;
    });
  }
};

struct RmsPropStep {
  static constexpr int64_t kElementStates = 1;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const StepScalars& s = a.scalars;
    const Vec lr = broadcast(s.learning_rate), decay = broadcast(s.weight_decay), eps = broadcast(s.eps);
    const auto squares = state.square(0, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      gv += decay * wv;
      const Vec v = average(squares, d, gv * gv, s.alpha, s.one_minus_alpha, n);
      squares.store(d, v, n);
      return wv - lr * gv / (square_root(v) + eps);
    });
  }
};

struct AdadeltaStep {
  static constexpr int64_t kElementStates = 2;
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const StepScalars& s = a.scalars;
    const Vec lr = broadcast(s.learning_rate), decay = broadcast(s.weight_decay), eps = broadcast(s.eps);
    const auto squares = state.square(0, columns), deltas = state.square(1, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto n) {
      gv += decay * wv;
      const Vec v = average(squares, d, gv * gv, s.alpha, s.one_minus_alpha, n);
      const Vec delta = square_root(deltas.load(d, n) + eps) / square_root(v + eps) * gv;
      const Vec u = average(deltas, d, delta * delta, s.alpha, s.one_minus_alpha, n);
      squares.store(d, v, n);
      deltas.store(d, u, n);
      return wv - lr * delta;
    });
  }
};

struct FtrlStep {
  static constexpr int64_t kElementStates = 2;

  template <bool is_root>
  static inline Vec power(Vec v, float lr_power) {
    if (is_root) return square_root(v);
    return each<Vec>(
        [=](Register<float> x) {
          for (int i = 0; i < kWidth; ++i) x[i] = __builtin_powf(x[i], -lr_power);
          return x;
        },
        v);
  }

  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    // The usual power is compiled separately, because a call of powf() in the loop would need the stack.
    a.scalars.lr_power == -0.5f ? step<true>(a, columns, w, state, g) : step<false>(a, columns, w, state, g);
  }

 private:
  template <bool is_root, class State, class Columns>
  static __attribute__((noinline)) void step(const UpdateArgs& a, Columns columns, float* w, State state,
                                             const float* g) {
    const StepScalars& s = a.scalars;
    if (s.learning_rate == 0.0f) return;  // the formula divides by the learning rate, and a warm-up may begin at zero
    const Vec lr = broadcast(s.learning_rate), l1 = broadcast(s.l1), l2 = broadcast(s.l2), beta = broadcast(s.beta);
    const Vec zero{};
    const auto accumulator = state.square(0, columns);
    const auto linear = state.element(1, columns);
    for_each_vec(columns, w, g, [&](Vec wv, Vec gv, int64_t d, auto k) {
      const Vec before = accumulator.load(d, k), n = before + gv * gv;
      const Vec root = power<is_root>(n, s.lr_power);
      const Vec sigma = (root - power<is_root>(before, s.lr_power)) / lr;
      const Vec z = linear.load(d, k) + gv - sigma * wv;
      accumulator.store(d, n, k);
      linear.store(d, z, k);
      const Vec size = select(z < zero, -z, z);
      const Vec excess = select(z < zero, z + l1, z - l1);
      const Vec solved = select(size > l1, -excess / ((beta + root) / lr + l2), zero);
      return select(n > zero, solved, wv);  // an element without a gradient so far keeps its initial weight
    });
  }
};

// A user-defined step. Its function gets float32 numbers, whatever the table stores.
struct RowOptimizerStep {
  static constexpr int64_t kElementStates = -1;  // UserStep::element_states
  template <class State, class Columns>
  static inline void run(const UpdateArgs& a, Columns columns, float* w, State state, const float* g) {
    const UserStep& user = *a.user;
    float row = state.row();
    float* elements = state.widened(a, columns);
    user.row(columns, w, g, elements, &row, a.scalars.user);
    state.narrow(a, columns, elements);
    if (!user.states.empty() && user.states.back().row_wise) state.set_row(row);
  }
};
