#include "bounds/scores.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "bounds/row_uses.h"
#include "index/sets.h"
#include "lookup/find.h"

namespace recstore {
namespace {

void check_scores(const Table& table, const float* scores, int64_t n) {
  if (table.config().bounds.eviction != Eviction::kLeastScored) {
    throw InvalidArgument(
        "the table does not evict by scores: make it with TableOptions(max_rows=..., eviction=Scored())");
  }
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(scores[i])) throw InvalidArgument("scores must be finite, got " + std::to_string(scores[i]));
  }
}

}  // namespace

int64_t set_scores(Table& table, const int64_t* ids, int64_t n, const float* scores, Executor& executor) {
  check_scores(table, scores, n);
  std::vector<Slot> slots(static_cast<size_t>(n));
  find(table, ids, n, slots.data(), executor);
  SlotSet done(table.rows().slots());
  EvictionQueue& evictions = table.evictions();
  evictions.reserve_lowered(n);
  const uint32_t unscored = table.config().bounds.unscored;
  int64_t rows = 0;
  for (int64_t i = n; i-- > 0;) {
    if (slots[i] == kNoSlot || done.contains(slots[i])) continue;
    done.add(slots[i]);
    table.before_change(slots[i]);
    RowMeta& meta = table.rows().meta(slots[i]);
    const uint32_t before = score_rank(meta, unscored);
    meta.frequency = encoded_score(scores[i]);
    if (meta.frequency < before && evictions.notes_arrivals()) evictions.arrived(ids[i]);
    ++rows;
  }
  return rows;
}

void set_image_scores(Table& table, const int64_t* ids, int64_t n, const float* scores, char* images) {
  check_scores(table, scores, n);
  Changes& changes = table.rows().changes();
  const auto mark = static_cast<uint32_t>(changes.last_mark());
  if (changes.tracks()) changes.reserve_left(n);
  for (int64_t i = 0; i < n; ++i) {
    char* end = images + (i + 1) * table.image_bytes();
    RowMeta meta;
    std::memcpy(&meta, end - sizeof(meta), sizeof(meta));
    meta.frequency = encoded_score(scores[i]);
    std::memcpy(end - sizeof(meta), &meta, sizeof(meta));
    if (table.images_have_marks()) std::memcpy(end - sizeof(meta) - sizeof(mark), &mark, sizeof(mark));
    if (changes.tracks()) changes.left(ids[i], table.size());
  }
}

}  // namespace recstore
