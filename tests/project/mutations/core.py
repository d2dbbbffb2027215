"""Mutations of the native core, of its routing, its bounds and its optimizers."""

from __future__ import annotations

from .mutation import Mutation

CSRC = "torchrec_recstore/csrc"

CORE = [
    Mutation(
        f"{CSRC}/lookup/forward.cpp",
        "const auto locks = group.lock_shared();",
        "const auto locks = group.lock();",
        ["test_locks"],
        "Evaluation lookups of one table take turns.",
    ),
    Mutation(
        f"{CSRC}/lookup/backward.cpp",
        "const int64_t begin = task % parts * columns, end = std::min(begin + columns,"
        " args.rows.columns);",
        "const int64_t begin = task % parts * columns / 2, end = std::min(begin +"
        " columns, args.rows.columns);",
        ["test_table"],
        "Threads that share the columns of a row sum some columns twice and leave"
        " others out.",
    ),
    Mutation(
        f"{CSRC}/lookup/backward.cpp",
        "if (work.later.count + work.longest.count > 0) work.update_later();",
        "if (work.later.count > 0) work.update_later();",
        ["test_table"],
        "The rows of the most frequent ids are not updated, if no other rows are left"
        " for later.",
    ),
    Mutation(
        f"{CSRC}/rows/table.cpp",
        "if (row.is_in_index) index_.erase(row.id);",
        "",
        ["test_parts"],
        "A row that leaves stays in the index, if its line belongs to two parts.",
    ),
    Mutation(
        f"{CSRC}/bounds/arrivals.cpp",
        "refused_ = held_back.count();",
        "refused_ = held_back.misses();",
        ["tests/store/test_admission.py"],
        "An id that admission refuses is counted once for each of its positions.",
    ),
    Mutation(
        f"{CSRC}/snapshot/snapshot.cpp",
        "for (size_t task = 0; task <= parts; ++task) before +="
        " std::exchange(next[task][p], before);",
        "for (size_t task = 0; task < parts; ++task) before +="
        " std::exchange(next[task][p], before);",
        ["test_snapshot"],
        "Threads divide the rows of a save by a sample, and do not sort the parts.",
    ),
    Mutation(
        f"{CSRC}/index/index_find.inl",
        "lines[i] += step & (0u - passed);",
        "lines[i] += kFirstStep & (0u - passed);",
        ["test_index"],
        "An id that lies far from its home line is searched in lines where it cannot"
        " lie.",
    ),
    Mutation(
        f"{CSRC}/index/index.cpp",
        "take_out(entry.place, old_home);",
        "",
        ["test_index"],
        "A line that the growth of the index moves keeps its entries, so that they are"
        " in the index twice.",
    ),
    Mutation(
        f"{CSRC}/index/index.cpp",
        "insert(entry.id, entry.hash, entry.slot);",
        "",
        ["test_index"],
        "The growth of the index loses the entries that it moves.",
    ),
    Mutation(
        f"{CSRC}/rows/rows.cpp",
        "for (; reclaimed_ < retired_.size() && retired_[reclaimed_].last_pass <"
        " oldest_pass; ++reclaimed_) {",
        "for (; reclaimed_ < retired_.size() && retired_[reclaimed_].last_pass <="
        " oldest_pass; ++reclaimed_) {",
        ["test_table"],
        "The slot of a removed row is used again although a pending pass still refers"
        " to the slot.",
    ),
    Mutation(
        f"{CSRC}/rows/rows.cpp",
        "std::fill(row(slot) + weight_floats(type_, columns_), row(slot) + stride_,"
        " 0.0f);",
        "",
        ["tests/store/test_eviction.py::test_an_evicted_row_comes_back_as_new"],
        "A new row begins with the optimizer state of the row that had the slot"
        " before.",
    ),
    Mutation(
        f"{CSRC}/rows/rows.cpp",
        "if (changes_.tracks()) changes_.move(from, to);",
        "",
        ["test_memory"],
        "A row that compaction moves is missing from the next delta.",
    ),
    Mutation(
        f"{CSRC}/rows/table.cpp",
        "for (const Numbered& numbered : pending_) numbered.pass->moved(*this, moves);",
        "",
        ["test_memory"],
        "The backward pass updates the slots that compaction has moved rows away from.",
    ),
    Mutation(
        f"{CSRC}/rows/table.cpp",
        "vacated_.add(move.from);",
        "",
        ["test_ahead"],
        "A forward takes a slot, resolved ahead, that compaction has moved the row away"
        " from.",
    ),
    Mutation(
        f"{CSRC}/rows/table.cpp",
        "vacate(row.slot);",
        "",
        ["test_ahead"],
        "A forward takes a slot, resolved ahead, of a row that has been evicted.",
    ),
    Mutation(
        f"{CSRC}/rows/table.cpp",
        "table->vacated_.add_all();",
        "",
        ["test_ahead"],
        "A forward takes slots, resolved ahead, although the table has got other rows.",
    ),
    Mutation(
        f"{CSRC}/lookup/slots_ahead.cpp",
        "StaleSlots::StaleSlots(const Vacated& vacated, Vacated::Stamp stamp) :"
        " all_(!vacated.knows(stamp)) {",
        "StaleSlots::StaleSlots(const Vacated& vacated, Vacated::Stamp stamp) :"
        " all_(false) {",
        ["test_ahead"],
        "A forward takes slots, resolved ahead, although the record of vacated slots"
        " has overflowed.",
    ),
    Mutation(
        f"{CSRC}/rows/table.cpp",
        "if (snapshot_ != nullptr) snapshot_->removed(ids[i], slot);",
        "",
        ["test_snapshot"],
        "A row that is removed during a save is missing from the checkpoint.",
    ),
    Mutation(
        f"{CSRC}/snapshot/snapshot.cpp",
        "if (!pending(slot) || number(slot) != 0 ||"
        " out_of_memory_.load(std::memory_order_relaxed)) return;",
        "if (!pending(slot) || out_of_memory_.load(std::memory_order_relaxed)) return;",
        ["test_snapshot"],
        "The second update of a row during a save replaces the image that the first"
        " update has kept.",
    ),
    Mutation(
        "serving/torchrec_recstore_serving/csrc/gate.cpp",
        "wait_for(gate_->calls_have_ended_, lock, [&] { return gate_->holds_ == 0; });",
        "",
        ["test_serving"],
        "A delta changes a served model during a call.",
    ),
    Mutation(
        f"{CSRC}/snapshot/changes.h",
        "if (locates_ != Locates::kNo) positions()[to] = positions()[from];",
        "",
        ["test_snapshot"],
        "A delta misses changed rows that compaction has moved.",
    ),
    Mutation(
        f"{CSRC}/snapshot/changes.cpp",
        "if (some.mark >= mark) ids.insert(ids.end(), some.ids.begin(),"
        " some.ids.end());",
        "if (some.mark > mark) ids.insert(ids.end(), some.ids.begin(),"
        " some.ids.end());",
        ["test_snapshot"],
        "A delta does not list the ids that were removed right after its base was"
        " saved.",
    ),
    Mutation(
        f"{CSRC}/rows/initializer.cpp",
        "if (row_type_ == RowType::kFloat32) return fill_columns(id, column_begin_,"
        " column_end_, row);",
        "if (row_type_ == RowType::kFloat32) return fill_columns(id, 0, column_end_ -"
        " column_begin_, row);",
        ["test_table"],
        "A column-wise shard initializes its columns as if the columns were the first"
        " ones of the table.",
    ),
    Mutation(
        f"{CSRC}/lookup/backward.cpp",
        "links_[last.position] |= static_cast<Link>(place.position) + 1;",
        "links_[last.position] = static_cast<Link>(place.position) + 1;",
        ["test_table"],
        "An id that occurs three times in a batch is updated twice.",
    ),
    Mutation(
        f"{CSRC}/ops/group.cpp",
        "const auto inputs = std::make_shared<Inputs>(Inputs{ids, {}, std::nullopt});",
        "const auto inputs = std::make_shared<Inputs>();",
        [
            "tests/kernels/test_sequence_group.py::test_backward_needs_no_ids_of_the_caller"
        ],
        "The backward pass reads the ids of the batch after their memory has been"
        " freed.",
    ),
    Mutation(
        f"{CSRC}/rows/transfer.cpp",
        "out.frequency[i] = meta.frequency;",
        "out.frequency[i] = meta.last_step;",
        ["tests/store/test_eviction.py::test_halving_forgets_what_was_frequent_once"],
        "Checkpoints save a row's last step as the row's frequency.",
    ),
]

