#include "ops/registry.h"

#include "base/buffer_pool.h"
#include "cold/file_lock.h"
#include "cold/ssd_store.h"
#include "lookup/group.h"
#include "lookup/pass.h"
#include "rows/table.h"
#include "snapshot/snapshot.h"

namespace recstore {
namespace {

template <class Call>  // call(registry)
void for_each_registry(const Call& call) {
  call(tables());
  call(groups());
  call(passes());
  call(snapshots());
  call(ssd_stores());
  call(ssd_scans());
}

}  // namespace

Registry<Table>& tables() {
  static auto* registry = new Registry<Table>("table");
  return *registry;
}

Registry<const Group>& groups() {
  static auto* registry = new Registry<const Group>("group");
  return *registry;
}

Registry<Pass>& passes() {
  static auto* registry = new Registry<Pass>(
      "pass",
      ": the graph of the lookup was freed, or a saved-tensor hook replaced what a compiled lookup saved by a copy");
  return *registry;
}

Registry<Snapshot>& snapshots() {
  static auto* registry = new Registry<Snapshot>("snapshot");
  return *registry;
}

Registry<SsdStore>& ssd_stores() {
  static auto* registry = new Registry<SsdStore>("cold store");
  return *registry;
}

Registry<SsdScan>& ssd_scans() {
  static auto* registry = new Registry<SsdScan>("scan of a cold store");
  return *registry;
}

void before_fork() {
  for_each_registry([](auto& registry) { registry.before_fork(); });
  BufferPool::instance().before_fork();
  FileLock::before_fork();
}

void after_fork_in_parent() {
  for_each_registry([](auto& registry) { registry.after_fork_in_parent(); });
  BufferPool::instance().after_fork();
  FileLock::after_fork_in_parent();
}

void after_fork_in_child() {
  for_each_registry([](auto& registry) { registry.after_fork_in_child(); });
  BufferPool::instance().after_fork();
  FileLock::after_fork_in_child();
}

}  // namespace recstore
