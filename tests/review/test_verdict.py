"""The review of a size, a policy, a bucket, a run id: on synthesized templates."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from aws_cdk import RemovalPolicy, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from constructs import Construct

from contract.certificate import Certificate
from contract.source import source_sha256
from review.assembly import CdkDiff, Side
from review.verdict import Review, judge
from sizing.catalogue import spot_price
from tests.review.conftest import MakeSide, changed, cost, edited, on_run
from tests.stack_names import DATASET, TRAINING, named

Reviewer = Callable[..., Review]


def bucket(app: Construct, name: str) -> s3.CfnBucket:
    found = app.node.find_child("DatasetStack").node.find_child(name).node.default_child
    assert isinstance(found, s3.CfnBucket)
    return found


def test_the_same_code_changes_nothing(review_of: Reviewer) -> None:
    review = review_of()
    assert (review.changes, review.effects) == ([], [])
    assert review.exit_code("destructive") == 0


def test_a_size_shows_overrides_throughput_and_cost_and_replaces_nothing(
    review_of: Reviewer,
) -> None:
    review = review_of(size="g5.12xlarge")
    (fleet,) = review.destructive
    assert (fleet.type, fleet.action) == ("AWS::EC2::SpotFleet", "may be replaced")
    assert review.exit_code("data-loss") == 0
    differences = {
        path: (old, new) for each in review.changes for path, old, new in each.differences()
    }
    assert any(path.endswith("Ebs.Throughput") and new == 1907
               for path, (_, new) in differences.items())  # fmt: skip
    assert cost(review, "sizes the fleet may launch")[1] == "g5.12xlarge g5.24xlarge"
    before, after = cost(review, "an hour of training, on demand")
    # 100 + 200 GiB and an address: 0.0379; 1,907 MiB/s and 7,628 IOPS on top: 0.1293.
    assert float(before) == pytest.approx(1.212 + 0.0379, abs=1e-3)
    assert float(after) == pytest.approx(5.672 + 0.0379 + 0.1293, abs=1e-3)
    assert on_run(review)[0].startswith("**The fleet may be replaced** (SpotFleetRequestConfig")
    assert any("updated in place instead" in effect for effect in on_run(review))
    # Of one kind of GPU, 1, 2, 4 or 8 add up to the same bits.
    assert any(
        each.startswith("GPUs change from 1 x NVIDIA A10G to 4 x NVIDIA A10G: a workload's weights")
        for each in on_run(review)
    )


def test_gpus_of_another_kind_change_the_bits(review_of: Reviewer) -> None:
    mixed = on_run(review_of(mix_gpus="true"))
    assert any(each.startswith("**The fleet may start NVIDIA L4 as well**: ") for each in mixed)
    more = on_run(review_of(alternates_price_factor="5"))
    assert not any("numerics key" in each for each in more)
    effects = on_run(review_of(size="g6.2xlarge"))
    assert any(each.startswith("**GPUs change from 1 x NVIDIA A10G to 1 x") for each in effects)


def test_a_rate_for_the_root_volume_shows_what_each_machine_pays(review_of: Reviewer) -> None:
    review = review_of(**{"root_volume.initialization_mib_per_second": "300"})
    assert [each.action for each in review.destructive] == ["may be replaced"]
    row = "loading the root volume (45 GiB), $ per machine booted"
    assert cost(review, row) == ("0.0000", "0.1620")
    (volumes,) = [each.after for each in review.costs if each.name == "volumes"]
    assert volumes.startswith("100 GiB gp3 (loaded at 300 MiB/s) + 200 GiB")


def test_alternates_show_what_the_dearest_costs(review_of: Reviewer) -> None:
    review = review_of(alternates_price_factor="5")
    assert cost(review, "dearest size it may launch, on demand") == ("1.6240", "4.0960")
    spot = [f"{spot_price(size).usd_per_hour:.4f}" for size in ("g5.4xlarge", "g5.16xlarge")]
    assert cost(review, "dearest size it may launch, Spot") == tuple(spot)


def limited(side: Side, **variables: str) -> Side:
    """The same side with other limits in the Guard's environment."""

    def edit(resources: dict[str, Any]) -> None:
        (guard,) = [each for each in resources.values() if each["Type"] == "AWS::Lambda::Function"]
        guard["Properties"]["Environment"]["Variables"] |= variables

    return edited(side, edit)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            {"MAX_BILLED_HOURS": "4"},
            {"MAX_BILLED_HOURS": "100"},
            "stops the run at 100 billed hours, no longer 4 billed hours; what the run has used",
        ),
        (
            {"MAX_BILLED_HOURS": "4"},
            {"MAX_BILLED_HOURS": "2"},
            "**The Guard stops the run at 2 billed hours, no longer 4 billed hours**: a run that "
            "has used more goes to zero within ten minutes. It saves",
        ),
        ({"MAX_USD": "5"}, {"MAX_USD": "0"}, "**A limit is removed**: the Guard no longer stops"),
        ({"MAX_USD": "0"}, {"MAX_USD": "5"}, "stops the run at $5 now; there was no such limit."),
        (
            {},
            {"BUDGET_USD": "300"},
            "at $300 of all runs of its budget now; there was no such limit",
        ),
        ({}, {"MAX_WAIT_HOURS": "0.5"}, "at 0.5 hours without a machine, no longer 24"),
        ({}, {"DEADLINE_HOURS": "8"}, "**The run gets a deadline, 8 hours after its start**: if"),
        (
            {"DEADLINE_HOURS": "8"},
            {"DEADLINE_HOURS": "9"},
            "The deadline moves from 8 to 9 hours after the run's start",
        ),
        ({"DEADLINE_HOURS": "8"}, {"DEADLINE_HOURS": "0"}, "**The deadline of 8 hours is removed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_new_limit_says_what_it_does_to_the_run(
    old: dict[str, str], new: dict[str, str], sentence: str, base: Side
) -> None:
    review = judge(limited(base, **old), limited(base, **new), [])
    assert any(sentence in effect for effect in on_run(review)), on_run(review)
    assert review.exit_code("destructive") == 0


