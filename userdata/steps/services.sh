#!/usr/bin/env bash
# Boot step: installs the bundle's units, starts those that send events and metrics, and sets the
# clocks of the GPUs.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

mkdir -p "$root/etc/systemd/system"
cp userdata/units/*.service "$root/etc/systemd/system/"
systemctl daemon-reload
systemctl enable --now training-events.service
systemctl enable --now training-metrics.service

# "Optimize GPU settings on Amazon EC2 instances": the highest clocks that the GPU supports, kept
# while no process uses it. A driver may refuse, at times with status 0, which costs only the gain.
smi="timeout 60 nvidia-smi"
clocks=$($smi --query-supported-clocks=memory,graphics --format=csv,noheader,nounits 2>/dev/null |
    sort --field-separator=, --key=1,1nr --key=2,2nr | sed --quiet '1s/ //gp') || clocks=
if [[ -n $clocks ]] && $smi --persistence-mode=1 >/dev/null &&
    said=$($smi --applications-clocks="$clocks" 2>&1) && [[ $said == *"clocks set to"* ]]; then
    echo "GPU clocks set to the highest supported: $clocks MHz (memory, graphics)"
elif [[ -n $clocks ]]; then
    echo "GPU clocks left as they are: ${said:-nvidia-smi refuses persistence mode}"
fi
echo "units installed, events go to $RUN_URI/events/, metrics to CloudWatch"
