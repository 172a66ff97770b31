"""What a program's receipt says of what it left."""

import hashlib

import pytest

from tests.training.durable.program.programs import ProgramRun


def test_without_a_model_the_receipt_has_the_checkpoint_folder_and_no_weights(
    run: ProgramRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checksum of no files looked like that of weights."""
    run.write("""
        import os
        from pathlib import Path
        folder = Path(os.environ["SM_CHECKPOINT_DIR"])
        (folder / "last.pt").write_bytes(b"last")
        Path(os.fsdecode(os.fsencode(folder) + b"/caf\\xe9")).write_bytes(b"x")
    """)
    assert run.attempt() == 0
    receipt = run.json("receipt.json")
    assert receipt["weights_sha256"] is run.head.weights_sha256 is None
    assert receipt["final_files"] == {}
    last = hashlib.sha256(b"last").hexdigest()
    assert receipt["checkpoint_files"].keys() == {"checkpoints/last.pt", "checkpoints/caf\\xe9"}
    assert receipt["checkpoint_files"]["checkpoints/last.pt"] == last
    assert "finished: no steps, weights none" in "".join(capfd.readouterr())