ROUTING = [
    Mutation(
        f"{CSRC}/lookup/batch.h",
        "const uint64_t id = l < static_cast<uint64_t>(block_rows) ? l + r *"
        " static_cast<uint64_t>(block_rows)",
        "const uint64_t id = l <= static_cast<uint64_t>(block_rows) ? l + r *"
        " static_cast<uint64_t>(block_rows)",
        ["tests/kernels/test_pooled_group.py::test_routing_is_undone"],
        "The first id behind the blocks is stored under another raw id.",
    ),
    Mutation(
        f"{CSRC}/lookup/batch.h",
        ": l * static_cast<uint64_t>(world_size) + r;",
        ": l * static_cast<uint64_t>(world_size);",
        [
            "tests/kernels/test_pooled_group.py::test_routing_is_undone",
            "tests/kernels/test_sequence_group.py::test_mixed_ids_are_stored_raw",
        ],
        "Ids behind the blocks of all ranks are stored as those of rank 0.",
    ),
]

BOUNDS = [
    Mutation(
        f"{CSRC}/bounds/eviction.cpp",
        "return kClasses - 1 - coarse<6>(meta.last_step < now ? now - meta.last_step"
        " : 0);",
        "return coarse<6>(meta.last_step < now ? now - meta.last_step : 0);",
        ["tests/store/test_eviction.py::test_the_least_rows_leave_ties_and_all"],
        "LRU evicts the rows that were used last.",
    ),
    Mutation(
        f"{CSRC}/bounds/eviction_queue.h",
        "if (next_era_) next_era_->arrived(id);",
        "",
        ["test_bounds"],
        "The rows that are made shortly before a halving are not found among the least"
        " frequent ones after it.",
    ),
    Mutation(
        f"{CSRC}/bounds/scores.cpp",
        "if (meta.frequency < before && evictions.notes_arrivals())"
        " evictions.arrived(ids[i]);",
        "static_cast<void>(before);",
        ["test_bounds"],
        "A row whose score becomes lower is evicted only after the next search of the"
        " table.",
    ),
    Mutation(
        f"{CSRC}/lookup/backward.cpp",
        "for (Link next = links[p]; (next & ~kNotFirst) != 0; next = links[(next &"
        " ~kNotFirst) - 1]) ++times;",
        "",
        ["test_bounds"],
        "LFU by occurrences counts steps.",
    ),
    Mutation(
        f"{CSRC}/cold/cold_rows.cpp",
        "table.leave(leavers, 0, serial, true);",
        "table.leave(leavers, 0, serial);",
        [
            "tests/store/test_left_ids.py::test_rows_that_move_to_the_cold_store_do_not_fill_the_record"
        ],
        "Rows that move to a cold store fill the record of the ids that left.",
    ),
    Mutation(
        f"{CSRC}/bounds/eviction.cpp",
        "return expires ? std::max<int64_t>(0, step - expiry) : 0;",
        "return expires ? std::max<int64_t>(0, step - expiry + 1) : 0;",
        ["tests/store/test_expiry.py"],
        "Rows expire a step too early.",
    ),
    Mutation(
        f"{CSRC}/bounds/wall_clock.cpp",
        "expired_before = std::max(expired_before, ticks_[i].step);",
        "expired_before = std::max(expired_before, ticks_[i].step + 1);",
        ["tests/store/test_wall_clock.py"],
        "Rows expire although a step has looked them up at the time of a tick.",
    ),
    Mutation(
        f"{CSRC}/bounds/wall_clock.cpp",
        "if (distance(time) <= max_jump_) latest = std::max(latest, time);",
        "latest = std::max(latest, time);",
        ["tests/store/test_refused_times.py"],
        "A sample of a wrong time empties the table.",
    ),
    Mutation(
        f"{CSRC}/bounds/wall_clock.cpp",
        "now_ = std::max(now_, event_time);",
        "now_ = event_time;",
        ["tests/store/test_refused_times.py"],
        "The clock goes back with the time of the events, and leaves its ticks in the"
        " future.",
    ),
    Mutation(
        f"{CSRC}/bounds/wall_clock.cpp",
        "agreeing_ = agreeing_ > 0 && std::abs(nearest - last_refused_) <= max_jump_ ?"
        " agreeing_ + 1 : 1;",
        "agreeing_ = agreeing_ + 1;",
        ["tests/store/test_refused_times.py"],
        "Ten refused times set the clock, although they do not agree.",
    ),
    Mutation(
        f"{CSRC}/bounds/eviction.cpp",
        "if (left_out.contains(slot)) continue;",
        "",
        ["test_bounds"],
        "Rows that the batch looks up, and rows that a backward pass still needs, are"
        " evicted.",
    ),
    Mutation(
        f"{CSRC}/bounds/arrivals.cpp",
        "return arrival == Arrival::kLookup && sightings->count(id) + 1 >="
        " table.config().bounds.min_frequency;",
        "return arrival == Arrival::kLookup && sightings->count(id) >="
        " table.config().bounds.min_frequency;",
        ["tests/store/test_admission.py::test_the_count_th_step_makes_the_row"],
        "Admission wants a sighting too many.",
    ),
    Mutation(
        f"{CSRC}/bounds/sightings.cpp",
        "int64_t Sightings::count(int64_t id) const { return std::min(255, *find(0,"
        " id).count + *find(1, id).count); }",
        "int64_t Sightings::count(int64_t id) const { return *find(present_,"
        " id).count; }",
        ["tests/store/test_admission.py::test_no_recent_sighting_is_missed"],
        "Admission forgets all sightings at the end of a generation.",
    ),
    Mutation(
        f"{CSRC}/bounds/sightings.cpp",
        "ids[begins[p] + left[p]++] = ids[i];",
        ";",
        ["test_bounds"],
        "Ids whose part of the counts is full are not counted.",
    ),
    Mutation(
        f"{CSRC}/cold/cold_rows.cpp",
        "left[i] = slot != kNoSlot && !pinned.contains(slot) && equals(slot, images + i"
        " * table.image_bytes());",
        "left[i] = slot != kNoSlot && !pinned.contains(slot);",
        [
            "tests/store/test_cold_tier.py::test_a_row_that_changes_on_its_way_to_the_store_stays_in_memory"
        ],
        "A row that is updated while the row is written to the cold store loses the"
        " update.",
    ),
]

