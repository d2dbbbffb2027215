#include "rows/optimizer.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"

namespace recstore {
namespace {

constexpr int64_t kStepVersion = 1;

// The user-defined optimizers of the process, which are never unloaded. A deque, because configurations point into it.
struct UserSteps {
  std::mutex mutex;
  std::deque<UserStep> steps;
};
UserSteps& user_steps() {
  static auto* steps = new UserSteps;
  return *steps;
}

}  // namespace

int64_t load_optimizer(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw InvalidArgument(std::string("the library of the optimizer cannot be loaded: ") + dlerror());
  }
  const auto* shape = static_cast<const int64_t*>(dlsym(library, "recstore_shape"));
  UserStep step;
  step.once = reinterpret_cast<decltype(step.once)>(dlsym(library, "recstore_once"));
  step.row = reinterpret_cast<decltype(step.row)>(dlsym(library, "recstore_row"));
  if (shape == nullptr || step.once == nullptr || step.row == nullptr || *shape++ != kStepVersion) {
    throw InvalidArgument(path + " is not the library of an optimizer of this version");
  }
  step.hyperparameters = *shape++;
  if (*shape++ > kUserNumbers) {
    throw InvalidArgument("an optimizer has at most " + std::to_string(kUserNumbers) + " numbers");
  }
  step.element_states = *shape++;
  for (int64_t row_wise = *shape++, i = 0; i < step.element_states + row_wise; ++i) {
    step.states.push_back({"", i == step.element_states, *shape++ != 0});
  }
  UserSteps& user = user_steps();
  const std::lock_guard<std::mutex> lock(user.mutex);
  const auto found =
      std::find_if(user.steps.begin(), user.steps.end(), [&](const UserStep& each) { return each.row == step.row; });
  const int64_t kind = kOptimizers + (found - user.steps.begin());
  if (found == user.steps.end()) user.steps.push_back(std::move(step));
  return kind;
}

OptimizerConfig OptimizerConfig::of(int64_t kind, Fields<double>& numbers, std::vector<double> hyperparameters) {
  OptimizerConfig config;
  config.kind = static_cast<OptimizerKind>(kind);
  {
    UserSteps& user = user_steps();
    const std::lock_guard<std::mutex> lock(user.mutex);
    const auto kinds = kOptimizers + static_cast<int64_t>(user.steps.size());
    if (kind < 0 || kind >= kinds) throw InvalidArgument("optimizer must be from 0 to " + std::to_string(kinds - 1));
    if (kind >= kOptimizers) config.user = &user.steps[static_cast<size_t>(kind - kOptimizers)];
  }
  const auto take = [&](const char* name) {
    const double number = numbers.take(name);
    if (!std::isfinite(number) || number < 0.0) {
      throw InvalidArgument("optimizer: " + std::string(name) + " must be finite and not negative");
    }
    return number;
  };
  const auto take_below_one = [&](const char* name) {
    const double number = take(name);
    if (number >= 1.0) throw InvalidArgument("optimizer: " + std::string(name) + " must be below 1");
    return number;
  };
  config.eps = take("eps");
  config.weight_decay = take("weight_decay");
  config.decouple = take("decouple") != 0.0;
  config.momentum = take_below_one("momentum");
  config.beta1 = take_below_one("beta1");
  config.beta2 = take_below_one("beta2");
  config.eta = take("eta");
  config.alpha = take_below_one("alpha");
  config.l1 = take("l1");
  config.l2 = take("l2");
  config.lr_power = numbers.take("lr_power");
  if (!std::isfinite(config.lr_power) || config.lr_power > 0.0) {
    throw InvalidArgument("optimizer: lr_power must be finite and not positive");
  }
  config.beta = take("beta");
  config.max_gradient = take("max_gradient");
  config.max_gradient_norm = take("max_gradient_norm");
  config.max_norm = take("max_norm");
  const int64_t needed = config.user == nullptr ? 0 : config.user->hyperparameters;
  if (static_cast<int64_t>(hyperparameters.size()) != needed) {
    throw InvalidArgument("hyperparameters must hold " + std::to_string(needed) + " numbers, got " +
                          std::to_string(hyperparameters.size()));
  }
  for (const double hyperparameter : hyperparameters) {
    if (!std::isfinite(hyperparameter)) throw InvalidArgument("hyperparameters must be finite");
  }
  config.hyperparameters = std::move(hyperparameters);
  return config;
}

std::vector<OptimizerState> OptimizerConfig::states() const {
  if (user != nullptr) return user->states;
  if (kind == OptimizerKind::kSgd && momentum == 0.0) return {};
  switch (kind) {
#define RECSTORE_ENTRY(name, value, ...) \
  case OptimizerKind::k##name: return {__VA_ARGS__};
    RECSTORE_OPTIMIZERS(RECSTORE_ENTRY)
#undef RECSTORE_ENTRY
  }
  return {};
}

int64_t OptimizerConfig::element_states() const {
  const auto all = states();
  return std::count_if(all.begin(), all.end(), [](const OptimizerState& state) { return !state.row_wise; });
}

StepScalars step_scalars(const OptimizerConfig& o, float learning_rate, int64_t step) {
  // These are computed in double: in float, 1 - 0.999 has an error of 1e-5.
  const double lr = learning_rate, t = static_cast<double>(step);
  const double bias1 = 1.0 / (1.0 - std::pow(o.beta1, t)), bias2 = 1.0 / (1.0 - std::pow(o.beta2, t));
  const auto f = [](double x) { return static_cast<float>(x); };
  StepScalars s;
  s.learning_rate = learning_rate;
  s.eps = f(o.eps);
  s.weight_decay = o.decouple ? 0.0f : f(o.weight_decay);
  s.decay_factor = f(1.0 - lr * o.weight_decay);
  s.momentum = f(o.momentum);
  s.beta1 = f(o.beta1);
  s.beta2 = f(o.beta2);
  s.one_minus_beta1 = f(1.0 - o.beta1);
  s.one_minus_beta2 = f(1.0 - o.beta2);
  s.adam_rate = f(lr * bias1);
  s.bias1 = f(bias1);
  s.bias2 = f(bias2);
  s.eta = f(o.eta);
  s.alpha = f(o.alpha);
  s.one_minus_alpha = f(1.0 - o.alpha);
  s.l1 = f(o.l1);
  s.l2 = f(o.l2);
  s.lr_power = f(o.lr_power);
  s.beta = f(o.beta);
  s.max_gradient_norm = f(o.max_gradient_norm);
  s.max_norm = f(o.max_norm);
  s.decouple = o.decouple && o.weight_decay != 0.0;
  if (o.user != nullptr) o.user->once(o.hyperparameters.data(), lr, t, s.user);
  return s;
}

}  // namespace recstore
