#!/usr/bin/env bash
# Boot step: keeps the bundle with the run, for its replacements. After another deploy, instances
# may read only that deploy's bundle, and `cdk gc` deletes the others.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

kept=$(kept_bundle)
if [[ $(json_field "$run/config.json" bundle_uri) != "$kept" ]]; then
    aws_cli s3 cp --only-show-errors "$root/opt/training/bundle.zip" "$kept"
fi
echo "$kept"
