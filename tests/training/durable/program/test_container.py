"""The container contract, held against what SageMaker documents.

Sources: the SageMaker developer guide, "How Amazon SageMaker Provides Training Information", and
ENVIRONMENT_VARIABLES.md and environment.py of github.com/aws/sagemaker-training-toolkit.
"""

import json
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.program import Program
from training.durable.program.container import (
    Container,
    ContainerHost,
    _channel_folders,
    claimed,
    command_arguments,
)
from training.durable.store.protocol import StoreError

# Every variable of ENVIRONMENT_VARIABLES.md, and those that environment.py sets beside them; the
# last line is of the drivers of github.com/aws/sagemaker-python-sdk, which start torchrun.
DOCUMENTED = """
    SM_MODEL_DIR SM_CHANNELS SM_CHANNEL_TRAINING SM_CHANNEL_TESTING SM_HPS SM_HP_LEARNING-RATE
    SM_HP_BATCH-SIZE SM_HP_COMMUNICATOR SM_CURRENT_HOST SM_HOSTS SM_NUM_GPUS SM_NUM_NEURONS
    SM_NUM_CPUS SM_LOG_LEVEL SM_NETWORK_INTERFACE_NAME SM_USER_ARGS SM_INPUT_DIR SM_INPUT_CONFIG_DIR
    SM_RESOURCE_CONFIG SM_INPUT_DATA_CONFIG SM_TRAINING_ENV
    SM_OUTPUT_DIR SM_OUTPUT_DATA_DIR SM_OUTPUT_INTERMEDIATE_DIR SM_MODULE_NAME SM_MODULE_DIR
    SM_USER_ENTRY_POINT SM_FRAMEWORK_MODULE SM_FRAMEWORK_PARAMS SM_CURRENT_INSTANCE_TYPE
    SM_CURRENT_INSTANCE_GROUP SM_CURRENT_INSTANCE_GROUP_HOSTS SM_INSTANCE_GROUPS
    SM_INSTANCE_GROUPS_DICT SM_DISTRIBUTION_INSTANCE_GROUPS SM_IS_HETERO
    CURRENT_HOST TRAINING_JOB_NAME SAGEMAKER_JOB_NAME
    SM_HOST_COUNT SM_CURRENT_HOST_RANK SM_MASTER_ADDR SM_MASTER_PORT
"""
# Every key of SM_TRAINING_ENV in ENVIRONMENT_VARIABLES.md.
DOCUMENTED_ENVIRONMENT = """
    channel_input_dirs current_host framework_module hosts hyperparameters input_config_dir
    input_data_config input_dir job_name log_level model_dir module_dir module_name
    network_interface_name num_cpus num_gpus output_data_dir output_dir resource_config
"""
PROGRAM = Program(
    command="python user_script.py",
    hyperparameters={
        "learning-rate": "0.0001",
        "batch-size": "256",
        "communicator": "pure_nccl",
        "flag": "true",
        "layers": '{"b": 2, "a": 1}',
        "x": "null",
    },
    channels=("training", "testing"),
)
HOST = ContainerHost(num_gpus=4, num_cpus=48, instance_type="g5.12xlarge")


@pytest.fixture
def variables() -> dict[str, str]:
    container = Container(root=Path("/opt/ml"))
    return container.variables(PROGRAM, HOST, "run-1", PROGRAM.channels)


def test_every_documented_variable_is_there(variables: dict[str, str]) -> None:
    assert [name for name in DOCUMENTED.split() if name not in variables] == []
    environment = json.loads(variables["SM_TRAINING_ENV"])
    assert [name for name in DOCUMENTED_ENVIRONMENT.split() if name not in environment] == []


def test_only_one_variable_is_ours(variables: dict[str, str]) -> None:
    of_hyperparameters = {f"SM_HP_{name.upper()}" for name in PROGRAM.hyperparameters}
    assert variables.keys() - {*DOCUMENTED.split(), *of_hyperparameters} == {"SM_CHECKPOINT_DIR"}