def test_an_update_of_the_fleet_takes_back_what_a_deadline_bought(
    base: Side, make_side: Callable[..., Side]
) -> None:
    larger, sentence = make_side(**{"data_volume.gib": "400"}), "sets the fleet back to Spot"
    without = on_run(judge(base, larger, []))
    deadline = {"DEADLINE_HOURS": "8"}
    with_one = on_run(judge(limited(base, **deadline), limited(larger, **deadline), []))
    assert not any(sentence in effect for effect in without)
    assert any(sentence in effect for effect in with_one)


def test_a_policy_that_allows_more_widens(review_of: Reviewer) -> None:
    def allow_more(app: Construct) -> None:
        role = app.node.find_child("TrainingStack").node.find_child("InstanceRole").role  # type: ignore[attr-defined]
        role.add_to_policy(iam.PolicyStatement(actions=["s3:*"], resources=["*"]))

    review = review_of(allow_more)
    widened = [each for each in review.of("security") if each.action == "widens"]
    assert [each.what for each in widened] == ["+ Allow s3:* on *"]
    assert [review.exit_code("data-loss", each) for each in ([], ["permissions"])] == [1, 0]
    assert any("role's policy changes for the running trainer" in each for each in on_run(review))


def test_a_deny_that_goes_widens(review_of: Reviewer) -> None:
    def allow_plain_http(app: Construct) -> None:
        policy = app.node.find_child("DatasetStack").node.find_child("RunBucket").policy  # type: ignore[attr-defined]
        policy.node.default_child.add_property_override(
            "PolicyDocument.Statement",
            [{"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "*"}],
        )

    effects = [(each.action, each.what) for each in review_of(allow_plain_http).of("security")]
    assert all(effect == "widens" for effect, _ in effects)
    assert any("− Deny" in what and "aws:SecureTransport" in what for _, what in effects)
    assert any(what.startswith("+ Allow to * s3:GetObject on *") for _, what in effects)


def test_fails_for_a_bucket_that_would_be_replaced(review_of: Reviewer) -> None:
    def give_a_name(app: Construct) -> None:
        bucket(app, "RunBucket").bucket_name = "my-runs"

    review = review_of(give_a_name)
    (loss,) = review.of("loss")
    assert (loss.stack, loss.path) == (DATASET, "RunBucket")
    assert "is replaced (BucketName cannot be updated)" in loss.what
    assert "a new, empty one takes its place" in loss.what
    assert "-c run_bucket=" in loss.instead
    # The bucket's policy names it, and a policy cannot move to another bucket.
    assert {each.path: each.why for each in review.destructive} == {
        "RunBucket": "BucketName cannot be updated",
        "RunBucket/Policy": "Bucket names RunBucketCA76775A, which is replaced",
    }
    assert review.exit_code("data-loss") == 1
    assert review.exit_code("never") == 0
    # TrainingStack imports its name, and an export in use cannot change.
    assert {each.what for each in review.of("refused")} == {
        f"the export's value changes while {TRAINING} imports it"
    }
    assert "**RunBucket is replaced**: a run's checkpoints are" in on_run(review)[0]


def test_fails_for_a_bucket_that_gets_another_logical_id(base: Side) -> None:
    kept = base.stacks[DATASET]
    old = next(name for name in kept.resources if name.startswith("DatasetBucket9"))
    text = json.dumps(kept.template).replace(old, "Renamed")
    review = judge(base, changed(base, DATASET, template=json.loads(text)), [])
    (loss,) = review.of("loss")
    assert "is removed: it stays in the account (Retain)" in loss.what
    assert review.exit_code("data-loss") == 1


def test_fails_for_a_bucket_whose_protection_weakens(review_of: Reviewer) -> None:
    def weaken(app: Construct) -> None:
        runs, datasets = bucket(app, "RunBucket"), bucket(app, "DatasetBucket")
        runs.add_property_deletion_override("VersioningConfiguration")
        datasets.apply_removal_policy(RemovalPolicy.DESTROY)
        datasets.add_property_override(
            "LifecycleConfiguration.Rules",
            [{"Id": "Old", "Status": "Enabled", "ExpirationInDays": 30, "Prefix": "clips/"}],
        )
        stack = app.node.find_child("DatasetStack")
        assert isinstance(stack, Stack)
        stack.termination_protection = False

    review = review_of(weaken)
    whats = [loss.what for loss in review.of("loss")]
    assert "DeletionPolicy of the bucket goes from Retain to Delete" in whats
    assert "UpdateReplacePolicy of the bucket goes from Retain to Delete" in whats
    assert "a lifecycle rule deletes current objects under clips/ after 30 days" in whats
    assert any(what.startswith("versioning is suspended") for what in whats)
    assert any(what.startswith("termination protection is removed") for what in whats)
    assert len(whats) == 5


def test_a_key_that_only_a_failed_first_deploy_deletes_is_as_kept(
    base: Side, make_side: Callable[..., Side]
) -> None:
    def keep_always(resources: dict[str, Any]) -> None:
        (key,) = [each for each in resources.values() if each["Type"] == "AWS::KMS::Key"]
        assert key["DeletionPolicy"] == "RetainExceptOnCreate"
        key["DeletionPolicy"] = "Retain"

    now = make_side(kms="create")
    before = edited(now, keep_always, DATASET)
    assert judge(before, now, []).of("loss") == []
    # Its policy stays in force when the key is no longer in the stack.
    assert judge(now, base, []).effects == judge(before, base, []).effects


def test_fails_for_a_storage_stack_under_another_name(base: Side) -> None:
    renamed = Side(
        name="head",
        stacks={"Storage" if name == DATASET else name: stack
                for name, stack in base.stacks.items()},
    )  # fmt: skip
    review = judge(base, renamed, [])
    assert {loss.path for loss in review.of("loss")} == {"DatasetBucket", "RunBucket"}
    assert review.exit_code("data-loss") == 1


def test_adopted_buckets_are_no_loss(review_of: Reviewer) -> None:
    review = review_of(dataset_bucket="my-data", run_bucket="my-runs")
    assert review.of("loss") == []
    assert any(
        f"{DATASET} is no longer part of the app" in note.what for note in review.of("stack")
    )


def test_a_bucket_that_goes_is_missed_for_what_is_in_it(
    base: Side, make_side: Callable[..., Side]
) -> None:
    effects = on_run(judge(base, make_side(dataset_bucket="my-data"), []))
    gone = "**DatasetBucket is removed**: the dataset is in the old bucket, and the next attempt"
    assert effects[0].startswith(gone)
    assert not any("a run's checkpoints are" in each for each in effects)
    # The bucket of the access logs has nothing of a run.
    assert on_run(judge(make_side(access_logs="true"), base, [])) == []


def test_objects_that_stay_for_less_long_are_told(base: Side, make_side: MakeSide) -> None:
    shorter = make_side(versions_kept_days=1)
    review = judge(base, shorter, [])
    (loss,) = review.of("loss")
    assert loss.what.endswith("old versions for good under every key after 1 days, no longer 14")
    assert [review.exit_code("data-loss", each) for each in ([], ["retention"])] == [1, 0]
    assert judge(shorter, base, []).of("loss") == []


def test_another_key_leaves_what_is_there_unreadable(base: Side, make_side: MakeSide) -> None:
    ours = make_side(kms="create")
    for head in (base, make_side(kms=f"arn:aws:kms:us-east-1:123456789012:key/{UUID(int=1)}")):
        review = judge(ours, head, [])
        assert any(each.startswith("**The data's key changes** (") for each in on_run(review))
        assert any("-c kms=ITS-ARN" in loss.instead for loss in review.of("loss"))
    # What was there without a key of one's own is read with any.
    assert not any("key changes" in each for each in on_run(judge(base, ours, [])))


def test_a_volume_that_goes_is_not_called_plain(review_of: Reviewer) -> None:
    assert review_of(data_on="nvme").of("security") == []


def test_a_fleet_left_out_of_the_app_is_billed_on(review_of: Reviewer) -> None:
    review = review_of(name="vision")
    assert any(f"aws cloudformation delete-stack --stack-name {TRAINING}" in note.what
               for note in review.of("stack"))  # fmt: skip


def test_a_new_run_id_is_a_new_run_and_no_loss(review_of: Reviewer) -> None:
    review = review_of(run_id="run-2")
    assert "AWS::EC2::SpotFleet" in [each.type for each in review.destructive]
    assert review.of("loss") == []
    assert review.exit_code("data-loss") == 0
    assert review.exit_code("destructive") == 1
    assert on_run(review)[0].startswith(
        "**A new run starts, and the deploy ends run-1** if it still trains: run-2 gets"
    )
    assert "To let it train on, deploy with -c run_id=run-1" in on_run(review)[0]
    # Its role goes, but not under a trainer.
    assert not any("role" in effect for effect in on_run(review)[1:])
    assert not any("under the same run id" in effect for effect in on_run(review))


def test_a_recipe_under_the_same_run_id_is_called_refused(review_of: Reviewer) -> None:
    effects = on_run(review_of(recipe="laptop"))
    assert any("RECIPE changes under the same run id run-1" in effect for effect in effects)


def test_a_fleet_sent_to_zero_ends_a_run_with_a_notice(review_of: Reviewer) -> None:
    effects = on_run(review_of(target_capacity=0))
    assert any("The fleet goes to zero" in effect for effect in effects)
    assert not any("is set to its capacity again" in effect for effect in effects)


def test_shares_end_the_jobs_of_the_queue_that_they_replace(make_side: MakeSide) -> None:
    queue = {"sweep.instances": "4"}
    base, head = make_side(**queue), make_side(**queue, **{"sweep.shares": "a=1 b=2"})
    assert on_run(judge(base, base, [])) == []
    effect, *rules = on_run(judge(base, head, []))
    assert effect.startswith("**The queue Queue is removed, and Batch ends its jobs**")
    assert all("EventPattern.detail.jobQueue" in each for each in rules)


def test_another_kind_of_fleet_ends_the_old_ones_machine_and_costs_the_same(
    review_of: Reviewer,
) -> None:
    review = review_of(fleet="asg")
    assert sum("**The kind of fleet changes**" in each for each in on_run(review)) == 1
    assert not any("can resume later" in each for each in on_run(review))
    assert review.of("loss") == []
    for name in ("sizes the fleet may launch", "public IPv4", "on-demand base"):
        before, after = cost(review, name)
        assert before == after != "-"


@pytest.mark.parametrize(
    ("context", "said", "unsaid"),
    [
        ({"run_id": "run-2"}, "**A new run starts, and the deploy ends run-1**", "is removed"),
        ({"target_capacity": 0}, "**The fleet goes to zero**", "Spot notice and saves"),
        # Its launch template's version is an update in place, whatever a Spot fleet does.
        ({"size": "g5.xlarge"}, "the Guard requests a machine again", "may be replaced"),
    ],
)
def test_of_two_groups_one_speaks_for_the_fleet(
    make_side: MakeSide, context: dict[str, Any], said: str, unsaid: str
) -> None:
    effects = on_run(judge(make_side(fleet="asg"), make_side(fleet="asg", **context), []))
    assert sum(said in each for each in effects) == 1, effects
    assert not any(unsaid in each for each in effects), effects


def test_other_zones_replace_subnets_that_an_instance_holds(review_of: Reviewer) -> None:
    review = review_of(zones="us-east-1c,us-east-1d")
    assert "AWS::EC2::Subnet" in [each.type for each in review.destructive]
    assert any("CloudFormation cannot delete the old one" in each for each in on_run(review))


def test_what_the_cli_calls_a_replacement_is_one(base: Side, review_of: Reviewer) -> None:
    head = review_of(target_capacity=0)
    (fleet,) = [each for each in head.changes if each.type == "AWS::EC2::SpotFleet"]
    word = CdkDiff(stack=TRAINING, text="", destructive={fleet.logical_id: "may be replaced"})
    resources = {**base.stacks[TRAINING].resources, fleet.logical_id: fleet.new}
    review = judge(base, changed(base, template={"Resources": resources}), [word])
    assert [each.why for each in review.destructive] == ["the CDK CLI says: may be replaced"]


PLAN = {
    "fits": True, "gpu_memory_mib": 9876, "bound_by": "compute", "epoch_seconds": 61.25,
    "hours_p50": 3.5, "hours_p90": 4.25, "usd_on_demand": 4.24, "usd_spot_p50": 2.07,
    "usd_spot_p90": 2.52, "checkpoint_bytes": 104857600, "checkpoint_seconds": 3.1,
    "notice_fits": False, "warnings": ["the volume is tight"], "size": "g5.2xlarge",
    "workload": "trajectory", "recipe": "full",
}  # fmt: skip


def test_the_plan_of_both_sides_is_compared(base: Side) -> None:
    slower = {**PLAN, "hours_p50": 7.0}
    review = judge(changed(base, plan=PLAN), changed(base, plan=slower), [])
    (row,) = [row for row in review.costs if row.name == "hours, p50"]
    assert (row.before, row.after, row.difference) == ("3.5", "7", "+100.0%")
    assert cost(review, "checkpoint fits the notice") == ("**no**", "**no**")
    assert review.warnings == ["the volume is tight"]


def test_a_side_without_a_plan_says_so(base: Side) -> None:
    review = judge(base, changed(base, plan=PLAN), [])
    assert cost(review, "hours, p50") == ("not predicted on this side", "3.5")


def test_a_volume_that_outlives_its_instance_is_told(review_of: Reviewer) -> None:
    def keep_volumes(app: Construct) -> None:
        template = app.node.find_child("TrainingStack").node.find_child("LaunchTemplate").template  # type: ignore[attr-defined]
        path = "LaunchTemplateData.BlockDeviceMappings.1.Ebs.DeleteOnTermination"
        template.node.default_child.add_property_override(path, False)

    effects = on_run(review_of(keep_volumes))
    assert any("leaves its volume /dev/sdf behind" in effect for effect in effects)


def test_the_image_that_a_deploy_starts_is_told(base: Side, make_side: Callable[..., Side]) -> None:
    keeper, line = named("RunImage-run-1-02012aed"), "pytorch-2.12-ubuntu-24.04/latest/ami-id"
    had, newer = "ami-0aaaaaaaaaaaaaaaa", "ami-0bbbbbbbbbbbbbbbb"

    def images_of(head: Side, **images: str) -> tuple[str, list[str]]:
        """The note and the effects, where these stacks alone are deployed, with their images."""
        stacks = {name: replace(base.stacks[name], image=image) for name, image in images.items()}
        review = judge(replace(base, stacks=stacks), head, [])
        (note,) = [each for each in review.notes if each.startswith(f"{TRAINING} starts")]
        return note, [each for each in on_run(review) if "image" in each]

    deployed = {TRAINING: had}
    assert images_of(base, **deployed, **{keeper: had}) == (
        f"{TRAINING} starts the image that it has: {had}.", []
    )  # fmt: skip
    note, (effect,) = images_of(base, **deployed)
    assert note.startswith(f"{TRAINING} starts the newest of /aws/service/deeplearning/")
    assert note.endswith(f"{line}, which {keeper} then keeps; it has {had}.")
    assert effect.startswith(f"**The image of run-1 may change** ({had} → the newest of /aws")
    assert effect.endswith(f"-c pytorch_ami_parameter={had} keeps it.")
    note, (effect,) = images_of(make_side(pytorch_ami_parameter=newer), **deployed)
    assert note == f"{TRAINING} starts {newer}; it has {had}."
    assert effect.startswith(f"**The image of run-1 changes** ({had} → {newer})")
    note, effects = images_of(make_side(run_id="run-2"), **deployed, **{keeper: had})
    assert "RunImage-run-2-" in note and note.endswith(f"; it has {had}.")
    assert effects == []


def test_what_is_certified_of_a_program_is_told(
    base: Side, make_side: MakeSide, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    none = make_side(program="python train.py", source=str(tmp_path))
    (note,) = [each for each in judge(base, none, []).notes if "certificate" in each]
    assert note.startswith(f"The program of {TRAINING}: no certificate: what an interruption costs")
    Certificate(
        is_good=True, summary="at most 9 s", rows={}, code_sha256=source_sha256(tmp_path),
        program={}, certified_on="2026-11-29", version="0.1.0",
    ).write(tmp_path)  # fmt: skip
    certified = make_side(program="python train.py ", source=str(tmp_path))  # not the cached one
    (note,) = [each for each in judge(none, certified, []).notes if "certified" in each]
    assert f"{TRAINING}: certified on 2026-11-29 with 0.1.0: at most 9 s. Before: no cert" in note
