"""A run that outlives its machines: its store, its record, its attempts, its saves, its reports.

Promises that a checkpoint exists only once the head names it, that exactly one writer wins, that a
notice ends the attempt in time, and that the next one goes on from the same bits. It knows neither
models nor workloads: the trainer in training/ does, and programs bring their own.
"""

from typing import TYPE_CHECKING

from contract import door

if TYPE_CHECKING:
    from training.durable.attempt.attempt import (
        AttemptOptions,
        HeldRun,
        opened_dataset,
        run_attempt,
    )
    from training.durable.attempt.ranks import Hosts, StartRank
    from training.durable.attempt.resume_point import DamagedCheckpointError
    from training.durable.attempt.supervisor import Supervisor, Work
    from training.durable.attempt.world import AttemptContext, RankEnvironment, World
    from training.durable.data_report import DataFinding, DataRefusedError, DataReport
    from training.durable.dataset_output import FinishedFiles, FolderOutput, Output
    from training.durable.errors import (
        AttemptEndedError,
        DivergedError,
        Divergence,
        GoBackError,
        InterruptedRunError,
        MachineError,
        RunFailedError,
        exit_code_of,
    )
    from training.durable.program.container import ProgramOptions
    from training.durable.program.job import run_program
    from training.durable.record.goodput import read_goodput
    from training.durable.record.head import (
        CheckpointEntry,
        Head,
        Position,
        Retention,
        read_json_record,
    )
    from training.durable.record.history import History
    from training.durable.record.lease import Reopened, reopen_run
    from training.durable.record.metrics import Events
    from training.durable.record.run import OpenRun, RunConfig
    from training.durable.report.page import SweptRuns, parse_receipt, write_report
    from training.durable.report.profiler import StepProfiler
    from training.durable.report.progress import FileProgressBar, ProgressBar, configure_logging
    from training.durable.report.receipt import RunResult, fail_run
    from training.durable.save.snapshots.quiet import QuietTime
    from training.durable.save.snapshots.restore import export_snapshot
    from training.durable.save.tensors.checkpointer import Checkpointer
    from training.durable.save.tensors.memory import data_bytes, free_bytes, page_lock, used_bytes
    from training.durable.save.tensors.policy import CheckpointPolicy
    from training.durable.save.tensors.resume import (
        CheckpointContent,
        Resume,
        ShardedContent,
        misfit,
    )
    from training.durable.save.tensors.state import LiveState, is_sharded
    from training.durable.save.tensors.weights import Extension, Weights, export_final
    from training.durable.sources import (
        Brought,
        ImportSource,
        SourceFile,
        class_names,
        classless,
        copy_in_splits,
        refuse_untrained,
        split_within,
        without_strays,
    )
    from training.durable.store.dataset import StoredDataset, StoreOutput, stored_source
    from training.durable.store.folder import UnfinishedFile, open_store
    from training.durable.store.local_dataset import LocalDataset, sha256_of
    from training.durable.store.protocol import (
        AnswerLostError,
        Store,
        StoreError,
        Upload,
        attended,
        get_each,
        put_unless_changed,
    )
    from training.durable.tally import Tally
else:
    __getattr__ = door.of(__name__)

# fmt: off
__all__ = [
    "AnswerLostError", "AttemptContext", "AttemptEndedError",
    "AttemptOptions", "Brought", "CheckpointContent", "CheckpointEntry", "CheckpointPolicy",
    "Checkpointer", "DamagedCheckpointError", "DataFinding",
    "DataRefusedError", "DataReport", "DivergedError", "Divergence", "Events", "Extension",
    "FileProgressBar", "FinishedFiles", "FolderOutput", "GoBackError", "Head", "HeldRun",
    "History", "Hosts",
    "ImportSource", "InterruptedRunError", "LiveState", "LocalDataset", "MachineError",
    "OpenRun", "Output", "Position", "ProgramOptions", "ProgressBar", "QuietTime",
    "RankEnvironment", "Reopened", "Resume", "Retention", "RunConfig", "RunFailedError",
    "RunResult", "ShardedContent", "SourceFile", "StartRank", "StepProfiler", "Store",
    "StoreError", "StoreOutput", "StoredDataset", "Supervisor", "SweptRuns", "Tally",
    "UnfinishedFile", "Upload", "Weights", "Work", "World", "attended", "class_names",
    "classless", "configure_logging", "copy_in_splits", "data_bytes", "exit_code_of",
    "export_final", "export_snapshot", "fail_run", "free_bytes", "get_each", "is_sharded",
    "misfit", "open_store", "opened_dataset", "page_lock", "parse_receipt",
    "put_unless_changed", "read_goodput", "read_json_record", "refuse_untrained", "reopen_run",
    "run_attempt", "run_program", "sha256_of", "split_within", "stored_source", "used_bytes",
    "without_strays", "write_report",
]
