"""CatBoost with its own snapshots, which it resumes by itself."""

import catboost
import told


class _Told:
    def after_iteration(self, info):
        told.step(info.iteration)
        return True


inputs, labels = (tensor.numpy() for tensor in told.samples())
told.CHECKPOINTS.mkdir(parents=True, exist_ok=True)
model = catboost.CatBoostClassifier(
    iterations=told.STEPS,
    random_seed=0,
    thread_count=1,
    verbose=False,
    save_snapshot=True,
    snapshot_file="snapshot",
    snapshot_interval=2,
    train_dir=str(told.CHECKPOINTS),
)
model.fit(inputs[:, 1:], labels, callbacks=[_Told()])
told.final({"model": model.predict(inputs[:, 1:], prediction_type="RawFormulaVal").tobytes()})
