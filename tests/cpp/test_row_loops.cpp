// The row loops of each instruction set of this processor give the same bits as those of every other processor:
// the digests below were computed by the baseline of x86-64. NaN is converted, but not computed, because processors
// give it different signs.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "base/error.h"
#include "row_loops/row_loops.h"
#include "rows/philox.h"
#include "rows/table.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr uint64_t kConversions = 0xe1f049b03f3483b8;
constexpr uint64_t kTables = 0x693d126982751920;

constexpr RowType kRowTypes[] = {RowType::kFloat32, RowType::kFloat16, RowType::kBfloat16, RowType::kInt8};

// FNV-1a.
class Digest {
 public:
  template <class T>
  void add(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) value_ = (value_ ^ bytes[i]) * 0x100000001b3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// Every number of 16 bits is widened, and floats of all magnitudes are narrowed.
uint64_t conversions() {
  const RowLoops& loops = row_loops();
  Digest digest;
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> values(halves.size());
  for (const RowType type : {RowType::kFloat16, RowType::kBfloat16}) {
    loops.widen(type, reinterpret_cast<const float*>(halves.data()), static_cast<int64_t>(halves.size()),
                values.data());
    digest.add(values);
  }
  std::mt19937_64 random(1);
  for (float& value : values) {
    auto number = static_cast<uint32_t>(random());
    // Beside the bounds of float16.
    if (number % 4 == 0) number = (number & 0x80000FFFu) | (101u + (number >> 12) % 46u) << 23;
    std::memcpy(&value, &number, sizeof(value));
  }
  for (const RowType type : {RowType::kFloat16, RowType::kBfloat16}) {
    loops.narrow(type, values.data(), static_cast<int64_t>(values.size()), reinterpret_cast<float*>(halves.data()));
    digest.add(halves);
  }
  for (float& value : values) value = value >= 0.0f ? value : 0.0f;  // neither negative nor NaN
  for (const bool is_square : {false, true}) {
    loops.write_state(values.data(), static_cast<int64_t>(values.size()), is_square, halves.data());
    digest.add(halves);
    loops.read_state(halves.data(), static_cast<int64_t>(halves.size()), is_square, values.data());
    digest.add(values);
  }
  for (int64_t columns = 1; columns < 70; ++columns) {
    std::vector<float> row(static_cast<size_t>(columns)),
        stored(static_cast<size_t>(weight_floats(RowType::kInt8, columns)));
    for (float& weight : row) {
      weight = static_cast<float>(static_cast<int32_t>(random())) * (columns % 3 == 0 ? 0.0f : 0x1p-20f);
    }
    loops.narrow(RowType::kInt8, row.data(), columns, stored.data());
    digest.add(stored);
    loops.widen(RowType::kInt8, stored.data(), columns, row.data());
    digest.add(row);
  }
  return digest.value();
}

// Three steps of a table.
void train(Digest& digest, TableConfig config, int64_t columns) {
  constexpr int64_t kBags = 60;
  config.column_end = columns;
  const auto group = std::make_shared<const Group>(std::vector{std::make_shared<Table>(config)},
                                                   std::vector<Routing>(1), std::vector<int64_t>{0}, columns % 2 == 0);
  Threads executor(2);
  std::mt19937_64 random(2);
  const auto fraction = [&] { return static_cast<float>(random() % 2001) / 1000.0f - 1.0f; };
  for (int step = 0; step < 3; ++step) {
    std::vector<int64_t> ids, offsets{0};
    std::vector<float> weights, grad;
    for (int64_t bag = 0; bag < kBags; ++bag) {
      for (uint64_t left = random() % 5; left > 0; --left) {
        ids.push_back(static_cast<int64_t>(random() % 80));
        weights.push_back(fraction());
      }
      offsets.push_back(static_cast<int64_t>(ids.size()));
    }
    for (int64_t i = 0; i < kBags * columns; ++i) grad.push_back(fraction());
    std::vector<float> out(grad.size()), grad_weights(ids.size());
    const Batch batch{ids.data(), static_cast<int64_t>(ids.size()), offsets.data(),
                      step == 0 ? nullptr : weights.data(), kBags};
    const auto pass = begun(group, batch, out.data(), executor);
    pass->backward(grad.data(), {0.1f}, step == 0 ? nullptr : grad_weights.data(), executor);
    digest.add(out);
    digest.add(grad_weights);
  }
}

uint64_t tables() {
  Digest digest;
  for (int64_t number = 0; number < kOptimizers; ++number) {
    for (const RowType type : kRowTypes) {
      for (const StateType state : {StateType::kFloat32, StateType::kFloat16}) {
        for (const bool at_random : {false, true}) {
          if (at_random && type == RowType::kFloat32) continue;
          TableConfig config;
          config.name = "t";
          config.seed = 3;
          config.row_type = type;
          config.state_type = state;
          config.stochastic_rounding = at_random;
          config.init = {InitKind::kUniform, -1.0, 1.0};
          set_optimizer(config, static_cast<OptimizerKind>(number));
          for (const int64_t columns : {16, 23}) train(digest, config, columns);
        }
      }
    }
  }
  return digest.value();
}

// The initial weights of any columns of a row, one column at a time.
void check_uniform() {
  constexpr uint64_t kKey = 0x0123456789abcdefULL;
  constexpr int64_t kId = -0x123456789abcdefLL;
  constexpr float kLow = -0.3f, kHigh = 0.5f, kUntouched = 7.0f;
  const int64_t ranges[][2] = {{0, 1}, {0, 16}, {3, 70}, {5, 9}, {64, 128}, {17, 200}, {0, 256}, {31, 97}};
  for (const auto& [begin, end] : ranges) {
    std::vector<float> row(static_cast<size_t>(end - begin + 1), kUntouched);
    row_loops().fill_uniform(kKey, kId, begin, end, kLow, kHigh, row.data());
    for (int64_t column = begin; column < end; ++column) {
      uint32_t words[4][1];
      philox_blocks<1>(kKey, static_cast<uint64_t>(kId), static_cast<uint32_t>(column / 4), words);
      const auto top24 = static_cast<float>(static_cast<int32_t>(words[column % 4][0] >> 8));
      CHECK(row[static_cast<size_t>(column - begin)] == kLow + (kHigh - kLow) * (top24 * 0x1p-24f));
    }
    CHECK(row.back() == kUntouched);
  }
}

void check(const char* isa) {
  setenv("RECSTORE_ISA", isa, 1);
  try {
    row_loops();
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find("this processor does not support") != std::string::npos);
    return;
  }
  CHECK(row_loops().name == std::string(isa));
  check_uniform();
  const uint64_t found[] = {conversions(), tables()};
  std::fprintf(stderr, "%s: 0x%016llx 0x%016llx\n", isa, static_cast<unsigned long long>(found[0]),
               static_cast<unsigned long long>(found[1]));
  CHECK(found[0] == kConversions);
  CHECK(found[1] == kTables);
}

}  // namespace

int main() {
  // A process chooses one instruction set, so each has a process.
  for (const char* isa : {"baseline", "neon", "avx2", "avx512"}) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      check(isa);
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  std::puts("test_row_loops passed");
}
