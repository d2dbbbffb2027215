#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/fields.h"

namespace recstore {

// A state that an optimizer keeps for each row between updates.
struct OptimizerState {
  const char* name;  // the name in torch.optim and in FBGEMM's get_optimizer_state()
  bool row_wise;     // one number for each row, in RowAside::state; else one for each element, behind the row's weights
  bool is_square;    // a sum or an average of squares; each row-wise state is one
};

// The optimizers: the name, the value (`kind` in torchrec_recstore/optim.py), and the states, element-wise ones first,
// in the order in which they are stored behind the weights. The struct <name>Step in row_steps.inl has the arithmetic.
// AdamW is Adam, because FBGEMM's Adam decouples its weight decay too.
#define RECSTORE_OPTIMIZERS(ENTRY)                                                    \
  ENTRY(Sgd, 0, {"momentum_buffer", false, false}) /* only with momentum */           \
  ENTRY(Adagrad, 1, {"sum", false, true})                                             \
  ENTRY(RowWiseAdagrad, 2, {"sum", true, true})                                       \
  ENTRY(Adam, 3, {"exp_avg", false, false}, {"exp_avg_sq", false, true})              \
  ENTRY(PartialRowWiseAdam, 4, {"exp_avg", false, false}, {"exp_avg_sq", true, true}) \
  ENTRY(Lamb, 5, {"exp_avg", false, false}, {"exp_avg_sq", false, true})              \
  ENTRY(PartialRowWiseLamb, 6, {"exp_avg", false, false}, {"exp_avg_sq", true, true}) \
  ENTRY(LarsSgd, 7, {"momentum_buffer", false, false})                                \
  ENTRY(RmsProp, 8, {"square_avg", false, true})                                      \
  ENTRY(Ftrl, 9, {"accumulator", false, true}, {"linear", false, false})              \
  ENTRY(Adadelta, 10, {"square_avg", false, true}, {"acc_delta", false, true})

enum class OptimizerKind : int64_t {
#define RECSTORE_ENTRY(name, value, ...) k##name = value,
  RECSTORE_OPTIMIZERS(RECSTORE_ENTRY)
#undef RECSTORE_ENTRY
};

// The number of kinds. Their values are 0 to kOptimizers - 1.
#define RECSTORE_ENTRY(...) +1
constexpr int64_t kOptimizers = 0 RECSTORE_OPTIMIZERS(RECSTORE_ENTRY);
#undef RECSTORE_ENTRY

// The most numbers that the functions of a user-defined optimizer get: its hyperparameters, and those of its `once`.
constexpr int64_t kUserNumbers = 32;

// A user-defined optimizer: RowOptimizer in torchrec_recstore/optim.py. Its functions are in a library,
// whose source is row_step.inl.
struct UserStep {
  // Computes the numbers of an update, from the hyperparameters, the learning rate, and the number of the update from
  // 1.
  void (*once)(const double* hyperparameters, double learning_rate, double step, float* numbers);
  // Updates a row: weights and gradient (columns,), element-wise states (states, columns), and the row-wise state.
  void (*row)(int64_t columns, float* w, const float* g, float* elements, float* row_state, const float* numbers);
  int64_t hyperparameters;
  int64_t element_states;
  std::vector<OptimizerState> states;
};

// Loads a library, once in a process. Returns the value of `kind` by which OptimizerConfig::of() finds the optimizer.
// Throws InvalidArgument.
int64_t load_optimizer(const std::string& path);

// The numbers of an optimizer; torchrec_recstore/optim.py has the formulas. Numbers that a kind does not use are 0. The
// learning rate is an argument of each update.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kRowWiseAdagrad;
  double eps = 1e-8;
  double weight_decay = 0.0;
  // Adagrad: shrink the weights by lr * weight_decay instead of adding the decay to the gradient.
  bool decouple = false;
  double momentum = 0.0;
  double beta1 = 0.0;
  double beta2 = 0.0;
  double eta = 0.0;
  double alpha = 0.0;
  double l1 = 0.0;
  double l2 = 0.0;
  double lr_power = 0.0;
  double beta = 0.0;
  double max_gradient = 0.0;       // 0: no clipping
  double max_gradient_norm = 0.0;  // 0: no clipping
  double max_norm = 0.0;           // 0: no bound

  const UserStep* user = nullptr;       // a user-defined optimizer, which reads none of the numbers before max_gradient
  std::vector<double> hyperparameters;  // of the user-defined optimizer

  // Takes the fields that have the names above. hyperparameters: those of a user-defined optimizer, in the order of
  // their names in RowCode. Throws InvalidArgument if a field is missing or out of range.
  static OptimizerConfig of(int64_t kind, Fields<double>& numbers, std::vector<double> hyperparameters);

  std::vector<OptimizerState> states() const;
  // Number of element-wise states.
  int64_t element_states() const;
};

// The scalars of an optimizer in one update, computed once for all rows.
struct StepScalars {
  float learning_rate;
  float eps;
  float weight_decay;  // added to the gradient; 0 if the optimizer decouples it
  float decay_factor;  // 1 - lr * weight_decay, for the optimizers that decouple it
  float momentum;
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float adam_rate;     // lr / (1 - beta1**t)
  float bias1, bias2;  // 1 / (1 - beta**t)
  float eta;
  float alpha, one_minus_alpha;
  float l1, l2, lr_power, beta;
  float max_gradient_norm;
  float max_norm;
  bool decouple;
  float user[kUserNumbers] = {};
  // Whether an update does more than the optimizer's own step: clipping, a bound on the norm, or decoupled decay.
  bool extras() const { return decouple || max_gradient_norm > 0.0f || max_norm > 0.0f; }
};

// step: the number of this update of the table; the first is 1.
StepScalars step_scalars(const OptimizerConfig& optimizer, float learning_rate, int64_t step);

}  // namespace recstore
