"""Mutations of the Python code: routing, cold stores, checkpoints and the service."""

from __future__ import annotations

from .mutation import Mutation

PACKAGE = "torchrec_recstore"

ROUTING = [
    Mutation(
        f"{PACKAGE}/sharders/collection.py",
        "return _with_ids(features, mixed_ids(features.values()))",
        "return _with_ids(features, ops.mix_ids(features.values(), True))",
        ["tests/distributed/test_sharded_equals_unsharded.py::test_one_rank"],
        "Hash routing mixes ids with the inverse of the mix that the shards undo.",
    ),
    Mutation(
        f"{PACKAGE}/kernels/routing.py",
        "is_in_blocks = (ids >= 0) & (ids < self.block_rows * self.world_size)",
        "is_in_blocks = ids < self.block_rows * self.world_size",
        [
            "tests/checkpoint/test_load.py::test_every_sharding_and_world_size_to_every_other"
        ],
        "A load gives the rows of negative ids to another rank than the input"
        " distribution.",
    ),
]

BOUNDS = [
    Mutation(
        f"{PACKAGE}/store/cold_tier.py",
        "self._make_room(ids, len(images) + admitted)",
        "self._make_room(ids, admitted)",
        ["tests/store/test_cold_tier.py::test_rows_come_back_as_they_left"],
        "No room is made for the rows that come back from the cold store.",
    ),
    Mutation(
        f"{PACKAGE}/store/cold_tier.py",
        "missing = missing[~among(ids, self.dead)]",
        "pass",
        [
            "tests/store/test_cold_tier.py::test_what_could_not_be_deleted_is_gone_all_the_same"
        ],
        "A removed row comes back from a cold store that could not delete the row.",
    ),
    Mutation(
        f"{PACKAGE}/store/cold_tier.py",
        "return is_alive & ~is_dead",
        "return ~is_dead",
        ["tests/store/test_cold_tier.py"],
        "Cold rows that have expired are still listed.",
    ),
]

CHECKPOINTS = [
    Mutation(
        f"{PACKAGE}/checkpoint/writer.py",
        "rows=shard.snapshot.table_rows if is_first else 0,",
        "rows=shard.snapshot.table_rows,",
        ["tests/checkpoint/test_save.py", "tests/checkpoint/test_fold.py"],
        "A checkpoint counts each row once for every column shard.",
    ),
    Mutation(
        f"{PACKAGE}/checkpoint/reader.py",
        "_remove_rows(table, info.tables[name], info)",
        "pass",
        [
            "tests/checkpoint/test_save.py::test_deltas_hold_what_changed_and_chains_load"
        ],
        "Rows that were removed before a delta was saved come back when the delta is"
        " loaded.",
    ),
    Mutation(
        f"{PACKAGE}/store/table.py",
        "ops.table_set_optimizer_steps(self.handle, state.optimizer_steps)",
        "pass",
        ["tests/checkpoint/test_save.py::test_forth_and_back"],
        "Adam's bias correction starts again after a load.",
    ),
    Mutation(
        f"{PACKAGE}/checkpoint/fold.py",
        "self._runs = runs + self._runs",
        "self._runs = self._runs + runs",
        ["tests/checkpoint/test_fold.py::test_gives_the_files_of_a_full_save"],
        "Folding a chain keeps the oldest version of each row instead of the newest.",
    ),
    Mutation(
        f"{PACKAGE}/checkpoint/destination.py",
        "sync(staging)",
        "pass",
        ["tests/checkpoint/test_destination.py"],
        "A checkpoint gets its name before the entries of its directory are on the"
        " disk.",
    ),
    Mutation(
        f"{PACKAGE}/checkpoint/destination.py",
        "if metadata is None or metadata.checksum != info.checksum:",
        "if metadata is None:",
        ["tests/checkpoint/test_destination.py"],
        "A delta is saved although its base has been replaced by another checkpoint.",
    ),
]

