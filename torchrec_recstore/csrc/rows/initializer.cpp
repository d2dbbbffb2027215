#include "rows/initializer.h"

#include <algorithm>
#include <cmath>

#include "row_loops/row_loops.h"
#include "rows/philox.h"

namespace recstore {
namespace {

constexpr int64_t kMostOnStack = 1024;  // weights of an 8-bit row

uint64_t splitmix(uint64_t x) {  // Steele, Lea and Flood, 2014
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint64_t fnv1a(const std::string& text) {
  uint64_t h = 0xcbf29ce484222325ULL;
  for (const unsigned char c : text) h = (h ^ c) * 0x100000001b3ULL;
  return h;
}

double normal_cdf(double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); }

double polynomial(const double (&c)[8], double x) {
  double value = c[7];
  for (int i = 6; i >= 0; --i) value = value * x + c[i];
  return value;
}

// The inverse of the normal distribution function, with an error of 1e-16. Source: M. J. Wichura, Algorithm AS 241
// (PPND16), Applied Statistics 37 (1988).
double normal_quantile(double p) {
  static constexpr double kA[8] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                                   1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                                   3.3430575583588128105e+4, 2.5090809287301226727e+3};
  static constexpr double kB[8] = {1.0,
                                   4.2313330701600911252e+1,
                                   6.8718700749205790830e+2,
                                   5.3941960214247511077e+3,
                                   2.1213794301586595867e+4,
                                   3.9307895800092710610e+4,
                                   2.8729085735721942674e+4,
                                   5.2264952788528545610e+3};
  static constexpr double kC[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                                   3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                                   2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static constexpr double kD[8] = {1.0,
                                   2.05319162663775882187e0,
                                   1.67638483018380384940e0,
                                   6.89767334985100004550e-1,
                                   1.48103976427480074590e-1,
                                   1.51986665636164571966e-2,
                                   5.47593808499534494600e-4,
                                   1.05075007164441684324e-9};
  static constexpr double kE[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                                   2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                   2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static constexpr double kF[8] = {1.0,
                                   5.99832206555887937690e-1,
                                   1.36929880922735805310e-1,
                                   1.48753612908506148525e-2,
                                   7.86869131145613259100e-4,
                                   1.84631831751005468180e-5,
                                   1.42151175831644588870e-7,
                                   2.04426310338993978564e-15};
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * polynomial(kA, r) / polynomial(kB, r);
  }
  double r = std::sqrt(-std::log(q < 0 ? p : 1.0 - p));
  double x;
  if (r <= 5.0) {
    r -= 1.6;
    x = polynomial(kC, r) / polynomial(kD, r);
  } else {
    r -= 5.0;
    x = polynomial(kE, r) / polynomial(kF, r);
  }
  return q < 0 ? -x : x;
}

}  // namespace

Initializer::Initializer(const TableConfig& config)
    : init_(config.init),
      row_type_(config.row_type),
      column_begin_(config.column_begin),
      column_end_(config.column_end),
      key_(splitmix(config.seed ^ splitmix(fnv1a(config.name)))) {
  if (row_type_ == RowType::kInt8 && config.columns() > kMostOnStack) wide_ = std::make_shared<Wide>(config.columns());
  if (init_.kind == InitKind::kNormal && init_.truncate_std > 0) {
    cdf_low_ = normal_cdf(-init_.truncate_std);
    cdf_high_ = normal_cdf(init_.truncate_std);
  }
}

void Initializer::fill(int64_t id, float* row) const {
  if (row_type_ == RowType::kFloat32) return fill_columns(id, column_begin_, column_end_, row);
  if (row_type_ == RowType::kInt8) {  // the scale depends on all weights
    const auto fill_with = [&](float* weights) {
      fill_columns(id, column_begin_, column_end_, weights);
      row_loops().narrow(row_type_, weights, column_end_ - column_begin_, row);
    };
    if (wide_ == nullptr) {
      float weights[kMostOnStack];
      return fill_with(weights);
    }
    const std::lock_guard<std::mutex> lock(wide_->mutex);
    return fill_with(wide_->weights.data());
  }
  constexpr int64_t kRun = 64;  // columns that fill_uniform() draws at once
  float weights[kRun];
  for (int64_t begin = column_begin_; begin < column_end_; begin += kRun) {
    const int64_t end = std::min(begin + kRun, column_end_);
    fill_columns(id, begin, end, weights);
    row_loops().narrow(row_type_, weights, end - begin, row + weight_floats(row_type_, begin - column_begin_));
  }
}

void Initializer::fill_columns(int64_t id, int64_t begin, int64_t end, float* weights) const {
  if (init_.kind == InitKind::kConstant) {
    std::fill_n(weights, end - begin, static_cast<float>(init_.value));
    return;
  }
  if (init_.kind == InitKind::kUniform) {
    const auto low = static_cast<float>(init_.low);
    const auto high = static_cast<float>(init_.high);
    row_loops().fill_uniform(key_, id, begin, end, low, high, weights);
    return;
  }
  constexpr int kLanes = 4;
  uint32_t words[4][kLanes];
  for (int64_t column = begin; column < end;) {
    const int64_t first = column / (4 * kLanes) * (4 * kLanes);
    philox_blocks<kLanes>(key_, static_cast<uint64_t>(id), static_cast<uint32_t>(first / 4), words);
    for (; column < std::min(first + 4 * kLanes, end); ++column) {
      const uint32_t word = words[column % 4][(column - first) / 4];
      const double u = (word + 0.5) * 0x1p-32;  // in (0, 1)
      const double z = normal_quantile(cdf_low_ + u * (cdf_high_ - cdf_low_));
      weights[column - begin] = static_cast<float>(init_.mean + init_.standard_deviation * z);
    }
  }
}

}  // namespace recstore
