"""Both got the numbers of the table."""

(to_mlflow, step), (to_wandb, step_of_wandb) = logged  # noqa: F821  (see before)
assert step == step_of_wandb == 100
assert to_mlflow == to_wandb
assert to_mlflow["t_user/rows"] > 1000
