# shellcheck shell=bash
# The tail of the launch template's user data, verbatim: fetches the bundle that a parameter names
# and starts its training-boot.service. If that cannot start, this reports it and ends the machine.
set -o errexit -o nounset -o pipefail
root=${MACHINE_ROOT:-} said=/dev/null
instance=$(cat "$root/var/lib/cloud/data/instance-id" || echo unknown)
aws=$(command -v aws || echo "$root/opt/pytorch/bin/aws")

end_machine() {
    set +o errexit
    why=${lacks:-no boot started from ${BUNDLE_URI:-an unknown bundle}: $(tail -n 1 "$said")}
    why="boot failed at fetch: $why; aws ec2 get-console-output --instance-id $instance says more"
    echo "[failed] machine $instance: $why"
    now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
    until python3 "$root/etc/training/end_machine.py" "$instance" "$now" "$why"; do
        sleep "${TERMINATE_RETRY_SECONDS:-60}"
    done
    echo "[ok] machine $instance: EC2 terminates it"
}
trap end_machine EXIT
boot=$root/etc/systemd/system/multi-user.target.wants/training-boot.service
# An image may have been made of a machine that has trained, and pass for that one.
if ! grep -sq "^INSTANCE_ID=$instance$" "$root/opt/training/machine.env"; then
    systemctl stop training{-boot,-events,-metrics,} interruption-handler 2>/dev/null || true
    rm -rf "$root/opt/training" "$root"/var/{lib,log}/training "$boot"
fi
# As upgrades may be due at boot: the image's packages are kept, so none may replace the driver
# mid-run, and needrestart leaves our services alone whatever is installed by hand.
mkdir -p "$root"/etc/{apt/apt.conf.d,needrestart/conf.d,systemd/system} \
    "$root"/{opt,run,var/log}/training "$root/var/lib/cloud/scripts/per-boot"
echo 'APT::Periodic::Enable "0";' >"$root/etc/apt/apt.conf.d/99-training.conf"
echo "\$nrconf{override_rc}{qr(^(training|interruption-handler))} = 0;" \
    >"$root/etc/needrestart/conf.d/training.conf"
: >"$root/run/training/boot-started"
# cloud-init runs user data once; after a power-off before the unit is enabled, this runs it again.
again=$root/var/lib/cloud/scripts/per-boot/training
printf '#!/bin/bash\n[[ -e "%s" ]] || exec "%s"\n' "$boot" "$0" >"$again"
chmod +x "$again" && sync "$again"
set -o allexport
# shellcheck source=/dev/null
source "$root/etc/training/run.env"
set +o allexport
# AWS CLI v1 reads the region only here, and by default asks the metadata once, for one second.
export AWS_DEFAULT_REGION="${AWS_REGION:?is missing in /etc/training/run.env}"
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
attempts=${FETCH_ATTEMPTS:-6} seconds=1
parameter=${FLEET_PARAMETER:?is missing in /etc/training/run.env}
parameter=${parameter%/*}/bundle-uri
said=$root/run/training/fetch-error
until BUNDLE_URI=$("$aws" ssm get-parameter --name "$parameter" --query Parameter.Value \
    --output text 2>"$said") && "$aws" s3 cp --only-show-errors "$BUNDLE_URI" bundle.zip 2>"$said"
do
    ((attempts -= 1)) || exit 1
    echo "$(<"$said"); again in $((seconds *= 2)) s"
    sleep $seconds
done
echo "BUNDLE_URI=$BUNDLE_URI" >>"$root/etc/training/run.env"
rm -rf bundle.new
python3 -m zipfile -e bundle.zip bundle.new
rm -rf bundle
mv bundle.new bundle
cp bundle/userdata/units/*.service "$root/etc/systemd/system/"
systemctl daemon-reload
sync -f . # what is enabled must be on the disk
systemctl enable training-boot.service
# --no-block, because a unit may be ordered after the user data.
systemctl start --no-block training-boot.service
# From here on, the unit's OnFailure= ends the machine, whatever kills its script.
trap - EXIT
