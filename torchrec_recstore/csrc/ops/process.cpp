// Ops that belong to no table (buffer pool, instruction set, hashing of ids), torch's threads, and forks.

#include <Python.h>
#include <pthread.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <vector>

#include "ops/registry.h"
#include "ops/tensors.h"
#include "row_loops/row_loops.h"

// A function of the OpenMP runtime that torch has loaded; null if the runtime is older than OpenMP 5.
extern "C" int omp_pause_resource_all(int kind) __attribute__((weak));

namespace recstore {
namespace {

constexpr int kOmpPauseSoft = 1;

class TorchExecutor final : public Executor {
 public:
  int threads() const override { return alone_ ? 1 : static_cast<int>(torch::stable::get_num_threads()); }
  void run(int workers, Body body, void* context) override {
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(context);
    });
  }

  // A forked child lacks the threads of libgomp's pool and would wait for them forever. Therefore the threads end
  // before the fork and start again when they are needed. If the runtime cannot end them, the child works on one
  // thread.
  void before_fork() { ended_ = omp_pause_resource_all != nullptr && omp_pause_resource_all(kOmpPauseSoft) == 0; }
  void after_fork_in_child() { alone_ = alone_ || !ended_; }

 private:
  bool ended_ = false;
  bool alone_ = false;
};

TorchExecutor& torch_executor() {
  static auto* shared = new TorchExecutor;
  return *shared;
}

[[maybe_unused]] const int fork_handlers = pthread_atfork(
    [] {
      before_fork();
      torch_executor().before_fork();
    },
    [] { after_fork_in_parent(); },
    [] {
      after_fork_in_child();
      torch_executor().after_fork_in_child();
    });

// Bytes of the buffer pool: in use, idle, and the bound on idle bytes.
std::vector<int64_t> buffer_pool_bytes() {
  const BufferPool::Bytes bytes = BufferPool::instance().bytes();
  return {static_cast<int64_t>(bytes.used), static_cast<int64_t>(bytes.idle), static_cast<int64_t>(bytes.most_idle)};
}

std::string instruction_set() { return row_loops().name; }

// Returns each id, mapped by mix() or by unmix().
Tensor mix_ids_op(Tensor ids, bool inverse) {
  ids = checked_ids(ids);
  Tensor out = empty({ids.size(0)}, ScalarType::Long);
  mix_ids(id_data(ids), ids.size(0), inverse, mutable_data<int64_t>(out), executor());
  return out;
}

}  // namespace

Executor& executor() { return torch_executor(); }

}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("buffer_pool_bytes() -> int[]");
  m.def("instruction_set() -> str");
  m.def("mix_ids(Tensor ids, bool inverse) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("buffer_pool_bytes", RECSTORE_OP(buffer_pool_bytes));
  m.impl("instruction_set", RECSTORE_OP(instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) { m.impl("mix_ids", RECSTORE_OP(mix_ids_op)); }

// The module is empty. Importing it loads the library, which registers the ops.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
