"""Whose a deployed stack is, and under which other prefixes ours stand."""

import pytest

from contract.stack_names import (
    DESCRIPTIONS,
    description_of,
    image_stack,
    other_prefixes,
    refuse_foreign,
    stack_name,
    training_id,
    training_stack,
)
from stacks.parameters import StackParameters
from stacks.parameters.context import QUALIFIER
from tests.stack_names import PREFIX


def test_descriptions_stay_what_is_deployed() -> None:
    """Every deployment so far has them: with other words, it would be taken for another's."""
    assert DESCRIPTIONS == {
        "DatasetStack": "Datasets and training runs; kept when the training stack is destroyed.",
        "NetworkStack": "The network that training stacks share.",
        "SweepStack": "A queue of many runs, which SageMaker trains a few at a time.",
        "RunImage-": "The image of one run, as its first deploy found it.",
        "ReviewStack": "The role with which pull requests are compared with what is deployed.",
        "TrainingStack": "Trains one run on Spot instances that may be interrupted at any time.",
    }
    assert description_of(image_stack("run-1", "/x")) == DESCRIPTIONS["RunImage-"]
    assert description_of(training_stack("vision")) == DESCRIPTIONS["TrainingStack"]


@pytest.mark.parametrize("found", [None, "", "Theirs", DESCRIPTIONS["NetworkStack"]])
def test_fails_for_what_is_not_the_same_stack_of_ours(found: str | None) -> None:
    ours = DESCRIPTIONS["TrainingStack"]
    assert refuse_foreign("X", found, ours).startswith("the stack X is not this project's")
    assert refuse_foreign("X", ours, ours) == ""
    # What an app deploys beside our stacks is its own matter.
    assert refuse_foreign("X", found, "Another stack of that app") == ""


@pytest.mark.parametrize("prefix", ["", PREFIX, "Training-", "VisionTeam-"])
@pytest.mark.parametrize("name", ["", "mine"])
def test_the_cli_is_told_the_construct_id_of_a_run_s_stack(prefix: str, name: str) -> None:
    """With the options of its synth: else it is not there, or another team's has its id.

    `npx cdk destroy Training-mine` then matches no stack, and ends with exit code 0.
    """
    options = StackParameters.options({"name": name, "prefix": prefix})
    told = training_id(stack_name(prefix, training_stack(name)))
    assert told == training_stack(name) + options


def test_a_deploy_command_keeps_the_qualifier_that_another_machine_may_not_know() -> None:
    options = StackParameters.options({"run_id": "r", QUALIFIER: "corp"})
    assert options == f" -c {QUALIFIER}=corp -c run_id=r"


def test_the_usual_prefix_ends_where_a_name_like_it_begins() -> None:
    told = training_id(stack_name(PREFIX, training_stack("Training-2")))
    assert told == "Training-Training-2 -c name=Training-2"
    assert training_id("Vision") == "Vision"


def test_ours_are_found_under_every_other_prefix() -> None:
    ours, theirs = DESCRIPTIONS["TrainingStack"], "Theirs"
    found = {"TrainingStack": ours, "B-TrainingStack": ours, "C-TrainingStack": theirs, "D-X": ours}
    assert list(other_prefixes("B-TrainingStack", "TrainingStack", found)) == [""]
    assert list(other_prefixes("E-TrainingStack", "TrainingStack", found)) == ["B-", ""]
