#pragma once

#include <cstdint>
#include <vector>

namespace recstore {

// The native order of ops.py, _KINDS. AdamW is kAdam: FBGEMM's Adam decouples its weight decay as well.
enum class OptimizerKind : int64_t {
  kSgd = 0,
  kAdagrad = 1,
  kRowWiseAdagrad = 2,
  kAdam = 3,
  kPartialRowWiseAdam = 4,
  kLamb = 5,
  kPartialRowWiseLamb = 6,
  kLarsSgd = 7,
  kRmsProp = 8,
  kFtrl = 9,
};

// What an optimizer keeps of a row between updates.
struct OptimizerState {
  const char* name;  // as torch.optim and FBGEMM's get_optimizer_state() call it
  bool row_wise;     // one number a row, in RowMeta::state; else one an element, behind the row's weights
};

// Formulas: torchrec_recstore/optim.py. Numbers that a kind has no use for are 0. The learning rate
// comes with each update.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kRowWiseAdagrad;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decouple = false;  // Adagrads: shrink the weights by lr * weight_decay instead of adding to the gradient
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

  // From the numbers above in their order, without the kind. Throws InvalidArgument.
  static OptimizerConfig of(int64_t kind, const std::vector<double>& numbers);

  // The element-wise states come first, in the order in which they lie behind the weights.
  std::vector<OptimizerState> states() const;
  // Optimizer state that lies behind a row's weights, as a multiple of them.
  int64_t element_states() const;
};

// What the row loops need of an optimizer in one update, worked out once for all rows.
struct StepScalars {
  float learning_rate;
  float eps;
  float weight_decay;    // added to the gradient; 0 where it is decoupled
  float decay_factor;    // 1 - lr * weight_decay, for the optimizers that decouple it
  float momentum;
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float adam_rate;       // lr / (1 - beta1**t)
  float bias1, bias2;    // 1 / (1 - beta**t)
  float eta;
  float alpha, one_minus_alpha;
  float l1, l2, lr_power, beta;
  float max_gradient_norm;
  float max_norm;
  bool decouple;
  // Whether rows need more than the optimizer's own step: what clips, bounds or decouples.
  bool extras() const { return decouple || max_gradient_norm > 0.0f || max_norm > 0.0f; }
};

// step: the number of this update of the table, from 1.
StepScalars step_scalars(const OptimizerConfig& optimizer, float learning_rate, int64_t step);

}  // namespace recstore
