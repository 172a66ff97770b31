# shellcheck shell=bash
# The tail of the launch template's user data, verbatim: fetches the bundle that run.env names and
# starts its bootstrap. It always fetches it, so it may run twice. If the bootstrap cannot start,
# nothing else of ours runs: this script then leaves the event and sends the fleet to zero itself.
set -o errexit -o nounset -o pipefail

root=${MACHINE_ROOT:-}
mkdir -p "$root/opt/training" "$root/run/training" "$root/var/log/training"
exec > >(tee -a "$root/var/log/training/boot.log") 2>&1
: >"$root/run/training/boot-started"
aws=$(command -v aws || echo "$root/opt/pytorch/bin/aws")

give_up() {
    instance=$(cat "$root/var/lib/cloud/data/instance-id" || echo unknown)
    why="no bootstrap started from ${BUNDLE_URI:-an unknown bundle}; read boot.log on $instance"
    echo "[failed] boot-fetch: $why"
    event='{"time": "%s", "instance_id": "%s", "name": "boot-fetch", '
    event+='"status": "failed", "message": "%s"}'
    # shellcheck disable=SC2059  # the format is the text above
    printf "$event" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$instance" "$why" |
        "$aws" s3 cp - "${RUN_URI:-}/events/$(date -u +%Y%m%dT%H%M%SZ)-$instance-boot-fetch.json" ||
        true
    fleet=$("$aws" ssm get-parameter --name "${FLEET_PARAMETER:-}" \
        --query Parameter.Value --output text)
    "$aws" ec2 modify-spot-fleet-request --spot-fleet-request-id "$fleet" \
        --target-capacity 0 --on-demand-target-capacity 0 >/dev/null
    echo "[ok] fleet $fleet to zero"
}
# Only exec leaves this script without the trap.
trap give_up EXIT

set -o allexport
# shellcheck source=/dev/null
source "$root/etc/training/run.env"
set +o allexport
# The AWS CLI v1 of the AMI reads the region under this name only.
export AWS_DEFAULT_REGION="${AWS_REGION:?is missing in /etc/training/run.env}"

cd "$root/opt/training"
# Just after launch the role's credentials or the network may not be available yet.
attempts=${FETCH_ATTEMPTS:-5}
: "${BUNDLE_URI:?is missing in /etc/training/run.env}"
until "$aws" s3 cp --only-show-errors "$BUNDLE_URI" bundle.zip; do
    ((attempts -= 1)) || exit 1
    sleep 2
done
rm -rf bundle.new
python3 -m zipfile -e bundle.zip bundle.new
rm -rf bundle
mv bundle.new bundle
exec bash bundle/userdata/bootstrap.sh
