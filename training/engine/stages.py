"""The stages of a run in order: resume, prepare, train, finish."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from training.artifacts.prepare import ensure_artifact, open_artifact
from training.checkpoint.checkpointer import SPENT_SECONDS, Saver
from training.checkpoint.export import export_final
from training.checkpoint.read import WEIGHTS, DamagedCheckpointError, Snapshot, read_checkpoint
from training.checkpoint.resume import AnySnapshot, find_newest, follow, share_snapshot
from training.engine.loop import StageLoop
from training.engine.parallel import is_sharded
from training.ranks.context import Attempt
from training.record.checkpoint_entry import CheckpointEntry
from training.record.position import Position
from training.record.run_config import RunConfig, changed_parts
from training.report.receipt import write_receipt
from training.store.dataset import LocalDataset
from training.store.protocol import StoreError
from training.workload import Inputs, Prepare, Prior, Train


class StageSequence:
    """Goes through the stages of a run, from where its newest whole checkpoint is."""

    def __init__(
        self,
        attempt: Attempt,
        config: Any,
        stages: Sequence[Prepare | Train],
        dataset: LocalDataset,
        device: torch.device,
        record: RunConfig,
        key: Mapping[str, Any],
        began: float,
    ) -> None:
        self._attempt = attempt
        self._config = config
        self._stages = stages
        self._dataset = dataset
        self._device = device
        self._record = record
        self._key = key
        self._began = began
        self._artifacts: dict[str, str] = {}
        self._opened: dict[str, Sequence[Mapping[str, Tensor]]] = {}
        self._verified: tuple[CheckpointEntry, Snapshot] | None = None  # an end, read to resume

    def go(self) -> None:
        """Resume where the run is and go to its end."""
        attempt = self._attempt
        if not attempt.world.leads:
            self._train(None, *share_snapshot(attempt, None, follow(attempt)))
            return
        attempt.lease.start_heartbeat()
        position, snapshot = self._resume()
        attempt.lease.sweep()
        spent = float(snapshot.state.get(SPENT_SECONDS, 0.0)) if snapshot else 0.0
        saver = Saver(attempt, position, spent_seconds=spent)
        attempt.supervisor.last_resort.save_with(saver)
        with closing(saver):
            position = self._train(saver, *share_snapshot(attempt, position, snapshot))
        self._finish(position)

    def _train(
        self, saver: Saver | None, position: Position | None, snapshot: AnySnapshot | None
    ) -> Position:
        ended = set(position.results) if position else set()
        self._artifacts = dict(position.artifacts) if position else {}
        names = [stage.name for stage in self._stages]
        for number, stage in enumerate(self._stages):
            if isinstance(stage, Prepare):
                self._prepare(stage, names, number, position)
                continue
            if ended.intersection(names[number:]):
                continue  # this stage, or one that was built on it, has ended
            self._attempt.check()
            inputs = self._inputs(position)
            mine = snapshot if position and position.stage == stage.name else None
            start = position if mine and position else self._begin(stage, position)
            start = replace(start, artifacts=dict(self._artifacts))
            position = StageLoop(self._attempt, saver, stage, inputs, start, mine).run()
            snapshot = None
        assert position is not None
        return position

    def _prepare(
        self, stage: Prepare, names: Sequence[str], number: int, position: Position | None
    ) -> None:
        """Derive the data, or hold what is there against its checksums; made of what stood then."""
        if position and position.has_ended and position.stage == names[-1]:
            return  # the run has only to be finished
        self._attempt.check()
        before = position
        if position:
            results = {n: r for n, r in position.results.items() if n in names[:number]}
            before = replace(position, results=results)
        self._artifacts[stage.name] = ensure_artifact(
            self._attempt, stage, lambda: self._inputs(before), self._artifacts.get(stage.name)
        )

    def _begin(self, stage: Train, before: Position | None) -> Position:
        if before is None:
            return Position(stage=stage.name, numerics_changed=self._changed(()))
        return Position(
            stage=stage.name,
            step=before.step,
            results=before.results,
            numerics_changed=before.numerics_changed,
        )

    def _resume(self) -> tuple[Position | None, AnySnapshot | None]:
        attempt = self._attempt
        loaded, passed_over = find_newest(attempt, self._is_sharded, self._verify_beginning)
        for name, why in passed_over:
            print(f"[resume] passed over checkpoint {name}: {why}", flush=True)
        position = Position.from_json(loaded.snapshot.state["position"]) if loaded else None
        if position:
            changed = self._changed(position.numerics_changed)
            position = replace(position, numerics_changed=changed)
        where: dict[str, Any] = {
            "step": position.step if position else 0,
            "stage": position.stage if position else None,
            "checkpoint": loaded.entry.name if loaded else None,
        }
        passed = [{"name": name, "why": why} for name, why in passed_over]
        if loaded or passed:
            attempt.events.emit("resumed", "ok", **where, passed_over=passed)
            print(f"[resume] from {where['checkpoint']}, step {where['step']}", flush=True)
        attempt.metrics.write("resume", **where, passed_over=passed, numerics_key=self._key)
        if loaded is None and attempt.lease.head.checkpoints:
            print("[resume] no checkpoint holds: the run begins anew", flush=True)
        return position, loaded.snapshot if loaded else None

    def _is_sharded(self, name: str) -> bool:
        return any(
            isinstance(stage, Train)
            and stage.name == name
            and is_sharded(stage.settings, self._attempt.world.size)
            for stage in self._stages
        )

    def _verify_beginning(self, position: Position) -> None:
        self._verified = self._read_end(position) if position.results else None

    def _changed(self, before: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted({*before, *changed_parts(self._record.numerics_key, self._key)}))

    def _inputs(self, position: Position | None) -> Inputs:
        return Inputs(
            config=self._config,
            dataset=self._dataset,
            artifact=self._artifact,
            prior=self._prior(position),
            device=self._device,
            rank=self._attempt.world.rank,
            world=self._attempt.world.size,
            seed=self._config.seed,
            scratch=self._attempt.scratch,
        )

    def _artifact(self, name: str) -> Sequence[Mapping[str, Tensor]]:
        if name not in self._artifacts:
            made = ", ".join(sorted(self._artifacts)) or "none"
            raise KeyError(f"no Prepare stage {name!r} was made before this stage; made: {made}")
        if name not in self._opened:
            cache = self._attempt.scratch / "artifacts"
            self._opened[name] = open_artifact(self._attempt.store, self._artifacts[name], cache)
        return self._opened[name]

    def _prior(self, position: Position | None) -> Prior | None:
        """The committed end of the last Train stage, read by rank 0 for all."""
        if position is None or not position.results:
            return None
        world = self._attempt.world
        prior = self._read_prior(position) if world.leads else None
        about = world.share(None if prior is None else replace(prior, model={}))
        assert about is not None
        return replace(about, model=world.share_tensors(None if prior is None else prior.model))

    def _read_prior(self, position: Position) -> Prior:
        """Read it from the store, also if this process has just made it."""
        with _explained():
            entry, snapshot = self._read_end(position)
        return Prior(
            stage=entry.stage,
            step=entry.step,
            # What was evaluated: the moving average where the stage has one.
            model={**snapshot.tensors["model"], **snapshot.tensors.get("ema", {})},
            metrics=position.results[entry.stage],
        )

    def _read_end(self, position: Position) -> tuple[CheckpointEntry, Snapshot]:
        """The committed end of the last stage that has ended; as read before, if it was."""
        end = self._end(position)
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == end:
            return verified
        try:
            return end, read_checkpoint(self._attempt.store, end, WEIGHTS)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"the end of stage {end.stage!r}, {end.name}, does not hold: {error}"
            ) from error

    def _end(self, position: Position) -> CheckpointEntry:
        last = list(position.results)[-1]
        entries = self._attempt.lease.head.checkpoints
        ends = [e for e in entries if e.stage == last and e.kind == "stage-end"]
        if not ends:
            raise DamagedCheckpointError(f"the end of stage {last!r} is not in head.json")
        return ends[-1]

    def _finish(self, position: Position) -> None:
        """Write what the run was for; a notice that comes from here on is none."""
        attempt, record = self._attempt, self._record
        attempt.supervisor.last_resort.stand_down()
        with _explained():
            end = self._end(position)
        about = {
            "run_id": record.run_id,
            "workload": record.workload,
            "recipe": record.recipe,
            "stage": end.stage,
            "step": str(end.step),
            "config": json.dumps(record.config),
            "metrics": json.dumps(dict(position.metrics)),
        }
        # A stale writer is told now, not after it wrote over what its successor has left.
        attempt.lease.beat()
        with _explained():
            weights = export_final(attempt.store, end, about, attempt.scratch)
        attempt.metrics.flush()
        attempt.lease.beat()
        write_receipt(
            attempt.store,
            record=record,
            head=attempt.lease.head,
            position=position,
            weights=weights,
            numerics_key=self._key,
            began=self._began,
            peak_gpu_bytes=_peak_gpu_bytes(self._device),
        )
        attempt.events.emit("finished", "ok", step=position.step, weights_sha256=weights)
        attempt.lease.finish(weights)
        print(f"[ok] finished: {position.step} steps, weights {weights}", flush=True)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except DamagedCheckpointError as error:
        raise StoreError(f"{error}; the next attempt goes on from an older one") from error


def _peak_gpu_bytes(device: torch.device) -> int | None:
    """What this attempt's tensors took at most, for `sizing review`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