OPTIMIZERS = [
    Mutation(
        f"{CSRC}/row_loops/row_states.inl",
        "const Bits normal = (f - (112u << 23) + (random & 0x1FFFu)) >> 13;",
        "const Bits normal = (f - (112u << 23) + 0x1000u) >> 13;",
        [
            "tests/store/test_state_dtype.py::test_sums_grow_by_addends_that_are_smaller_than_the_last_bit"
        ],
        "A float16 state is rounded to nearest, and a sum stops growing.",
    ),
    Mutation(
        f"{CSRC}/row_loops/row_states.inl",
        "const Bits finite = value < bits(0x7BFFu) ? value : bits(0x7BFFu);",
        "const Bits finite = value;",
        [
            "tests/store/test_state_dtype.py::test_large_states_become_the_largest_number_and_nan_and_infinity_stay"
        ],
        "A state above the largest float16 number becomes infinite.",
    ),
    Mutation(
        f"{CSRC}/rows/optimizer.cpp",
        "s.adam_rate = f(lr * bias1);",
        "s.adam_rate = f(lr);",
        [
            "tests/kernels/test_optimizers.py::test_ten_steps_equal_the_published_formula"
        ],
        "Adam does not correct the bias of the first moment.",
    ),
    Mutation(
        f"{CSRC}/lookup/backward.cpp",
        "step_scalars(tables[t]->config().optimizer, learning_rates[t],"
        " tables[t]->optimizer_steps() + 1));",
        "step_scalars(tables[t]->config().optimizer, learning_rates[t],"
        " tables[t]->optimizer_steps()));",
        [
            "tests/kernels/test_optimizers.py::test_ten_steps_equal_the_published_formula"
        ],
        "The bias correction is behind by a step.",
    ),
    Mutation(
        f"{CSRC}/row_loops/row_steps.inl",
        "const float m = state.row() + reduce(squares) / static_cast<float>(columns);",
        "const float m = state.row() + reduce(squares);",
        [
            "tests/kernels/test_optimizers.py::test_ten_steps_equal_the_published_formula"
        ],
        "Row-wise Adagrad adds the sum of the squares in place of their mean.",
    ),
    Mutation(
        f"{CSRC}/row_loops/row_steps.inl",
        "const Vec b = momentum * buffer.load(d, n) + (gv + decay * wv);",
        "const Vec b = momentum * buffer.load(d, n) + gv;",
        [
            "tests/kernels/test_optimizers.py::test_ten_steps_equal_the_published_formula"
        ],
        "SGD with momentum ignores the weight decay.",
    ),
    Mutation(
        f"{CSRC}/row_loops/row_steps.inl",
        "if (a.scalars.decouple) scale(columns, w, a.scalars.decay_factor, w);",
        "",
        [
            "tests/kernels/test_optimizers.py::test_ten_steps_equal_the_published_formula"
        ],
        "Adagrad ignores a decoupled weight decay.",
    ),
    Mutation(
        f"{CSRC}/row_loops/row_loops.inl",
        "if constexpr (Row::kStoredTogether > 1) updated.store();",
        "",
        [
            "tests/store/test_eight_bits.py::test_updates_are_float32_updates_rounded_to_a_neighbour"
        ],
        "The last rows of an update of 8-bit rows are not stored.",
    ),
    Mutation(
        f"{CSRC}/row_loops/random.inl",
        ": first_(static_cast<uint32_t>(mix(key ^ static_cast<uint64_t>(id))) +",
        ": first_(static_cast<uint32_t>(mix(key)) +",
        [
            "tests/store/test_eight_bits.py::test_updates_are_rounded_up_with_the_probability_of_the_fraction"
        ],
        "All rows of an update are rounded with the same random numbers.",
    ),
    Mutation(
        f"{CSRC}/row_loops/row_steps.inl",
        "return select(n > zero, solved, wv);",
        "return solved;",
        [
            "tests/kernels/test_optimizers.py::test_ftrl_keeps_a_row_until_its_first_gradient_and_at_a_rate_of_zero"
        ],
        "FTRL sets weights that have had no gradient to zero.",
    ),
]
