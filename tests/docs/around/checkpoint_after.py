"""What the page's last block has read is what the model has, of two column shards."""
# ruff: noqa: F821

assert len({tuple(part["columns"]) for part in table["parts"]}) == 2
one_each = KeyedJaggedTensor(["u"], values=torch.tensor(list(rows)), lengths=torch.ones(len(rows), dtype=torch.long))
held = model.eval()(one_each).wait().values()
assert torch.equal(held, torch.stack(list(rows.values())))
assert held.any()
