// Handles of native objects: owned handles end with their owner, and a forked process refuses its parent's handles.

#include "ops/registry.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer_pool.h"
#include "base/error.h"
#include "rows/table.h"
#include "testing.h"

using namespace recstore;

namespace {

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void handles_name_objects() {
  Registry<int> registry("number", ": made for a test");
  const int64_t first = registry.add(std::make_shared<int>(7)), second = registry.add(std::make_shared<int>(8));
  CHECK(first != second && *registry.get(first) == 7 && *registry.get(second) == 8);
  const auto removed = registry.remove(first);
  CHECK(*removed == 7 && registry.remove(first) == nullptr);
  CHECK(contains(error_of([&] { registry.get(first); }), "no open number has the handle 1: made for a test"));
  CHECK(contains(error_of([&] { registry.get(99); }), "no open number has the handle 99"));
}

void owned_handles_end_with_their_owner() {
  Registry<int> registry("number");
  const auto kept = std::make_shared<int>(1);
  std::vector<int64_t> handles;
  {
    OwnedHandles<int> owned(registry, {kept, std::make_shared<int>(2)});
    CHECK(owned.size() == 2);
    handles.assign(owned.data(), owned.data() + 2);
    CHECK(*registry.get(handles[0]) == 1 && *registry.get(handles[1]) == 2);
    owned.data()[0] = owned.data()[1] = -5;  // as a compiled graph may do
  }
  for (const int64_t handle : handles) CHECK_THROWS(registry.get(handle), InvalidArgument);
  CHECK(kept.use_count() == 1);
}

// Runs a test in a forked process.
template <class Test>
void in_child(const Test& test) {
  before_fork();
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    after_fork_in_child();
    test();
    _exit(0);
  }
  after_fork_in_parent();
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void a_forked_process_refuses_tables_of_its_parent() {
  TableConfig config;
  config.column_end = 2;
  const int64_t handle = tables().add(std::make_shared<Table>(config));
  in_child([&] {
    const std::string error = error_of([&] { tables().get(handle); });
    CHECK(contains(error, "the table was made before this process was forked") && contains(error, "'spawn'"));
    const int64_t own = tables().add(std::make_shared<Table>(config));
    CHECK(own != handle && LockedTable(tables().get(own))->size() == 0);
    in_child([&] { CHECK(contains(error_of([&] { tables().get(own); }), "was forked")); });
    CHECK(BufferPool::instance().take(100).data() != nullptr);
  });
  CHECK(tables().get(handle)->size() == 0);
  CHECK(BufferPool::instance().take(100).data() != nullptr);
  tables().remove(handle);
}

}  // namespace

int main() {
  handles_name_objects();
  owned_handles_end_with_their_owner();
  a_forked_process_refuses_tables_of_its_parent();
  std::puts("test_registry passed");
}
