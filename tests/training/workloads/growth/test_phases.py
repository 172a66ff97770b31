"""One run that grows twice: killed in each phase and transition, it ends with the same bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.hooks import interrupt_at, kill_at
from tests.training.runs import Run, assert_equal
from tests.training.workloads.growth import hooked
from training.cli.main import main
from training.durable.save.tensors.resume import CheckpointContent
from training.engine.optimizer import state_by_name
from training.workload import OptimizerState
from training.workloads.expansion import deepen
from training.workloads.growth import transitions

WORKLOAD = "--workload=tests.training.workloads.growth.hooked:HOOKED"
PHASES = ("dense", "experts", "grown")


def new_run(folder: Path, dataset: Path, *options: str) -> Run:
    return Run(
        dataset=dataset,
        uri=str(folder / "run"),
        scratch=folder / "scratch",
        options=[WORKLOAD, "--recipe=small", "--keep=50", *options],
    )


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "stories"
    assert main(["data", "make", WORKLOAD, f"--out={out}", "--count=60"]) == 0
    return out


@pytest.fixture(scope="module")
def whole(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("whole"), stories)
    assert run.attempt() == 0
    return run


def optimizer_at_the_end(run: Run, phase: str) -> OptimizerState:
    end = next(e for e in run.head.checkpoints if (e.stage, e.kind) == (phase, "stage-end"))
    return state_by_name(CheckpointContent.read(run.store, end))


def test_a_run_that_is_killed_in_each_phase_and_transition_ends_with_the_same_bits(
    whole: Run, stories: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, stories)
    for phase in PHASES:
        kill_at(run, f"{phase}-start", 0)
        interrupt_at(phase, 1)
        assert run.attempt() == 75
        kill_at(run, phase, 4)
    assert run.attempt() == 0
    assert_equal(run, whole)
    assert run.json("receipt.json")["facts"] == whole.json("receipt.json")["facts"]


def test_each_optimizer_counts_on_where_the_one_before_has_ended(whole: Run) -> None:
    for number, phase in enumerate(PHASES, 1):
        state = optimizer_at_the_end(whole, phase)
        assert int(state["embedding.weight"]["step"]) == number * hooked.STEPS
        if phase != "dense":  # the router is as old as the experts
            assert int(state["blocks.0.ffn.router.weight"]["step"]) == (number - 1) * hooked.STEPS


@pytest.mark.slow
def test_fails_for_an_optimizer_state_of_a_model_that_ranks_share(
    stories: Path, tmp_path: Path
) -> None:
    """They read it whole from what each wrote a share of; to start from it is refused."""
    run = new_run(tmp_path, stories)
    assert run.attempt_with_ranks(2, "--override=sharding=full") == [2, 2]
    assert "embedding.weight" in optimizer_at_the_end(run, "dense")
    assert len(run.losses()) == hooked.STEPS


def test_each_transition_states_how_exactly_the_function_was_kept(whole: Run) -> None:
    facts = whole.json("receipt.json")["facts"]
    assert list(facts) == list(PHASES)
    assert facts["experts"]["parameters"] > facts["experts"]["active_parameters"]
    for phase in PHASES[1:]:
        assert 0 < facts[phase]["max_logit_difference"] < 1e-5
        assert facts[phase]["loss_difference"] < 1e-5
        assert facts[phase]["gradient_difference"] < 1e-4
        assert facts[phase]["moment_difference"] < 1e-6
    # Four windows of 24 tokens, in two blocks of experts; the first growth has none to compare.
    assert facts["grown"]["routings"] == 192
    assert facts["grown"]["texts_rerouted"] == 0
    assert facts["experts"].keys() == facts["grown"].keys() - {
        *("router_logit_difference", "routings", "routings_near_ties", "texts_rerouted")
    }
    page = (Path(whole.uri) / "report.html").read_text()
    assert "max_logit_difference" in page.replace("<wbr>", "")


def test_the_loss_goes_on_where_the_smaller_model_left_it(whole: Run) -> None:
    losses = {step: loss for step, _, loss, _ in whole.losses()}
    for last in (hooked.STEPS, 2 * hooked.STEPS):
        assert abs(losses[last + 1] - losses[last]) < 0.2
    assert losses[3 * hooked.STEPS] < losses[1]


def test_what_is_shared_out_unevenly_is_in_a_table(whole: Run) -> None:
    folder = Path(whole.uri) / "evaluation" / f"grown-{hooked.STEPS}"
    rows = (folder / "experts.csv").read_text().splitlines()
    assert len(rows) == 1 + 2
    shares = [float(share) for share in rows[1].split(",")[1:]]
    assert sum(shares) == pytest.approx(4, abs=0.05)


def test_fails_a_growth_that_changes_the_function_and_trains_no_step_of_it(
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def not_zeroed(state: Any, layout: Any, *, after: Any, fresh: Any) -> Any:
        return {**deepen(state, layout, after=after, fresh=fresh), **noise_of(fresh)}

    def noise_of(fresh: Any) -> Any:
        """The new block adds what a block adds that was never zeroed."""
        return {name: fresh[name] for name in fresh if "blocks.2" in name and "down" in name}

    monkeypatch.setattr(transitions, "deepen", not_zeroed)
    run = new_run(tmp_path, stories)
    assert run.attempt() == 1
    assert (run.head.state, run.head.checkpoints[-1].stage) == ("failed", "experts")
    assert "the growth from experts failed: logits differ by up to" in run.head.reason
    assert {line["stage"] for line in run.lines("step")} == {"dense", "experts"}
    assert "Traceback" not in capsys.readouterr().err


def changed(state: OptimizerState, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    return {name: change(dict(own)) for name, own in state.items()}


# Each leaves the function as it is: only the optimizer would learn something else.
FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "not divided": lambda own: own | {"exp_avg": 2 * own["exp_avg"]},
    "second not divided": lambda own: own | {"exp_avg_sq": 4 * own["exp_avg_sq"]},
    "divided once": lambda own: own | {"exp_avg_sq": 2 * own["exp_avg_sq"]},
    "flipped": lambda own: own | {"exp_avg": own["exp_avg"].flip(0)},
    "of the other sign": lambda own: own | {"exp_avg": -own["exp_avg"]},
    "swapped": lambda own: own | {"exp_avg": own["exp_avg_sq"], "exp_avg_sq": own["exp_avg"].abs()},
    "started at zero": lambda own: own | {"exp_avg": torch.zeros_like(own["exp_avg"])},
    "not a number": lambda own: own | {"exp_avg_sq": own["exp_avg_sq"] * float("nan")},
}


@pytest.mark.parametrize(
    ("phase", "carry", "fault"),
    [
        pytest.param(
            phase,
            carry,
            fault,
            marks=() if (carry, fault) == ("exact", "not divided") else pytest.mark.slow,
        )
        for phase in PHASES[1:]
        for carry in ("exact", "asymmetric")
        for fault in FAULTS
    ],
)
def test_fails_moments_that_did_not_grow_as_their_gradients_do(
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    carry: str,
    fault: str,
) -> None:
    name = "upcycle_optimizer" if phase == "experts" else "deepen_optimizer"
    right = getattr(transitions, name)
    wrong = lambda *state, **how: changed(right(*state, **how), FAULTS[fault])  # noqa: E731
    monkeypatch.setattr(transitions, name, wrong)
    options = ["dense_steps=2", "experts_steps=2", f"carry={carry}"]
    options += ["rewarm_steps=3"] if carry == "asymmetric" else []
    run = new_run(tmp_path, stories, *(f"--override={option}" for option in options))
    assert run.attempt() == 1
    assert f"the growth from {PHASES[PHASES.index(phase) - 1]} failed: exp_avg" in run.head.reason
    assert "divided as its gradient is, differs by" in run.head.reason
    assert phase not in {line["stage"] for line in run.lines("step")}


def test_fails_gradients_of_which_a_copy_gets_none(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function is kept; a kernel's backward forgets half of a widened embedding."""
    plain = transitions.gradients

    def halved(model: Any, loss: Any, keep: Any = None) -> Any:
        if keep is None:
            return plain(model, loss)
        return plain(model, loss, lambda name, g: keep(name, g / 2 if "embedding" in name else g))

    monkeypatch.setattr(transitions, "gradients", halved)
    run = new_run(tmp_path, stories, "--override=dense_steps=2")
    assert run.attempt() == 1
    assert "the gradient of embedding.weight, its copies summed and" in run.head.reason


