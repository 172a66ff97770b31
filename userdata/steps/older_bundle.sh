#!/usr/bin/env bash
# Boot step: fetches the bundle that the run started with. A run keeps the code of its first
# attempt, whatever the launch template says now. Usage: older_bundle.sh BUNDLE_URI
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

folder=$root/opt/training
aws_cli s3 cp --only-show-errors "$1" "$folder/bundle.zip"
sed "s|^BUNDLE_URI=.*|BUNDLE_URI=$1|" "$root/etc/training/run.env" >"$run/run.env"
# An older bundle refuses what the launch template has gained since.
python3 -m userdata.older_bundle "$run/run.env" "$folder/bundle.zip"
rm -rf "$folder/bundle.new"
python3 -m zipfile -e "$folder/bundle.zip" "$folder/bundle.new"
mv "$run/run.env" "$folder/bundle.new/run.env"
cp userdata/swap.sh "$folder/bundle.new/swap.sh"
sync -f "$folder"
# From here on, a power-off changes nothing: if it is still there, the next boot takes it over.
mv "$folder/bundle.new" "$folder/bundle.next"
echo "run $RUN_ID continues with the bundle it started with: $1"
