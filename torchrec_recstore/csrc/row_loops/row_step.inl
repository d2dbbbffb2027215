// The source of the library of a user-defined optimizer, as a string: row_compiler.cpp replaces the words between @
// signs and compiles it, and optimizer.cpp loads the library. @LISTS@ becomes the definitions of ELEMENTS, ROW_STATES,
// HYPERPARAMETERS and ONCE, each a list X(name, ...) X(name, ...). Names that begin with recstore are never the user's.

R"code(
#include <stdint.h>

@LISTS@
#line 9 "row_step.inl"

#define RECSTORE_EXPORT extern "C" __attribute__((visibility("default")))
#define RECSTORE_COUNT(...) +1
#define RECSTORE_SQUARE(name, is_square) , is_square
#define RECSTORE_PLACE(name, is_square) recstore_at_##name,
#define RECSTORE_LOAD(name, is_square) float name = recstore_elements[recstore_at_##name * columns + recstore_i];
#define RECSTORE_STORE(name, is_square) recstore_elements[recstore_at_##name * columns + recstore_i] = name;
#define RECSTORE_LOAD_ROW(name, is_square) float name = *recstore_row_state;
#define RECSTORE_STORE_ROW(name, is_square) *recstore_row_state = name;
#define RECSTORE_DOUBLE(name, ...) const double name = *recstore_hyperparameters++;
#define RECSTORE_FORMULA(name, ...) const double name = __VA_ARGS__;
#define RECSTORE_NARROW(name, ...) *recstore_numbers++ = static_cast<float>(name);
#define RECSTORE_FLOAT(name, ...) const float name = *recstore_numbers++;

// The sum over the row of an expression of w, g and the element-wise states.
#define row_sum(...)                                                             \
  recstore_sum(columns, [&](int64_t recstore_i) {                                \
    const float w = recstore_w[recstore_i], g = recstore_g[recstore_i];          \
    ELEMENTS(RECSTORE_LOAD)                                                      \
    return static_cast<float>(__VA_ARGS__);                                      \
  })

namespace {

// The header <cmath> takes the compiler several times as long as the rest.
#define RECSTORE_FUNCTION(name, builtin)                                      \
  inline float name(float x) { return __builtin_##builtin##f(x); }            \
  inline double name(double x) { return __builtin_##builtin(x); }
RECSTORE_FUNCTION(abs, fabs)
RECSTORE_FUNCTION(cos, cos)
RECSTORE_FUNCTION(exp, exp)
RECSTORE_FUNCTION(floor, floor)
RECSTORE_FUNCTION(log, log)
RECSTORE_FUNCTION(sin, sin)
RECSTORE_FUNCTION(sqrt, sqrt)
RECSTORE_FUNCTION(tanh, tanh)
inline float max(float x, float y) { return x < y ? y : x; }
inline double max(double x, double y) { return x < y ? y : x; }
inline float min(float x, float y) { return y < x ? y : x; }
inline double min(double x, double y) { return y < x ? y : x; }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline double pow(double x, double y) { return __builtin_pow(x, y); }

enum : int64_t { ELEMENTS(RECSTORE_PLACE) recstore_states };

// Sums in the order of the built-in optimizers: sixteen lanes, which are added in pairs (csrc/row_loops/lanes.inl).
template <class Term>
inline __attribute__((always_inline)) float recstore_sum(int64_t columns, const Term& term) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= columns; i += 16) {
    for (int lane = 0; lane < 16; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i + lane < columns; ++lane) lanes[lane] += term(i + lane);
  for (int apart = 8; apart > 0; apart /= 2) {
    for (int lane = 0; lane < apart; ++lane) lanes[lane] += lanes[lane + apart];
  }
  return lanes[0];
}

}  // namespace

// The version; the numbers of hyperparameters, of numbers in an update, of element-wise states and of row-wise states;
// and whether each state is a square.
RECSTORE_EXPORT const int64_t recstore_shape[] = {
    1, 0 HYPERPARAMETERS(RECSTORE_COUNT), 1 HYPERPARAMETERS(RECSTORE_COUNT) ONCE(RECSTORE_COUNT), recstore_states,
    0 ROW_STATES(RECSTORE_COUNT) ELEMENTS(RECSTORE_SQUARE) ROW_STATES(RECSTORE_SQUARE)};

RECSTORE_EXPORT void recstore_once(const double* recstore_hyperparameters, double lr, double t,
                                   float* recstore_numbers) {
  HYPERPARAMETERS(RECSTORE_DOUBLE)
  ONCE(RECSTORE_FORMULA)
  RECSTORE_NARROW(lr) HYPERPARAMETERS(RECSTORE_NARROW) ONCE(RECSTORE_NARROW)
}

RECSTORE_EXPORT void recstore_row(int64_t columns, float* __restrict recstore_w, const float* __restrict recstore_g,
                                  float* __restrict recstore_elements, float* __restrict recstore_row_state,
                                  const float* __restrict recstore_numbers) {
  RECSTORE_FLOAT(lr) HYPERPARAMETERS(RECSTORE_FLOAT) ONCE(RECSTORE_FLOAT)
  ROW_STATES(RECSTORE_LOAD_ROW)
@ROW@
#pragma GCC ivdep
  for (int64_t recstore_i = 0; recstore_i < columns; ++recstore_i) {
    float w = recstore_w[recstore_i];
    const float g = recstore_g[recstore_i];
    ELEMENTS(RECSTORE_LOAD)
    {
@STEP@
    }
    recstore_w[recstore_i] = w;
    ELEMENTS(RECSTORE_STORE)
  }
  ROW_STATES(RECSTORE_STORE_ROW)
}
)code"