@pytest.mark.parametrize("carry", ["none", "asymmetric"])
def test_an_optimizer_is_carried_over_or_starts_anew(
    whole: Run, stories: Path, tmp_path: Path, carry: str
) -> None:
    options = [f"--override=carry={carry}", "--override=grown_steps=1"]
    if carry == "asymmetric":
        options.append("--override=rewarm_steps=3")
    run = new_run(tmp_path, stories, *options)
    assert run.attempt() == 0
    # The same first step of each phase, from the same weights; what follows has another optimizer.
    losses, others = ({step: loss for step, _, loss, _ in r.losses()} for r in (run, whole))
    assert losses[hooked.STEPS + 1] == others[hooked.STEPS + 1]
    is_equal = losses[hooked.STEPS + 2] == others[hooked.STEPS + 2]
    assert is_equal == (carry == "asymmetric")


def test_without_biases_it_grows_and_its_experts_are_a_mixtral(
    stories: Path, tmp_path: Path
) -> None:
    options = ["has_biases=false", "norm=rms", "activation=swiglu", "grown_steps=2"]
    run = new_run(tmp_path, stories, *(f"--override={option}" for option in options))
    kill_at(run, "grown", 1)
    assert run.attempt() == 0
    for entry in run.head.checkpoints:
        model = CheckpointContent.read(run.store, entry).tensors["model"]
        biases = [tensor for name, tensor in model.items() if name.endswith("bias")]
        assert biases and not any(tensor.any() for tensor in biases)
    end = next(e for e in run.head.checkpoints if (e.stage, e.kind) == ("experts", "stage-end"))
    given = [f"--run-uri={run.uri}", f"--checkpoint={end.step}", f"--out={tmp_path / 'mixtral'}"]
    assert main(["export", *given, "--format=huggingface"]) == 0
    about = json.loads((tmp_path / "mixtral" / "config.json").read_text())
    assert about["model_type"] == "mixtral"


