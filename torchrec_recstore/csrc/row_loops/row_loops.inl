// The loops over rows. Each row_loops_*.cpp includes this file for one instruction set, and defines the namespace
// RECSTORE_ISA_NAMESPACE, the string RECSTORE_ISA_NAME, the number RECSTORE_WIDTH of 32-bit lanes of a register, the
// number RECSTORE_BLOCK of columns that are pooled together, and the macros RECSTORE_STREAM(dst, register) and
// RECSTORE_MATCH(line, id).
//
// RECSTORE_ANY_COLUMNS leaves out the loops in which the number of columns is a constant: with them, the compiler takes
// twice as long.
//
// A library that only searches the index and reads rows defines RECSTORE_READS_ONLY: the loops that pool and update
// rows take the compiler most of its time.

namespace recstore {
namespace RECSTORE_ISA_NAMESPACE {
namespace {

#include "row_loops/lanes.inl"

constexpr int64_t kPrefetchIds = 16;     // rows that are prefetched ahead, at least
constexpr int64_t kPrefetchLines = 128;  // cache lines of them, at least

RECSTORE_PREFETCHES inline void prefetch_row(const float* row, int64_t floats) {
  for (int64_t d = 0; d < floats; d += 16) __builtin_prefetch(row + d, 0, 3);
}

#include "index/index_find.inl"
#include "row_loops/row_types.inl"

#ifndef RECSTORE_READS_ONLY

void fill_uniform(uint64_t key, int64_t id, int64_t column_begin, int64_t column_end, float low, float high,
                  float* row) {
  const auto draw = [&](auto run, int64_t first, float* out) {
    draw_uniform<decltype(run)::value>(key, static_cast<uint64_t>(id), first, low, high - low, out);
  };
  for (int64_t first = column_begin / kShortRun * kShortRun; first < column_end;) {
    if (first >= column_begin && first + kLongRun <= column_end) {
      draw(std::integral_constant<int64_t, kLongRun>(), first, row + (first - column_begin));
      first += kLongRun;
      continue;
    }
    float values[kShortRun];
    draw(std::integral_constant<int64_t, kShortRun>(), first, values);
    const int64_t begin = first > column_begin ? first : column_begin;
    const int64_t end = first + kShortRun < column_end ? first + kShortRun : column_end;
    __builtin_memcpy(row + (begin - column_begin), values + (begin - first),
                     static_cast<size_t>(end - begin) * sizeof(float));
    first += kShortRun;
  }
}

// The rows of a run that are prefetched while others are pooled: each position prefetches the row `ahead` positions
// later, below `last`. One row for each row that is pooled keeps the loads evenly apart, which is faster than a loop
// before a bag.
struct Later {
  int64_t ahead;
  int64_t last;
};

// Returns how many rows of this many floats are prefetched ahead.
inline int64_t rows_ahead(int64_t floats) {
  const int64_t rows = kPrefetchLines * kLanes / floats;
  return rows < kPrefetchIds ? kPrefetchIds : rows;
}

// Prefetches the weights of a row.
template <class Row, class Columns>
RECSTORE_PREFETCHES inline void prefetch_weights(const PoolArgs& a, Columns columns, int64_t position) {
  const Slot slot = a.slots[position];
  prefetch_row(a.rows.data + (slot == kNoSlot ? 0 : slot) * a.rows.stride, Row::floats(columns));
}
template <class Row, class Columns>
RECSTORE_PREFETCHES inline void prefetch_later(const PoolArgs& a, Columns columns, int64_t position, Later later) {
  if (position + later.ahead < later.last) prefetch_weights<Row>(a, columns, position + later.ahead);
}

// Pools the last n columns of one bag, which are fewer than kLanes.
template <class Row, class Columns>
inline void pool_rest(const PoolArgs& a, Columns columns, int64_t begin, int64_t end, int64_t column, int64_t n,
                      Later later, float* out) {
  Vec sum{};
  for (int64_t p = begin; p < end; ++p) {
    if (column == 0) prefetch_later<Row>(a, columns, p, later);
    if (a.slots[p] == kNoSlot) continue;
    const Vec v = typename Row::Reader(a.rows.data + a.slots[p] * a.rows.stride, columns).load(column, n);
    sum += a.weights == nullptr ? v : v * broadcast(a.weights[p]);
  }
  if (a.mean && end - begin > 1) sum /= broadcast(static_cast<float>(end - begin));
  store(out, sum, n);
}

// The columns that are pooled together, so that all cache lines of a row are read together. The sums take at most half
// of the registers.
constexpr int kBlock = RECSTORE_BLOCK;

// Pools n columns of one bag.
template <class Row, int n, bool Stream, class Columns>
inline void pool_block(const PoolArgs& a, Columns columns, int64_t begin, int64_t end, int64_t column, Later later,
                       float* out) {
  using Block = Lanes<float, n>;
  const Slot* slots = a.slots;
  const float *data = a.rows.data, *weights = a.weights;
  const int64_t stride = a.rows.stride;
  const auto load_block = [=](Slot slot) {
    return typename Row::Reader(data + slot * stride, columns).template load<n>(column);
  };
  Block sum{};
  if (weights == nullptr) {
    for (int64_t p = begin; p < end; ++p) {
      if (column == 0) prefetch_later<Row>(a, columns, p, later);
      if (slots[p] != kNoSlot) sum += load_block(slots[p]);
    }
  } else {
    for (int64_t p = begin; p < end; ++p) {
      if (column == 0) prefetch_later<Row>(a, columns, p, later);
      if (slots[p] != kNoSlot) sum += load_block(slots[p]) * broadcast<Block>(weights[p]);
    }
  }
  if (a.mean && end - begin > 1) sum /= broadcast<Block>(static_cast<float>(end - begin));
  if (Stream) {
    stream_lanes(out, sum);
  } else {
    store_lanes(out, sum);
  }
}

template <class Row, bool Stream, class Columns>
__attribute__((noinline)) void pool_bags(const PoolArgs& a, Columns columns) {
  const int64_t whole = columns / kLanes * kLanes;
  const int64_t ahead = rows_ahead(Row::floats(columns));
  const int64_t last = a.bounds == nullptr ? a.first + a.bags : a.bounds[a.bags];
  const Later later{ahead, last};
  for (int64_t p = a.first; p < a.first + ahead && p < last; ++p) prefetch_weights<Row>(a, columns, p);
  for (int64_t bag = 0; bag < a.bags; ++bag) {
    const int64_t begin = a.bounds == nullptr ? a.first + bag : a.bounds[bag];
    const int64_t end = a.bounds == nullptr ? begin + 1 : a.bounds[bag + 1];
    float* out = a.out + bag * a.out_stride;
    int64_t d = 0;
    for (; d + kBlock <= whole; d += kBlock) pool_block<Row, kBlock, Stream>(a, columns, begin, end, d, later, out + d);
    for (; d < whole; d += kLanes) pool_block<Row, kLanes, Stream>(a, columns, begin, end, d, later, out + d);
    if (d < columns) pool_rest<Row>(a, columns, begin, end, d, columns - d, later, out + d);
  }
}

// Calls work(columns); the number is a compile-time constant for the dims that most tables have.
template <class Work>
void with_columns(int64_t columns, const Work& work) {
#ifndef RECSTORE_ANY_COLUMNS
  if (columns == 16) return work(std::integral_constant<int64_t, 16>{});
#ifndef RECSTORE_FEW_LOOPS  // the tests under sanitizers, because of the time that the compiler takes
  if (columns == 32) return work(std::integral_constant<int64_t, 32>{});
  if (columns == 64) return work(std::integral_constant<int64_t, 64>{});
  if (columns == 128) return work(std::integral_constant<int64_t, 128>{});
#endif
#endif
  work(columns);
}

void pool(const PoolArgs& a) {
  with_row_type(a.rows.type, [&](auto type) {
    using Row = decltype(type);
    with_columns(a.rows.columns, [&](auto columns) {
      a.stream ? pool_bags<Row, true>(a, columns) : pool_bags<Row, false>(a, columns);
    });
  });
}

inline const float* grad_of(const UpdateArgs& a, uint32_t bag) {
  const auto bags = static_cast<uint32_t>(a.batch->bags);  // a division of 64 bits takes longer
  const uint32_t feature = bag / bags;
  return a.grad + int64_t{bag - feature * bags} * a.grad_stride + a.column_offsets[feature];
}
inline float scale_of(const UpdateArgs& a, int64_t bag, int64_t position) {
  float scale = a.batch->weights == nullptr ? 1.0f : a.batch->weights[position];
  if (a.mean) {
    const int64_t length = a.batch->offset(bag + 1) - a.batch->offset(bag);
    if (length > 1) scale *= 1.0f / static_cast<float>(length);
  }
  return scale;
}

constexpr int kPrefetchLinks = 12;  // linked gradients that are prefetched ahead; they lie far apart

// Prefetches n columns of the gradients of the next `links` linked positions. Returns the link after them.
RECSTORE_PREFETCHES inline Link prefetch_linked(const UpdateArgs& a, Link link, int64_t links, int64_t column,
                                                int64_t n) {
  for (; links > 0 && link != 0; --links) {
    prefetch_row(grad_of(a, a.bag_of[link - 1]) + column, n);
    link = a.links[link - 1] & ~kNotFirst;
  }
  return link;
}

// Sums the columns [begin, end) of the scaled gradients of a position and of all positions that it links to, in their
// order. `ahead` is the link after those that are prefetched.
template <class Columns>
inline __attribute__((always_inline)) void add_gradients(const UpdateArgs& a, const float* grad, float scale,
                                                         int64_t position, Link ahead, int64_t begin, Columns columns,
                                                         float* out) {
  const Vec first = broadcast(scale);
  for_each_run(columns, [&](int64_t d, auto n) { store(out + d, load(grad + begin + d, n) * first); });
  for (Link next = a.links[position]; next != 0;) {
    const int64_t p = next - 1;
    const uint32_t bag = a.bag_of[p];
    next = a.links[p] & ~kNotFirst;
    ahead = prefetch_linked(a, ahead, 1, begin, columns);
    const float* g = grad_of(a, bag) + begin;
    const Vec s = broadcast(scale_of(a, bag, p));
    for_each_run(columns, [&](int64_t d, auto n) { store(out + d, load(out + d) + load(g + d, n) * s); });
  }
}

// Returns the sum of the gradients of an id, which is in a.scratch, or null if the id is updated later.
template <class Columns>
__attribute__((noinline)) const float* sum_gradients(const UpdateArgs& a, Columns columns, const float* grad,
                                                     float scale, int64_t position) {
  if (a.sum != nullptr) return a.sum;
  const Link ahead = prefetch_linked(a, a.links[position], kPrefetchLinks, 0, columns);
  if (ahead != 0 && a.later != nullptr) {
    int64_t n = 1 + kPrefetchLinks;
    for (Link link = ahead; link != 0 && n <= a.longest->most; link = a.links[link - 1] & ~kNotFirst) ++n;
    if (n > a.later->most) {
      LaterIds& ids = n > a.longest->most ? *a.longest : *a.later;
      ids.positions[ids.count.fetch_add(1, std::memory_order_relaxed)] = static_cast<uint32_t>(position);
      return nullptr;
    }
  }
  add_gradients(a, grad, scale, position, ahead, 0, columns, a.scratch);
  return a.scratch;
}

void sum_columns(const UpdateArgs& a, int64_t begin, int64_t end, float* out) {
  const uint32_t bag = a.bag_of[a.only];
  for (; begin < end; begin += kLanes, out += kLanes) {
    const int64_t n = end - begin < kLanes ? end - begin : kLanes;
    const Link ahead = prefetch_linked(a, a.links[a.only], kPrefetchLinks, begin, n);
    add_gradients(a, grad_of(a, bag), scale_of(a, bag, a.only), a.only, ahead, begin, n, out);
  }
}

#include "row_loops/row_states.inl"
#include "row_loops/row_steps.inl"

// Returns the number of floats of a row before its optimizer states.
template <class Row, class Columns>
RECSTORE_INLINE int64_t floats_of(const UpdateArgs& a, Columns columns) {
  if constexpr (std::is_same_v<Row, AnyRow>) {
    return a.rows.weight_floats();
  } else {
    return Row::floats(columns);
  }
}

template <class Row, class State, class Step, bool Extras, class Columns>
__attribute__((noinline)) void update_rows(const UpdateArgs& a, Columns columns) {
  const int64_t* offsets = a.batch->offsets;
  const auto offset = [=](int64_t bag) { return offsets == nullptr ? bag : offsets[bag]; };
  const int64_t last = offset(a.bag_end);
  const int64_t weight_floats = floats_of<Row>(a, columns);
  const int64_t stride =
      Step::kElementStates < 0 ? a.rows.stride : weight_floats + State::floats(Step::kElementStates * columns);
  const Slot* slots = a.slots;
  const Link* links = a.links;
  float* data = a.rows.data;
  auto* asides = reinterpret_cast<typename State::Aside*>(a.rows.asides);
  const int64_t first_bag = a.bag_begin / a.batch->bags * a.batch->bags;  // of the feature
  const float* grads = grad_of(a, static_cast<uint32_t>(first_bag));
  const int64_t grad_stride = a.grad_stride;
  // The processor prefetches consecutive gradients itself.
  const bool prefetches_gradients = grad_stride != columns;
  int64_t bag_ahead = a.bag_begin;
  UpdatedRows<Row, Columns> updated(a, columns);
  for (int64_t bag = a.bag_begin; bag < a.bag_end; ++bag) {
    const float* grad = grads + (bag - first_bag) * grad_stride;
    for (int64_t p = offset(bag), end = offset(bag + 1); p < end; ++p) {
      const int64_t ahead = p + rows_ahead(stride);
      if (ahead < last && (links[ahead] & kNotFirst) == 0) {
        const Slot slot = slots[ahead];
        prefetch_row(data + slot * stride, stride);
        // The bytes of an aside may belong to two cache lines.
        const char* aside = reinterpret_cast<const char*>(&asides[slot]);
        __builtin_prefetch(aside, 1, 3);
        __builtin_prefetch(aside + sizeof(typename State::Aside) - 1, 1, 3);
        if (prefetches_gradients && offset(bag_ahead + 1) <= ahead) {
          do ++bag_ahead;
          while (offset(bag_ahead + 1) <= ahead);
          prefetch_row(grads + (bag_ahead - first_bag) * grad_stride, columns);
        }
      }
      const Link link = links[p];
      if ((link & kNotFirst) != 0 || (a.only >= 0 && a.only != p)) continue;
      float* row = data + slots[p] * stride;
      float* w = updated.weights_of(row);
      auto& aside = asides[slots[p]];
      const float* g = grad;
      const float scale = scale_of(a, bag, p);
      if (link != 0 || scale != 1.0f || columns % kLanes != 0) g = sum_gradients(a, columns, grad, scale, p);
      if (g == nullptr) continue;
      if (a.nonfinite == nullptr || is_finite(columns, g)) {
        if (Extras) g = before_step(a, columns, w, g);
        Step::run(a, columns, w, typename State::Of(a, p, row + weight_floats, aside), g);
        if (Extras) after_step(a, columns, w);
        updated.add(p, row);
      } else {
        a.nonfinite->fetch_add(1, std::memory_order_relaxed);
      }
      if (a.step != 0) count_step(aside.meta, a.step, a.half_life);
    }
  }
  if constexpr (Row::kStoredTogether > 1) updated.store();
}

// The optimizers that most tables have. Their loops are compiled for each row type, and for the usual dims.
template <class Step>
constexpr bool kIsUsual = std::is_same_v<Step, RowWiseAdagradStep> || std::is_same_v<Step, AdamStep>
#ifndef RECSTORE_FEW_LOOPS
                          || std::is_same_v<Step, SgdStep> || std::is_same_v<Step, AdagradStep>
#endif
    ;

// Whether the loops of an optimizer are compiled for each row type. An update by a user-defined one then takes up to
// 6 % less time.
template <class Step>
constexpr bool kHasRowTypes = kIsUsual<Step>
#ifndef RECSTORE_FEW_LOOPS
                              || std::is_same_v<Step, RowOptimizerStep>
#endif
    ;

// Calls work(columns) with a compile-time constant for the dims of large rows.
template <class Work>
void with_many_columns(int64_t columns, const Work& work) {
#if !defined(RECSTORE_FEW_LOOPS) && !defined(RECSTORE_ANY_COLUMNS)
  if (columns == 64) return work(std::integral_constant<int64_t, 64>{});
  if (columns == 128) return work(std::integral_constant<int64_t, 128>{});
#endif
  work(columns);
}

template <class State, class Step>
void update_with(const UpdateArgs& a) {
  const int64_t columns = a.rows.columns;
  if constexpr (kHasRowTypes<Step>) {
    // Extras are compiled separately, so that an update without them costs nothing more.
    if (!a.scalars.extras()) {
      return with_row_type(a.rows.type, [&](auto type) {
        using Row = decltype(type);
        const auto update = [&](auto n) { update_rows<Row, State, Step, false>(a, n); };
        if constexpr (!kIsUsual<Step>) {
          update(columns);
        } else if constexpr (std::is_same_v<Row, Float32Row> && std::is_same_v<State, Float32State>) {
          with_columns(columns, update);
        } else {
          with_many_columns(columns, update);
        }
      });
    }
  }
  update_rows<AnyRow, State, Step, true>(a, columns);
}

template <class Step>
void update_with(const UpdateArgs& a) {
  if (a.rows.state_type == StateType::kFloat16) {
    update_with<Float16State, Step>(a);
  } else {
    update_with<Float32State, Step>(a);
  }
}

void update(const UpdateArgs& a) {
  if (a.user != nullptr) return update_with<RowOptimizerStep>(a);
  if (a.optimizer == OptimizerKind::kSgd && a.scalars.momentum != 0.0f) return update_with<MomentumSgdStep>(a);
  switch (a.optimizer) {
#define RECSTORE_ENTRY(name, value, ...) \
  case OptimizerKind::k##name: return update_with<name##Step>(a);
    RECSTORE_OPTIMIZERS(RECSTORE_ENTRY)
#undef RECSTORE_ENTRY
  }
}

float dot(RowType type, const float* row, const float* y, int64_t n) {
  return with_row_type(type, [&](auto kind) {
    const typename decltype(kind)::Reader x(row, n);
    Vec sum{};
    int64_t d = 0;
    for (; d + kLanes <= n; d += kLanes) sum += x.load(d, kLanes) * load(y + d);
    if (d < n) sum += x.load(d, n - d) * load(y + d, n - d);
    return reduce(sum);
  });
}

#endif  // RECSTORE_READS_ONLY

}  // namespace

extern const RowLoops kLoops;
#ifdef RECSTORE_READS_ONLY
const RowLoops kLoops = {RECSTORE_ISA_NAME, find,  nullptr, nullptr, nullptr, nullptr,
                         nullptr,           widen, narrow,  nullptr, nullptr};
#else
const RowLoops kLoops = {RECSTORE_ISA_NAME, find,       fill_uniform, pool, update, sum_columns, dot, widen, narrow,
                         read_state,        write_state};
#endif

}  // namespace RECSTORE_ISA_NAMESPACE
}  // namespace recstore
