#!/usr/bin/env bash
# Beside the boot's steps: reads ahead what the first machine of this image has read of torch. It is
# no step of its own: nothing waits for it, and whatever goes wrong with it costs only the gain.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

list=$run/reads.json

# find_list: fetches what the first machine of this image has left, if there is one.
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
    said="what an earlier machine has read is not known: ${said##*$'\n'}"
elif [[ ! -e $list ]]; then
    said="no machine of this image has recorded what it reads"
else
    said=$(python3 -m userdata.read_ahead "$list" 2>&1) || true
fi
echo "     read-ahead: $said"
python3 -m userdata.events boot-read-ahead info --since "$run/read-ahead-begun" --message "$said"
