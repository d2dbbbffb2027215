// available_memory() with files as Linux writes them: memory of the machine, and of the control groups of the process.

#include "base/memory.h"

#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#include "testing.h"

using recstore::available_memory;

namespace {

// A temporary folder that replaces "/".
class Root {
 public:
  Root() {
    CHECK(mkdtemp(path_) != nullptr);
    write("/proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    800 kB\n");
  }
  ~Root() { CHECK(std::system(("rm -r " + std::string(path_)).c_str()) == 0); }

  void write(const std::string& file, const std::string& text) const {
    for (size_t at = 1; (at = file.find('/', at)) != std::string::npos; ++at) {
      mkdir((path_ + file.substr(0, at)).c_str(), 0700);
    }
    std::ofstream(path_ + file) << text;
  }

  size_t available() const { return available_memory(path_); }

 private:
  char path_[40] = "/tmp/available_memory.XXXXXX";
};

void test_machine() {
  Root root;
  CHECK(root.available() == 800 * 1024);
  root.write("/proc/self/cgroup", "0::/\n");
  root.write("/sys/fs/cgroup/memory.max", "max\n");
  CHECK(root.available() == 800 * 1024);
}

void test_container_of_version_2() {
  Root root;
  root.write("/proc/self/cgroup", "0::/\n");
  root.write("/sys/fs/cgroup/memory.max", "300000\n");
  root.write("/sys/fs/cgroup/memory.current", "200000\n");
  CHECK(root.available() == 100000);
  root.write("/sys/fs/cgroup/memory.stat", "anon 150000\ninactive_file 30000\nactive_file 20000\nworkingset 9\n");
  CHECK(root.available() == 150000);
  root.write("/sys/fs/cgroup/memory.current", "400000\n");
  CHECK(root.available() == 0);
}

void test_slice_of_version_2() {
  Root root;
  root.write("/proc/self/cgroup", "0::/system.slice/job.service\n");
  root.write("/sys/fs/cgroup/system.slice/job.service/memory.max", "max\n");
  root.write("/sys/fs/cgroup/system.slice/memory.max", "500000\n");
  root.write("/sys/fs/cgroup/system.slice/memory.current", "100000\n");
  CHECK(root.available() == 400000);
  root.write("/sys/fs/cgroup/system.slice/job.service/memory.max", "90000\n");
  root.write("/sys/fs/cgroup/system.slice/job.service/memory.current", "20000\n");
  CHECK(root.available() == 70000);
}

void test_version_1() {
  Root root;
  root.write("/proc/self/cgroup", "12:cpu,cpuacct:/job\n4:memory:/slurm/job_7\n1:name=systemd:/other\n0::/\n");
  root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "900000000\n");
  CHECK(root.available() == 800 * 1024);
  root.write("/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "200000\n");
  root.write("/sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", "150000\n");
  root.write("/sys/fs/cgroup/memory/slurm/job_7/memory.stat",
             "inactive_file 1\ntotal_inactive_file 10000\ntotal_active_file 5000\n");
  CHECK(root.available() == 65000);
}

}  // namespace

int main() {
  test_machine();
  test_container_of_version_2();
  test_slice_of_version_2();
  test_version_1();
  CHECK(available_memory() > 0);
  std::puts("test_available_memory passed");
}
