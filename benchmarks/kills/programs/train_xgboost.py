"""xgboost with its TrainingCheckPoint callback; resumed from the newest file by `xgb_model`."""

# /// script
# dependencies = ["xgboost"]
# [tool.kills]
# users_must = """
# leave out `subsample`: a resume draws different rows, even with `seed_per_iteration`; without
# it, the bits are equal."""
# ///

import reports
import xgboost


class _Reports(xgboost.callback.TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        reports.step(model.num_boosted_rounds())
        return False


inputs, labels = (tensor.numpy() for tensor in reports.samples())
data = xgboost.DMatrix(inputs[:, 1:], labels)
found = sorted(reports.CHECKPOINTS.glob("model_*.ubj"), key=lambda p: p.stat().st_mtime)
start = xgboost.Booster(model_file=found[-1]) if found else None
done = start.num_boosted_rounds() if start else 0
settings = {"subsample": 0.5, "seed": 0, "max_depth": 3, "objective": "binary:logistic"}
saves = xgboost.callback.TrainingCheckPoint(reports.CHECKPOINTS, interval=10)
booster = xgboost.train(
    settings, data, reports.STEPS - done, xgb_model=start, callbacks=[_Reports(), saves]
)
reports.final({"model": bytes(booster.save_raw())})
