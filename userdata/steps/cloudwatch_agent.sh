#!/usr/bin/env bash
# Boot step: starts the CloudWatch agent with GPU, disk and memory metrics, if the image has it.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

program=amazon-cloudwatch-agent-ctl
agent=$(command -v "$program" || echo "$root/opt/aws/amazon-cloudwatch-agent/bin/$program")
if [[ ! -x $agent ]]; then
    echo "this image has no CloudWatch agent, so this machine has no GPU, memory or disk metrics"
    exit 0
fi
# The agent's global append_dimensions cannot add Stack, so each section does, except diskio: its
# EBS receiver takes no dimensions and is summed over the namespace, which is the stack's own.
sed "s|{stack}|$STACK_NAME|g; s|{mount}|$DATA_MOUNT|g" userdata/cloudwatch-agent.json \
    >"$root/opt/training/cloudwatch-agent.json"
"$agent" -a fetch-config -m ec2 -s -c "file:$root/opt/training/cloudwatch-agent.json"
echo "CloudWatch agent started for stack $STACK_NAME"