SERVICE = [
    Mutation(
        "service/torchrec_recstore_service/csrc/applied.cpp",
        "if (there != client->second.answers.end() && there->second == mine)"
        " client->second.answers.erase(there);",
        ";",
        ["tests/service/test_applied.py"],
        "A write that failed cannot be repeated.",
    ),
    Mutation(
        "service/torchrec_recstore_service/csrc/applied.cpp",
        "client.answers.erase(client.answers.begin(),"
        " client.answers.lower_bound(done_before));",
        "client.answers.erase(client.answers.begin(),"
        " client.answers.upper_bound(done_before));",
        ["tests/service/test_applied.py"],
        "The server forgets a write that may still be repeated, and applies the write"
        " twice.",
    ),
    Mutation(
        f"{PACKAGE}/sharders/model_functions.py",
        "replace(table.state(), optimizer_steps=0, sightings=None)",
        "replace(table.state(), steps=0, optimizer_steps=0, sightings=None)",
        [
            "tests/sharders/test_reset.py::test_tables_are_as_new_and_the_dense_part_stays"
        ],
        "reset_rows sets the clock of the tables back.",
    ),
    Mutation(
        f"{PACKAGE}/sharders/model_functions.py",
        "check_replaceable(tables)",
        "check_replaceable(tables[:1])",
        [
            "tests/sharders/test_reset.py::test_a_checkpoint_has_the_rows_before_or_after"
        ],
        "reset_rows resets the tables before one that is being saved.",
    ),
    Mutation(
        "service/torchrec_recstore_service/csrc/row_server.cpp",
        "if (!name.empty() && name != name_) {",
        "if (false) {",
        ["test_row_server"],
        "A server takes connections for rows that are for another server.",
    ),
    Mutation(
        "service/torchrec_recstore_service/client/tcp_rows.py",
        "if self._receive().server != server:",
        "if self._receive() is None:",
        ["tests/service/test_ports.py::test_another_program_on_the_port_gets_no_rows"],
        "A client sends its rows to whatever program has the port.",
    ),
    Mutation(
        "service/torchrec_recstore_service/wire/agreement.py",
        'return token if members == 1 else f"{token}-{member}"',
        "return token",
        [
            "tests/service/test_ports.py::test_a_first_port_that_leads_to_another_server_gets_no_rows"
        ],
        "A server of a set answers the calls for another server of the set.",
    ),
    Mutation(
        "service/torchrec_recstore_service/server/row_calls.py",
        "if len(ids) != header.ids:",
        "if len(ids) > header.ids:",
        ["tests/service/test_faults.py::test_bad_requests_change_nothing"],
        "A write whose last parts are missing is applied in part.",
    ),
    Mutation(
        "service/torchrec_recstore_service/tables/read_write_lock.py",
        "with self._turnstile:",
        "if True:",
        [
            "tests/service/tables/test_read_write_lock.py::test_neither_readers_nor_writers_starve"
        ],
        "Readers that follow each other keep a writer from a table of a server for"
        " ever.",
    ),
    Mutation(
        "service/torchrec_recstore_service/tables/hosted_table.py",
        "is_missing = among(initial_ids, missing_ids)",
        "is_missing = ~among(initial_ids, missing_ids)",
        [
            "tests/service/tables/test_hosted.py::test_initial_rows_are_for_ids_without_a_row"
        ],
        "Initial rows replace the trained rows of other clients.",
    ),
    Mutation(
        "service/torchrec_recstore_service/client/server_set.py",
        "place_of_row = has_row.cumsum(0) - 1",
        "place_of_row = has_row.cumsum(0)",
        [
            "tests/service/test_server_cold_store.py::test_every_pattern_of_bits_comes_back"
        ],
        "Rows of several servers are returned for the wrong ids.",
    ),
]

PARTS_OF_CHECKPOINTS = [
    Mutation(
        f"{PACKAGE}/checkpoint/warm_start.py",
        "return replace(saved, optimizer_steps=0)",
        "return saved",
        ["tests/checkpoint/test_warm_start.py"],
        "A load without optimizer states takes over the number of updates.",
    ),
    Mutation(
        f"{PACKAGE}/checkpoint/apply.py",
        "table.write(self.replaced)",
        "pass",
        ["tests/checkpoint/test_apply_delta.py"],
        "A delta that could not be applied on all ranks is not taken back.",
    ),
    Mutation(
        f"{PACKAGE}/checkpoint/apply.py",
        "return base_ids[~among(base_ids, torch.cat(listed).sort().values)]",
        "return torch.cat(listed)[:0]",
        ["tests/checkpoint/test_apply_delta.py"],
        "Ids that left stay in the model, if the delta lists those that stay.",
    ),
]

FROZEN = [
    Mutation(
        f"{PACKAGE}/sharders/fused_params.py",
        "return self.options.servers, self.options.frozen, has_device_rows",
        "return self.options.servers, False, has_device_rows",
        ["tests/distributed/test_frozen_tables.py"],
        "Frozen and trained tables are placed in one group.",
    ),
    Mutation(
        f"{PACKAGE}/kernels/table_group.py",
        "is_training = train and not self.frozen",
        "is_training = train",
        ["tests/distributed/test_frozen_tables.py", "tests/store/test_frozen.py"],
        "A training lookup makes and updates rows of frozen tables.",
    ),
]
