# shellcheck shell=bash
# The tail of the launch template's user data, verbatim: fetches the bundle that the stack names in
# a parameter and starts its training-boot.service, which boots this machine now and after every
# restart. If that cannot start, nothing else of ours runs, so this script reports it and ends the
# machine itself.
set -o errexit -o nounset -o pipefail

root=${MACHINE_ROOT:-}
aws=$(command -v aws || echo "$root/opt/pytorch/bin/aws")

end_machine() {
    set +o errexit
    instance=$(cat "$root/var/lib/cloud/data/instance-id" || echo unknown)
    why="boot failed at fetch: ${lacks:-no boot started from ${BUNDLE_URI:-an unknown bundle}}; "
    why+="read /var/log/cloud-init-output.log on $instance"
    echo "[failed] machine $instance: $why"
    now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
    # A fleet of type maintain replaces what was terminated; the Guard counts these machines.
    until python3 "$root/etc/training/end_machine.py" "$instance" "$now" "$why"; do
        sleep "${TERMINATE_RETRY_SECONDS:-60}"
    done
    echo "[ok] machine $instance: EC2 terminates it"
}
trap end_machine EXIT

# First of all, as upgrades may be due at boot: the image's packages are kept, so none may replace
# the driver mid-run, and needrestart leaves our services alone whatever is installed by hand.
mkdir -p "$root/etc/apt/apt.conf.d" "$root/etc/needrestart/conf.d"
echo 'APT::Periodic::Enable "0";' >"$root/etc/apt/apt.conf.d/99-training.conf"
echo "\$nrconf{override_rc}{qr(^(training|interruption-handler))} = 0;" \
    >"$root/etc/needrestart/conf.d/training.conf"
mkdir -p "$root/opt/training" "$root/run/training" "$root/var/log/training"
: >"$root/run/training/boot-started"

set -o allexport
# shellcheck source=/dev/null
source "$root/etc/training/run.env"
set +o allexport
# The AWS CLI v1 of the AMI reads the region under this name only.
export AWS_DEFAULT_REGION="${AWS_REGION:?is missing in /etc/training/run.env}"
# By default, a single one-second try at the metadata decides that there are no credentials.
export AWS_METADATA_SERVICE_TIMEOUT=5 AWS_METADATA_SERVICE_NUM_ATTEMPTS=5

# lack TEXT: ends the machine, whose image lacks what every boot needs.
lack() {
    lacks="the image has $1; use a Deep Learning AMI with PyTorch (context pytorch_ami_parameter)"
    exit 1
}
command -v "$aws" >/dev/null || lack "no AWS CLI, neither aws on the PATH nor in /opt/pytorch/bin"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    lack "$(python3 --version), and the boot needs 3.11 or newer"

cd "$root/opt/training"
# Just after launch, the role's credentials or the network may not be available yet. A deploy of new
# code also changes the parameter a moment before the role.
attempts=${FETCH_ATTEMPTS:-6} seconds=2
parameter=${FLEET_PARAMETER:?is missing in /etc/training/run.env}
parameter=${parameter%/*}/bundle-uri
until BUNDLE_URI=$("$aws" ssm get-parameter --name "$parameter" --query Parameter.Value \
    --output text) && "$aws" s3 cp --only-show-errors "$BUNDLE_URI" bundle.zip; do
    ((attempts -= 1)) || exit 1
    echo "again in $seconds s"
    sleep $seconds
    ((seconds *= 2))
done
echo "BUNDLE_URI=$BUNDLE_URI" >>"$root/etc/training/run.env"
rm -rf bundle.new
python3 -m zipfile -e bundle.zip bundle.new
rm -rf bundle
mv bundle.new bundle
mkdir -p "$root/etc/systemd/system"
cp bundle/userdata/units/*.service "$root/etc/systemd/system/"
systemctl daemon-reload
systemctl enable training-boot.service
# --no-block, because a unit may be ordered after the user data.
systemctl start --no-block training-boot.service
# From here on, the unit's OnFailure= ends the machine, whatever kills its script.
trap - EXIT