def test_variables_have_the_documented_form(variables: dict[str, str]) -> None:
    expected = {
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_CHANNELS": '["testing","training"]',
        "SM_CHANNEL_TRAINING": "/opt/ml/input/data/training",
        "SM_CHECKPOINT_DIR": "/opt/ml/checkpoints",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_OUTPUT_INTERMEDIATE_DIR": "/opt/ml/output/intermediate",
        "SM_INPUT_CONFIG_DIR": "/opt/ml/input/config",
        "SM_MODULE_DIR": "/opt/ml/code",
        "SM_MODULE_NAME": "user_script",
        "SM_USER_ENTRY_POINT": "user_script.py",
        "SM_NUM_GPUS": "4",
        "SM_NUM_CPUS": "48",
        "SM_HOSTS": '["algo-1"]',
        "SM_LOG_LEVEL": "20",
        "SM_CURRENT_INSTANCE_TYPE": "g5.12xlarge",
        "SM_HP_LEARNING-RATE": "0.0001",
        "SM_HP_BATCH-SIZE": "256",
        "SM_HP_COMMUNICATOR": "pure_nccl",
        "SM_HP_FLAG": "true",
        "SM_HP_X": "",
        "TRAINING_JOB_NAME": "run-1",
    }
    assert {name: variables[name] for name in expected} == expected


def test_hyperparameters_become_arguments_in_the_toolkits_order() -> None:
    assert command_arguments(PROGRAM.hyperparameters) == [
        *("--batch-size", "256", "--communicator", "pure_nccl", "--flag", "True"),
        *("--layers", "a=1,b=2", "--learning-rate", "0.0001", "-x", ""),
    ]


def test_the_folders_and_files_are_those_of_a_container(tmp_path: Path) -> None:
    for name in PROGRAM.channels:
        (tmp_path / "data" / name).mkdir(parents=True)
    container = Container(root=tmp_path / "ml")
    container.checkpoints.mkdir(parents=True)
    (container.checkpoints / "kept.pt").touch()
    container.model.mkdir()
    (container.model / "of_an_earlier_attempt").touch()
    container.prepare(PROGRAM, HOST, tmp_path / "data")
    below = {path.relative_to(container.root).as_posix() for path in container.root.rglob("*")}
    assert below == {
        *("input", "input/config", "input/data", "input/data/training", "input/data/testing"),
        *(f"input/config/{name}.json" for name in ("hyperparameters", "resourceconfig")),
        "input/config/inputdataconfig.json",
        *("checkpoints", "checkpoints/kept.pt", "model"),
        *("output", "output/data", "output/intermediate"),
    }
    hyperparameters = json.loads((container.config / "hyperparameters.json").read_text())
    # Strings, each the JSON of its value, as SageMaker's SDK sends them.
    assert all(isinstance(text, str) for text in hyperparameters.values())
    assert hyperparameters["communicator"] == '"pure_nccl"'
    assert json.loads(hyperparameters["batch-size"]) == 256
    inputs = json.loads((container.config / "inputdataconfig.json").read_text())
    assert inputs["training"] == {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }
    resources = json.loads((container.config / "resourceconfig.json").read_text())
    assert (resources["current_host"], resources["hosts"]) == ("algo-1", ["algo-1"])


def test_one_channel_is_the_whole_dataset_or_its_folder_of_that_name(tmp_path: Path) -> None:
    assert _channel_folders(["training"], tmp_path) == {"training": tmp_path}
    (tmp_path / "training").mkdir()
    assert _channel_folders(["training"], tmp_path) == {"training": tmp_path / "training"}


def test_fails_for_a_channel_that_the_dataset_lacks(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="no folder for the channel 'val'; its folders are train"):
        _channel_folders(["train", "val"], tmp_path)


def test_a_root_is_of_one_run_and_stays_so_where_its_program_has_filled_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claimed(tmp_path, "runs/one"):
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "thesis.txt").write_text("mine")
    with (
        pytest.raises(UserError, match="has files of runs/one, which this run would replace"),
        claimed(tmp_path, "runs/other"),
    ):
        pass

    def full(path: Path, data: bytes) -> None:
        raise StoreError(f"{path}: No space left on device")

    monkeypatch.setattr("training.durable.program.container.write_whole", full)
    with claimed(tmp_path, "runs/one"):
        assert (tmp_path / "checkpoints" / "thesis.txt").read_text() == "mine"