def test_each_phase_shows_how_it_goes_on_with_held_out_texts(whole: Run) -> None:
    for phase in PHASES:
        folder = Path(whole.uri) / "evaluation" / f"{phase}-{hooked.STEPS}"
        samples = (folder / "samples.md").read_text().splitlines()
        assert len([line for line in samples if line.startswith("**")]) == 2


def test_predict_gives_each_window_its_perplexity(
    whole: Run, stories: Path, tmp_path: Path
) -> None:
    out = tmp_path / "windows.jsonl"
    uris = [f"--run-uri={whole.uri}", f"--dataset-uri={stories}"]
    assert main(["predict", *uris, f"--out={out}"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    mean = sum(line["loss"] for line in lines) / len(lines)
    stage = whole.json("receipt.json")["stages"]["grown"]
    assert len(lines) == 6 and mean == pytest.approx(stage["loss"], rel=1e-5)


def test_a_prompt_is_continued_here_as_by_transformers_with_the_exported_tokenizer(
    whole: Run, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    uris = [f"--run-uri={whole.uri}", f"--dataset-uri={stories}"]
    end = next(e for e in whole.head.checkpoints if (e.stage, e.kind) == ("dense", "stage-end"))
    dense = [*uris, f"--checkpoint={end.step}"]
    begun = "Once upon a time"

    def continued(*options: str) -> list[str]:
        assert main(["predict", *dense, f"--prompt={begun}", "--tokens=6", *options]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [line["text"] for line in lines]

    (greedy,) = continued()
    drawn = [continued("--temperature=2", f"--seed={seed}", "--prompt=A") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 2
    out = tmp_path / "out"
    assert main(["export", *dense, "--format=huggingface", f"--out={out}"]) == 0
    capsys.readouterr()
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    asked = tokenizer(begun, return_tensors="pt")
    found = theirs.generate(**asked, do_sample=False, max_new_tokens=6)[0]
    assert tokenizer.decode(found, skip_special_tokens=True) == begun + greedy
    ends = json.loads((stories / "manifest.json").read_text())["meta"]["end_of_text"]
    assert tokenizer.eos_token_id == theirs.generation_config.eos_token_id == ends
    for wrong, says in (
        ("--temperature=-1", "--temperature is -1.0; give 0 or more"),
        ("--prompt=", "--prompt is '', which has no token; write a beginning"),
    ):
        assert main(["predict", *dense, f"--prompt={begun}", wrong]) == 2
        assert says in capsys.readouterr().err


def test_moments_in_bfloat16_and_copies_that_warm_up_survive_a_kill(
    stories: Path, tmp_path: Path
) -> None:
    options = ["lean_optimizer=all", "micro_batch=8", "recompute=all", "carry=asymmetric"]
    options += ["rewarm_steps=4", "dense_steps=1", "experts_steps=2"]
    overrides = [f"--override={option}" for option in options]
    plain, run = (new_run(tmp_path / name, stories, *overrides) for name in ("plain", "killed"))
    assert plain.attempt() == 0
    kill_at(run, "grown", 4)
    assert run.attempt() == 0
    assert_equal(run, plain)
    state = optimizer_at_the_end(run, "grown")
    assert state["embedding.weight"]["exp_avg"].dtype == torch.bfloat16
    assert state["blocks.0.attention.query.weight"]["rewarm"]["done"] == hooked.STEPS
