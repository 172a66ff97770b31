#!/usr/bin/env bash
# wandb 0.31.0: where SageMaker's variables are set, wandb.init(id="mine", resume="allow") ignores the
# id and makes a random one, so each start is a run of its own. WANDB_RUN_ID in the environment
# counts, and so does Settings(sagemaker_disable=True).
# Seen: id given mine, got job-1-<six letters>-algo-1, twice another.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    wandb==0.31.0
cd "$folder"
export HOME=$folder WANDB_MODE=offline WANDB_SILENT=true
start() { "$folder/venv/bin/python" -c "import wandb; run = wandb.init(project='p', id='mine', resume='allow'); print(run.id); run.finish()"; }
alone=$(start)
export TRAINING_JOB_NAME=job-1 CURRENT_HOST=algo-1 SM_TRAINING_ENV='{}'
first=$(start) second=$(start) named=$(WANDB_RUN_ID=mine start)
echo "alone $alone, in SageMaker's environment $first, then $second, with WANDB_RUN_ID $named"
[[ $alone == mine && $named == mine && $first == job-1-*-algo-1 && $first != "$second" ]]
