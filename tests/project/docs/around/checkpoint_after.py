"""What the page's last block has read is what the model has, of two column shards."""

# ruff: noqa: F821

assert len({tuple(part["columns"]) for part in table["parts"]}) == 2
one_each = KeyedJaggedTensor(
    ["u"],
    values=torch.tensor(list(rows)),
    lengths=torch.ones(len(rows), dtype=torch.long),
)
held = model.eval()(one_each).wait().values()
assert torch.equal(held, torch.stack(list(rows.values())))
assert held.any()
warm = {
    name: shards[0].table
    for name, shards in new_model.module.recstore_state.shards.items()
}
ids = torch.tensor([-1, 7, 2**62])
saved = warm["user"].lookup(ids)
assert saved.any()
assert torch.equal(warm["member"].lookup(ids), saved)
assert torch.equal(warm["small"].lookup(ids), saved[:, :4])
