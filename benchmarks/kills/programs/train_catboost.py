"""CatBoost with its own snapshots, which it resumes by itself."""

# /// script
# dependencies = ["catboost"]
# ///

import catboost
import reports


class _Reports:
    def after_iteration(self, info):
        reports.step(info.iteration)
        return True


inputs, labels = (tensor.numpy() for tensor in reports.samples())
saves = {"save_snapshot": True, "snapshot_file": "snapshot", "snapshot_interval": 2}
settings = {"iterations": reports.STEPS, "random_seed": 0, "thread_count": 1, "verbose": False}
model = catboost.CatBoostClassifier(**settings, **saves, train_dir=str(reports.CHECKPOINTS))
model.fit(inputs[:, 1:], labels, callbacks=[_Reports()])
reports.final({"model": model.predict(inputs[:, 1:], prediction_type="RawFormulaVal").tobytes()})
