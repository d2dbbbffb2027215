// The search of the index; row_loops.inl includes this file. RECSTORE_MATCH(line, id) has a bit for each entry of a
// line whose id is `id`; the bits of entries that are not in use, and higher bits, mean nothing.

// Whether an id is in its home line cannot be predicted, and a wrong prediction costs as much as the search. Therefore
// the loops have no branches: an id's slot is written whether it was found or not, and the few ids that were not found
// are searched in their next lines together.
int64_t find(const IndexView& index, const int64_t* ids, int64_t n, Slot* slots) {
  constexpr int64_t kChunk = 1024;
  // Home lines that are prefetched ahead; the limit is how many loads a core has in flight.
  constexpr int64_t kAhead = 96;
  uint32_t lines[kChunk];
  uint32_t late[kChunk];
  int64_t missing = 0;
  for (; n > 0; n -= kChunk, ids += kChunk, slots += kChunk) {
    const int64_t count = n < kChunk ? n : kChunk;
    for (int64_t i = 0; i < count; ++i) lines[i] = index.home(mix(static_cast<uint64_t>(ids[i]) ^ index.salt) >> 32);
    // Returns 1 if the line has no entry of the id, else 0.
    const auto search = [&](int64_t i, const IndexLine& line, uint32_t wanted) -> uint32_t {
      const uint32_t found = RECSTORE_MATCH(line, ids[i]) & line.words[kLineEntries] & wanted;
      const uint32_t absent = found == 0;
      slots[i] = line.words[__builtin_ctz(found | 1u << kLineEntries)] | (0u - absent);
      return absent;
    };
    int64_t late_count = 0;
    const auto search_home = [&](int64_t i) {
      const IndexLine* line = index.lines + lines[i];
      const uint32_t is_late = search(i, *line, IndexLine::kAll);
      late[late_count] = static_cast<uint32_t>(i);
      late_count += is_late;
      __builtin_prefetch(line + is_late * kFirstStep, 0, 3);
    };
    const int64_t first = count < kAhead ? count : kAhead;
    for (int64_t i = 0; i < first; ++i) __builtin_prefetch(index.lines + lines[i], 0, 3);
    for (int64_t i = first; i < count; ++i) {
      __builtin_prefetch(index.lines + lines[i], 0, 3);
      search_home(i - first);
    }
    for (int64_t i = count - first; i < count; ++i) search_home(i);
    for (uint32_t step = kFirstStep; late_count > 0; step = next_step(step)) {
      int64_t later = 0;
      for (int64_t j = 0; j < late_count; ++j) {
        const uint32_t i = late[j];
        const uint32_t passed = index.lines[lines[i]].passed();
        lines[i] += step & (0u - passed);
        const IndexLine* line = index.lines + lines[i];
        const uint32_t absent = search(i, *line, IndexLine::kAll & (0u - passed));
        missing += 1 - passed;
        late[later] = i;
        later += passed & absent;
        __builtin_prefetch(line + next_step(step), 0, 3);
      }
      late_count = later;
    }
  }
  return missing;
}
