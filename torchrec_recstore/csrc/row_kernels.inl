// The loops over rows. Each row_kernels_*.cpp includes this file for one instruction set, and defines the namespace
// RECSTORE_ISA_NAMESPACE, the string RECSTORE_ISA_NAME, the number RECSTORE_WIDTH of 32-bit lanes of a register, and the
// macros RECSTORE_STREAM(dst, register) and RECSTORE_MATCH(line, id).

namespace recstore {
namespace RECSTORE_ISA_NAMESPACE {
namespace {

#include "lanes.inl"

constexpr int64_t kPrefetchIds = 16;    // rows that are prefetched ahead, at least
constexpr int64_t kPrefetchLines = 96;  // cache lines of them, at least

inline void prefetch_row(const float* row, int64_t floats) {
  for (int64_t d = 0; d < floats; d += 16) __builtin_prefetch(row + d, 0, 3);
}

#include "index_find.inl"
#include "row_types.inl"

void fill_uniform(uint64_t key, int64_t id, int64_t column_begin, int64_t column_end, float low, float high, float* row) {
  constexpr int64_t kRun = 4 * kLanes;  // columns of one call of philox_blocks()
  const float width = high - low;
  uint32_t words[4][kLanes];
  float values[kRun];
  for (int64_t first = column_begin / kRun * kRun; first < column_end; first += kRun) {
    philox_blocks<kLanes>(key, static_cast<uint64_t>(id), static_cast<uint32_t>(first / 4), words);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int w = 0; w < 4; ++w) {
        // 24 bits fit a float exactly, so the value is the same on every processor.
        values[lane * 4 + w] = low + width * (static_cast<float>(static_cast<int32_t>(words[w][lane] >> 8)) * 0x1p-24f);
      }
    }
    const int64_t begin = first > column_begin ? first : column_begin;
    const int64_t end = first + kRun < column_end ? first + kRun : column_end;
    __builtin_memcpy(row + (begin - column_begin), values + (begin - first), static_cast<size_t>(end - begin) * sizeof(float));
  }
}

template <bool Stream>
inline void put(float* out, Vec v) {
  if (Stream) {
    stream_lanes(out, v);
  } else {
    store(out, v);
  }
}

// Pools sixteen columns of one bag, or the last `n` columns.
template <class Row>
inline Vec pool_columns(const PoolArgs& a, int64_t begin, int64_t end, int64_t column, int64_t n) {
  Vec sum{};
  for (int64_t p = begin; p < end; ++p) {
    if (a.slots[p] == kNoSlot) continue;
    const Vec v = Row::load(stored<Row>(a.rows.data + a.slots[p] * a.rows.stride) + column, n);
    sum += a.weights == nullptr ? v : v * broadcast(a.weights[p]);
  }
  if (a.mean && end - begin > 1) sum /= broadcast(static_cast<float>(end - begin));
  return sum;
}

// Pools Unroll * 16 columns of one bag, so that all cache lines of a row are read together.
template <class Row, int Unroll, bool Stream>
inline void pool_block(const PoolArgs& a, int64_t begin, int64_t end, int64_t column, float* out) {
  Vec sum[Unroll] = {};
  for (int64_t p = begin; p < end; ++p) {
    if (a.slots[p] == kNoSlot) continue;
    const auto* row = stored<Row>(a.rows.data + a.slots[p] * a.rows.stride) + column;
    if (a.weights == nullptr) {
      for (int u = 0; u < Unroll; ++u) sum[u] += Row::load(row + u * kLanes, kLanes);
    } else {
      const Vec w = broadcast(a.weights[p]);
      for (int u = 0; u < Unroll; ++u) sum[u] += Row::load(row + u * kLanes, kLanes) * w;
    }
  }
  if (a.mean && end - begin > 1) {
    const Vec count = broadcast(static_cast<float>(end - begin));
    for (int u = 0; u < Unroll; ++u) sum[u] /= count;
  }
  for (int u = 0; u < Unroll; ++u) put<Stream>(out + u * kLanes, sum[u]);
}

// Prefetches the weights of a row.
template <class Row, class Columns>
inline void prefetch_weights(const PoolArgs& a, Columns columns, int64_t position) {
  const Slot slot = a.slots[position];
  prefetch_row(a.rows.data + (slot == kNoSlot ? 0 : slot) * a.rows.stride, Row::floats(columns));
}

template <class Row, bool Stream, class Columns>
void pool_bags(const PoolArgs& a, Columns columns) {
  const int64_t whole = columns / kLanes * kLanes;
  const int64_t rows = kPrefetchLines * kLanes / Row::floats(columns), ahead = rows < kPrefetchIds ? kPrefetchIds : rows;
  const int64_t last = a.bounds[a.bags];
  for (int64_t p = a.bounds[0]; p < a.bounds[0] + ahead && p < last; ++p) prefetch_weights<Row>(a, columns, p);
  for (int64_t bag = 0; bag < a.bags; ++bag) {
    const int64_t begin = a.bounds[bag], end = a.bounds[bag + 1];
    for (int64_t p = begin + ahead; p < end + ahead && p < last; ++p) prefetch_weights<Row>(a, columns, p);
    float* out = a.out + bag * a.out_stride;
    int64_t d = 0;
    for (; d + 4 * kLanes <= whole; d += 4 * kLanes) pool_block<Row, 4, Stream>(a, begin, end, d, out + d);
    for (; d < whole; d += kLanes) pool_block<Row, 1, Stream>(a, begin, end, d, out + d);
    if (d < columns) store(out + d, pool_columns<Row>(a, begin, end, d, columns - d), columns - d);
  }
}

// Calls work(columns); the number is a compile-time constant for the dims that most tables have.
template <class Work>
void with_columns(int64_t columns, const Work& work) {
  switch (columns) {
    case 16: return work(std::integral_constant<int64_t, 16>{});
    case 32: return work(std::integral_constant<int64_t, 32>{});
    case 64: return work(std::integral_constant<int64_t, 64>{});
    case 128: return work(std::integral_constant<int64_t, 128>{});
    default: return work(columns);
  }
}

void pool(const PoolArgs& a) {
  with_row_type(a.rows.type, [&](auto type) {
    using Row = decltype(type);
    with_columns(a.rows.columns, [&](auto columns) { a.stream ? pool_bags<Row, true>(a, columns) : pool_bags<Row, false>(a, columns); });
  });
}

inline const float* grad_of(const UpdateArgs& a, int64_t bag) {
  return a.grad + bag % a.batch->bags * a.grad_stride + a.column_offsets[bag / a.batch->bags];
}
inline float scale_of(const UpdateArgs& a, int64_t bag, int64_t position) {
  float scale = a.batch->weights == nullptr ? 1.0f : a.batch->weights[position];
  if (a.mean) {
    const int64_t length = a.batch->offset(bag + 1) - a.batch->offset(bag);
    if (length > 1) scale *= 1.0f / static_cast<float>(length);
  }
  return scale;
}

// Returns the sum of the scaled gradients of a position and of all positions that it links to. The sum is in a.scratch,
// unless it is a single gradient that needs no scaling.
template <class Columns>
inline const float* sum_gradients(const UpdateArgs& a, Columns columns, const float* grad, float scale, int64_t position) {
  Link next = a.links[position];
  if (next == 0 && scale == 1.0f && columns % kLanes == 0) return grad;
  const Vec first = broadcast(scale);
  for_each_run(columns, [&](int64_t d, auto n) { store(a.scratch + d, load(grad + d, n) * first); });
  while (next != 0) {
    const int64_t p = next - 1, bag = a.bag_of[p];
    next = a.links[p] & ~kNotFirst;
    if (next != 0) prefetch_row(grad_of(a, a.bag_of[next - 1]), columns);
    const float* g = grad_of(a, bag);
    const Vec s = broadcast(scale_of(a, bag, p));
    for_each_run(columns, [&](int64_t d, auto n) { store(a.scratch + d, load(a.scratch + d) + load(g + d, n) * s); });
  }
  return a.scratch;
}

#include "row_steps.inl"

template <class Row, class Step, bool Extras, class Columns>
void update_rows(const UpdateArgs& a, Columns columns) {
  const int64_t last = a.batch->offset(a.bag_end);
  const int64_t weight_floats = Row::floats(columns), stride = weight_floats + Step::kElementStates * columns;
  for (int64_t bag = a.bag_begin; bag < a.bag_end; ++bag) {
    const float* grad = grad_of(a, bag);
    for (int64_t p = a.batch->offset(bag), end = a.batch->offset(bag + 1); p < end; ++p) {
      if (p + kPrefetchIds < last && (a.links[p + kPrefetchIds] & kNotFirst) == 0) {
        const Slot ahead = a.slots[p + kPrefetchIds];
        prefetch_row(a.rows.data + ahead * stride, stride);
        __builtin_prefetch(a.rows.meta + ahead, 1, 3);
        prefetch_row(grad_of(a, a.bag_of[p + kPrefetchIds]), columns);
      }
      if ((a.links[p] & kNotFirst) != 0) continue;
      float* row = a.rows.data + a.slots[p] * stride;
      float* w = row;
      if constexpr (Row::kNarrow) {
        w = a.weights;
        widen_row<Row>(columns, row, w);
      }
      RowMeta& meta = a.rows.meta[a.slots[p]];
      const float* g = sum_gradients(a, columns, grad, scale_of(a, bag, p), p);
      if (Extras) g = before_step(a, columns, w, g);
      Step::run(a, columns, w, row + weight_floats, g, meta);
      if (Extras) after_step(a, columns, w);
      if constexpr (Row::kNarrow) {
        const StochasticRounding& rounding = a.rounding;
        if (rounding.key != 0) random_words(rounding.key, rounding.routing->raw_id(a.batch->ids[p]), rounding.column_begin, columns, a.random);
        narrow_row<Row>(columns, w, rounding.key == 0 ? nullptr : a.random, row);
      }
      if (a.step != 0) {
        count_step(meta, a.step, a.half_life);
      }
    }
  }
}

template <class Step>
void update_with(const UpdateArgs& a) {
  with_row_type(a.rows.type, [&](auto type) {
    using Row = decltype(type);
    // Extras are compiled separately, so that an update without them costs nothing more.
    if (a.scalars.extras()) return update_rows<Row, Step, true>(a, a.rows.columns);
    with_columns(a.rows.columns, [&](auto columns) { update_rows<Row, Step, false>(a, columns); });
  });
}

void update(const UpdateArgs& a) {
  switch (a.optimizer) {
    case OptimizerKind::kSgd: return a.scalars.momentum == 0.0f ? update_with<SgdStep>(a) : update_with<MomentumSgdStep>(a);
    case OptimizerKind::kAdagrad: return update_with<AdagradStep>(a);
    case OptimizerKind::kRowWiseAdagrad: return update_with<RowWiseAdagradStep>(a);
    case OptimizerKind::kAdam: return update_with<AdamStep>(a);
    case OptimizerKind::kPartialRowWiseAdam: return update_with<PartialRowWiseAdamStep>(a);
    case OptimizerKind::kLamb: return update_with<LambStep>(a);
    case OptimizerKind::kPartialRowWiseLamb: return update_with<PartialRowWiseLambStep>(a);
    case OptimizerKind::kLarsSgd: return update_with<LarsSgdStep>(a);
    case OptimizerKind::kRmsProp: return update_with<RmsPropStep>(a);
    case OptimizerKind::kFtrl: return update_with<FtrlStep>(a);
  }
}

float dot(RowType type, const float* row, const float* y, int64_t n) {
  return with_row_type(type, [&](auto kind) {
    using Row = decltype(kind);
    const auto* x = stored<Row>(row);
    Vec sum{};
    int64_t d = 0;
    for (; d + kLanes <= n; d += kLanes) sum += Row::load(x + d, kLanes) * load(y + d);
    if (d < n) sum += Row::load(x + d, n - d) * load(y + d, n - d);
    return reduce(sum);
  });
}

}  // namespace

extern const RowKernels kKernels;
const RowKernels kKernels = {RECSTORE_ISA_NAME, find, fill_uniform, pool, update, dot, widen, narrow};

}  // namespace RECSTORE_ISA_NAMESPACE
}  // namespace recstore
