#!/usr/bin/env bash
# Alongside the boot steps: reads ahead what the first machine of this image read to import torch.
# It is not a step itself: nothing waits for it, and a failure costs only the time saved.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

list=$run/reads.json

# find_list: fetches the list that the first machine of this image left, if it exists.
find_list() {
    local image
    image=$(python3 -c '
from userdata.metadata import InstanceMetadata
print(InstanceMetadata().read("meta-data/ami-id"))') || return
    echo "${RUN_URI%/runs/*}/artifacts/reads/$image.json" >"$run/reads-uri"
    fetch_object "$(<"$run/reads-uri")" "$list"
}

: >"$run/read-ahead-begun"
if ! said=$(find_list 2>&1); then
    said="what an earlier machine has read is unknown: ${said##*$'\n'}"
elif [[ ! -e $list ]]; then
    said="no machine of this image has recorded what it reads"
else
    said=$(python3 -m userdata.read_ahead "$list" 2>&1) || true
fi
echo "     read-ahead: $said"
python3 -m userdata.events boot-read-ahead info --since "$run/read-ahead-begun" --message "$said"
