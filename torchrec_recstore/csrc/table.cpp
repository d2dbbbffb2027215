#include "table.h"

#include <algorithm>
#include <random>
#include <utility>

#include "error.h"

namespace recstore {
namespace {

uint64_t random_salt() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

Table::Table(TableConfig config)
    : config_(std::move(config)), index_(random_salt()), rows_(config_), initializer_(config_) {}

void Table::close() {
  if (!open_) return;
  index_.clear();
  rows_.clear();
  open_ = false;
}

void Table::check_open() const {
  if (!open_) throw InvalidArgument("table '" + config_.name + "' is closed");
}

int64_t Table::remove(const int64_t* ids, int64_t n) {
  int64_t removed = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Slot slot = index_.erase(ids[i], index_.hash(ids[i]));
    if (slot == kNoSlot) continue;
    rows_.give_back(slot, next_pass_ - 1);
    ++removed;
  }
  rows_.reclaim(pending_.empty() ? next_pass_ : pending_.begin()->number);
  return removed;
}

void Table::ids(int64_t* out) const {
  int64_t* end = out;
  index_.for_each([&](int64_t id, Slot) { *end++ = id; });
  std::sort(out, end);
}

uint32_t Table::begin_step() { return static_cast<uint32_t>(++counters_.steps); }

uint64_t Table::begin_pass(PendingPass* pass) {
  const uint64_t number = next_pass_++;
  pending_.insert({number, pass});
  return number;
}

void Table::end_pass(uint64_t number) {
  pending_.erase({number, nullptr});
  rows_.reclaim(pending_.empty() ? next_pass_ : pending_.begin()->number);
}

void Table::settle_passes(Executor& executor) {
  for (const Numbered& numbered : pending_) numbered.pass->settle(*this, executor);
}

}  // namespace recstore
